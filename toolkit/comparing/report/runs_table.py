"""The table of the runs, and beneath it the table of their arithmetic and cost.

Control and baseline are named. A strategy that ran out of memory keeps its row, with the planner's
expectation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from toolkit.backends import backend_of
from toolkit.comparing.parity.gates import limit_of
from toolkit.comparing.report import words
from toolkit.comparing.report.names import both_engines
from toolkit.comparing.report.row_facts import (
    at_7b,
    baseline,
    columns_of,
    control_name,
    counted_peak,
    counts_peaks,
    field_column,
    host_in_peak_lines,
    is_control,
    listed,
    measured,
    method_of,
    name_of,
    offloads,
    peak_field,
    peak_of,
    planner_word,
    predicted_peak,
    ratio,
    reason_for,
    runs_grid,
    seeds_in_words,
    states_of,
    status_of,
)
from toolkit.comparing.report.words import number, seconds, size, size_between, tokens_per_second
from toolkit.records.fields import NO_PRICE, value_at
from toolkit.records.record import strategy_of
from toolkit.records.results import Control, Results, Row
from toolkit.tables.grid import (
    NOT_AVAILABLE,
    Column,
    Missing,
    Section,
    grid,
    missing_lines,
)

EVALUATED: Final = ("eval loss", "perplexity")
"""Columns of a comparison that evaluates; they show each run's last evaluation."""

AT_7B: Final = "at 7B, GiB"
"""Column of a rehearsal: what the planner expects of the same strategies at a real size."""

NOTICEABLE: Final = 1.01
"""Quotient of two sizes from which they count as different."""

BEYOND_STATES: Final = {
    "parameters": "weights gathered for a moment",
    "master": "copies of the weights",
    "gradients": "gradients on their way between the ranks",
    "optimizer": "temporaries of the optimizer",
    "activations": "activations",
    "other": "buffers and temporaries",
}
"""Tensors alive at the fullest moment beyond the states, by category.

The order is that of `PEAK_CATEGORIES`, of stacked bars and of columns in `results.csv`.
"""


def cells(row: Row, control: Control | None, *, counted: bool = False) -> dict[str, str]:
    """Return the table's cells of one run by column; no cell is empty.

    Args:
        counted: Show the peak of the counted tensors, not that of the device or the host.
    """
    step = row["step_seconds"]
    gap = row["loss_gap"]
    held = counted_peak(row) if counted else peak_of(row)
    peak, expected = size(held), predicted_peak(row)
    # The planner's peak is of a device; a rehearsal shows peaks of the host.
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


def runs_table(results: Results, *, show_speed: bool = False) -> Section:
    """Return the main table; engine and number of processes are columns where they differ.

    Args:
        results: Results of the comparison.
        show_speed: Show the speeds of a rehearsal too.
    """
    runs, base, counted = results["runs"], baseline(results), counts_peaks(results)
    speed = show_speed or not results["rehearsal"]

    def column(name: str, field: str | None = None) -> Column[Row]:
        def cell(row: Row) -> str | Missing:
            text = _all_cells(row, results, base)[name]
            if text != NOT_AVAILABLE or name in naming:
                return text
            return Missing(reason_for(row, field or peak_field(row, counted=counted)))

        return Column(name, cell)

    naming = [*_naming_columns(runs), "status"]
    measured = _measured_columns(results, base, speed=speed)
    section = grid(
        runs,
        [column(name, field) for name, field in measured.items()],
        label=name_of,
        naming=[*map(column, naming)],
        words=["status"],
        # Name the runs rather than write `every run`: the reader looks for a name.
        says_every=False,
    )
    if results["rehearsal"]:
        section = _with_7b(section, results)
    headings = {"gap": "gap to the control"}
    if results["rehearsal"]:
        headings["peak memory"] = "peak, counted" if counted else "peak host memory"
    return section._replace(
        header=[headings.get(name, name) for name in section.header],
        names=len(naming) - 1,
        notes=[
            *_table_notes(results, base if speed else None),
            *peaks_explained(results),
            *section.notes,
        ],
    )


