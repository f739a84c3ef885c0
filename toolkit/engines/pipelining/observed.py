"""Which modules of a causal LM run before its decoder layers and which after, seen in a forward.

No list of names by family: the forward of the model itself shows the order, the widths, and
whether a layer needs more of its neighbour than the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from toolkit.engines.described import decoder_layers
from toolkit.engines.tensors import evaluating, tensors_in
from toolkit.errors import UsageError

Autocast = Callable[[], AbstractContextManager[object]]
"""Enters the precision of the training."""


@dataclass(slots=True)
class Part:
    """A module beside the decoder layers, outermost, as one forward showed it."""

    name: str
    module: torch.nn.Module
    before: bool = False
    """Whether it ran before the first layer."""

    after: bool = False
    """Whether it ran after the last layer."""

    width: int | None = None
    """Last dimension of its result, if that is a tensor."""

    dtype: torch.dtype | None = None


@dataclass(slots=True, kw_only=True)
class Observed:
    """The order of a model's modules, and the hidden states between its layers."""

    stack: str
    """Name of the list of decoder layers."""

    layers: torch.nn.ModuleList
    parts: list[Part] = field(default_factory=list[Part])
    tuples: bool = False
    """Whether a layer returns a tuple that begins with the hidden states."""

    dtype: torch.dtype = torch.float32
    width: int = 0


def observe(model: Any, *, autocast: Autocast = nullcontext) -> Observed:
    """Run a forward of two tokens, and return the order of the model's modules.

    Modes and random numbers are restored.

    Raises:
        UsageError: the model cannot be cut between its layers.
    """
    observed = _stack_of(model)
    observed.parts = _parts(model, observed.stack)
    watch = _Watch(observed)
    ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    with watch.hooks(), evaluating(model), autocast():
        model(input_ids=ids, use_cache=False)
    watch.check(model)
    return observed


def _stack_of(model: Any) -> Observed:
    """Return the list of decoder layers."""
    name = type(model).__name__
    try:
        stack, layers = decoder_layers(model)
    except ValueError as error:
        raise UsageError(
            f"{name} cannot be cut into the stages of a pipeline: {error}. Use --strategy fsdp, "
            "which shards any model."
        ) from error
    if getattr(model.config, "output_router_logits", False):
        raise UsageError(
            f"{name} cannot be cut into the stages of a pipeline with output_router_logits: its "
            "loss needs the routers of all layers. Set output_router_logits to false."
        )
    return Observed(stack=stack, layers=layers)


def _parts(model: torch.nn.Module, stack: str) -> list[Part]:
    """Return the outermost modules that do not contain the stack."""
    modules = dict(model.named_modules(remove_duplicate=False))
    ancestors = [""]
    for piece in stack.split("."):
        ancestors.append(f"{ancestors[-1]}.{piece}".lstrip("."))
    return [
        Part(f"{parent}.{name}".lstrip("."), child)
        for parent in ancestors[:-1]
        for name, child in modules[parent].named_children()
        if f"{parent}.{name}".lstrip(".") not in ancestors
    ]


class _Watch:
    """Hooks on the layers and the parts around them, for one forward."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self._others: list[torch.Tensor] = []
        """Tensors that a layer returned beside the hidden states."""

        self._needs_others = False
        # Tensors are compared by identity, so those of the whole forward are kept alive.
        self._kept: list[Any] = []

    def hooks(self) -> ExitStack:
        stack = ExitStack()
        for layer in self._observed.layers:
            stack.callback(layer.register_forward_pre_hook(self._enters, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(self._leaves).remove)
        for part in self._observed.parts:
            stack.callback(part.module.register_forward_hook(self._runs(part)).remove)
        return stack

    def _enters(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self._inputs.append(hidden)
        passed = [*tensors_in([*args]), *tensors_in(kwargs)]
        self._kept.append(passed)
        others = {id(tensor) for tensor in self._others}
        self._needs_others |= any(id(tensor) in others for tensor in passed)

    def _leaves(self, _: Any, __: Any, output: Any) -> None:
        self._observed.tuples = isinstance(output, tuple)
        hidden, *others = output if isinstance(output, tuple) else (output,)
        self._outputs.append(hidden)
        self._others += tensors_in(others)

    def _runs(self, part: Part) -> Callable[..., None]:
        def ran(_: Any, __: Any, output: Any) -> None:
            if not self._inputs:
                part.before = True
            # One that runs between two layers shows in the hidden states, which differ then.
            part.after |= len(self._outputs) == len(self._observed.layers)
            if isinstance(output, torch.Tensor):
                part.width, part.dtype = output.shape[-1], output.dtype

        return ran

    def check(self, model: Any) -> None:
        """Check that a layer gets the hidden states of the layer before, and no more of it.

        Raises:
            UsageError: the model cannot be cut.
        """
        ran_once = len(self._inputs) == len(self._outputs) == len(self._observed.layers)
        handed_on = all(
            came is went for came, went in zip(self._inputs[1:], self._outputs, strict=False)
        )
        if not (ran_once and handed_on and self._inputs[0].dim() == 3) or self._needs_others:
            raise UsageError(
                f"{type(model).__name__} cannot be cut into the stages of a pipeline: its decoder "
                "layers need more of each other than the hidden states. Use --strategy fsdp, "
                "which shards any model."
            )
        last = self._outputs[-1]
        self._observed.dtype, self._observed.width = last.dtype, last.shape[-1]
