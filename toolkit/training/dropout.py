"""Dropout, set to 0 when runs are compared, and a check for other randomness in a forward.

Each run draws its own dropout masks, so two runs with dropout are different trainings. A saved
model has the original dropout values again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.modules.dropout import _DropoutNd

from toolkit.engines.backend import side_effect_free
from toolkit.engines.wrapped import Wrapped
from toolkit.measuring.recorder import Recorder
from toolkit.training.observers import Observer

OF_OTHER_HEADS: Final = ("classifier", "summary_")
"""Prefixes of dropout settings that a causal LM does not use."""

OWN_VALUES: Final = "_toolkit_own_dropout"
"""The model attribute that keeps the original dropout values of its configs."""


def dropout_facts(
    folder: str | Path, *, off: bool, lora_dropout: float, trust_remote_code: bool
) -> dict[str, Any]:
    """Return the fields of dropout in a record's `training`, for the model in `folder`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    values = {name: value for _, name, value in _of_config(config)}
    if lora_dropout:
        values["lora_dropout"] = lora_dropout
    return {"dropout": "off" if off else "model", "own_dropout": values}


def turn_off(model: Any) -> None:
    """Set every dropout of a loaded model to 0: in its config, its modules and its adapters.

    Some modules look into the config in each forward, others keep a copy of their own.
    """
    settings = list(_of_config(model.config))
    setattr(model, OWN_VALUES, settings)
    _set(settings, off=True)
    for module in model.modules():
        names = [name for name, value in vars(module).items() if _is_dropout(name, value)]
        if isinstance(module, _DropoutNd):
            names.append("p")
        for name in names:
            setattr(module, name, 0.0)


@contextmanager
def own_values(model: Any) -> Iterator[None]:
    """Restore the config's values from before `turn_off` while the model is written."""
    settings = getattr(model, OWN_VALUES, [])
    _set(settings, off=False)
    try:
        yield
    finally:
        _set(settings, off=True)


def _of_config(config: Any) -> Iterator[tuple[Any, str, float]]:
    """Yield the config, name and value of each dropout that a config asks for."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):  # the config of a part of the model
            yield from _of_config(value)
        elif _is_dropout(name, value) and not name.startswith(OF_OTHER_HEADS):
            yield config, name, value


def _is_dropout(name: str, value: Any) -> bool:
    return "drop" in name and isinstance(value, float) and value > 0


def _set(settings: list[tuple[Any, str, float]], *, off: bool) -> None:
    for config, name, value in settings:
        setattr(config, name, 0.0 if off else value)


class RandomForwards(Observer):
    """Compares two forwards before the first step; the recorder neither times nor counts them."""

    def __init__(self, recorder: Recorder) -> None:
        self.difference: str | None = None
        """A sentence with the difference between the forwards; None if they are equal."""

        self._recorder = recorder

    def prepared(self, wrapped: Wrapped) -> None:
        with self._recorder.aside():
            self.difference = difference(wrapped.accelerator, wrapped.model)


def difference(accelerator: Any, model: Any) -> str | None:
    """Say how far two forwards of the same tokens in train mode differ; None where they are equal.

    A collective, between two steps. The model is the wrapped one.
    """
    ids = torch.arange(16, device=accelerator.device).unsqueeze(0)
    unwrapped = accelerator.unwrap_model(model)
    # Compiled layers are compiled for the shape of training rows, not for these rows.
    with side_effect_free(accelerator, model), torch.compiler.set_stance("force_eager"):
        for module in unwrapped.modules():
            module.training = True
        first, second = (
            model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.double()
            for _ in range(2)
        )
    if torch.equal(first, second) or not first.isfinite().all():
        return None  # the gates report numbers that are not finite
    in_fp32 = (
        next(unwrapped.parameters()).dtype == torch.float32 and accelerator.mixed_precision == "no"
    )
    # The largest difference relative to the logits' norm: GPU kernels may add in another order.
    tolerance = 1e-4 if in_fp32 else 2e-2
    apart = float((first - second).norm() / max(first.norm(), second.norm()))
    if apart <= tolerance:
        return None
    return (
        f"two forwards of the same tokens in training differ by {apart:.1%} though dropout is set "
        f"to 0: {type(unwrapped).__name__} draws random numbers of another kind"
    )
