"""States missing from DeepSpeed's checkpoints when the optimizer is on the CPU or on NVMe.

With NVMe, deepspeed 0.19 copies the swap files into a checkpoint and back (engine.py,
`offloaded_tensors`), and reads no other state of the optimizer: a resumed run would count Adam's
steps from 1, take the moments in the copied files for zeros, and lose groups that are too small to
be swapped. On the CPU its Adam multiplies the powers of its betas step by step (cpu_adam.h,
`IncrementStep`), and recomputes them after a jump, with a different last bit. None of this has a
public API. tests/checkpoints/test_exact_resuming.py fails when this moves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def swapped_state(zero: Any) -> dict[str, Any] | None:
    """Return the states that ZeRO's swap files on this rank lack; None without swapping."""
    if not getattr(zero, "swap_optimizer", False):
        return None
    groups: list[dict[str, Any]] = []
    # The number of elements is for readers without ranks: a file may be longer.
    for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
        states = zero.optimizer.state.get(flat, {})
        is_swapped = zero._swappable_optimizer_subgroup(number)
        in_files = [
            name
            for name, state in states.items()
            if is_swapped and torch.is_tensor(state) and hasattr(state, "ds_id")
        ]
        groups.append(
            {
                "id": getattr(flat, "ds_id", None),
                "in_files": in_files,
                "elements": int(zero.fp16_partitioned_groups_flat_numel[number]),
                "flat": None if is_swapped else flat.detach().clone(),
                "state": {
                    name: state.detach().clone() if torch.is_tensor(state) else state
                    for name, state in states.items()
                    if name not in in_files
                },
            }
        )
    numbers = {n: v for n, v in vars(zero.loss_scaler).items() if isinstance(v, int | float)}
    return {"groups": groups, "loss_scaler": numbers}


def restore_swapped(zero: Any, swapped: dict[str, Any] | None) -> None:
    """Restore the result of `swapped_state`, after DeepSpeed has restored its files."""
    if swapped is None:
        return
    # DeepSpeed gathered the parameters that it keeps whole before their partitions were read.
    zero.checkpoint_event_prologue()
    for number, (flat, group) in enumerate(
        zip(zero.fp32_partitioned_groups_flat, swapped["groups"], strict=True)
    ):
        if group["flat"] is not None:
            flat.data.copy_(group["flat"])
            zero.optimizer.state[flat] = _moved(group["state"], flat)
            continue
        if group["id"] != flat.ds_id:  # DeepSpeed names its files by it, and copied the others
            raise RuntimeError(
                f"DeepSpeed numbers a group of parameters {flat.ds_id} that was {group['id']} when "
                "it was saved: other models were made in this process before."
            )
        zero._optimizer_states_and_gradient_swap_in(number)
        in_files = {name: _read(zero, name, flat) for name in group["in_files"]}
        zero.optimizer.state[flat] = _moved(group["state"], flat) | in_files
        zero._optimizer_states_and_gradient_swap_out(number)
    vars(zero.loss_scaler).update(swapped["loss_scaler"])
    zero.reset_swap_buffers()  # from the masters to the parameters
    zero.checkpoint_event_epilogue()


def count_again(zero: Any) -> None:
    """Have DeepSpeed's Adam on the CPU count the steps that its state says were done."""
    adam: Any = getattr(zero, "optimizer", None)
    if type(adam).__name__ != "DeepSpeedCPUAdam":
        return
    done = max((int(states.get("step", 0)) for states in adam.state.values()), default=0)
    group, one_element = adam.param_groups[0], [torch.zeros(1) for _ in range(4)]
    for step in range(1, done + 1):
        # With a rate of 0, on tensors without another use: only the count advances.
        adam.ds_opt_adam.adam_update(
            *(adam.opt_id, step, 0.0, *group["betas"], group["eps"], 0.0, group["bias_correction"]),
            *one_element,
        )


def _read(zero: Any, name: str, flat: Any) -> torch.Tensor:
    """Read one swapped state; a new optimizer knows the file's name but not yet its length."""
    file = Path(zero.optimizer_swapper.swap_folder) / f"{name}-{flat.ds_id}.tensor.swp"
    state = torch.from_file(str(file), shared=False, size=flat.numel(), dtype=flat.dtype)
    return state.to(flat.device, copy=True)


def _moved(states: dict[str, Any], flat: torch.Tensor) -> dict[str, Any]:
    return {
        name: state.to(flat.device) if torch.is_tensor(state) else state
        for name, state in states.items()
    }
