"""CSV: one line per item, for a spreadsheet or a data frame.

Numbers are plain, with their unit in the name of the column; a value that is missing is empty.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%", "＝", "＋", "－", "＠")
"""First characters with which a spreadsheet takes a cell for a formula."""


def render_sheet(lines: Sequence[Mapping[str, Any]], *, empty: Sequence[str]) -> str:
    """Return lines of values as CSV with a header, which is `empty` without a line."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(lines[0]) if lines else empty, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in line.items()} for line in lines)
    return stream.getvalue()


def _cell(value: Any) -> Any:
    """Return a value as a cell, safe from formulas in a spreadsheet and without line breaks."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        text = " ".join(value.split())
        return f"'{text}" if text.startswith(FORMULA) else text
    return value
