"""What two comparisons say side by side: tables as plain text, and the verdict over them.

What differs between the two is listed first, since that is what the rest has to be read by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from toolkit.comparing.report.grid import RUN, Section, missing_lines
from toolkit.comparing.report.matching import (
    SIDES,
    Pair,
    SideBySide,
    circumstances,
    loss_difference,
    peak_bytes,
    recorded,
    speed_ratio,
    speed_verdict,
    traffic_bytes,
    why_missing,
)
from toolkit.comparing.report.row_facts import (
    host_in_peak_lines,
    peak_field,
    reason_for,
    states_of,
    status_of,
)
from toolkit.comparing.report.words import NOT_AVAILABLE, number, seconds, share, size
from toolkit.records.results import Row

MEANINGS: Final = {
    "faster": "B is faster",
    "slower": "B is slower",
    "near": "too near to tell apart",
    "unknown": "not known",
}

Field = str | Callable[[Row], str]
"""Where `not_measured` has the reason of a row; what it is may depend on the row."""


class Part(NamedTuple):
    title: str
    section: Section


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    of: Callable[[Pair], tuple[str, str | None]]
    """The cell, and why it is `n/a`."""


def parts(found: SideBySide) -> list[Part]:
    """Return what is told of the two, in the order in which it is told."""
    told = [Part("What differs", differences(found))]
    if found.pairs:
        told += [
            Part("Speed", speed(found)),
            Part("Memory and traffic", memory(found)),
            Part("Losses", losses(found)),
        ]
    if any(found.only):
        told.append(Part("Runs on one side only", unmatched(found)))
    return told


def differences(found: SideBySide) -> Section:
    """Return what was recorded of the two and is not the same."""
    a, b = circumstances(found.a), circumstances(found.b)
    rows = [
        [name, recorded(a, name), recorded(b, name)]
        for name in dict.fromkeys((*a, *b))
        if recorded(a, name) != recorded(b, name)
    ]
    rows += [
        [f"{pair.name}: {name}", str(one), str(other)]
        for pair in found.pairs
        for name, one, other in (
            ("rows of a micro-batch", *(row["per_device_train_batch_size"] for row in pair)),
            ("micro-batches of a step", *(row["gradient_accumulation_steps"] for row in pair)),
        )
        if one != other
    ]
    return Section("", ["what", *SIDES], rows) if rows else Section("Nothing that was recorded.")


def speed(found: SideBySide) -> Section:
    columns = [
        *_on_both("status", "status", status_of, str),
        *_on_both("tokens/s", "tokens_per_second", _speed, lambda v: number(v, "{:,.0f}")),
        Column("B / A", lambda pair: _ratio(found, pair)),
        Column("which means", lambda pair: _meaning(found, pair)),
        *_on_both("median step", "step_seconds", _median, seconds),
    ]
    return _table(found, columns, text=noise_sentence(found))


def memory(found: SideBySide) -> Section:
    def of(row: Row) -> int | None:
        return peak_bytes(found, row)

    def states(row: Row) -> int | None:
        return states_of(row["memory"])

    counted = found.counted

    def fields(row: Row) -> str:
        return peak_field(row, counted=counted)

    name = "peak, counted" if counted else "peak"
    columns = [
        *_on_both(name, fields, of, size),
        Column(f"{name} B - A", lambda pair: _change(pair, of, fields, found.speeds_reason)),
        *_on_both("states", "memory", states, size),
        Column("states B - A", lambda pair: _change(pair, states, "memory")),
        *_on_both("traffic", "traffic", traffic_bytes, size),
        Column("traffic B - A", lambda pair: _change(pair, traffic_bytes, "traffic")),
    ]
    text = (
        "Of the fullest rank. States are parameters, master weights, gradients and optimizer "
        "states together; traffic is the payload of all collectives of one optimizer step."
    )
    if found.a.rehearsal and found.b.rehearsal and not counted:
        text += " The peak of a rehearsal is the host's, with libraries and all."
    section = _table(found, columns, text=text)
    if not counted:
        return section
    lines = host_in_peak_lines([row for pair in found.pairs for row in pair])
    return section._replace(notes=[*lines, *section.notes])


def losses(found: SideBySide) -> Section:
    if found.other_training is not None:
        short, sentence = found.other_training
        columns = [
            Column(name, lambda _: (short, None))
            for name in ("final loss A", "final loss B", "largest difference")
        ]
        return _table(found, columns, text=f"Losses are not compared: {sentence}.")

    def apart(pair: Pair) -> tuple[str, str | None]:
        difference, reason = loss_difference(found, pair)
        if difference is None:
            return NOT_AVAILABLE, reason
        if not difference.value:
            return "equal to the last bit", None
        return f"{number(difference.value, '{:.1e}')} at step {difference.step}", None

    columns = [
        *_on_both("final loss", "final_loss", _final_loss, lambda v: number(v, "{:.6f}")),
        Column("largest difference", apart),
    ]
    return _table(found, columns, text="Step by step, on the same rows.")


def unmatched(found: SideBySide) -> Section:
    rows = [
        [row["name"], str(row["num_processes"]), letter, status_of(row)]
        for letter, rows in zip(SIDES, found.only, strict=True)
        for row in rows
    ]
    return Section("", [RUN, "processes", "side", "status"], rows)


def noise_sentence(found: SideBySide) -> str:
    """Say which difference in speed means something."""
    if found.speeds_reason:
        return f"Speeds are not compared: {found.speeds_reason}."
    said = (
        f"How far a difference means anything is not known: {found.noise_reason}."
        if found.noise is None
        else f"A difference under {share(found.noise)} means nothing."
    )
    noises = [noise for s in (found.a, found.b) if (noise := s.results["noise"])]
    if any(noise["basis"] == "steps" for noise in noises):
        said += (
            " It was measured on the steps of one start each, which know nothing of what changes "
            "between two machines or two starts."
        )
    if found.a.rehearsal:
        said += " Both are rehearsals on the CPU: their speeds say nothing about GPUs."
    return said


def verdict(found: SideBySide) -> str:
    """Say in a few sentences what came out, from the data alone."""
    pairs = found.pairs
    if not pairs:
        return "A and B have no run in common: none of the same strategy, engine and processes."
    counted = "1 run stands" if len(pairs) == 1 else f"{len(pairs)} runs stand"
    said = [f"{counted} on both sides."]
    unfinished = [s.letter for s in (found.a, found.b) if not s.results["complete"]]
    said += [f"Not finished: {' and '.join(unfinished)}."] if unfinished else []
    said += [
        f"{pair.name}: {status_of(pair.a)} in A, {status_of(pair.b)} in B."
        for pair in pairs
        if status_of(pair.a) != status_of(pair.b)
    ]
    return " ".join([*said, *_speeds_said(found), *_memory_said(found), *_losses_said(found)])


def _speeds_said(found: SideBySide) -> list[str]:
    if found.speeds_reason:
        return [f"Speeds are not compared: {found.speeds_reason}."]
    if found.a.rehearsal:
        return ["Both are rehearsals, whose speeds say nothing about GPUs."]
    groups: dict[str, list[tuple[float, Pair]]] = {}
    for pair in found.pairs:
        ratio, _ = speed_ratio(found, pair)
        if ratio is not None:
            groups.setdefault(speed_verdict(found, ratio), []).append((ratio, pair))
    said = [
        f"B is {kind} in {', '.join(f'{p.name} ({ratio:.2f} times A)' for ratio, p in each)}."
        for kind in ("faster", "slower")
        if (each := groups.get(kind))
    ]
    if near := groups.get("near"):
        said.append(f"Too near in speed to tell apart: {', '.join(p.name for _, p in near)}.")
    if unknown := groups.get("unknown"):
        ratios = ", ".join(f"{p.name} {ratio:.2f}" for ratio, p in unknown)
        said.append(
            f"Tokens/s of B as a multiple of A's: {ratios}; how far that means anything was not "
            "measured on both sides."
        )
    return said


def _memory_said(found: SideBySide) -> list[str]:
    """Name the largest change of the peak, and of the states; of a host's peak nothing."""
    told: list[str] = []
    if not found.speeds_reason and (found.counted or not found.a.rehearsal):
        told += _largest_change(found, "peak memory", lambda row: peak_bytes(found, row))
    return told + _largest_change(
        found, "the states of model and optimizer", lambda row: states_of(row["memory"])
    )


