"""Facts of a row: its role, its sums, the reasons for null values; columns of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from toolkit.comparing.predicted import STATES, allocated_at_7b
from toolkit.comparing.report.words import in_unit, size_between
from toolkit.records.fields import RankMemory, Table, Unit, fields_of, value_at
from toolkit.records.results import Control, Results, Row
from toolkit.strategies import STRATEGIES
from toolkit.tables.grid import NOT_AVAILABLE, Column, Missing, Section, grid

BASELINE: Final = "ddp"
"""The strategy whose speed is 1 in the column of relative speeds, where it ran."""


def listed(rows: Sequence[Row]) -> str:
    """Return the names of one or more runs as a list: `ddp, zero1 and fsdp`."""
    *before, last = (row["name"] for row in rows)
    return f"{', '.join(before)} and {last}" if before else last


def is_control(row: Row, control: Control | None) -> bool:
    return control is not None and row["name"] == control["name"]


def control_row(results: Results) -> Row | None:
    control = results["control"]
    return next((row for row in results["runs"] if is_control(row, control)), None)


def control_name(results: Results) -> str | None:
    control = results["control"]
    return None if control is None else control["name"]


def losses_of_seeds(results: Results) -> list[tuple[float, ...]]:
    """Return the control's losses of each step under every seed; empty where it had one."""
    control, seeds = control_row(results), results.get("other_seeds", [])
    if control is None or not control["losses"] or not seeds:
        return []
    return [*zip(control["losses"], *(seed["losses"] for seed in seeds), strict=False)]


def seeds_in_words(results: Results) -> str:
    """Say how far a seed moves the losses; empty where there was one seed."""
    steps = losses_of_seeds(results)
    if not steps:
        return ""
    widest = max(max(losses) - min(losses) for losses in steps)
    return f"Under {len(steps[0])} seeds, losses of a step lie up to {widest:.2g} apart."


def baseline(results: Results) -> Row | None:
    """Return the run whose speed is set to 1: DDP's, else the control's, else None.

    Among several runs of DDP, it is the first of those with the most processes.
    """
    fast = [row for row in results["runs"] if row["tokens_per_second"]]
    parallel = [row for row in fast if row["strategy"] == BASELINE]
    if parallel:
        return max(parallel, key=lambda row: row["num_processes"])
    return next((row for row in fast if is_control(row, results["control"])), None)


def ratio(row: Row, base: Row | None) -> float | None:
    """Return the speed as a multiple of the baseline's."""
    if base is None or not base["tokens_per_second"] or row["tokens_per_second"] is None:
        return None
    return row["tokens_per_second"] / base["tokens_per_second"]


def measured(results: Results) -> list[Row]:
    """Return the runs that ended well."""
    return [row for row in results["runs"] if row["status"] == "ok"]


def failed(results: Results) -> list[Row]:
    return [row for row in results["runs"] if row["status"] not in ("ok", "skipped")]


def status_of(row: Row) -> str:
    if row["status"] == "ok" and not all(row["gates"].values()):
        return "gate broken"
    return row["status"]


def states_of(row: Row | RankMemory) -> int | None:
    """Return the bytes of parameters, master weights, gradients and optimizer states together."""
    memory = row["memory"]
    if memory is None:
        return None
    known = [part for name in STATES if (part := memory[name]) is not None]
    return sum(known) if len(known) == len(STATES) else None


def peak_of(row: Row) -> int | None:
    """Return the device's peak in bytes; in a rehearsal the host's."""
    memory = row["memory"]
    if memory is None:
        return None
    return memory["host_peak_bytes"] if row["rehearsal"] else memory["peak_bytes"]


def counted_peak(row: Row) -> int | None:
    """Return the bytes of all tensors at the fullest moment of a step."""
    return None if row["peak"] is None else row["peak"]["total_bytes"]


def method_of(results: Results) -> str:
    """Return how the runs were trained: `full`, `lora` or `qlora`."""
    return str(results["fixed"].get("method", "full")).partition(",")[0]


def at_7b(row: Row, results: Results) -> int | str:
    """Return what the planner has for a run's strategy at 7B, in bytes, or why it has no answer."""
    return allocated_at_7b(row["strategy"], row["num_processes"], method_of(results))


def offloads(row: Row) -> bool:
    strategy = STRATEGIES.get(row["strategy"])
    return strategy is not None and strategy.offloads


def host_in_peak(row: Row) -> bool:
    """Whether the counted peak includes offloaded states: in a rehearsal the host is the device."""
    return row["rehearsal"] and offloads(row)


