"""Forwards between two optimizer steps that leave no trace in the training.

Modes, torch's random numbers and an engine's memory of its last passes are restored afterwards, so
losses and collectives of the next step equal those of a training without such forwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from toolkit.engines.backend import backend_of


class NotBetweenSteps(RuntimeError):
    """A forward was requested while gradients of an open step wait in the model."""


@contextmanager
def side_effect_free(accelerator: Any, model: Any) -> Iterator[None]:
    """Let the wrapped model run forward without gradients and dropout; every rank calls it.

    Raises:
        NotBetweenSteps: gradients are being accumulated.
    """
    if not accelerator.sync_gradients:
        raise NotBetweenSteps(
            "The model can be evaluated between two optimizer steps, not while gradients of one "
            "are being accumulated."
        )
    modes = [(module, module.training) for module in model.modules()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    model.eval()
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=devices),
            backend_of(model).preserve_engine_state(),
        ):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
