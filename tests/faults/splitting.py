"""The script with faults, for a backend of which `Accelerator.prepare` knows nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import train_with_faults as script

from toolkit.strategies import Strategy

FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {"clean": nullcontext}


def fault(contents: Callable[[], Iterator[None]]) -> None:
    FAULTS[contents.__name__] = contextmanager(contents)


def main(strategy: Strategy, load: Callable[..., Any]) -> None:
    """Train once for each name on the command line, with a model as `load` returns it.

    Ranks that split one model read the same rows.
    """
    readers = strategy.data_parallel_size(script.RANKS)
    with (
        patch.object(script, "get_strategy", lambda _: strategy),
        patch.object(script, "arguments", _of_readers(script.arguments, readers)),
        patch.object(script.Run, "go", _loading(script.Run.go, load)),
    ):
        script.FAULTS |= {name: lambda _, fault=fault: fault() for name, fault in FAULTS.items()}
        script.main()


def _of_readers(original: Callable[..., Any], readers: int) -> Callable[..., Any]:
    def arguments(*args: Any) -> Any:
        with patch.object(script, "RANKS", readers):
            return original(*args)

    return arguments


def _loading(original: Callable[..., Any], load: Callable[..., Any]) -> Callable[..., Any]:
    def go(run: Any, folder: Path) -> None:
        run.load = load
        original(run, folder)

    return go
