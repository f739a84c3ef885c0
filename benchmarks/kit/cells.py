"""A part of the kit is a list of cells; a cell that was run is a row of the result."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypedDict, cast

PARTS: Final = ("runs", "speed", "costs", "memory", "numbers", "offload")
"""In the order in which they are run: the first answers the most."""

STARTED_WITH: Final = dict(os.environ)
"""Variables of this process before libraries and a rehearsal add theirs."""

Status = Literal["ok", "missing", "refused", "out of memory", "failed"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the cells can be run on."""

    gpus: int
    smoke: bool
    """Tiny shapes on the CPU, through the same code."""

    out: Path
    """Folder of the result, for files that are worth keeping beside it."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement, described in plain values."""

    name: str
    """No other cell of the part has it: a row is found again by it."""

    settings: dict[str, Any]
    """All that `measure` needs, as JSON holds it."""

    seconds: float
    """The estimate for one GPU; a cell that takes five times as long is given up."""

    libraries: tuple[str, ...] = ()
    """Modules that it cannot do without, beyond torch, transformers and accelerate."""

    environment: dict[str, str] = field(default_factory=dict[str, str])
    """Variables of its process. Neighbours with the same ones share a process."""


class Row(TypedDict):
    part: str
    cell: str
    status: Status
    reason: str | None
    """Why there is no measurement, in words; None with status `ok`."""

    seconds: float
    """Wall time of the cell, preparations included."""

    settings: dict[str, Any]
    measured: dict[str, Any]


class Refused(Exception):
    """Raised in a cell when a backend refuses what was asked; the message becomes the row."""


class Part(Protocol):
    TITLE: str

    def cells(self, machine: Machine) -> Sequence[Cell]:
        """Return the cells, in the order in which they are run. Torch is not imported for it."""
        ...

    def measure(self, settings: dict[str, Any], machine: Machine) -> dict[str, Any]:
        """Run one cell and return what was measured, in plain values with units in the names.

        It is called in a process that has run other cells before. What is not measured on this
        machine is None. A `problem` is a sentence: the row is `failed` by it, and keeps the rest.
        """
        ...

    def tables(self, rows: Sequence[Row]) -> list[str]:
        """Return the part's rows as paragraphs and tables of Markdown."""
        ...


def missing(cell: Cell) -> str | None:
    """Return why a cell cannot be run with what is installed, in words; None where it can."""
    absent = [library for library in cell.libraries if find_spec(library) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


@contextmanager
def started_anew() -> Iterator[None]:
    """Give what is launched inside the variables of a shell, without those of this process."""
    here = dict(os.environ)
    os.environ.clear()
    os.environ.update(STARTED_WITH)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(here)


def first_gpu(machine: Machine) -> dict[str, str]:
    """Return the environment of a process that is to see one GPU, as a rank does."""
    if machine.gpus < 2:
        return {}
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def part(name: str) -> Part:
    return cast("Part", import_module(f"kit.{name}"))
