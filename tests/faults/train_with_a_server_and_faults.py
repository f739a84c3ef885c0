"""The script beside this one, for a parameter server and a worker.

    accelerate launch --config_file ddp.yaml tests/faults/train_with_a_server_and_faults.py \
        MODEL OUTPUT NAME ...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parent))  # a rank's path is a safe one
import torch
from splitting import fault, main
from transformers import AutoModelForCausalLM

from toolkit.engines.parameter_server import Exchange, ask_for
from toolkit.strategies import STRATEGIES

STRATEGY = STRATEGIES["parameter_server"]


def load(folder: str, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    ask_for(model)
    return model


@fault
def worker_pulls_stale_weights() -> Iterator[None]:
    """The worker trains with the weights of the step before."""
    original = Exchange.pull
    before: list[torch.Tensor] = []

    def pull(self: Exchange) -> None:
        original(self)
        weights = [parameter.detach() for _, parameter in self._trained]
        pulled = [weight.clone() for weight in weights]
        if before and not self.is_server:
            for weight, stale in zip(weights, before, strict=True):
                weight.copy_(stale)
        before[:] = pulled

    with patch.object(Exchange, "pull", torch.no_grad()(pull)):
        yield


@fault
def push_is_lost() -> Iterator[None]:
    """The gradient of the worker arrives, and is not added."""
    original = Exchange.average

    def average(self: Exchange, gradient: torch.Tensor, arrived: list[torch.Tensor]) -> None:
        original(self, gradient, [torch.zeros_like(gradient) for _ in arrived])

    with patch.object(Exchange, "average", average):
        yield


@fault
def averaged_over_the_workers() -> Iterator[None]:
    """The server's own gradient is added, and not counted."""
    original = Exchange.average

    def average(self: Exchange, gradient: torch.Tensor, arrived: list[torch.Tensor]) -> None:
        original(self, gradient, arrived)
        gradient.mul_((len(arrived) + 1) / len(arrived))

    with patch.object(Exchange, "average", average):
        yield


@fault
def last_parameter_is_not_pulled() -> Iterator[None]:
    original = Exchange.pull

    def pull(self: Exchange) -> None:
        with patch.object(self, "_trained", self._trained[:-1]):
            original(self)

    with patch.object(Exchange, "pull", pull):
        yield


if __name__ == "__main__":
    main(STRATEGY, load)
