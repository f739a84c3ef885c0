"""The planner's constants for torch's allocator, fitted to what `gpu_kit.py` measured.

    python benchmarks/gpu_kit_fit.py benchmarks/results/2026-11-22-gpu-kit.json

Prints what stands in `toolkit/planning/memory/estimate.py` and `allocator.py` beside what the rows
give, and changes nothing. Each constant is an interval that has to hold for every row, so it is
fitted as the least and the most, rounded outwards:

- MOVING and EXPANDABLE, without and with expandable segments, each by how the tensors of a job come
  and go (`allocator.Kind`): the most that was reserved over the most that was allocated, both
  less what stays from step to step;
- WORKSPACES: bytes that came free when cuBLAS was told to give its workspaces back;
- CONTEXT: bytes in use on the device that the allocator has not reserved, at the end of a job: this
  process's where NVML knows them, else those of all that use the GPU.

Left out are rows that began on a device that was not empty, and rows in which the allocator had to
give memory back to get some: what is reserved then shows the GPU's size. Then come the residuals:
how far what was measured is outside of the planner's interval, today and with the fitted
constants. The suite holds the planner to committed rows: allocated within its interval widened by
5% of what was measured (MARGIN), reserved within its interval as it is, and the bytes that offloads
copied in a step to 2% (COPIED_MARGIN). Of a result of `speed_lab.py`, the rows that can be planned
are printed beside the plan, and nothing is fitted.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from kit import offload, speed
from kit.cells import Row
from kit.memory import ALLOCATORS, beyond, described, job_of
from kit.models import shape_of
from kit.result import Result, table

from toolkit.jobs.terms import GIB, Interval
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.estimate import (
    CONTEXT,
    EXPANDABLE,
    MOVING,
    STAYING,
    WORKSPACES,
    Kind,
    MemoryEstimate,
    estimate_memory,
)
from toolkit.planning.speed.estimate import estimate_speed
from toolkit.planning.speed.gpus import Gpu, gpu
from toolkit.strategies import STRATEGIES
from toolkit.training.speed_arguments import SpeedArguments

MIB: Final = 1 << 20
MARGIN: Final = 0.05
"""Of what was measured; for allocated bytes, which the planner counts tensor by tensor."""

COPIED_MARGIN: Final = 0.02
"""Of the bytes that one step copied over PCIe."""

LEAST_ROWS: Final = 6
"""Of one setting of the allocator: the least and the most of fewer say nothing of a next one."""

MOST_BEFORE: Final = 64 * MIB
"""Allocated when a cell begins, by what an earlier one left behind."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of the planner that a GPU decides."""

    moving: dict[tuple[str, Kind], Interval]
    """By setting of the allocator, and kind of job."""

    workspaces: Interval
    context: Interval


NAMES: Final = {"default": "MOVING", "expandable": "EXPANDABLE"}
TODAY: Final = Constants(
    moving={
        (allocator, kind): interval
        for allocator, constant in (("default", MOVING), ("expandable", EXPANDABLE))
        for kind, interval in constant.items()
    },
    workspaces=WORKSPACES,
    context=CONTEXT,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="a JSON file that gpu_kit.py wrote")
    file = parser.parse_args().result
    if not file.is_file():
        stop(f"{file} is not there. Name a JSON file that gpu_kit.py wrote.")
    result = Result.read(file)
    if result.about["smoke"]:
        stop(f"{result.file} is a smoke run on a CPU, and nothing can be fitted to it.")
    if lab := lab_rows(result.of("lab")):
        print("\n".join(lab_table(lab, gpu_of(result))))
        return
    rows = measured_rows(result.of("memory"))
    by_allocator = {name: of_allocator(rows, name) for name in ALLOCATORS}
    if all(len(found) < LEAST_ROWS for found in by_allocator.values()):
        counts = ", ".join(f"{len(found)} {name}" for name, found in by_allocator.items())
        stop(
            f"{result.file} has too few rows of the part memory to fit to: {counts}. "
            f"{LEAST_ROWS} of one setting are needed."
        )
    print(f"{result.about['device']}; {result.about['versions']}\n")
    fitted = fit([row for found in by_allocator.values() if enough(found) for row in found])
    print("\n".join(constants_table(by_allocator, fitted)))
    print("\n" + "\n".join(residuals(rows, fitted)))
    found = [sentence for row in rows for sentence in missed(row)]
    print(f"\n{len(found)} of {2 * len(rows)} peaks are outside of what the suite allows today")
    print("\n".join(found))
    copied = [sentence for row in copied_rows(result.of("offload")) for sentence in miscounted(row)]
    print("\n".join(["", *copied] if copied else ["\nThe bytes over PCIe are as planned"]))
    if steps := timed_rows(result.of("speed")):
        print("\n" + "\n".join(seconds_table(steps, gpu_of(result))))


