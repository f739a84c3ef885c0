"""Agreement with the control: gaps, the largest difference of a weight, and gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from toolkit.comparing.parity import GATED_STEPS, GATES
from toolkit.comparing.report.grid import Column, Section, grid
from toolkit.comparing.report.row_facts import is_control, run_name
from toolkit.comparing.report.verdict import broken_lines, gate_names, unjudged_lines
from toolkit.comparing.report.words import number
from toolkit.records.results import Control, Difference, Results, Row

BROKEN: Final = "broken"
CONTROL: Final = "control"


def agreement(results: Results) -> Section:
    """Return the gaps of every run to the control, and whether its gates held."""
    control = results["control"]
    gates = GATES.get(results.get("precision", "no"), GATES["no"])
    by_parameter = any("gradient_difference" in row for row in results["runs"])
    each = f" (that of each parameter within {gates.gradients:g} in the first step)"
    text = (
        f"Gates over the first {GATED_STEPS} steps: loss within {gates.loss:g} of the control, "
        f"gradient norm before clipping within {gates.grad_norm:g} relative{each * by_parameter}, "
        f"final weights within {gates.weights:g} of the control's own update, the same rows in "
        "each step and no row on two ranks. The gaps are over all steps."
    )
    columns = [
        _gap_column("largest loss gap", "loss_gap", lambda row: _loss_gap(row, "max"), control),
        _gap_column("mean loss gap", "loss_gap", lambda row: _loss_gap(row, "mean"), control),
        _gap_column("grad norm gap", "grad_norm_gap", lambda row: row["grad_norm_gap"], control),
        _gap_column("weight gap", "weight_gap", lambda row: row["weight_gap"], control),
    ]
    if any("weight_difference" in row for row in results["runs"]):
        text += " The largest difference is that of a single weight, absolute, with its tensor."
        columns.append(
            Column(
                "largest weight difference",
                lambda row: (
                    CONTROL
                    if is_control(row, control)
                    else _difference(row.get("weight_difference"))
                ),
                "weight_difference",
            )
        )
    if by_parameter:
        columns.append(
            Column(
                "largest gradient difference",
                lambda row: (
                    CONTROL
                    if is_control(row, control)
                    else _difference(row.get("gradient_difference"))
                ),
                "gradient_difference",
            )
        )
    columns += [_gate_column(gate, control) for gate in gate_names(results["runs"])]
    section = grid(results["runs"], columns, text=text)
    notes = [f"{run_name(row)}: {note}" for row in results["runs"] for note in row["notes"]]
    notes += [
        f"{run_name(row)}, a guard warned: {text}"
        for row in results["runs"]
        for text in row.get("guard_warnings", [])
    ]
    return section._replace(
        notes=[*broken_lines(results), *section.notes, *unjudged_lines(results), *notes]
    )


def _gap_column(
    name: str, field: str, of: Callable[[Row], float | None], control: Control | None
) -> Column:
    return Column(
        name,
        lambda row: CONTROL if is_control(row, control) else number(of(row), "{:.1e}"),
        field,
    )


def _loss_gap(row: Row, which: Literal["max", "mean"]) -> float | None:
    gap = row["loss_gap"]
    return None if gap is None else gap[which]


def _difference(found: Difference | None) -> str | None:
    return None if found is None else f"{number(found['value'], '{:.1e}')} ({found['tensor']})"


def _gate_column(gate: str, control: Control | None) -> Column:
    def of(row: Row) -> str:
        if gate in row["gates"]:
            return "held" if row["gates"][gate] else BROKEN
        return CONTROL if is_control(row, control) else "not judged"

    return Column(f"gate: {gate.replace('_', ' ')}", of, f"gates.{gate}")
