"""Names of runs as readers see them: with the engine only where both engines ran.

Folders, `results.json`, `results.csv` and `--bisect` keep `strategy-engine`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import cast

from toolkit.records.results import Control, Results, Row


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
