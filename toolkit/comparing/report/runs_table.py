"""The table of the runs, and the one beneath it of what their speed comes to.

Control and baseline are named; a strategy that ran out of memory keeps its row, with what the
planner expected of it.
"""

from __future__ import annotations

from typing import Final

from toolkit.comparing.report import words
from toolkit.comparing.report.grid import Column, Section, columns_of, grid, missing_lines
from toolkit.comparing.report.names import both_engines
from toolkit.comparing.report.row_facts import (
    baseline,
    control_name,
    counted_peak,
    counts_peaks,
    host_in_peak_lines,
    is_control,
    peak_field,
    peak_of,
    planner_word,
    predicted_peak,
    ratio,
    reason_for,
    states_of,
    status_of,
)
from toolkit.comparing.report.turned import turned_order
from toolkit.comparing.report.words import (
    NOT_AVAILABLE,
    number,
    seconds,
    size,
    size_between,
    tokens_per_second,
)
from toolkit.records.fields import NO_PRICE
from toolkit.records.results import Control, Results, Row

COLUMNS: Final = (
    "strategy",
    "engine",
    "status",
    "tokens/s",
    "step time",
    "states",
    "peak memory",
    "final loss",
    "gap",
)

MEASURED: Final = ("states", "peak memory", "final loss", "gap")

EVALUATED: Final = ("eval loss", "perplexity")
"""Columns of a comparison that evaluates: of each run's last evaluation."""


def cells(row: Row, control: Control | None, *, counted: bool = False) -> dict[str, str]:
    """Return the table's cells of one run by column; none is empty.

    Args:
        counted: The peak is that of the counted tensors, not the device's or the host's.
    """
    step = row["step_seconds"]
    gap = row["loss_gap"]
    held = counted_peak(row) if counted else peak_of(row)
    peak, expected = size(held), predicted_peak(row)
    # The planner's is a device's: in a rehearsal it would stand among the peaks of a host.
    if held is None and row["status"] == "oom" and expected is not None and not row["rehearsal"]:
        peak = f"predicted {size_between(*expected)}"
    return {
        "strategy": row["strategy"],
        "engine": row["engine"],
        "status": status_of(row),
        "tokens/s": tokens_per_second(row["tokens_per_second"]),
        "step time": seconds(step and step["median"]),
        "states": size(states_of(row)),
        "peak memory": peak,
        "final loss": number(row["final_loss"], "{:.4f}"),
        "gap": ("control" if is_control(row, control) else words.gap(gap and gap["max"])),
    }


def heading(column: str, results: Results) -> str:
    if column == "peak memory" and counts_peaks(results):
        return "peak, counted"
    if column == "peak memory" and results["rehearsal"]:
        return "peak host memory"
    return "gap to the control" if column == "gap" else column


def shows_speed(results: Results) -> bool:
    """Whether the main table has speeds: those of a rehearsal say nothing about GPUs."""
    return not results["rehearsal"]


def runs_table(results: Results, *, speed: bool | None = None) -> Section:
    """Return the main table; the engine is a column where both ran, as are unlike processes.

    Args:
        results: Of the comparison.
        speed: Whether it shows speeds; None: only where they are those of GPUs.
    """
    base = baseline(results)
    speed = shows_speed(results) if speed is None else speed
    names = _naming(results)
    columns = [*names, "status", *_measured(results, base, speed=speed)]
    rows = [[_shown(row, results, base)[name] for name in columns] for row in results["runs"]]
    notes = [
        *_named(results, base if speed else None),
        *turned_order(results),
        *_missing(results, base, speed=speed),
    ]
    return Section("", [heading(name, results) for name in columns], rows, notes)


def _naming(results: Results) -> list[str]:
    """Return the columns that tell the runs from each other."""
    runs = results["runs"]
    counts = {row["num_processes"] for row in runs if row["strategy"] != "single"}
    engines = ["engine"] if both_engines(row["engine"] for row in runs) else []
    return ["strategy", *engines, *(["processes"] if len(counts) > 1 else [])]


def _measured(results: Results, base: Row | None, *, speed: bool) -> dict[str, str | None]:
    """Return the columns right of the status, and where `not_measured` has the reason of each.

    None stands for the peak's, which depends on the run.
    """
    columns: dict[str, str | None] = {}
    if speed:
        columns["tokens/s"] = "tokens_per_second"
        if base is not None:
            columns[_versus(base)] = "tokens_per_second"
        columns["step time"] = "step_seconds"
    columns |= {"states": "memory", "peak memory": None}
    columns |= {"final loss": "final_loss", "gap": "loss_gap"}
    if any(row["evaluation"] for row in results["runs"]):
        columns |= dict.fromkeys(EVALUATED, "evaluation")
    return columns


