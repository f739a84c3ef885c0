"""Adapters added into the weights they stand beside: the weights of an ordinary model.

One weight at a time, whatever shards it and whatever it is packed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from toolkit.engines.tensors import plain_name
from toolkit.training.adapters import adapted_modules, is_turned

BASE: Final = ".base_layer."
"""In the names of what stood in an adapted layer before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What one weight is made from, whole and on the CPU; None everywhere but on rank 0."""

    name: str
    """In an ordinary model."""

    weight: torch.Tensor | None
    layer: Any = None
    """With the adapter; None where there is none."""

    a: torch.Tensor | None = None
    b: torch.Tensor | None = None

    def merged(self) -> torch.Tensor | None:
        """Return the weight with what its adapter adds, worked out in fp32.

        Returns:
            In the dtype that the weight was loaded in. What was in 4 bits is unpacked first: the
            sum is that of the weights that were trained beside, not of those that were packed.
        """
        if self.weight is None or self.a is None or self.b is None:
            return self.weight
        base, weight = self.layer.get_base_layer(), self.weight
        if getattr(base, "quant_state", None) is not None:
            from toolkit.training.quantized import dequantised

            weight = dequantised(base, weight).cpu()
        (adapter,) = self.layer.active_adapters
        added = (self.b.float() @ self.a.float()) * self.layer.scaling[adapter]
        return (weight.float() + (added.T if is_turned(base) else added)).to(weight.dtype)


def gathered_parts(unwrapped: Any, whole: Callable[[Any], torch.Tensor | None]) -> Iterator[Parts]:
    """Yield every weight of a model with adapters, each with its adapter; a collective.

    Args:
        unwrapped: Sharded or not.
        whole: Gathers a parameter on every rank, and returns it on the CPU of rank 0 alone.
    """
    layers = dict(adapted_modules(unwrapped))
    adapters = {
        id(parameter)
        for layer in layers.values()
        for name, parameter in layer.named_parameters()
        if not f".{name}".startswith(BASE)
    }
    for name, parameter in unwrapped.named_parameters():
        if id(parameter) in adapters:
            continue
        layer_name, base, own = name.partition(BASE)
        if not base:
            yield Parts(name=plain_name(name), weight=whole(parameter))
            continue
        name, weight, layer = f"{layer_name}.{own}", whole(parameter), layers[layer_name]
        if own != "weight":
            yield Parts(name=plain_name(name), weight=weight)
            continue
        (adapter,) = layer.active_adapters
        a, b = (whole(part[adapter].weight) for part in (layer.lora_A, layer.lora_B))
        yield Parts(name=plain_name(name), weight=weight, layer=layer, a=a, b=b)
    persistent = unwrapped.state_dict().keys()
    for name, buffer in unwrapped.named_buffers():
        if name in persistent:
            yield Parts(name=plain_name(name), weight=buffer.detach().cpu())
