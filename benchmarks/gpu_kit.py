"""Everything that only a GPU shows, from one command.

    python benchmarks/gpu_kit.py
    python benchmarks/gpu_kit.py --parts runs,memory --out results
    python benchmarks/gpu_kit.py --plan
    python benchmarks/gpu_kit.py --smoke

Each part is independent and takes a few minutes on one GPU: whether training runs at all, speed,
what the checks cost, the planner against the allocator, numbers in half precision, CPU offload.
Models are built from local shapes and data are built in: no network is needed. Every cell writes
its row at once, and the same command goes on where it was interrupted; cells that failed are run
again. A library that is missing becomes a row, and can be carried: see `gpu_kit_wheels.sh`.
`--smoke` runs every part with tiny shapes on the CPU, through the same code.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from kit.cells import PARTS, Cell, Machine, Row, Status, missing, part
from kit.result import Result, table
from kit.wheels import install

from toolkit import environment
from toolkit.escaping import one_line
from toolkit.launching.python import python_environment
from toolkit.launching.supervised import supervised

HERE = Path(__file__).resolve().parent
START_SECONDS = 15
"""Of a process: Python, torch, transformers and the CUDA context."""

POLL_SECONDS = 0.5


def main() -> None:
    args = arguments().parse_args()
    if args.page is not None:
        write_page(Result.read(args.page))
        return
    parts = chosen_parts(args.parts)
    if args.smoke:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gpus = 0 if args.smoke else visible_gpus()
    machine = Machine(gpus=gpus, smoke=args.smoke, out=args.out)
    planned = {name: chosen_cells(name, args.cells, machine) for name in parts}
    print_plan(planned, machine)
    if args.plan:
        return
    if not machine.gpus and not args.smoke:
        stop("No GPU can be seen here. Pass --smoke for tiny shapes on the CPU, or --plan.")
    use_wheels(args.wheels)
    result = opened(args.out, machine)
    for name, cells in planned.items():
        run_part(name, cells, machine, result)
        write_page(result)
    print(f"\n{result.file.with_suffix('.md')}")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument(
        "--cells", nargs="+", default=[""], help="only cells whose name contains one of these"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the result")
    parser.add_argument("--plan", action="store_true", help="print the plan and leave")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument(
        "--wheels", type=Path, default=HERE / "gpu_kit_wheels", help="for what is missing here"
    )
    parser.add_argument("--page", type=Path, help="only make the Markdown of this JSON anew")
    return parser


def chosen_parts(names: str) -> list[str]:
    chosen = [name for name in names.split(",") if name]
    unknown = [name for name in chosen if name not in PARTS]
    if unknown or not chosen:
        stop(f"--parts {names}: choose from {','.join(PARTS)}.")
    return chosen


def chosen_cells(name: str, texts: Sequence[str], machine: Machine) -> list[Cell]:
    cells = part(name).cells(machine)
    return [cell for cell in cells if any(text in cell.name for text in texts)]


def stop(message: str) -> NoReturn:
    """Leave because of a mistake of the user's."""
    print(f"{Path(sys.argv[0]).stem}: {message}", file=sys.stderr)
    raise SystemExit(2)


def visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()  # it makes no CUDA context


def print_plan(planned: dict[str, list[Cell]], machine: Machine) -> None:
    rows = []
    for name, cells in planned.items():
        libraries = sorted({library for cell in cells for library in cell.libraries})
        rows.append(
            (name, part(name).TITLE, len(cells), f"{minutes(cells):.0f}", ", ".join(libraries))
        )
    header = ("part", "what it shows", "cells", "minutes on a GPU", "libraries that some need")
    print("\n".join(table(header, rows)))
    every = [cell for cells in planned.values() for cell in cells]
    print(f"\n{len(every)} cells, {minutes(every):.0f} minutes", flush=True)


def minutes(cells: Sequence[Cell]) -> float:
    starts = len([*groups(cells)])
    return (sum(cell.seconds for cell in cells) + starts * START_SECONDS) / 60


