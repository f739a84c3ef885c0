"""Names of runs as readers see them: with the engine only where both engines ran.

Folders, `results.json`, `results.csv` and `--bisect` keep `strategy-engine`.

Reports are shown to others, so what must not leave the machine is removed: home folders become `~`;
tokens and the values of environment variables go, and so do characters that a terminal or a browser
would interpret instead of show.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, cast

from toolkit.escaping import UNSEEN
from toolkit.records.results import Control, Results, Row
from toolkit.redaction import REMOVED, VALUE, each_text, redact, redacted


def both_engines(engines: Iterable[str]) -> bool:
    return len(set(engines)) > 1


def without_engine(name: str, *, strategy: str, engine: str) -> str:
    """Return `zero2-trainer-x4` as `zero2-x4`; a name that is already short stays."""
    usual = f"{strategy}-{engine}"
    return strategy + name.removeprefix(usual) if name.startswith(usual) else name


def for_readers(results: Results) -> Results:
    """Return a copy with the names that readers see; a second call changes nothing more."""
    if both_engines(row["engine"] for row in results["runs"]):
        return results
    names = {row["name"]: _short(row) for row in results["runs"]}
    changed = {**results, "runs": [renamed(row) for row in results["runs"]]}
    control = results["control"]
    if control is not None:
        strategy, engine = control["strategy"], control["engine"]
        reason = control["reason"] and _in_text(control["reason"], names)
        changed["control"] = Control(
            strategy=strategy,
            engine=engine,
            reason=reason,
            name=without_engine(control["name"], strategy=strategy, engine=engine),
        )
    return cast("Results", changed)


def renamed(row: Row) -> Row:
    """Return a run with the name that readers see where only one engine ran."""
    name = _short(row)
    broken = [{**gate, "name": name} for gate in row["broken"]]
    return cast("Row", {**row, "name": name, "broken": broken})


def _short(row: Row) -> str:
    return without_engine(row["name"], strategy=row["strategy"], engine=row["engine"])


def _in_text(text: str, names: Mapping[str, str]) -> str:
    """Return a text with names of runs shortened; names of folders stay."""
    for name, short in names.items():
        text = re.sub(rf"(?<![\w/.-]){re.escape(name)}(?![\w/.-])", lambda _, s=short: s, text)
    return text


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
