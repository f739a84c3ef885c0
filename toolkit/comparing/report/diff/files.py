"""`toolkit report A B`: two comparisons side by side, in a terminal and as three files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from toolkit.comparing.report.diff.match import (
    Diff,
    Pair,
    Side,
    Table,
    for_readers,
    loss_difference,
    match,
    speed_ratio,
    speed_verdict,
)
from toolkit.comparing.report.diff.tables import sections, verdict
from toolkit.comparing.report.row_facts import status_of
from toolkit.errors import UsageError, is_full_disk
from toolkit.escaping import one_line
from toolkit.files import write_text
from toolkit.records.results import Row
from toolkit.tables import page
from toolkit.tables.grid import Section
from toolkit.tables.markdown import bullets, document, escaped
from toolkit.tables.sheet import render_sheet
from toolkit.tables.terminal import print_line, print_tables

if TYPE_CHECKING:
    from rich.console import Console


def side_by_side(before: Path, after: Path, *, to: Path | None, console: Console) -> None:
    """Print two comparisons side by side, and write the same to files in `to`.

    Raises:
        UsageError: a folder holds no comparison, both are the same, or `to` is not writable.
    """
    diff = match(before, after)
    show(diff, console=console)
    if to is None:
        return
    made = {
        "side-by-side.md": render_markdown(diff),
        "side-by-side.html": render_page(diff),
        "side-by-side.csv": render_csv(diff),
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


def render_csv(diff: Diff) -> str:
    """Return CSV with a header and one line per run, including runs of one side only."""
    lines = [_line(diff, pair.a, pair.b) for pair in diff.pairs]
    lines += [_line(diff, row, None) for row in diff.only[0]]
    lines += [_line(diff, None, row) for row in diff.only[1]]
    return render_sheet(lines, empty=["run"])


def _line(diff: Diff, a: Row | None, b: Row | None) -> dict[str, Any]:
    row = a or b
    assert row is not None
    line: dict[str, Any] = {
        "run": row["name"],
        "strategy": row["strategy"],
        "engine": row["engine"],
        "num_processes": row["num_processes"],
    }
    sides = (("a", a), ("b", b))
    line |= {f"status_{letter}": side and status_of(side) for letter, side in sides}
    line |= {f"rehearsal_{letter}": side and side["rehearsal"] for letter, side in sides}
    for table in get_args(Table):
        for quantity in diff.quantities(table):
            for letter, side in sides:
                line[f"{quantity.csv}_{letter}"] = side and quantity.read(side)
    ratio, speed_reason, difference, loss_reason = None, None, None, None
    if a is not None and b is not None:
        ratio, speed_reason = speed_ratio(diff, Pair(a, b))
        difference, loss_reason = loss_difference(diff, Pair(a, b))
    return line | {
        "speed_b_times_a": ratio,
        "speed_noise_share": diff.noise,
        "speed_verdict": None if ratio is None else speed_verdict(diff, ratio),
        "speed_not_compared": speed_reason,
        "loss_difference_max": None if difference is None else difference.value,
        "loss_difference_step": None if difference is None else difference.step,
        "losses_not_compared": loss_reason,
    }
