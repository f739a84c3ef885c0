"""A user's DeepSpeed config, held against the classes that DeepSpeed itself reads it with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

from toolkit.configs.deepspeed import AUTO
from toolkit.configs.deepspeed_keys import unknown_key
from toolkit.errors import sentence_of

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def section_mistakes(config: Mapping[str, Any]) -> list[str]:
    """Return what DeepSpeed would refuse in a config, each part read by itself, then the whole.

    Args:
        config: What stands at the top level, of the kinds that belong there. `auto` is left out:
            the run fills it in.
    """
    given = {key: value for key, value in _without_auto(config).items() if key not in _BATCH}
    with _silent():
        found = [mistake for key in given for mistake in _refused({key: given[key]}, within=key)]
        return found or _refused(given)


def _refused(config: Mapping[str, Any], *, within: str | None = None) -> list[str]:
    from deepspeed import DeepSpeedConfig
    from pydantic import ValidationError

    try:
        # The batch is the run's, and DeepSpeed reads nothing without one.
        DeepSpeedConfig({**config, "train_micro_batch_size_per_gpu": 1})
    except ValidationError as error:
        return [_in_words(error.title, mistake, within) for mistake in error.errors()]
    except Exception as error:  # an assertion, or whatever its looking things up ends with
        reason = sentence_of(error).rstrip(".")
        if isinstance(error, AttributeError | KeyError | TypeError):
            reason = f"DeepSpeed cannot read it ({reason})"
        return [reason if within is None else f"{within}: {reason}"]
    return []


def _in_words(title: str, mistake: Mapping[str, Any], within: str | None) -> str:
    """Return one of pydantic's findings with the path of its key."""
    place = [str(name) for name in mistake["loc"]]
    # The models of the trackers are fields of one model for all of them.
    path = ".".join(place if within in (None, *place[:1]) else [str(within), *place])
    if mistake["type"] == "extra_forbidden":
        return unknown_key(path, _fields(title, place[:-1]))
    reason = mistake["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{path} is {mistake['input']!r}: {reason}" if place else f"{path}: {reason}"


def _fields(title: str, place: Sequence[str]) -> list[str]:
    """Return the keys of the model with this name, or of a model of its fields further in."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    models = [kind for kind in _subclasses(DeepSpeedConfigModel) if kind.__name__ == title]
    for name in place:
        entries = [model.model_fields.get(name) for model in models]
        # `Model` or `Optional[Model]`.
        annotations = [entry.annotation for entry in entries if entry is not None]
        kinds = [kind for outer in annotations for kind in get_args(outer) or (outer,)]
        models = [kind for kind in kinds if kind in set(_subclasses(DeepSpeedConfigModel))]
    return [field.alias or name for model in models for name, field in model.model_fields.items()]


def _subclasses(kind: type) -> Iterator[Any]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_auto(inner) for key, inner in value.items() if inner != AUTO}
    return value


@contextmanager
def _silent() -> Iterator[None]:
    """Keep DeepSpeed's warnings for the config that it trains with."""
    from deepspeed.utils import logger

    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
