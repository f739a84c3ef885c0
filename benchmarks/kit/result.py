"""The result of the kit: rows in one JSON file, rewritten whole after every cell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kit.cells import PARTS, Row, part
from toolkit.escaping import one_line
from toolkit.records.json_files import write_json

SCHEMA: Final = 1


@dataclass(kw_only=True)
class Result:
    """Everything that a run of the kit has written so far."""

    file: Path
    about: dict[str, Any]
    """Date, command, device, environment; whether it is a smoke run. A `note`, written by hand."""

    rows: list[Row] = field(default_factory=list[Row])

    @classmethod
    def read(cls, file: Path) -> Result:
        written = json.loads(file.read_text(encoding="utf-8"))
        if written["schema"] != SCHEMA:
            raise ValueError(f"{file} has schema {written['schema']}, and this kit reads {SCHEMA}")
        return cls(file=file, about=written["about"], rows=written["rows"])

    def add(self, row: Row) -> None:
        """Append a row and write the file."""
        self.rows.append(row)
        self.write()

    def drop(self, name: str, cells: Sequence[str]) -> None:
        """Remove the rows of cells that are about to be run again."""
        self.rows = [
            row
            for row in self.rows
            if (row["part"], row["cell"]) not in {(name, cell) for cell in cells}
        ]
        self.write()

    def write(self) -> None:
        write_json(self.file, {"schema": SCHEMA, "about": self.about, "rows": self.rows})

    def of(self, name: str) -> list[Row]:
        return [row for row in self.rows if row["part"] == name]

    def finished(self, name: str) -> set[str]:
        """Return the cells of a part that need not be run again: all but those that failed."""
        return {row["cell"] for row in self.of(name) if row["status"] != "failed"}

    def markdown(self) -> str:
        """Return the result as a page, with a section for each part."""
        about = self.about
        lines = [
            f"# GPU kit, {about['date']}",
            "",
            f"    {about['command']}",
            "",
            *([SMOKE, ""] if about["smoke"] else []),
            f"{about['device']}; {about['versions']}; toolkit {about['toolkit']}.",
            *(["", about["note"]] if "note" in about else []),
        ]
        for name in PARTS:
            rows = self.of(name)
            if rows:
                title = part(name).TITLE
                lines += ["", f"## {title}", "", *_tables(name, rows), *_unmeasured(rows)]
        return "\n".join(lines) + "\n"


SMOKE: Final = (
    "**A smoke run on a CPU with tiny shapes: it shows that every part runs. None of its numbers "
    "says anything of a GPU.**"
)


def _tables(name: str, rows: Sequence[Row]) -> list[str]:
    try:
        return part(name).tables(rows)
    except Exception as error:  # the rows are there all the same, and the other parts
        return [f"The tables of this part could not be made: {type(error).__name__}: {error}."]


def _unmeasured(rows: Sequence[Row]) -> list[str]:
    """Return a table of the cells without a measurement, and why they have none."""
    without = [row for row in rows if row["status"] != "ok"]
    if not without:
        return []
    return [
        "",
        *table(
            ("cell", "status", "reason"),
            [(row["cell"], row["status"], one_line(row["reason"] or "")) for row in without],
        ),
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return a table of Markdown, line by line."""

    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    return [line(header), "|" + "---|" * len(header), *map(line, rows)]


def both_ends(text: str, kept: int) -> str:
    """Return a text whole, or its first and its last characters with how many are left out."""
    if len(text) <= 2 * kept:
        return text
    return f"{text[:kept]}\n[{len(text) - 2 * kept} characters]\n{text[-kept:]}"
