"""The mistakes in a DeepSpeed config: those of its keys, and those that DeepSpeed itself finds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from toolkit.backends.deepspeed_json import AUTO
from toolkit.configs.check.documents import Keys
from toolkit.configs.check.libraries import deepspeed_library
from toolkit.configs.deepspeed_keys import mistakes_by_key, nearest, unknown_key
from toolkit.errors import sentence_of

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A mistake in a config."""

    keys: Keys
    text: str
    """A sentence without its full stop."""

    is_unknown: bool = False
    """Whether the key is none of DeepSpeed's."""

    nearest: str | None = None
    """The name that may be meant."""


def section_mistakes(config: Mapping[str, Any]) -> list[str]:
    """Return the mistakes for which DeepSpeed refuses a config: of each part, else of the whole.

    Values at the top level have the types that belong there. `auto` is left out: the run fills it
    in. There are none where DeepSpeed is not installed.
    """
    return [mistake.text for mistake in mistakes_of_deepspeed(config)]


def mistakes_of_deepspeed(config: Mapping[str, Any]) -> list[Mistake]:
    """Return them with their places; see `section_mistakes`."""
    # The run sets the batch.
    parts = {key: value for key, value in without_auto(config).items() if key not in BATCH}
    try:
        deepspeed_library()
    except Exception:  # it is not installed, or of a release that cannot be read without torch
        return []
    mistakes = [mistake for key in parts for mistake in _mistakes({key: parts[key]}, key)]
    return mistakes or _mistakes(parts)


def all_mistakes(config: Mapping[str, Any]) -> list[Mistake]:
    """Return every mistake in a config: of its keys and types, and what DeepSpeed refuses."""
    of_keys = mistakes_by_key(config)
    found = [mistake for wrong in of_keys.values() for mistake in wrong]
    mistakes = [
        Mistake(
            keys=tuple(text.split(" ")[0].split(".")),
            text=text,
            is_unknown="is no key of" in text,
            nearest=text.partition("(did you mean ")[2].removesuffix("?)") or None,
        )
        for text in found
    ]
    rest = {key: value for key, value in config.items() if key not in of_keys}
    return mistakes + mistakes_of_deepspeed(rest)


def without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: without_auto(inner) for key, inner in items if inner != AUTO}
    return value


def _mistakes(config: Mapping[str, Any], within: str | None = None) -> list[Mistake]:
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
        known = _fields(title, place[:-1])
        text = unknown_key(path, known)
        return Mistake(keys=keys, text=text, is_unknown=True, nearest=nearest(keys[-1], known))
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
