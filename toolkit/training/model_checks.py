"""Checks that a folder holds a causal LM, with the weights that its config describes.

`from_pretrained` builds the model of the config, drops weights that have no place in it, and
initializes missing weights at random: a model with fewer layers or another head trains without an
error. Names and shapes are compared before any weight is loaded, on the meta device.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from toolkit.backends import backend_of
from toolkit.errors import UnfitModelError, UsageError, sentence_of
from toolkit.strategies import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SHOWN: Final = 4
"""Weights that an error names; the rest are counted."""

TASKS: Final = {
    "ForMaskedLM": "a masked language model",
    "ForPreTraining": "a model for pre-training",
    "ForSequenceClassification": "a sequence classifier",
    "ForTokenClassification": "a token classifier",
    "ForQuestionAnswering": "a model that marks answers",
    "ForMultipleChoice": "a model for multiple choice",
    "ForImageClassification": "an image classifier",
}

LOOKS_AHEAD: Final = {"bert-generation", "cpmant", "xlnet"}
"""Families whose attention sees later tokens, though they have no masked language model."""

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json.

    Raises:
        UsageError: it is missing, or no JSON object.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        problem = _wrong_in(config)
    except (OSError, ValueError, RecursionError) as error:
        problem = sentence_of(error)
    if problem is not None:
        raise UsageError(f"{folder} has no readable config.json, so it is not a model: {problem}")
    return config


def count_parameters(folder: Path) -> int | None:
    """Return the number of parameters in the safetensors files; None where there are no files.

    Raises:
        UsageError: a file is cut off or damaged.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    total = 0
    for path in files:
        try:
            with safe_open(path, "numpy") as tensors:
                names = tensors.keys()
                shapes = [tensors.get_slice(name).get_shape() for name in names]
        except (OSError, SafetensorError) as error:
            raise UsageError(
                f"{path} is damaged, or was not downloaded whole: {sentence_of(error)} Download or "
                "save the model again."
            ) from error
        total += sum(map(math.prod, shapes))
    return total if files else None


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights, in one of the formats that `from_pretrained` reads."""
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))


def check_split(
    folder: str, strategy: Strategy, num_processes: int, *, trust_remote_code: bool = False
) -> None:
    """Check that the model in a folder can be split as the strategy asks.

    Raises:
        UnfitModelError: it has no plan for that, or sizes that don't divide.
    """
    backend = backend_of(strategy)
    if not backend.splits_matrices:
        return
    from transformers import AutoConfig

    from toolkit.engines.tensor_parallel import plan_problem

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    # Nothing is sharded beside the tensor groups of a pipeline.
    groups = max(1, num_processes // strategy.tensor) if not backend.in_stages else 1
    shards = groups // strategy.on_ranks(num_processes).replicas
    if problem := plan_problem(config, strategy.tensor, shards):
        raise UnfitModelError(
            f"{strategy.name} can't split the model in {folder}: {problem}. Use fsdp or zero3."
        )


def _wrong_in(config: Any) -> str | None:
    """Name the first config field of a type that the toolkit can't read; None: all are right."""
    if not isinstance(config, dict):
        return "it holds no object."
    for name in ("text_config", "quantization_config", "auto_map"):
        if not isinstance(config.get(name), dict | None):
            return f"its {name} is no object."
    names = config.get("architectures")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(n, str) for n in names)
    ):
        return "its architectures are no list of names."
    return None


def check_loadable(folder: str | Path, *, trust_remote_code: bool = False) -> None:
    """Check that a folder holds a causal LM, and that its weights are those of its config.

    Raises:
        UsageError: it holds another kind of model, such as an encoder; or weights are missing,
            left over or of another shape.
    """
    from transformers import AutoConfig

    folder = Path(folder)
    with _any_error_named(folder):
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        _refuse_other_tasks(folder, config, trust_remote_code)
        _refuse_looking_ahead(folder, config)
        if "quantization_config" in read_config(folder):  # packed weights have shapes of their own
            return
        model, report = _matched(folder, trust_remote_code)
    findings = list(_findings(model, report))
    if findings:
        raise UsageError(
            f"The weights in {folder} are not those of the model in its config.json: "
            f"{'; '.join(findings)}. Download or save the model again, or correct config.json."
        )


