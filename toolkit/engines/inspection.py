"""The one place that looks inside what `Accelerator.prepare` returned.

Checked against torch 2.11 to 2.15, accelerate 1.15 and deepspeed 0.19. DeepSpeed has no public way
to its partitions (DeepSpeed#3367 asks for one), so their names stand here and nowhere else;
tests/test_every_strategy.py, which counts every byte, fails when they move.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from toolkit.configs.requested import deepspeed_strategy, fsdp_strategy, requested_replicas
from toolkit.strategies import Strategy

SUMMED_AT_ONCE = 1 << 20
"""Elements of a tensor whose squares are added up at once."""


def wrapper_of(model: Any) -> str:
    """Name what stands around a model: the class that DDP, DeepSpeed or FSDP2 gave it."""
    if isinstance(model, FSDPModule):
        return "FSDPModule"
    if isinstance(model, DistributedDataParallel | torch.nn.DataParallel):
        return type(model).__name__
    if zero_optimizer(model) is not None:
        return "DeepSpeedEngine"
    return "none"


def zero_optimizer(model: Any) -> Any | None:
    """Return DeepSpeed's ZeRO optimizer, or None for every other backend."""
    return model.optimizer if hasattr(model, "zero_optimization_stage") else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameters_held(model: Any) -> Iterator[torch.Tensor]:
    """Yield what this rank holds of the parameters: shards, partitions, and whole ones.

    What scales parameters in 4 bits belongs to them, though it is none: nothing shards it.
    """
    yield from _scales_held(model)
    for parameter in model.parameters():
        partition = getattr(parameter, "ds_tensor", None)
        if partition is None:
            yield local(parameter.detach())
            continue
        yield partition.detach()
        # A gathered parameter, persistent ones above all, is held beside its partition;
        # a released one is an empty tensor.
        yield parameter.detach()


def _scales_held(model: Any) -> Iterator[torch.Tensor]:
    for module in model.modules():
        state = getattr(module, "quant_state", None)  # bitsandbytes 0.50, nn/modules.py
        inner = getattr(state, "state2", None)
        for held in (state, inner):
            yield from tensors_in([getattr(held, name, None) for name in ("absmax", "code")])
        yield from tensors_in(getattr(state, "offset", None))


def parameters_gathered(model: Any) -> Iterator[torch.Tensor]:
    """FSDP2: yield what whole parameters are gathered into, with storages of no size between uses.

    DeepSpeed gathers into the parameters themselves.
    """
    for parameter in _fsdp_parameters(model):
        yield from parameter.all_gather_outputs


def gradients_underway(model: Any) -> Iterator[torch.Tensor]:
    """Yield the whole gradients that wait to be reduced, and what they are reduced in."""
    for parameter in _fsdp_parameters(model):
        whole = getattr(parameter, "_unsharded_param", None)  # from its first use on
        yield from tensors_in([parameter.unsharded_accumulated_grad, getattr(whole, "grad", None)])
    zero = zero_optimizer(model)
    for bucket in getattr(zero, "ipg_buckets", {}).values():
        yield from tensors_in(bucket.buffer)
    # With offload, on its way to the host.
    for name in ("temp_grad_buffer_for_gpu_offload", "temp_grad_buffer_for_cpu_offload"):
        yield from tensors_in(getattr(zero, name, None))


