"""Two runs side by side, what a comparison of them says, and the words that all of them share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from toolkit.comparing.bisect import reading
from toolkit.comparing.bisect.distances import Distance
from toolkit.comparing.bisect.reading import Rows
from toolkit.comparing.report.words import share
from toolkit.records.evidence import BEFORE_FILE, Evidence

SCALE_TOLERANCE: Final = 0.01
"""What still counts as one factor, relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two runs to compare, the reference first."""

    one: str
    other: str
    folders: tuple[Path, Path]
    evidence: tuple[Evidence, Evidence]
    next_losses: tuple[float | None, float | None] = (None, None)
    finals: tuple[Path | None, Path | None] = (None, None)
    """Folders of the models that they saved."""

    @property
    def precision(self) -> str:
        return self.evidence[0]["precision"]

    @property
    def by_id(self) -> bool:
        return all(map(reading.has_ids, self.evidence))

    @property
    def rows(self) -> tuple[Rows, Rows]:
        one, other = (reading.rows_of(each, by_id=self.by_id) for each in self.evidence)
        return one, other

    @property
    def begun_with(self) -> tuple[Path, Path]:
        """The weights that the step began with, where both train the same tensors."""
        one, other = self.files(BEFORE_FILE)
        return one, one if self.given else other

    @property
    def given(self) -> bool:
        """Whether the second run began the step with the weights of the first."""
        return self.evidence[1].get("given", False)

    def files(self, name: str) -> tuple[Path, Path]:
        return self.folders[0] / name, self.folders[1] / name


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a comparison saw."""

    value: float
    differs: str = ""
    """The sentence for a difference beyond the limit."""

    equal: str = ""
    """What is said beside `equal`."""

    fault: bool = False
    """Whether it is one whatever the value."""


def share_of(value: float) -> str:
    """Return a share in percent, or a small one in powers of ten."""
    return share(value) if value >= 1e-3 else f"{value:.1e}"


def size_of(value: float) -> str:
    return f"{value:.1e}"


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def factor_in_words(factor: float, pair: Pair) -> str:
    """Say which numbers of the second run make the factor; nothing where none does."""
    evidence = pair.evidence[1]
    processes, steps = evidence["num_processes"], max(map(len, evidence["ranks"]))
    known = (
        ("the number of processes", processes),
        ("the accumulation steps", steps),
        ("the processes times the accumulation steps", processes * steps),
    )
    found = [
        f"{'' if factor > 1 else 'one by '}{what} ({number})"
        for what, number in known
        if number > 1
        and math.isclose(factor, number if factor > 1 else 1 / number, rel_tol=SCALE_TOLERANCE)
    ]
    return f", {' or '.join(found)}" if found else ""


def missing_words(found: Distance, pair: Pair) -> str:
    return (
        f"only one of {pair.one} and {pair.other} has {found.missing[0]} "
        f"(the first of {len(found.missing)})"
    )


def largest_in_words(found: Distance) -> str:
    """Name the element that is furthest apart, and how many tensors have any that is."""
    others = f"{counted(len(found.apart), 'tensor')} of {len(found.tensors)} do"
    return (
        f"{found.largest.name} differs by up to {found.largest.largest:.1e} ({others}, the first "
        f"is {found.apart[0].name})"
    )
