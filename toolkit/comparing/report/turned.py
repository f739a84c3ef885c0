"""Why a run with smaller states than another has the higher peak."""

from __future__ import annotations

from typing import Final

from toolkit.comparing.report.row_facts import (
    counted_peak,
    counts_peaks,
    listed,
    measured,
    peak_of,
    states_of,
)
from toolkit.comparing.report.words import size
from toolkit.records.fields import Peak
from toolkit.records.results import Results, Row
from toolkit.strategies import STRATEGIES

NOTICEABLE: Final = 1.02
"""A quotient of two sizes from which they are told apart."""

BESIDE_STATES: Final = {
    "parameters": "weights gathered for a moment",
    "master": "copies of the weights",
    "gradients": "gradients on their way between the ranks",
    "optimizer": "temporaries of the optimizer",
    "activations": "activations",
    "other": "buffers and temporaries",
}
"""What is alive at the fullest moment beyond the states, by the category that it is counted in."""


def turned_order(results: Results) -> list[str]:
    """Say of each run whose peak is above that of runs with larger states what makes it so."""
    counted = counts_peaks(results)
    sizes = [
        (row, states, peak)
        for row in measured(results)
        # What is offloaded counts as states, and on a GPU not in the peak.
        if not _offloads(row)
        and (states := states_of(row)) is not None
        and (peak := counted_peak(row) if counted else peak_of(row)) is not None
    ]
    lines: list[str] = []
    for row, states, peak in sizes:
        others = [
            other
            for other, more, lower in sizes
            if more > NOTICEABLE * states and peak > NOTICEABLE * lower
        ]
        if others:
            lines.append(_sentence(row, others))
    return lines


def _sentence(row: Row, others: list[Row]) -> str:
    names = listed(others)
    text = f"{row['name']} holds smaller states than {names} and peaks higher: "
    most, extra = _largest_extra(row, others[-1])
    if most is None:
        return f"{text}what its kernels and the allocator hold beside its tensors."
    return f"{text}at its fullest moment {size(extra)} more are {BESIDE_STATES[most]}."


def _largest_extra(row: Row, other: Row) -> tuple[str | None, int]:
    """Return in which category a run's peak exceeds its states by more than the other's does."""
    ours, theirs = _beside(row), _beside(other)
    extras = {name: count - theirs.get(name, 0) for name, count in ours.items()}
    most = max(extras, key=lambda name: extras[name], default=None)
    if most is None or not theirs or extras[most] <= 0:
        return None, 0
    return most, extras[most]


def _beside(row: Row) -> dict[str, int]:
    """Return the bytes of the fullest moment that are no states, by category."""
    peak: Peak | None = row["peak"]
    memory = row["memory"]
    if peak is None or memory is None:
        return {}
    held = {
        name: memory.get(f"{name}_bytes") or 0
        for name in ("parameters", "master", "gradients", "optimizer")
    }
    return {name: peak["categories"].get(name, 0) - held.get(name, 0) for name in BESIDE_STATES}


def _offloads(row: Row) -> bool:
    strategy = STRATEGIES.get(row["strategy"])
    return strategy is not None and strategy.offloads
