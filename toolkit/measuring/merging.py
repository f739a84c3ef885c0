"""Merge the measurements of all ranks into the measured part of one record.

A value whose `Fact` names a `merge` is merged by it (`records.fields`). Values that depend on
several fields, or on lists by step, are merged here.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from toolkit.jobs.terms import ring_factor
from toolkit.measuring import gradients, machines, traffic
from toolkit.measuring.clock import PHASES
from toolkit.records.fields import (
    ServerExchange,
    ServerLoad,
    fields_of,
    spread_of,
    unmeasured,
    value_at,
)
from toolkit.records.record import Record

STATES = ("parameters_bytes", "gradients_bytes", "optimizer_bytes")
"""The memory that a parameter server and its workers are compared by."""

WARMUP_STEPS = 2
"""Steps before timing starts: the first step of a shape pays for kernels and allocations."""


def merge(
    ranks: list[dict[str, Any]], *, throughput_steps: int, probed: Sequence[int]
) -> dict[str, Any]:
    """Merge the `Recorder` measurements of each rank, in rank order.

    Args:
        throughput_steps: Number of last steps on packed rows, which are only for timing.
        probed: Steps that carried ledgers, from 1: they are slower, and not timed.
    """
    first, distinct = ranks[0], _with_distinct_rows(ranks)
    count = len(first["losses"]) - throughput_steps
    losses = [statistics.fmean(values) for values in _by_step(ranks, "losses")]
    not_measured: dict[str, str] = {}
    ids = [rank["sample_ids"][:count] for rank in distinct]
    if any(step is None for rank in ids for step in rank):
        not_measured["sample_ids"] = "the data set has no sample_id column"
    if all(norm is None for norm in first["grad_norms"]):
        not_measured["grad_norms"] = "nothing asked for the gradient norm"
    gradient_norms = gradients.merged([rank["gradients"] for rank in ranks])
    if gradient_norms is None:
        not_measured["gradients"] = gradients.NO_STEP
    peaks = [rank["peak"] for rank in ranks]
    if None in peaks:
        reasons = [rank["no_peak"] for rank in ranks if rank["no_peak"]]
        not_measured["peak"] = reasons[0] if reasons else traffic.NOT_COUNTED
    exchange = first["server_exchange"]
    counted = traffic.merged(
        [rank["traffic"] for rank in ranks],
        server=None if exchange is None else exchange["rank"],
        stages=[rank["traffic_group"] for rank in ranks],
    )
    if counted is None:
        not_measured["traffic"] = traffic.NOT_COUNTED
    values = unmeasured() | _declared(ranks, not_measured)
    values |= _times(ranks, distinct, throughput_steps, probed, values["warm_up"], not_measured)
    return values | {
        "num_processes": len(ranks),
        "machines": machines.of_ranks(ranks),
        "data_parallel_size": len({rank["data_parallel_rank"] for rank in ranks}),
        "losses": losses[:count],
        # Every rank has the norm over all of them.
        "grad_norms": first["grad_norms"][:count],
        "gradients": gradient_norms,
        "learning_rates": first["learning_rates"][:count],
        "skipped_steps": [step for step in first["skipped"] if step <= count],
        "sample_ids": None
        if "sample_ids" in not_measured
        else [list(step) for step in zip(*ids, strict=True)],
        "final_loss": losses[count - 1] if count else None,
        "per_rank": [
            {key: rank[key] for key in ("rank", "memory", "device", "seconds", "peak")}
            for rank in ranks
        ],
        "peak": None if None in peaks else max(peaks, key=lambda peak: peak["total_bytes"]),
        "traffic": counted,
        "pipeline": first["pipeline"],
        "server": None if counted is None or exchange is None else _server_load(ranks),
        "not_measured": not_measured,
    }


def _declared(ranks: list[dict[str, Any]], not_measured: dict[str, str]) -> dict[str, Any]:
    """Return every value whose declaration names a merge; reasons go into `not_measured`."""
    merged: dict[str, Any] = {}
    for path, fact in fields_of(Record):
        if fact.merge is None:
            continue
        known = [value for rank in ranks if (value := value_at(rank, path)) is not None]
        if fact.missing is not None and len(known) < len(ranks):
            not_measured[path] = fact.missing
            known = []
        *around, name = path.split(".")
        place = merged
        for part in around:
            place = place.setdefault(part, {})
        place[name] = fact.merge(known) if known else None
    return merged


def _with_distinct_rows(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one rank of each group that shares layers, so that each row counts once.

    All ranks, if the ranks of a group did not train the same rows.
    """
    groups: dict[int, list[dict[str, Any]]] = {}
    for rank in ranks:
        groups.setdefault(rank["data_parallel_rank"], []).append(rank)
    alike = all(
        [(r["sample_ids"], r["tokens"]) for r in group].count(
            (group[0]["sample_ids"], group[0]["tokens"])
        )
        == len(group)
        for group in groups.values()
    )
    return [group[0] for group in groups.values()] if alike else ranks


