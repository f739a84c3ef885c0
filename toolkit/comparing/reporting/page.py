"""`report.html`: one file that opens offline, on a phone too, in light and in dark.

The template escapes whatever is put into it; figures alone come in as they are, from an XML writer
that has escaped their text. The page forbids itself scripts and the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from toolkit.comparing.figures import draw_all
from toolkit.comparing.report import (
    COLUMNS,
    NOT_AVAILABLE,
    REHEARSAL,
    Section,
    agreement,
    cells,
    facts,
    heading,
    held,
    is_control,
    limits,
    mismatches,
    missing_reasons,
    not_measured,
    run_name,
    sent,
    size,
    states_of,
    verdict,
)
from toolkit.results import Memory, Results, Row

PAGE_FILE: Final = "report.html"
TEMPLATE: Final = Path(__file__).with_name("report.html.jinja")
STYLE: Final = Path(__file__).with_name("report.css")

MEASURED: Final = COLUMNS[3:]

BASELINE: Final = "ddp"
"""The strategy whose speed is called 1, where it ran."""


def render_page(results: Results) -> str:
    """Return the page; `presentable` results are what it should be given."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["coded"] = _coded
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return (
        template.render(
            name=results.get("name", "comparison"),
            css=Markup(STYLE.read_text(encoding="utf-8").strip()),
            complete=results.get("complete", True),
            rehearsal=REHEARSAL if results.get("rehearsal") else "",
            verdict=verdict(results),
            runs=_runs(results),
            figures=draw_all(results),
            agreement=agreement(results),
            memory=held(results),
            spread=spread(results),
            traffic=sent(results),
            fixed=facts(results.get("fixed", {})),
            environment=facts(results["environment"]),
            commands=[(run_name(row), row["command"]) for row in results["runs"] if row["command"]],
            failures=[_failure(row) for row in results["runs"] if _failed(row)],
            missing=not_measured(results),
            limits=limits(results),
        )
        + "\n"
    )


def _coded(text: str) -> str:
    """Return our own words escaped, with code where they have backticks."""
    from markupsafe import Markup, escape

    parts = [escape(part) for part in text.split("`")]
    parts[1::2] = [Markup("<code>") + part + Markup("</code>") for part in parts[1::2]]
    return Markup("").join(parts)


def baseline(results: Results) -> Row | None:
    """Return the run whose speed is called 1: DDP's, else the control's, else none."""
    fast = [row for row in results["runs"] if row["tokens_per_second"]]
    for wanted in (BASELINE, None):
        for row in fast:
            if row["strategy"] == wanted or (not wanted and is_control(row, results["control"])):
                return row
    return None


def ratio(row: Row, base: Row | None) -> float | None:
    """Return the speed as a multiple of the baseline's."""
    if base is None or not base["tokens_per_second"] or row["tokens_per_second"] is None:
        return None
    return row["tokens_per_second"] / base["tokens_per_second"]


def spread(results: Results) -> Section:
    """Return how evenly memory is spread: least and most of any rank."""
    rows: list[list[str]] = []
    for row in results["runs"]:
        ranks = [each["memory"] for each in row["per_rank"] or []]
        if len(ranks) < 2:
            continue
        rows.append(
            [
                row["strategy"],
                row["engine"],
                str(len(ranks)),
                *(
                    shown
                    for of in (states_of, _device, _host)
                    for shown in _least_and_most(ranks, of)
                ),
            ]
        )
    if not rows:
        return Section("No run of several ranks has a count for each of them.")
    header = ["strategy", "engine", "ranks", "states, least", "states, most"]
    header += ["device peak, least", "device peak, most", "host peak, least", "host peak, most"]
    text = "Of all ranks of a run, those that hold least and most; states are the sum of the above."
    without = results.get("rehearsal")
    notes = ["device peak: a rehearsal runs on the CPU, which has none"] if without else []
    return Section(text, header, rows, notes)


def _least_and_most(ranks: Sequence[Memory], of: Callable[[Memory], int | None]) -> tuple[str, str]:
    counts = [count for memory in ranks if (count := of(memory)) is not None]
    if len(counts) < len(ranks):
        return NOT_AVAILABLE, NOT_AVAILABLE
    return size(min(counts)), size(max(counts))


def _device(memory: Memory) -> int | None:
    return memory["peak_bytes"]


def _host(memory: Memory) -> int | None:
    return memory["host_peak_bytes"]


def _runs(results: Results) -> dict[str, Any]:
    control, base = results["control"], baseline(results)
    header = ["run", "status", *(heading(column, results) for column in MEASURED)]
    notes = missing_reasons(results)
    if base is not None:
        header.insert(3, f"times {run_name(base)}")
        notes.insert(0, f"Baseline of speed: {run_name(base)}; the others are multiples of it.")
    if control is not None:
        named = f"Control: {control['strategy']}-{control['engine']}; gaps are measured from it."
        notes.insert(0, named + (f" {control['reason']}" if control["reason"] else ""))
    rows: list[dict[str, Any]] = []
    for row in results["runs"]:
        shown = cells(row, control)
        listed = [shown[column] for column in MEASURED]
        if base is not None:
            times = ratio(row, base)
            listed.insert(1, NOT_AVAILABLE if times is None else f"{times:.2f}")
        rows.append(
            {
                "name": run_name(row),
                "roles": [
                    role
                    for role, there in (
                        ("control", is_control(row, control)),
                        ("baseline", row is base),
                    )
                    if there
                ],
                "status": shown["status"],
                "tone": {"ok": "good", "skipped": "warn"}.get(shown["status"], "bad"),
                "cells": listed,
            }
        )
    return {"header": header, "rows": rows, "notes": notes}


def _failed(row: Row) -> bool:
    return row["status"] not in ("ok", "skipped")


def _failure(row: Row) -> dict[str, Any]:
    refused = row["status"] == "refused" and row["attestation"]
    return {
        "name": run_name(row),
        "status": row["status"],
        "reason": row["reason"] or "No reason was given.",
        "fix": row["fix"],
        "mismatches": mismatches(refused) if refused else None,
        "tail": "\n".join(row["tail"]),
        "log": f"{row['folder']}/stdout.log" if row["folder"] else None,
    }
