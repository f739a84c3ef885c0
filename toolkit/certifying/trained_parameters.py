"""Who is trained: parameters that should move and do, and those that should not and don't."""

from __future__ import annotations

from collections import Counter

from toolkit.certifying.subject import Finding, Subject, broken, holds, not_judged, note, of_step
from toolkit.comparing.weights import read_tensors
from toolkit.records.evidence import GRADIENTS_FILE, Evidence

HEAVY = 0.99

ENGAGED = "what engaged is not what was asked"


def is_prepared(subject: Subject) -> Finding:
    """Find a model or an optimizer that the script did not prepare."""
    if not subject.many:
        return broken(
            next((line for line in subject.notes if "prepare" in line), "nothing was trained"),
            "Pass the model and the optimizer through Accelerator.prepare, or train by a Trainer",
        )
    words = f"{subject.many[0]['model']} and its optimizer were prepared"
    if any(seen["cut"] for seen in subject.many):
        return note(f"{words}; the script went on after its last step, and was cut")
    return holds(words)


def attested(subject: Subject) -> Finding:
    """Find settings that are not those of the config."""
    if ENGAGED in subject.refused:
        return broken(
            subject.refused.partition(ENGAGED)[2].strip(". "),
            "Let script and config ask for the same, and the optimizer hold every parameter",
        )
    line = next((line for line in subject.notes if line.startswith("attested")), "")
    return holds(line) if line else not_judged("the run ended before its first step was attested")


def trained_move(subject: Subject) -> Finding:
    """Find trained parameters that the steps left alone."""
    moved: dict[str, list[bool]] = {}
    steps = subject.many[0]["steps"]
    for seen in subject.many:
        for name, parameter in seen["parameters"].items():
            if parameter["trained"] and parameter["moved"] is not None and parameter["elements"]:
                # A run that is refused in its first step has not counted it, and half of an
                # adapter has a gradient of 0 in it.
                has_moved = parameter["moved"] or (not steps and bool(parameter["stepped"]))
                moved.setdefault(name, []).append(has_moved)
    if not steps and not any(any(of_ranks) for of_ranks in moved.values()):
        return not_judged("no optimizer step was seen")
    if not any(rate for seen in subject.many for rate in seen["rates"]):
        return not_judged("the learning rate was 0 in every step")
    still = [name for name, of_ranks in moved.items() if not any(of_ranks)]
    if still:
        return broken(
            f"{len(still)} of {len(moved)} trained parameters never moved in "
            f"{max(1, steps)} steps, the first is {still[0]}",
            "Make the optimizer after the model is changed, from the parameters that are prepared, "
            "and look whether the loss depends on them",
        )
    trained = {n: p for n, p in subject.many[0]["parameters"].items() if p["trained"]}
    if max(parameter["dims"] for parameter in trained.values()) < 2:
        elements = sum(parameter["elements"] for parameter in trained.values())
        every = sum(p["elements"] for p in subject.many[0]["parameters"].values())
        return note(
            f"only norms and biases are trained, {elements:,} of {every:,} weights, the first is "
            f"{next(iter(trained))}",
            "Look at the condition by which parameters are frozen",
        )
    return holds(f"all {len(moved)} trained parameters moved")


def frozen_stay(subject: Subject) -> Finding:
    """Find frozen parameters that changed."""
    frozen = {
        name: parameter["moved"]
        for seen in subject.many
        for name, parameter in seen["parameters"].items()
        if not parameter["trained"] and parameter["moved"] is not None
    }
    moved = [name for name, has_moved in frozen.items() if has_moved]
    if moved:
        return broken(
            f"{len(moved)} of {len(frozen)} frozen parameters changed, the first is {moved[0]}",
            "Look for what writes into them: weight decay of another optimizer, a tied tensor",
        )
    return holds(f"{len(frozen)} frozen parameters stayed" if frozen else "nothing is frozen")


