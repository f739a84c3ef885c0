"""Run the cells under a stack, judge them against what is known, and compare two stacks."""

from __future__ import annotations

import datetime
import json
import math
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from toolkit import environment, stack
from toolkit.environment import stack_file
from toolkit.errors import UsageError
from toolkit.launching.launch import signals_as_exit
from toolkit.launching.python import python_environment
from toolkit.launching.supervised import supervised
from toolkit.records.json_files import SCHEMA, write_json
from toolkit.tables.terminal import print_line

if TYPE_CHECKING:
    from rich.console import Console

HERE: Final = Path(__file__).parent
RIGHT: Final = "right"
COULD_NOT_RUN: Final = 3
OF_A_LAUNCH: Final = ("ACCELERATE_", "FSDP_")
"""How variables begin with which a launch of ours would set up the cells."""

OTHER_NORM: Final = 1e-3
"""From this relative difference on, two stacks compute other gradients in fp32; in bf16 from
ten times of it."""

UNKNOWN: Final = (
    "unknown: no thread is known. Train under another strategy or release until it is, and report "
    "it with --json"
)

Cell = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Found:
    """What the cells of one stack gave."""

    versions: dict[str, str] = field(default_factory=dict[str, str])
    transport: str = ""
    defaults: dict[str, str] = field(default_factory=dict[str, str])
    cells: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """By name: `answer` is right, wrong, raised or not run, with `words` or what was measured."""

    @property
    def red(self) -> dict[str, dict[str, Any]]:
        return {n: c for n, c in self.cells.items() if c["answer"] in ("wrong", "raised")}

    @property
    def words(self) -> str:
        right = sum(cell["answer"] == RIGHT for cell in self.cells.values())
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        names = ", ".join(f"{n} {v}" for n, v in self.versions.items() if n != "python")
        count = f"{right} of {len(self.cells)} cells right over {self.transport}"
        red = f"; red: {', '.join(self.red)}" if self.red else ""
        return f"toolkit verify: {count}, {date} ({names}){red}"


@cache
def table() -> dict[str, Any]:
    """Return cells.toml."""
    return tomllib.loads((HERE / "cells.toml").read_text(encoding="utf-8"))


@cache
def all_cells() -> dict[str, Cell]:
    """Return the cells by name, in their order, each with the DeepSpeed config that it needs."""
    return {
        cell["name"]: cell | ({"deepspeed": _deepspeed_config(cell)} if "stage" in cell else {})
        for cell in table()["cell"]
    }


def _deepspeed_config(cell: Cell) -> dict[str, Any]:
    shared = table()["deepspeed"]
    zero = shared["zero_optimization"] | {"stage": cell["stage"], **cell.get("zero", {})}
    return {
        **shared,
        "gradient_accumulation_steps": cell.get("accumulation", 1),
        "gradient_clipping": cell.get("clip", 0.0),
        "bf16": {"enabled": cell.get("precision") == "bf16"},
        "zero_optimization": zero,
        **cell.get("config", {}),
    }


def verify(
    *, python: str | None, only: str, against: str | None, as_json: bool, console: Console
) -> int:
    """Run the cells, say which are red and why, or what another stack does otherwise.

    Returns:
        0 where all are right, 1 where a cell is red or broken, 3 where they could not be run.

    Raises:
        UsageError: a cell or a Python that is not there.
    """
    cells = chosen(only)
    stacks = [python] if against is None else [python, against]
    found = [run_cells(cells, one) for one in stacks]
    if not all(RIGHT in {c["answer"] for c in one.cells.values()} or one.red for one in found):
        return COULD_NOT_RUN
    if against is not None:
        document, said = compared(*found)
        is_bad = document["answer"] == "broken"
    else:
        document, said = to_json(found[0]), lines(found[0])
        is_bad = bool(found[0].red)
        if python is None and len(cells) == len(all_cells()):
            stack_file().parent.mkdir(parents=True, exist_ok=True)
            write_json(stack_file(), document)
    if as_json:
        console.print_json(data=document)
    else:
        for line in said:
            print_line(line, console=console)
    return int(is_bad)


def chosen(only: str) -> list[Cell]:
    """Return the cells whose names begin with one of the words, by commas; all without any.

    Raises:
        UsageError: no cell does.
    """
    words = tuple(only.split(","))
    for word in words:
        if not any(name.startswith(word) for name in all_cells()):
            raise UsageError(f"--only {word}: no cell is named so. Take {', '.join(all_cells())}.")
    return [cell for name, cell in all_cells().items() if name.startswith(words)]


