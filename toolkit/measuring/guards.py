"""Guards: judge each step by its heartbeat, and stop the run or warn the user.

All ranks judge the same numbers, so they stop after the same step with the same message: the guard,
the rank, the step, the finding, the advice, and the last good checkpoint. False alarms are worse
than a spike: the bounds are far beyond the numbers of successful trainings
(benchmarks/guard_bounds.py).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from toolkit.environment import PREFER_CUDNN
from toolkit.errors import GuardError
from toolkit.escaping import listed
from toolkit.launching.ranks import say
from toolkit.records.manifests import checkpoint_step

Mode = Literal["stop", "warn"]

Kind = Literal[
    "loss",
    "gradients",
    "gradient norm",
    "fp16",
    "data order",
    "initial weights",
    "replicas",
    "slow rank",
]

GRAD_NORM_FACTOR = 100.0

NORMS_KEPT = 64
NORMS_NEEDED = 10
"""Norms that must be kept before a gradient norm is compared with their median."""

SKIPPED_IN_A_ROW = 25
"""Steps that fp16 may skip in a row: its scale falls from 2**16 to below 1 after 17."""

PACE_KEPT = 20
PACE_NEEDED = 3
"""Steps before a rank's pace is judged: the first ones compile, allocate and carry ledgers."""

STALL_SECONDS = 0.5
"""A rank that works at least this much longer than another has fallen behind in that step."""

LAGGING_SHARE = 0.2
"""Share of all steps' time that a constantly slow rank costs the others."""

LAGGING_STEPS = 0.8
"""Share of the steps in which such a rank is the slowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHealth:
    """The state of one step from the heartbeats of all ranks; equal on every rank."""

    step: int
    loss_is_finite: bool
    """Whether the loss is finite on every rank."""

    norm_is_finite: bool
    """Whether the norm is finite on every rank; it need not be in a step that fp16 skipped."""

    skipped: bool
    """Whether fp16 left out the update."""

    grad_norm: float | None
    """The largest gradient norm of any rank."""

    of_a_shard: bool = False
    """Whether each norm is only of a rank's shard. The whole norm is larger, at most by the square
    root of the number of ranks."""

    same_order: bool
    """Whether all ranks have been given the same rows in the same order so far."""

    busiest: int
    """The rank that worked longest outside of collectives."""

    busiest_seconds: float
    idlest_seconds: float
    """Work seconds of the rank that worked shortest."""

    seconds: float
    """Seconds of the whole step on the slowest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHealth:
    """One rank's own numbers of a step, read only if the step went wrong."""

    rank: int
    loss: float
    grad_norm: float | None
    order: int
    sample_ids: list[int] | None