def _shown(row: Row, results: Results, base: Row | None) -> dict[str, str]:
    """Return every cell that a run can have in the main table."""
    shown = cells(row, results["control"], counted=counts_peaks(results))
    shown["processes"] = str(row["num_processes"])
    if base is not None:
        shown[_versus(base)] = _times(row, base)
    return shown | dict(zip(EVALUATED, _evaluated(row), strict=True))


def _evaluated(row: Row) -> list[str]:
    last = next(reversed(row["evaluation"] or []), None)
    return [
        number(None if last is None else last["loss"], "{:.4f}"),
        number(None if last is None else last["perplexity"], "{:,.2f}"),
    ]


def _missing(results: Results, base: Row | None, *, speed: bool) -> list[str]:
    """Say for every `n/a` of the table why it is one, the same reason once."""
    counted = counts_peaks(results)
    columns = _measured(results, base, speed=speed)
    missing = [
        (row, column, reason_for(row, field or peak_field(row, counted=counted)))
        for row in results["runs"]
        for shown in [_shown(row, results, base)]
        for column, field in columns.items()
        if shown[column] == NOT_AVAILABLE
    ]
    # No `every run` here: the reader looks for a name.
    return missing_lines(missing, runs=0, columns=len(columns))


def out_of_memory(results: Results) -> list[str]:
    """Say of each run that ran out of memory what the planner expected of it."""
    return [
        f"{row['name']} ran out of memory: {planner_word(row)}."
        for row in results["runs"]
        if row["status"] == "oom"
    ]


def _named(results: Results, base: Row | None) -> list[str]:
    """Name control and baseline, and what the column of the peak is."""
    lines: list[str] = []
    control, name = results["control"], control_name(results)
    if control is not None and name is not None:
        why = f" {control['reason']}" if control["reason"] else ""
        lines.append(f"Control: {name}; gaps are measured from it.{why}")
    if base is not None:
        on = f" on {base['num_processes']} processes" if _scaled(results) else ""
        lines.append(f"Baseline of speed: {base['name']}{on}; the others are multiples of it.")
    if counts_peaks(results):
        lines.append(
            "States: weights, gradients and optimizer states of the fullest rank. Peak: all its "
            "tensors at the fullest moment of a step; a GPU's allocator adds its own."
        )
        lines += host_in_peak_lines(results["runs"])
    return [*lines, *out_of_memory(results)]


def _scaled(results: Results) -> bool:
    return len({row["num_processes"] for row in results["runs"] if row["num_processes"] > 1}) > 1


def _versus(base: Row) -> str:
    return f"vs {base['name']}"


def _times(row: Row, base: Row | None) -> str:
    return number(ratio(row, base), "{:.2f}x")


def speed_and_cost(results: Results) -> Section | None:
    """Return what the speed comes to in arithmetic and money; None where no run has any of it."""
    runs, declared = results["runs"], columns_of("speed")
    if all(column.of(row) == NOT_AVAILABLE for row in runs for column in declared):
        return None
    base = baseline(results)
    speed = "tokens_per_second"
    columns = [Column("tokens/s", lambda row: tokens_per_second(row[speed]), speed)]
    if base is not None:
        columns.append(Column(_versus(base), lambda row: _times(row, base), speed))
    section = grid(runs, [*columns, *declared], whole=False)
    return section._replace(notes=[*_conventions(results), *section.notes])


def _conventions(results: Results) -> list[str]:
    """Say once how arithmetic was counted and what the price was."""
    lines = [
        "Tokens/s counts all tokens of the packed rows, supervised tokens/s those that are "
        "trained on."
    ]
    computed = [compute for row in results["runs"] if (compute := row["compute"])]
    conventions = dict.fromkeys(
        f"{compute['convention']} (GPU: {compute['gpu']})" for compute in computed
    )
    lines += [f"TFLOP/s and MFU: {text}" for text in conventions]
    if any(row["cost"] for row in results["runs"]):
        price = results["dollars_per_hour"]
        lines.append(
            "GPU-hours are those of the whole run, start and save included. "
            + (
                f"{NO_PRICE[0].upper()}{NO_PRICE[1:]}."
                if price is None
                else f"The price of a GPU is ${price:g} an hour."
            )
        )
    return lines
