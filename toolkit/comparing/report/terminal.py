"""Lines for a terminal or a notebook: words and nothing else, whatever is in them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from toolkit.escaping import one_line
from toolkit.redaction import redact_known

if TYPE_CHECKING:
    from rich.console import Console

CONTROL_CHARACTERS: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def plain(text: str) -> str:
    """Return `text` without what would move the cursor or colour the screen."""
    return CONTROL_CHARACTERS.sub("", text)


def print_line(text: str, *, console: Console) -> None:
    """Print `text` as one line, without secrets."""
    shown = one_line(redact_known(plain(text)))
    console.print(shown, markup=False, highlight=False, soft_wrap=True)
