"""`toolkit report A B`: two comparisons side by side, in a terminal and as two files.

Every form shows the same sections, as plain text, and the same verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from toolkit.comparing.report.diff.match import (
    SIDES,
    STATES,
    Diff,
    Pair,
    Quantity,
    Side,
    circumstances,
    for_readers,
    loss_difference,
    match,
    recorded,
    speed_ratio,
    speed_verdict,
    why_missing,
)
from toolkit.comparing.report.row_facts import RUN, host_in_peak_lines, reason_for, status_of
from toolkit.comparing.report.words import gap, in_unit, share, size
from toolkit.errors import UsageError, is_full_disk
from toolkit.escaping import one_line
from toolkit.files import write_text
from toolkit.tables import page
from toolkit.tables.grid import Column, Missing, Section, grid
from toolkit.tables.markdown import bullets, document, escaped
from toolkit.tables.terminal import print_line, print_tables

if TYPE_CHECKING:
    from rich.console import Console


MEANINGS: Final = {
    "faster": "B is faster",
    "slower": "B is slower",
    "near": "too near to tell apart",
    "unknown": "not known",
}


def sections(diff: Diff) -> list[Section]:
    """Return the sections in reading order; their texts are plain, since they quote records."""
    # The differences come first, because the other sections depend on them.
    made = {"What differs": differences(diff)}
    if diff.pairs:
        made["Speed" if diff.speed else "Status"] = speed(diff)
        made["Memory and traffic"] = memory(diff)
        made["Losses"] = losses(diff)
    if any(diff.only):
        made["Runs on one side only"] = unmatched(diff)
    return [
        section._replace(title=title, id=title.lower().replace(" ", "-"))
        for title, section in made.items()
    ]


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
    if not rows:
        return Section("Nothing that was recorded.")
    return Section("", ["what", *SIDES], rows, words=SIDES)


def speed(diff: Diff) -> Section:
    """Return how the runs ended and, but for two rehearsals, their speeds."""
    tokens, *others = diff.quantities("speed")

    def cell(in_words: Callable[[float], str], pair: Pair) -> str | Missing:
        ratio, reason = speed_ratio(diff, pair)
        return Missing(reason or "") if ratio is None else in_words(ratio)

    def meaning(ratio: float) -> str:
        return MEANINGS[speed_verdict(diff, ratio)]

    ends: list[Column[Pair]] = [
        Column("status A", lambda pair: status_of(pair.a)),
        Column("status B", lambda pair: status_of(pair.b)),
    ]
    if not diff.speed:
        return _table(diff, ends, text="")
    columns = [
        *ends,
        *_on_both(tokens),
        Column("B / A", partial(cell, "{:.3f}".format)),
        Column("which means", partial(cell, meaning)),
        *(column for quantity in others for column in _on_both(quantity)),
    ]
    return _table(diff, columns, text=noise_sentence(diff))


def memory(diff: Diff) -> Section:
    columns: list[Column[Pair]] = []
    for quantity in diff.quantities("memory"):
        refused = diff.speeds_reason if quantity.name == diff.peak.name else None
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
        columns: list[Column[Pair]] = [Column(name, lambda _: short) for name in names]
        return _table(diff, columns, text=f"Losses are not compared: {sentence}.")

    def apart(pair: Pair) -> str | Missing:
        difference, reason = loss_difference(diff, pair)
        if difference is None:
            return Missing(reason or "")
        if not difference.value:
            return "equal to the last bit"
        return f"{gap(difference.value)} at step {difference.step}"

    return _table(
        diff, [*sides, Column("largest difference", apart)], text="Step by step, on the same rows."
    )


def unmatched(diff: Diff) -> Section:
    rows = [
        [row["name"], str(row["num_processes"]), letter, status_of(row)]
        for letter, rows in zip(SIDES, diff.only, strict=True)
        for row in rows
    ]
    return Section("", [RUN, "processes", "side", "status"], rows, words=("side", "status"))


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


def _on_both(quantity: Quantity) -> list[Column[Pair]]:
    """Return a column for each side."""

    def cell(index: int, pair: Pair) -> str | Missing:
        row = pair[index]
        value = quantity.read(row)
        if value is None:
            return Missing(reason_for(row, quantity.field(row)))
        return in_unit(value, quantity.unit)

    return [
        Column(f"{quantity.name} {letter}", partial(cell, index))
        for index, letter in enumerate(SIDES)
    ]


def _change(quantity: Quantity, refused: str | None) -> Column[Pair]:
    """Return the column of the difference in bytes, or of the reason why there is none."""

    def cell(pair: Pair) -> str | Missing:
        values = [quantity.read(row) for row in pair]
        before, after = values
        if refused or None in values:
            return Missing(refused or why_missing(pair, values, quantity.field))
        return "equal" if before == after else _signed(after - before, before)

    return Column(f"{quantity.name} B - A", cell)


def _signed(change: int, before: int) -> str:
    text = f"{'+' if change > 0 else ''}{size(change)}"
    return f"{text} ({change / before:+.1%})" if before else text


def _table(diff: Diff, columns: Sequence[Column[Pair]], *, text: str) -> Section:
    """Return a line for each run on both sides, and below the reasons of `n/a` cells."""
    naming: list[Column[Pair]] = [Column(RUN, lambda pair: pair.name)]
    if len({pair.name for pair in diff.pairs}) < len(diff.pairs):
        naming.append(Column("processes", lambda pair: str(pair.a["num_processes"])))
    return grid(
        diff.pairs,
        columns,
        label=lambda pair: pair.name,
        naming=naming,
        text=text,
        words=("status A", "status B", "which means", "largest difference"),
        says_all=False,
    )


def side_by_side(
    before: Path, after: Path, *, to: Path | None, console: Console, show_speed: bool = False
) -> None:
    """Print two comparisons side by side, and write the same to files in `to`.

    With `show_speed` two rehearsals have their speeds.

    Raises:
        UsageError: a folder holds no comparison, both are the same, or `to` is not writable.
    """
    diff = match(before, after, show_speed=show_speed)
    show(diff, console=console)
    if to is None:
        return
    made = {
        "side-by-side.md": render_markdown(diff),
        "side-by-side.html": render_page(diff),
    }
    try:
        to.mkdir(parents=True, exist_ok=True)
        for name, text in made.items():
            write_text(to / name, text)
    except OSError as error:
        if is_full_disk(error):
            raise
        raise UsageError(f"{to} takes no files: {error.strerror}.") from None
    for name in made:
        print_line(f"Written: {to / name}", console=console)


def show(diff: Diff, *, console: Console) -> None:
    """Print the verdict and every section."""
    from rich.text import Text

    diff = for_readers(diff)
    for side in diff.sides:
        console.print(Text(named(side)), highlight=False)
    console.print()
    console.print(Text(verdict(diff), style="bold"), highlight=False)
    console.print()
    for section in sections(diff):
        for text in filter(None, (section.title, section.text)):
            console.print(Text(text), highlight=False)
        print_tables(section, console=console)
        if section.notes or not section.rows:
            console.print()


def named(side: Side) -> str:
    """Return a side's letter, its comparison and the folder of that."""
    return one_line(f"{side.letter}: {side.results.get('name', 'comparison')} ({side.folder})")


def render_markdown(diff: Diff) -> str:
    """Return both comparisons as GitHub markdown."""
    diff = for_readers(diff)
    sides = bullets(map(named, diff.sides))
    return document(["# Side by side", sides, escaped(verdict(diff))], _quoted(diff))


def render_page(diff: Diff) -> str:
    """Return both comparisons as one HTML file."""
    diff = for_readers(diff)
    sides = [named(side) for side in diff.sides]
    return page.render_page(
        "Side by side",
        kind="Two comparisons",
        tab=", ".join(sides),
        head={"sides": bullets(sides), "verdict": escaped(verdict(diff))},
        parts=_quoted(diff),
        foot="Made from two results.json alone; `toolkit report` with both folders makes it again.",
    )


def _quoted(diff: Diff) -> list[Section]:
    """Return the sections with their texts as Markdown."""
    return [section._replace(text=escaped(section.text)) for section in sections(diff)]