def groups(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Yield neighbours that share a process."""
    for _, group in itertools.groupby(cells, key=lambda cell: cell.environment):
        yield [*group]


def use_wheels(folder: Path) -> None:
    """Install what is missing here, and have every Python that is started find it, last of all."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    target = environment.cache_root() / f"gpu-kit-{python}" / "site-packages"
    for sentence in install(folder, target):
        print(sentence, flush=True)
    if target.exists():
        sys.path.append(str(target))
        os.environ["PYTHONPATH"] = f"{python_environment()['PYTHONPATH']}{os.pathsep}{target}"
        os.environ["PATH"] += f"{os.pathsep}{target / 'bin'}"


def opened(out: Path, machine: Machine, *, stem: str = "gpu-kit") -> Result:
    """Return the newest result of this machine, versions and commit in a folder, or a new one.

    `stem` is the script's name with hyphens, as it stands in the names of its results.
    """
    out.mkdir(parents=True, exist_ok=True)
    smoke = " --smoke" if machine.smoke else ""
    about = described(machine)
    about["command"] = f"python benchmarks/{stem.replace('-', '_')}.py{smoke}"
    stem += smoke.replace(" --", "-")
    for file in sorted(out.glob(f"????-??-??-{stem}.json"), reverse=True):
        result = Result.read(file)
        same = ("device", "versions", "toolkit")
        if all(result.about[key] == about[key] for key in same):
            print(f"going on with {file}: {len(result.rows)} rows", flush=True)
            return result
    result = Result(file=out / f"{about['date']}-{stem}.json", about=about)
    result.write()
    return result


def described(machine: Machine) -> dict[str, object]:
    """Return what the head of a result says."""
    facts = environment.snapshot()
    versions = facts["versions"]
    return {
        "date": datetime.date.today().isoformat(),
        "device": device_name(machine),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "toolkit": facts["commit"],
        "smoke": machine.smoke,
        "environment": facts,
    }


def device_name(machine: Machine) -> str:
    if not machine.gpus:
        return "CPU"
    import torch

    one = torch.cuda.get_device_properties(0)
    return f"{machine.gpus} x {one.name}, {one.total_memory / 2**30:.0f} GiB"


def run_part(name: str, cells: Sequence[Cell], machine: Machine, result: Result) -> None:
    done = result.finished(name)
    left = [cell for cell in cells if cell.name not in done]
    print(f"\n{name}: {len(left)} of {len(cells)} cells to run", flush=True)
    for group in groups(left):
        run_group(name, group, machine, result)


def run_group(name: str, cells: list[Cell], machine: Machine, result: Result) -> None:
    """Run cells in one process, and in a new one what is left when it dies."""
    result.drop(name, [cell.name for cell in cells])
    reasons = [missing(cell) for cell in cells]
    if all(reasons):  # a process would import everything, to say the same
        for cell, reason in zip(cells, reasons, strict=True):
            result.add(not_run(name, cell, "missing", str(reason)))
            print_row(result.rows[-1])
        return
    while cells:
        code, output = run_worker(name, cells, machine, result)
        written = {row["cell"] for row in result.of(name)}
        cells = [cell for cell in cells if cell.name not in written]
        if cells:
            result.add(lost(name, cells.pop(0), code, output))
            print_row(result.rows[-1])


def run_worker(
    name: str, cells: Sequence[Cell], machine: Machine, result: Result
) -> tuple[int, str]:
    """Return how a worker ended, and the last lines that it printed."""
    command = [sys.executable, str(HERE / "kit" / "worker.py"), str(result.file), name]
    command += [str(machine.gpus), "smoke" if machine.smoke else "full"]
    command += [cell.name for cell in cells]
    # It also keeps the modules of `kit/` from taking the place of the standard library's.
    variables = python_environment() | cells[0].environment
    with tempfile.TemporaryFile("w+") as log:
        # Whatever ends the kit, its workers and their launches go with it.
        process = subprocess.Popen(
            supervised(command), env=variables, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            while (code := process.poll()) is None:
                time.sleep(POLL_SECONDS)
                print_new_rows(result)
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
        print_new_rows(result)
        log.seek(0)
        return code, log.read()[-6000:]


def print_new_rows(result: Result) -> None:
    """Take over the rows that a worker has written meanwhile, and print them."""
    known = len(result.rows)
    result.rows = Result.read(result.file).rows
    for row in result.rows[known:]:
        print_row(row)


def print_row(row: Row) -> None:
    reason = "" if row["reason"] is None else f", {one_line(row['reason'])[:200]}"
    print(f"  {row['cell']}: {row['status']}, {row['seconds']:.0f} s{reason}", flush=True)


def lost(name: str, cell: Cell, code: int, output: str) -> Row:
    """Return the row of a cell in which the process died or was given up."""
    last_line = output.strip().rpartition("\n")[2]
    reason = f"its process ended with {code}: {last_line[:500]}"
    return not_run(name, cell, "failed", reason, output=output)


def not_run(name: str, cell: Cell, status: Status, reason: str, **measured: str) -> Row:
    return Row(
        part=name,
        cell=cell.name,
        status=status,
        reason=reason,
        seconds=0.0,
        settings=cell.settings,
        measured=measured,
    )


def write_page(result: Result) -> None:
    result.file.with_suffix(".md").write_text(result.markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()