def _naming_columns(runs: Sequence[Row]) -> list[str]:
    """Return the columns that identify the runs."""
    counts = {row["num_processes"] for row in runs if row["strategy"] != "single"}
    engines = ["engine"] if both_engines(row["engine"] for row in runs) else []
    backends = (backend_of(strategy) for strategy in map(strategy_of, runs) if strategy)
    splits = ["mesh"] if any(backend.splits_model for backend in backends) else []
    return ["strategy", *engines, *(["processes"] if len(counts) > 1 else []), *splits]


def _measured_columns(results: Results, base: Row | None, *, speed: bool) -> dict[str, str | None]:
    """Return the columns right of the status, each with its key in `not_measured`.

    The key is None for the peak, whose field depends on the run.
    """
    columns: dict[str, str | None] = {}
    if speed:
        columns["tokens/s"] = "tokens_per_second"
        if base is not None:
            columns[f"vs {base['name']}"] = "tokens_per_second"
        columns["step time"] = "step_seconds"
    columns |= {"states": "memory", "peak memory": None}
    columns |= {"final loss": "final_loss", "gap": "loss_gap"}
    if any(row["evaluation"] for row in results["runs"]):
        columns |= dict.fromkeys(EVALUATED, "evaluation")
    return columns


def _all_cells(row: Row, results: Results, base: Row | None) -> dict[str, str]:
    """Return every cell that a run can have in the main table."""
    line = cells(row, results["control"], counted=counts_peaks(results))
    line["processes"] = str(row["num_processes"])
    strategy = strategy_of(row)
    line["mesh"] = NOT_AVAILABLE if strategy is None else strategy.mesh(row["num_processes"])
    if base is not None:
        line[f"vs {base['name']}"] = _times(row, base)
    last = next(reversed(row["evaluation"] or []), None)
    loss, perplexity = EVALUATED
    line[loss] = number(last and last["loss"], "{:.4f}")
    line[perplexity] = number(last and last["perplexity"], "{:,.2f}")
    return line


def _with_7b(section: Section, results: Results) -> Section:
    """Return the table with the planner's column right of the peak."""
    place = section.header.index("final loss")
    held = [at_7b(row, results) for row in results["runs"]]
    cells = [NOT_AVAILABLE if isinstance(it, str) else f"{it / 2**30:,.0f}" for it in held]
    missing = [
        (row["name"], AT_7B, it)
        for row, it in zip(results["runs"], held, strict=True)
        if isinstance(it, str)
    ]
    return section._replace(
        header=[*section.header[:place], AT_7B, *section.header[place:]],
        rows=[
            [*line[:place], cell, *line[place:]]
            for line, cell in zip(section.rows, cells, strict=True)
        ],
        notes=[*section.notes, *missing_lines(missing, items=0)],
    )


def _table_notes(results: Results, base: Row | None) -> list[str]:
    """Return notes on control and baseline, the column of the peak, and predicted values in it."""
    lines: list[str] = []
    control, name, runs = results["control"], control_name(results), results["runs"]
    if control is not None and name is not None:
        why = f" {control['reason']}" if control["reason"] else ""
        limit = limit_of("loss", results["precision"])
        lines += [
            f"Control: {name}; gaps are measured from it.{why}",
            "Gap: the largest difference between the loss of a step and the control's. Rounding "
            f"alone makes a small gap; from {limit:g} on, the run is not the same training. "
            "Gradients, weights and rows are judged too.",
        ]
        lines += filter(None, [seeds_in_words(results)])
    if base is not None:
        scaled = len({row["num_processes"] for row in runs if row["num_processes"] > 1}) > 1
        on = f" on {base['num_processes']} processes" if scaled else ""
        lines.append(f"Baseline of speed: {base['name']}{on}; the others are multiples of it.")
    if counts_peaks(results):
        lines.append(
            "States: weights, gradients and optimizer states of the process that holds the most. "
            "Peak: all its tensors at the fullest moment of a step, gathered weights and "
            "activations too: this decides whether a run fits. A GPU's allocator adds its own."
        )
        lines += [*host_in_peak_lines(runs), *_second_copies(results)]
    if results["rehearsal"]:
        lines.append(
            "At 7B: what each GPU needs, the fullest one of a run, for a model of 7 billion "
            f"parameters, as toolkit plan 7b expects it ({method_of(results)} fine-tune, bf16, one "
            "row of 2,048 tokens)."
        )
    return lines + [
        f"{row['name']} ran out of memory: {planner_word(row)}."
        for row in runs
        if row["status"] == "oom"
    ]