def _largest_change(found: SideBySide, name: str, of: Callable[[Row], int | None]) -> list[str]:
    changes = [
        (after - before, before, pair)
        for pair in found.pairs
        if (before := of(pair.a)) is not None and (after := of(pair.b)) is not None
    ]
    if not changes:
        return []
    most, before, pair = max(changes, key=lambda change: abs(change[0]))
    if not most:
        return [f"In {name} nothing changed."]
    return [f"In {name} {pair.name} changed most, by {_signed(most, before)}."]


def _losses_said(found: SideBySide) -> list[str]:
    if found.other_training:
        return [f"Losses are not compared: {found.other_training.sentence}."]
    apart = [(d, pair) for pair in found.pairs if (d := loss_difference(found, pair)[0])]
    if not apart:
        return ["No run has losses on both sides."]
    largest, pair = max(apart, key=lambda each: each[0].value)
    if not largest.value:
        return ["Losses are equal to the last bit."]
    value = number(largest.value, "{:.1e}")
    return [f"Losses differ by {value} at most ({pair.name}, step {largest.step})."]


def _on_both(
    name: str,
    field: Field,
    of: Callable[[Row], Any],
    shown: Callable[[Any], str],
) -> list[Column]:
    """Return a column for each side of what a row says of itself."""

    def column(index: int) -> Column:
        def cell(pair: Pair) -> tuple[str, str | None]:
            row = pair[index]
            value = of(row)
            if value is not None:
                return shown(value), None
            return NOT_AVAILABLE, reason_for(row, _of(field, row))

        return Column(f"{name} {SIDES[index]}", cell)

    return [column(0), column(1)]


