"""Tensor parallelism: the ranks of a group share every matrix, by the model's own plan.

transformers (run with 5.23, `distributed/tensor_parallel.py`) splits the matrices while it loads
the model, by columns or by rows, and the ranks of a group exchange activations within each layer.
All of them read the same rows. With several groups, `fully_shard` deals out what each rank holds
among the ranks of equal number in all groups: a mesh of data x tensor, tensor innermost. Groups
that are replicas keep what they hold and average their gradients; `fully_shard` does that too, over
a mesh whose shards are single ranks, as torch's own `replicate` (torch 2.13).

Accelerate takes no part but for precision, the process group and the data: its own path through
`parallelism_config` imports a class that transformers 5.23 no longer has (accelerate 1.15,
`Accelerator._prepare_tp`), and refuses ranks on a CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from toolkit.engines.base import BackendSpec
from toolkit.engines.fsdp2 import FSDP2
from toolkit.engines.tensors import clip_parts, copies_of, is_spread, local
from toolkit.engines.wrapped import (
    amp_precision,
    keep_mesh_from_accelerate,
    rows_of_rank,
    split_by,
)
from toolkit.strategies import Strategy

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed.device_mesh import DeviceMesh
    from transformers.distributed.configuration_utils import DistributedConfig

SOUND_SHARDS: Final = {"hrm_text": 0, "falcon_h1": 0, "olmo_hybrid": 1, "bailing_hybrid": 1}
"""Types of models that transformers 5.24 splits so that they train another loss, and in how many
shards they do not. `benchmarks/split_families.py` found them, and tells when they can go."""


def spec_of(strategy: Strategy, num_processes: int) -> BackendSpec:
    """Return the spec; a lone group needs no `fully_shard` and reduces no gradients."""
    if num_processes == strategy.tensor:
        return BackendSpec(distributed_type="MULTI_GPU", wrapper="none", reduces="nothing")
    return BackendSpec(
        distributed_type="MULTI_GPU",
        wrapper="FSDPModule",
        reduces="weights' dtype",
        facts={"reshard_after_forward": strategy.reshard_after_forward, "layers_wrapped": True},
    )


def claim_mesh(
    strategy: Strategy, num_processes: int, *, precision: str
) -> DistributedConfig | None:
    """Return how `from_pretrained` is to split a model; None where it loads it whole."""
    if strategy.tensor == 1 or strategy.schedule is not None:
        return None  # a stage is split once it is cut
    from transformers.distributed.configuration_utils import DistributedConfig

    keep_mesh_from_accelerate()
    return DistributedConfig(
        tp_size=strategy.tensor,
        dp_replicate_size=strategy.replicas,
        fsdp_size=num_processes // strategy.tensor // strategy.replicas,
        # Gathered in bf16, reduced in fp32; transformers has no such policy for fp16.
        fsdp_mixed_precision=precision == "bf16",
    )


def group_size(model: Any) -> int:
    """Return the ranks that share every matrix of a model; 1 where each holds them whole."""
    return int(getattr(model, "_tp_size", None) or 1)


def ranks_along(model: torch.nn.Module, dimension: str) -> int:
    """Return the ranks over which the most split matrix is split along a dimension of its mesh."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    named = [mesh for mesh in meshes if dimension in (mesh.mesh_dim_names or ())]
    return max((mesh[dimension].size() for mesh in named), default=1)