def stop(message: str) -> NoReturn:
    print(f"gpu_kit_fit: {message}", file=sys.stderr)
    raise SystemExit(2)


def measured_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that say something of the allocator."""
    return [
        row
        for row in rows
        if row["status"] == "ok"
        and row["measured"]["whole"]["allocated_bytes"] is not None
        and row["measured"]["allocated_before_bytes"] <= MOST_BEFORE
        and not row["measured"]["allocator_retries"]
    ]


def of_allocator(rows: Iterable[Row], name: str) -> list[Row]:
    return [row for row in rows if row["settings"]["allocator"] == name]


def enough(rows: Sequence[Row]) -> bool:
    return len(rows) >= LEAST_ROWS


def fit(rows: Sequence[Row]) -> Constants:
    """Return the constants that hold for all of these rows, and no wider than they need."""
    ratios: dict[tuple[str, Kind], list[float]] = {}
    for row in rows:
        ratios.setdefault(key_of(row["settings"]), []).append(ratio(row))
    return Constants(
        moving={key: outer(found, step=0.01) for key, found in ratios.items()},
        workspaces=outer([row["measured"]["workspaces_bytes"] for row in rows], step=MIB / 8),
        context=outer([row["measured"]["outside_bytes"] for row in rows], step=MIB),
    )


def key_of(settings: dict[str, Any]) -> tuple[str, Kind]:
    """Return which of the intervals in `Constants.moving` a row's settings go with."""
    return settings["allocator"], estimate_memory(job_of(settings)).pools.kind


def ratio(row: Row) -> float:
    """Return reserved over allocated bytes, of what does not stay from step to step."""
    whole = row["measured"]["whole"]
    staying = estimate_memory(job_of(row["settings"])).pools.staying.middle
    return (whole["reserved_bytes"] - staying) / (whole["allocated_bytes"] - staying)


def outer(values: Sequence[float], *, step: float) -> Interval:
    """Return the least and the most of some values, rounded outwards to a multiple of `step`."""
    # A value that is a multiple already must not be moved by the division's last bit.
    low, high = min(values) / step + 1e-9, max(values) / step - 1e-9
    return Interval(math.floor(low) * step, math.ceil(high) * step)


def predicted(
    estimate: MemoryEstimate, constants: Constants, key: tuple[str, Kind]
) -> dict[str, Interval]:
    """Return an estimate's intervals as they are with other constants."""
    # Workspaces are alive at every moment, so they are in every peak.
    more = Interval(
        constants.workspaces.low - TODAY.workspaces.low,
        constants.workspaces.high - TODAY.workspaces.high,
    )
    staying = estimate.pools.staying + more
    return {
        "allocated": estimate.allocated + more,
        "reserved": staying * STAYING + estimate.pools.moving * constants.moving[key],
    }


def missed(row: Row) -> list[str]:
    """Say which peaks of a row are outside of what the planner says today, by its settings.

    The margin is given to allocated bytes alone.
    """
    settings = row["settings"]
    intervals = predicted(estimate_memory(job_of(settings)), TODAY, key_of(settings))
    found: list[str] = []
    for kind, interval in intervals.items():
        measured = row["measured"]["whole"][f"{kind}_bytes"]
        margin = MARGIN * measured if kind == "allocated" else 0.0
        if not interval.low - margin <= measured <= interval.high + margin:
            found.append(
                f"{row['cell']}: {measured / GIB:.3f} GiB {kind}, and the planner says "
                f"{interval.low / GIB:.3f} to {interval.high / GIB:.3f}"
            )
    return found


def copied_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the launches whose copies the profiler counted."""
    return [row for row in rows if row["status"] == "ok" and row["measured"].get("copied")]


def miscounted(row: Row) -> list[str]:
    """Say which way a launch copied other bytes over PCIe than the planner says today."""
    planned = offload.prediction(offload.job_of(row["settings"]))
    found: list[str] = []
    for way in ("to_device", "to_host"):
        copied, expected = row["measured"]["copied"][way]["bytes"], planned[f"{way}_bytes"]
        if abs(copied - expected) > COPIED_MARGIN * copied:
            found.append(
                f"{row['cell']}: {copied / GIB:.3f} GiB {way.replace('_', ' ')}, and the planner "
                f"says {expected / GIB:.3f}"
            )
    return found


def timed_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows whose steps have a planned time: full rows, all weights trained."""
    return [row for row in rows if row["status"] == "ok" and row["measured"]["mfu"] is not None]


def gpu_of(result: Result) -> Gpu:
    """Return the GPU of a result as the planner's table has it."""
    return gpu(result.about["environment"]["gpus"][0]["name"])


def seconds(row: Row, on: Gpu) -> tuple[Interval, float]:
    """Return the planned seconds of a row's step, and the median of those that were measured."""
    planned = estimate_speed(speed.job_of(row["settings"]), on).step_seconds
    return planned, statistics.median(row["measured"]["step_seconds"])


