"""The training method for one model (full, lora, qlora), checked before anything is loaded.

Layers that get adapters are found in a model on the meta device: it has the same classes, and no
memory for weights.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.backends import backend_of
from toolkit.environment import check_installed
from toolkit.errors import UsageError, sentence_of
from toolkit.planning.levers import MOST_UNPACKED
from toolkit.strategies import COMPUTE_DTYPES
from toolkit.training.arguments import ModelArguments
from toolkit.training.method_arguments import ALL_LINEAR, MethodArguments
from toolkit.training.model_checks import read_config
from toolkit.training.quantized import check_bitsandbytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from toolkit.strategies import Strategy
    from toolkit.training.model import ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """The weights that are trained, and the dtypes in which all of them are loaded."""

    arguments: MethodArguments
    dtype: str
    """The dtype that weights are loaded in; adapters are in fp32."""

    storage: str | None
    """The dtype that 4-bit weights are stored in; None where there are none."""

    layers: tuple[str, ...]
    """Names of the layers with adapters."""

    embeddings: tuple[str, ...]
    """Names of the input embeddings and the output head, if they are trained beside adapters."""

    trained_parameters: int | None
    """Number of trained parameters; None if a fully trained model has no safetensors files."""

    base_model: str
    """The model that a saved adapter names: a Hub name, or an absolute path."""

    base_revision: str | None

    fused_experts: float = 0.0
    """Part of the weights beside embeddings and head, 0 to 1, that fused experts hold: they are no
    linear layers, so they get no adapters and are not packed."""

    @property
    def trained_dtype(self) -> str:
        """The dtype that trained weights are loaded in."""
        return self.dtype if self.arguments.is_full else "float32"

    def facts(self) -> dict[str, Any]:
        """The fields of a record's `training`."""
        return self.arguments.facts() | {
            "dtype": self.dtype,
            "quant_storage": self.storage,
            "fused_experts": round(self.fused_experts, 4) if self.fused_experts else None,
        }

    def notes(self) -> list[str]:
        """Return notes for the user, before anything is loaded."""
        if not self.fused_experts:
            return []
        treatment = "no adapters" if self.storage is None else "no adapters, and stay unpacked"
        return [
            f"--method {self.arguments.method}: the fused experts, {self.fused_experts:.0%} of the "
            f"weights beside embeddings and head, are no linear layers: they get {treatment}"
        ]


def checked_method(
    arguments: MethodArguments, model: ModelArguments, facts: ModelFacts, *, precision: str
) -> Method:
    """Return the method for a model that computes in `precision`: `no` (fp32), `bf16` or `fp16`.

    Raises:
        UsageError: the method doesn't fit the model, or the dtypes don't fit each other.
    """
    folder, computed = Path(facts.path), COMPUTE_DTYPES[precision]
    # Trained weights take steps in fp32. Frozen weights take no step, so they are loaded in the
    # dtype of the computation.
    dtype = model.dtype or ("float32" if arguments.is_full else computed)
    _refuse_quantised(folder)
    layers: dict[str, int] = {}
    embeddings: dict[str, Any] = {}
    fused = 0.0
    if not arguments.is_full:
        check_installed("peft")
        if precision != "no" and dtype not in ("float32", computed):
            raise UsageError(
                f"--dtype {dtype} and computing in {computed} don't go together with --method "
                f"{arguments.method}. Leave --dtype out, or pass {computed} or float32."
            )
        bare_model = meta_model(folder, trust_remote_code=model.trust_remote_code)
        layers, fused = adapted_layers(bare_model, arguments), fused_share(bare_model)
        if fused:
            _refuse_names_of_experts(bare_model, list(layers))
        if arguments.lora_embeddings:
            embeddings = embeddings_of(bare_model)
        if arguments.method == "qlora":
            if fused > MOST_UNPACKED:
                raise UsageError(
                    f"--method qlora would leave {fused:.0%} of the weights of "
                    f"{type(bare_model).__name__} (beside embeddings and head) as they are: its "
                    "experts are fused into single tensors, and bitsandbytes packs linear layers "
                    "only. Pass --method lora, or a model without experts."
                )
            check_bitsandbytes()
    name = model.model_name_or_path
    # Otherwise it is a Hub name, and the folder is a snapshot in this machine's Hub cache.
    is_local = name is None or Path(name).expanduser().is_dir()
    return Method(
        arguments=arguments,
        dtype=dtype,
        storage=(dtype if precision == "no" else computed) if arguments.method == "qlora" else None,
        layers=tuple(layers),
        embeddings=tuple(embeddings),
        trained_parameters=facts.parameters
        if arguments.is_full
        else sum(layers.values()) + _parameters_of(embeddings.values()),
        # Absolute: a saved adapter is loaded from any current folder.
        base_model=str(folder.absolute()) if is_local else str(name),
        base_revision=None if is_local else model.model_revision,
        fused_experts=fused,
    )


def check_strategy(method: Method, strategy: Strategy, *, precision: str) -> None:
    """Check that a strategy can hold the weights that the method leaves frozen.

    Raises:
        UsageError: it can't.
    """
    if not method.arguments.is_full and backend_of(strategy).splits_matrices:
        raise UsageError(
            f"--method {method.arguments.method} attaches adapters to whole matrices, and "
            f"{strategy.name} splits them. Use fsdp, zero3 or ddp, or --method full."
        )
    if method.arguments.is_full or not backend_of(strategy).reads_json:
        return
    if precision == "no" and method.dtype != "float32":
        raise UsageError(
            f"{strategy.name} computes in fp32 with weights in fp32 only, frozen ones as well, and "
            f"--dtype {method.dtype} loads others. Leave it out, or pass --bf16 or --fp16."
        )


