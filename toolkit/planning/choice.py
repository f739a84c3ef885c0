"""Which strategy a run takes that names none, and whether the one that it names fits.

The run's flags stay as they are. `recommend` looks for better ones, this for what holds them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from toolkit.environment import InstalledGpu, memory_bytes, missing_for
from toolkit.errors import UsageError
from toolkit.jobs.terms import GIB
from toolkit.planning.memory.estimate import estimate_memory
from toolkit.planning.of_run import RunFacts, job_of
from toolkit.planning.remedies import remedies, together
from toolkit.planning.render.commands import flags_of
from toolkit.planning.search import OFFLOADED, ORDER
from toolkit.planning.verdict import Room, Verdict, judge
from toolkit.strategies import STRATEGIES

_TRIED = {"ddp", "zero1", "fsdp", "zero2", "zero3", *OFFLOADED}
ALONE = ("single", *(name for name in ORDER if name in OFFLOADED))
ON_SEVERAL = tuple(name for name in ORDER if name in _TRIED)
"""Strategies in the order in which they are tried, the simplest first."""

MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A strategy for a run on GPUs, with the reason in one line."""

    strategy: str
    reason: str
    fits: bool
    """False where the planner says that it is too large."""


def choose(
    run: RunFacts,
    gpus: Sequence[InstalledGpu],
    *,
    others: bool = True,
    refused: Container[str] = (),
) -> Choice:
    """Return the first strategy under which a run fits for sure, or else may fit.

    Args:
        run: Its facts, under the strategy that is tried first.
        gpus: Those that it runs on, one rank each.
        others: Whether other strategies may be chosen.
        refused: Strategies that are known not to take the run.
    """
    first = run["strategy"]
    room = Room(gpu_bytes=min(gpu.memory_bytes for gpu in gpus), host_bytes=memory_bytes())
    try:
        verdicts = {first: _judged(run, first, room)}
    except UsageError as error:
        return Choice(strategy=first, reason=f"{error}; whether it fits is not known", fits=True)
    if verdicts[first].fits or (not others and verdicts[first].answer == "tight"):
        return Choice(strategy=first, reason=_why(verdicts[first], others=others), fits=True)
    for name in ALONE if len(gpus) == 1 else ON_SEVERAL:
        takes = name != first and name not in refused and not missing_for(STRATEGIES[name])
        with suppress(UsageError):  # not every strategy takes every run
            verdicts |= {name: _judged(run, name, room)} if takes else {}
    fitting = [name for name, verdict in verdicts.items() if verdict.fits]
    if others and fitting:
        before = f"{first} needs {_needed(verdicts[first])}"
        reason = f"{before}; {_why(verdicts[fitting[0]], others=True)}"
        return Choice(strategy=fitting[0], reason=reason, fits=True)
    if others and verdicts[first].answer == "tight":
        return Choice(strategy=first, reason=_why(verdicts[first], others=True), fits=True)
    ways = [f"--strategy {name}" for name in fitting] or list(_ways(run, room))
    advice = "No change of flags makes it fit these GPUs."
    if ways:
        advice = f"This would fit: {', or '.join(ways[:MOST_NAMED])}."
    reason = f"it needs {_needed(verdicts[first])}. {advice}"
    return Choice(strategy=first, reason=reason, fits=False)


def _judged(run: RunFacts, strategy: str, room: Room) -> Verdict:
    changed: RunFacts = {**run, "strategy": strategy}
    return judge(estimate_memory(job_of(changed)), room)


def _ways(run: RunFacts, room: Room) -> Iterator[str]:
    """Yield the flags that make a run fit the GPUs that it has, the cheapest first."""
    job = job_of(run)
    several = together(job, room)
    for way in [*remedies(job, room), *([] if several is None else [several])]:
        same_gpus = (way.job.gpus, way.verdict.usable_bytes) == (job.gpus, room.gpu_bytes)
        if way.verdict.fits and same_gpus:
            before, after = flags_of(job), flags_of(way.job)
            words = [f"--{name} {after[name]}" for name in after if before.get(name) != after[name]]
            if way.job.strategy != job.strategy:
                words.insert(0, f"--strategy {way.job.strategy.name}")
            yield " ".join(words)


def _why(verdict: Verdict, *, others: bool) -> str:
    words = "may just fit" if verdict.answer == "tight" else "fits"
    first = "the first that fits" if others and verdict.fits else words
    return f"{first}, with {_needed(verdict)}"


def _needed(verdict: Verdict) -> str:
    low, high = verdict.needed.low / GIB, verdict.needed.high / GIB
    needed = f"{low:.1f} to {high:.1f} of {verdict.usable_bytes / GIB:.1f} GiB a GPU"
    if verdict.host_short:
        needed += f", and up to {verdict.host_needed.high / GIB:.1f} GiB of RAM"
    return needed
