"""Bytes that autograd keeps of a model: the dtypes that it runs in, and formulas in its widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

FP32: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """The dtypes that a model runs in."""

    compute: int
    """Bytes of an element in matrix products."""

    weight: int
    """Bytes of an element of a weight in use: of an embedding, so of the residual stream too, and
    of a norm."""

    autocast: bool
    """Whether torch's autocast casts the inputs of each operation; activations are cast again for
    every operation that uses them."""

    returns_input: bool = False
    """Whether frozen linear layers return the dtype of their input, as bitsandbytes' do."""

    adapter: int = FP32
    """Bytes of an element of LoRA's matrices: fp32 by peft, unless a library casts them."""

    adapter_dropout: bool = False
    """Whether a share of the adapters' inputs is dropped."""

    scans: bool = False
    """Whether scans and linear attention run in torch's own operations, as where the packages of
    their kernels are not installed. It is counted with all weights trained."""

    compiled: bool = False
    """Whether layers are compiled: backward computes again what is elementwise, from what products
    and reductions left (the partitioner of torch 2.11 to 2.13)."""

    def key(self, targets: str, *, fused: bool) -> str:
        """Return the name of what is counted in these dtypes.

        Args:
            targets: The linear layers with adapters; `none` trains all weights.
            fused: Whether attention runs in a kernel that never holds the scores.
        """
        adapted = targets != "none"
        words = (
            self.compute,
            self.weight,
            int(self.autocast and self.compute < FP32),
            self.adapter if adapted else 0,
            targets,
            *(["dropout"] if adapted and self.adapter_dropout else []),
            *(["returned"] if adapted and self.returns_input else []),
            "flash" if fused else "eager",
            *(["scans"] if self.scans else []),
            *(["compiled"] if self.compiled else []),
        )
        return "-".join(map(str, words))


FULL: Final = tuple(
    Regime(compute=compute, weight=weight, autocast=autocast)
    for compute, weight, autocast in ((4, 4, False), (2, 2, False), (2, 4, True), (2, 2, True))
)
"""The dtypes of jobs that train all weights."""

ADAPTED: Final = tuple(
    Regime(
        compute=compute,
        weight=weight,
        autocast=autocast,
        adapter=adapter,
        returns_input=returned,
        adapter_dropout=dropped,
    )
    for compute, weight, autocast, adapter, returned in (
        (4, 4, False, 4, False),
        (2, 2, False, 2, False),
        (2, 2, True, 2, False),
        (2, 2, True, 4, False),
        (2, 4, True, 4, False),
        (2, 4, True, 4, True),
    )
    for dropped in (False, True)
)
"""The dtypes of jobs with adapters."""

Form = dict[int, float]
"""Factors of the features of a table, by their numbers: a sum of products of widths."""


def width_of(feature: str, widths: Mapping[str, float]) -> float:
    """Return the product of the widths that a feature names, 0 where the model lacks one."""
    value = 1.0
    for name in feature.split("*"):
        if name == "derived":
            value *= widths["hidden"] // max(1, widths["heads"])
        elif name != "1":
            value *= widths.get(name, 0)
    return value


def value_of(form: Sequence[float], values: Sequence[float]) -> float:
    """Return the value of a form, as files have it, where its features have these values."""
    return sum(values[int(form[at])] * form[at + 1] for at in range(0, len(form), 2))


def at_least(form: Form, other: Form) -> bool:
    """Whether a form is no less than another in every width."""
    return all(form.get(number, 0.0) >= factor for number, factor in other.items())


class FormTable:
    """Distinct forms, by number: most of a model's dtypes have the same ones."""

    def __init__(self) -> None:
        self.forms: list[Form] = []
        self._numbers: dict[tuple[tuple[int, float], ...], int] = {}

    def number(self, form: Form) -> int:
        key = tuple(sorted((number, factor) for number, factor in form.items() if factor))
        if key not in self._numbers:
            self._numbers[key] = len(self.forms)
            self.forms.append(dict(key))
        return self._numbers[key]

    def flat(self) -> list[list[float]]:
        """Return each form as numbers of features and factors in turn, as files have it."""
        return [
            [int(part) if part == int(part) else part for pair in form.items() for part in pair]
            for form in self.forms
        ]


class LayerBytes(NamedTuple):
    """Bytes of one layer for each token."""

    saved: float
    """Bytes held between forward and backward, without checkpointing."""

    boundary: float
    """Bytes of the layer's input, which checkpointing keeps."""

    products: float
    """Bytes of the results of matrix products and of fused attention, which selective checkpointing
    keeps beside the input."""

    every_second: float
    """Bytes of them without every second linear layer's, as torchtitan keeps them."""

    backward_peak: float
    """Peak bytes during the layer's backward, `saved` included."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptForms:
    """Bytes that a model keeps for each token, in any dtypes, as formulas in its widths."""

    features: Sequence[str]
    forms: Sequence[Sequence[float]]
    rows: Mapping[str, Any]
    """By the key of a regime: the number of the form of what is kept outside the layers, then for
    each kind of layer those of `LayerBytes` in order, several of its peak."""

    def of_layer(self, key: str, kind: int, widths: Mapping[str, float]) -> LayerBytes:
        """Return the bytes of a layer.

        Raises:
            KeyError: the model was not counted with this key.
        """
        value = self._values(widths)
        *numbers, peaks = self.rows[key][1 + kind]
        return LayerBytes._make([*map(value, numbers), max(map(value, peaks))])

    def outside(self, key: str, widths: Mapping[str, float]) -> float:
        """Return the bytes kept by the last norm, the head, and others outside the layers.

        Raises:
            KeyError: the model was not counted with this key.
        """
        return self._values(widths)(self.rows[key][0])

    def _values(self, widths: Mapping[str, float]) -> Callable[[int], float]:
        values = [width_of(feature, widths) for feature in self.features]
        return lambda number: value_of(self.forms[number], values)
