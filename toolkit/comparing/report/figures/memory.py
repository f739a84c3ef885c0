"""Figures of memory: what lasts, predicted beside measured, and the fullest moment of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from toolkit.comparing.predicted import STATES
from toolkit.comparing.report.figures.bars import Bar, byte_bars
from toolkit.comparing.report.figures.frame import NOT_DRAWN, PREDICTED, Key, Shown
from toolkit.comparing.report.row_facts import (
    host_in_peak_lines,
    peak_of,
    predicted_peak,
    reason_for,
    states_of,
    why_not_predicted,
)
from toolkit.comparing.report.sections.memory import PEAK_CATEGORIES, parts_of
from toolkit.comparing.report.svg import INK, PARTS, VARIABLES
from toolkit.records.results import Results, Row

MASTER: Final = "fp32 master weights"
OPTIMIZER: Final = "optimizer states"

STATE_NAMES: Final = ("parameters", MASTER, "gradients", OPTIMIZER)
PEAK_NAMES: Final = (*STATE_NAMES, *PEAK_CATEGORIES[len(STATE_NAMES) :])

DEVICE: Final = (
    " The diamond is the device's peak as its allocator counts it, over all steps, packed rows "
    "included; the line through it is the planner's interval."
)


def memory_by_category(results: Results) -> Shown:
    """A bar a run, of what its fullest rank holds; what was predicted as a tick."""
    shown = Shown(
        name="memory",
        runs=len(results["runs"]),
        title="Memory by category, predicted beside measured",
        caption=(
            "Bytes of live tensors on the fullest rank, counted: gradients at their peak before "
            "the step, the others after it. The tick is the total that toolkit plan predicts."
        ),
    )
    bars: list[Bar] = []
    for row in results["runs"]:
        memory = row["memory"]
        if memory is None or states_of(row) is None:
            shown.lacks(row, NOT_DRAWN, reason_for(row, "memory"))
            continue
        tick = _predicted_states(row)
        if tick is None:
            shown.lacks(row, "No tick", why_not_predicted(row))
        parts = [memory[name] or 0 for name in STATES]
        bars.append(Bar(row=row, parts=parts, tick=tick))
    if not bars:
        return shown
    shown.keys = _areas(bars, STATE_NAMES)
    shown.svg = byte_bars(shown, bars, PARTS[: len(STATE_NAMES)])
    _explain_ticks(shown, bars)
    return shown


def fullest_moment(results: Results) -> Shown | None:
    """A bar a run, of all tensors at the fullest moment of a step; None without a run."""
    if not results["runs"]:
        return None
    shown = Shown(
        name="peak",
        runs=len(results["runs"]),
        title="Memory at the fullest moment of a step",
        caption=(
            "Bytes of all tensors that were alive on the rank that held the most, counted in one "
            "step, of ragged rows; a GPU's allocator adds its own. Activations are what backward "
            "keeps; other are buffers, inputs and temporaries."
        ),
    )
    bars: list[Bar] = []
    for row in results["runs"]:
        peak = row["peak"]
        if peak is None:
            shown.lacks(row, NOT_DRAWN, reason_for(row, "peak"))
        else:
            expected = predicted_peak(row, counted=True)
            tick = None if expected is None else sum(expected) / 2
            bars.append(Bar(row=row, parts=parts_of(peak), tick=tick, peak=_device(row)))
    if not bars:
        return shown
    shown.caption = " ".join([shown.caption, *host_in_peak_lines([bar.row for bar in bars])])
    shown.keys = _areas(bars, PEAK_NAMES)
    _explain_peaks(shown, bars)
    shown.svg = byte_bars(shown, bars, PARTS)
    if _explain_ticks(shown, bars):
        shown.caption += " The tick is what the planner expects for the rows of that step."
    return shown


def _areas(bars: Sequence[Bar], names: Sequence[str]) -> list[Key]:
    """Name the parts that any bar has."""
    return [
        Key(text=name, colour=VARIABLES[PARTS[number]], kind="area")
        for number, name in enumerate(names)
        if any(bar.parts[number] for bar in bars)
    ]


def _explain_peaks(shown: Shown, bars: Sequence[Bar]) -> None:
    if any(bar.peak is not None for bar in bars):
        shown.caption += DEVICE
        shown.keys.append(Key(text="peak on the device", colour=VARIABLES[INK], kind="diamond"))


def _explain_ticks(shown: Shown, bars: Sequence[Bar]) -> bool:
    drawn = any(bar.tick is not None for bar in bars)
    if drawn:
        shown.keys.append(Key(text=PREDICTED, colour=VARIABLES[INK], kind="tick"))
    return drawn


def _device(row: Row) -> int | None:
    return None if row["rehearsal"] else peak_of(row)


def _predicted_states(row: Row) -> int | None:
    states = row["predicted"]["memory"]
    return None if states is None else sum(states[name] for name in STATES)