def _times(
    ranks: list[dict[str, Any]],
    distinct: list[dict[str, Any]],
    throughput_steps: int,
    probed: Sequence[int],
    warm_up: dict[str, Any],
    not_measured: dict[str, str],
) -> dict[str, Any]:
    """Return speeds and times of the steps; reasons for the missing go into `not_measured`.

    `warm_up` holds the facts of the warm-up except those of the steps.
    """
    phases = list(_by_step(ranks, "phases"))
    # Ranks wait for each other within a step: the slowest one's clock is that of all.
    seconds = [max(sum(rank.values()) for rank in step) for step in phases]
    tokens = [sum(values) for values in _by_step(distinct, "tokens")]
    packed_from = len(seconds) - throughput_steps if throughput_steps else 0
    after = range(packed_from + WARMUP_STEPS, len(seconds))
    timed = [step for step in after if step + 1 not in probed]
    speeds: dict[str, float | None] = dict.fromkeys(
        ("tokens_per_second", "supervised_tokens_per_second")
    )
    if throughput_steps > WARMUP_STEPS:
        # Total over total: a mean of rates would let one short step outweigh a long one.
        taken = sum(seconds[step] for step in after)
        speeds["tokens_per_second"] = sum(tokens[step] for step in after) / taken
        supervised = list(_by_step(distinct, "supervised"))
        counts = [count for step in after for count in supervised[step]]
        if None in counts:
            not_measured["supervised_tokens_per_second"] = "the batches have no labels to count"
        else:
            speeds["supervised_tokens_per_second"] = sum(counts) / taken
    else:
        too_few = (
            f"read from packed rows after {WARMUP_STEPS} warm-up steps: "
            f"pass --throughput_steps {WARMUP_STEPS + 1} or more"
        )
        not_measured |= dict.fromkeys(speeds, too_few)
    if not timed:
        too_short = f"no step is left after {WARMUP_STEPS} warm-up steps and the probe"
        not_measured |= dict.fromkeys(("step_seconds", "phases"), too_short)
    return speeds | {
        "step_seconds": spread_of([seconds[step] for step in timed]),
        "timed_seconds": [seconds[step] for step in timed],
        "phases": {
            phase: spread_of([statistics.fmean(r[phase] for r in phases[step]) for step in timed])
            for phase in PHASES
        }
        if timed
        else None,
        "first_step_seconds": seconds[0] if seconds else None,
        "warm_up": warm_up
        | {"cache_seconds": None, "first_step_seconds": seconds[0], "steps": WARMUP_STEPS}
        if seconds
        else None,
    }


def _by_step(ranks: list[dict[str, Any]], name: str) -> Iterator[tuple[Any, ...]]:
    """Yield every rank's value of each step."""
    return zip(*(rank[name] for rank in ranks), strict=True)


def _server_load(ranks: Sequence[dict[str, Any]]) -> ServerLoad:
    """Return the load of a parameter server, beside that of a worker and of an all-reduce."""
    exchange: ServerExchange = ranks[0]["server_exchange"]
    server = ranks[exchange["rank"]]
    workers = [rank for rank in ranks if rank is not server]
    return ServerLoad(
        rank=exchange["rank"],
        workers=exchange["workers"],
        received_bytes=_moved(server, "receive", "gradients"),
        sent_bytes=_moved(server, "send", "parameters"),
        expected_bytes=exchange["workers"] * exchange["pushed_bytes"],
        worker_sent_bytes=max(_moved(rank, "send", "gradients") for rank in workers),
        worker_received_bytes=max(_moved(rank, "receive", "parameters") for rank in workers),
        all_reduce_bytes=exchange["pushed_bytes"] * ring_factor("all_reduce", len(ranks)),
        states_bytes=_state_bytes(server),
        buffer_bytes=server["server_exchange"]["buffer_bytes"],
        worker_states_bytes=max(map(_state_bytes, workers)),
    )


def _moved(rank: dict[str, Any], kind: Literal["send", "receive"], purpose: str) -> int:
    return sum(
        calls["payload_bytes"]
        for calls in rank["traffic"]["collectives"]
        if (calls["kind"], calls["purpose"]) == (kind, purpose)
    )


def _state_bytes(rank: dict[str, Any]) -> int:
    return sum(rank["memory"][name] for name in STATES)
