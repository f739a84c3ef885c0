"""The table of known causes, `causes.toml`."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from toolkit.configs.check.signatures import gone
from toolkit.launching.status import ECHO_TEXTS

TABLE: Final = Path(__file__).with_name("causes.toml")

MOVED: Final = 0x10000
"""Added to the code of a character that an expression has escaped; no pattern has one above."""

Kind = Literal["outside", "error", "line", "waiting", "echo", "slow", "doubtful"]
"""Where the patterns are looked for, and whether the failure may only follow from another one.

`outside`: in any line, from the machine or the scheduler; the errors of ranks follow from it.
`error`: in the exceptions that end a rank. `line`: in any line, for messages that no exception has.
`waiting`: in exceptions and lines of ranks that waited in vain for another one. `echo`: in
exceptions of ranks that lost another one. `slow`: in any line of a run that goes on. `doubtful`: in
any line of a run that ended without an error, and may not have learned what was asked.
"""

OF_GOOD_RUNS: Final[tuple[Kind, ...]] = ("slow", "doubtful")

OF_RELEASES: Final = ("moved-name", "other-release")
"""Causes whose names are looked up in what releases took away."""

OF_LINES: Final[tuple[Kind, ...]] = ("outside", "line", "waiting", *OF_GOOD_RUNS)
"""Kinds whose patterns count without an exception around them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause of failures, with the messages by which it is known."""

    name: str
    text: str
    """A sentence; `{name}` stands for a group of the pattern that matched."""

    fix: str
    patterns: tuple[re.Pattern[str], ...]
    kind: Kind = "error"
    frames: re.Pattern[str] | None = None
    """Function that must be in the traceback, for a message that says too little."""

    source: str | None = None
    """Package, file and line of a message that was not reproduced, but read there; the address of a
    line or a thread on the web for programs that are no package here."""

    quote: str | None = None
    """Text of that line."""

    def match(self, text: str) -> re.Match[str] | None:
        """Return the first match of a pattern."""
        return next((match for item in self.patterns if (match := item.search(text))), None)

    def sentence(self, match: re.Match[str]) -> str:
        """Return the text, with the groups of the match in it."""
        return self.text.format_map(_Groups({"who": "A process"} | match.groupdict()))

    def remedy(self, match: re.Match[str]) -> str:
        """Return the fix; of a name that a release took away, what took its place before it."""
        groups = match.groupdict()
        owner, name = groups.get("what") or groups.get("module"), groups.get("name")
        known = gone(owner, name) if self.name in OF_RELEASES and owner and name else None
        if known is None or not known.new:
            return self.fix
        return f"`{name}` is gone by {known.since}, now: {known.new}. {self.fix}"


class _Groups(dict[str, str | None]):
    """The groups of a match, in one line each; another pattern of the cause may lack some."""

    def __getitem__(self, name: str) -> str:
        return " ".join((self.get(name) or "not named").split()).rstrip(".")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One part of a run, known by the functions in a traceback."""

    frames: re.Pattern[str]
    text: str
    fix: str


@cache
def causes() -> tuple[Cause, ...]:
    """Return the causes, in the order in which they are tried."""
    return tuple(Cause(**_compiled(entry)) for entry in _content()["cause"])


@cache
def phases() -> tuple[Phase, ...]:
    """Return the parts of a run in which memory runs out, in the order in which they are tried."""
    return tuple(Phase(**_compiled(entry)) for entry in _content()["phase"])


def line_counts(text: str) -> bool:
    """Whether a line counts without an exception around it."""
    words, pattern = _line_patterns()
    # Words first: they are found faster than an expression, and most lines have none of them.
    return any(word in text for word in words) and pattern.search(text) is not None


@cache
def _line_patterns() -> tuple[tuple[str, ...], re.Pattern[str]]:
    """Return a word that each pattern of a line needs, and all of them as one."""
    patterns = [
        item.pattern for cause in causes() if cause.kind in OF_LINES for item in cause.patterns
    ]
    # Without names: an expression takes the name of a group once, and several patterns have it.
    combined = "|".join(re.sub(r"\?P<\w+>", "?:", pattern) for pattern in patterns)
    return tuple({literal_of(pattern) for pattern in patterns}), re.compile(combined)


def literal_of(pattern: str) -> str:
    """Return the longest text that every match of a pattern contains; empty where none is sure.

    Only what stands outside of groups counts, without alternatives and repeated characters.
    """
    # An escaped character is kept under another code until all that is special is gone.
    text = re.sub(r"\\([^A-Za-z0-9])", lambda escaped: chr(ord(escaped[1]) + MOVED), pattern)
    text = re.sub(r"\\.|\[\^?\]?[^]]*\]", ".", text)
    while (without := re.sub(r"\([^()]*\)", ".", text)) != text:
        text = without
    runs = [] if "|" in text else re.split(r".(?:[?*+]|\{[^}]*\})\??|[.^$]", text)
    longest = max(runs, key=len, default="")
    return "".join(chr(ord(char) % MOVED) for char in longest)


def cause_named(name: str) -> Cause:
    """Return the cause of a name."""
    return next(cause for cause in causes() if cause.name == name)


def find_cause(text: str, *, frames: str = "") -> tuple[Cause, re.Match[str]] | None:
    """Return the first cause that an error's text and frames name, and its match."""
    for cause in causes():
        if cause.kind in OF_GOOD_RUNS or (cause.frames and not cause.frames.search(frames)):
            continue
        if match := cause.match(text):
            return cause, match
    return None


def is_echo(text: str) -> bool:
    """Whether an error only means that another rank is gone."""
    lowered = text.lower()
    return any(echo in lowered for echo in ECHO_TEXTS)


@cache
def _content() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def _compiled(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of the table with its regular expressions compiled."""
    changed = dict(entry)
    if "patterns" in entry:
        changed["patterns"] = tuple(re.compile(item, re.MULTILINE) for item in entry["patterns"])
    if "frames" in entry:
        changed["frames"] = re.compile(entry["frames"], re.MULTILINE)
    return changed
