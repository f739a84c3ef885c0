"""From what every rank recorded to the measured part of one record."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from toolkit.measuring import gradients, memory, traffic
from toolkit.measuring.clock import PHASES
from toolkit.records.results import spread_of

WARMUP_STEPS = 2
"""Steps before the clock counts: the first of a shape pays for kernels and allocations."""

REHEARSED_PEAK = "a rehearsal runs on the CPU, where the GPU's peak has no counterpart"


def merge(
    ranks: list[dict[str, Any]],
    *,
    throughput_steps: int,
    probed: Sequence[int],
    rehearsal: bool,
    steps_before: int = 0,
) -> dict[str, Any]:
    """Put what the ranks recorded together.

    Args:
        ranks: In their order.
        throughput_steps: How many of the last steps were packed rows, kept for the clock.
        probed: Steps that carried ledgers, from 1.
        rehearsal: Whether the ranks had no GPU.
        steps_before: Optimizer steps of the training that another run did, and recorded.
    """
    count = len(ranks[0]["losses"]) - throughput_steps
    losses = [statistics.fmean(values) for values in _by_step(ranks, "losses")]
    not_measured: dict[str, str] = {}
    ids = [r["sample_ids"][:count] for r in ranks]
    if any(step is None for rank in ids for step in rank):
        not_measured["sample_ids"] = "the data set has no sample_id column"
    if all(norm is None for norm in ranks[0]["grad_norms"]):
        not_measured["grad_norms"] = "nothing asked for the gradient norm"
    of_parameters = gradients.merged([rank["gradients"] for rank in ranks])
    if of_parameters is None:
        not_measured["gradients"] = gradients.NO_STEP
    peaks = [rank["peak"] for rank in ranks]
    if None in peaks:
        not_measured["peak"] = next(
            (why for r in ranks if (why := r["no_peak"])), traffic.NOT_COUNTED
        )
    counted = traffic.merged([rank["traffic"] for rank in ranks])
    if counted is None:
        not_measured["traffic"] = traffic.NOT_COUNTED
    return {
        "num_processes": len(ranks),
        "rehearsal": rehearsal,
        "first_step": steps_before + 1,
        "losses": losses[:count],
        "grad_norms": ranks[0]["grad_norms"][:count],
        "gradients": of_parameters,
        "learning_rates": ranks[0]["learning_rates"][:count],
        "skipped_steps": [step for step in ranks[0]["skipped"] if step <= count],
        "sample_ids": None
        if "sample_ids" in not_measured
        else [list(step) for step in zip(*ids, strict=True)],
        "final_loss": losses[count - 1] if count else None,
        **_times(ranks, throughput_steps, probed, not_measured),
        "memory": _most(ranks, not_measured),
        "per_rank": [
            {key: rank[key] for key in ("rank", "memory", "device", "seconds", "peak")}
            for rank in ranks
        ],
        "peak": None if None in peaks else max(peaks, key=lambda each: each["total_bytes"]),
        "traffic": counted,
        "not_measured": not_measured,
    }


def _most(ranks: list[dict[str, Any]], not_measured: dict[str, str]) -> dict[str, int | None]:
    """Bytes of each category on the rank that has most of it."""
    for key in memory.CATEGORIES:
        if any(rank["memory"][key] is None for rank in ranks):
            not_measured[f"memory.{key}"] = (
                REHEARSED_PEAK
                if key in memory.OF_THE_ALLOCATOR
                else "the run ended before its first step"
            )
    return {
        key: None if f"memory.{key}" in not_measured else max(rank["memory"][key] for rank in ranks)
        for key in memory.CATEGORIES
    }


def _times(
    ranks: list[dict[str, Any]],
    throughput_steps: int,
    probed: Sequence[int],
    not_measured: dict[str, str],
) -> dict[str, Any]:
    phases = list(_by_step(ranks, "phases"))
    # Ranks wait for each other within a step: the slowest one's clock is that of all.
    seconds = [max(sum(rank.values()) for rank in step) for step in phases]
    tokens = [sum(values) for values in _by_step(ranks, "tokens")]
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
        supervised = list(_by_step(ranks, "supervised"))
        counts = [count for step in after for count in supervised[step]]
        if None in counts:
            not_measured["supervised_tokens_per_second"] = "the batches have no labels to count"
        else:
            speeds["supervised_tokens_per_second"] = sum(counts) / taken
    else:
        for name in speeds:
            not_measured[name] = (
                f"read from packed rows after {WARMUP_STEPS} warm-up steps: "
                f"pass --throughput_steps {WARMUP_STEPS + 1} or more"
            )
    if not timed:
        too_short = f"no step is left after {WARMUP_STEPS} warm-up steps and the probe"
        not_measured |= dict.fromkeys(("step_seconds", "phases"), too_short)
    if ranks[0]["save_seconds"] is None:
        not_measured["save_seconds"] = "nothing was saved while the run was recorded"
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
        "warm_up": _warm_up(ranks, seconds),
        "save_seconds": ranks[0]["save_seconds"],
        "seconds": max(rank["seconds"] for rank in ranks),
    }


def _warm_up(ranks: list[dict[str, Any]], seconds: list[float]) -> dict[str, Any] | None:
    """Return the start of the rank that took longest."""
    if not seconds:
        return None
    found: dict[str, Any] = {}
    for name in ("start_seconds", "build_seconds", "compile_seconds"):
        known = [value for rank in ranks if (value := rank["warm_up"][name]) is not None]
        found[name] = max(known, default=None)
    return found | {"first_step_seconds": seconds[0], "steps": WARMUP_STEPS}


def _by_step(ranks: list[dict[str, Any]], what: str) -> Iterator[tuple[Any, ...]]:
    """Yield every rank's value of each step."""
    return zip(*(rank[what] for rank in ranks), strict=True)
