"""Attestation: compare requested settings with the actual ones; stop the run if they differ.

The error shows both. Accelerate falls back silently to one process or to DDP in at least five known
ways, so a report without this check may well compare DDP with DDP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from toolkit import backends
from toolkit.engines.backend import backend_of, spec_of
from toolkit.engines.optimizers import optimizer_of
from toolkit.engines.tensors import (
    checkpoints_activations,
    dtype_name,
    elements_of,
    local,
    resident_fraction,
    sharded_fraction,
    tensors_in,
)
from toolkit.strategies import COMPUTE_DTYPES, Strategy

FRACTION_TOLERANCE = 0.05
"""Padding and uneven division change a rank's share by less than this."""

MAY_BE_UNKNOWN = {
    "layers_wrapped",  # a model that doesn't name its layers
    "gradient_clipping",  # before the first step, but for DeepSpeed
    "gradient_accumulation_steps",  # likewise
    "sync_each_batch",  # a step of one micro-batch
    "optimizer_fraction",  # an optimizer without states in its parameters' shape
    "optimizer_fractions",  # likewise, of all ranks, where one of them steps for all
    "optimizer_dtypes",  # likewise
    "learning_rate",  # an optimizer whose groups hold no parameters of the model
    "weight_decay",  # likewise
    "betas",  # likewise, or another rule than Adam's
    "eps",  # likewise
}
"""Facts that cannot always be observed. Any other fact that is missing refuses the run."""


class Refused(RuntimeError):
    """The actual settings differ from the requested ones; the text shows both."""

    def __init__(self, text: str, mismatches: list[Mismatch] | None = None) -> None:
        super().__init__(text)
        self.mismatches = list(mismatches or ())
        self.is_of_this_rank_alone = False
        """Whether the other ranks have left already, without a word of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """The requested settings of a run. None: the setting was not requested, and is not compared."""

    strategy: Strategy
    num_processes: int
    precision: str | None = None
    gradient_clipping: float | None = None
    gradient_accumulation_steps: int | None = None
    sync_each_batch: bool | None = None
    """Whether gradients are reduced in every micro-batch, where the loop decides that."""

    optimizer_classes: tuple[str, ...] | None = None
    activation_checkpointing: bool | None = None
    accumulation_dtype: str | None = None
    """The dtype in which gradients are summed over micro-batches."""

    optimizer_settings: dict[str, Any] | None = None
    """Settings of the optimizer's groups: `learning_rate` before any schedule, `weight_decay` of
    the groups that decay, `betas`, `eps`."""

    dtype: str = "float32"
    """The dtype that the weights were loaded in."""

    moments: str | None = None
    """The dtype of AdamW's moments, where the run itself casts the weights to bf16 and keeps fp32
    masters; None where it does not."""

    @property
    def shards(self) -> int:
        """Number of ranks that share one copy of the sharded states."""
        return self.strategy.shards(self.num_processes)

    def before_first_step(self) -> dict[str, Any]:
        """The facts that must hold once the model is wrapped."""
        strategy, spec = self.strategy, spec_of(self.strategy, self.num_processes)
        facts: dict[str, Any] = {
            "distributed_type": spec.distributed_type,
            "num_processes": self.num_processes,
            "ranks": list(range(self.num_processes)),
            "wrapper": spec.wrapper,
            "zero_stage": strategy.zero_stage,
            "replicas": strategy.replicas,
            "model_split_by": strategy.model_split_by(self.num_processes),
            "activation_checkpointing": self.activation_checkpointing,
            "sharded_fraction": 1 / self.shards if strategy.shards_parameters else 1.0,
            "offload_optimizer": strategy.offload_optimizer,
            "offload_parameters": strategy.offload_parameters,
            "gradient_clipping": self.gradient_clipping,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "precision": self.precision,
            **spec.facts,
        }
        if self.precision is not None and self.dtype == "float32":
            computed = COMPUTE_DTYPES[self.precision]
            cast = spec.masters_in_fp32 or self.moments is not None
            facts["parameter_dtypes"] = [computed if cast else "float32"]
        return _requested_only(facts)

    def after_first_step(self) -> dict[str, Any]:
        """The facts that exist only once gradients and optimizer states do."""
        facts: dict[str, Any] = {
            "optimizer_class": self.optimizer_classes,
            "optimizer_fraction": 1 / self.shards if self.strategy.shards_optimizer else 1.0,
            "accumulation_dtype": self.accumulation_dtype,
            "gradient_clipping": self.gradient_clipping,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "sync_each_batch": self.sync_each_batch,
            **(self.optimizer_settings or {}),
        }
        backend = backends.backend_of(self.strategy)
        if backend.unsynced:
            del facts["sync_each_batch"]
        if backend.has_server:
            del facts["optimizer_fraction"]
            facts["optimizer_fractions"] = [1.0] + [0.0] * (self.num_processes - 1)
        if self.strategy.offload_optimizer == "nvme":
            del facts["optimizer_fraction"]  # swapped out after the step
        if self.precision is None or self.dtype != "float32":
            return _requested_only(facts)
        facts["optimizer_dtypes"] = sorted({"float32", self.moments or "float32"})
        facts["reduce_dtype"] = {
            "nothing": None,
            "weights' dtype": "float32" if self.moments is None else "bfloat16",
            "fp32": "float32",
            "computed dtype": COMPUTE_DTYPES[self.precision],
        }[spec_of(self.strategy, self.num_processes).reduces]
        if self.precision == "no" and self.accumulation_dtype is None:
            facts["gradient_dtypes"] = ["float32"]
        return _requested_only(facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One fact that differs, on one rank."""

    # These names are keys of a record on disk.
    what: str
    asked: Any
    engaged: Any
    rank: int

    def __str__(self) -> str:
        return f"{self.what}: asked {self.asked}, engaged {self.engaged} (rank {self.rank})"


