"""Memory: contents of the fullest rank, its fullest moment, and the spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Literal

from toolkit.comparing.report.row_facts import (
    columns_of,
    field_column,
    host_in_peak_lines,
    measured,
    predicted_peak,
    runs_grid,
    states_of,
    why_not_predicted,
)
from toolkit.comparing.report.runs_table import BEYOND_STATES
from toolkit.comparing.report.words import in_unit, size, size_between
from toolkit.records.fields import Peak, RankMemory, fields_of, value_at
from toolkit.records.results import Results, Row
from toolkit.tables.grid import NOT_AVAILABLE, Section

UNPREDICTED: Final = ("peak reserved", "nvme", "host peak")
"""Columns that the planner does not predict."""

PEAK_CATEGORIES: Final = tuple(BEYOND_STATES)
"""Categories in the order in which they are stacked."""


def held(results: Results) -> Section:
    """Return the bytes of every category on the fullest rank, beside the planner's."""
    good = measured(results)
    if not good:
        return Section("No run was measured.")
    fields = {
        fact.column: path.removeprefix("memory.")
        for path, fact in fields_of(Row)
        if fact.table == "memory"
    }
    measurements = runs_grid(good, columns_of("memory"), drop_empty=True)
    names = measurements.header[1:]
    rows = [
        line
        for row, cells in zip(good, measurements.rows, strict=True)
        for line in (
            cells,
            [f"{row['name']}, predicted", *_predicted_sizes(row, [fields[name] for name in names])],
        )
    ]
    text = (
        "Counted from the tensors that a rank holds: gradients at their fullest just before the "
        "step, the others after it; `master` is an fp32 copy that DeepSpeed keeps. Below each run "
        "stands what `toolkit plan` predicts, with its error where it has one."
    )
    notes = [*measurements.notes, *not_predicted(good, "memory")]
    unknown = [name for name in UNPREDICTED if name in names]
    if unknown:
        notes.append(f"n/a, predicted {', '.join(unknown)}: the planner has no figure for it")
    shared = max(value_at(row, "memory.host_shared_bytes") or 0 for row in good)
    if shared:
        notes.append(
            f"Up to {size(shared)} of a rank's host peak are libraries that it shares with the "
            "process it was forked from; with --cold each rank has its own."
        )
    return Section(text, measurements.header, rows, notes)


def _predicted_sizes(row: Row, names: Sequence[str]) -> list[str]:
    """Return the planner's figure for the named categories; for the peak, both ends."""
    predicted = row["predicted"]
    if predicted["memory"] is None:
        return [NOT_AVAILABLE] * len(names)
    cells: list[str] = []
    for name in names:
        error = predicted["errors"].get(name)
        if name == "peak_bytes":
            # No error means that no device peak was measured to compare the prediction with.
            shown = NOT_AVAILABLE if error is None else in_unit(predicted["peak_bytes"], "interval")
        else:
            shown = size(value_at(predicted["memory"], name))
        cells.append(f"{shown} ({error:+.2%})" if error else shown)
    return cells


def not_predicted(
    good: Sequence[Row], field: Literal["memory", "counted_bytes", "traffic_bytes"]
) -> list[str]:
    """Say why runs have no prediction of a field, each reason once."""
    reasons: dict[str, list[str]] = {}
    for row in good:
        if row["predicted"][field] is None:
            reasons.setdefault(why_not_predicted(row), []).append(row["name"])
    return [f"n/a, predicted, {', '.join(names)}: {reason}" for reason, names in reasons.items()]


def fullest(results: Results) -> Section | None:
    """Return the parts of the fullest moment of a step; None without a run that ended well."""
    good = measured(results)
    if not good:
        return None
    columns = [
        *columns_of("peak"),
        *(field_column(name, partial(_category, name), "peak") for name in PEAK_CATEGORIES),
    ]
    notes = host_in_peak_lines(good)
    predicted = any(predicted_peak(row, counted=True) for row in good)
    if predicted:
        columns.insert(3, field_column("predicted", _expected, "peak"))
        notes += not_predicted([row for row in good if row["peak"]], "counted_bytes")
    text = (
        "The fullest moment of one optimizer step, of ragged rows, on the rank that held the "
        "most, counted from the tensors that were alive: `parameters` with those gathered for a "
        "moment, `activations` what backward keeps, `other` buffers, inputs and temporaries. "
        + (
            "`predicted` is what the planner's formulas give for the rows of that step. "
            * predicted
        )
        + (
            "A GPU's allocator adds its own. Offloaded states lie in the host's memory there; the "
            "other tensors are the same, as far as its kernels keep the same ones."
            if results["rehearsal"]
            else "The device's peak above is over all steps, packed rows included, and has what "
            "the allocator adds."
        )
    )
    section = runs_grid(good, columns, text=text)
    return section._replace(notes=[*notes, *section.notes])


def _expected(row: Row) -> str | None:
    """Return the planner's expectation for the counted step, with its error."""
    ends = predicted_peak(row, counted=True)
    if ends is None:
        return "not predicted" if row["peak"] else None
    error = row["predicted"]["errors"].get("counted_bytes")
    return size_between(*ends) + (f" ({error:+.2%})" if error else "")


def _category(name: str, row: Row) -> str | None:
    peak = row["peak"]
    return None if peak is None else size(parts_of(peak)[PEAK_CATEGORIES.index(name)])


def parts_of(peak: Peak) -> list[int]:
    """Return the bytes in the order of `PEAK_CATEGORIES`; other categories count as `other`."""
    known = [peak["categories"].get(name, 0) for name in PEAK_CATEGORIES[:-1]]
    return [*known, sum(peak["categories"].values()) - sum(known)]


def over_ranks(results: Results) -> Section:
    """Return the least and the most memory of any rank."""
    rows = [row for row in results["runs"] if len(row["per_rank"] or []) > 1]
    if not rows:
        return Section("No run of several ranks has a count for each of them.")
    columns = [field_column("ranks", lambda row: str(len(row["per_rank"] or [])), "per_rank")]
    for name, field, read in (
        ("states", "memory", states_of),
        ("counted peak", "peak", partial(value_at, path="peak.total_bytes")),
        ("device peak", "memory.peak_bytes", partial(value_at, path="memory.peak_bytes")),
        ("host peak", "memory.host_peak_bytes", partial(value_at, path="memory.host_peak_bytes")),
    ):
        columns += [
            field_column(f"least {name}", partial(_extreme, min, read), field),
            field_column(f"most {name}", partial(_extreme, max, read), field),
        ]
    text = "Of all ranks of a run, those that hold least and most; states are the sum of the above."
    section = runs_grid(rows, columns, text=text, drop_empty=True)
    return section._replace(notes=[*host_in_peak_lines(rows), *section.notes])


def _extreme(
    choose: Callable[[list[int]], int], read: Callable[[RankMemory], int | None], row: Row
) -> str | None:
    ranks = row["per_rank"] or []
    counts = [count for rank in ranks if (count := read(rank)) is not None]
    return size(choose(counts)) if ranks and len(counts) == len(ranks) else None
