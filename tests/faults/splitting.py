"""The script with faults, for a backend that takes the model as a loader of its own returns it.

Beside the faults that only such ranks can have, it has those of `train_with_faults` that act
elsewhere here: in clipping, since the norm is one of all parts, and in how a model is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import train_with_faults as script
from safetensors.torch import save_model

from toolkit.data.sampling_order import Collator
from toolkit.records.evidence import IGNORED
from toolkit.strategies import Strategy

Fault = Callable[[script.Run], AbstractContextManager[Any]]

FAULTS: dict[str, Fault] = {}


def fault(contents: Callable[[], Iterator[None]]) -> None:
    """Add a fault that changes nothing of the run itself."""
    act = contextmanager(contents)
    FAULTS[contents.__name__] = lambda _: act()


def fault_of_run(contents: Callable[[script.Run], Iterator[None]]) -> None:
    FAULTS[contents.__name__] = contextmanager(contents)


def main(
    strategy: Strategy,
    load: Callable[..., Any],
    *,
    clipping: tuple[type[Any], str] | None = None,
) -> None:
    """Train once for each name on the command line.

    Args:
        strategy: Of the ranks, in the sizes that they have.
        load: Loads a model as the strategy splits it.
        clipping: The class and the method that clips its gradients, where Accelerate's does not;
            its last argument is the limit.
    """
    every = script.FAULTS | FAULTS
    if clipping is not None:
        every["not_clipped"] = not_clipped(*clipping)
    script.FAULTS = {name: _loading(load, each) for name, each in every.items()}
    readers = strategy.data_parallel_size(script.RANKS)
    with (
        patch.object(script, "get_strategy", lambda _: strategy),
        patch.object(script, "arguments", _of_readers(script.arguments, readers)),
        patch.object(script.Run, "go", _going(script.Run.go, load)),
    ):
        script.main()


def _of_readers(original: Callable[..., Any], readers: int) -> Callable[..., Any]:
    def arguments(*args: Any) -> Any:
        with patch.object(script, "RANKS", readers):
            return original(*args)

    return arguments


def _loading(load: Callable[..., Any], fault: Fault) -> Fault:
    """Return a fault of a run that loads its model with `load`."""

    def of_run(run: script.Run) -> AbstractContextManager[Any]:
        run.load = load
        return fault(run)

    return of_run


def _going(original: Callable[..., Any], load: Callable[..., Any]) -> Callable[..., Any]:
    whole = script.AutoModelForCausalLM.from_pretrained

    def go(run: script.Run, folder: Path) -> None:
        if run.load == whole:  # the sound run enters no fault
            run.load = load
        original(run, folder)

    return go


def not_clipped(owner: type[Any], name: str) -> Fault:
    """The norm is measured as ever, and then not used."""
    original = getattr(owner, name)

    def measure_only(self: Any, *args: Any) -> Any:
        return original(self, *args[:-1], math.inf)

    return lambda _: patch.object(owner, name, measure_only)


@fault_of_run
def other_initial_weights(run: script.Run) -> Iterator[None]:
    original = run.load

    def built_anew(folder: str, **options: Any) -> Any:
        whole = script.AutoModelForCausalLM.from_pretrained(folder, **options)
        torch.manual_seed(script.SEED + 1)
        with TemporaryDirectory() as other:
            # `save_pretrained` would write on the first rank alone.
            (Path(other) / "config.json").write_text(whole.config.to_json_string(use_diff=False))
            save_model(
                type(whole)(whole.config),
                str(Path(other) / "model.safetensors"),
                metadata={"format": "pt"},
            )
            return original(other, **options)

    run.load = built_anew
    yield


@fault_of_run
def dropout_with_a_seed_per_rank(run: script.Run) -> Iterator[None]:
    original = run.load

    def with_dropout(folder: str, **options: Any) -> Any:
        model = original(folder, attention_dropout=0.1, **options)
        torch.manual_seed(script.SEED + script.RANK)
        return model

    run.load = with_dropout
    yield


@contextmanager
def of_one_length() -> Iterator[None]:
    """Pad all rows to one length; with other shapes than its neighbour's, a rank fails."""
    original = Collator.__call__

    def padded(self: Collator, rows: Any) -> dict[str, torch.Tensor]:
        batch = original(self, rows)
        filled = {"input_ids": self.pad_token_id, "labels": IGNORED, "attention_mask": 0}
        for name, value in filled.items():
            more = script.MAX_LENGTH - batch[name].shape[1]
            batch[name] = torch.nn.functional.pad(batch[name], (0, more), value=value)
        return batch

    with patch.object(Collator, "__call__", padded):
        yield