def run_cells(cells: Sequence[Cell], python: str | None = None) -> Found:
    """Return what cells give under the stack of a Python, this one's if none is named.

    Raises:
        UsageError: there is no such Python.
    """
    program = shutil.which(python or sys.executable)
    if program is None:
        raise UsageError(f"{python} is no Python that can be started. Name its path.")
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if sys.platform == "linux" and not environment.gpus():
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    kept = {n: v for n, v in python_environment().items() if not n.startswith(OF_A_LAUNCH)}
    with tempfile.TemporaryDirectory(prefix="toolkit-verify-") as folder, signals_as_exit():
        request, results = Path(folder, "cells.json"), Path(folder, "results.json")
        request.write_text(json.dumps(table() | {"cells": cells}), encoding="utf-8")
        # The supervisor finds our packages by PYTHONPATH; with -E the program finds its own alone.
        command = [program, "-E", str(HERE / "stand_alone.py"), str(request), str(results)]
        with subprocess.Popen(
            supervised(command, redacting=True),
            env=kept | variables,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        ) as process:
            try:
                log, _ = process.communicate()
            finally:
                process.terminate()  # so that it ends the ranks; `run` would kill it
        if results.exists():
            return Found(**json.loads(results.read_text(encoding="utf-8")))
    last = log.decode(errors="replace").strip().rpartition("\n")[2]
    sys.stderr.write(f"toolkit: {program} could not run the cells: {last}\n")
    return Found()


def faults_of(cell: Cell, answer: str, versions: Mapping[str, str]) -> list[stack.Fault]:
    """Return the known faults of releases that a red cell may show, the most special first."""
    known = stack.faults_of(versions, loud=answer == "raised")
    met = [
        fault
        for fault in known
        if cell["name"] in fault.get("cells", [cell["name"]])
        and ("cells" in fault or stack.is_met(fault, settings_of(cell)))
    ]
    return sorted(met, key=lambda fault: -len(fault["where"]))


def settings_of(cell: Cell) -> dict[str, Any]:
    """Return what a cell trains, in the words of `where` of the known faults."""
    return {
        "backend": next((name for name in ("fsdp", "tensor") if name in cell), "ddp"),
        "accumulates": "accumulation" in cell,
        **(stack.settings_of_deepspeed(cell["deepspeed"]) if "stage" in cell else {}),
        "engine": cell["through"],
        "adapters": "lora" in cell,
        "reuses": "reused" in cell,
        "resumes": "resumes" in cell,
    }


def to_json(found: Found) -> dict[str, Any]:
    """Return what was found, with the known faults of red cells."""
    document: dict[str, Any] = {"schema": SCHEMA, "words": found.words, "cells": {}}
    document |= {"versions": found.versions, "transport": found.transport}
    for name, cell in found.cells.items():
        faults = faults_of(all_cells()[name], cell["answer"], found.versions)
        known = [f"{f['text']} ({f['link']}). {stack.advice([f])}" for f in faults]
        said = {"known": known} if name in found.red else {}
        document["cells"][name] = {"text": all_cells()[name]["text"], **cell, **said}
    return document


def lines(found: Found) -> list[str]:
    """Return a line for each cell that is not right, its cause below it, and the sum."""
    shown: list[str] = []
    for name, cell in to_json(found)["cells"].items():
        if cell["answer"] != RIGHT:
            shown.append(f"{cell['answer']}: {name} ({cell['text']}): {cell['words']}")
        if "known" in cell:
            shown += [f"    known: {line}" for line in cell["known"]] or [f"    {UNKNOWN}"]
    return [*shown, found.words]


def compared(here: Found, other: Found) -> tuple[dict[str, Any], list[str]]:
    """Return whether a second stack is `the same`, `changed` or `broken`, as JSON and in lines."""
    said = next(filter(None, (_difference(name, here, other) for name in here.cells)), None)
    moved = _moved(here.defaults, other.defaults)
    answer = "broken" if said else "changed" if moved else "the same"
    words = [said] if said else moved
    document = {"schema": SCHEMA, "answer": answer, "words": words}
    releases = ", ".join(_moved(here.versions, other.versions))
    shown = [": ".join(filter(None, (answer, releases))), *words]
    return document | {"here": here.versions, "other": other.versions}, shown


def _difference(name: str, here: Found, other: Found) -> str | None:
    cell, theirs = here.cells[name], other.cells[name]
    title = f"{name} ({all_cells()[name]['text']})"
    if cell["answer"] != theirs["answer"]:
        both = {"here": cell, "there": theirs}
        said = [f"{one['answer']} {where} {one.get('words', '')}" for where, one in both.items()]
        return f"{title}: {'; '.join(map(str.strip, said))}"
    limit = OTHER_NORM * (10 if "precision" in all_cells()[name] else 1)
    norms = [one.get("norm", 0.0) for one in (theirs, cell)]
    if math.isclose(*norms, rel_tol=limit):
        return None
    return f"{title}: the gradients have norm {norms[0]:.6g} there, {norms[1]:.6g} here"


def _moved(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return what both have and has another value; what one has alone is no default that moved."""
    shared = sorted(before.keys() & after.keys())
    return [f"{n} {before[n]} -> {after[n]}" for n in shared if before[n] != after[n]]
