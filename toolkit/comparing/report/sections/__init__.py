"""The sections of a report, in reading order: one list for every form in which it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from toolkit.comparing.report.runs_table import runs_table, speed_and_cost
from toolkit.comparing.report.sections.agreement import (
    agreement,
    evaluation,
    limits,
    not_measured,
    samples,
)
from toolkit.comparing.report.sections.failures import failures
from toolkit.comparing.report.sections.memory import fullest, held, over_ranks
from toolkit.comparing.report.sections.scaling import scaling, step_time, warm_up
from toolkit.comparing.report.sections.traffic import collectives, pipelines, sent, server
from toolkit.comparing.report.words import facts
from toolkit.records.results import Results
from toolkit.tables.grid import Section
from toolkit.tables.markdown import bullets, escaped, fenced


def report_sections(results: Results, *, page: bool = False) -> list[Section]:
    """Return all sections, the table of the runs first.

    Args:
        results: Results of the comparison.
        page: On a page, facts are tables, and each command stands under its run's name.
    """
    made: tuple[tuple[str, str, Section | None], ...] = (
        ("fixed", "What was the same in every run", _facts(results["fixed"], page=page)),
        ("environment", "Environment", _facts(results["environment"], page=page)),
        ("commands", "Commands", _commands(results, page=page)),
        ("failures", "Failures", Section(failures(results))),
        ("missing", "Not measured", Section(notes=not_measured(results))),
        ("limits", "Limits", Section(notes=limits(results))),
    )
    return [runs_table(results), *parts(results), *_titled(made)]


def _facts(recorded: Mapping[str, Any], *, page: bool) -> Section:
    named = facts(recorded)
    if page and named:
        return Section(header=("what", "recorded"), rows=named, words=("recorded",))
    lines = bullets(f"{name}: {shown}" for name, shown in named)
    return Section(lines or "Nothing was recorded.")


def _commands(results: Results, *, page: bool) -> Section:
    named = [(row["name"], row["command"]) for row in results["runs"] if row["command"] is not None]
    if page:
        blocks = [f"### {escaped(name)}\n\n{fenced(line, language='sh')}" for name, line in named]
    else:
        blocks = [fenced("\n".join(line for _, line in named), language="sh")] if named else []
    return Section("\n\n".join(blocks) or "No run was started.")


def parts(results: Results) -> list[Section]:
    """Return the sections on what was measured for which these results have data."""
    priced = any(row["cost"] for row in results["runs"])
    states, others = (collectives(results, of_states=of_states) for of_states in (True, False))
    return _titled(
        (
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
    )


def _titled(made: Iterable[tuple[str, str, Section | None]]) -> list[Section]:
    """Return the sections that have something to show, with their anchors and titles."""
    return [
        section._replace(id=anchor, title=title)
        for anchor, title, section in made
        if section is not None and any((section.text, section.rows, section.notes))
    ]