def _second_copies(results: Results) -> list[str]:
    """Name the runs that keep weights in fp32 twice."""
    copies = {row["name"]: value_at(row, "memory.master_bytes") for row in measured(results)}
    names = [name for name, held in copies.items() if held]
    if not names or results["precision"] != "no":
        return []
    most = size(max(filter(None, copies.values())))
    return [
        f"{', '.join(names)}: {most} of the states are the process's share of a second copy "
        "of the weights (master), which DeepSpeed keeps where the weights are in fp32, too."
    ]


def peaks_explained(results: Results) -> list[str]:
    """Explain, for each run, a peak above that of runs with the same states, or larger ones."""
    read = counted_peak if counts_peaks(results) else peak_of
    sizes = [
        (row, states, peak)
        for row in measured(results)
        # Offloaded states count as states, but on a GPU they are not in the peak.
        if not offloads(row)
        and (states := states_of(row)) is not None
        and (peak := read(row)) is not None
    ]
    lines: list[str] = []
    for row, states, peak in sizes:
        leaner = [other for other in sizes if peak > NOTICEABLE * other[2]]
        lower = [other for other, held, _ in leaner if held > NOTICEABLE * states]
        same = [(other, its) for other, held, its in leaner if size(held) == size(states)]
        if lower:
            lines.append(
                f"{row['name']} holds smaller states than {listed(lower)} and peaks higher: "
                f"{_largest_extra(row, lower[-1])}."
            )
        elif same:
            other, its = max(same, key=lambda pair: pair[1])
            lines.append(
                f"{row['name']} holds the same states as {listed([run for run, _ in same])}, and "
                f"peaks {size(peak - its)} above {other['name']}: {_more_gradients(row, other)}."
            )
    return lines


def _more_gradients(row: Row, lower: Row) -> str:
    """Say why a run peaks above another one with the same states."""
    strategy, extra = strategy_of(row), _extras(row, lower).get("gradients", 0)
    why = "" if strategy is None else backend_of(strategy).more_gradients
    if why and extra > 0:
        return f"{why} ({size(extra)} more)"
    return _largest_extra(row, lower)


def _extras(row: Row, lower: Row) -> dict[str, int]:
    """Return by how many bytes a run exceeds the other beyond the states, by category."""
    ours, theirs = _beyond_states(row), _beyond_states(lower)
    return {name: count - theirs.get(name, 0) for name, count in ours.items() if theirs}


def _largest_extra(row: Row, lower: Row) -> str:
    """Name the category beyond the states in which a run exceeds the other run most."""
    extras = _extras(row, lower)
    most = max(extras, key=lambda name: extras[name], default=None)
    if most is None or extras[most] <= 0:
        return "what its kernels and the allocator hold beside its tensors"
    return f"at its fullest moment {size(extras[most])} more are {BEYOND_STATES[most]}"


def _beyond_states(row: Row) -> dict[str, int]:
    """Return the bytes at the fullest moment that are not states, by category."""
    peak = row["peak"]
    if peak is None:
        return {}
    return {
        name: peak["categories"].get(name, 0) - (value_at(row, f"memory.{name}_bytes") or 0)
        for name in BEYOND_STATES
    }


def _times(row: Row, base: Row | None) -> str:
    return number(ratio(row, base), "{:.2f}x")


def speed_and_cost(results: Results) -> Section | None:
    """Return arithmetic and cost of the runs; None where no run has either."""
    runs, declared = results["runs"], columns_of("speed")
    if all(isinstance(column.cell(row), Missing) for row in runs for column in declared):
        return None
    base = baseline(results)
    speed = "tokens_per_second"
    columns = [field_column("tokens/s", lambda row: tokens_per_second(row[speed]), speed)]
    if base is not None:
        columns.append(field_column(f"vs {base['name']}", lambda row: _times(row, base), speed))
    section = runs_grid(runs, [*columns, *declared], drop_empty=True)
    return section._replace(notes=[*_conventions(results), *section.notes])


def _conventions(results: Results) -> list[str]:
    """Give the convention for counting arithmetic, and the price, once for all runs."""
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