def _table(found: SideBySide, columns: Sequence[Column], *, text: str) -> Section:
    """Return a line for each run on both sides, and below why cells are `n/a`."""
    several = len({pair.name for pair in found.pairs}) < len(found.pairs)
    missing: list[tuple[Row, str, str]] = []
    rows: list[list[str]] = []
    for pair in found.pairs:
        line = [pair.name, *([str(pair.a["num_processes"])] if several else [])]
        for column in columns:
            cell, reason = column.of(pair)
            line.append(cell)
            if reason is not None:
                missing.append((pair.a, column.name, reason))
        rows.append(line)
    header = [RUN, *(["processes"] if several else []), *(column.name for column in columns)]
    return Section(text, header, rows, missing_lines(missing, runs=len(rows)))


def _ratio(found: SideBySide, pair: Pair) -> tuple[str, str | None]:
    ratio, reason = speed_ratio(found, pair)
    return (NOT_AVAILABLE, reason) if ratio is None else (f"{ratio:.3f}", None)


def _meaning(found: SideBySide, pair: Pair) -> tuple[str, str | None]:
    ratio, reason = speed_ratio(found, pair)
    if ratio is None:
        return NOT_AVAILABLE, reason
    return MEANINGS[speed_verdict(found, ratio)], None


def _of(field: Field, row: Row) -> str:
    return field if isinstance(field, str) else field(row)


def _change(
    pair: Pair, of: Callable[[Row], int | None], field: Field, refused: str | None = None
) -> tuple[str, str | None]:
    if refused:
        return NOT_AVAILABLE, refused
    before, after = of(pair.a), of(pair.b)
    if before is None or after is None:
        fields = [_of(field, row) for row in pair]
        there = (before is not None, after is not None)
        return NOT_AVAILABLE, why_missing(pair, there, fields)
    return ("equal" if before == after else _signed(after - before, before)), None


def _signed(change: int, before: int) -> str:
    text = f"{'+' if change > 0 else ''}{size(change)}"
    return f"{text} ({change / before:+.1%})" if before else text


def _speed(row: Row) -> float | None:
    return row["tokens_per_second"]


def _median(row: Row) -> float | None:
    step = row["step_seconds"]
    return None if step is None else step["median"]


def _final_loss(row: Row) -> float | None:
    return row["final_loss"]
