"""The reports of all ranks of a script, compared when they leave, without a collective.

Ranks may step unevenly and leave at different times, so each leaves its `Report` in the store where
they met. Rank 0 judges; where it has left already, the last rank does.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from toolkit.measuring.guards import odd_ones_out
from toolkit.measuring.machines import Meeting

WAIT_SECONDS: Final = 5.0
"""Longest time that rank 0 waits for the reports of ranks that have not left yet.

A rank may wait for rank 0 in a collective, and learns only when it leaves that it won't come.
"""

LOOK_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """A trained parameter on one rank; other ranks may hold the same shard of it."""

    shard: list[int]
    after: int | None
    """A sum over its bits after the last step."""

    now: int | None
    """A sum over its bits at the end of the script."""

    steps: int
    optimizer: int | None
    """Index of the last optimizer that stepped it, in the report; None where none has."""

    is_prepared: bool
    """Whether an Accelerator prepared this optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerReport:
    """An optimizer that has stepped on one rank."""

    name: str
    steps: int
    tensors: int
    highest_rate: float
    has_changed: bool | None
    """Whether any of its tensors changed; None where that is not known."""

    is_of_no_model: bool
    """Whether it steps parameters, and none of them is of a prepared or wrapped model."""

    history: list[int]
    """A sum over its tensors after each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """A prepared or wrapped model, as one rank trained it."""

    name: str
    data_parallel_rank: int
    """Index of this rank among those that read rows of their own."""

    at_start: dict[str, int] | None
    tensors: dict[str, TensorReport]
    prepared_before: dict[str, TensorReport]
    """The same of parameters that a prepared optimizer stepped, and then one that was not."""

    added: list[str]
    """Stepped parameters that it got after it was wrapped."""

    rows: list[int]
    """A hash of all rows of each forward."""

    different_rows: int
    bypassed: int
    """Forwards that called the model inside past its wrapper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that one rank observed."""

    ended_well: bool
    models: list[ModelReport]
    optimizers: list[OptimizerReport]
    notes: list[str]

    @classmethod
    def from_json(cls, text: str) -> Report:
        content = json.loads(text)
        models = [
            ModelReport(
                **model | {name: _tensors(model[name]) for name in ("tensors", "prepared_before")}
            )
            for model in content["models"]
        ]
        optimizers = [OptimizerReport(**optimizer) for optimizer in content["optimizers"]]
        return cls(**content | {"models": models, "optimizers": optimizers})


FAILED: Final = Report(ended_well=False, models=[], optimizers=[], notes=[])
"""The report of a rank whose script failed, which compares nothing."""


def _tensors(content: dict[str, Any]) -> dict[str, TensorReport]:
    return {name: TensorReport(**tensor) for name, tensor in content.items()}


def exchange(report: Report, *, rank: int, ranks: int) -> list[Report] | None:
    """Leave this rank's report, and return those of all ranks if this one is to judge them.

    Rank 0 waits a while for the others, unless its script has failed.

    Returns:
        The reports in rank order, or None where another rank judges, a rank failed or left without
        a report, or the store cannot be reached.
    """
    if ranks == 1:
        return [report] if report.ended_well else None
    # torchelastic may start all ranks again, in the same store.
    meeting, prefix = Meeting(), f"observed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    meeting.put(f"{prefix}/{rank}", json.dumps(asdict(report)))
    until = time.monotonic() + WAIT_SECONDS * (rank == 0 and report.ended_well)
    while (texts := [meeting.get(f"{prefix}/{n}") for n in range(ranks)]) and None in texts:
        if time.monotonic() >= until:
            break
        time.sleep(LOOK_SECONDS)
    if rank == 0 and None in texts:
        # The word first, then another look: a rank that reports later finds the word, and judges.
        meeting.put(f"{prefix}/left", "")
        texts = [meeting.get(f"{prefix}/{n}") for n in range(ranks)]
    if None in texts or (rank != 0 and meeting.get(f"{prefix}/left") is None):
        return None
    reports = [Report.from_json(text) for text in texts if text is not None]
    return reports if all(r.ended_well for r in reports) else None


def refusals(reports: Sequence[Report]) -> list[str]:
    """Return a sentence for each reason to refuse the training of these ranks."""
    return [*_of_no_model(reports), *_parted(reports), *_unchanged(reports)]


def notes(reports: Sequence[Report]) -> list[str]:
    """Return sentences on unusual traits of the training that may be intended."""
    common = dict.fromkeys(note for report in reports for note in report.notes)
    return [*common, *_other_starts(reports), *_equal_rows(reports)]


def _of_no_model(reports: Sequence[Report]) -> Iterator[str]:
    if len(reports) < 2 or not any(report.models for report in reports):
        return
    for alike in _optimizers(reports):
        optimizer = alike[0]
        if not any(seen.is_of_no_model for seen in alike):
            continue
        yield (
            f"{optimizer.name} made {_times(optimizer.steps, 'step')} on "
            f"{_times(optimizer.tensors, 'parameter')} that no prepared model has: gradients of "
            "these are not averaged over the ranks. Pass their model and the optimizer through "
            "Accelerator.prepare, in one call"
        )


def _unchanged(reports: Sequence[Report]) -> Iterator[str]:
    """Name optimizers that changed nothing on any rank: one may hold nothing but padding."""
    for alike in _optimizers(reports):
        rate = max(optimizer.highest_rate for optimizer in alike)
        if rate > 0 and all(optimizer.has_changed is False for optimizer in alike):
            yield (
                f"{alike[0].name} made {_times(alike[0].steps, 'step')} at learning rates of up to "
                f"{rate:g}, and none of its {_times(alike[0].tensors, 'parameter')} changed. Look "
                "for labels that are all masked, for frozen parameters, and for an optimizer that "
                "was made before the model was wrapped and was not prepared with it"
            )


def _parted(reports: Sequence[Report]) -> Iterator[str]:
    for models in _models(reports):
        names = dict.fromkeys(n for model in models for n, t in model.tensors.items() if t.steps)
        parted = {name: ranks for name in names if (ranks := _parted_in(name, models, reports))}
        if not parted:
            continue
        first = next(iter(parted))
        yield (
            f"{parted[first]} parted from the others: {len(parted)} of {len(names)} trained "
            f"parameters of {models[0].name} that should be equal differ at the end, the first is "
            f"{first}. {_why(models, parted)}"
        )


def _parted_in(name: str, models: list[ModelReport], reports: Sequence[Report]) -> str:
    """Name the ranks whose shard of a parameter differs from most ranks with the same shard."""
    by_shard: dict[tuple[int, ...], dict[int, TensorReport]] = defaultdict(dict)
    for rank, model in enumerate(models):
        if name in model.tensors:
            by_shard[tuple(model.tensors[name].shard)][rank] = model.tensors[name]
    for latest in by_shard.values():
        held = latest
        if len({tensor.is_prepared for tensor in latest.values()}) > 1:
            # One rank trained on alone, with an optimizer of its own.
            held = {rank: models[rank].prepared_before.get(name, t) for rank, t in latest.items()}
        # Equal at the end: averaged after the last step. After it: changed since, to be saved.
        if len({tensor.now for tensor in held.values()}) == 1:
            continue
        sums = _after_common_step(held, reports)
        if len(set(sums.values())) > 1:
            return odd_ones_out(sums)
    return ""


def _after_common_step(
    held: dict[int, TensorReport], reports: Sequence[Report]
) -> dict[int, int | None]:
    """Return each rank's sum of a parameter, or of its optimizer, after the last common step."""
    fewest = min(tensor.steps for tensor in held.values())
    if max(tensor.steps for tensor in held.values()) == fewest:
        return {rank: tensor.after for rank, tensor in held.items()}
    if not fewest:
        # A rank may train on alone, but with an optimizer that all of them prepared.
        alone = not any(tensor.is_prepared for tensor in held.values())
        return {} if alone else {rank: tensor.now for rank, tensor in held.items()}
    return {
        rank: reports[rank].optimizers[tensor.optimizer].history[fewest - 1]
        for rank, tensor in held.items()
        if tensor.optimizer is not None
    }


