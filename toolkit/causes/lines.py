"""Lines of a log as a person sees them, each with its number and, where it says so, its rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

PIECE_BYTES: Final = 2**20
"""Most that is read of a line at once: a progress bar may write megabytes without a line feed."""

OVERLAP_BYTES: Final = 512

SHOWN_CHARACTERS: Final = 300
ESCAPE: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")

RANK: Final = re.compile(
    r"\s*(?:(?:\[(?:rank|default)(?P<rank>\d+)\]:? ?)+|\[\d+,(?P<mpi>\d+)\]<std(?:out|err)>: ?)"
)
"""Begin of a line of rank 1: torch's `[rank1]:`, torchrun's `[default1]:`, mpirun's `[1,1]<...`."""

BEHIND_BAR: Final = re.compile(r"\[rank(?P<rank>\d+)\]: ?(?=\[|Traceback)")
"""Begin of a rank's message behind a progress bar that has no end."""

BAR: Final = re.compile(r"\d+%\|.*\| *[\d.]+\w?/[\d.]+\w? \[.*\]")
TRACEBACK: Final = "Traceback (most recent call last)"
"""Head of a traceback of Python (a colon follows), of rich (in a box) or of a notebook."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line, without escapes for colours and without what a progress bar has overwritten."""

    number: int | None
    """From 1; None for a line that is not in the log, but in a rank's status file."""

    rank: int | None
    text: str

    def shown(self) -> str:
        """Return the line as evidence."""
        line = None if self.number is None else f"line {self.number}"
        rank = None if self.rank is None else f"rank {self.rank}"
        where = ", ".join(part for part in (line, rank) if part)
        return f"{where}: {self.text.strip()[:SHOWN_CHARACTERS]}"


def lines_of(texts: Iterable[str], *, rank: int | None = None) -> Iterator[Line]:
    """Yield the lines of a log.

    Args:
        rank: Of the process that wrote all of it, where that is known.
    """
    for number, text in enumerate(texts, 1):
        yield from _lines(number, text, rank)


def read_lines(file: BinaryIO, *, rank: int | None = None) -> Iterator[Line]:
    """Yield the lines of a log file of any size and encoding."""
    number, before = 1, b""
    while piece := file.readline(PIECE_BYTES):
        yield from _lines(number, (before + piece).decode("utf-8", errors="replace"), rank)
        # A message may lie across the border of two pieces.
        before = b"" if piece.endswith(b"\n") else piece[-OVERLAP_BYTES:]
        number += piece.endswith(b"\n")


def _lines(number: int, text: str, rank: int | None) -> Iterator[Line]:
    if "\x1b" in text:
        text = ESCAPE.sub("", text)
    text = text.rstrip("\r\n")
    if "\r" in text:
        # A progress bar redraws its line after each carriage return; the last one stays visible.
        *before, text = text.split("\r")
        for hidden in before:
            if TRACEBACK in hidden:
                yield _ranked(number, hidden, rank)
    yield _ranked(number, text, rank)


def _ranked(number: int, text: str, rank: int | None) -> Line:
    if "]" in text[:32] and (match := RANK.match(text)):
        return Line(number, int(match["rank"] or match["mpi"]), text[match.end() :])
    if "[rank" in text and (match := BEHIND_BAR.search(text)):
        return Line(number, int(match["rank"]), text[match.end() :])
    return Line(number, rank, text)
