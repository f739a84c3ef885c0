"""Tensors of a wrapped model under any sharding, and functions common to every backend.

A parameter is whole, a `DTensor` with this rank's part (FSDP2), or, under ZeRO-3, an empty tensor
beside a partition. Its own attributes show the kind, before and after it is wrapped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from toolkit.engines.names import plain_name

SUMMED_AT_ONCE: Final = 1 << 20
"""Elements of a tensor whose squares are added up at once."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_spread(tensor: Any) -> bool:
    """Whether a tensor lies on a mesh of ranks: in parts, in copies, or as parts of a sum."""
    return isinstance(tensor, DTensor)


def is_partitioned(parameter: Any) -> bool:
    """Whether ZeRO-3 keeps a partition of a parameter beside it, from `zero.Init` on."""
    return hasattr(parameter, "ds_tensor")


def held_part(parameter: Any) -> torch.Tensor:
    """Return the part of a parameter that this rank keeps between its uses."""
    return getattr(parameter, "ds_tensor", local(parameter.detach())).detach()


def is_swapped_out(parameter: Any) -> bool:
    """Whether the part of a parameter that this rank keeps lies in a file."""
    partition = getattr(parameter, "ds_tensor", None)
    return partition is not None and partition.numel() < int(partition.ds_numel)


def number(tensor: Any) -> float:
    """Return a scalar as a number; a collective where it is spread over the ranks."""
    return float(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole; a collective where it is spread over the ranks."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Offloaded shards lie on the CPU, and their process group may speak for the GPUs alone.
    if tensor.device.type != tensor.device_mesh.device_type:
        tensor = tensor.to(tensor.device_mesh.device_type)
    return tensor.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]: `to` keeps the class


@torch.no_grad()
def put_part(tensor: Any, numbers: torch.Tensor) -> None:
    """Give this rank's part of a tensor its numbers of the whole one, without communication."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(numbers)
        return
    spread: Any = distribute_tensor(
        numbers, tensor.device_mesh, tensor.placements, src_data_rank=None
    )
    local(tensor).copy_(spread.to_local())


def part_of(numbers: torch.Tensor, tensor: Any) -> torch.Tensor:
    """Return a copy of this rank's part of whole numbers, spread as a tensor of their shape is."""
    if not isinstance(tensor, DTensor) or numbers.shape != tensor.shape:
        return numbers.clone()
    part = torch.empty_like(tensor.detach(), dtype=numbers.dtype)
    put_part(part, numbers)
    return part


