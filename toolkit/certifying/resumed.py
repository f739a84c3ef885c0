"""Resumed: a run that goes on from a checkpoint of the script, against the run that went on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Final

from toolkit.certifying.subject import Finding, Subject, broken, holds, not_judged
from toolkit.records.saves import Saves, State, Tensor

Pair = tuple[int, int, State, State]

ROUNDING: Final = 1e-6
"""Relative difference of rates and norms that were stored and read back."""

SHARE: Final = 0.05
"""Difference of weights, relative to the update of a step, that other kernels may make."""

LOSSES: Final = 1e-3
"""Relative difference of losses that other kernels may make."""

ADVICE: Final = (
    "Save and load model, optimizer, scheduler and loader together: Trainer's checkpoints, or "
    "accelerator.save_state and load_state with all of them prepared"
)


def resumes(subject: Subject) -> Finding:
    """Find a script that can't go on from its own checkpoint."""
    if subject.resume_failed:
        return broken(f"a run from its own checkpoint fails: {subject.resume_failed}", ADVICE)
    if not subject.resumed:
        return not_judged(subject.no_resume)
    first, states = subject.resumed[0]["first"], subject.resumed[0]["states"]
    if len(states) < 2:
        return broken(f"a run from the checkpoint of step {first} makes no step", ADVICE)
    return holds(f"{len(states) - 1} steps from the checkpoint of step {first}")


def pairs(first_run: Sequence[Saves], other: Sequence[Saves]) -> Iterator[Pair]:
    """Yield step, rank, the state of the first run, and that of another or a resumed one."""
    of_rank = {one["rank"]: one for one in first_run}
    for theirs in other:
        ours, first = of_rank[theirs["rank"]], theirs["first"]
        states = zip(ours["states"][first:], theirs["states"], strict=False)
        for step, (before, after) in enumerate(states, first):
            yield step, ours["rank"], before, after


def loaded(subject: Subject) -> Finding:
    """Find weights and moments that are not those of the checkpoint's step."""
    every = pairs(subject.saves, subject.resumed)
    found = [pair for pair in every if pair[0] == subject.resumed[0]["first"]]
    if not found:
        return not_judged(subject.no_resume)
    for step, rank, ours, theirs in found:
        initial = subject.saves[0]["states"][0]["weights"]
        known = initial | ours["weights"]
        weights = theirs["weights"].items()
        other = [name for name, tensor in weights if tensor["digests"] != known[name]["digests"]]
        words = f"not those of step {step} after loading"
        if other:
            old = [n for n in other if theirs["weights"][n]["digests"] == initial[n]["digests"]]
            words += f"; {len(old)} are as they were before the training" if old else ""
            return broken(
                f"{len(other)} of {len(weights)} weights, the first is {other[0]}, are {words}",
                ADVICE,
            )
        sizes = [*zip_longest(ours["sizes"], theirs["sizes"])]
        gone = [pair for pair in sizes if None in pair or not _is_close(*pair)]
        if gone and ours["moments"] != theirs["moments"]:
            return broken(
                f"on rank {rank}, {len(gone)} of {len(sizes)} tensors of the optimizer's state are "
                f"{words}{'' if theirs['sizes'] else '; it begins anew'}",
                ADVICE,
            )
    return holds(f"weights and moments are those of step {found[0][0]}")


def _is_close(ours: float, theirs: float) -> bool:
    return math.isclose(ours, theirs, rel_tol=ROUNDING, abs_tol=1e-12)


def distance(ours: Tensor, theirs: Tensor, start: Tensor) -> float:
    """Return how far two tensors are from each other, relative to the second's update."""
    if ours["digests"] == theirs["digests"]:
        return 0.0
    if ours["shape"] != theirs["shape"]:
        return math.inf
    update = math.dist(theirs["values"], start["values"])
    return math.dist(ours["values"], theirs["values"]) / max(update, 1e-12)


def are_close(ours: Sequence[float], theirs: Sequence[float], within: float) -> bool:
    """Say whether losses differ by no more than a part of them."""
    return len(ours) == len(theirs) and all(
        math.isclose(one, other, rel_tol=within) for one, other in zip(ours, theirs, strict=True)
    )


def goes_on(subject: Subject) -> Finding:
    """Find the first difference of the steps after a checkpoint."""
    every = pairs(subject.saves, subject.resumed)
    after = sorted(
        (pair for pair in every if pair[0] > subject.resumed[0]["first"]),
        key=lambda pair: pair[:2],
    )
    if not after:
        return not_judged(subject.no_resume)
    known = subject.saves[0]["states"]
    for step, rank, ours, theirs in after:
        start = known[0]["weights"] | known[step - 1]["weights"]
        gaps = {
            name: distance(tensor, ours["weights"][name], start[name])
            for name, tensor in theirs["weights"].items()
        }
        worst = max(gaps, key=lambda name: gaps[name], default="")
        problem = ""
        if ours["batches"] != theirs["batches"]:
            problem = f"rank {rank} reads other rows"
        elif not _is_close(ours["rate"] or 0.0, theirs["rate"] or 0.0):
            problem = f"the learning rate is {theirs['rate']:.6g}, and was {ours['rate']:.6g}"
        elif not are_close(ours["losses"], theirs["losses"], LOSSES):
            problem = f"rank {rank} has losses of {theirs['losses']}, and had {ours['losses']}"
        elif worst and gaps[worst] > SHARE:
            problem = f"{worst} is {gaps[worst]:.1%} of its update off"
        if problem:
            return broken(f"in step {step}, {problem}", ADVICE)
    return holds(
        f"rows, rates, losses and weights of steps {after[0][0]} to {after[-1][0]} are those of "
        "the run that went on"
    )


def second_save(subject: Subject) -> Finding:
    """Find files that change when a checkpoint is saved right after it was loaded."""
    made = next((one["second"] for one in subject.resumed if one["second"] is not None), None)
    if made is None:
        words = "the script loads its checkpoint by other calls than load_state or a Trainer's"
        return not_judged(words if subject.resumed else subject.no_resume)
    if made:
        return broken(
            f"saved again right after it was loaded, {len(made)} files are others, the first is "
            f"{made[0]}",
            "What they hold is not restored: a run that is ended twice goes on from a wrong place",
        )
    return holds("saved again right after it was loaded, it has the same states in its files")


def cut_off(subject: Subject) -> Finding:
    """Find a run that trains on from a checkpoint of which a part is missing."""
    if not subject.cuts:
        return not_judged(subject.no_resume)
    initial = subject.saves[0]["states"][0]["weights"]
    said: list[str] = []
    for cut in subject.cuts:
        states = cut.saves[0]["states"] if cut.saves and not cut.saves[0]["rank"] else []
        if len(states) < 2:
            said.append(f"{cut.words}: refused, {cut.reason.partition('. ')[0] or 'no step made'}")
        elif all(t["digests"] == initial[n]["digests"] for n, t in states[0]["weights"].items()):
            said.append(f"{cut.words}: passed over, the training begins anew")
        else:
            return broken(
                f"{cut.words}: the run trains on from it in silence",
                "Write a mark when a checkpoint is whole, and refuse one without it; load every "
                "file of it, or none",
            )
    return holds("; ".join(said))