def _why(models: Sequence[ModelReport], parted: dict[str, str]) -> str:
    """Return what most likely made ranks part, and what to do."""
    added = [name for name in parted if any(name in model.added for model in models)]
    bypassed = max(model.bypassed for model in models)
    if added:
        return (
            f"{added[0]} was added after the model was wrapped, which averages no gradients of it. "
            "Attach adapters, and replace layers, before Accelerator.prepare"
        )
    if bypassed:
        return (
            f"{_times(bypassed, 'forward')} called the model inside past its wrapper, which then "
            "averages no gradients. Call the prepared model"
        )
    return (
        "Their gradients were not averaged over the ranks, or were changed on some ranks alone: "
        "look for no_sync around a whole step, and for clipping, stepping or changes of weights "
        "that some ranks leave out"
    )


def _other_starts(reports: Sequence[Report]) -> Iterator[str]:
    for models in _models(reports):
        starts = [model.at_start for model in models if model.at_start is not None]
        if len(starts) < len(models):
            continue
        sums = {name: {rank: s.get(name) for rank, s in enumerate(starts)} for name in starts[0]}
        unlike = [name for name, by_rank in sums.items() if len(set(by_rank.values())) > 1]
        if unlike:
            yield (
                f"{odd_ones_out(sums[unlike[0]])} began with other weights than the others: "
                f"{len(unlike)} of {len(sums)} parameters of {models[0].name} differed before it "
                f"was wrapped, the first is {unlike[0]}. DDP and DeepSpeed go on from rank 0's, "
                "FSDP2 mixes them. Seed all ranks alike before the model is built"
            )


def _equal_rows(reports: Sequence[Report]) -> Iterator[str]:
    for models in _models(reports):
        by_data_rank = {model.data_parallel_rank: model for model in models}
        common = min(len(model.rows) for model in models)
        rows = {tuple(model.rows[:common]) for model in models}
        # Rows that are all alike tell nothing.
        if len(by_data_rank) < 2 or not common or len(rows) > 1 or models[0].different_rows < 2:
            continue
        yield (
            f"all ranks read equal rows, in each of {_times(common, 'forward')} of "
            f"{models[0].name}: they do the work of one. Pass the data loader through "
            "Accelerator.prepare, and seed what draws rows at random by the rank"
        )


def _models(reports: Sequence[Report]) -> Iterator[list[ModelReport]]:
    """Yield each model as all ranks saw it, where they saw the same ones and are several."""
    if len(reports) < 2 or len({tuple(m.name for m in r.models) for r in reports}) > 1:
        return
    for number in range(len(reports[0].models)):
        yield [report.models[number] for report in reports]


def _optimizers(reports: Sequence[Report]) -> list[list[OptimizerReport]]:
    """Return each optimizer as the ranks saw it that stepped it."""
    alike: dict[tuple[str, int, int], list[OptimizerReport]] = defaultdict(list)
    for report in reports:
        seen: Counter[tuple[str, int]] = Counter()
        for optimizer in report.optimizers:
            kind = optimizer.name, optimizer.tensors
            seen[kind] += 1
            alike[(*kind, seen[kind])].append(optimizer)
    return [*alike.values()]


def _times(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
