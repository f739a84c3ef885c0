"""Checked reading of numbers from a config.json, which may be broken or hostile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from toolkit.errors import UsageError

MOST = {
    "layers": 2_000,
    "hidden": 1_000_000,
    "heads": 100_000,
    "kv_heads": 100_000,
    "head_dim": 100_000,
    "ffn": 10_000_000,
    "vocab": 100_000_000,
    "positions": 10**12,
    "experts": 100_000,
}
"""Limits of at least ten times the value of any published model. Above a limit a config is broken,
and a table of its tensors could fill the memory."""


def shown(value: object) -> str:
    """Return a value for a sentence: the value if it is short, otherwise its size."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        # Python refuses to print a number of more than 4300 digits.
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, dict):
        return f"an object of {len(cast('dict[Any, Any]', value))} keys"
    if isinstance(value, list):
        return f"a list of {len(cast('list[Any]', value))}"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    if value is None:
        text = "null"
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """A config.json, completed by the defaults of its config class."""

    config: Mapping[str, Any]
    name: str
    """Name of the model, for messages."""

    defaults: Mapping[str, object]
    aliases: Mapping[str, str]
    dropout: Sequence[str] = ()
    """Keys of probabilities of dropout."""

    def get(self, key: str) -> object:
        """Return the value of `key` or of its alias, or the default of transformers."""
        if self.absent(key):
            return self.defaults.get(key)
        return self.config[key if key in self.config else self.aliases[key]]

    def absent(self, key: str) -> bool:
        """Whether config.json has neither `key` nor its alias."""
        return key not in self.config and self.aliases.get(key) not in self.config

    def whole(self, key: str, *, least: int = 1, most: int) -> int:
        """Return a required whole number.

        Raises:
            UsageError: the number is missing without a default, or is invalid.
        """
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f"It should be a whole number from {least:,} to {most:,}.")
        return value

    def whole_or_none(self, key: str, *, most: int) -> int | None:
        """Return a whole number, or None where it is null or left out without a default."""
        return None if self.get(key) is None else self.whole(key, most=most)

    def flag(self, key: str) -> bool:
        """Return true or false; null counts as false, as in the modelling files."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "It should be true or false.")
        return bool(value)

    def indices(self, key: str) -> frozenset[int]:
        """Return a list of layers, empty where it is null or left out."""
        value = self.get(key)
        if value is None:
            return frozenset()
        layers = cast("list[object]", value) if isinstance(value, list) else [None]
        if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
            raise self.wrong(key, "It should be a list of layers, by number.")
        return frozenset(cast("list[int]", layers))

    def wrong(self, key: str, expected: str) -> UsageError:
        value, other = self.get(key), self.aliases.get(key)
        if other is not None and other in self.config and key not in self.config:
            key = other
        if value is None and key not in self.config:
            return UsageError(f"{self.name}: config.json lacks {key!r}. {expected}")
        return UsageError(f"{self.name}: config.json says {key} = {shown(value)}. {expected}")

    def probability(self, key: str) -> float:
        """Return a probability, 0 where it is null or left out."""
        value = self.get(key)
        if value is None:
            return 0.0
        # NaN fails the comparison as well.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self.wrong(key, "It should be a probability, from 0 to 1.")
        return float(value)
