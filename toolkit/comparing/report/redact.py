"""Redaction: remove the parts of a comparison that must not leave its machine.

Reports are shown to others. Home folders become `~`. Tokens and the values of environment variables
are removed, and so are characters that a terminal or a browser would interpret instead of show.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Final, cast

from toolkit.escaping import UNSEEN
from toolkit.records.results import Results
from toolkit.redaction import REMOVED, VALUE, each_text, redact, redacted

SETTINGS: Final = r"(?:CUDA|PYTORCH|TORCH|NCCL|GLOO|OMP|MKL)_"
"""Variables that libraries name in their advice (`try PYTORCH_CUDA_ALLOC_CONF=...`), and the one
that the toolkit puts before a command."""

TERMINAL: Final = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b.?")

UNSEEN_CHARACTERS: Final = re.compile(f"[{UNSEEN}]")

HOMES: Final = re.compile(
    r"(?<![\w.~-])(?:(?:(?<!:/)/[\w.-]+|/mnt/[a-z])?/(?:home|Users)/[^/\s'\":;,]+|/root(?![\w.-])"
    r"|[A-Za-z]:\\{1,2}Users\\{1,2}"
    r"(?:[^\\\s'\":;,]+(?: [^\\\s'\":;,]+){1,3}(?=\\)|[^\\\s'\":;,]+))"
)
"""Home folders, also below one folder (`/data/home/x`, `/c/Users/x`), but not below the host of a
URL. A name on Windows may have spaces if a backslash marks its end."""

VARIABLES: Final = re.compile(rf"(\b(?!{SETTINGS})[A-Z][A-Z0-9]*_[A-Z0-9_]*=){VALUE}")


def redact_results(results: Results) -> Results:
    """Return a copy that can be shown to others."""
    return cast(Results, redacted(each_text(results, functools.cache(_portable))))


def clean(text: str) -> str:
    """Return `text` without home folders, secrets, values of variables and invisible characters."""
    return redact(_portable(text))


def _portable(text: str) -> str:
    text = UNSEEN_CHARACTERS.sub("", TERMINAL.sub("", text))
    home = str(Path.home())
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    text = HOMES.sub("~", text)
    return VARIABLES.sub(rf"\1{REMOVED}", text)
