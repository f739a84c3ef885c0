"""What the checks cost: steps with and without them, in turns, and some of them alone."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.cells import Cell, Machine, Row, first_gpu
from kit.result import table

TITLE = "What the checks cost"

KINDS: dict[str, str] = {
    "plain": "transformers' Trainer",
    "bare": "ToolkitTrainer, guards off, neither ledgers nor clock",
    "clock": "ToolkitTrainer, guards off, no ledgers",
    "off": "ToolkitTrainer, guards off",
    "on": "ToolkitTrainer as it is: guards on",
}
"""Each has what those above it have; what comes to it is the difference."""

RATIOS: dict[str, tuple[str, str]] = {
    "all of it (on / plain)": ("on", "plain"),
    "Trainer's subclass (bare / plain)": ("bare", "plain"),
    "clock (clock / bare)": ("clock", "bare"),
    "after the ledgers (off / clock)": ("off", "clock"),
    "heartbeat and guards (on / off)": ("on", "off"),
}

UNTIMED_STEPS = 4
"""They allocate, and the second is the probe that carries the ledgers."""

CALLS = 500
"""Of what is timed alone."""


def cells(machine: Machine) -> list[Cell]:
    def turns(name: str, seconds: float, **settings: Any) -> Cell:
        return Cell(
            name=name,
            settings=settings | {"what": "turns", "model": "qwen-0.5b"},
            seconds=seconds,
            environment=first_gpu(machine),
        )

    full_size = turns("full size", 110.0, tiny=False, batch=4, tokens=1024, rounds=6, steps=20)
    tiny = turns("launch-bound", 60.0, tiny=True, batch=4, tokens=128, rounds=10, steps=40)
    return [
        *([tiny] if machine.smoke else [full_size, tiny]),
        Cell(
            name="alone",
            settings={"what": "alone"},
            seconds=5.0,
            environment=first_gpu(machine),
        ),
    ]


def measure(settings: dict[str, Any], machine: Machine) -> dict[str, Any]:
    if settings["what"] == "alone":
        return _alone(20 if machine.smoke else CALLS)
    if machine.smoke:
        settings = settings | {"tokens": 64, "rounds": 1, "steps": 3}
    return _turns(settings, smoke=machine.smoke)


def _turns(settings: dict[str, Any], *, smoke: bool) -> dict[str, Any]:
    """Let every kind train in turns; return the seconds of each turn's step, and of each probe."""
    from kit.data import full_rows
    from kit.device import clear
    from kit.models import build
    from kit.turns import turn

    batch, steps = settings["batch"], settings["steps"]
    rows = full_rows(batch * (UNTIMED_STEPS + steps), settings["tokens"])
    kinds = [*KINDS]
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    probes: list[float] = []

    def train(kind: str, count: int) -> tuple[float, float]:
        clear()
        model = build(settings["model"], smoke=settings["tiny"])
        with tempfile.TemporaryDirectory() as folder:
            return turn(
                kind,
                model,
                rows,
                Path(folder),
                batch=batch,
                untimed=UNTIMED_STEPS,
                steps=count,
                bf16=True,
                use_cpu=smoke,
            )

    train("on", 1)  # imports, and what is built once
    for _ in range(settings["rounds"]):
        for kind in kinds:
            step, second = train(kind, steps)
            seconds[kind].append(step)
            if kind in ("off", "on"):
                probes.append(second)
        kinds = kinds[1:] + kinds[:1]  # who goes first changes
    return {"turn_step_seconds": seconds, "probe_seconds": probes}


def _alone(calls: int) -> dict[str, Any]:
    """Return the microseconds of the host that some checks take, while the device is idle."""
    return {
        "heartbeat_microseconds": _timed(_heartbeat(), calls),
        "clock_microseconds": _timed(_clock(), calls),
    }


