"""Rows as the part `memory` of the GPU kit writes them, made by hand.

It makes `benchmarks/` importable, so it is imported before the kit.
"""

import sys

from places import ROOT

if str(ROOT / "benchmarks") not in sys.path:
    sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_kit_fit import TODAY, key_of, predicted
from kit.cells import Machine
from kit.memory import JOBS, cells, job_of, prediction
from kit.result import Result

from toolkit.planning.memory.estimate import estimate_memory

ALL = len(JOBS)
ABOUT = {
    "date": "2026-11-22",
    "command": "by hand",
    "device": "no device",
    "versions": "none",
    "toolkit": "none",
    "smoke": False,
}


def rows(*, ratios, workspaces, context, off_by=0, constants=TODAY, jobs=ALL):
    """Rows of a GPU whose allocator has known constants.

    Args:
        ratios: Reserved over allocated of what does not stay, by setting of the allocator: from the
            first job to the last, evenly.
        workspaces: Bytes, likewise.
        context: Bytes, likewise.
        off_by: Bytes that every job needs beyond the middle of what is predicted.
        constants: What the prediction has that they are off from.
        jobs: How many of the kit's.
    """
    made = []
    for cell in cells(Machine(gpus=1, smoke=False, out=ROOT)):
        allocator = cell.settings["allocator"]
        number = sum(row["settings"]["allocator"] == allocator for row in made)
        if allocator not in ratios or number == jobs:
            continue
        share = number / max(1, jobs - 1)
        estimate = estimate_memory(job_of(cell.settings))
        planned = predicted(estimate, constants, key_of(cell.settings))
        allocated = round(planned["allocated"].middle) + off_by
        staying = estimate.pools.staying.middle
        reserved = round(staying + (allocated - staying) * between(ratios[allocator], share))
        peaks = {
            "allocated_bytes": allocated,
            "active_bytes": allocated,
            "reserved_bytes": reserved,
        }
        made.append(
            {
                "part": "memory",
                "cell": cell.name,
                "status": "ok",
                "reason": None,
                "seconds": 1.0,
                "settings": cell.settings,
                "measured": {
                    "predicted": prediction(job_of(cell.settings)),
                    "steady": peaks,
                    "whole": dict(peaks),
                    "allocated_before_bytes": 0,
                    "allocator_retries": 0,
                    "workspaces_bytes": round(between(workspaces, share)),
                    "outside_bytes": round(between(context, share)),
                },
            }
        )
    return made


def between(ends, share):
    low, high = ends
    return low + share * (high - low)


def write(file, made, **about):
    result = Result(file=file, about=ABOUT | about, rows=made)
    result.write()
    return file
