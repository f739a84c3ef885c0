"""FSDP2 (`fully_shard`): every parameter a DTensor, gathered for the layer that computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from toolkit.engines.base import Backend, BackendSpec
from toolkit.engines.names import SHARDS
from toolkit.engines.optimizers import optimizer_of
from toolkit.engines.tensors import is_spread, local, put_part, state_tensors, tensors_in
from toolkit.engines.wrapped import Wrapped, amp_precision, split_by
from toolkit.strategies import Strategy

if TYPE_CHECKING:
    from accelerate import Accelerator


def spec_of(strategy: Strategy) -> BackendSpec:
    return BackendSpec(
        distributed_type="FSDP",
        wrapper="FSDPModule",
        reduces="computed dtype",
        reads_from_any_ranks=True,  # torch's distributed checkpoint cuts the shards anew
        facts={"reshard_after_forward": strategy.reshard_after_forward, "layers_wrapped": True},
    )


class FSDP2(Backend):
    """A model that `fully_shard` has turned into `FSDPModule`s, layer by layer and as a whole."""

    def gathers_in_forward(self) -> bool:
        return True

    def actual_settings(self, accelerator: Accelerator) -> dict[str, Any]:
        policy = next(_groups(self._model)).offload_policy
        place = "cpu" if isinstance(policy, CPUOffloadPolicy) else "none"
        facts: dict[str, Any] = {
            "wrapper": "FSDPModule",
            "model_split_by": split_by(accelerator),
            "offload_optimizer": place,
            "offload_parameters": place,
            "reshard_after_forward": self._reshards_after_forward(),
            "precision": amp_precision(accelerator),
        }
        wrapped = self._layers_wrapped()
        return facts if wrapped is None else facts | {"layers_wrapped": wrapped}

    def _reshards_after_forward(self) -> bool | None:
        """Whether its blocks free their parameters after forward; None without blocks."""
        # The root keeps its parameters in either case, and so does the unit into which accelerate
        # 1.15 puts the embedding, norm and head of a tied model (fsdp_utils.py): any block that
        # frees its own will do.
        blocks = [unit for unit in self._units() if unit is not self._model]
        if not blocks:
            return None
        return any(
            group.post_forward_mesh_info is not None for block in blocks for group in _groups(block)
        )

    def _layers_wrapped(self) -> bool | None:
        """Whether every decoder layer is its own unit; None if the model names no layers.

        Without a wrapping policy Accelerate wraps embeddings and the root, and each step gathers
        all layers at once.
        """
        names = set(getattr(self._model, "_no_split_modules", None) or ())
        layers = [
            module
            for module in self._model.modules()
            if names & {kind.__name__ for kind in type(module).__mro__}
        ]
        return all(isinstance(layer, FSDPModule) for layer in layers) if layers else None

    def reduce_dtype(self) -> torch.dtype | None:
        policy = self._model._get_fsdp_state()._mp_policy
        return policy.reduce_dtype or policy.param_dtype or super().reduce_dtype()

    def has_reduced(self) -> bool | None:
        return next(self.unreduced_gradients(), None) is None

    def replicas(self) -> int:
        parameter = next(self._model.parameters())
        mesh = parameter.device_mesh if is_spread(parameter) else None
        # Of two dimensions, the first replicates and the second shards (hybrid sharding).
        return mesh.size(0) if mesh is not None and mesh.ndim == 2 else 1

    # Tensors that a rank holds

    def gathered_buffers(self) -> Iterator[torch.Tensor]:
        # Between uses their storages have no size.
        for parameter in self._fsdp_parameters():
            yield from parameter.all_gather_outputs

    def unreduced_gradients(self) -> Iterator[torch.Tensor]:
        for parameter in self._fsdp_parameters():
            unsharded = getattr(parameter, "_unsharded_param", None)  # from its first use on
            gradients = [parameter.unsharded_accumulated_grad, getattr(unsharded, "grad", None)]
            yield from map(local, tensors_in(gradients))

    def leaves(self) -> Iterator[torch.Tensor]:
        yield from super().leaves()
        for parameter in self._fsdp_parameters():
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None and unsharded.requires_grad:
                yield unsharded

    def _units(self) -> list[Any]:
        return [module for module in self._model.modules() if isinstance(module, FSDPModule)]

    def _fsdp_parameters(self) -> Iterator[Any]:
        for group in _groups(self._model):
            yield from group.fsdp_params

    # One parameter whole

    @torch.no_grad()
    def set_full_weight(self, parameter: Any, numbers: torch.Tensor) -> None:
        put_part(parameter, numbers)

    # Steps

    @contextmanager
    def preserve_engine_state(self) -> Iterator[None]:
        """Free parameters gathered by the forwards inside, and forget the order of these forwards.

        `fully_shard` (torch 2.13, _fsdp_param_group.py) remembers each forward until a backward
        ends, and prefetches in that order: the next backward would begin with a useless gather.
        """
        try:
            yield
        finally:
            for unit in self._units():
                unit.reshard()
            for group in _groups(self._model):
                group._post_forward_indices.clear()
                group.comm_ctx.post_forward_order.clear()

    def fsdp_units(self) -> Iterator[torch.nn.Module]:
        for unit in self._units():
            if sum(isinstance(part, FSDPModule) for part in unit.modules()) == 1:
                yield unit

    def prefetch(self, *, ahead: int) -> int:
        # By default, FSDP2 gathers a layer when its forward is called, and one ahead in backward.
        blocks = [unit for unit in self._units() if unit is not self._model]
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + ahead])
            before = blocks[max(0, number - ahead) : number]
            block.set_modules_to_backward_prefetch(before[::-1])
        return len(blocks)

    # Checkpoints: shards, by torch.distributed.checkpoint

    # torch.distributed.checkpoint takes 0.05 s to import: only where it is needed.

    def write_together(self, folder: Path, wrapped: Wrapped, *, step: int) -> None:
        from toolkit.engines.fsdp_shards import write_shards

        write_shards(folder / SHARDS, self._states(wrapped))

    def read(self, folder: Path, wrapped: Wrapped, *, step: int) -> None:
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        from toolkit.engines.fsdp_shards import read_shards

        states = self._states(wrapped)
        read_shards(folder / SHARDS, states)
        set_optimizer_state_dict(
            self._model, optimizer_of(wrapped.optimizer), optim_state_dict=states["optimizer"]
        )

    def _states(self, wrapped: Wrapped) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        trained_only = wrapped.trains_adapters_alone
        return {
            "model": state_tensors(self._model, trained_only=trained_only),
            "optimizer": get_optimizer_state_dict(self._model, optimizer_of(wrapped.optimizer)),
        }


def class_of(model: torch.nn.Module) -> type[Any]:
    """Return a model's original class; `fully_shard` puts a renamed subclass in its place."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


@contextmanager
def original_classes(model: torch.nn.Module) -> Iterator[None]:
    """Give the parts of a model their original classes while nothing computes or gathers.

    Transformers 5.24 looks up by a class's name and file which names its weights have in a
    checkpoint, and which code is saved beside them.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    renamed = [type(unit) for unit in units]
    for unit in units:
        unit.__class__ = class_of(unit)
    try:
        yield
    finally:
        for unit, kind in zip(units, renamed, strict=True):
            unit.__class__ = kind


def _groups(module: Any) -> Iterator[Any]:
    """Yield `fully_shard`'s parameter group of each unit with parameters in a module."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            # One group per unit, as Accelerate 1.15 shards; torch 2.11 lacks the list of several.
            group = unit._get_fsdp_state()._fsdp_param_group
            if group is not None:
                yield group
