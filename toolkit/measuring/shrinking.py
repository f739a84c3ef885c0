"""A small model of the same architecture, in place of each large one that a script loads.

Widths, heads, experts and layers become few; vocabulary, special tokens and positions stay, so that
the script's tokenizer and data fit. Of layers that differ, one of each kind stays. No family has a
rule of its own: a size is known by the name that configs have for it, and a forward proves that the
sizes fit each other.

The small model lies in a folder, and `from_pretrained` reads that one: dtype, quantization,
placement and sharding are the script's and the library's, as with the large one.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from safetensors.torch import save_model
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import SAFE_WEIGHTS_NAME

from toolkit import environment
from toolkit.engines.hooks import replace_method
from toolkit.engines.loading import outside_of_engines
from toolkit.errors import UsageError
from toolkit.launching.ranks import local_rank, say
from toolkit.measuring.meta_model import Unfilled

LARGEST: Final = 40_000_000
"""Parameters of the largest small model."""

LARGEST_WIDE: Final = 160_000_000
"""The same where the widths had to be kept."""

OF_A_PARAMETER: Final = 16
"""Bytes of a trained parameter in fp32: itself, its gradient, and AdamW's two states."""

FEW: Final = 2
MOST: Final = 8
"""Layers of a model whose layers are alike, and of one with many kinds."""

WIDTH: Final = 64
HEADS: Final = 4
HEAD: Final = 16

SIZES: Final[dict[str, int]] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_dim"), WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "emb_dim", "input_embedding_size"), WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("swa_num_attention_heads", "num_global_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "kv_channels", "v_head_dim"), HEAD),
    **dict.fromkeys(("global_head_dim", "swa_head_dim", "swa_v_head_dim", "qk_head_dim"), HEAD),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner"), 2 * WIDTH),
    **dict.fromkeys(("decoder_ffn_dim", "intermediate_size_mlp", "block_ffn_dim"), 2 * WIDTH),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), HEAD),
    "rotary_dim": HEAD,
    # Mixtures of experts.
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "num_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k"), 2),
    **dict.fromkeys(("num_experts_per_token", "num_experts_per_topk", "moe_top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), WIDTH),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), WIDTH),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_latent_size"), WIDTH),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts"), 1),
    "zero_expert_num": 2,
    # Projections of low rank.
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "index_head_dim"), HEAD),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), HEAD),
    "index_n_heads": HEADS,
    # Layers that keep a state.
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), HEADS),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), HEADS),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), HEAD),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 1),
    **dict.fromkeys(("mamba_d_ssm", "mamba_intermediate_size"), 2 * WIDTH),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("lru_width",), WIDTH),
    "attention_hidden_size": 2 * WIDTH,
    "attention_head_dim": 2 * HEAD,
    # Images and sounds beside the text.
    **dict.fromkeys(("depth", "out_hidden_size"), WIDTH),
    "num_kv_shared_layers": 0,
    "num_nextn_predict_layers": 0,
}
"""Largest sizes of a small model by the names that configs have for them."""

KEY_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_kv_heads_global")
"""Names for heads of keys and values: as many as of queries, one, or half as many, as it was."""

GROUPED: Final = HEADS // 2

STATE_HEADS: Final = {
    "mamba_n_heads": "mamba_d_head",
    "mamba_num_heads": "mamba_head_dim",
    "n_mamba_heads": "mamba_headdim",
    "num_heads": "head_dim",
}
"""Names for the number and the size of heads that keep a state, which fill the width of it."""

STARTS: Final = ("first_k_dense_replace", "max_window_layers", "num_dense_layers")
"""Names of numbers of layers at the beginning that differ from those after them."""

PERIODS: Final = ("_period", "_interval", "_step", "_freq", "sliding_window_pattern")
OFFSETS: Final = ("_offset",)


OF_A_LOGIT: Final = 3 * 4
"""Bytes: in fp32 the logit, its probability and its gradient."""

SEED: Final = 0
"""Of the small model's weights, which are random."""

STORED: Final = "quantization_config"


def most_parameters(ranks: int, *, rehearsal: bool) -> int:
    """Return the parameters of the largest model that is trained here as it is.

    One process must hold it in fp32, with gradients and AdamW's states, and so must each rank of a
    rehearsal. It is the same number in all ranks and runs of a machine.
    """
    if rehearsal or not torch.cuda.is_available():
        return environment.memory_bytes() // (2 * OF_A_PARAMETER * ranks)
    return torch.cuda.get_device_properties(0).total_memory // OF_A_PARAMETER


