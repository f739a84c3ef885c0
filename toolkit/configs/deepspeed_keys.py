"""The keys of a DeepSpeed JSON, and the mistakes in one that are found without DeepSpeed.

DeepSpeed looks the keys below up one by one, and ignores all other keys. Its other sections are
pydantic models, which only a rank can import: `toolkit.engines.deepspeed_config`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, cast

from toolkit.configs.deepspeed import AUTO

Kind = tuple[str, Callable[[Any], bool]]
"""The requirement for a value, in words and as a check."""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


_COUNT: Final[Kind] = (
    "a whole number of 1 or more, or auto",
    lambda value: value in (None, AUTO) or (_number(value) and value >= 1 and value % 1 == 0),
)
_NORM: Final[Kind] = (
    "a number of 0 or more, or auto",
    lambda value: value == AUTO or (_number(value) and 0 <= value < math.inf),
)
_POSITIVE: Final[Kind] = (
    "a number above 0",
    lambda value: value is None or (_number(value) and value > 0),
)
_SWITCH: Final[Kind] = ("true or false", lambda value: value in (False, True))
_WORD: Final[Kind] = (
    "a word other than auto",
    lambda value: value is None or (isinstance(value, str) and value != AUTO),
)
_SECTION: Final[Kind] = ("an object", lambda value: isinstance(value, dict))

TOP_LEVEL: Final[dict[str, Kind]] = {
    "train_batch_size": _COUNT,
    "train_micro_batch_size_per_gpu": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "gradient_clipping": _NORM,
    **dict.fromkeys(
        (
            "data_parallel_size",
            "gradient_predivide_factor",
            "sequence_parallel_size",
            "steps_per_print",
            "vocabulary_size",
        ),
        _POSITIVE,
    ),
    **dict.fromkeys(
        (
            "dataloader_drop_last",
            "disable_allgather",
            "disable_python_gc",
            "dump_state",
            "managed_gradient_accumulation",
            "memory_breakdown",
            "prescale_gradients",
            "use_data_before_expert_parallelism",
            "wall_clock_breakdown",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
            # Removed by 0.19.8, which says so itself.
            "graph_harvesting",
            "sparse_gradients",
        ),
        _SWITCH,
    ),
    **dict.fromkeys(
        (
            "communication_data_type",
            "gradient_allreduce_op",
            "log_level",
            "seq_parallel_communication_data_type",
        ),
        _WORD,
    ),
    **dict.fromkeys(
        (
            "activation_checkpointing",
            "aio",
            "autotuning",
            "bf16",
            "bfloat16",
            "checkpoint",
            "comet",
            "comms_logger",
            "compile",
            "csv_monitor",
            "data_efficiency",
            "data_types",
            "datastates_ckpt",
            "expert_parallel",
            "flops_profiler",
            "fp16",
            "hybrid_engine",
            "optimizer",
            "pipeline",
            "scheduler",
            "tensor_parallel",
            "tensorboard",
            "timers",
            "torch_autocast",
            "wandb",
            "weight_quantization",
            "zero_optimization",
            # Removed by 0.19.8, which says so itself.
            "amp",
            "compression_training",
            "curriculum_learning",
            "eigenvalue",
            "elasticity",
            "nebula",
            "progressive_layer_drop",
            "quantize_training",
            "sparse_attention",
        ),
        _SECTION,
    ),
}
"""Keys that DeepSpeed 0.19.8 looks up at the top level, and the kind of each value."""

IN_SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "activation_checkpointing": (
        "contiguous_memory_optimization",
        "cpu_checkpointing",
        "number_checkpoints",
        "partition_activations",
        "profile",
        "synchronize_checkpoint_boundary",
    ),
    "data_types": ("buffer_dtype", "grad_accum_dtype", "keep_in_fp32_modules", "param_dtype"),
    "flops_profiler": (
        "detailed",
        "enabled",
        "module_depth",
        "output_file",
        "profile_step",
        "recompute_fwd_factor",
        "top_modules",
    ),
    "optimizer": ("legacy_fusion", "params", "type"),
    "scheduler": ("params", "type"),
    "torch_autocast": ("dtype", "enabled", "lower_precision_safe_modules"),
}
"""Keys that DeepSpeed 0.19.8 looks up in sections that are no pydantic models.

Left out are `aio`, where DeepSpeed's and transformers' own examples have keys of older releases,
and `autotuning`, `checkpoint` and `data_efficiency`, which are read in many places.
"""


def mistakes_by_key(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the mistakes in a DeepSpeed config, by its keys at the top level."""
    return {key: wrong for key, value in config.items() if (wrong := _mistakes(key, value))}


def unknown_key(path: str, known: Collection[str]) -> str:
    """Return the sentence on a key that DeepSpeed does not know, with the nearest that it knows."""
    close = nearest(path.rpartition(".")[2], known)
    return f"{path} is no key of DeepSpeed's{f' (did you mean {close}?)' if close else ''}"


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is most like another one; None where none is."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def _mistakes(key: str, value: Any) -> list[str]:
    if key not in TOP_LEVEL:
        return [unknown_key(key, TOP_LEVEL)]
    words, fits = TOP_LEVEL[key]
    if not fits(value):
        return [f"{key} has to be {words}, and is {value!r}"]
    if key not in IN_SECTIONS:
        return []
    known = IN_SECTIONS[key]
    section = cast("dict[str, Any]", value)
    wrong = [unknown_key(f"{key}.{name}", known) for name in section if name not in known]
    if key == "activation_checkpointing" and not wrong and any(section.values()):
        return [
            "activation_checkpointing has no effect: DeepSpeed does it only in models that call "
            "deepspeed.checkpointing, and those of transformers don't (toolkit.train and the "
            "Trainer have --gradient_checkpointing)"
        ]
    return wrong
