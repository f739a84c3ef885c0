"""The parts of a report between its table and the fixed settings, in reading order."""

from __future__ import annotations

from typing import Final, NamedTuple

from toolkit.comparing.report.grid import Section
from toolkit.comparing.report.runs_table import speed_and_cost
from toolkit.comparing.report.sections.agreement import agreement, evaluation, samples
from toolkit.comparing.report.sections.memory import fullest, held, over_ranks
from toolkit.comparing.report.sections.scaling import scaling
from toolkit.comparing.report.sections.steps import step_time, warm_up
from toolkit.comparing.report.sections.traffic import collectives, pipelines, sent, server
from toolkit.records.results import Results

FOLDED: Final = ("collectives", "other-collectives", "samples")
"""Parts that a page shows only when the reader opens them."""

TWO_NAMES: Final = ("collectives", "other-collectives", "samples", "scaling")
"""Parts whose lines are identified by two columns, not one."""


class ReportPart(NamedTuple):
    """A section with its place on the page."""

    id: str
    title: str
    section: Section

    @property
    def folded(self) -> bool:
        return self.id in FOLDED

    @property
    def names(self) -> int:
        """Number of columns at the left that identify the line."""
        return 2 if self.id in TWO_NAMES else 1


def parts(results: Results) -> list[ReportPart]:
    """Return the parts for which these results have data."""
    priced = any(row["cost"] for row in results["runs"])
    states, others = (collectives(results, of_states=of_states) for of_states in (True, False))
    sections: tuple[tuple[str, str, Section | None], ...] = (
        ("speed", "Speed and cost" if priced else "Speed", speed_and_cost(results)),
        ("memory", "Memory, the fullest rank", held(results)),
        ("peak", "The fullest moment of a step", fullest(results)),
        ("ranks", "Memory over the ranks", over_ranks(results)),
        ("traffic", "Traffic of one optimizer step", sent(results)),
        ("collectives", "Collectives of parameters and gradients", states),
        ("other-collectives", "Other collectives", others),
        ("pipeline", "Pipeline of one optimizer step", pipelines(results)),
        ("server", "Parameter server of one optimizer step", server(results)),
        ("agreement", "Agreement with the control", agreement(results)),
        ("evaluation", "Evaluation", evaluation(results)),
        ("samples", "Samples", samples(results)),
        ("time", "Time of an optimizer step", step_time(results)),
        ("warm-up", "Time before and after", warm_up(results)),
        ("scaling", "Scaling", scaling(results)),
    )
    return [ReportPart(id, title, section) for id, title, section in sections if section]
