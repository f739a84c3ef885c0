"""The heartbeat: one small all-reduce per step, which tells every rank the state of all ranks.

After each optimizer step the ranks reduce `FIELDS` numbers, 56 bytes, by their maximum. Each rank
reads the result at the end of the next step: by then the device has long passed it, so no rank
waits for the running step. All ranks read the same numbers after the same step, so they stop, warn
or save together.

On a GPU the numbers that live there (losses, the gradient norm) are put together there, in a stream
of its own, and copied to pinned memory; only the event of the step before is waited for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from toolkit.engines.tensors import is_spread, local
from toolkit.errors import UsageError
from toolkit.measuring.attestation import gather_objects
from toolkit.measuring.guards import GRAD_NORM_FACTOR, Guards, Mode, RankHealth, StepHealth

FIELDS = 7
"""Numbers of a heartbeat, 8 bytes each; all ranks read the maximum of each."""

Choice = Literal["stop", "warn", "off"]

# A maximum of negated numbers is their minimum: with both, ranks see whether all orders are equal,
# and how long the least busy rank worked.
_NORM, _ORDER, _ORDER_NEGATED, _BUSIEST, _IDLEST_NEGATED, _WALL, _STOP = range(FIELDS)

# Codes in place of a norm, from least to worst, so that the maximum keeps the worst. Norms are
# float32, with a largest value of 3.4e38.
_SKIPPED, _NO_NORM, _NORM_NOT_FINITE, _LOSS_NOT_FINITE = -2.0, -1.0, 1e300, 2e300

_RANKS = 1 << 16
"""Above every rank number: busy microseconds * this + rank is an exact whole number."""


class Heartbeat:
    """One rank's part in the heartbeat; the guards judge every step by it."""

    def __init__(self, guards: Guards) -> None:
        self.guards = guards
        self.steps_before = 0
        """Optimizer steps of the whole training that were done before this run resumed it."""

        self._rank, self._ranks = 0, 1
        self._device = torch.device("cpu")
        self._stream: torch.cuda.Stream | None = None
        self._step = 0
        self._open: _Sent | None = None
        self._of_a_shard = False
        self._stop_requested = False
        self.stop_agreed = False
        """Whether a rank has asked to stop. It turns true on all ranks after the same step: the
        step after the one in which the rank asked, or at the next `settle`."""

        self._begun = time.perf_counter()

    def prepared(self, *, rank: int, ranks: int, device: torch.device | str) -> None:
        """Set rank, number of ranks and device, before the first step."""
        self._rank, self._ranks = rank, ranks
        self._device = torch.device(device)
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
        self.mark()

    # Requests from other code

    def ask_to_stop(self) -> None:
        """Ask all ranks to stop. It only sets a flag: a signal's handler may call it."""
        self._stop_requested = True

    def settle(self) -> None:
        """Wait for the numbers of the last step, and judge it; every rank calls it.

        Must be called before a save, so that no state of a failed step is saved.

        Raises:
            GuardError: on every rank alike, where the guards stop the run.
        """
        sent, self._open = self._open, None
        if sent is None:
            return
        fields = sent.fields()
        self.stop_agreed = self.stop_agreed or fields[_STOP] > 0
        health = _step_health(sent.step, fields, of_a_shard=self._of_a_shard)
        self.guards.check_step(health, lambda: gather_objects(sent.health.read()))

    # Calls from the recorder

    def mark(self) -> None:
        """Start the open step anew: the work so far belongs to no step."""
        self._begun = time.perf_counter()

    def step_done(
        self,
        *,
        losses: Sequence[torch.Tensor],
        grad_norm: Any,
        skipped: bool | torch.Tensor | None,
        order: int,
        busy_seconds: Callable[[], float],
        sample_ids: Sequence[torch.Tensor | None] = (),
    ) -> None:
        """Read the result of the step before, and send this rank's numbers of the step that ended.

        Args:
            losses: Of the step's micro-batches, scalars on the device; none is read here.
            grad_norm: Before clipping: a number, or a scalar, which FSDP2 spreads over the ranks.
            skipped: Whether fp16 left out the update; a fused optimizer's `found_inf` is a tensor.
            order: A hash of the rows that the data's order gave out so far, below 2**52.
            busy_seconds: Returns this rank's seconds of work in the step outside of collectives.
            sample_ids: Of its micro-batches' rows, kept for a rank in trouble.

        Raises:
            GuardError: of the step before; on every rank alike.
        """
        now = time.perf_counter()
        wall, self._begun = now - self._begun, now
        self.settle()
        self._step += 1
        self._of_a_shard = is_spread(grad_norm)
        health = _Unread(self._rank, list(losses), _local(grad_norm), order, list(sample_ids))
        busy = round(busy_seconds() * 1e6)
        host = [0.0] * FIELDS
        host[_ORDER], host[_ORDER_NEGATED] = float(order), -float(order)
        host[_BUSIEST] = float(busy * _RANKS + self._rank)
        host[_IDLEST_NEGATED] = -float(busy)
        host[_WALL] = wall
        host[_STOP] = float(self._stop_requested)
        self._open = self._send(host, health, skipped)

    def _send(self, host: list[float], health: _Unread, skipped: Any) -> _Sent:
        step = self.steps_before + self._step
        if self._stream is None:
            vector = torch.tensor(host, dtype=torch.float64)
            vector[_NORM] = _norm_field(health, skipped, self._device)
            return _Sent(step=step, health=health, vector=vector, work=self._reduce(vector))
        # In a side stream, so that the next step does not wait for the slowest rank's heartbeat.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            pinned = torch.tensor(host, dtype=torch.float64).pin_memory()
            vector = pinned.to(self._device, non_blocking=True)
            vector[_NORM] = _norm_field(health, skipped, self._device)
            work = self._reduce(vector)
            if work is not None:
                work.wait()  # of NCCL: the stream waits, not the host
            read = torch.empty(FIELDS, dtype=torch.float64, pin_memory=True)
            read.copy_(vector, non_blocking=True)
            passed = torch.cuda.Event(blocking=True)  # waiting for it doesn't occupy the core
            passed.record(self._stream)
        # `vector` and `pinned` are held until the event has passed, so their memory is not reused.
        return _Sent(step=step, health=health, vector=read, passed=passed, held=(vector, pinned))

    def _reduce(self, vector: torch.Tensor) -> Any:
        if self._ranks == 1:
            return None
        return torch.distributed.all_reduce(
            vector, op=torch.distributed.ReduceOp.MAX, async_op=True
        )


