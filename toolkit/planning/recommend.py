"""Which strategy: a search over what fits, under a global batch that is kept.

The tree that people walk by hand (does it fit on one GPU? on all of them whole? how much is
missing?) becomes a search with reasons. A job that may or may not fit is never recommended. A job
that needs RAM on a node whose RAM is not known comes after all that do not, and its verdict states
the condition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from toolkit.errors import UsageError
from toolkit.jobs.options import Goal, PlanOptions, RecommendOptions, with_keywords
from toolkit.jobs.shape import ModelShape
from toolkit.planning import reasons
from toolkit.planning.learning_rate import LearningRate
from toolkit.planning.levers import qlora_problem
from toolkit.planning.plan import Plan, Rendered, plan, positive
from toolkit.planning.remedies import Remedy, ways_out
from toolkit.planning.search import (
    BF16,
    EIGHT_BIT,
    FULL,
    LORA,
    QLORA,
    SAME_SPEED,
    SHARDED,
    SPLIT,
    SPLIT_ROWS,
    TRAININGS,
    WHOLE,
    Candidate,
    Search,
    Training,
    rank,
)
from toolkit.planning.speed.estimate import PlannedCost, cost
from toolkit.planning.speed.gpus import Gpu
from toolkit.strategies import STRATEGIES

GLOBAL_BATCH = 32
FULL_RATE = 2e-5
RATE_OF_ADAPTERS = 10
"""Times the rate of a full fine-tune (LoRA Without Regret, 2025)."""

MOST_OPTIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to train, with what it gives up."""

    title: str
    """`quality first`, `cheapest`, `simplest`"""

    candidate: Candidate
    gives_up: tuple[str, ...]
    learning_rate: LearningRate
    cost: PlannedCost | None
    """Hours and price of the tokens; None where their number was not given."""

    price_date: str = ""
    """Day of the price, where a GPU file gives it."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Recommendation(Rendered):
    """The choice, its reasons, and other options."""

    model: ModelShape
    gpu: Gpu
    goal: Goal
    choice: Candidate | None
    """None where nothing fits for sure."""

    closest: Candidate | None
    """Where nothing fits: the candidate that misses the least."""

    runners_up: tuple[Candidate, ...]
    """The best under two other strategies."""

    options: tuple[Option, ...]
    """The choice, and up to two others that really differ; empty where nothing fits."""

    nearest: tuple[Remedy, ...]
    """What would make the full fine-tune fit, or the closest candidate where nothing fits."""

    reasons: tuple[str, ...]
    learning_rate: LearningRate
    """Of the choice."""

    most_hours: float | None = None
    """What `hours` and `dollars` allow; None where neither was given."""

    keeps_bounds: bool = True
    """Whether the choice trains all tokens in these hours for sure."""


@with_keywords(RecommendOptions)
def recommend(model: str | Path | ModelShape, options: RecommendOptions) -> Recommendation:
    """Choose strategy, batch, accumulation, levers and method.

    Args:
        model: As `plan` takes it.
        options: The fields of `jobs.options.RecommendOptions`, as keywords.

    Raises:
        UsageError: something is not there, or the batch can't be spread over the GPUs.
    """
    shared = {field.name for field in fields(PlanOptions)} - {"method"}
    start = plan(
        model,
        strategies="single" if options.gpus == 1 else "ddp",
        **{f.name: getattr(options, f.name) for f in fields(options) if f.name in shared},
    )
    search = _search(start, options)
    most_hours = _most_hours(start, options)

    def in_time(candidate: Candidate) -> bool:
        if most_hours is None or start.tokens is None:
            return True
        return cost(candidate.speed, start.tokens, None).hours.high <= most_hours

    trainings = _trainings(start.model, options)
    looked_at: list[Candidate] = []
    ranked: list[Candidate] = []
    first: list[Candidate] = []
    for training, offloads in _in_turn(trainings, options.host_gib is not None):
        on_gpus = WHOLE + SHARDED + SPLIT
        found = search.offloaded(training) if offloads else search.under(on_gpus, training)
        if not offloads and not any(candidate.fits for candidate in found):
            found += search.under(SPLIT_ROWS, training)
        looked_at += found
        fitting = [candidate for candidate in found if candidate.fits]
        unconditional = [c for c in fitting if c.verdict.answer == "fits"]
        ranked = rank(unconditional or fitting, options.goal)
        first = first or ranked
        if ranked := [candidate for candidate in ranked if in_time(candidate)]:
            break
    ranked = ranked or first
    choice = ranked[0] if ranked else None
    closest = None
    if choice is None:
        closest = max(looked_at, key=lambda candidate: candidate.verdict.worst_margin_bytes)
    quick = replace(search, is_quick=True)
    found = [] if choice is None else _options(quick, choice, trainings, options)
    nearest: list[Remedy] = []
    sentences = [reasons.on_one_gpu(search.base)]
    if choice is None:
        assert closest is not None
        sentences.append(reasons.why_nothing_fits(closest))
    else:
        if most_hours is not None:
            sentences.append(reasons.of_bounds(choice, most_hours, start.tokens))
        sentences += reasons.reasons_for(choice, ranked, looked_at, options.goal)
    for leanest in _missed(choice, closest, looked_at):
        ways = list(ways_out(leanest.job, leanest.room))
        sentences += reasons.what_it_takes(leanest, ways)
        nearest += ways
    if choice is None and options.method is not None:
        other = list(_other_methods(search, options))
        sentences += [
            f"{way.name} fits: {way.job.strategy.name}. It gives up: {way.cost}." for way in other
        ]
        nearest += other
    sentences += start.notes
    sentences += (choice or closest or search.base).speed.notes
    sentences += reasons.of_splits(search, choice, looked_at)
    sentences += _left_out(search, start.model, looked_at, options)
    return Recommendation(
        model=start.model,
        gpu=search.base.gpu,
        goal=options.goal,
        choice=choice,
        closest=closest,
        runners_up=tuple(ranked[1:3]),
        options=tuple(_option(title, c, search, start, options) for title, c in found),
        nearest=tuple(nearest),
        reasons=tuple(dict.fromkeys(sentences)),
        learning_rate=_rate(choice or closest or search.base, search, options),
        most_hours=most_hours,
        keeps_bounds=choice is not None and in_time(choice),
    )


def _most_hours(start: Plan, options: RecommendOptions) -> float | None:
    """Return the hours that the bounds on time and money allow, None without any."""
    bounds = [] if options.hours is None else [positive("hours", options.hours)]
    if options.dollars is not None:
        if start.dollars_per_hour is None:
            raise UsageError(
                "dollars needs the price of a GPU: give --dollars-per-hour too, or name it in a "
                "file (--gpu-file)."
            )
        price = start.dollars_per_hour * options.gpus
        bounds.append(positive("dollars", options.dollars) / price)
    return min(bounds, default=None)


def _search(start: Plan, options: RecommendOptions) -> Search:
    """Return the search for the requested job, whose global batch is checked."""
    row, gpus = start.rows[0], options.gpus
    rows = options.global_batch
    if rows is None:
        rows = gpus * -(-GLOBAL_BATCH // gpus)
    if row.gpu is None or row.room is None:
        raise UsageError("A recommendation needs a GPU: name one.")
    base = Candidate(
        job=row.job,
        gpu=row.gpu,
        room=row.room,
        internode_bytes_per_second=row.internode_bytes_per_second,
    )
    search = Search(base=base, global_rows=rows, goal=options.goal)
    whole = not isinstance(rows, bool) and rows > 0
    if whole and rows % gpus and options.method in (None, "full"):
        splits = [each for name in SPLIT for each in search.in_sizes(STRATEGIES[name])]
        if any(search.has_place(split) and search.can_step(split) for split in splits):
            return search
    if not whole or rows % gpus:
        raise UsageError(
            f"A global batch of {rows} rows can't be spread over {gpus} GPUs. "
            f"Choose a multiple of {gpus}."
        )
    return search


def _trainings(model: ModelShape, options: RecommendOptions) -> list[Training]:
    """Return the trainings of the requested method, the best first."""
    problem = qlora_problem(model)
    if problem is not None and options.method == "qlora":
        raise UsageError(f"{problem} Ask for --method lora.")
    return [
        training
        for training in TRAININGS
        if options.method in (None, training.method) and not (problem and training is QLORA)
    ]


def _in_turn(trainings: Sequence[Training], host_known: bool) -> list[tuple[Training, bool]]:
    """Return the trainings to look at, without or with offloads, until something fits.

    A whole model in host RAM is trained before adapters on the GPU, where that RAM is known; else
    it comes last, since it fits under a condition alone.
    """
    if host_known:
        return [(training, offloads) for training in trainings for offloads in (False, True)]
    return [(training, offloads) for offloads in (False, True) for training in trainings]


def _options(
    search: Search, choice: Candidate, trainings: Sequence[Training], options: RecommendOptions
) -> list[tuple[str, Candidate]]:
    """Return the choice and those that differ from it: cheaper, simpler, or of every weight."""
    pool: list[Candidate] = []
    for training in trainings[trainings.index(choice.training) + 1 :]:
        found = search.under(WHOLE, training)
        if training in (LORA, QLORA) and not any(c.fits for c in found):
            found = search.under(("fsdp", "zero3"), training)
        pool += rank([candidate for candidate in found if candidate.fits], options.goal)[:1]
    titles = {"quality first" if options.goal == "speed" else "least memory": choice}
    if choice.job.method != "full" and FULL in trainings:
        every_weight = _every_weight(search, options) or [c for c in pool if c.training is BF16]
        if every_weight:
            titles["every weight"] = every_weight[0]
    elif choice.verdict.answer == "fits with RAM" and LORA in trainings:
        adapters = [candidate for candidate in search.offloaded(LORA) if candidate.fits]
        if adapters:
            titles["less RAM"] = rank(adapters, options.goal)[0]
    if pool:
        fastest = max(pool, key=lambda candidate: candidate.tokens_per_second)
        if fastest.tokens_per_second * SAME_SPEED > choice.tokens_per_second:
            titles["cheapest"] = fastest
    if choice.job.strategy.name not in WHOLE:
        whole = [candidate for candidate in pool if candidate.job.strategy.name in WHOLE]
        if whole:
            titles["simplest"] = whole[0]
    merged: list[tuple[str, Candidate]] = []
    for title, candidate in titles.items():
        if merged and merged[-1][1] is candidate:
            merged[-1] = (f"{merged[-1][0]} and {title}", candidate)
        else:
            merged.append((title, candidate))
    return merged[:MOST_OPTIONS]


def _every_weight(search: Search, options: RecommendOptions) -> list[Candidate]:
    """Return full fine-tunes that fit if a node has RAM enough, where that is not known."""
    if options.host_gib is not None:
        return []
    for training in (FULL, EIGHT_BIT, BF16):
        if fitting := [c for c in search.offloaded(training) if c.fits]:
            return rank(fitting, options.goal)
    return []


def _option(
    title: str, candidate: Candidate, search: Search, start: Plan, options: RecommendOptions
) -> Option:
    tokens = start.tokens
    return Option(
        title=title,
        candidate=candidate,
        gives_up=tuple(_given_up(candidate)) or ("nothing of the training that was asked for",),
        learning_rate=_rate(candidate, search, options),
        cost=None if tokens is None else cost(candidate.speed, tokens, start.dollars_per_hour),
        price_date=candidate.gpu.dollars_date if options.dollars_per_hour is None else "",
    )


def _given_up(candidate: Candidate) -> Iterator[str]:
    yield from (lever.price for lever in candidate.levers if not lever.is_free)
    backend = candidate.job.backend
    share = backend.waiting_share(candidate.job)
    if share is not None:
        yield f"each GPU waits for the others {share:.0%} of the time, by slots"
    yield from backend.prices()


def _rate(candidate: Candidate, search: Search, options: RecommendOptions) -> LearningRate:
    """Return the learning rate of a candidate; that of a full fine-tune is raised for adapters."""
    batch = search.global_rows
    base_batch = batch if options.base_batch is None else options.base_batch
    positive("base_batch", base_batch)
    base = FULL_RATE if options.learning_rate is None else options.learning_rate
    positive("learning_rate", base)
    is_own = options.learning_rate is not None and options.method is not None
    if candidate.job.method != "full" and not is_own:
        base *= RATE_OF_ADAPTERS
    return LearningRate(base=base, base_batch=base_batch, batch=batch)


def _missed(
    choice: Candidate | None, closest: Candidate | None, looked_at: Sequence[Candidate]
) -> list[Candidate]:
    """Return what does not fit and is worth a way out: the full fine-tune, and the closest."""
    looked_at = [c for c in looked_at if not c.job.backend.splits_model]
    on_gpus = [c for c in looked_at if c.training is FULL and not c.memory.host_bytes.high]
    full = max(on_gpus, key=lambda c: c.verdict.worst_margin_bytes, default=None)
    if choice is not None and choice.training is FULL and choice.verdict.answer == "fits":
        full = None
    if closest is not None and closest.job.backend.splits_model:
        closest = None
    missed = (full, closest if full is None or closest is None or closest.job != full.job else None)
    return [candidate for candidate in missed if candidate is not None]


def _other_methods(search: Search, options: RecommendOptions) -> Iterator[Remedy]:
    """Yield the first training of another method that fits, where one was asked for."""
    every = _trainings(search.base.job.model, replace(options, method=None))
    for training in (t for t in every if t.method != options.method):
        fitting = [c for c in search.under((*WHOLE, "zero2", "fsdp", "zero3"), training) if c.fits]
        if fitting:
            best = rank(fitting, options.goal)[0]
            price = "; ".join(lever.price for lever in training.levers)
            yield Remedy(name=training.name, cost=price, job=best.job, verdict=best.verdict)
            return


def _left_out(
    search: Search, model: ModelShape, looked_at: Sequence[Candidate], options: RecommendOptions
) -> Iterator[str]:
    """Yield what was not looked at, and why."""
    names = [
        strategy.name
        for strategy in STRATEGIES.values()
        if search.has_place(strategy) and not search.can_step(strategy)
    ]
    if names:
        yield (
            f"{options.optimizer} cannot step under {', '.join(names)}: these were not looked at."
        )
    problem = qlora_problem(model)
    if problem is not None and options.method is None:
        yield problem
    if options.host_gib is None and any(c.memory.host_bytes.high for c in looked_at):
        yield (
            "The RAM of a node is not known, so an offload fits only under a condition: name the "
            "RAM with --host-gib."
        )