@contextmanager
def shrinking(
    folder: Path, *, only_above: int | None = None, keep: bool = False
) -> Iterator[SmallModels]:
    """Give the script a small model wherever it loads or makes a causal LM that is large.

    Args:
        folder: Of this rank alone; the small models lie in it.
        only_above: Parameters up to which a model stays as it is, where nobody asked for a small
            one; None: those of the largest small model.
        keep: Whether the folder stays: a saved adapter names it as its base.

    Raises:
        UsageError: within, no small model can be made of one, or not as the script loads it.
    """
    load, make = PreTrainedModel.from_pretrained.__func__, PreTrainedModel._from_config.__func__

    inside: list[Any] = []
    """What is being made: models inside of it are made as they are."""

    @contextmanager
    def making(cls: Any) -> Iterator[None]:
        inside.append(cls)
        try:
            yield
        finally:
            inside.pop()

    def empty(cls: Any, config: PreTrainedConfig) -> Any:
        with outside_of_engines(), making(cls), torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return make(cls, copy.deepcopy(config), dtype=torch.float32)

    small_models = SmallModels(folder, empty, only_above)

    def from_pretrained(cls: Any, name: Any, *arguments: Any, **options: Any) -> Any:
        path = None if inside else small_models.path_of(cls, name, options)
        if path is not None:
            name = path
            options = {key: value for key, value in options.items() if key not in OF_THE_HUB}
        with making(cls):
            return load(cls, name, *arguments, **options)

    def from_config(cls: Any, config: Any, **options: Any) -> Any:
        small = None if inside else small_models.small_of(cls, config)[0]
        with making(cls):
            return make(cls, small or config, **options)

    undo = [
        replace_method(PreTrainedModel, "from_pretrained", classmethod(from_pretrained)),
        # 5.24; AutoModelForCausalLM.from_config ends here. tests/measuring/test_shrinking.py
        replace_method(PreTrainedModel, "_from_config", classmethod(from_config)),
    ]
    try:
        yield small_models
    finally:
        for back in undo:
            back()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


OF_THE_HUB: Final = (
    *("config", "revision", "subfolder", "variant", "force_download", "local_files_only"),
    *("use_safetensors", "token", "cache_dir", "_commit_hash", "code_revision"),
)
"""Options of `from_pretrained` that say where the large model lies."""