class Guards:
    """Judges the steps of one run.

    Args:
        mode: Whether a finding stops the run, or is printed once per kind and recorded.
        grad_norm_factor: A norm this many times the running median, and above all that were seen,
            is exploding; infinity watches only for norms that are not finite.
        slow_rank: The mode for a rank that falls behind.
        checkpoints: The folder that holds `checkpoint-*`.
    """

    def __init__(
        self,
        mode: Mode = "stop",
        *,
        grad_norm_factor: float = GRAD_NORM_FACTOR,
        slow_rank: Mode = "warn",
        checkpoints: Path | None = None,
    ) -> None:
        self.mode: Mode = mode
        self.slow_rank: Mode = slow_rank
        self.factor = grad_norm_factor
        self.warnings: list[dict[str, Any]] = []
        self.first_bad_step: int | None = None
        """The first step that was not finite, or after which ranks differed. Weights from there on
        are not worth a checkpoint."""

        self._why_bad = ""

        self.last_checkpoint: Callable[[], Path | None] = lambda: newest_checkpoint(checkpoints)
        self.not_watched: dict[str, str] = {}
        self._warned_of_checkpoints = False
        self._norms = Norms()
        self._skipped = 0
        self._paces: deque[StepHealth] = deque(maxlen=PACE_KEPT)
        self._steps_judged = 0

    def described(self) -> dict[str, Any]:
        """Return the record's `guards`."""
        return {
            "mode": self.mode,
            "grad_norm_factor": self.factor if math.isfinite(self.factor) else None,
            "slow_rank": self.slow_rank,
            "warnings": self.warnings,
            "not_watched": self.not_watched,
        }

    def check_step(self, health: StepHealth, everyone: Callable[[], list[RankHealth]]) -> None:
        """Raise or warn where a step went wrong; every rank calls it with the same numbers.

        Raises:
            GuardError: on every rank alike.
        """
        self._steps_judged += 1
        self._judge_numbers(health, everyone)
        if not health.same_order:
            self._judge_order(health, everyone)
        self._judge_pace(health)

    def report(self, kind: Kind, sentence: str, advice: str, *, step: int) -> None:
        """Stop the run, or warn of a kind once.

        `step` is 0 before the first.

        Raises:
            GuardError: when this kind stops the run.
        """
        mode = self.slow_rank if kind == "slow rank" else self.mode
        if mode == "stop":
            self._stop(sentence, advice)
        if any(warning["kind"] == kind for warning in self.warnings):
            return
        self.warnings.append({"kind": kind, "step": step, "text": sentence})
        say_on_rank_0(f"warning: {sentence} {advice}")

    def no_checkpoint(self) -> None:
        """Print, once, that no more checkpoints are written."""
        if not self._warned_of_checkpoints:
            self._warned_of_checkpoints = True
            say_on_rank_0(
                f"no checkpoint is written after step {self.first_bad_step}, {self._why_bad}."
            )

    def note_bad_step(self, step: int, why: str) -> None:
        """Note a step from which on weights are not worth a checkpoint; the first one counts."""
        if self.first_bad_step is None:
            self.first_bad_step, self._why_bad = step, why

    def _stop(self, sentence: str, advice: str) -> NoReturn:
        # Here alone: the flags of the guards are read before torch is imported.
        from toolkit.measuring.attestation import gather_objects

        last = gather_objects(self.last_checkpoint())[0]  # others may not reach rank 0's disk
        place = "No checkpoint was kept" if last is None else f"The last good checkpoint is {last}"
        raise GuardError(f"{sentence} {place}. {advice}")

    # Numbers

    def _judge_numbers(self, health: StepHealth, everyone: Callable[[], list[RankHealth]]) -> None:
        self._skipped = self._skipped + 1 if health.skipped else 0
        if not health.loss_is_finite or not health.norm_is_finite:
            first = self.first_bad_step is None
            self.note_bad_step(health.step, "which was not finite")
            if first or self.mode == "stop":
                self._tell_not_finite(health, everyone())
        elif self._skipped == SKIPPED_IN_A_ROW:
            self.report(
                "fp16",
                f"fp16 skipped the last {self._skipped} steps, up to step {health.step}: at no "
                "scale are the gradients finite.",
                "Train in bf16, or lower --learning_rate.",
                step=health.step,
            )
        elif health.grad_norm is not None:
            self._judge_norm(health, health.grad_norm)

    def _tell_not_finite(self, health: StepHealth, ranks: list[RankHealth]) -> None:
        if not health.loss_is_finite:
            bad = [rank for rank in ranks if not math.isfinite(rank.loss)]
            rows = "".join(
                f"; rank {rank.rank} trained rows {_few(rank.sample_ids)}"
                for rank in bad
                if rank.sample_ids
            )
            losses = listed(f"{rank.loss:g} on rank {rank.rank}" for rank in bad)
            sentence = f"The loss of step {health.step} is not finite: {losses}{rows}."
            advice = "Look at those rows, lower --learning_rate, or train in bf16 or fp32."
            self.report("loss", sentence, advice, step=health.step)
            return
        norms = listed(
            f"{rank.grad_norm:g} on rank {rank.rank}"
            for rank in ranks
            if rank.grad_norm is not None and not math.isfinite(rank.grad_norm)
        )
        self.report(
            "gradients",
            f"The gradient norm of step {health.step} is not finite, though its losses are: "
            f"{norms}.",
            _about_cudnn() + "Lower --learning_rate, or train in bf16 or fp32.",
            step=health.step,
        )

    def _judge_norm(self, health: StepHealth, norm: float) -> None:
        times = self._norms.above(norm)
        if times > self.factor:
            self.report(
                "gradient norm",
                f"The gradient norm of step {health.step} is {norm:.4g}"
                f"{' in one shard' if health.of_a_shard else ''}, {times:.0f} times the median of "
                f"the steps before it, {norm / times:.4g}.",
                "Lower --learning_rate or --max_grad_norm, or allow more with --guard_grad_norm.",
                step=health.step,
            )

    # Ranks

    def _judge_order(self, health: StepHealth, everyone: Callable[[], list[RankHealth]]) -> None:
        if any(warning["kind"] == "data order" for warning in self.warnings):
            return  # and it stays different
        orders = {rank.rank: rank.order for rank in everyone()}
        self.report(
            "data order",
            f"{odd_ones_out(orders)} read the rows of step {health.step} in another order than the "
            "others.",
            "Give every rank the same --seed, and the same data in the same order.",
            step=health.step,
        )

    def _judge_pace(self, health: StepHealth) -> None:
        if self._steps_judged <= PACE_NEEDED:
            return
        excess = health.busiest_seconds - health.idlest_seconds
        usual = statistics.median(past.seconds for past in self._paces) if self._paces else math.inf
        self._paces.append(health)
        if excess > max(STALL_SECONDS, usual):
            self.report(
                "slow rank",
                f"Rank {health.busiest} fell behind by step {health.step}: its own work took "
                f"{health.busiest_seconds:.2f} s, that of the fastest rank "
                f"{health.idlest_seconds:.2f} s, and a step usually {usual:.2f} s.",
                SLOW_ADVICE,
                step=health.step,
            )
        elif len(self._paces) == PACE_KEPT:
            self._judge_lag(health)

    def _judge_lag(self, health: StepHealth) -> None:
        rank = statistics.mode(past.busiest for past in self._paces)
        of_it = [past for past in self._paces if past.busiest == rank]
        lost = sum(past.busiest_seconds - past.idlest_seconds for past in of_it)
        share = lost / (sum(past.seconds for past in self._paces) or math.inf)
        if len(of_it) >= LAGGING_STEPS * PACE_KEPT and share >= LAGGING_SHARE:
            self.report(
                "slow rank",
                f"Rank {rank} falls behind: up to step {health.step} it was the slowest in "
                f"{len(of_it)} of {PACE_KEPT} steps, and the others waited for it {share:.0%} of "
                "the time.",
                SLOW_ADVICE,
                step=health.step,
            )