def like_part(part: Any, tensor: Any) -> Any:
    """Return this rank's part of a tensor that is spread as another, where it has its shape."""
    spread = isinstance(tensor, DTensor) and isinstance(part, torch.Tensor)
    if not spread or part.shape != local(tensor).shape:
        return part
    return DTensor.from_local(
        part.to(local(tensor).device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def copies_of(tensor: Any, *, ranks: int | None = None) -> int:
    """Return the number of ranks that hold the same part of a tensor, or the whole of it.

    Args:
        tensor: Whole, or spread over a mesh.
        ranks: The number of ranks that hold the tensor or a part of it; by default all.
    """
    if ranks is None:
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if not isinstance(tensor, DTensor):
        return ranks
    mesh = tensor.device_mesh
    cut = (mesh.size(at) for at, held in enumerate(tensor.placements) if not held.is_replicate())
    return ranks // math.prod(cut)


def shard_of(tensor: Any) -> tuple[int, ...]:
    """Return which part of a tensor this rank holds: its place along each split of it.

    Of a whole tensor, or of one that a mesh holds in copies, it is ().
    """
    if not isinstance(tensor, DTensor):
        return ()
    coordinate = tensor.device_mesh.get_coordinate() or ()
    split = zip(coordinate, tensor.placements, strict=True)
    return tuple(at for at, held in split if not held.is_replicate())


def split_dim(tensor: Any) -> int | None:
    """Return the dimension in which a tensor is cut along a mesh of one dimension; None: whole."""
    placements: Any = tensor.placements if isinstance(tensor, DTensor) else ()
    return next((held.dim for held in placements if held.is_shard()), None)


def is_spread_type(kind: type) -> bool:
    """Whether tensors of a type are spread over the ranks."""
    return issubclass(kind, DTensor)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def elements_of(parameter: torch.Tensor) -> int:
    """Return the number of elements of the whole parameter."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def shape_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the whole parameter's shape; ZeRO-3 leaves an empty tensor in its place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a wrapped model's parameters by the names that they have in the model inside."""
    for name, parameter in model.named_parameters():
        # DDP and DeepSpeed keep the model as their own `module`.
        yield plain_name(name).removeprefix("module."), parameter


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


def sum_of_squares(tensor: torch.Tensor) -> torch.Tensor | float:
    """Return the sum of a tensor's squares in fp64, unread."""
    # In chunks: a copy of all of it in fp64 would count in the peak of the step.
    chunks = tensor.detach().reshape(-1).split(SUMMED_AT_ONCE)
    return sum(torch.linalg.vector_norm(chunk, dtype=torch.float64) ** 2 for chunk in chunks)


def clip_parts(gradients: Sequence[Any], squares: torch.Tensor, limit: float) -> torch.Tensor:
    """Clip this rank's parts of gradients by the norm over all ranks, and return it; a collective.

    torch 2.15's `clip_grad_norm_` stacks all tensors' norms, and takes either whole ones or parts
    on one mesh alone. `squares` is this rank's share of the squared norm, and becomes the sum.
    """
    torch.distributed.all_reduce(squares)
    norm = squares.sqrt().float()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local(gradient).mul_(factor.to(gradient.dtype))
    return norm


def heaviest_row(
    numbers: torch.Tensor, *, first: int = 0, width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest sum of squares of one row, and the number of the row, both unread.

    Args:
        numbers: (rows, ...), from row `first` of the whole tensor on. With `width`: (elements,),
            from element `first` on, which may begin and end within a row.
        first: As above.
        width: Elements of a row of the whole tensor.
    """
    if width is None:
        norms = _row_norms(numbers.reshape(len(numbers), -1))
    else:
        first, begun = divmod(first, width)
        head = min(-begun % width, len(numbers))
        tail = len(numbers) - (len(numbers) - head) % width
        parts = (numbers[None, :head], numbers[head:tail].view(-1, width), numbers[None, tail:])
        norms = torch.cat([_row_norms(part) for part in parts if part.numel()])
    row = norms.argmax()
    return norms[row] ** 2, row + first


def _row_norms(rows: torch.Tensor) -> torch.Tensor:
    # In chunks, as above.
    chunks = rows.detach().split(max(1, SUMMED_AT_ONCE // rows.shape[1]))
    return torch.cat([torch.linalg.vector_norm(p, dim=1, dtype=torch.float32) for p in chunks])


def first_row(tensor: Any) -> int:
    """Return the number of the first row in this rank's part of a tensor."""
    if not isinstance(tensor, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return offset[0]


def has_rows(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape has several rows."""
    return len(shape) > 1 and shape[0] > 1


def storage_bytes(
    tensors: Iterable[torch.Tensor], seen: set[tuple[torch.device, int]] | None = None
) -> int:
    """Return the bytes of the storages behind tensors; a view counts as its whole storage.

    Storages in `seen`, by device and address, are left out, and those counted here are added to it.
    """
    known = set[tuple[torch.device, int]]() if seen is None else seen
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        if storage.nbytes() and key not in known:
            known.add(key)
            total += storage.nbytes()
    return total


def state_tensors(model: torch.nn.Module, *, trained_only: bool) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers by name, to be read and written in place."""
    persistent = model.state_dict().keys()
    parameters = model.named_parameters()
    tensors = {n: p.detach() for n, p in parameters if p.requires_grad or not trained_only}
    tensors |= {n: b for n, b in model.named_buffers() if n in persistent}
    return {plain_name(name): tensor for name, tensor in tensors.items()}


def scales_held(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the scales of 4-bit parameters, which are no parameters and are never sharded."""
    for module in model.modules():
        state = getattr(module, "quant_state", None)  # bitsandbytes 0.50, nn/modules.py
        inner = getattr(state, "state2", None)
        for scales in (state, inner):
            yield from tensors_in([getattr(scales, name, None) for name in ("absmax", "code")])
        yield from tensors_in(getattr(state, "offset", None))


def resident_fraction(model: torch.nn.Module, parameters_held: Iterable[torch.Tensor]) -> float:
    """Return the share of all parameters that this rank holds now, gathered ones included."""
    held = sum(tensor.numel() for tensor in parameters_held)
    held -= sum(tensor.numel() for tensor in scales_held(model))
    total = sum(map(elements_of, model.parameters()))
    return held / total if total else 1.0


def held_fraction(model: torch.nn.Module) -> float:
    """Return the share of all parameters that this rank keeps; 1.0 where it keeps them all."""
    sharded = total = 0
    for parameter in model.parameters():
        total += elements_of(parameter)
        partition = getattr(parameter, "ds_tensor", None)
        # A partition that is swapped to NVMe leaves a stub, which knows its number of elements.
        sharded += local(parameter).numel() if partition is None else int(partition.ds_numel)
    return sharded / total if total else 1.0


def checkpoints_activations(model: torch.nn.Module) -> bool:
    """Whether some layer keeps its input alone and computes the rest again in backward."""
    return any(
        isinstance(module, CheckpointWrapper) or getattr(module, "gradient_checkpointing", False)
        for module in model.modules()
    )


def compiled(model: torch.nn.Module) -> bool:
    """Whether torch.compile makes graphs of the model or of a part of it."""
    return any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        for module in model.modules()
    )


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Let a model run without gradients and dropout; modes and random numbers are restored."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