def actual_before(accelerator: Any, model: Any) -> dict[str, Any]:
    """Return the facts of a prepared model before its first step."""
    backend = backend_of(model)
    return {
        "distributed_type": accelerator.distributed_type.name,
        "num_processes": accelerator.num_processes,
        "ranks": sorted(gather_objects(accelerator.process_index)),
        "zero_stage": 0,
        "replicas": backend.replicas(),
        "activation_checkpointing": checkpoints_activations(model),
        "sharded_fraction": round(sharded_fraction(model), 4),
        "parameter_dtypes": _dtypes(p for p in model.parameters() if p.requires_grad),
        "offload_optimizer": "none",
        "offload_parameters": "none",
        "reshard_after_forward": None,
    } | backend.actual_settings(accelerator)


def actual_at_step(model: Any) -> dict[str, Any]:
    """Return the facts of the first step's gradients, while they exist."""
    backend = backend_of(model)
    reduced = backend.reduce_dtype()
    dtypes = _dtypes(backend.gradients_held())
    return {
        "gradient_dtypes": dtypes,
        "accumulation_dtype": dtypes,
        "reduce_dtype": None if reduced is None else dtype_name(reduced),
    }


def actual_after(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return the facts of the optimizer after the first step."""
    backend, inner = backend_of(model), optimizer_of(optimizer)
    facts: dict[str, Any] = {
        "optimizer_class": type(inner).__name__,
        "resident_fraction": round(resident_fraction(model, backend.parameters_held()), 4),
        **_settings(backend.parameter_groups(optimizer)),
    }
    # States as large as a parameter, or as its rows and columns, show where it is stepped on. Step
    # counts don't; a parameter with only other states leaves it unknown.
    stepped, tells = 0, True
    states: list[torch.Tensor] = []
    for parameter, state in inner.state.items():
        held = local(parameter)
        tensors = [local(tensor) for tensor in tensors_in(state)]
        shaped = [s for s in tensors if s.shape in _state_shapes(held.shape)]
        tells &= bool(shaped) or all(s.numel() <= 1 for s in tensors)
        stepped += held.numel() if shaped else 0
        states += [s for s in shaped if s.is_floating_point()]
    if stepped and tells:
        trained = sum(elements_of(p) for p in model.parameters() if p.requires_grad)
        facts["optimizer_fraction"] = round(stepped / trained, 4)
    if states and tells:
        facts["optimizer_dtypes"] = _dtypes(states)
    if backend.one_rank_steps:
        fractions = gather_objects(facts.pop("optimizer_fraction", 0.0))
        if any(fractions):
            facts["optimizer_fractions"] = fractions
    return facts


def _state_shapes(shape: torch.Size) -> tuple[torch.Size, ...]:
    """Return a parameter's shape, and the shapes of Adafactor's row and column states."""
    return (shape, shape[:-1], shape[:-2] + shape[-1:]) if len(shape) > 1 else (shape,)


def _settings(groups: list[tuple[dict[str, Any], list[Any]]]) -> dict[str, Any]:
    """Return all values of each setting in an optimizer's groups, smallest first."""
    stepped = [settings for settings, parameters in groups if parameters]
    # A schedule keeps the initial rate beside the current one.
    held = {"learning_rate": [group.get("initial_lr", group.get("lr")) for group in stepped]}
    for name in ("weight_decay", "betas", "eps"):
        held[name] = [group.get(name) for group in stepped]
    return {
        name: sorted({_plain_setting(value) for value in values})
        for name, values in held.items()
        if values and None not in values
    }


def _plain_setting(value: Any) -> Any:
    return tuple(map(float, value)) if isinstance(value, list | tuple) else float(value)


def compare(requested: dict[str, Any], actual: dict[str, Any], *, rank: int) -> list[Mismatch]:
    """List requested settings that did not take effect or were not observed."""
    return [
        Mismatch(what=name, asked=wanted, engaged=actual.get(name, "unknown"), rank=rank)
        for name, wanted in requested.items()
        if not (_holds(name, wanted, actual[name]) if name in actual else name in MAY_BE_UNKNOWN)
    ]


def kept_whole(actual: dict[str, Any]) -> list[str]:
    """Say if ZeRO-3 holds more than its share: parameters below its threshold stay gathered."""
    resident, sharded = actual["resident_fraction"], actual["sharded_fraction"]
    if actual["zero_stage"] < 3 or resident - sharded <= FRACTION_TOLERANCE:
        return []
    return [
        f"each rank keeps {resident - sharded:.0%} of the parameters gathered between steps, "
        f"beside its own share of {sharded:.0%} of all: ZeRO-3 does not let go of those with "
        "fewer elements than stage3_param_persistence_threshold. Lower it to save that memory."
    ]


def require(mismatches: list[Mismatch]) -> None:
    """Refuse the run on every rank if any rank has a mismatch.

    Raises:
        Refused: with each rank's mismatches.
    """
    refuse([mismatch for of_rank in gather_objects(mismatches) for mismatch in of_rank])


def refuse(mismatches: list[Mismatch]) -> None:
    """Refuse the run if any rank has a mismatch; every rank knows those of all.

    Raises:
        Refused: with each rank's mismatches.
    """
    if mismatches:
        shown = "; ".join(map(str, mismatches))
        raise Refused(f"what engaged is not what was asked. {shown}", mismatches)


def gather_objects(value: Any) -> list[Any]:
    """Return every rank's value, in rank order; this rank's alone where there are no others."""
    if not torch.distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def _holds(name: str, wanted: Any, actual: Any) -> bool:
    if name.endswith("_fraction"):
        return abs(wanted - actual) <= FRACTION_TOLERANCE
    if name == "optimizer_class":
        return actual in wanted
    if name == "accumulation_dtype":
        return wanted in actual
    if name == "weight_decay":  # norms and biases are kept out of it
        return {float(value) for value in actual} - {0.0} == {float(wanted)} - {0.0}
    if name in ("learning_rate", "betas", "eps"):
        return actual == [_plain_setting(wanted)]
    return wanted == actual


def _requested_only(facts: dict[str, Any]) -> dict[str, Any]:
    keep_none = {"reduce_dtype"}
    return {key: value for key, value in facts.items() if value is not None or key in keep_none}


def _dtypes(tensors: Any) -> list[str]:
    return sorted({dtype_name(tensor.dtype) for tensor in tensors})
