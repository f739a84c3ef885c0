"""Two comparisons side by side: tables as plain text, and their verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from toolkit.comparing.report.diff.match import (
    SIDES,
    STATES,
    Diff,
    Pair,
    Quantity,
    circumstances,
    loss_difference,
    recorded,
    speed_ratio,
    speed_verdict,
    why_missing,
)
from toolkit.comparing.report.grid import RUN, Section, missing_lines
from toolkit.comparing.report.row_facts import host_in_peak_lines, reason_for, status_of
from toolkit.comparing.report.words import NOT_AVAILABLE, gap, in_unit, share, size
from toolkit.records.results import Row

MEANINGS: Final = {
    "faster": "B is faster",
    "slower": "B is slower",
    "near": "too near to tell apart",
    "unknown": "not known",
}


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    cell: Callable[[Pair], tuple[str, str | None]]
    """Returns the cell, and the reason if it is `n/a`."""


def sections(diff: Diff) -> dict[str, Section]:
    """Return the parts of the page by title, in reading order."""
    # The differences come first, because the other sections depend on them.
    made = {"What differs": differences(diff)}
    if diff.pairs:
        made["Speed"] = speed(diff)
        made["Memory and traffic"] = memory(diff)
        made["Losses"] = losses(diff)
    if any(diff.only):
        made["Runs on one side only"] = unmatched(diff)
    return made


def differences(diff: Diff) -> Section:
    """Return the recorded facts that are not the same in both."""
    a, b = circumstances(diff.a), circumstances(diff.b)
    rows = [
        [name, recorded(a, name), recorded(b, name)]
        for name in dict.fromkeys((*a, *b))
        if recorded(a, name) != recorded(b, name)
    ]
    rows += [
        [f"{pair.name}: {name}", str(before), str(after)]
        for pair in diff.pairs
        for name, before, after in (
            ("rows of a micro-batch", *(row["per_device_train_batch_size"] for row in pair)),
            ("micro-batches of a step", *(row["gradient_accumulation_steps"] for row in pair)),
        )
        if before != after
    ]
    return Section("", ["what", *SIDES], rows) if rows else Section("Nothing that was recorded.")


def speed(diff: Diff) -> Section:
    tokens, *others = diff.quantities("speed")

    def cell(in_words: Callable[[float], str], pair: Pair) -> tuple[str, str | None]:
        ratio, reason = speed_ratio(diff, pair)
        return (NOT_AVAILABLE, reason) if ratio is None else (in_words(ratio), None)

    def meaning(ratio: float) -> str:
        return MEANINGS[speed_verdict(diff, ratio)]

    columns = [
        Column("status A", lambda pair: (status_of(pair.a), None)),
        Column("status B", lambda pair: (status_of(pair.b), None)),
        *_on_both(tokens),
        Column("B / A", partial(cell, "{:.3f}".format)),
        Column("which means", partial(cell, meaning)),
        *(column for quantity in others for column in _on_both(quantity)),
    ]
    return _table(diff, columns, text=noise_sentence(diff))


def memory(diff: Diff) -> Section:
    columns: list[Column] = []
    for quantity in diff.quantities("memory"):
        refused = diff.speeds_reason if quantity.csv == diff.peak.csv else None
        columns += [*_on_both(quantity), _change(quantity, refused)]
    text = (
        "Of the fullest rank. States are parameters, master weights, gradients and optimizer "
        "states together; traffic is the payload of all collectives of one optimizer step."
    )
    if diff.a.rehearsal and diff.b.rehearsal and not diff.counted:
        text += " The peak of a rehearsal is the host's, with libraries and all."
    section = _table(diff, columns, text=text)
    if not diff.counted:
        return section
    lines = host_in_peak_lines([row for pair in diff.pairs for row in pair])
    return section._replace(notes=[*lines, *section.notes])


def losses(diff: Diff) -> Section:
    sides = [column for quantity in diff.quantities("losses") for column in _on_both(quantity)]
    if diff.other_training is not None:
        short, sentence = diff.other_training
        names = (*(column.name for column in sides), "largest difference")
        columns = [Column(name, lambda _: (short, None)) for name in names]
        return _table(diff, columns, text=f"Losses are not compared: {sentence}.")

    def apart(pair: Pair) -> tuple[str, str | None]:
        difference, reason = loss_difference(diff, pair)
        if difference is None:
            return NOT_AVAILABLE, reason
        if not difference.value:
            return "equal to the last bit", None
        return f"{gap(difference.value)} at step {difference.step}", None

    columns = [*sides, Column("largest difference", apart)]
    return _table(diff, columns, text="Step by step, on the same rows.")


def unmatched(diff: Diff) -> Section:
    rows = [
        [row["name"], str(row["num_processes"]), letter, status_of(row)]
        for letter, rows in zip(SIDES, diff.only, strict=True)
        for row in rows
    ]
    return Section("", [RUN, "processes", "side", "status"], rows)


def noise_sentence(diff: Diff) -> str:
    """Say which difference in speed is larger than the noise."""
    if diff.speeds_reason:
        return f"Speeds are not compared: {diff.speeds_reason}."
    text = (
        f"How far a difference means anything is not known: {diff.noise_reason}."
        if diff.noise is None
        else f"A difference under {share(diff.noise)} means nothing."
    )
    noises = [side.results["noise"] for side in diff.sides]
    if any(noise is not None and noise["basis"] == "steps" for noise in noises):
        text += (
            " It was measured on the steps of one start each, which know nothing of what changes "
            "between two machines or two starts."
        )
    if diff.a.rehearsal:
        text += " Both are rehearsals on the CPU: their speeds say nothing about GPUs."
    return text


def verdict(diff: Diff) -> str:
    """Summarise the result in a few sentences, from the data alone."""
    pairs = diff.pairs
    if not pairs:
        return "A and B have no run in common: none of the same strategy, engine and processes."
    counted = "1 run stands" if len(pairs) == 1 else f"{len(pairs)} runs stand"
    sentences = [f"{counted} on both sides."]
    unfinished = [side.letter for side in diff.sides if not side.results["complete"]]
    sentences += [f"Not finished: {' and '.join(unfinished)}."] if unfinished else []
    sentences += [
        f"{pair.name}: {status_of(pair.a)} in A, {status_of(pair.b)} in B."
        for pair in pairs
        if status_of(pair.a) != status_of(pair.b)
    ]
    sentences += _speed_sentences(diff)
    if not diff.speeds_reason and (diff.counted or not diff.a.rehearsal):
        sentences += _largest_change(diff, "peak memory", diff.peak)
    sentences += _largest_change(diff, "the states of model and optimizer", STATES)
    return " ".join([*sentences, _loss_sentence(diff)])


def _speed_sentences(diff: Diff) -> list[str]:
    if diff.speeds_reason:
        return [f"Speeds are not compared: {diff.speeds_reason}."]
    if diff.a.rehearsal:
        return ["Both are rehearsals, whose speeds say nothing about GPUs."]
    groups: dict[str, list[tuple[float, Pair]]] = {name: [] for name in MEANINGS}
    for pair in diff.pairs:
        ratio, _ = speed_ratio(diff, pair)
        if ratio is not None:
            groups[speed_verdict(diff, ratio)].append((ratio, pair))
    sentences: list[str] = []
    for kind in ("faster", "slower"):
        runs = [f"{pair.name} ({ratio:.2f} times A)" for ratio, pair in groups[kind]]
        sentences += [f"B is {kind} in {', '.join(runs)}."] if runs else []
    if near := groups["near"]:
        names = ", ".join(pair.name for _, pair in near)
        sentences.append(f"Too near in speed to tell apart: {names}.")
    if unknown := groups["unknown"]:
        ratios = ", ".join(f"{pair.name} {ratio:.2f}" for ratio, pair in unknown)
        sentences.append(
            f"Tokens/s of B as a multiple of A's: {ratios}; how far that means anything was not "
            "measured on both sides."
        )
    return sentences


def _largest_change(diff: Diff, name: str, quantity: Quantity) -> list[str]:
    changes = [
        (after - before, before, pair)
        for pair in diff.pairs
        if (before := quantity.read(pair.a)) is not None
        and (after := quantity.read(pair.b)) is not None
    ]
    if not changes:
        return []
    most, before, pair = max(changes, key=lambda change: abs(change[0]))
    if not most:
        return [f"In {name} nothing changed."]
    return [f"In {name} {pair.name} changed most, by {_signed(most, before)}."]


def _loss_sentence(diff: Diff) -> str:
    if diff.other_training:
        return f"Losses are not compared: {diff.other_training.sentence}."
    apart = [
        (difference, pair)
        for pair in diff.pairs
        if (difference := loss_difference(diff, pair)[0]) is not None
    ]
    if not apart:
        return "No run has losses on both sides."
    largest, pair = max(apart, key=lambda entry: entry[0].value)
    if not largest.value:
        return "Losses are equal to the last bit."
    return f"Losses differ by {gap(largest.value)} at most ({pair.name}, step {largest.step})."


def _on_both(quantity: Quantity) -> list[Column]:
    """Return a column for each side."""

    def cell(index: int, pair: Pair) -> tuple[str, str | None]:
        row = pair[index]
        value = quantity.read(row)
        reason = None if value is not None else reason_for(row, quantity.field(row))
        return in_unit(value, quantity.unit), reason

    return [
        Column(f"{quantity.name} {letter}", partial(cell, index))
        for index, letter in enumerate(SIDES)
    ]


def _change(quantity: Quantity, refused: str | None) -> Column:
    """Return the column of the difference in bytes, or of the reason why there is none."""

    def cell(pair: Pair) -> tuple[str, str | None]:
        if refused:
            return NOT_AVAILABLE, refused
        values = [quantity.read(row) for row in pair]
        before, after = values
        if None in values:
            return NOT_AVAILABLE, why_missing(pair, values, quantity.field)
        return ("equal" if before == after else _signed(after - before, before)), None

    return Column(f"{quantity.name} B - A", cell)


def _signed(change: int, before: int) -> str:
    text = f"{'+' if change > 0 else ''}{size(change)}"
    return f"{text} ({change / before:+.1%})" if before else text


def _table(diff: Diff, columns: Sequence[Column], *, text: str) -> Section:
    """Return a line for each run on both sides, and below the reasons of `n/a` cells."""
    several = len({pair.name for pair in diff.pairs}) < len(diff.pairs)
    missing: list[tuple[Row, str, str]] = []
    rows: list[list[str]] = []
    for pair in diff.pairs:
        line = [pair.name, *([str(pair.a["num_processes"])] if several else [])]
        for column in columns:
            cell, reason = column.cell(pair)
            line.append(cell)
            if reason is not None:
                missing.append((pair.a, column.name, reason))
        rows.append(line)
    header = [RUN, *(["processes"] if several else []), *(column.name for column in columns)]
    return Section(text, header, rows, missing_lines(missing, runs=len(rows)))
