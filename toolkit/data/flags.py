"""How a flag is declared: a field of a dataclass, read by `transformers.HfArgumentParser`."""

from __future__ import annotations

from dataclasses import MISSING, field, fields
from typing import Any, Final

SWITCHED_OFF: Final = {"None", "False", "no", "none", "0", "0.0", "[]"}
"""Values that leave a flag switched off."""


def flag(default: Any, help: str, **metadata: Any) -> Any:
    """Return the field of a flag; `help` is its line of `--help`."""
    metadata["help"] = help
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def changed_flags(arguments: Any) -> dict[str, Any]:
    """Return the flags of a dataclass that are not at their defaults, with their values."""
    values = {entry.name: getattr(arguments, entry.name) for entry in fields(arguments)}
    defaults = {
        entry.name: entry.default if entry.default_factory is MISSING else entry.default_factory()
        for entry in fields(arguments)
    }
    return {name: value for name, value in values.items() if value != defaults[name]}


def plain_value(value: Any) -> str:
    """Return one spelling for a flag's value, be it an enum, a list of one or plain."""
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return str(getattr(value, "value", value))


def is_on(value: Any) -> bool:
    """Whether a flag's value switches something on."""
    return plain_value(value) not in SWITCHED_OFF
