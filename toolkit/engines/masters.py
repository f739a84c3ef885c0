"""bf16 weights whose fp32 masters the optimizer steps on: for one process and DDP.

FSDP2 and ZeRO keep masters of their own. Computing with bf16 weights needs no autocast: no weight
is cast in forward and no gradient in backward, and the states between layers take half the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch

from toolkit.engines.names import MASTER

MOMENTS: Final = ("exp_avg", "exp_avg_sq")

_KEPT: Final = "toolkit_master"
"""Attribute of a parameter: its master, and the dtype of its moments."""


@torch.no_grad()
def cast_to_bf16(model: torch.nn.Module, *, state_dtype: torch.dtype = torch.float32) -> int:
    """Cast the trained fp32 weights to bf16, and keep fp32 masters; return their number.

    Before the optimizer is made: `stepping_on_masters` then chooses it, with moments in
    `state_dtype`.
    """
    cast = 0
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype == torch.float32:
            setattr(parameter, _KEPT, (parameter.detach().clone(), state_dtype))
            parameter.data = parameter.data.to(torch.bfloat16)
            cast += 1
    return cast


def masters_of(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the fp32 masters of the parameters that have one."""
    yield from (getattr(p, _KEPT)[0] for p in parameters if hasattr(p, _KEPT))


def moments_of(model: torch.nn.Module | None) -> str | None:
    """Name the dtype of the moments of a model with masters; None without masters."""
    parameters = [] if model is None else model.parameters()
    kept = [getattr(p, _KEPT)[1] for p in parameters if hasattr(p, _KEPT)]
    return str(kept[0]).removeprefix("torch.") if kept else None


def stepping_on_masters(
    model: torch.nn.Module | None, kind: Any, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the class and the options of an optimizer, changed for a model with masters.

    Args:
        model: Before it is wrapped.
        kind: The class that was chosen without regard to masters: torch's AdamW.
        options: Of that class.
    """
    if moments_of(model) is None:
        return kind, options
    assert kind is torch.optim.AdamW, kind
    return MasterAdamW, options


def clip_in_fp32(accelerator: Any) -> None:
    """Have an Accelerator compute the norm of bf16 gradients in fp32, before it is wrapped again.

    torch's `clip_grad_norm_` (2.14) gives each norm the dtype of its gradient: 3 digits in bf16.
    """

    def clip_grad_norm_(
        parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        norms = [
            torch.linalg.vector_norm(parameter.grad, norm_type, dtype=torch.float32)
            for parameter in trained
        ]
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        torch.nn.utils.clip_grads_with_norm_(trained, max_norm, total)
        return total

    vars(accelerator)["clip_grad_norm_"] = clip_grad_norm_


class MasterAdamW(torch.optim.AdamW):
    """AdamW that steps on fp32 masters and writes bf16 weights, in one pass over each tensor.

    Args:
        params: As torch's AdamW takes them; each was cast by `cast_to_bf16`.
        options: As torch's AdamW takes them; `fused`, `foreach` and the like are not read.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        taken = ("lr", "betas", "eps", "weight_decay")
        super().__init__(params, **{name: options[name] for name in taken if name in options})
        # One graph for matrices of any size, and one for vectors.
        self._compiled: Callable[..., None] = torch.compile(_update, dynamic=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step as torch's AdamW does; gradients may be bf16."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)
        return loss

    def _step_one(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            master, state_dtype = getattr(parameter, _KEPT)
            master = master.to(parameter.device)  # where the model was moved to meanwhile
            setattr(parameter, _KEPT, (master, state_dtype))
            zeros = {name: torch.zeros_like(master, dtype=state_dtype) for name in MOMENTS}
            state |= {"step": torch.zeros(()), MASTER: master, **zeros}
        state["step"] += 1
        count, (beta1, beta2) = int(state["step"]), group["betas"]
        rate = float(group["lr"])
        # Tensors on the CPU: numbers that change would be compiled anew.
        of_step = torch.tensor(
            [1 - rate * group["weight_decay"], rate / (1 - beta1**count), (1 - beta2**count) ** 0.5]
        )
        tensors = (parameter, gradient, *(state[name] for name in (MASTER, *MOMENTS)))
        flat = [tensor.detach().view(-1) for tensor in tensors]
        # A CPU would compile for half a minute what a small model there does in no time.
        update = self._compiled if parameter.is_cuda else _update
        numbers: list[Any] = [*flat, *of_step.unbind(), beta1, beta2, group["eps"]]
        update(*numbers)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states in the dtypes in which they were saved, and write the weights from them."""
        super().load_state_dict(state_dict)
        # torch casts every state to the dtype of its parameter (2.11, 2.14).
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, saved in state_dict["state"].items():
            parameter = parameters[number]
            for name, value in saved.items():
                place = "cpu" if name == "step" else parameter.device
                self.state[parameter][name] = value.to(place, copy=True)
            state = self.state[parameter]
            setattr(parameter, _KEPT, (state[MASTER], state["exp_avg"].dtype))
            parameter.data.copy_(state[MASTER])


def _update(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    kept: torch.Tensor,
    step_size: torch.Tensor,
    correction: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Update one parameter, all its tensors flat; as torch's AdamW does it in fp32."""
    gradient = gradient.float()
    first = torch.lerp(exp_avg.float(), gradient, 1 - beta1)
    second = exp_avg_sq.float() * beta2 + (1 - beta2) * gradient * gradient
    stepped = master * kept - step_size * first / (second.sqrt() / correction + eps)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    master.copy_(stepped)
    weight.copy_(stepped)
