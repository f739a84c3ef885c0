"""Rows: each once, on one rank, in the same data set and order on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from toolkit.certifying.subject import Finding, Subject, broken, holds, not_judged, note

ONE_RANK = "there is one rank"


def same_data(subject: Subject) -> Finding:
    """Find ranks that hold another data set, or the same in another order."""
    known = [seen["data"] for seen in subject.many]
    if len(known) < 2:
        return not_judged(ONE_RANK)
    if any(data is None for data in known):
        return not_judged("the data set has no numbered rows that stay the same")
    other = [rank for rank, data in enumerate(known) if data != known[0]]
    if not other:
        return holds(f"the first {len(known[0] or ()) - 1} rows are equal on all ranks")
    rank = other[0]
    ours, theirs = known[0] or [], known[rank] or []
    if ours[0] != theirs[0]:
        words = f"rank {rank} has {theirs[0]:,} rows, rank 0 has {ours[0]:,}"
    elif sorted(ours) == sorted(theirs) or set(ours) & set(theirs):
        words = f"rank {rank} has the rows in another order than rank 0"
    else:
        words = f"rank {rank} has other rows than rank 0"
    return broken(
        f"{words}: Accelerate gives each rank every N-th batch of its own order, so that rows are "
        "read twice and others never",
        "Pass a seed to what shuffles or splits the data set, the same on every rank",
    )


def same_draws(subject: Subject) -> Finding:
    """Find ranks whose samplers draw other batches."""
    known = [seen["draws"] for seen in subject.many]
    if len(known) < 2:
        return not_judged(ONE_RANK)
    if all(seen["shard"] for seen in subject.many):
        return _disjoint([seen["shard"] or [] for seen in subject.many])
    if not all(known):
        return not_judged("the loader has no batch sampler that all ranks share")
    common = min(len(draws or ()) for draws in known)
    first = (known[0] or [])[:common]
    other = [rank for rank, draws in enumerate(known) if (draws or [])[:common] != first]
    if other:
        return broken(
            f"rank {other[0]} draws other batches than rank 0, though each takes its part of the "
            "same ones",
            "Leave the shuffling to a loader that Accelerator.prepare has seen, or seed it alike",
        )
    return holds(f"{common} batches are drawn alike on all ranks")


def _disjoint(shards: Sequence[Sequence[int]]) -> Finding:
    """Find rows that the distributed samplers of two ranks draw."""
    times = Counter(row for shard in shards for row in shard)
    often = [row for row, count in times.items() if count > 1]
    if len(often) < len(shards):  # fewer fill up the last batch
        return holds(f"the samplers of {len(shards)} ranks draw other rows each")
    return broken(
        f"the samplers of the ranks draw {len(often)} of {len(times):,} rows more than once: their "
        "orders differ, and other rows are never read",
        "Give DistributedSampler the same seed on every rank, or prepare a loader without one",
    )


def new_order(subject: Subject) -> Finding:
    """Find passes over the data that begin alike."""
    passes = subject.many[0]["passes"]
    if len(passes) < 2:
        return not_judged("a second pass over rows that are shuffled was not seen")
    if any(rows == passes[0] for rows in passes[1:]):
        return note(
            f"{len(passes)} passes over the data were begun, and more than one with the same rows",
            "Call set_epoch on the loader or the data set in each epoch: a stream that was "
            "shuffled once has the same order in each",
        )
    return holds(f"{len(passes)} passes over the data begin with other rows each")


def each_once(subject: Subject) -> Finding:
    """Find rows that are read on two ranks, or twice by one."""
    if len(subject.many) < 2:
        return not_judged(ONE_RANK)
    read = [[row for forward in seen["rows"] for row in forward] for seen in subject.many]
    if not all(read):
        return not_judged("the model was given no tokens (B, T)")
    times = Counter(row for of_rank in read for row in of_rank)
    alone = Counter(row for seen in subject.one for forward in seen["rows"] for row in forward)
    # The last batch of a pass is filled up from its first one, where batches would be uneven.
    begun = {row for of_rank in subject.many for row in of_rank["rows"][0]}
    filled = Counter(
        row
        for seen in subject.many
        for row in (seen["rows"][-1] if len(seen["rows"]) > 1 else ())
        if row in begun
    )
    often = {row: count for row, count in times.items() if count - filled[row] > max(1, alone[row])}
    if not often and (joined := next((s["joined"] for s in subject.many if s["joined"]), None)):
        return note(
            f"batches of {joined[0]} rows reach the model as {joined[1]}, without positions that "
            "begin again: they are joined, or rows are left out",
            "Look at what the collator returns: tensors of rows times tokens",
        )
    if not often:
        return holds(f"{times.total()} rows in {subject.many[0]['steps']} steps, none twice")
    row = next(iter(often))
    ranks = [rank for rank, of_rank in enumerate(read) if row in of_rank]
    where = f"on ranks {' and '.join(map(str, ranks))}" if len(ranks) > 1 else f"on rank {ranks[0]}"
    return broken(
        f"{len(often)} of {len(times)} rows are read more than once, the first {often[row]} times, "
        f"{where}",
        "Pass the loader through Accelerator.prepare once, and split a stream by rank",
    )


def workers_apart(subject: Subject) -> Finding:
    """Find workers of a loader that begin with the same random numbers."""
    drawn = {
        (seen["rank"], number, worker): states
        for seen in subject.many
        for number, worker, *states in seen["workers"]
    }
    if not drawn:
        return not_judged("the loaders have no workers")
    alike: dict[bool, str] = {}
    for (rank, number, worker), states in drawn.items():
        for other in ((rank, number, worker + 1), (rank + 1, number, worker)):
            same = [a == b for a, b in zip(states, drawn.get(other, ()), strict=False)]
            if any(same):
                kind = ("torch", "random", "numpy")[same.index(True)]
                words = f"worker {worker} of rank {rank} and worker {other[2]} of rank {other[0]}"
                alike.setdefault(other[0] == rank, f"{words} draw the same numbers of {kind}")
    if True in alike:
        advice = "Leave worker_init_fn out, or add the worker's id to the seed that it sets"
        return broken(alike[True], advice)
    if alike:
        advice = (
            "Fine unless rows are drawn or changed at random; else set_seed(device_specific=True)"
        )
        return note(alike[False], advice)
    return holds(f"{len(drawn)} times a worker began, each with random numbers of its own")