class Norms:
    """The gradient norms of the last steps, for comparison with the next."""

    def __init__(self) -> None:
        self._kept: deque[float] = deque(maxlen=NORMS_KEPT)
        self._largest = 0.0

    def above(self, norm: float) -> float:
        """Return a norm divided by the median of the last norms, and add it to them.

        Returns:
            0 while too few norms are known, and for a norm below an earlier one: a model that has
            learned its rows has small norms, and new rows bring back its first, larger ones.
        """
        median = statistics.median(self._kept) if len(self._kept) >= NORMS_NEEDED else 0.0
        times = norm / median if median > 0 and norm > self._largest else 0.0
        self._kept.append(norm)
        self._largest = max(self._largest, norm)
        return times


SLOW_ADVICE = "Look at what else runs there, at its data loading, and at its GPU's clocks."


def newest_checkpoint(folder: Path | None) -> Path | None:
    """Return the newest complete `checkpoint-N`; None if there is none."""
    if folder is None:
        return None
    # The manifest of a committed checkpoint, or the last file of the Trainer's but random states.
    ends = ("manifest.json", "trainer_state.json")
    complete = {
        step: path
        for path in folder.glob("checkpoint-*")
        if (step := checkpoint_step(path)) is not None
        and any((path / end).exists() for end in ends)
    }
    return complete[max(complete)] if complete else None


def odd_ones_out(values: dict[int, Any]) -> str:
    """Name the ranks whose value differs from the majority; rank 0's value decides a tie."""
    counts = {rank: [*values.values()].count(value) for rank, value in values.items()}
    usual = values[max(values, key=lambda rank: (counts[rank], -rank))]
    return listed(f"rank {rank}" for rank, value in values.items() if value != usual).capitalize()


def say_on_rank_0(sentence: str) -> None:
    """Print a line, on rank 0 alone."""
    import torch

    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        say(sentence)


def _about_cudnn() -> str:
    """Return the first thing to try where cuDNN's attention may be at fault, with a space after it.

    Such gradients were seen on an H200 where it was on (benchmarks/results/2026-11-26-gpu-kit.md).
    """
    import torch

    if not torch.cuda.is_available() or not torch.backends.cuda.cudnn_sdp_enabled():
        return ""
    if torch.cuda.get_device_capability()[0] not in PREFER_CUDNN:
        return ""
    return (
        "cuDNN's attention gives such gradients at times: leave out --cudnn_attention, or in a "
        "script of your own call torch.backends.cuda.enable_cudnn_sdp(False) before training. "
    )


def _few(ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:8]))
    return f"{shown}, ..." if len(ids) > 8 else shown
