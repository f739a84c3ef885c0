"""The product on a GPU from beginning to end, in one call of a few minutes.

    PYTHONPATH=. python benchmarks/gpu_acceptance.py
    PYTHONPATH=. python benchmarks/gpu_acceptance.py --budget 200 --out results
    PYTHONPATH=. python benchmarks/gpu_acceptance.py --steps doctor compare tuned
    PYTHONPATH=. python benchmarks/gpu_acceptance.py --plan
    PYTHONPATH=. python benchmarks/gpu_acceptance.py --smoke

A step uses the toolkit as a person would, by its commands, and keeps what it printed and wrote as
evidence. Steps run one after the other, those first that show much in few seconds, each in
processes of its own that are ended when its time is up. A step for whose estimate no time is left
does not begin. Models and data are built in: no network is needed. The result is written after each
step, and the same command goes on where it stopped; steps that are ok stay as they are. `--smoke`
takes the same ways with tiny shapes on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from gpu_kit import opened, stop, use_wheels, visible_gpus
from kit.acceptance import EVIDENCE, KEPT_CHARACTERS, ROOT, STEPS, Step, ended
from kit.cells import Machine
from kit.result import Result, table

from toolkit.escaping import one_line
from toolkit.launching.python import python_environment

HERE: Final = Path(__file__).resolve().parent
PART: Final = "acceptance"
BUDGET_SECONDS: Final = 540.0
SMOKE_PATIENCE: Final = 4
"""Times the time limits of a GPU, in a smoke run."""


def main() -> int:
    args = arguments().parse_args()
    unknown = [name for name in args.steps if name not in STEPS]
    if unknown:
        stop(f"--steps {' '.join(unknown)}: choose from {' '.join(STEPS)}.")
    if args.budget is not None and args.budget < 0:
        stop(f"--budget {args.budget:g}: use 0 seconds or more.")
    steps = [step for step in STEPS.values() if step.name in args.steps]
    budget = args.budget
    if budget is None:
        budget = float("inf") if args.smoke else BUDGET_SECONDS
    print("\n".join(plan_table(steps, budget)), flush=True)
    if args.plan:
        return 0
    if args.smoke:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gpus = 0 if args.smoke else visible_gpus()
    if not gpus and not args.smoke:
        stop("No GPU can be seen here. Pass --smoke for tiny shapes on the CPU, or --plan.")
    begun = time.monotonic()
    use_wheels(args.wheels)
    result = opened(
        args.out, Machine(gpus=gpus, smoke=args.smoke, out=args.out), stem="gpu-acceptance"
    )
    run_steps(steps, result, smoke=args.smoke, end=begun + budget)
    rows = [row for row in result.rows if row["cell"] in args.steps]
    print(f"\n{result.file.with_suffix('.md')}")
    return 1 if any(row["status"] == "failed" for row in rows) else 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", nargs="+", default=[*STEPS], help=f"of {' '.join(STEPS)}")
    parser.add_argument(
        "--budget", type=float, help=f"seconds for all steps; {BUDGET_SECONDS:.0f} on a GPU"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the result")
    parser.add_argument("--plan", action="store_true", help="print the plan and leave")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument(
        "--wheels", type=Path, default=HERE / "gpu_kit_wheels", help="for what is missing here"
    )
    return parser


def plan_table(steps: Sequence[Step], budget: float) -> list[str]:
    rows = [(s.name, s.title, f"{s.seconds:.0f}", f"{s.timeout:.0f}") for s in steps]
    header = ("step", "what it shows", "seconds on a GPU", "ended after")
    total = sum(step.seconds for step in steps)
    return [*table(header, rows), "", f"{total:.0f} s in all; the budget is {budget:g} s"]


def run_steps(steps: Sequence[Step], result: Result, *, smoke: bool, end: float) -> None:
    """Run the steps that are not ok yet, and write each row and the page at once.

    A step for which no time is left keeps the row of an earlier call.
    """
    before = {row["cell"]: str(row["status"]) for row in result.rows}
    for step in steps:
        left = max(0.0, end - time.monotonic())
        fits = step.seconds <= left
        status = before.get(step.name, "not run")
        if status == "ok" or not (fits or status == "not run"):
            print(f"  {step.name}: {status} before", flush=True)
            continue
        if not fits:
            row = row_of(step, "not run", f"{left:.0f} s left, and it takes about {step.seconds:g}")
        else:
            patience = SMOKE_PATIENCE if smoke else 1
            row = run_step(step, smoke=smoke, seconds=min(step.timeout * patience, left))
        result.drop(PART, [step.name])
        result.add(row)
        result.file.with_suffix(".md").write_text(page(result), encoding="utf-8")
        reason = "" if row["reason"] is None else f", {row['reason'][:300]}"
        print(f"  {step.name}: {row['status']}, {row['seconds']:.0f} s{reason}", flush=True)


def row_of(
    step: Step,
    status: str,
    reason: str | None,
    *,
    seconds: float = 0.0,
    measured: dict[str, Any] | None = None,
) -> Any:
    return {
        "part": PART,
        "cell": step.name,
        "status": status,
        "reason": None if reason is None else one_line(reason)[:1000],
        "seconds": round(seconds, 1),
        "settings": {"estimate_seconds": step.seconds, "timeout_seconds": step.timeout},
        "measured": measured or {},
    }


def run_step(step: Step, *, smoke: bool, seconds: float) -> Any:
    """Run a step in processes of its own, which are ended after `seconds`; return its row."""
    folder = Path(tempfile.mkdtemp(prefix="acceptance-"))
    begun = time.monotonic()
    try:
        log = folder / "step.log"
        environment = python_environment() | step.environment
        command = step_command(step, folder, smoke)
        code = ended(command, log, seconds=seconds, environment=environment, cold=True)
        took = time.monotonic() - begun
        facts: dict[str, Any] = {"measured": {}, "problems": [], "skipped": None}
        with suppress(OSError, ValueError):
            facts = json.loads(shortened((folder / EVIDENCE).read_text(encoding="utf-8"), folder))
        if code == 0 and facts["skipped"] is not None:
            return row_of(step, "skipped", facts["skipped"], seconds=took)
        problems = facts["problems"]
        if code is None:
            problems.insert(0, f"not over after {seconds:.0f} s, and ended")
        elif code and not problems:
            problems.append(f"its process ended with {code}")
        if problems:
            facts["measured"]["logs"] = tails(folder)
        status, reason = ("failed", "; ".join(problems)) if problems else ("ok", None)
        return row_of(step, status, reason, seconds=took, measured=facts["measured"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def step_command(step: Step, folder: Path, smoke: bool) -> list[str]:
    script = HERE / "kit" / "acceptance.py"
    return [sys.executable, str(script), step.name, str(folder), "smoke" if smoke else "full"]


def tails(folder: Path) -> dict[str, str]:
    """Return the last lines of all logs in a folder, by the names of their files."""
    logs = sorted(folder.rglob("*.log"), key=lambda file: file.stat().st_mtime)[-4:]
    return {
        str(log.relative_to(folder)): shortened(
            log.read_text(encoding="utf-8", errors="replace")[-KEPT_CHARACTERS:], folder
        )
        for log in logs
    }


def shortened(text: str, folder: Path) -> str:
    """Return a text without the paths of the machine."""
    text = text.replace(str(folder), "SCRATCH").replace(str(ROOT), ".")
    return text.replace(f"{Path.home()}/", "~/")


def page(result: Result) -> str:
    """Return the result as a page: a table of all steps, then the evidence of each."""
    about, order = result.about, [*STEPS]
    rows = sorted(result.rows, key=lambda row: order.index(row["cell"]))
    smoke = "**A smoke run on a CPU: none of its numbers says anything of a GPU.**"
    lines = [f"# GPU acceptance, {about['date']}", "", f"    {about['command']}", ""]
    lines += [smoke, ""] if about["smoke"] else []
    lines += [f"{about['device']}; {about['versions']}; toolkit {about['toolkit']}.", ""]
    lines += [about["note"], ""] if "note" in about else []
    cells = [(r["cell"], r["status"], f"{r['seconds']:.0f}", r["reason"] or "") for r in rows]
    lines += table(("step", "status", "seconds", "reason"), cells)
    for row in rows:
        lines += ["", f"## {STEPS[row['cell']].title}", "", *evidence(row["measured"])]
    return "\n".join(lines) + "\n"


def evidence(measured: dict[str, Any]) -> list[str]:
    """Return figures as a list, and lists of rows as tables; what was printed stays in the JSON."""
    plain: list[str] = []
    tables: list[str] = []
    for name, value in measured.items():
        if name.endswith("printed") or name in ("logs", "tail"):
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            keys = dict.fromkeys(key for row in value for key in row)
            columns = [key for key in keys if key not in ("tail", "printed")]
            cells = [[one_line(str(row.get(key)))[:300] for key in columns] for row in value]
            tables += ["", *table(columns, cells)]
        else:
            plain.append(f"- {name.replace('_', ' ')}: {one_line(str(value))[:2000]}")
    return [*(plain or ["Nothing was measured."]), *tables]


if __name__ == "__main__":
    sys.exit(main())
