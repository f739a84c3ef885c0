"""Run the cells under a stack, judge them against what is known, and compare two stacks."""

from __future__ import annotations

import datetime
import json
import math
import os
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
from toolkit.launching.supervised import supervised
from toolkit.records.json_files import SCHEMA, write_json
from toolkit.tables.terminal import print_line

if TYPE_CHECKING:
    from rich.console import Console

HERE: Final = Path(__file__).parent
PROGRAM: Final = HERE / "stand_alone.py"
RIGHT: Final = "right"
COULD_NOT_RUN: Final = 3

OTHER_NORM: Final = 1e-3
"""From this relative difference on, two stacks compute other gradients in fp32; in bf16 from
ten times of it."""

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
        over = f" over {self.transport}" if self.transport else ""
        red = f"; red: {', '.join(self.red)}" if self.red else ""
        return (
            f"toolkit verify: {right} of {len(self.cells)} cells right{over}, {date} ({names}){red}"
        )


@cache
def all_cells() -> list[Cell]:
    """Return the cells in their order."""
    return tomllib.loads((HERE / "cells.toml").read_text(encoding="utf-8"))["cell"]


def verify(
    *, python: str | None, only: Sequence[str], against: str | None, as_json: bool, console: Console
) -> int:
    """Run the cells, say which are red and why, and return the exit code.

    0 where all are right, 1 where a cell is red, 3 where they could not be run.

    Raises:
        UsageError: a cell or a Python that is not there.
    """
    cells = chosen(only)
    if against is not None:
        return _compare(python, against, cells, as_json=as_json, console=console)
    found = run_cells(cells, python)
    if not found.cells:
        return COULD_NOT_RUN
    document = to_json(found)
    if python is None and len(cells) == len(all_cells()):
        stack_file().parent.mkdir(parents=True, exist_ok=True)
        write_json(stack_file(), document)
    if as_json:
        console.print_json(data=document)
    else:
        for line in lines(found):
            print_line(line, console=console)
    if any(cell["answer"] == RIGHT for cell in found.cells.values()):
        return 1 if found.red else 0
    return 1 if found.red else COULD_NOT_RUN


def chosen(only: Sequence[str]) -> list[Cell]:
    """Return the cells whose names begin with one of the words, all without any.

    Raises:
        UsageError: no cell does.
    """
    for word in only:
        if not any(cell["name"].startswith(word) for cell in all_cells()):
            names = ", ".join(cell["name"] for cell in all_cells())
            raise UsageError(f"--only {word}: no cell is named so. They are {names}.")
    return [cell for cell in all_cells() if not only or cell["name"].startswith(tuple(only))]


def run_cells(cells: Sequence[Cell], python: str | None = None) -> Found:
    """Return what cells give under the stack of a Python, this one's if none is named.

    Raises:
        UsageError: there is no such Python.
    """
    program = shutil.which(python or sys.executable)
    if program is None:
        raise UsageError(f"{python} is no Python that can be started. Name its path.")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "FSDP_", "PYTHONPATH", "PYTHONHOME"))
    }
    with tempfile.TemporaryDirectory(prefix="toolkit-verify-") as folder, signals_as_exit():
        names, results, log = (Path(folder, n) for n in ("cells.json", "results.jsonl", "log"))
        names.write_text(json.dumps(cells), encoding="utf-8")
        # The supervisor is ours; the program must not find our packages.
        set_to = [f"{name}={value}" for name, value in _variables(program, python).items()]
        command = ["env", "-u", "PYTHONPATH", *set_to, program, str(PROGRAM), str(names)]
        own = kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with log.open("wb") as output:
            done = subprocess.run(
                supervised([*command, str(results)]),
                env=own,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
            )
        found = Found()
        for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else ():
            entry = json.loads(line)
            if name := entry.pop("cell", None):
                found.cells[name] = entry
            else:
                found = Found(**entry)
        if done.returncode and len(found.cells) < len(cells):
            last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
            sys.stderr.write(f"toolkit: {program} could not run the cells: {last}\n")
            return Found()
        return found


def _variables(program: str, python: str | None) -> dict[str, str]:
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if sys.platform == "linux" and not environment.gpus():
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    if python is not None and "TORCH_EXTENSIONS_DIR" not in os.environ:
        # What one release of DeepSpeed compiles is not for another.
        name = str(Path(program).parent).strip("/").replace("/", "-")
        variables["TORCH_EXTENSIONS_DIR"] = str(environment.cache_root() / "extensions" / name)
    return variables