class TensorParallel(FSDP2):
    """A model that `from_pretrained` has split; its unsplit parameters are on every rank."""

    def actual_settings(self, accelerator: Accelerator) -> dict[str, Any]:
        of_groups: dict[str, Any] = super().actual_settings(accelerator) if self._has_groups else {}
        return of_groups | {
            "wrapper": "FSDPModule" if self._has_groups else "none",
            "model_split_by": split_by(accelerator, tensor=ranks_along(self._model, "tp")),
            "precision": amp_precision(accelerator),
        }

    @property
    def _has_groups(self) -> bool:
        return isinstance(self._model, FSDPModule)

    def reduce_dtype(self) -> torch.dtype | None:
        return super().reduce_dtype() if self._has_groups else None

    def has_reduced(self) -> bool | None:
        return super().has_reduced() if self._has_groups else None

    def replicas(self) -> int:
        return ranks_along(self._model, "dp_replicate")

    def model_parallel_groups(self) -> tuple[str, ...]:
        return (str(self._model._device_mesh["tp"].get_group().group_name),)

    def tensor_parallel_rank(self) -> int:
        return int(self._model._device_mesh["tp"].get_local_rank())

    def waiting_sums(self) -> Iterator[Any]:
        """Yield the unsharded parameters of `summed` whose gradients wait to be reduced."""
        sharded = {id(parameter) for parameter in summed(self._model)}
        for parameter in self._fsdp_parameters():
            if id(parameter.sharded_param) in sharded:
                yield parameter._unsharded_param

    def ranks_per_row(self) -> int:
        return group_size(self._model)


def wrap(
    accelerator: Accelerator, model: Any, optimizer: torch.optim.Optimizer, loader: Any
) -> tuple[Any, Any, Any]:
    """Prepare a split model for training, as `Accelerator.prepare` does for other models."""
    backend = TensorParallel(model)
    has_groups = isinstance(model, FSDPModule)
    keep_parts(model, group_size(model), reduced=has_groups)
    group_by_mesh(optimizer)
    # For evaluation Accelerate wraps no DDP around it; precision is that of training.
    wrapped: Any = accelerator.prepare_model(model, evaluation_mode=True)
    if has_groups:
        # The outputs are parts of DTensors, and no model of transformers changes them in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        # Found by `Accelerator.accumulate`, as DDP's method of this name.
        wrapped.no_sync = lambda: _unreduced(model)
    vars(accelerator)["clip_grad_norm_"] = _Clipping(accelerator)
    place, ranks = backend.data_parallel_rank(), backend.data_parallel_size()
    rows = rows_of_rank(accelerator, loader, place=place, of=ranks)
    return wrapped, accelerator.prepare_optimizer(optimizer), rows


def split(model: Any, mesh: DeviceMesh, *, but: tuple[type, ...] = ()) -> None:
    """Split a loaded model over the ranks of a mesh of one dimension, in place, and alone.

    `from_pretrained` would want all ranks in its own mesh, whose pipelines are for inference and
    have no data-parallel ones beside them (transformers 5.24, `DistributedConfig`).

    Args:
        model: With the same weights on every rank.
        mesh: Of a tensor group.
        but: Classes of modules that the plan is not for.

    `keep_parts` has to follow.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    modules, first = dict(model.named_modules()), dict[int, str]()
    named = list(model.named_parameters(remove_duplicate=False))
    tied = {name: of for name, p in named if (of := first.setdefault(id(p), name)) != name}
    plan: dict[str, str] = model._expand_parallel_plan(model.tp_plan)
    here = {name: style for name, style in plan.items() if not isinstance(modules.get(name), but)}
    apply_tensor_parallelism(model, mesh, here)
    for name, of in tied.items():
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, model.get_parameter(of))


def keep_parts(model: Any, ranks: int, *, reduced: bool = False) -> None:
    """Have a rank keep its part of each split weight alone, and its gradient of that part.

    On the rank's device: `Module.to` swaps DTensors for others, without hooks (torch 2.13).

    Args:
        model: Split over a group.
        ranks: Of the group.
        reduced: Whether `fully_shard` deals the gradients out.
    """
    for parameter in summed(model):
        _add_up_once(parameter, ranks)
    for parameter in filter(is_spread, model.parameters()):
        _hold_only_its_part(parameter)
        if parameter.requires_grad and not reduced:
            parameter.register_post_accumulate_grad_hook(_cut_gradient)


def summed(model: Any) -> Iterator[Any]:
    """Yield the trained parameters whose gradients transformers adds up over a group.

    The plan says which: those that every rank has whole and applies to its own part of the values,
    such as the norms of single heads.
    """
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce

    modules = dict(model.named_modules())
    for name, style in model._expand_parallel_plan(model.tp_plan).items():
        if name in modules and isinstance(ALL_PARALLEL_STYLES[style], ReplicatedWithGradAllReduce):
            yield from (p for p in modules[name].parameters(recurse=False) if p.requires_grad)


@torch.no_grad()
def _hold_only_its_part(parameter: Any) -> None:
    """Free all but this rank's part of a parameter: transformers 5.23 may read it as a view.

    In host memory it is one of the whole tensor. To be called before the first forward, with which
    `fully_shard` begins to keep views of its own. torch (2.11 to 2.15) has no public way to a
    DTensor's part that is not itself a view.
    """
    part = parameter._local_tensor
    if part.untyped_storage().nbytes() > part.nbytes:
        part.set_(part.clone())


def _add_up_once(parameter: Any, ranks: int) -> None:
    """Keep the sum over a group of a gradient from being summed again in each micro-batch.

    transformers 5.23 (`ReplicatedWithGradAllReduce`) adds up the accumulated gradient, not the new
    one. A share of it in every rank comes out as the whole.
    """

    def share(new: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.div_(ranks)

    parameter.register_hook(share)


def _cut_gradient(parameter: Any) -> None:
    """Keep this rank's part of a new gradient: that of an embedding split by words comes whole."""
    if parameter.grad.placements != parameter.placements:
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def group_by_mesh(optimizer: torch.optim.Optimizer) -> list[int]:
    """Split an optimizer's groups: one call of a fused step takes tensors of one mesh only.

    Returns the number of the group that each of the new ones was a part of.
    """
    groups: list[dict[str, Any]] = []
    parts_of: list[int] = []
    for number, group in enumerate(optimizer.param_groups):
        by_mesh: dict[Any, list[Any]] = {}
        for parameter in group["params"]:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        parts = [group | {"params": held} for held in by_mesh.values()] or [group]
        groups += parts
        parts_of += [number] * len(parts)
    optimizer.param_groups[:] = groups
    return parts_of


