"""Dropout, set to 0 where two runs are compared: each draws masks of its own, so with dropout no
two of them are the same training. What is saved has the model's own values again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

OF_OTHER_HEADS: Final = ("classifier", "summary_")
"""Beginnings of the names that a causal LM does not use."""

KEPT: Final = "_toolkit_own_dropout"
"""The attribute of a model that keeps what its configs held."""


def dropout_facts(
    folder: str | Path, *, off: bool, lora_dropout: float, trust_remote_code: bool
) -> dict[str, Any]:
    """Return what a record's `training` says of dropout.

    Args:
        folder: Where the model lies.
        off: Whether it is set to 0.
        lora_dropout: What was asked for adapters, 0 without any.
        trust_remote_code: Whether code that comes with the model may run.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    own = {name: value for _, name, value in _of_config(config)}
    if lora_dropout:
        own["lora_dropout"] = lora_dropout
    return {"dropout": "off" if off else "model", "own_dropout": own}


def turn_off(model: Any) -> None:
    """Set every dropout of a loaded model to 0: in its config, its modules and its adapters.

    Some modules look into the config in each forward, others keep a copy of their own.
    """
    from torch.nn.modules.dropout import _DropoutNd

    kept = list(_of_config(model.config))
    setattr(model, KEPT, kept)
    _set(kept, off=True)
    for module in model.modules():
        names = [name for name, value in vars(module).items() if _is_dropout(name, value)]
        if isinstance(module, _DropoutNd):
            names.append("p")
        for name in names:
            setattr(module, name, 0.0)


@contextmanager
def own_values(model: Any) -> Iterator[None]:
    """Let a model's config hold what it held before `turn_off`, while it is written."""
    kept = getattr(model, KEPT, [])
    _set(kept, off=False)
    try:
        yield
    finally:
        _set(kept, off=True)


def _of_config(config: Any) -> Iterator[tuple[Any, str, float]]:
    """Yield each dropout that a config asks for: where it stands, its name, and its value."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):  # the config of a part of the model
            yield from _of_config(value)
        elif _is_dropout(name, value) and not name.startswith(OF_OTHER_HEADS):
            yield config, name, value


def _is_dropout(name: str, value: Any) -> bool:
    return "drop" in name and isinstance(value, float) and value > 0


def _set(kept: list[tuple[Any, str, float]], *, off: bool) -> None:
    for config, name, value in kept:
        setattr(config, name, 0.0 if off else value)
