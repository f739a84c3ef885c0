"""The collectives of this rank, from torch's flight recorder.

It counts those of gloo and NCCL by default (2,000 of them, `TORCH_FR_BUFFER_SIZE`), and can be read
by one thread while another waits in one. torch 2.13 has no public function for it: the names below
are read here alone, and tests/engines/test_flight_recorder.py fails when they change. gloo records
no send and no receive.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from toolkit.launching.hang import Group
from toolkit.launching.watchdog import Collectives

KEPT: Final = 20
"""Last collectives of a group in a report."""


def completed() -> int:
    """Return the number of collectives of this rank that are over, in all groups."""
    return sum(
        max(0, int(status["last_completed_collective"]))
        for dump in _dumps(collectives=False)
        for status in dump.get("pg_status", {}).values()
    )


def groups() -> list[Group]:
    """Return the collectives that this rank has entered, by process group."""
    groups: list[Group] = []
    for dump in _dumps(collectives=True):
        by_group: dict[str, list[Mapping[str, Any]]] = {}
        for entry in dump.get("entries", []):
            entries = by_group.setdefault(str(entry["process_group"][0]), [])
            if entries and entries[-1]["pg_id"] != entry["pg_id"]:
                entries.clear()  # of a group of the same name that was destroyed
            if not entry["is_p2p"]:
                entries.append(entry)
        for name, entries in by_group.items():
            if not entries:
                continue
            status = dump.get("pg_status", {}).get(str(entries[-1]["pg_id"]), {})
            groups.append(
                _group(name, entries, over=int(status.get("last_completed_collective", 0)))
            )
    return groups


def _group(name: str, entries: list[Mapping[str, Any]], *, over: int) -> Group:
    """Return a group; gloo keeps one number for all operations, of which the last one is over."""
    done = [
        entry["collective_seq_id"]
        for entry in entries
        if entry["state"] == "completed" or entry["op_id"] <= over
    ]
    return Group(
        name=name,
        ranks=_ranks(name),
        entered=max(entry["collective_seq_id"] for entry in entries),
        completed=max(done, default=0),
        last={entry["collective_seq_id"]: _named(entry) for entry in entries[-KEPT:]},
    )


def _named(entry: Mapping[str, Any]) -> str:
    """Name a collective, as `all_reduce of Float [64, 64]`."""
    operation = str(entry["profiling_name"]).rpartition(":")[2]
    tensors = [
        f"{dtype} {sizes}"
        for dtype, sizes in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    ]
    return f"{operation} of {', '.join(tensors)}" if tensors else operation


def _ranks(name: str) -> list[int]:
    names: Any = dist.distributed_c10d
    try:
        return dist.get_process_group_ranks(names._resolve_process_group(name))
    except (RuntimeError, ValueError):
        return []


def _dumps(*, collectives: bool) -> list[dict[str, Any]]:
    """Return what gloo's recorder holds, and NCCL's where torch is built with it."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    readers = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    return [
        json.loads(getattr(c10d, name)(collectives, False))
        for name in readers
        if hasattr(c10d, name)
    ]


COLLECTIVES: Final = Collectives(completed=completed, groups=groups)
