"""Whole tensors of a wrapped model, whatever shards them: one at a time, so that they fit.

Everything here is a collective: every rank calls it, for the same parameters in the same order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from toolkit.engines.inspection import elements_of, local, zero_optimizer


def whole_weight(model: Any, parameter: Any) -> torch.Tensor:
    """Return the weights that the optimizer steps on: DeepSpeed's fp32 masters, where it has them.

    Args:
        model: As `Accelerator.prepare` returned it.
        parameter: One of its parameters.

    Returns:
        In the whole parameter's shape and the dtype that is stepped on, without a gradient.
    """
    if zero_optimizer(model) is None:
        return _gathered(parameter.detach())
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
    if master is not None:
        return master.detach()
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def whole_gradient(model: Any, parameter: Any) -> torch.Tensor:
    """Return the gradient that the optimizer will see, before clipping; zeros where there is none.

    DeepSpeed has it between the last backward and its step, the others until it is zeroed.
    """
    gradient: torch.Tensor | None = parameter.grad
    if zero_optimizer(model) is not None and parameter.requires_grad:
        from deepspeed.utils import safe_get_full_grad

        gradient = safe_get_full_grad(parameter)
    if gradient is None:
        return torch.zeros(shape_of(parameter))
    return _gathered(gradient.detach())


@torch.no_grad()
def put_whole_weight(model: Any, parameter: Any, whole: torch.Tensor) -> None:
    """Give a trained parameter other numbers, between two steps.

    Args:
        model: As `Accelerator.prepare` returned it.
        parameter: One of its parameters.
        whole: In the whole parameter's shape; the same on every rank.
    """
    if zero_optimizer(model) is not None:
        _put_into_zero(parameter, whole)
    elif isinstance(parameter, DTensor):
        # Each rank has the whole: nothing needs to be sent.
        spread = distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        local(parameter).copy_(spread.to_local())
    else:
        parameter.copy_(whole)


def _put_into_zero(parameter: Any, whole: torch.Tensor) -> None:
    """Set what is computed with, and the fp32 master that the optimizer steps on."""
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    if not hasattr(parameter, "ds_id"):
        parameter.copy_(whole)
        safe_set_full_fp32_param(parameter, whole)
        return
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.copy_(whole)
    ranks = torch.distributed.get_world_size(parameter.ds_process_group)
    length = -(-whole.numel() // ranks)
    if length * ranks == whole.numel():
        safe_set_full_fp32_param(parameter, whole)
        return
    # That cuts past the end of a parameter whose last partition is padded (deepspeed 0.19).
    begin = length * torch.distributed.get_rank(parameter.ds_process_group)
    part = torch.zeros(length)
    kept = whole.flatten()[begin : begin + length]
    part[: len(kept)] = kept
    safe_set_local_fp32_param(parameter, part)


def plain_name(name: str) -> str:
    """Return a parameter's name without what torch's wrappers put into it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def shape_of(parameter: Any) -> tuple[int, ...]:
    """Return the whole parameter's shape; ZeRO-3 leaves an empty tensor in its place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def write_whole(
    file: Path | None, parameters: dict[str, Any], whole: Callable[[Any], torch.Tensor]
) -> float:
    """Write one whole tensor of each parameter as fp32 safetensors, holding one at a time.

    Args:
        file: None on ranks that only take part.
        parameters: By name; the same on every rank.
        whole: Gathers a parameter's tensor, in the parameter's whole shape.

    Returns:
        The norm of them all together.
    """
    squares = 0.0
    if file is None:
        return _norm(squares + sum(_squares(whole(each)) for each in parameters.values()))
    with file.open("wb") as opened:
        opened.write(_header(parameters))
        for parameter in parameters.values():
            tensor = whole(parameter).to("cpu", torch.float32).contiguous()
            squares += _squares(tensor)
            opened.write(tensor.numpy().tobytes())
    return _norm(squares)


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    # Offloaded shards lie on the CPU, and their process group may speak for the GPUs alone.
    if tensor.device.type != tensor.device_mesh.device_type:
        tensor = tensor.to(tensor.device_mesh.device_type)
    return tensor.full_tensor()


def _header(parameters: dict[str, Any]) -> bytes:
    entries: dict[str, Any] = {}
    offset = 0
    for name, parameter in parameters.items():
        end = offset + 4 * elements_of(parameter)
        shape = list(shape_of(parameter))
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _squares(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def _norm(squares: float) -> float:
    return squares**0.5