def leaves(model: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors to which autograd hands gradients."""
    for parameter in model.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            yield parameter
    for parameter in _fsdp_parameters(model):
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is not None and whole.requires_grad:
            yield whole


def swap_files(model: Any) -> Iterator[Path]:
    """Yield the files that DeepSpeed swaps this rank's parameters and optimizer states to.

    Some may not be written yet. Files of earlier runs may lie in the same folders.
    """
    swappers = {
        id(swapper): swapper
        for parameter in model.parameters()
        if (swapper := getattr(parameter, "nvme_swapper", None)) is not None
    }
    for swapper in swappers.values():
        yield from map(Path, swapper.id_to_path.values())
    swapper = getattr(zero_optimizer(model), "optimizer_swapper", None)
    if swapper is not None:
        for kept in swapper.swap_params_info.values():
            yield from map(Path, [*kept.get_swap_paths(), *kept.get_swap_gradient_paths()])


def asked_by_plugins(*, deepspeed: Any, fsdp: Any, parallelism: Any = None) -> Strategy | None:
    """Return what the plugins of an Accelerator ask for; None without plugins.

    Args:
        deepspeed: A `DeepSpeedPlugin`, several of them by name, or None.
        fsdp: A `FullyShardedDataParallelPlugin` or None.
        parallelism: A `ParallelismConfig` or None.

    Raises:
        UsageError: they ask for something that is not one of our backends.
    """
    if deepspeed is not None:
        plugin = next(iter(deepspeed.values())) if isinstance(deepspeed, dict) else deepspeed
        return deepspeed_strategy(plugin.deepspeed_config)
    if fsdp is None:
        return None
    replicas = getattr(parallelism, "dp_replicate_size", None) or requested_replicas(os.environ)
    return fsdp_strategy(
        version=fsdp.fsdp_version,
        reshard_after_forward=fsdp.reshard_after_forward is True,
        offload=isinstance(fsdp.cpu_offload, CPUOffloadPolicy),
        replicas=replicas,
    )


def split_by(accelerator: Any, model: Any) -> str:
    """Name the ways in which one copy of the model's computation is split over ranks, or `none`.

    Sharded states are none of them: each rank still computes all layers, of rows of its own.
    """
    config = accelerator.parallelism_config
    sizes = {
        "tensor": getattr(config, "tp_size", 1),
        "context": getattr(config, "cp_size", 1),
        "sequence": getattr(config, "sp_size", 1),
    }
    if zero_optimizer(model) is not None:
        sizes["tensor"] = max(sizes["tensor"], model.autotp_size())
    elif not isinstance(model, FSDPModule):
        meshes = [p.device_mesh.size() for p in model.parameters() if isinstance(p, DTensor)]
        sizes["tensor"] = max(sizes["tensor"], *meshes, 1)
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "none"


def checkpoints_activations(model: Any) -> bool:
    """Whether some layer keeps its input alone and computes the rest again in backward."""
    return any(
        isinstance(module, CheckpointWrapper) or getattr(module, "gradient_checkpointing", False)
        for module in model.modules()
    )


def compiled(model: Any) -> bool:
    """Whether torch.compile makes graphs of the model or of a part of it."""
    return any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        for module in model.modules()
    )


def stand_in(owner: Any, name: str, ours: Any) -> Callable[[], None]:
    """Put something in place of a method, and return what takes that back.

    Whoever put something of his own in front since then keeps ours inside: it is left there, and
    has to let everything through from then on.
    """
    own = vars(owner).get(name)
    setattr(owner, name, ours)

    def undo() -> None:
        if vars(owner).get(name) is not ours:
            return
        if own is None:  # it was inherited
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    return undo


def elements_of(parameter: torch.Tensor) -> int:
    """Elements of the whole parameter, wherever its parts are."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def sharded_fraction(model: Any) -> float:
    """The share of all parameters that this rank is the keeper of; 1.0 without sharding."""
    kept = whole = 0
    for parameter in model.parameters():
        whole += elements_of(parameter)
        partition = getattr(parameter, "ds_tensor", None)
        kept += local(parameter).numel() if partition is None else int(partition.ds_numel)
    return kept / whole if whole else 1.0


def resident_fraction(model: Any) -> float:
    """The share of all parameters that this rank holds right now, gathered ones included."""
    held = sum(tensor.numel() for tensor in parameters_held(model))
    held -= sum(tensor.numel() for tensor in _scales_held(model))
    whole = sum(elements_of(parameter) for parameter in model.parameters())
    return held / whole if whole else 1.0


def master_held(model: Any) -> Iterator[torch.Tensor]:
    """Yield the fp32 partitions that DeepSpeed steps on; others step on the parameters."""
    zero = zero_optimizer(model)
    yield from getattr(zero, "single_partition_of_fp32_groups", ())
    yield from getattr(zero, "fp32_partitioned_groups_flat", ())
    yield from getattr(zero, "fp32_groups_flat_partition", ())


def gradients_held(model: Any) -> Iterator[torch.Tensor]:
    """Yield the gradients that this rank holds before the optimizer step."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            yield local(parameter.grad)
    zero = zero_optimizer(model)
    if zero is None:
        return
    for partitions in getattr(zero, "averaged_gradients", {}).values():
        yield from tensors_in(partitions)
    yield from tensors_in(getattr(zero, "grad_partitions_flat_buffer", None))
    # DeepSpeed turns ZeRO-1 in bf16 with `grad_accum_dtype: fp32` into an optimizer of its own.
    yield from getattr(zero, "fp32_groups_gradients_flat", ())
    for master in master_held(model):
        if master.grad is not None:
            yield master.grad


def gradient_squares(model: Any) -> Iterator[tuple[str, torch.Tensor | float, int]]:
    """Yield the name of each trained parameter and what this rank holds of its gradient.

    To be asked before the optimizer step: the sum of squares of this rank's part, unread, and how
    many ranks hold that same part. DeepSpeed's gradients are still multiplied by its loss scale.
    """
    zero = zero_optimizer(model)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # DeepSpeed's bf16 optimizer leaves gradients in 16 bits beside those that it steps on.
        whole = parameter.grad is not None and getattr(parameter, "_hp_grad", None) is None
        if zero is not None and not whole:
            yield name, _square_of_partition(zero, parameter), 1
        elif parameter.grad is None:
            yield name, 0.0, ranks
        else:
            copies = replicas(model) if isinstance(parameter, DTensor) else ranks
            yield name, _square(local(parameter.grad)), copies


def _square_of_partition(zero: Any, parameter: Any) -> torch.Tensor | float:
    """Return the sum of squares of this rank's partition of one gradient (deepspeed 0.19)."""
    norms = getattr(zero, "norm_for_param_grads", None)
    if norms is not None:  # offloaded: taken while it was on the device, for clipping
        return norms.get(zero.get_param_id(parameter), 0.0) ** 2
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_local_grad

        return _square(safe_get_local_grad(parameter))
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:  # other ranks' partitions hold all of it
        return 0.0
    # As `get_full_hp_grad` of deepspeed/utils/tensor_fragment.py reads it.
    held = mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
    address = mapping.lp_fragment_address
    if held.numel() == parameter.numel():
        held = held.narrow(0, address.start, address.numel)
    return _square(held)


def _square(tensor: torch.Tensor) -> torch.Tensor | float:
    # Piece by piece: a copy of all of it in fp64 would count in the peak of the step.
    pieces = tensor.detach().reshape(-1).split(SUMMED_AT_ONCE)
    return sum(torch.linalg.vector_norm(piece, dtype=torch.float64) ** 2 for piece in pieces)


def loss_scale(model: Any) -> float:
    """Return what DeepSpeed has multiplied the loss with, 1.0 elsewhere."""
    return float(getattr(zero_optimizer(model), "loss_scale", 1.0))


def pieces(model: Any) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
    """Yield each parameter that others may hold too: its name, what is here, and which piece it is.

    Ranks with the same piece have to hold the same numbers. The piece of a whole parameter is ();
    ZeRO-3's partitions are left out, for no two ranks hold the same one.
    """
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_tensor") or parameter.is_meta:
            continue
        piece: tuple[int, ...] = ()
        if isinstance(parameter, DTensor):
            at = parameter.device_mesh.get_coordinate() or ()
            split = zip(at, parameter.placements, strict=True)
            piece = tuple(where for where, placement in split if not placement.is_replicate())
        yield name, local(parameter.detach()), piece


def optimizer_of(model: Any, optimizer: Any) -> torch.optim.Optimizer:
    """Unwrap Accelerate's and DeepSpeed's wrappers down to the optimizer that steps."""
    inner = optimizer
    while not isinstance(inner, torch.optim.Optimizer) or type(inner).__module__.startswith(
        ("accelerate.", "deepspeed.runtime.zero")
    ):
        following = getattr(inner, "optimizer", None)
        if following is None:
            break
        inner = following
    return inner


def parameter_groups(model: Any, optimizer: Any) -> list[tuple[dict[str, Any], list[Any]]]:
    """Return the optimizer's groups, each with the parameters of the model that it steps.

    DeepSpeed's groups hold flat partitions in their place.
    """
    groups = optimizer_of(model, optimizer).param_groups
    zero = zero_optimizer(model)
    if zero is None:
        return [(group, list(group["params"])) for group in groups]
    held: list[list[Any]] = [[] for _ in groups]
    for name in ("bit16_groups", "bf16_groups"):  # the latter of its optimizer for bf16
        for number, parameters in enumerate(getattr(zero, name, ())):
            held[number] += parameters
    for number, parameters in enumerate(getattr(zero, "fp16_groups", ())):
        held[zero.sub_group_to_group_id[number]] += parameters
    return list(zip(groups, held, strict=True))


def states_held(model: Any, optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of the optimizer's state that this rank holds in memory."""
    for state in optimizer_of(model, optimizer).state.values():
        yield from (local(tensor) for tensor in tensors_in(state))


def precision(accelerator: Any, model: Any) -> str:
    """What is computed in: `no` (fp32), `bf16` or `fp16`.

    Not what was asked for: Accelerate 1.15 asked for fp16 on a CPU computes in fp32, and
    DeepSpeed with `bf16: auto` and nobody to fill it in does too.
    """
    if zero_optimizer(model) is not None:
        return "bf16" if model.bfloat16_enabled() else "fp16" if model.fp16_enabled() else "no"
    return accelerator.mixed_precision if accelerator.native_amp else "no"


def reduce_dtype(model: Any) -> torch.dtype | None:
    """The dtype in which gradients cross the wire; None where nothing does."""
    trained = next(each.dtype for each in model.parameters() if each.requires_grad)
    if zero_optimizer(model) is not None:
        return model.communication_data_type or trained
    if isinstance(model, FSDPModule):
        policy = model._get_fsdp_state()._mp_policy
        return policy.reduce_dtype or policy.param_dtype or trained
    return trained if isinstance(model, DistributedDataParallel) else None


def offloads(model: Any) -> tuple[str, str]:
    """Where optimizer states and parameters were put: `none`, `cpu` or `nvme` each."""
    if isinstance(model, FSDPModule):
        place = "cpu" if isinstance(_fsdp_group(model).offload_policy, CPUOffloadPolicy) else "none"
        return place, place
    zero = zero_optimizer(model)
    if zero is None:
        return "none", "none"
    states = getattr(zero, "offload_optimizer", False) or getattr(zero, "cpu_offload", False)
    parameters = getattr(zero, "offload_param", False)
    return (
        "nvme" if getattr(zero, "swap_optimizer", False) else "cpu" if states else "none",
        "nvme"
        if getattr(zero, "params_in_nvme_and_cpu", False)
        else "cpu"
        if parameters
        else "none",
    )


def reshards_after_forward(model: Any) -> bool | None:
    """FSDP2: whether its blocks free their parameters after forward; None elsewhere."""
    if not isinstance(model, FSDPModule):
        return None
    # The root keeps its parameters in either case, and so does the unit into which accelerate 1.15
    # puts the embedding, norm and head of a tied model (fsdp_utils.py): any block that frees its
    # own will do.
    blocks = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    if not blocks:
        return None
    return any(_fsdp_group(block).post_forward_mesh_info is not None for block in blocks)


def layers_wrapped(model: Any) -> bool | None:
    """FSDP2: whether every decoder layer is a unit of its own; None where nobody can tell.

    Without a wrapping policy Accelerate wraps embeddings and the root, and each step gathers all
    layers at once.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    if not isinstance(model, FSDPModule) or not names:
        return None
    layers = [
        module
        for module in model.modules()
        if names & {kind.__name__ for kind in type(module).__mro__}
    ]
    return all(isinstance(layer, FSDPModule) for layer in layers) if layers else None


def replicas(model: Any) -> int:
    """FSDP2: groups that each hold a whole sharded model; 1 elsewhere."""
    if not isinstance(model, FSDPModule):
        return 1
    parameter = next(model.parameters())
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    return mesh.size(0) if mesh is not None and mesh.ndim == 2 else 1


def _fsdp_parameters(model: Any) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                yield from group.fsdp_params


def _fsdp_group(module: Any) -> Any:
    for candidate in module.modules():
        if isinstance(candidate, FSDPModule):
            group = candidate._get_fsdp_state()._fsdp_param_group
            if group is not None:
                return group
    raise AssertionError("an FSDP module without parameters")


def number(tensor: Any) -> float:
    """Return a scalar as a number. One that is spread over the ranks is gathered: all call it."""
    return float(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dictionaries, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