class SmallModels:
    """The small models of one rank, each in a folder that is made when it is needed."""

    def __init__(
        self, folder: Path, make: Callable[[Any, Any], Any], only_above: int | None = None
    ) -> None:
        """Take a folder for the models, and a function from a class and a config to a model."""
        self._folder, self._make, self._only_above = folder, make, only_above
        self._paths: dict[str, str | None] = {}
        self._vocabulary = 0

    def most_tokens(self) -> int | None:
        """Return the most tokens of a micro-batch whose logits fit into half of the free RAM.

        None as long as no small model was made.
        """
        if not self._vocabulary:
            return None
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        free = psutil.virtual_memory().available // (2 * ranks)
        return max(1, free // (OF_A_LOGIT * self._vocabulary))

    def path_of(self, cls: Any, name: Any, options: Mapping[str, Any]) -> str | None:
        """Return the folder of a small model; None where the named one is small, or no causal LM.

        Args:
            cls: The model's class.
            name: As in `cls.from_pretrained(name, **options)`.
        """
        if (options.get("adapter_kwargs") or {}).get("_adapter_model_path"):
            if self._only_above is not None:
                return None
            raise UsageError(
                f"{name} is an adapter, whose weights fit its large model alone: name the model it "
                "was made for, or leave out --shrink."
            )
        config = options.get("config")
        where = {key: options[key] for key in OF_THE_HUB[1:] if key in options}
        if not isinstance(config, PreTrainedConfig):
            config = cls.config_class.from_pretrained(config or name, **where)
        key = f"{cls.__name__} {name} {where}"
        if key not in self._paths:
            small, model = self.small_of(cls, config, name=str(name))
            if small is not None and options.get("gguf_file"):
                raise UsageError(f"{name}: a GGUF file can't be made small. Leave out --shrink.")
            made = self._folder / str(len(self._paths))
            self._paths[key] = None if small is None else _saved(model, small, made, name, where)
        return self._paths[key]

    def small_of(self, cls: Any, config: PreTrainedConfig, name: str = "") -> tuple[Any, Any]:
        """Return the config of a small model, and the model; Nones where none is needed.

        That is where the model is small as it is, or no causal LM.
        """
        if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return None, None
        make = partial(self._make, cls)
        number = _parameters(make, config)
        if number <= max(LARGEST, self._only_above or 0):
            return None, None
        if getattr(config, STORED, None) is not None:
            raise UsageError(
                f"{name or config.model_type}: its weights are stored quantized "
                f"({STORED} in config.json), and random ones can't be. Leave out --shrink, or name "
                "the model that it was made from."
            )
        small, model = shrink(config, make)
        self._vocabulary = max(self._vocabulary, _size(small, "vocab_size"))
        if local_rank() == 0:
            layers, width = (_size(config, key) for key in ("num_hidden_layers", "hidden_size"))
            few, narrow = (_size(small, key) for key in ("num_hidden_layers", "hidden_size"))
            say(
                f"--shrink: {name or config.model_type} has {number:,} parameters"
                f"{', too many to train here as it is' if self._only_above else ''}; trained is a "
                f"random model of its architecture with {_number(model):,}: {few} of "
                f"{layers} layers, hidden size {narrow} of {width}"
            )
        return small, model


def _saved(model: Any, config: Any, folder: Path, name: Any, where: Mapping[str, Any]) -> str:
    """Save a random model, with the generation settings of the one it stands for."""
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    save_model(model.to(dtype), str(folder / SAFE_WEIGHTS_NAME), metadata={"format": "pt"})
    with contextlib.suppress(OSError):  # it has none
        GenerationConfig.from_pretrained(name, **where).save_pretrained(folder)
    return str(folder)


def _size(config: PreTrainedConfig, name: str) -> Any:
    return getattr(config.get_text_config(decoder=True), name, "?")


def shrink(config: PreTrainedConfig, make: Callable[[Any], Any]) -> tuple[PreTrainedConfig, Any]:
    """Return the config of a small model of the same architecture, and the model.

    Args:
        config: Of a causal LM; not changed.
        make: Returns a model of a config, in fp32.

    Raises:
        UsageError: no small model of it can be made.
    """
    problems: list[str] = []
    for narrow, largest in ((True, LARGEST), (False, LARGEST_WIDE)):
        try:
            small = type(config).from_dict(small_sizes(config.to_dict(), narrow=narrow))
            number = _parameters(make, small)
            if number <= largest:
                model = make(small)
                _try(model)
                return small, model
        except Exception as error:  # any: each family checks its sizes in its own way
            problems.append(f"{type(error).__name__}: {error}".splitlines()[0])
        else:
            kept = "small widths" if narrow else "its own widths"
            problems.append(f"{number:,} parameters with few layers and {kept}")
    raise UsageError(
        f"no small model of {config.model_type} can be made ({'; '.join(problems)}): leave out "
        "--shrink, or name a smaller model."
    )


def _parameters(make: Callable[[Any], Any], config: PreTrainedConfig) -> int:
    with torch.device("meta"), Unfilled():
        return _number(make(config))


def _number(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def _try(model: Any) -> None:
    """Call a model with sizes that may not fit each other."""
    model.eval()(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=False)


def small_sizes(config: Mapping[str, Any], *, narrow: bool = True) -> dict[str, Any]:
    """Return the fields of a config with small sizes, those of configs inside of it too.

    Args:
        narrow: Make the widths small; else only the layers become few.
    """
    small: dict[str, Any] = {
        name: small_sizes(value, narrow=narrow) if _is_config(value) else value
        for name, value in config.items()
    }
    small |= _few_layers(small)
    if not narrow:
        return small
    small |= _smaller(small, SIZES)
    heads = next((small[name] for name in ("num_attention_heads", "n_head") if name in small), None)
    for name in KEY_HEADS:
        if small.get(name) is not None and heads is not None:
            every = max(_numbers(config, ("num_attention_heads", "n_head")), default=0)
            small[name] = _key_heads(config[name], every, heads, low_rank="kv_lora_rank" in config)
    if "qk_head_dim" in small and "qk_nope_head_dim" in small:
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    expand = small.get("mamba_expand", small.get("expand"))
    for number, size in STATE_HEADS.items():
        if expand and isinstance(small.get(number), int) and size in small:
            small[size] = small.get("mamba_d_ssm", expand * WIDTH) // small[number]
    for fields in (small.get("per_layer_config") or {}).values():
        fields |= _smaller(fields, SIZES)
    return _with_rope(small)


def _is_config(value: Any) -> bool:
    return isinstance(value, dict) and "model_type" in value


def _numbers(config: Mapping[str, Any], names: Sequence[str]) -> Iterator[int]:
    for name in names:
        value = config.get(name)
        if isinstance(value, int):
            yield value


def _smaller(fields: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields that have a size, none larger than it."""
    return {
        name: [min(one, sizes[name]) for one in value]
        if isinstance(value, list)
        else min(value, sizes[name])
        for name, value in fields.items()
        if name in sizes and _is_size(value)
    }


def _is_size(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_size, value))
    return isinstance(value, int) and not isinstance(value, bool)


def _key_heads(value: Any, queries: int, heads: int, *, low_rank: bool) -> Any:
    if isinstance(value, list):
        return [_key_heads(one, queries, heads, low_rank=low_rank) for one in value]
    if value == queries or low_rank:
        return heads
    return min(value, GROUPED)


# Layers


def _few_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that has one layer of each kind, two at least."""
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "depth")
    name = next((name for name in names if isinstance(config.get(name), int)), None)
    if name is None:
        return {}
    layers = config[name]
    by_layer = {key: value for key, value in config.items() if _is_by_layer(key, value, layers)}
    listed = {key: value for key, value in config.items() if _lists_layers(key, value, layers)}
    starts = {key: config[key] for key in STARTS if isinstance(config.get(key), int)}
    apart = {int(at): fields for at, fields in (config.get("per_layer_config") or {}).items()}
    kinds: dict[str, int] = {}
    for at in range(layers):
        kind = [value[at] for value in by_layer.values()]
        kind += [at in value for value in listed.values()]
        kind += [at < value for value in starts.values()]
        kind += [apart.get(at)]
        kinds.setdefault(repr(kind), at)
    kept = [*kinds.values()][:MOST]
    others = (at for at in range(layers) if at not in kept)
    while len(kept) < min(max(FEW, len(config.get("block_types") or ())), layers):
        kept.append(next(others))
    kept.sort()
    few: dict[str, Any] = {name: len(kept)}
    for key, value in by_layer.items():
        taken = [value[at] for at in kept]
        few[key] = "".join(taken) if isinstance(value, str) else taken
    for key, value in listed.items():
        few[key] = [new for new, at in enumerate(kept) if at in value]
    for key, value in starts.items():
        few[key] = sum(at < value for at in kept)
    if apart:
        few["per_layer_config"] = {
            str(new): {**apart[at]} for new, at in enumerate(kept) if at in apart
        }
    if config.get("num_blocks") == layers:
        few["num_blocks"] = len(kept)
    for key, value in config.items():
        if isinstance(value, int) and not isinstance(value, bool):
            if key.endswith(PERIODS):
                few[key] = min(value, 2)
            elif key.endswith(OFFSETS):
                few[key] = min(value, 1)
    return few


def _is_by_layer(name: str, value: Any, layers: int) -> bool:
    return (
        isinstance(value, list | tuple | str)
        and len(value) == layers > 1
        and not name.endswith(("_token_id", "_token_ids", "architectures"))
        and (not isinstance(value, str) or "pattern" in name)
    )


def _lists_layers(name: str, value: Any, layers: int) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) != layers
        and any(word in name for word in ("layer", "idx", "indices"))
        and all(isinstance(at, int) and 0 <= at < layers for at in value)
    )


# Rotary positions


def _with_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with factors of rotary positions for heads of the new size."""
    head = config.get("qk_rope_head_dim") or config.get("head_dim")
    if not isinstance(head, int):
        head = HEAD
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(name), dict):
            config[name] = _rope(config[name], head, config.get("partial_rotary_factor"))
    return config


def _rope(rope: dict[str, Any], head: int, partial: float | None) -> dict[str, Any]:
    pairs = int(head * (rope.get("partial_rotary_factor") or partial or 1.0)) // 2
    changed: dict[str, Any] = {
        name: _rope(v, head, partial) for name, v in rope.items() if isinstance(v, dict)
    }
    for name in ("long_factor", "short_factor"):
        if isinstance(rope.get(name), list):
            changed[name] = rope[name][:pairs]
    if isinstance(section := rope.get("mrope_section"), list):
        parts = [pairs * part // sum(section) for part in section]
        parts[0] += pairs - sum(parts)
        changed["mrope_section"] = parts
    return rope | changed
