"""Figure of traffic: bytes of a step's collectives, with the planner's formula as a tick."""

from __future__ import annotations

from typing import Final

from toolkit.comparing.predicted import MOVED
from toolkit.comparing.report.figures.bars import Bar, byte_bars
from toolkit.comparing.report.figures.frame import NOT_DRAWN, PREDICTED, Key, Shown
from toolkit.comparing.report.row_facts import reason_for, why_not_predicted
from toolkit.comparing.report.sections.traffic import OTHER, moved_by_purpose
from toolkit.comparing.report.svg import INK, PARTS, VARIABLES
from toolkit.records.results import Results

PURPOSES: Final = (*MOVED, OTHER)
COLOURS: Final = (PARTS[0], PARTS[2], PARTS[5])


def bytes_by_purpose(results: Results) -> Shown:
    """A bar a run, of what its collectives carry in one step; what was predicted as a tick."""
    shown = Shown(
        name="traffic",
        runs=len(results["runs"]),
        title="Bytes of collectives in one optimizer step, by purpose",
        caption=(
            "Bytes of payload as the calls name it, of the rank that counted most, in the step "
            "after the first. All other: norms, counts, buffers and logged losses. The tick is "
            "what the planner's formula gives for parameters and gradients together."
        ),
    )
    bars: list[Bar] = []
    for row in results["runs"]:
        traffic = row["traffic"]
        if traffic is None:
            shown.lacks(row, NOT_DRAWN, reason_for(row, "traffic"))
            continue
        moved = moved_by_purpose(traffic)
        tick = row["predicted"]["traffic_bytes"]
        if tick is None:
            shown.lacks(row, "No tick", why_not_predicted(row))
        bars.append(Bar(row=row, parts=[moved[purpose] for purpose in PURPOSES], tick=tick))
    if not bars:
        return shown
    shown.keys = [
        Key(text=f"all {name}" if name == OTHER else name, colour=VARIABLES[colour], kind="area")
        for name, colour in zip(PURPOSES, COLOURS, strict=True)
    ]
    shown.svg = byte_bars(shown, bars, COLOURS, nothing="none: one process")
    if any(bar.tick is not None for bar in bars):
        shown.keys.append(Key(text=PREDICTED, colour=VARIABLES[INK], kind="tick"))
    return shown