def meta_model(folder: str | Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the model in `folder` on the meta device: every layer, and no weights.

    Raises:
        UsageError: the folder holds no causal LM.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit.engines.loading import outside_of_engines

    options = {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(str(folder), **options)
        # In a rank of ZeRO-3, transformers would partition the weights, which do not exist.
        with outside_of_engines(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, **options)
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} holds no causal LM: {sentence_of(error)}") from error


def adapted_layers(model: PreTrainedModel, arguments: MethodArguments) -> dict[str, int]:
    """Return the layers that get adapters, with the number of parameters of each adapter.

    Raises:
        UsageError: a name is no linear layer's, or only the output head's.
    """
    linear = _linear_layers(model)
    targets = arguments.lora_target_modules
    chosen = list(linear)
    if targets != [ALL_LINEAR]:
        _refuse_unknown(model, linear, targets)
        chosen = [name for name in linear if any(_matches(name, target) for target in targets)]
    if not chosen:
        raise UsageError(
            f"{type(model).__name__} has no linear layers beside its head, so there is nothing "
            "to put adapters on. Pass --method full."
        )
    return {name: arguments.lora_r * sum(linear[name]) for name in chosen}


def embeddings_of(model: Any) -> dict[str, Any]:
    """Return the input embeddings and the output head of a model, by name; tied ones are two."""
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    return {name: module for name, module in model.named_modules() if id(module) in ends}


def _parameters_of(modules: Iterable[Any]) -> int:
    """Return the number of parameters of modules, each counted once."""
    every = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    return sum(parameter.numel() for parameter in every.values())


def fused_share(model: PreTrainedModel) -> float:
    """Return the share of fused experts in the weights without embeddings and head, 0 to 1.

    transformers 5.23 keeps the matrices of all experts of a layer in tensors of three dimensions.
    """
    from torch.nn import modules

    ends = embeddings_of(model).values()
    outside = {id(parameter) for module in ends for parameter in module.parameters()}
    fused = total = 0
    for module in model.modules():
        is_convolution = isinstance(module, modules.conv._ConvNd)
        for parameter in module.parameters(recurse=False):
            if id(parameter) in outside:
                continue
            total += parameter.numel()
            if parameter.ndim > 2 and not is_convolution:
                fused += parameter.numel()
    return fused / total if total else 0.0


def _linear_layers(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of every linear layer but the output head, by name."""
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    sizes: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if module is head:
            continue
        if isinstance(module, Linear):
            sizes[name] = (module.in_features, module.out_features)
        elif isinstance(module, Conv1D):  # of GPT-2 and its like
            sizes[name] = (module.nx, module.nf)
    return sizes


def _matches(name: str, target: str) -> bool:
    """Whether peft takes a layer for the target: by its whole name, or its last parts."""
    return name == target or name.endswith(f".{target}")


def _refuse_unknown(model: PreTrainedModel, linear: Mapping[str, Any], targets: list[str]) -> None:
    """Raise UsageError naming all targets that are no linear layer, with similar names."""
    known = sorted({name.rpartition(".")[2] for name in linear})
    head = model.get_output_embeddings()
    findings: list[str] = []
    for target in targets:
        modules = {name: part for name, part in model.named_modules() if _matches(name, target)}
        if modules.keys() & linear.keys():
            continue
        if any(module is head for module in modules.values()):
            findings.append(f"{target} is the output head, which gets no adapter")
        elif modules:
            findings.append(f"{target} is no linear layer with weights of its own")
        else:
            near = difflib.get_close_matches(target, known, n=2)
            hint = f" (near: {', '.join(near)})" if near else ""
            findings.append(f"{target} is no layer of {type(model).__name__}{hint}")
    if findings:
        raise UsageError(
            f"--lora_target_modules: {'; '.join(findings)}. Its linear layers are "
            f"{', '.join(known)}; {ALL_LINEAR} means all of them."
        )


def _refuse_names_of_experts(model: PreTrainedModel, layers: list[str]) -> None:
    """Raise UsageError where peft would adapt fused experts in place of the layers that are named.

    To load adapters from the time of transformers 4, peft 0.20 and 0.21 take the last part of a
    name, as `gate_proj`, for that of the experts, which are fused now. Dense layers beside them
    have the same names. tests/training/test_adapters.py fails when this changes.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    from transformers.conversion_mapping import get_model_conversion_mapping

    config = LoraConfig(target_modules=layers)
    try:
        conversions = get_model_conversion_mapping(model)
        convert_peft_config_for_transformers(config, model=model, conversions=conversions)
        kept = {name.rpartition(".")[2] for name in config.target_modules or ()}
    except ValueError:  # some of the names of an expert's matrices, and not all
        kept = set[str]()
    names = {name.rpartition(".")[2] for name in layers}
    if names <= kept:
        return
    others = sorted(names & kept) or ["q_proj", "v_proj"]
    raise UsageError(
        f"{type(model).__name__} has fused experts, and peft takes the names of some of its other "
        f"layers ({', '.join(sorted(names - kept))}) for theirs. Leave these without adapters: "
        f"--lora_target_modules {' '.join(others)}."
    )


def _refuse_quantised(folder: Path) -> None:
    quantization = read_config(folder).get("quantization_config")
    if quantization is not None:
        kind = quantization.get("quant_method", "by a method that config.json does not name")
        raise UsageError(
            f"The weights in {folder} are quantised already ({kind}), and no strategy here trains "
            "or shards such a checkpoint. Pass the model that it was made from; --method qlora "
            "packs that in 4 bits as it loads it."
        )