def seconds_table(rows: Iterable[Row], on: Gpu) -> list[str]:
    lines = []
    for row in rows:
        planned, measured = seconds(row, on)
        share = f"{planned.middle / measured:.2f}"
        lines.append((row["cell"], f"{measured:.3f}", shown(planned), share))
    return table(("step", "measured s", "planned s", "middle of it over measured"), lines)


def lab_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of the speed lab that can be planned: the Trainer's and ours, full rows."""
    return [
        row
        for row in rows
        if row["status"] == "ok"
        and row["settings"]["kind"] in ("stock", "ours")
        and row["settings"]["data"] == "full"
    ]


def lab_job_of(settings: dict[str, Any]) -> PlannedJob:
    """Return the job of a variant of the speed lab as the planner takes it."""
    switches = SpeedArguments(**settings["speed"])
    return PlannedJob(
        model=shape_of(settings["model"], smoke=False),
        strategy=STRATEGIES["single"],
        gpus=1,
        batch=settings["rows"],
        sequence=settings["tokens"],
        accumulation=settings["micro_batches"],
        method=settings["method"],
        optimizer="adamw_fused",
        padded=False,
        chunked_loss=switches.chunked_loss,
        loss_chunk_tokens=switches.chunk_tokens if switches.chunked_loss else None,
        compile=bool(switches.compile_blocks),
        bf16_weights=switches.optimizer_state_dtype if switches.bf16_weights else None,
    )


def lab_planned(row: Row, on: Gpu) -> tuple[Interval, Interval, float]:
    """Return the planned bytes and seconds of a row of the lab, and the measured seconds."""
    job = lab_job_of(row["settings"])
    seconds = statistics.median(row["measured"]["step_seconds"])
    return estimate_memory(job).allocated, estimate_speed(job, on).step_seconds, seconds


def lab_table(rows: Iterable[Row], on: Gpu) -> list[str]:
    lines = []
    for row in rows:
        planned, steps, measured = lab_planned(row, on)
        allocated = row["measured"]["peak_allocated_bytes"]
        error = beyond((round(planned.low), round(planned.high)), allocated) / allocated
        share = f"{steps.middle / measured:.2f}"
        seconds = (f"{measured:.3f}", shown(steps), share)
        lines.append((row["cell"], f"{allocated / GIB:.2f}", f"{error:+.2%}", *seconds))
    header = ["variant", "allocated GiB", "outside of plan", "step s", "planned s", "middle of it"]
    return table(header, lines)


def constants_table(by_allocator: dict[str, list[Row]], fitted: Constants) -> list[str]:
    rows = [row for found in by_allocator.values() if enough(found) for row in found]
    lines = []
    for name, found in by_allocator.items():
        if not enough(found):
            lines.append((NAMES[name], "", "too few rows", "", len(found)))
            continue
        for key in TODAY.moving:
            ratios = [ratio(row) for row in found if key_of(row["settings"]) == key]
            if ratios:
                names = f"{NAMES[name]}, {key[1]}"
                lines.append(_line(names, TODAY.moving[key], fitted.moving[key], ratios))
    for name, today, new, key in (
        ("WORKSPACES, MiB", WORKSPACES, fitted.workspaces, "workspaces_bytes"),
        ("CONTEXT, MiB", CONTEXT, fitted.context, "outside_bytes"),
    ):
        values = [row["measured"][key] / MIB for row in rows]
        lines.append(_line(name, today.times(1 / MIB), new.times(1 / MIB), values))
    return table(("constant", "today", "fitted", "median", "rows"), lines)


def _line(
    name: str, today: Interval, fitted: Interval, values: Sequence[float]
) -> tuple[object, ...]:
    middle = statistics.median(values)
    return name, shown(today), shown(fitted), f"{middle:.2f}", len(values)


def shown(interval: Interval) -> str:
    return f"{interval.low:.2f} to {interval.high:.2f}"


def residuals(rows: Sequence[Row], fitted: Constants) -> list[str]:
    """Return a table of how far each peak is outside of the planner's interval, as a share."""
    lines = []
    for row in rows:
        estimate = estimate_memory(job_of(row["settings"]))
        key = key_of(row["settings"])
        line = [f"{described(row['settings'])}, {key[0]}"]
        for kind in ("allocated", "reserved"):
            measured = row["measured"]["whole"][f"{kind}_bytes"]
            line.append(f"{measured / GIB:.2f}")
            for constants in (TODAY, fitted):
                if key not in constants.moving:
                    line.append("")  # too few rows to fit it to
                    continue
                interval = predicted(estimate, constants, key)[kind]
                error = beyond((round(interval.low), round(interval.high)), measured) / measured
                line.append(f"{error:+.2%}" if error else "0")
        lines.append(line)
    header = ["job", "allocated GiB", "today", "fitted", "reserved GiB", "today", "fitted"]
    return table(header, lines)


if __name__ == "__main__":
    main()
