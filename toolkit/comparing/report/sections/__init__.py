"""The parts of a report between its table and what was held fixed, in reading order."""

from __future__ import annotations

from typing import NamedTuple

from toolkit.comparing.report.grid import Section
from toolkit.comparing.report.runs_table import speed_and_cost
from toolkit.comparing.report.sections.agreement import agreement
from toolkit.comparing.report.sections.evaluation import evaluation, samples
from toolkit.comparing.report.sections.memory import fullest, held, over_ranks
from toolkit.comparing.report.sections.scaling import scaling
from toolkit.comparing.report.sections.steps import step_time, warm_up
from toolkit.comparing.report.sections.traffic import collectives, sent
from toolkit.records.results import Results


class Part(NamedTuple):
    """A section with its place on the page."""

    id: str
    title: str
    section: Section
    folded: bool = False
    """Whether a page shows it only when asked."""

    names: int = 1
    """Columns at the left that name the line."""


def parts(results: Results) -> list[Part]:
    """Return the parts that these results have something for."""
    priced = any(row["cost"] for row in results["runs"])
    found = (
        ("speed", "Speed and cost" if priced else "Speed", speed_and_cost(results), False, 1),
        ("memory", "Memory, the fullest rank", held(results), False, 1),
        ("peak", "The fullest moment of a step", fullest(results), False, 1),
        ("ranks", "Memory over the ranks", over_ranks(results), False, 1),
        ("traffic", "Traffic of one optimizer step", sent(results), False, 1),
        (
            "collectives",
            "Collectives of parameters and gradients",
            collectives(results, of_states=True),
            True,
            2,
        ),
        (
            "other-collectives",
            "Other collectives",
            collectives(results, of_states=False),
            True,
            2,
        ),
        ("agreement", "Agreement with the control", agreement(results), False, 1),
        ("evaluation", "Evaluation", evaluation(results), False, 1),
        ("samples", "Samples", samples(results), True, 2),
        ("time", "Time of an optimizer step", step_time(results), False, 1),
        ("warm-up", "Time before and after", warm_up(results), False, 1),
        ("scaling", "Scaling", scaling(results), False, 2),
    )
    return [
        Part(id, title, section, folded, names)
        for id, title, section, folded, names in found
        if section is not None
    ]
