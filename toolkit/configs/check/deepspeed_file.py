"""The mistakes in a DeepSpeed config: those of its keys, and those that DeepSpeed itself finds.

DeepSpeed looks the keys at the top up one by one, and ignores all other keys. Its other sections
are pydantic models.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

from toolkit.backends.deepspeed_json import AUTO
from toolkit.configs.check.documents import Keys, dotted
from toolkit.configs.check.finding import table
from toolkit.configs.check.libraries import deepspeed_library
from toolkit.errors import sentence_of

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A mistake in a config."""

    keys: Keys
    text: str
    """A sentence without its full stop."""

    kind: Literal["unknown", "ignored", "refused"] = "refused"
    """Whether the key is none of DeepSpeed's, is one without effect, or has a wrong value."""

    nearest: str | None = None
    """The name that may be meant."""


def all_mistakes(config: Mapping[str, Any]) -> list[Mistake]:
    """Return every mistake in a config: of its keys and types, and what DeepSpeed refuses."""
    of_keys = {key: [*_of_key(key, value)] for key, value in config.items()}
    rest = {key: value for key, value in config.items() if not of_keys[key]}
    return [one for found in of_keys.values() for one in found] + mistakes_of_deepspeed(rest)


def mistakes_of_deepspeed(config: Mapping[str, Any]) -> list[Mistake]:
    """Return the mistakes for which DeepSpeed refuses a config: of each part, else of the whole.

    Values at the top level have the types that belong there. `auto` is left out: the run fills it
    in. There are none where DeepSpeed is not installed.
    """
    # The run sets the batch.
    parts = {key: value for key, value in without_auto(config).items() if key not in BATCH}
    try:
        deepspeed_library()
    except Exception:  # it is not installed, or of a release that cannot be read without torch
        return []
    mistakes = [mistake for key in parts for mistake in _refused({key: parts[key]}, key)]
    return mistakes or _refused(parts)


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is most like another one; None where none is."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def _of_key(key: str, value: Any) -> Iterator[Mistake]:
    """Return the mistakes of a key at the top, and of those below it that no model reads."""
    if key not in TOP_LEVEL:
        yield _unknown((key,), TOP_LEVEL)
        return
    words, fits = TOP_LEVEL[key]
    if not fits(value):
        yield Mistake(keys=(key,), text=f"{key} has to be {words}, and is {value!r}")
        return
    known = IN_SECTIONS.get(key)
    wrong = [name for name in value if name not in known] if known else []
    yield from (_unknown((key, name), known or ()) for name in wrong)
    if key == "activation_checkpointing" and not wrong and any(value.values()):
        text = (
            "activation_checkpointing has no effect: DeepSpeed does it only in models that call "
            "deepspeed.checkpointing, and those of transformers don't (toolkit.train and the "
            "Trainer have --gradient_checkpointing)"
        )
        yield Mistake(keys=(key,), text=text, kind="ignored")


def _unknown(keys: Keys, known: Collection[str]) -> Mistake:
    """Return the mistake of a key that DeepSpeed does not know, with the nearest that it knows."""
    close = nearest(str(keys[-1]), known)
    text = f"{dotted(keys)} is no key of DeepSpeed's"
    text += f" (did you mean {close}?)" if close else ""
    return Mistake(keys=keys, text=text, kind="unknown", nearest=close)


def without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: without_auto(inner) for key, inner in items if inner != AUTO}
    return value


def _refused(config: Mapping[str, Any], within: str | None = None) -> list[Mistake]:
    from pydantic import ValidationError

    inside: Keys = () if within is None else (within,)
    try:
        # The run sets the batch, and DeepSpeed reads no config without one.
        deepspeed_library().config({**config, "train_micro_batch_size_per_gpu": 1})
    except ValidationError as error:
        return [_in_words(error.title, mistake, within) for mistake in error.errors()]
    except Exception as error:  # its readers assert, and look keys up in values of any type
        reason = sentence_of(error).rstrip(".")
        if isinstance(error, AttributeError | KeyError | TypeError):
            reason = f"DeepSpeed cannot read it ({reason})"
        text = reason if within is None else f"{within}: {reason}"
        return [Mistake(keys=inside, text=text)]
    return []


def _in_words(title: str, mistake: Mapping[str, Any], within: str | None) -> Mistake:
    """Return one of pydantic's errors as a sentence with the path of its key."""
    place = [str(name) for name in mistake["loc"]]
    # The trackers' models are fields of one common model.
    keys = tuple(place if within in (None, *place[:1]) else [str(within), *place])
    path = ".".join(keys)
    if mistake["type"] == "extra_forbidden":
        return _unknown(keys, _fields(title, place[:-1]))
    reason = mistake["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    text = f"{path} is {mistake['input']!r}: {reason}" if place else f"{path}: {reason}"
    return Mistake(keys=keys, text=text)


def _fields(title: str, place: Sequence[str]) -> list[str]:
    """Return the keys of the model with this name, or of a model of its fields further in."""
    models = [kind for kind in _subclasses(deepspeed_library().model) if kind.__name__ == title]
    for name in place:
        entries = [model.model_fields.get(name) for model in models]
        # `Model` or `Optional[Model]`.
        annotations = [entry.annotation for entry in entries if entry is not None]
        kinds = [kind for outer in annotations for kind in get_args(outer) or (outer,)]
        models = [kind for kind in kinds if kind in set(_subclasses(deepspeed_library().model))]
    return [field.alias or name for model in models for name, field in model.model_fields.items()]


def _subclasses(kind: type) -> Iterator[Any]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
