"""A finding of `toolkit check`: what stands somewhere, what it really does, and what to write."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from toolkit.configs.check.sources import version_of

Severity = Literal["error", "warning", "note"]
"""`error`: the run breaks, or trains something else than what stands there. `warning`: a setting
has no effect, or a library chooses it silently. `note`: right today, and likely to be misread."""

LIBRARIES: Final = ("accelerate", "deepspeed", "transformers")
"""Libraries whose releases the texts of rules may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where something stands: offsets from 0, line and column from 1."""

    start: int = 0
    end: int = 0
    line: int = 1
    column: int = 1


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


@cache
def table() -> dict[str, Any]:
    """Return rules.toml: rules with their cases, and `facts` that they go by."""
    return tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))


@cache
def named(kind: str) -> frozenset[str]:
    """Return the full names that the rules on scripts know of a kind."""
    return frozenset(table()["facts"]["names"][kind])


def finding_of(
    case: str,
    file: Path,
    place: Place,
    edits: tuple[Edit, ...] = (),
    /,  # a text may have words of these names
    *,
    severity: Severity | None = None,
    **values: object,
) -> Finding:
    """Return the finding of a case of rules.toml at a place of a file.

    Args:
        case: Its rule and its name there, with a dot between.
        file: The file.
        place: Of what the finding is on.
        edits: What mends it.
        severity: In place of the case's own.
        values: For the words in braces.
    """
    rule, _, name = case.partition(".")
    words = table()[rule][name]
    releases = {library: version_of(library) for library in LIBRARIES}
    return Finding(
        rule=rule,
        severity=severity or words["severity"],
        file=file,
        line=place.line,
        column=place.column,
        text=words["text"].format_map(releases | values),
        fix=words["fix"].format_map(releases | values),
        edits=edits,
    )