def _timed(step: Callable[[], object], calls: int) -> list[float]:
    from kit.device import synchronize

    for _ in range(10):
        step()
    found: list[float] = []
    for _ in range(calls):
        synchronize()
        begun = time.perf_counter()
        step()
        found.append(1e6 * (time.perf_counter() - begun))
    return found


def _heartbeat() -> Callable[[], None]:
    import torch

    from kit.device import device
    from toolkit.measuring.heartbeat import heartbeat_for

    heartbeat = heartbeat_for("stop", checkpoints=Path("nowhere"))
    assert heartbeat is not None
    heartbeat.prepared(rank=0, ranks=1, device=device())
    loss, norm = torch.tensor(2.0, device=device()), torch.tensor(1.0, device=device())

    def step() -> None:
        heartbeat.step_done(
            losses=[loss], grad_norm=norm, skipped=None, order=0, busy_seconds=lambda: 0.0
        )

    return step


def _clock() -> Callable[[], None]:
    from toolkit.measuring.clock import Clock

    clock = Clock()
    clock.restart()

    def step() -> None:
        for phase in ("data", "other", "forward", "backward", "other", "optimizer", "other"):
            clock.begin(phase)
        clock.step_done()

    return step


# The page


def tables(rows: Sequence[Row]) -> list[str]:
    measured = {row["cell"]: row for row in rows if row["status"] == "ok"}
    lines = [
        "One process; several ranks are measured by `wrapper_cost.py` and `ledgers_cost.py`. In "
        "one process the heartbeat has no collective, and all else of it.",
    ]
    for row in measured.values():
        lines += ["", *(_of_turns(row) if row["settings"]["what"] == "turns" else _of_calls(row))]
    return lines


def _of_turns(row: Row) -> list[str]:
    from kit.device import quartiles

    values, settings = row["measured"], row["settings"]
    seconds = values["turn_step_seconds"]
    plain = quartiles(seconds["plain"])[1]
    header = ("what", "ratio, median of rounds", "quartiles", "ms a step")
    lines = [
        f"### {row['cell']}: {settings['model']}{', shrunk' if settings['tiny'] else ''}, "
        f"{settings['batch']} rows of {settings['tokens']:,} tokens",
        "",
        f"A plain step takes {1000 * plain:.2f} ms. {len(seconds['plain'])} rounds, in each a turn "
        "of each kind; a ratio is that of turns of one round.",
        "",
        *table(header, [_ratio(name, seconds, *pair) for name, pair in RATIOS.items()]),
    ]
    first, middle, third = quartiles(values["probe_seconds"])
    lines += [
        "",
        f"The probe step, once in a run, takes {1000 * middle:.1f} ms ({1000 * first:.1f} to "
        f"{1000 * third:.1f}), {middle / plain:.1f} times a plain step.",
    ]
    return lines


def _ratio(name: str, seconds: Mapping[str, list[float]], one: str, other: str) -> list[str]:
    from kit.device import quartiles

    pairs = [*zip(seconds[one], seconds[other], strict=True)]
    first, middle, third = quartiles([a / b for a, b in pairs])
    difference = quartiles([a - b for a, b in pairs])[1]
    return [
        name,
        f"{middle:.4f}",
        f"{first:.4f} to {third:.4f}",
        f"{1000 * difference:+.3f}",
    ]


def _of_calls(row: Row) -> list[str]:
    from kit.device import quartiles

    lines = []
    for name, what in (
        ("heartbeat_microseconds", "the heartbeat with its guards"),
        ("clock_microseconds", "the moments that the clock notes"),
    ):
        first, middle, third = quartiles(row["measured"][name])
        lines.append((what, f"{middle:.0f}", f"{first:.0f} to {third:.0f}"))
    return [
        "### Alone",
        "",
        "Time of the host in a step, while the device has nothing to do. A step in which the host "
        "is ahead of the device takes no longer for it; what the heartbeat computes on a GPU "
        "runs in a stream of its own.",
        "",
        *table(("what", "microseconds", "quartiles"), lines),
    ]
