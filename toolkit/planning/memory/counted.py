"""Bytes of a model that was counted on the meta device, for a regime and a length of rows."""

from __future__ import annotations

from functools import lru_cache

from toolkit.errors import UsageError
from toolkit.jobs.options import LoraTargets
from toolkit.jobs.shape import ModelShape, TokenBytes
from toolkit.jobs.weights import adapted_tensors
from toolkit.planning.memory.autograd_memory import Regime

RANK = 16
"""Rank of the adapters that are counted (measuring/meta_model_layers.py)."""


@lru_cache(maxsize=1024)
def counted_bytes(
    model: ModelShape,
    regime: Regime,
    sequence: int,
    *,
    fused: bool,
    adapters: int = 0,
    targets: LoraTargets = "all-linear",
) -> TokenBytes:
    """Return the bytes of a token in a row of `sequence` tokens.

    They are linear in the length of the row: attention keeps a number for each pair of tokens.
    Each adapted layer keeps as many numbers of a token as its adapter's rank.

    Raises:
        UsageError: the model was not counted with this attention.
    """
    assert model.counted is not None
    autocast = regime.autocast and regime.compute == 2
    adapter, adapted = (regime.adapter, targets) if adapters else (0, "none")
    attention = "flash" if fused else "eager"
    key = f"{regime.compute}-{regime.weight}-{int(autocast)}-{adapter}-{adapted}-{attention}"
    rows = model.counted.get(key)
    if rows is None:
        raise UsageError(
            f"{model.name}: what autograd keeps of {model.architecture} could not be counted with "
            f"{attention} attention. {model.note}"
        )
    (short, few), (long, many) = rows.items()
    share = (sequence - short) / (long - short)

    def at(name: str) -> float:
        low, high = getattr(few, name), getattr(many, name)
        return max(0.0, low + share * (high - low))

    more = 0.0
    if adapters:
        layers = sum(tensor.layer is not None for tensor in adapted_tensors(model, targets))
        more = regime.compute * (adapters - RANK) * layers / model.layers
    return TokenBytes(
        saved=at("saved") + more,
        boundary=at("boundary"),
        backward_peak=at("backward_peak") + more,
        products=at("products") + more,
        every_second=at("every_second"),
        outside=at("outside"),
    )
