"""The keys of a DeepSpeed JSON, and the mistakes in one that are found without DeepSpeed.

DeepSpeed looks the keys below up one by one, and ignores all other keys. Its other sections are
pydantic models, which only a rank can import: `toolkit.engines.deepspeed_config`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, cast

from toolkit.backends.deepspeed_json import AUTO
from toolkit.configs.check.finding import table

Kind = tuple[str, Callable[[Any], bool]]
"""The requirement for a value, in words and as a check."""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


_KINDS: Final[dict[str, Kind]] = {
    "count": (
        "a whole number of 1 or more, or auto",
        lambda value: value in (None, AUTO) or (_number(value) and value >= 1 and value % 1 == 0),
    ),
    "norm": (
        "a number of 0 or more, or auto",
        lambda value: value == AUTO or (_number(value) and 0 <= value < math.inf),
    ),
    "positive": (
        "a number above 0",
        lambda value: value is None or (_number(value) and value > 0),
    ),
    "switch": ("true or false", lambda value: value in (False, True)),
    "word": (
        "a word other than auto",
        lambda value: value is None or (isinstance(value, str) and value != AUTO),
    ),
    "section": ("an object", lambda value: isinstance(value, dict)),
}

TOP_LEVEL: Final[dict[str, Kind]] = {
    key: _KINDS[kind] for kind, keys in table()["facts"]["deepspeed_keys"].items() for key in keys
}
"""Keys that DeepSpeed looks up at the top level, and the kind of each value."""

IN_SECTIONS: Final[dict[str, list[str]]] = table()["facts"]["deepspeed_sections"]
"""Keys that DeepSpeed looks up in sections that are no pydantic models."""


def mistakes_by_key(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the mistakes in a DeepSpeed config, by its keys at the top level."""
    return {key: wrong for key, value in config.items() if (wrong := _mistakes(key, value))}


def unknown_key(path: str, known: Collection[str]) -> str:
    """Return the sentence on a key that DeepSpeed does not know, with the nearest that it knows."""
    close = nearest(path.rpartition(".")[2], known)
    return f"{path} is no key of DeepSpeed's{f' (did you mean {close}?)' if close else ''}"


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is most like another one; None where none is."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def _mistakes(key: str, value: Any) -> list[str]:
    if key not in TOP_LEVEL:
        return [unknown_key(key, TOP_LEVEL)]
    words, fits = TOP_LEVEL[key]
    if not fits(value):
        return [f"{key} has to be {words}, and is {value!r}"]
    if key not in IN_SECTIONS:
        return []
    known = IN_SECTIONS[key]
    section = cast("dict[str, Any]", value)
    wrong = [unknown_key(f"{key}.{name}", known) for name in section if name not in known]
    if key == "activation_checkpointing" and not wrong and any(section.values()):
        return [
            "activation_checkpointing has no effect: DeepSpeed does it only in models that call "
            "deepspeed.checkpointing, and those of transformers don't (toolkit.train and the "
            "Trainer have --gradient_checkpointing)"
        ]
    return wrong
