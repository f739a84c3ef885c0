"""Rounding: the control held against itself, trained once more with its sums in another order.

At a high learning rate two sound runs part by rounding alone within the gated steps. How fast is
not known in advance, so it is measured, and only where a gate broke after the first step: until
the first update no rounding can have grown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from toolkit.comparing.parity import judges
from toolkit.comparing.parity.judgement import Case, Judgement, Rounding
from toolkit.comparing.weights import WeightsError
from toolkit.records.record import Record


def may_be_rounding(judgement: Judgement, *, first_step: int = 1) -> bool:
    """Whether all gates that broke did so by a distance, and after the first compared step."""
    return bool(judgement.broken) and all(
        broken["value"] is not None
        and math.isfinite(broken["value"])
        and (broken["first_step"] is None or broken["first_step"] > first_step)
        for broken in judgement.broken
    )


def measure_rounding(
    again: Record, control: Record, *, folder: Path, control_folder: Path, first_step: int = 1
) -> Rounding | None:
    """Return how far the control parts from itself; None where the two are not one training.

    Args:
        again: Record of the control that was trained once more, with the rows of each step in
            reverse.
        control: Record of the control.
        folder: Folder of the first, with its final weights below.
        control_folder: Folder of the second.
        first_step: First step that is compared.
    """
    case = Case(
        record=again,
        control=control,
        folder=folder,
        control_folder=control_folder,
        first_step=first_step,
    )
    rows = Judgement()
    judges.judge_data(case, rows)
    if rows.broken:
        return None
    try:
        weights = judges.compare_weights(case).share
    except (WeightsError, judges.OtherTrainingError):
        weights = None
    gaps = {
        "loss": judges.loss_gaps(case),
        "grad_norm": judges.norm_gaps(case),
        "evaluation": judges.evaluation_gaps(case),
    }
    return Rounding(
        steps={gate: _largest_so_far(of_steps) for gate, of_steps in gaps.items()}, weights=weights
    )


def _largest_so_far(gaps: Mapping[int, float]) -> dict[int, float]:
    largest, by_step = 0.0, dict[int, float]()
    for step, gap in sorted(gaps.items()):
        if math.isfinite(gap):
            largest = max(largest, abs(gap))
        by_step[step] = largest
    return by_step
