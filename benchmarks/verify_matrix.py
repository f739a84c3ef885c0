"""Which releases compute right numbers: the cells of `toolkit verify`, under releases side by side.

    python benchmarks/verify_matrix.py --envs /tmp/stacks

Each stack is this environment with another release of one package laid before it, in an environment
of its own: torch is installed once. An environment that is there is used again, and so is what the
cells gave under it; `--again` runs them anew. It writes docs/releases.md, the dated JSON under
benchmarks/results, and what tools read: toolkit/stack/measured.json.
"""

import argparse
import datetime
import hashlib
import json
import os
import subprocess
import sys
import venv
from collections import defaultdict
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from toolkit import stack
from toolkit.files import write_text
from toolkit.verifying.verify import HERE, Found, all_cells, faults_of, run_cells, settings_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "releases.md"
RESULTS = ROOT / "benchmarks" / "results"

RELEASES = {
    "deepspeed": (
        *("0.16.9", "0.17.5", "0.17.6", "0.18.2", "0.18.3", "0.18.5", "0.18.6", "0.18.9"),
        *("0.19.0", "0.19.3", "0.19.4", "0.19.5", "0.19.6"),
    ),
    "accelerate": ("1.10.1", "1.11.0", "1.12.0", "1.13.0", "1.14.0"),
    "transformers": ("5.0.0", "5.4.0", "5.5.0", "5.17.0", "5.20.2", "5.23.0"),
}
WAYS = {
    "deepspeed": ("deepspeed", "loop", "trainer", "load"),
    "accelerate": ("loop", "trainer"),
    "transformers": ("trainer", "load"),
}
"""What cells of a package's stacks go `through`; those of DeepSpeed have a stage, too."""
STACKS = [{}, *({name: one} for name, every in RELEASES.items() for one in every)]
"""What differs from this environment. Its own releases are the newest."""

PROGRAM = hashlib.sha256(
    b"".join((HERE / name).read_bytes() for name in ("stand_alone.py", "cells.toml"))
).hexdigest()[:12]
"""All columns come from one program: what another one gave is run again."""

INTRODUCTION = """\
# Releases

After this page you know which releases of DeepSpeed, Accelerate and transformers compute what one
process computes, and what to install in place of one that does not.

```sh
toolkit verify
```

Each cell trains a small Llama as two [ranks](glossary.md#rank), and holds its updates, weights or
loaded weights against those of one process ([Verify](verify.md)). This page is written by
`benchmarks/verify_matrix.py`, from one version of the cells.
"""

RED = """\
## What is red

`Releases` are those with the fault, by its thread and by what was measured; `start not measured`
marks a range whose first release was not run here. `Seen here` names cells that are red for it.
"""

LEGEND = """\
A column is a release in place of the newest one; all else is as above. A row is a cell, where the
package takes part in it.

- `.` is right.
- A number is red: the size of the update along the true one. 0.33 is a third of it, 1.00 an update
  of the right size in another direction.
- `wrong` is red in another way: a norm, a schedule, a resume, loaded or saved weights.
- `raises` is loud: the run ends with an error.
- `-` was not run.
"""


def name_of(changes):
    return " ".join(f"{package} {release}" for package, release in changes.items()) or "newest"


def prepared(changes, folder):
    """Return the Python of a stack; it is made where it is missing."""
    if not changes:
        return None
    place = folder / name_of(changes).replace(" ", "-")
    python = place / "bin" / "python"
    if not (place / "made").exists():
        venv.create(place, with_pip=False, symlinks=True, clear=True)
        site = next(place.glob("lib/python*/site-packages"))
        here = next(path for path in map(Path, sys.path) if path.name == "site-packages")
        (site / "base.pth").write_text(f"{here}\n")
        words = [f"{package}=={release}" for package, release in changes.items()]
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        subprocess.run(
            [*pip, "--no-compile", "--no-build-isolation", *words],
            env={**os.environ, "DS_ACCELERATOR": "cpu"},
            check=True,
        )
        (place / "made").touch()
    return str(python)


def cells_of(changes):
    """Return the cells that take part in what differs, all of the newest stack."""
    package = next(iter(changes), "")
    return [
        cell
        for cell in all_cells().values()
        if cell["through"] in WAYS.get(package, cell["through"])
        and (package != "deepspeed" or "stage" in cell)
    ]


def measured(folder, *, again, kept_alone):
    """Return what the cells gave under each stack, by its name."""
    found = {}
    for changes in STACKS:
        name = name_of(changes)
        kept = folder / f"{name.replace(' ', '-')}.json"
        document = json.loads(kept.read_text()) if kept.exists() else {}
        if again or document.pop("program", "") != PROGRAM:
            if kept_alone:
                continue
            # What one release of DeepSpeed compiles is not for another.
            os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / f"{name.replace(' ', '-')}-built")
            document = vars_of(run_cells(cells_of(changes), prepared(changes, folder)))
            kept.write_text(json.dumps({"program": PROGRAM, **document}, indent=1))
        found[name] = Found(**document)
        print(name, {n: c["answer"] for n, c in found[name].red.items()}, flush=True)
    return found


def vars_of(found):
    return {name: getattr(found, name) for name in found.__slots__}