@dataclass(frozen=True, slots=True)
class _Unread:
    """One rank's numbers of a step, left on the device."""

    rank: int
    losses: list[torch.Tensor]
    norm: Any
    order: int
    sample_ids: list[torch.Tensor | None]

    def read(self) -> RankHealth:
        """Read the numbers from the device, and wait for them."""
        batches = [batch for batch in self.sample_ids if batch is not None]
        return RankHealth(
            rank=self.rank,
            loss=float(sum(loss.double().item() for loss in self.losses)),
            grad_norm=None if self.norm is None else float(self.norm),
            order=self.order,
            sample_ids=[int(i) for ids in batches for i in ids.tolist()] if batches else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """A heartbeat on its way."""

    step: int
    health: _Unread
    vector: torch.Tensor
    work: Any = None
    passed: Any = None
    held: Any = None

    def fields(self) -> list[float]:
        if self.passed is not None:
            self.passed.synchronize()
        elif self.work is not None:
            self.work.wait()
        return self.vector.tolist()


def _norm_field(health: _Unread, skipped: Any, device: torch.device) -> torch.Tensor:
    """Return a norm, or the code in its place, as an unread scalar on the device."""

    def number(value: float) -> torch.Tensor:
        return torch.full((), value, dtype=torch.float64, device=device)

    field = number(_NO_NORM)
    if isinstance(health.norm, torch.Tensor):
        norm = health.norm.detach().to(torch.float64)
        field = torch.where(torch.isfinite(norm), norm, number(_NORM_NOT_FINITE))
    elif health.norm is not None:
        field = number(health.norm if math.isfinite(health.norm) else _NORM_NOT_FINITE)
    if isinstance(skipped, torch.Tensor):
        field = torch.where(skipped.to(device) > 0, number(_SKIPPED), field)
    elif skipped:
        field = number(_SKIPPED)
    if health.losses:
        total = torch.stack([loss.detach().to(torch.float64) for loss in health.losses]).sum()
        field = torch.where(torch.isfinite(total), field, number(_LOSS_NOT_FINITE))
    return field


def _local(norm: Any) -> Any:
    """Take a norm's local shard: the whole would take a collective. Read at once on the CPU."""
    shard = local(norm)
    is_on_cpu = isinstance(shard, torch.Tensor) and shard.device.type == "cpu"
    return float(shard) if is_on_cpu else shard


def _step_health(step: int, fields: list[float], *, of_a_shard: bool) -> StepHealth:
    norm = fields[_NORM]
    busy, rank = divmod(int(fields[_BUSIEST]), _RANKS)
    return StepHealth(
        step=step,
        loss_is_finite=norm < _LOSS_NOT_FINITE,
        norm_is_finite=norm != _NORM_NOT_FINITE,
        skipped=norm == _SKIPPED,
        of_a_shard=of_a_shard,
        grad_norm=norm if 0 <= norm < _NORM_NOT_FINITE else None,
        same_order=fields[_ORDER] == -fields[_ORDER_NEGATED],
        busiest=rank,
        busiest_seconds=busy / 1e6,
        idlest_seconds=-fields[_IDLEST_NEGATED] / 1e6,
        seconds=fields[_WALL],
    )


def heartbeat_for(
    choice: Choice,
    *,
    checkpoints: Path,
    grad_norm_factor: float = GRAD_NORM_FACTOR,
    slow_rank: Mode = "warn",
) -> Heartbeat | None:
    """Return the heartbeat of a run, None with the guards off.

    Arguments are those of `Guards`, but for a `grad_norm_factor` of 0, which watches only for norms
    that are not finite.
    """
    if choice == "off":
        return None
    if choice not in get_args(Mode):
        raise UsageError(f"guards={choice!r}: use stop, warn or off.")
    factor = grad_norm_factor or math.inf
    return Heartbeat(
        Guards(choice, grad_norm_factor=factor, slow_rank=slow_rank, checkpoints=checkpoints)
    )
