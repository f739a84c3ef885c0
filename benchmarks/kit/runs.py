"""Does it run: both engines in every precision, the command that compares, and several ranks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kit.cells import Cell, Machine, Row, started_anew
from kit.result import both_ends, table

TITLE = "Does it run"

PRECISIONS: Final = ("no", "bf16", "fp16")
COMPARE: Final = ("datasets", "typer", "rich", "jinja2")
"""What `toolkit compare` cannot do without, from its data to its report."""

SHARING: Final = {
    "single": (),
    "ddp": (),
    "fsdp": (),
    "fsdp_grad_op": (),
    "zero1": ("deepspeed",),
    "zero2": ("deepspeed",),
    "zero3": ("deepspeed",),
}
"""Strategies that are tried with two ranks on one GPU, and what they need; `single` is the control.
"""

CONTROL: Final = "two ranks on one device: single"
STEPS = 6


def cells(machine: Machine) -> list[Cell]:
    planned = [Cell(name="machine", settings={"kind": "machine"}, seconds=2)]
    planned += [
        Cell(name=f"engines, {precision}", settings={"kind": "engines", "precision": precision},
             seconds=15)
        for precision in PRECISIONS
    ]  # fmt: skip
    # One comparison is enough to show on a CPU that this part runs.
    planned += [
        Cell(
            name=f"toolkit compare, {precision}",
            settings={"kind": "compare", "precision": precision, "ranks": 1},
            seconds=70,
            libraries=COMPARE,
        )
        for precision in (PRECISIONS[:1] if machine.smoke else PRECISIONS)
    ]
    if machine.gpus >= 2:
        planned.append(
            Cell(
                name=f"toolkit compare, {machine.gpus} GPUs",
                settings={"kind": "compare", "precision": "no", "ranks": machine.gpus},
                seconds=600,
                libraries=(*COMPARE, "deepspeed"),
            )
        )
        return planned
    shared = ("single", "ddp") if machine.smoke else SHARING
    return planned + [
        Cell(
            name=f"two ranks on one device: {strategy}",
            settings={"kind": "shared", "strategy": strategy},
            seconds=40,
            libraries=("datasets", *SHARING[strategy]),
        )
        for strategy in shared
    ]


def measure(settings: dict[str, Any], machine: Machine) -> dict[str, Any]:
    match settings["kind"]:
        case "machine":
            return about_device()
        case "engines":
            return engines(settings["precision"], machine)
        case "compare":
            return compared(settings["precision"], settings["ranks"], machine)
        case _:
            from kit.shared import train_sharing

            return train_sharing(settings["strategy"], steps=STEPS)


def about_device() -> dict[str, Any]:
    """Return what torch and NVML say of the device and its libraries."""
    import torch
    from torch.backends import cudnn

    from toolkit import environment

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "matmul_fp32_precision": torch.backends.cuda.matmul.fp32_precision,
        "cudnn": cudnn.version(),
        "nvml": environment.snapshot()["gpus"],
        "driver": environment.snapshot()["driver"],
    }
    if torch.cuda.is_available():
        one = torch.cuda.get_device_properties(0)
        facts |= {
            "device": one.name,
            "capability": f"{one.major}.{one.minor}",
            "memory_bytes": one.total_memory,
            "multiprocessors": one.multi_processor_count,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "bf16": torch.cuda.is_bf16_supported(),
        }
    return facts


def engines(precision: str, machine: Machine) -> dict[str, Any]:
    """Train the same rows under both engines, and hold one against the other."""
    import torch

    from kit.data import full_rows
    from kit.device import clear, peaks
    from kit.models import build
    from kit.training import Task, train_with_loop, train_with_trainer
    from toolkit.comparing.parity.gates import limit_of

    batch, tokens = (2, 64) if machine.smoke else (4, 1024)
    records: dict[str, dict[str, Any]] = {}
    weights: dict[str, list[Any]] = {}
    allocator: dict[str, Any] = {}
    for engine in ("trainer", "loop"):
        clear()
        model = build("qwen-0.5b", smoke=machine.smoke)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        with tempfile.TemporaryDirectory() as folder:
            task = Task(
                rows=full_rows(batch * STEPS, tokens),
                steps=STEPS,
                batch=batch,
                folder=Path(folder),
                precision=precision,
            )
            if engine == "trainer":
                records[engine] = train_with_trainer(model, task).record
            else:
                records[engine] = train_with_loop(model, task)
        allocator[engine] = peaks()
        weights[engine] = [parameter.detach().clone() for parameter in model.parameters()]
        del model
    trainer, loop = records["trainer"], records["loop"]
    moved = distance(weights["trainer"], start)
    gaps = {
        "loss": largest(trainer["losses"], loop["losses"]),
        "grad_norm": max(
            abs(a - b) / a for a, b in zip(trainer["grad_norms"], loop["grad_norms"], strict=True)
        ),
        "weights": distance(weights["trainer"], weights["loop"]) / moved,
    }
    gates = {name: gap <= limit_of(name, precision) for name, gap in gaps.items()}
    return {
        "problem": None if all(gates.values()) else f"gates {verdict(gates)}",
        "losses": {engine: record["losses"] for engine, record in records.items()},
        "skipped_steps": {engine: record["skipped_steps"] for engine, record in records.items()},
        "gaps": gaps,
        "gates": gates,
        "step_seconds": {engine: record["step_seconds"] for engine, record in records.items()},
        "phases": {engine: record["phases"] for engine, record in records.items()},
        "memory": {engine: record["memory"] for engine, record in records.items()},
        "allocator": allocator,
        "not_measured": trainer["not_measured"],
        "attestation_held": all(record["attestation"]["held"] for record in records.values()),
        "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32",
    }


def distance(some: Sequence[Any], others: Sequence[Any]) -> float:
    """Return the Euclidean distance between two lists of tensors."""
    squares = sum(
        float((a.double() - b.double()).square().sum()) for a, b in zip(some, others, strict=True)
    )
    return squares**0.5


def largest(some: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))


def compared(precision: str, ranks: int, machine: Machine) -> dict[str, Any]:
    """Run `toolkit compare` as a user would, and return what its results say."""
    strategies = "single" if ranks == 1 else "single,ddp,zero1,zero2,zero3,fsdp,fsdp_grad_op"
    steps, timed = ("3", "3") if machine.smoke else ("20", "10")
    with tempfile.TemporaryDirectory() as scratch:
        flags = ["--strategies", strategies, "--engine", "both", "--precision", precision]
        flags += ["--num_processes", str(ranks), "--max_steps", steps, "--throughput_steps", timed]
        told = run_compare(Path(scratch), flags)
        report = Path(scratch, "comparison", "report.html")
        if report.exists() and not machine.smoke:
            shutil.copy(report, machine.out / f"gpu-kit-report-{precision}-{ranks}.html")
        runs = [row_of_run(run) for run in told["runs"]]
        unsound = [run for run in runs if run["status"] not in ("ok", "skipped")]
        problem = None
        if told["exit_code"]:
            named = "; ".join(f"{run['name']}: {run['status']}, {run['reason']}" for run in unsound)
            problem = f"toolkit compare ended with {told['exit_code']}: {named or 'a broken gate'}"
        return told | {
            "runs": runs,
            "report_bytes": report.stat().st_size if report.exists() else None,
            "problem": problem,
        }


def run_compare(folder: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Run `toolkit compare` into `folder/comparison`; return exit code, runs and what it printed.

    Raises:
        RuntimeError: it ended without results.
    """
    command = [sys.executable, "-m", "toolkit.cli", "compare", "--output", "comparison", *flags]
    with started_anew():
        done = subprocess.run(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    results = folder / "comparison" / "results.json"
    if not results.exists():
        raise RuntimeError(f"it ended with {done.returncode}: {done.stdout[-1500:]}")
    return {
        "exit_code": done.returncode,
        "runs": json.loads(results.read_text())["runs"],
        "started_cold": sorted(set(re.findall("started cold: (.*)", done.stdout))),
        "printed": both_ends(done.stdout, 3000),
    }


def row_of_run(run: dict[str, Any]) -> dict[str, Any]:
    kept = ("name", "status", "reason", "final_loss", "loss_gap", "grad_norm_gap", "weight_gap")
    kept += ("gates", "tokens_per_second", "step_seconds", "phases", "memory", "predicted")
    kept += ("compute", "not_measured", "rehearsal")
    return {name: run[name] for name in kept}


def tables(rows: Sequence[Row]) -> list[str]:
    ok = [row for row in rows if row["status"] == "ok"]
    of_kind = {
        kind: [row for row in ok if row["settings"]["kind"] == kind]
        for kind in ("engines", "compare", "shared")
    }
    lines: list[str] = []
    if of_kind["engines"]:
        lines += [
            f"Both engines, {STEPS} steps of one model and the same rows in one process; the gates "
            "are those of `toolkit compare`.",
            "",
            *engines_table(of_kind["engines"]),
            "",
        ]
    if of_kind["compare"]:
        without = [row["cell"] for row in of_kind["compare"] if not row["measured"]["report_bytes"]]
        lines += [
            "`toolkit compare` with the built-in model and data; "
            f"{'no report of ' + ', '.join(without) if without else 'each has its report'}. "
            f"{how_started(of_kind['compare'])}",
            "",
        ]
        lines += [*compare_table(of_kind["compare"]), ""]
    if of_kind["shared"]:
        lines += [
            "Two ranks on one device over gloo, by a switch of this kit alone; `single` trains the "
            "same rows in one process.",
            "",
            *shared_table(of_kind["shared"]),
        ]
    return lines


def how_started(rows: Sequence[Row]) -> str:
    """Say whether a warm process served on this machine."""
    reasons = {why for row in rows for why in row["measured"].get("started_cold", ["not noted"])}
    if reasons:
        return f"Ranks that started cold: {'; '.join(sorted(reasons))}."
    return "All ranks were forked from a process that had imported everything."


def engines_table(rows: Sequence[Row]) -> list[str]:
    cells = []
    for row in rows:
        it = row["measured"]
        step = it["step_seconds"]["trainer"]
        peak = it["memory"]["trainer"]["peak_bytes"]
        cells.append(
            (
                row["settings"]["precision"],
                f"{it['gaps']['loss']:.1e}",
                f"{it['gaps']['grad_norm']:.1e}",
                f"{it['gaps']['weights']:.1e}",
                verdict(it["gates"]),
                it["skipped_steps"]["trainer"] or "none",
                "-" if step is None else f"{1000 * step['median']:.1f} ms",
                "not measured" if peak is None else f"{peak / 2**30:.2f} GiB",
            )
        )
    header = ("precision", "loss gap", "norm gap", "weights gap", "gates")
    return table((*header, "skipped steps", "step, trainer", "peak, trainer"), cells)


def verdict(gates: dict[str, bool]) -> str:
    broken = [name for name, held in gates.items() if not held]
    return f"broken: {', '.join(broken)}" if broken else "held"


def compare_table(rows: Sequence[Row]) -> list[str]:
    cells = []
    for row in rows:
        for run in row["measured"]["runs"]:
            peak = (run["memory"] or {}).get("peak_bytes")
            gap = run["loss_gap"]
            cells.append(
                (
                    row["settings"]["precision"],
                    run["name"],
                    run["status"],
                    "-" if run["final_loss"] is None else f"{run['final_loss']:.4f}",
                    "-" if gap is None else f"{gap['max']:.1e}",
                    verdict(run["gates"]),
                    "not measured" if peak is None else f"{peak / 2**20:.1f} MiB",
                )
            )
    header = ("precision", "run", "status", "final loss", "gap to the control", "gates", "peak")
    return table(header, cells)


def shared_table(rows: Sequence[Row]) -> list[str]:
    losses = {row["settings"]["strategy"]: row["measured"]["losses"] for row in rows}
    control = losses.get("single")
    cells = []
    for row in rows:
        strategy, it = row["settings"]["strategy"], row["measured"]
        gap = "no control" if control is None else f"{largest(losses[strategy], control):.1e}"
        cells.append((strategy, it["ranks"], it["device"], it["backend"], gap))
    return table(("strategy", "ranks", "device", "transport", "largest loss gap"), cells)
