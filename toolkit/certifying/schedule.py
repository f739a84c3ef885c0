"""Schedule and log: the learning rate by optimizer steps, and what the log says of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from toolkit.certifying.subject import Finding, Subject, broken, holds, not_judged, note, of_step
from toolkit.comparing.bisect.rows import step_loss_of
from toolkit.records.evidence import Evidence

HALVED = 1.6
"""Factor from which two epochs are no longer the same."""

SCHEDULER = "one for each process"
"""Words of a note of the run on a scheduler that goes too fast."""


def rates(subject: Subject) -> Finding:
    """Find a learning rate other than that of one process, or a scheduler that runs ahead."""
    ahead = [line for line in subject.notes if SCHEDULER in line]
    ours = subject.many[0]["rates"]
    if not ours:
        return not_judged("no optimizer step was seen")
    if not subject.one:
        return not_judged(subject.no_bisection or "there is no run of one process")
    theirs = subject.one[0]["rates"]
    shown = ", ".join(f"{rate:.4g}" for rate in ours)
    # A prepared scheduler goes on once for each process, and a script may stretch its length by
    # their number, which is 1 in the other run.
    stretched = ours[:: len(subject.many)] if subject.many[0]["prepared_schedule"] else []
    if len(stretched) > 1 and _first_apart(stretched, theirs) is None:
        theirs = ours
    step = _first_apart(ours, theirs)
    if step is not None:
        own, other = ours[step - 1], theirs[step - 1]
        return broken(
            f"in step {step} the rate is {own:.6g}, and {other:.6g} in one process",
            "Count the steps of the schedule from the prepared loader, in optimizer steps",
        )
    if ahead:
        return note(ahead[0], "See that its length is counted in the steps of all processes")
    return holds(f"{shown} in steps 1 to {len(ours)}, as in one process")


def _first_apart(ours: Sequence[float], theirs: Sequence[float]) -> int | None:
    """Return the first step, from 1, with another rate; None where there is none."""
    for step, pair in enumerate(zip(ours, theirs, strict=False), 1):
        if not math.isclose(*pair, rel_tol=0.05, abs_tol=1e-12):
            return step
    return None


@of_step
def logged_loss(subject: Subject, evidence: Evidence) -> Finding:
    """Hold the loss that a Trainer logs against the mean over the tokens of all ranks."""
    logged = [log for log in subject.many[0]["logged"] if "loss" in log]
    first = next((log for log in logged if log["step"] == evidence["step"]), None)
    if first is None:
        return not_judged("nothing that a Trainer logs of this step was seen")
    rows = [row for of_rank in evidence["ranks"] for batch in of_rank for row in batch["rows"]]
    tokens = sum(row["supervised"] for row in rows)
    mean = sum(row["loss"] or 0.0 for row in rows) / max(1, tokens)
    meant = f"the mean over the {tokens:,} tokens of all ranks"
    if not rows or any(row["loss"] is None for row in rows):  # a loss of the script's own
        found = step_loss_of(evidence)
        if found is None:
            return not_judged("the model gave no logits, or no labels (B, T)")
        mean, meant = found, "what backward began with, as the mean over all ranks,"
    if not math.isclose(first["loss"], mean, rel_tol=1e-2, abs_tol=1e-4):
        return broken(
            f"step {evidence['step']} is logged with a loss of {first['loss']:.4f}; {meant} is "
            f"{mean:.4f}",
            "Look how compute_loss divides, and what is averaged over the ranks",
        )
    return holds(f"{first['loss']:.4f} is logged; {meant} is {mean:.4f}")


@of_step
def clipping(subject: Subject, evidence: Evidence) -> Finding:
    """Find a norm that clips and is not that of the gradients."""
    found, norm = evidence["clipping"], evidence["gradient_norm"]
    if found["limit"] is None:
        return not_judged("the script does not clip")
    alone = None if subject.bisection is None else subject.bisection.pair.reference.evidence
    if alone is not None and not alone["clipping"]["limit"] and found["limit"]:
        return note(
            f"DeepSpeed clips at {found['limit']:g}, and the script does not",
            "See that gradient_clipping in DeepSpeed's file is meant: auto is 1.0 in a loop",
        )
    if alone is not None and alone["clipping"]["limit"] != found["limit"]:
        return broken(
            f"the config clips at {found['limit']:g}, the script at {alone['clipping']['limit']:g}",
            "Write the script's number into the config: gradient_clipping in DeepSpeed's file",
        )
    if found["norm"] is None or not norm:
        return not_judged("no norm was computed")
    if abs(found["norm"] / norm - 1) > 1e-2:
        return broken(
            f"clipping takes {found['norm']:.4g} for the gradients' norm, which is {norm:.4g}",
            "Clip by accelerator.clip_grad_norm_, which knows what each rank holds",
        )
    logged = [log["grad_norm"] for log in subject.many[0]["logged"] if "grad_norm" in log]
    if logged and abs(logged[0] / norm - 1) > 2e-2:
        return broken(
            f"the first norm that is logged is {logged[0]:.4g}, that of all ranks is {norm:.4g}",
            "Log the norm that clipping returns",
        )
    return holds(f"limit {found['limit']:g}, norm {found['norm']:.4g}")


def epochs(subject: Subject) -> Finding:
    """Hold the epoch that a Trainer logs against that of one process after the same rows."""
    if subject.many[0]["trainer"] == "ToolkitTrainer":
        return not_judged("toolkit.train counts epochs by itself, also in one process for many")
    ours, theirs = (
        {log["step"]: log["epoch"] for log in of[0]["logged"] if log.get("epoch")} if of else {}
        for of in (subject.many, subject.one)
    )
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        return not_judged("a Trainer logs no epoch, or there is no run of one process")
    step = both[-1]
    # A last batch that is not whole counts as one, so that lengths differ a little.
    if not 1 / HALVED < ours[step] / theirs[step] < HALVED:
        return note(
            f"step {step} is logged as epoch {ours[step]:.4g}, and as {theirs[step]:.4g} in one "
            "process that reads as many rows",
            "Give each rank the whole data set: the Trainer splits it by itself",
        )
    return holds(f"{ours[step]:.4g} after step {step}, and {theirs[step]:.4g} in one process")