def sign(cell):
    if cell is None or cell["answer"] == "not run":
        return "-"
    if cell["answer"] == "raised":
        return "raises"
    if cell["answer"] == "right":
        return "."
    before, _, after = cell["words"].partition(" of its size, and has ")
    return f"{float(after.split()[0]):.2f}" if after and before else "wrong"


def unknown(found):
    """Return what is red and in no thread, in the form of the table of known faults."""
    red = defaultdict(list)
    for changes in (one for one in STACKS if name_of(one) in found):
        one = found[name_of(changes)]
        for name, cell in one.red.items():
            told = faults_of(all_cells()[name], cell["answer"], one.versions)
            # What this wrote before is no thread.
            is_told = any(fault["link"].startswith("http") for fault in told)
            if cell["answer"] == "wrong" and not is_told:
                through = "deepspeed" if "stage" in all_cells()[name] else "accelerate"
                package = next(iter(changes), through)
                red[package, name].append(Version(one.versions[package]))
    rows = []
    for (package, name), releases in red.items():
        settings = settings_of(all_cells()[name])
        kept = {n: [s] for n, s in settings.items() if s is True or n in ("backend", "stage")}
        after = [
            Version(one.versions[package])
            for one in found.values()
            if one.cells.get(name, {}).get("answer") == "right"
        ]
        good = min((one for one in after if one > max(releases)), default=None)
        row = {"package": package, "releases": f">={min(releases)}" + (f",<{good}" if good else "")}
        row["text"] = f"`toolkit verify` finds its cell {name} wrong: {all_cells()[name]['text']}"
        row["link"] = "no thread is known"
        otherwise = {"meanwhile": "train under another strategy"}
        rows.append(row | {"where": kept, "cells": [name]})
        rows[-1] |= {"first": str(good)} if good else otherwise
    return rows


def page(found, date):
    newest = found["newest"]
    releases = ", ".join(f"{n} {v}" for n, v in newest.versions.items())
    lines = [INTRODUCTION, f"Measured on {date} over {newest.transport}, the newest stack being:"]
    lines += [f"{releases}.\n", RED, "| fault | releases | first good | seen here | thread |"]
    lines.append("|---|---|---|---|---|")
    lines += [red_row(fault, found) for fault in stack.known_faults()]
    for name, one in found.items():
        raised = {cell["words"] for cell in one.red.values() if cell["answer"] == "raised"}
        lines += [f"\n{name} raises: `{words[:90]}`" for words in sorted(raised)]
    lines += ["", "What raises is no silent fault. NCCL and real GPUs were not at hand."]
    lines += ["\n## Every cell\n", LEGEND]
    for package in RELEASES:
        columns = {newest.versions[package]: newest}
        columns |= {one.versions[package]: one for n, one in found.items() if package in n}
        names = sorted(columns, key=Version)
        lines += [f"\n### {package}\n", f"| cell | {' | '.join(names)} |"]
        lines.append("|---" * (len(names) + 1) + "|")
        for cell in cells_of({package: ""}):
            signs = [sign(columns[name].cells.get(cell["name"])) for name in names]
            lines.append(f"| `{cell['name']}`: {cell['text']} | {' | '.join(signs)} |")
    return "\n".join(lines) + "\n"


def red_row(fault, found):
    package, seen = fault["package"], defaultdict(list)
    for one in found.values():
        for name, cell in one.red.items():
            if fault in faults_of(all_cells()[name], cell["answer"], one.versions):
                seen[one.versions[package]].append(f"`{name}`")
    alike = defaultdict(list)
    for release in sorted(seen, key=Version):
        alike[", ".join(seen[release])].append(release)
    shown = "; ".join(f"{', '.join(every)}: {cells}" for cells, every in alike.items())
    starts = {
        one.version for one in SpecifierSet(fault["releases"]) if one.operator in (">=", "==")
    }
    is_measured = starts <= {one.versions[package] for one in found.values()}
    releases = f"{package} {fault['releases']}".replace("<", "&lt;")
    releases += "" if is_measured else " (start not measured)"
    link, text = fault["link"], fault["text"]
    # A name from code keeps its case.
    text = text if {".", "_"} & {*text.split()[0]} else f"{text[0].upper()}{text[1:]}"
    *_, repository, _, number = link.split("/") if link.startswith("http") else ("", "", "", "")
    thread = f"[{repository}#{number}]({link})" if number else "none is known"
    first = fault.get("first", "none yet")
    return f"| {text} | {releases} | {first} | {shown or 'not in a cell'} | {thread} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--envs", type=Path, required=True, help="folder of the environments")
    parser.add_argument("--again", action="store_true", help="run cells that were run before")
    parser.add_argument("--kept", action="store_true", help="write from what was run before alone")
    options = parser.parse_args()
    options.envs.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TOOLKIT_CACHE", str(options.envs / "cache"))
    found = measured(options.envs, again=options.again, kept_alone=options.kept)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    write_text(stack.MEASURED, json.dumps(unknown(found), indent=2) + "\n")
    stack.known_faults.cache_clear()
    write_text(PAGE, page(found, date))
    kept = {name: vars_of(one) | {"defaults": {}} for name, one in found.items()}
    write_text(RESULTS / f"{date}-verify-matrix.json", json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
