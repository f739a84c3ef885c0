"""Agreement with the control: gaps, the largest difference of a weight, and gates."""

from __future__ import annotations

from typing import Final

from toolkit.comparing.parity.gates import gate_names, gates_in_words
from toolkit.comparing.parity.judgement import GATED_STEPS
from toolkit.comparing.report.grid import CONTROL, Column, Section, columns_of, grid
from toolkit.comparing.report.row_facts import is_control
from toolkit.comparing.report.verdict import broken_lines, unjudged_lines
from toolkit.records.results import Control, Results, Row

BROKEN: Final = "broken"


def agreement(results: Results) -> Section:
    """Return the gaps of every run to the control, and whether its gates held."""
    runs, control = results["runs"], results["control"]
    text = (
        f"Gates over the first {GATED_STEPS} steps: {gates_in_words(results['precision'])}. The "
        "gaps are over all steps. The largest difference is that of a single weight, absolute, "
        "with its tensor."
    )
    columns = columns_of("agreement", control=control)
    columns += [_gate_column(gate, control) for gate in gate_names(runs)]
    section = grid(runs, columns, text=text)
    notes = [f"{row['name']}: {note}" for row in runs for note in row["notes"]]
    notes += [
        f"{row['name']}, a guard warned: {warning}"
        for row in runs
        for warning in row["guard_warnings"]
    ]
    return section._replace(
        notes=[*broken_lines(results), *section.notes, *unjudged_lines(results), *notes]
    )


def _gate_column(gate: str, control: Control | None) -> Column:
    def cell(row: Row) -> str:
        if gate in row["gates"]:
            return "held" if row["gates"][gate] else BROKEN
        return CONTROL if is_control(row, control) else "not judged"

    return Column(f"gate: {gate.replace('_', ' ')}", cell, f"gates.{gate}")