def host_in_peak_lines(rows: Sequence[Row]) -> list[str]:
    """Name the runs whose counted peak would be smaller on a GPU; no line without any."""
    names = dict.fromkeys(
        row["name"] for row in rows if counted_peak(row) is not None and host_in_peak(row)
    )
    if not names:
        return []
    return [
        f"Offloaded states are in the counted peak of {', '.join(names)}, since the host is the "
        "device in a rehearsal; on a GPU they are not."
    ]


def counts_peaks(results: Results) -> bool:
    """Whether this is a rehearsal that counted its tensors at their fullest moment."""
    return results["rehearsal"] and any(row["peak"] for row in results["runs"])


def peak_field(row: Row, *, counted: bool = False) -> str:
    """Return the field that holds a run's peak."""
    if counted:
        return "peak"
    return "memory.host_peak_bytes" if row["rehearsal"] else "memory.peak_bytes"


def reason_for(row: Row, field: str, *, otherwise: str | None = None) -> str:
    """Return the reason in `not_measured` why a run has no value in `field`.

    Args:
        field: Path with dots: `memory.peak_bytes`; a reason for `memory` holds for it too.
        otherwise: Reason for a null that `not_measured` does not explain.
    """
    name = field
    while name:
        if name in row["not_measured"]:
            return row["not_measured"][name]
        name = name.rpartition(".")[0]
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    return otherwise or "its record gives no reason"


def predicted_peak(row: Row, *, counted: bool = False) -> tuple[int, int] | None:
    """Return both ends of the peak that the planner expects, bytes on the device.

    With `counted`, it is the peak of the tensors alone, in the step that was counted.
    """
    ends = row["predicted"]["counted_bytes" if counted else "peak_bytes"]
    return (ends["low"], ends["high"]) if ends else None


def why_not_predicted(row: Row) -> str:
    return row["predicted"]["reason"] or "the step that was counted read no rows of tokens"


def planner_word(row: Row) -> str:
    """Give the planner's expected peak of a run, and by how much it exceeds the memory."""
    peak = predicted_peak(row)
    if peak is None:
        return why_not_predicted(row)
    where = " on a GPU" if row["rehearsal"] else ""
    text = f"predicted peak{where} {size_between(*peak)}"
    room, over = row["predicted"]["room_bytes"], row["predicted"]["over_bytes"]
    if room is None or over is None:
        return f"{text}; there is no GPU's memory to hold it against" + (
            " in a rehearsal" if row["rehearsal"] else ""
        )
    of = f"the {_short(room)} of its smallest GPU"
    low, high = over["low"], over["high"]
    if high <= 0:
        return f"{text}, and {size_between(-high, -low)} to spare of {of}: it was expected to fit"
    lacks = size_between(low, high) if low > 0 else f"up to {_short(high)}"
    return f"{text}; with the allocator's share and the CUDA context {lacks} more than {of}"


def _short(count: int) -> str:
    return size_between(count, count).partition(" to ")[2]


RUN: Final = "run"
CONTROL: Final = "control"


def field_column(
    name: str, cell: Callable[[Row], str | None], field: str, otherwise: str | None = None
) -> Column[Row]:
    """Return a column of a field of the runs.

    Args:
        name: Its heading.
        cell: Returns None, or n/a, where the run has no value.
        field: Key under which `not_measured` has the reason.
        otherwise: Reason shown for a null that `not_measured` does not explain.
    """

    def shown(row: Row) -> str | Missing:
        text = cell(row)
        if text is None or text == NOT_AVAILABLE:
            return Missing(reason_for(row, field, otherwise=otherwise))
        return text

    return Column(name, shown)


def columns_of(table: Table, *, control: Control | None = None) -> list[Column[Row]]:
    """Return the columns of a table that are declared in `records`.

    Args:
        table: Name of the table.
        control: The cells of its row say `control` instead of a distance from itself.
    """
    return [
        field_column(fact.column, partial(_shown, path, fact.unit, control), path, fact.null_means)
        for path, fact in fields_of(Row)
        if fact.table == table
    ]


def _shown(path: str, unit: Unit, control: Control | None, row: Row) -> str:
    return CONTROL if is_control(row, control) else in_unit(value_at(row, path), unit)


def name_of(row: Row) -> str:
    return row["name"]


def runs_grid(
    rows: Sequence[Row], columns: Sequence[Column[Row]], *, text: str = "", drop_empty: bool = False
) -> Section:
    """Return a line for each run, and below the reasons of its `n/a` cells."""
    naming = [Column(RUN, name_of)]
    return grid(rows, columns, label=name_of, naming=naming, text=text, drop_empty=drop_empty)