@of_step
def optimizer_has_all(subject: Subject, evidence: Evidence) -> Finding:
    """Find trained parameters that the optimizer lacks, or has twice."""
    groups = evidence["optimizer"]["groups"]
    given = Counter(name for group in groups for name in group["parameters"] if name != "?")
    trained = [
        name
        for name, parameter in subject.many[0]["parameters"].items()
        if parameter["trained"] and parameter["elements"]
    ]
    if not given:
        return not_judged("the optimizer holds other tensors than the model's parameters")
    if kept := max(seen["kept_gradients"] for seen in subject.many):
        return broken(
            f"{kept} of {subject.many[0]['steps']} steps begin with gradients of the step before, "
            "which add up",
            "Call optimizer.zero_grad() in each step",
        )
    missing = [name for name in trained if name not in given]
    twice = [name for name, count in given.items() if count > 1]
    if missing or twice:
        words = [
            f"{len(names)} trained parameters are {problem}, the first is {names[0]}"
            for names, problem in (
                (missing, "in no group of the optimizer"),
                (twice, "in it more than once"),
            )
            if names
        ]
        return broken("; ".join(words), "Pass each parameter that requires a gradient once")
    return holds(f"each of {len(trained)} trained parameters once, in {len(groups)} groups")


def none_empty(subject: Subject) -> Finding:
    """Find trained parameters without an element."""
    parameters = subject.many[0]["parameters"]
    # Stages of a pipeline leave empty tensors where another rank has the numbers.
    empty = [
        name
        for name, parameter in parameters.items()
        if parameter["trained"]
        and not any(seen["parameters"].get(name, parameter)["elements"] for seen in subject.many)
    ]
    if empty:
        return broken(
            f"{len(empty)} trained parameters are empty, the first is {empty[0]}",
            "Load the model on every rank, and attach adapters before it is prepared",
        )
    return holds(f"{len(parameters)} parameters have numbers")


def one_model(subject: Subject) -> Finding:
    """Find ranks that have trained different models."""
    if subject.refused and ENGAGED not in subject.refused:
        return broken(subject.refused, "Every rank must train the same model")
    if len(subject.many) < 2:
        return not_judged("there is one rank")
    if not subject.is_rehearsal:
        return not_judged("the ranks compare what they trained in a rehearsal alone")
    return holds("what should be equal on all ranks is, to the last bit")


def training_mode(subject: Subject) -> Finding:
    """Find steps in evaluation mode."""
    evaluating = sum(seen["evaluating"] for seen in subject.many)
    forwards = sum(len(seen["rows"]) for seen in subject.many)
    rate = max(seen["dropout"] for seen in subject.many)
    if evaluating and rate:
        return broken(
            f"{evaluating} of {forwards} forwards with gradients ran in evaluation mode, without "
            f"the dropout of {rate:g}",
            "Call model.train() before training: from_pretrained leaves a model in evaluation mode",
        )
    if evaluating:
        return note(
            f"{evaluating} of {forwards} forwards with gradients ran in evaluation mode; the model "
            "has no dropout",
            "Call model.train() before training",
        )
    return holds(f"{forwards} forwards in training mode")


@of_step
def spread_norm(subject: Subject, evidence: Evidence) -> Finding:
    """Find one parameter that owns the norm of all gradients."""
    if not evidence["gradient_norm"]:
        return not_judged("no gradient was seen")
    squares = {
        name: sum(float((piece**2).sum()) for piece in tensor.pieces())
        for name, tensor in read_tensors(subject.folder / GRADIENTS_FILE).items()
    }
    name = max(squares, key=lambda one: squares[one])
    share = squares[name] / max(sum(squares.values()), 1e-300)
    if share > HEAVY and len(squares) > 1:
        return note(
            f"{name} has {share:.1%} of the squared norm of all gradients: clipping makes all "
            "other updates as small",
            "Look how its weights were initialised, and at the scale of its inputs",
        )
    return holds(f"the largest share of the squared norm is {share:.0%}, of {name}")
