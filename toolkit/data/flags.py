"""How a flag is declared, a field of a dataclass for `HfArgumentParser`, and where flags stand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Any, Final

from toolkit.errors import UsageError
from toolkit.files import read_settings
from toolkit.redaction import learn

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


def typed_flags(argv: Sequence[str]) -> list[str]:
    """Return the flags themselves, those of a file of arguments where one was passed."""
    is_file = len(argv) == 1 and Path(argv[0]).suffix in {".json", ".yaml", ".yml"}
    return _flags_of_file(argv[0]) if is_file else list(argv)


def _flags_of_file(path: str) -> list[str]:
    """Return the contents of the file of arguments as command-line flags."""
    values = read_settings(Path(path), "The file of arguments")
    if not isinstance(values, dict):
        raise UsageError(f"The file of arguments {path} must map names of flags to values.")

    flags: list[str] = []
    for name, value in values.items():
        if value is None or value == []:
            continue
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        else:
            # With "=", since a value may start with a dash.
            flags.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    learn(flags)
    return flags
