"""Presentable: a comparison without what must not leave the machine that made it.

Reports are shown to others. Home folders become `~`, tokens and the values of environment variables
go, and so does what a terminal or a browser would obey instead of show.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, cast

from toolkit.results import Results

REMOVED: Final = "[removed]"

SECRET: Final = (
    r"(?:(?<!(?:pad|eos|bos|unk|sep|cls)[_-])(?<!mask[_-])token|secret|passw(?:or)?d|credentials?"
    r"|(?:api|access|private)[_ -]?key)"
)
"""The end of a name whose value is secret; a tokenizer's special tokens are not."""

SETTINGS: Final = r"(?:CUDA|PYTORCH|TORCH|NCCL|GLOO|OMP|MKL)_"
"""Variables that libraries name in their own advice (`try PYTORCH_CUDA_ALLOC_CONF=...`), and the
one that the toolkit puts before a command."""

TERMINAL: Final = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b.?")

UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff"
    "\ud800-\udfff\ufffe\uffff]"
)
"""Control characters but tab and line feed, those that turn the direction of a text, and halves of
a pair, which no file can hold."""

HOMES: Final = re.compile(
    r"(?<![\w.~-])(?:(?:(?<!:/)/[\w.-]+|/mnt/[a-z])?/(?:home|Users)/[^/\s'\":;,]+|/root(?![\w.-])"
    r"|[A-Za-z]:\\{1,2}Users\\{1,2}"
    r"(?:[^\\\s'\":;,]+(?: [^\\\s'\":;,]+){1,3}(?=\\)|[^\\\s'\":;,]+))"
)
"""Also below one folder (`/data/home/x`, `/c/Users/x`), but not below the host of a URL; a name on
Windows has spaces where a backslash tells its end."""

VALUE: Final = r"(?:\[removed\]|\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',;)}\]]+)"

# Each pattern begins where a run of its letters does: from every letter of a line it would take
# the square of the line's length.
REMOVALS: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (re.compile(r"(?i)((?:bearer|basic)\s+)[\w.~+/=-]{8,}"), rf"\1{REMOVED}"),
    (re.compile(r"(://)[^/\s@'\"]+@"), rf"\1{REMOVED}@"),
    (re.compile(rf"(?i)((?<![\w-])--[\w-]*{SECRET}(?:=|\s+)){VALUE}"), rf"\1{REMOVED}"),
    (
        re.compile(rf"(?i)((?<![\w-])[\w-]*{SECRET}\b['\"\])]*\s*[=:]=?\s*){VALUE}"),
        rf"\1{REMOVED}",
    ),
    (re.compile(r"(?i)(\bapi[_ -]?key\s+)(?=[a-z_-]*\d)[\w-]{16,}"), rf"\1{REMOVED}"),
    (re.compile(rf"(\b(?!{SETTINGS})[A-Z][A-Z0-9]*_[A-Z0-9_]*=){VALUE}"), rf"\1{REMOVED}"),
    (
        re.compile(
            r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[a-z]_\w{16,}"
            r"|github_pat_\w{16,}|glpat-[\w-]{16,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}"
            r"|xox[a-z]-[\w-]{10,})|(?<![\w-])eyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]{5,}"
        ),
        REMOVED,
    ),
)


def presentable(results: Results) -> Results:
    """Return a copy that can be shown to others."""
    return cast(Results, _cleaned(results))


def clean(text: str) -> str:
    """Return `text` without homes, tokens, values of variables and unseen characters."""
    text = UNSEEN.sub("", TERMINAL.sub("", text))
    home = str(Path.home())
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    text = HOMES.sub("~", text)
    for pattern, instead in REMOVALS:
        text = pattern.sub(instead, text)
    return text


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {
            clean(key): REMOVED if _is_secret(key, item) else _cleaned(item)
            for key, item in cast("dict[str, Any]", value).items()
        }
    if isinstance(value, list):
        return [_cleaned(item) for item in cast("list[Any]", value)]
    return value


def _is_secret(name: str, value: Any) -> bool:
    return isinstance(value, str) and re.search(rf"(?i){SECRET}$", name) is not None
