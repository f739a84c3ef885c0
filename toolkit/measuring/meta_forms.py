"""Formulas in the widths of a model, read off counted tensors.

A model is built in widths that no sum of few others makes, so that the size of each tensor says
which widths it is made of. What a model keeps is then known for all widths. A reading is not a
proof: it is held against counts in other widths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import product
from typing import Any, Final

from toolkit.jobs.kept import Form, FormTable, at_least, width_of
from toolkit.measuring.meta_model_layers import RANK, KeptSizes, LayerCount, Sizes, bytes_in

ROWS: Final = 2

GENERIC: Final[Mapping[str, int]] = {
    "hidden": 377 * 266,
    "heads": 377,
    "kv_heads": 29,
    # Transformers passes heads of up to 256 to SDPA as they are.
    "head_dim": 254,
    "ffn": 150_011,
    "vocab": 200_003,
    "positions": 5_003,
    "embedding": 60_013,
    "experts": 67,
    "active": 11,
    "expert": 7_001,
    "shared": 9_011,
    "sequence": 1_009,
    "rank": 499,
}
"""Widths of which no two make another."""

KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_kv_heads", "num_key_value_heads"),
    "head_dim": ("head_dim",),
    "ffn": ("ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size"),
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "active": ("num_experts_per_tok",),
    "expert": ("moe_intermediate_size",),
    "shared": ("shared_expert_intermediate_size",),
}
"""Widths, with the keys that configs have for them."""


FEATURES: Final = (
    "1",
    "hidden",
    "heads*head_dim",
    "kv_heads*head_dim",
    "ffn",
    "heads",
    "kv_heads",
    "head_dim",
    "heads*sequence",
    "sequence",
    "rank",
    "active",
    "active*hidden",
    "active*expert",
    "active*ffn",
    "experts",
    "expert",
    "shared",
    "active*experts",
    "vocab",
    "positions",
    "derived",
    "embedding",
    "kv_heads*derived",
)
"""Products of widths that the size of a tensor is a sum of; `derived` is hidden / heads."""

PARTS: Final = (1, 2, 3, 4)


class UnreadSizeError(ValueError):
    """The size of a tensor is no sum of few widths."""


class Reader:
    """Reads sizes as sums of a model's widths."""

    def __init__(self, widths: Mapping[str, int], table: FormTable) -> None:
        self._table = table
        self.tokens = ROWS * widths["sequence"]
        values = [(number, width_of(name, widths)) for number, name in enumerate(FEATURES)]
        seen: set[float] = set()
        # Of two that are equal in this model, the first.
        self._features = [
            (number, value)
            for number, value in values
            if value and not (value in seen or seen.add(value))
        ]
        self._known: dict[int, Form] = {}

    @cached_property
    def _sums(self) -> dict[float, Form]:
        sums: dict[float, Form] = {}
        one = [((n, c),) for n, _ in self._features for c in PARTS]
        two = [
            ((n, c), (m, d))
            for n, _ in self._features
            for m, _ in self._features
            if n != m
            for c, d in product(PARTS, PARTS)
        ]
        values = dict(self._features)
        for form in (*one, *two):
            sums.setdefault(sum(values[n] * c for n, c in form), {n: float(c) for n, c in form})
        return sums

    def elements(self, number: int) -> Form:
        """Return the form of a number of elements.

        Raises:
            UnreadSizeError: it is no sum of two widths.
        """
        form = self._sums.get(number)
        if form is None:
            raise UnreadSizeError(f"{number} elements")
        return form

    def bytes(self, size: int) -> Form:
        """Return the form of the bytes for each token of a tensor of `size` bytes.

        A tensor that is smaller than a byte for each token has none.
        """
        if size not in self._known:
            self._known[size] = self._read(size)
        return self._known[size]

    def _read(self, size: int) -> Form:
        if not size or (size < self.tokens and (size * 2) % self.tokens):
            return {}
        for width in (4, 2, 1, 8, 0.5):
            form = self._sums.get(size / self.tokens / width)
            if form is not None:
                return {number: factor * width for number, factor in form.items()}
        raise UnreadSizeError(f"{size} bytes for {self.tokens} tokens")

    def sum(self, sizes: Sizes) -> Form:
        total: Form = {}
        for size, times in sizes.items():
            for number, factor in self.bytes(size).items():
                total[number] = total.get(number, 0.0) + times * factor
        return total

    def layer(self, kept: KeptSizes) -> list[Any]:
        """Return the forms of a layer, by their numbers: those of `KeptForms.of_layer`."""
        parts = (kept.saved, kept.boundary, kept.products, kept.every_second)
        peaks = largest(self.sum(sizes) for sizes in kept.peaks)
        return [
            *(self._table.number(self.sum(part)) for part in parts),
            [self._table.number(peak) for peak in peaks],
        ]

    def number(self, sizes: Sizes) -> int:
        return self._table.number(self.sum(sizes))

    def rows(self, count: LayerCount) -> Iterator[list[Any]]:
        """Yield the rows of `KeptForms` of one pass: as the model is written, and compiled."""
        count.run(ROWS, self.tokens // ROWS)
        outside = self.number(count.outside)
        for kept in (count.kept, count.compiled):
            yield [outside, *(self.layer(kept[twin]) for twin in dict.fromkeys(count.twins))]


class LengthReader:
    """Reads forms in the length of a row and the rank of adapters, for a model's own widths.

    Bytes of a token are linear in the length, and each adapted layer keeps as many numbers of a
    token as its adapter's rank. Of the peaks at two lengths, those between are on a line.
    """

    FEATURES: Final = ("1", "sequence", "rank")
    LENGTHS: Final = (256, 2048)
    OF_SCANS: Final = (256, 512)
    """Whole chunks; some scans go through a row token by token."""

    def __init__(self, table: FormTable) -> None:
        self._table = table

    def rows(self, count: LayerCount) -> Iterator[list[Any]]:
        """Yield the rows of `KeptForms` of one pass: as the model is written, and compiled."""
        lengths = self.OF_SCANS if count.regime.scans else self.LENGTHS
        at = [self._values(count.run(ROWS, length), ROWS * length) for length in lengths]
        for short, long in zip(*at, strict=True):
            outside, *layers = (
                [self._line(*pair, lengths) for pair in zip(*both, strict=True)]
                for both in zip(short, long, strict=True)
            )
            adapted = count.adapted_layers()
            yield [
                self._table.number(outside[0]),
                *(
                    self._numbers(forms, count.regime.compute * adapted.get(twin, 0))
                    for twin, forms in zip(dict.fromkeys(count.twins), layers, strict=True)
                ),
            ]

    def _values(self, count: LayerCount, tokens: int) -> list[list[list[float]]]:
        outside = [bytes_in(count.outside) / tokens]
        return [
            [outside, *(kept[twin].per_token(tokens) for twin in dict.fromkeys(count.twins))]
            for kept in (count.kept, count.compiled)
        ]

    def _line(self, few: float, many: float, lengths: tuple[int, int]) -> Form:
        short, long = lengths
        slope = (many - few) / (long - short)
        return {0: few - slope * short, 1: slope}

    def _numbers(self, forms: list[Form], of_rank: int) -> list[Any]:
        for form in (forms[0], forms[2], forms[4]):  # saved, products, and the peak
            if of_rank:
                form[0] -= of_rank * RANK
                form[2] = of_rank
        *numbers, peak = map(self._table.number, forms)
        return [*numbers, [peak]]


def largest(forms: Iterable[Form]) -> list[Form]:
    """Return the forms that are not always less than another."""
    kept: list[Form] = []
    for form in sorted(forms, key=lambda form: -sum(form.values())):
        if not any(at_least(other, form) for other in kept):
            kept = [other for other in kept if not at_least(form, other)] + [form]
    return kept


def keys_of(config: Any) -> dict[str, str]:
    """Return the key of each width in a config of transformers."""
    names = getattr(type(config), "attribute_map", {})
    keys: dict[str, str] = {}
    for width, spelled in KEYS.items():
        for name in spelled:
            if isinstance(getattr(config, name, None), int):
                keys[width] = names.get(name, name)
                break
    if "experts" in keys:
        keys.setdefault("expert", keys.get("ffn", "intermediate_size"))
    return keys