def settings_of(cell: Cell) -> dict[str, Any]:
    """Return what a cell trains, in the words of `where` of the known faults."""
    backend = "deepspeed" if "stage" in cell else "fsdp" if "fsdp" in cell else "ddp"
    return {
        "backend": backend,
        "stage": cell.get("stage"),
        "offloads": "offload" in cell,
        "accumulates": cell.get("accumulation", 1) > 1,
        "accumulates_in": cell.get("accumulates_in", "default"),
        "overlaps": cell.get("overlap", cell.get("stage") == 3),
        "precision": cell.get("precision", "fp32"),
        "engine": cell["through"],
        "adapters": "lora" in cell,
        "reuses": "reused" in cell,
        "resumes": "resumes" in cell,
        "fuses": "fused" in cell,
        "scheduler": cell.get("scheduler", {}).get("type"),
    }


def faults_of(cell: Cell, versions: Mapping[str, str]) -> list[stack.Fault]:
    """Return the known faults of releases that a cell meets, the most special first."""
    settings = settings_of(cell)
    met = [
        fault
        for fault in stack.faults_of(versions)
        if (
            cell["name"] in fault["cells"]
            if "cells" in fault
            else all(settings[name] in values for name, values in fault["where"].items())
        )
    ]
    return sorted(met, key=lambda fault: -len(fault["where"]))


def to_json(found: Found) -> dict[str, Any]:
    """Return what was found, with the known faults of red cells."""
    by_name = {cell["name"]: cell for cell in all_cells()}
    cells = {
        name: cell
        | {
            "text": by_name[name]["text"],
            "known": [
                {"text": f["text"], "link": f["link"], "advice": stack.advice([f])}
                for f in (faults_of(by_name[name], found.versions) if name in found.red else ())
            ],
        }
        for name, cell in found.cells.items()
    }
    return {
        "schema": SCHEMA,
        "words": found.words,
        "versions": found.versions,
        "transport": found.transport,
        "cells": cells,
    }


def lines(found: Found) -> list[str]:
    """Return a line for each cell that is not right, its cause below it, and the sum."""
    shown: list[str] = []
    for name, cell in to_json(found)["cells"].items():
        if cell["answer"] == RIGHT:
            continue
        shown.append(f"{cell['answer']}: {name} ({cell['text']}): {cell['words']}")
        if name in found.red:
            known = [f"known: {f['text']} ({f['link']}). {f['advice']}" for f in cell["known"]]
            shown += [f"    {line}" for line in known or [UNKNOWN]]
    return [*shown, found.words]


UNKNOWN: Final = (
    "unknown: no thread is known. Train under another strategy or release until it is, and report "
    "it with --json"
)


def _compare(
    python: str | None, against: str, cells: Sequence[Cell], *, as_json: bool, console: Console
) -> int:
    here, other = run_cells(cells, python), run_cells(cells, against)
    if not here.cells or not other.cells:
        return COULD_NOT_RUN
    answer, said = compared(here, other)
    if as_json:
        console.print_json(
            data={"schema": SCHEMA, "answer": answer, "words": said}
            | {"here": here.versions, "other": other.versions}
        )
    else:
        for line in [f"{answer}: {_moved(here.versions, other.versions)}", *said]:
            print_line(line, console=console)
    return 1 if answer == "broken" else 0


def compared(here: Found, other: Found) -> tuple[str, list[str]]:
    """Return `the same`, `changed` or `broken`, and in words what differs."""
    by_name = {cell["name"]: cell for cell in all_cells()}
    for name, cell in here.cells.items():
        theirs = other.cells.get(name, {"answer": "not run"})
        if (cell["answer"], theirs["answer"]) == (RIGHT, RIGHT):
            limit = OTHER_NORM * (10 if "precision" in by_name[name] else 1)
            if math.isclose(cell.get("norm", 0), theirs.get("norm", 0), rel_tol=limit):
                continue
            words = f"the gradients have norm {theirs['norm']:.6g} there, {cell['norm']:.6g} here"
        elif cell["answer"] != theirs["answer"]:
            words = f"{cell['answer']} here, {theirs['answer']} there"
            said = [
                f"{w}: {c['words']}" for w, c in (("here", cell), ("there", theirs)) if "words" in c
            ]
            words = "; ".join([words, *said])
        else:
            continue
        return "broken", [f"{name} ({by_name[name]['text']}): {words}"]
    moved = _moved(here.defaults, other.defaults)
    return ("changed", moved.split("; ")) if moved else ("the same", [])


def _moved(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return what both have and has another value; what one has alone is no default that moved."""
    shared = before.keys() & after.keys()
    return "; ".join(
        f"{name} {before[name]} -> {after[name]}"
        for name in sorted(shared)
        if before[name] != after[name]
    )
