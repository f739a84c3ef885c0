"""A finding of `toolkit check`: what stands somewhere, what it really does, and what to write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Severity = Literal["error", "warning", "note"]
"""`error`: the run breaks, or trains something else than what stands there. `warning`: a setting
has no effect, or a library chooses it silently. `note`: right today, and likely to be misread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of a file's text that mends a finding; offsets are characters from 0."""

    start: int
    end: int
    text: str
    """What stands there instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding at one place."""

    rule: str
    """Name of the rule: lower case, words joined by hyphens, the same in every release."""

    severity: Severity
    file: Path
    line: int
    """From 1."""

    column: int
    """From 1, in characters."""

    text: str
    """What stands there, and what will really happen."""

    fix: str
    """What to write or do."""

    edits: tuple[Edit, ...] = ()
    """Changes of `file` that `--fix` makes; empty where a person has to decide."""
