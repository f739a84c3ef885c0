"""Resumed: a run that goes on from a checkpoint of the script, against the run that went on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import zip_longest
from typing import Final

from toolkit.certifying.subject import Finding, Subject, broken, holds, not_judged
from toolkit.records.saves import State, Tensor

ROUNDING: Final = 1e-6
"""Relative difference of rates and norms that were stored and read back."""

SHARE: Final = 0.05
"""Difference of weights, relative to the update of a step, that other kernels may make."""

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


def _pairs(subject: Subject) -> Iterator[tuple[int, int, State, State]]:
    """Yield step, rank, the state of the run that went on, and that of the resumed one."""
    of_rank = {one["rank"]: one for one in subject.saves}
    for theirs in subject.resumed:
        ours, first = of_rank[theirs["rank"]], theirs["first"]
        pairs = zip(ours["states"][first:], theirs["states"], strict=False)
        for step, (before, after) in enumerate(pairs, first):
            yield step, ours["rank"], before, after


def loaded(subject: Subject) -> Finding:
    """Find weights and moments that are not those of the checkpoint's step."""
    pairs = [pair for pair in _pairs(subject) if pair[0] == subject.resumed[0]["first"]]
    if not pairs:
        return not_judged(subject.no_resume)
    for step, rank, ours, theirs in pairs:
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
    return holds(f"weights and moments are those of step {pairs[0][0]}")


def _is_close(ours: float, theirs: float) -> bool:
    return math.isclose(ours, theirs, rel_tol=ROUNDING, abs_tol=1e-12)


def _distance(ours: Tensor, theirs: Tensor, start: Tensor) -> float:
    """Return how far two tensors are from each other, relative to the second's update."""
    if ours["digests"] == theirs["digests"]:
        return 0.0
    if ours["shape"] != theirs["shape"]:
        return math.inf
    update = math.dist(theirs["values"], start["values"])
    return math.dist(ours["values"], theirs["values"]) / max(update, 1e-12)


def goes_on(subject: Subject) -> Finding:
    """Find the first difference of the steps after a checkpoint."""
    after = sorted(
        (pair for pair in _pairs(subject) if pair[0] > subject.resumed[0]["first"]),
        key=lambda pair: pair[:2],
    )
    if not after:
        return not_judged(subject.no_resume)
    known = subject.saves[0]["states"]
    for step, rank, ours, theirs in after:
        start = known[0]["weights"] | known[step - 1]["weights"]
        gaps = {
            name: _distance(tensor, ours["weights"][name], start[name])
            for name, tensor in theirs["weights"].items()
        }
        worst = max(gaps, key=lambda name: gaps[name], default="")
        losses = zip(ours["losses"], theirs["losses"], strict=False)
        problem = ""
        if ours["batches"] != theirs["batches"]:
            problem = f"rank {rank} reads other rows"
        elif not _is_close(ours["rate"] or 0.0, theirs["rate"] or 0.0):
            problem = f"the learning rate is {theirs['rate']:.6g}, and was {ours['rate']:.6g}"
        elif not all(math.isclose(one, other, rel_tol=1e-3) for one, other in losses):
            problem = f"rank {rank} has losses of {theirs['losses']}, and had {ours['losses']}"
        elif worst and gaps[worst] > SHARE:
            problem = f"{worst} is {gaps[worst]:.1%} of its update off"
        if problem:
            return broken(f"in step {step}, {problem}", ADVICE)
    return holds(
        f"rows, rates, losses and weights of steps {after[0][0]} to {after[-1][0]} are those of "
        "the run that went on"
    )
