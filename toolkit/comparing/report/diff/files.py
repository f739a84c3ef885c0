"""`toolkit report A B`: two comparisons side by side, in a terminal and as three files.

The page is as safe as `report.html`: all inserted text is escaped, and the page forbids scripts and
network access.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

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
from toolkit.comparing.report.markdown import bullets, escaped, section_text
from toolkit.comparing.report.page import LONG, STYLE, WORDY
from toolkit.comparing.report.row_facts import status_of
from toolkit.comparing.report.table_file import csv_cell
from toolkit.comparing.report.terminal import print_line
from toolkit.errors import UsageError, is_full_disk
from toolkit.escaping import one_line
from toolkit.files import write_text
from toolkit.records.results import Row

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

TEMPLATE: Final = Path(__file__).with_name("diff.html.jinja")


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
    """Print the verdict and every table."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    diff = for_readers(diff)
    shown: list[RenderableType] = [Text(named(side)) for side in diff.sides]
    shown += [Text(""), Text(verdict(diff), style="bold")]
    for title, section in sections(diff).items():
        shown.append(Text(f"\n{title}"))
        if section.text:
            shown.append(Text(section.text))
        if section.rows:
            table = Table(box=SIMPLE_HEAD, pad_edge=False)
            for number, column in enumerate(section.header):
                table.add_column(column, no_wrap=number == 0, overflow="fold")
            for row in section.rows:
                table.add_row(*map(Text, row))
            shown.append(table)
        shown += map(Text, section.notes)
    for part in shown:
        console.print(part, highlight=False)


def named(side: Side) -> str:
    """Return a side's letter, its comparison and the folder of that."""
    return one_line(f"{side.letter}: {side.results.get('name', 'comparison')} ({side.folder})")


def render_markdown(diff: Diff) -> str:
    """Return both comparisons as GitHub markdown."""
    diff = for_readers(diff)
    sides = bullets([escaped(named(side)) for side in diff.sides])
    blocks = ["# Side by side", sides, escaped(verdict(diff))]
    for title, section in sections(diff).items():
        # `section_text` escapes all but the text, which quotes recorded values here.
        quoted = section._replace(text=escaped(section.text))
        blocks += [f"## {title}", section_text(quoted)]
    return "\n\n".join(filter(None, blocks)) + "\n"


def render_page(diff: Diff) -> str:
    """Return both comparisons as one HTML file."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    diff = for_readers(diff)
    page = template.render(
        css=Markup(STYLE.read_text(encoding="utf-8").strip()),
        sides=[named(side) for side in diff.sides],
        verdict=verdict(diff),
        sections=sections(diff),
        long=LONG,
        wordy=WORDY,
    )
    return page + "\n"


def render_csv(diff: Diff) -> str:
    """Return CSV with a header and one line per run, including runs of one side only."""
    lines = [_line(diff, pair.a, pair.b) for pair in diff.pairs]
    lines += [_line(diff, row, None) for row in diff.only[0]]
    lines += [_line(diff, None, row) for row in diff.only[1]]
    stream = io.StringIO()
    columns = list(lines[0]) if lines else ["run"]
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in line.items()} for line in lines)
    return stream.getvalue()


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