@contextmanager
def _unreduced(model: Any) -> Iterator[None]:
    """Let gradients of the passes inside wait for the step's last micro-batch."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
    for parameter in TensorParallel(model).waiting_sums():
        parameter.grad.div_(group_size(model))  # as in `_add_up_once`


class _Clipping:
    """Clips by the norm over all ranks' parts, each counted once."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    @torch.no_grad()
    def __call__(self, parameters: Any, max_norm: float) -> torch.Tensor:
        self._accelerator.unscale_gradients()
        gradients = [p.grad for p in parameters if p.grad is not None]
        squares = [
            torch.linalg.vector_norm(local(gradient), dtype=torch.float32) ** 2
            / copies_of(gradient)
            for gradient in gradients
        ]
        return clip_parts(gradients, torch.stack(squares).sum(), max_norm)


def plan_problem(config: Any, size: int, shards: int) -> str | None:
    """Say why a model cannot be split over groups of `size` ranks; None where it can.

    Args:
        config: The `PreTrainedConfig` of a causal LM.
        size: Ranks of a group.
        shards: Groups among which `fully_shard` deals out what each rank holds.
    """
    text = config.get_text_config(decoder=True)
    if not getattr(text, "base_model_tp_plan", None):
        return (
            f"{config.model_type} has no tensor-parallel plan in transformers (base_model_tp_plan)"
        )
    if shards > SOUND_SHARDS.get(text.model_type, shards):
        return f"transformers splits {text.model_type} so that it trains another loss"
    counts: Mapping[str, Any] = {
        "attention heads": getattr(text, "num_attention_heads", None),
        "key-value heads": getattr(text, "num_key_value_heads", None),
    }
    for noun, count in counts.items():
        if isinstance(count, int) and count % size:
            return f"its {count} {noun} don't divide by the {size} ranks of a tensor group"
    words = int(getattr(text, "vocab_size", None) or 0)
    if text.tie_word_embeddings and -(-words // size) % shards:
        # With a padded part, `fully_shard` would give the head stale words (pytorch#176076).
        return (
            f"its {words} tied embeddings don't divide by the {size} ranks of each of the {shards} "
            "groups"
        )
    return None