@contextmanager
def _any_error_named(folder: Path) -> Iterator[None]:
    """Turn every error that a model's files cause into a UsageError.

    Any class of error: with wrong types in its config, the model's code fails at any line.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise UsageError(
            f"No causal LM can be loaded from {folder}: {kind}{sentence_of(error)}"
        ) from error


def _refuse_other_tasks(folder: Path, config: PreTrainedConfig, trust_remote_code: bool) -> None:
    import transformers
    from transformers.models.auto import modeling_auto

    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    family = config.model_type
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family)
    name = next(iter(config.architectures or ()), None)
    task = next((task for end, task in TASKS.items() if (name or "").endswith(end)), None)
    if config.is_encoder_decoder:
        task = "an encoder-decoder"
    # A name of the base model is accepted: the weights show whether there is a head. Generators of
    # text from images and text are causal LMs. Names that transformers does not know are older
    # names in the same family.
    accepted = {causal, modeling_auto.MODEL_MAPPING_NAMES.get(family)}
    is_other = hasattr(transformers, name or "") and name not in accepted
    if causal is None or task or (is_other and not str(name).endswith("ForConditionalGeneration")):
        raise UsageError(
            f"{folder} holds {name or family}, {task or 'which is no causal LM'}, and the toolkit "
            "trains causal LMs alone: its weights were made for something else, and a head for "
            "tokens would be new and random. Pass a causal LM, whose config.json names a class "
            "such as LlamaForCausalLM."
        )


def _refuse_looking_ahead(folder: Path, config: PreTrainedConfig) -> None:
    """Raise UsageError for a model whose attention sees the tokens it has to predict."""
    from transformers.models.auto import modeling_auto

    text = config.get_text_config(decoder=True)
    is_encoder = text.model_type in LOOKS_AHEAD or (
        text.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        and text.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    # XLM's own name for it is `causal`.
    decodes = getattr(text, "is_decoder", False) or getattr(text, "causal", False)
    both_ways = getattr(text, "use_bidirectional_attention", None) in (True, "all")
    if both_ways or not getattr(text, "is_causal", True):
        kind, remedy = "whose config.json turns on attention in both directions", ""
    elif is_encoder and not decodes:
        kind = "an encoder"
        remedy = ', or set "is_decoder": true in its config.json to make it one'
    else:
        return
    name = next(iter(config.architectures or ()), config.model_type)
    raise UsageError(
        f"{folder} holds {name}, {kind}: each token sees those after it, so as a causal LM it "
        f"would learn to copy them. Pass a decoder, such as a Llama, Qwen or GPT-2{remedy}."
    )


def _matched(folder: Path, trust_remote_code: bool) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Return the model without weights, and how its names and shapes match the files."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from toolkit.engines.loading import outside_of_engines

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # the same findings, as warnings
    logging.disable_progress_bar()
    try:
        with outside_of_engines():
            # Returns a pair with `output_loading_info`; transformers 5.23 annotates only a model.
            matched: Any = AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype="auto",
                device_map="meta",
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
            return matched
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _findings(model: PreTrainedModel, report: Mapping[str, Any]) -> Iterator[str]:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    missing = sorted(names & set(report["missing_keys"]))
    if missing:
        yield f"{_listed(missing)} are missing, and would be new and random"
    reshaped = [
        f"{name} ({list(in_files)} where the config says {list(in_config)})"
        for name, in_files, in_config in sorted(report["mismatched_keys"])
    ]
    if reshaped:
        yield f"{_listed(reshaped)} have another shape"
    # The files of a base model lack the prefix that its weights have in this model.
    names |= {name.removeprefix(f"{model.base_model_prefix}.") for name in names}
    left_out = sorted(_left_out(report["unexpected_keys"], names))
    if left_out:
        yield f"{_listed(left_out)} have no place in it, and would be left out"


def _left_out(unexpected: Sequence[str], names: set[str]) -> Iterator[str]:
    """Yield weights of the files that should be in this model and are not.

    These are weights of layers like its own, and of a module that it has. Heads for other tasks,
    buffers of older versions and layers of another kind are rightly left out.
    """
    patterns = {_NUMBER.sub("*", name) for name in names}
    modules = {name.rpartition(".")[0] for name in names}
    by_layer: dict[str, list[str]] = {}
    for name in unexpected:
        if name.rpartition(".")[0] in modules:
            yield name
        elif number := _NUMBER.search(name):
            by_layer.setdefault(name[: number.end()], []).append(name)
    for weights in by_layer.values():
        if {_NUMBER.sub("*", name) for name in weights} <= patterns:
            yield from weights


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
