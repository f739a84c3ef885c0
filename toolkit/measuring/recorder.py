"""The recorder of a rank: it never synchronises the host in a step, and gathers at the end.

Any training loop calls it: `prepared` once the model is wrapped, `micro_batch` after each backward,
`step_done` after each optimizer step, `finish` at the end. The first step is examined closely
(attestation, memory); of the others only references are kept.
"""

from __future__ import annotations

import json
import math
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from toolkit.engines.backend import backend_of, spec_of
from toolkit.engines.base import Backend
from toolkit.engines.hooks import Undo, nothing, replace_method
from toolkit.engines.tensors import compiled, number
from toolkit.files import without_links, write_text
from toolkit.launching import forking
from toolkit.launching.processes import age_seconds
from toolkit.launching.progress import progressed
from toolkit.launching.status import StatusFile
from toolkit.measuring import attestation, gradients, machines, memory, replica_checks, traffic
from toolkit.measuring.attestation import Mismatch, Refused, Requested, gather_objects
from toolkit.measuring.clock import Clock
from toolkit.measuring.evidence import EvidenceKeeper
from toolkit.measuring.guards import say_on_rank_0
from toolkit.measuring.heartbeat import Heartbeat
from toolkit.measuring.merging import merge
from toolkit.measuring.peak import COMPILED, PeakLedger
from toolkit.measuring.replica_checks import OrderCheck
from toolkit.records.fields import unmeasured
from toolkit.records.json_files import json_line


class Recorder:
    """Records one rank of one run, and refuses the run if requested settings did not take effect.

    Models are those that `Accelerator.prepare` returned. If a guard stops the run, the method that
    noticed raises `GuardError` on every rank.
    """

    def __init__(
        self,
        requested: Requested,
        *,
        rehearsal: bool,
        notes: list[str] | None = None,
        steps_file: Path | None = None,
        status: StatusFile | None = None,
        evidence: EvidenceKeeper | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.requested = requested
        self.heartbeat = heartbeat
        """The exchange between the ranks after each step; None with the guards off."""

        self._order = OrderCheck()
        self._evidence = evidence
        self.actual: dict[str, Any] = {}
        self.notes = list(notes or ())
        self._printed_notes: list[str] = []
        self.rehearsal = rehearsal
        self._steps_file = steps_file
        self._status = status
        self._rank = self._data_parallel_rank = 0
        self._device = "cpu"
        self._scales_loss = False
        self._clock = Clock()
        self._save_seconds: float | None = None
        self.on_log: Callable[[int, Mapping[str, Any]], None] | None = None
        """Gets the values that are logged of a step's loss, on rank 0."""

        self.steps_before = 0
        """Optimizer steps of the training that were done before this run resumed it."""

        self._earlier_losses: list[float] | None = []
        self._losses: list[float] = []
        self._drops_steps = False
        self._step: list[_MicroBatch] = []
        self._steps: list[_RecordedStep] = []
        self.clip: float | None = None
        """The norm that the script clips to, None while it has not asked, 0 for no limit."""

        self._grad_norm: Any = None
        self._gradients: gradients.Squares | None = None
        self._full_gradients: gradients.FullGradients | None = None
        self._bytes: dict[str, int | None] = {}
        self._model: Any = None
        self._ledger = traffic.Ledger()
        self._traffic: dict[str, Any] | None = None
        self._slots: Any = None
        self._server_exchange: Any = None
        self._traffic_group = 0
        self._peak_ledger = PeakLedger()
        self._peak: dict[str, Any] | None = None
        self._no_peak: str | None = None
        self._optimizer: Any = None
        self._clock.watch_builds(spec_of(requested.strategy, requested.num_processes))
        self._probed: list[int] = []
        self._found_inf: torch.Tensor | bool | None = None
        self._hooks = ExitStack()
        self._probe_hooks = ExitStack()

    # Calls from a training loop

    def loaded(self, model: Any) -> None:
        """Compare the weights that ranks loaded, before anything wraps them."""
        if self.heartbeat is not None:
            replica_checks.check_loaded(self.heartbeat.guards, model)

    def reads(self, loader: Any) -> None:
        """Watch in which order a loader, as `Accelerator.prepare` returned it, gives out rows.

        A `GuardError` means that two ranks would train the same rows.
        """
        if self.heartbeat is not None:
            watch = self._order.watch(
                loader, self.heartbeat.guards, data_parallel_rank=self._data_parallel_rank
            )
            self._hooks.callback(watch)

    def prepared(self, accelerator: Any, model: Any, optimizer: Any) -> None:
        """Attest the wrapped model, and watch its first step.

        Raises:
            Refused: on every rank if any rank's model differs from the request.
        """
        self._rank = accelerator.process_index
        self._device = str(accelerator.device)
        self._scales_loss = accelerator.scaler is not None or self.requested.precision == "fp16"
        self.actual = attestation.actual_before(accelerator, model)
        self._require(self.requested.before_first_step())
        backend = backend_of(model)
        self._data_parallel_rank = backend.data_parallel_rank()
        self._watch_clipping(accelerator, backend)
        self._clock.watch_compiles()
        self._clock.prepared(model, optimizer)
        if self._evidence is not None:
            self._evidence.prepared(accelerator, model, optimizer)
        self._watch_first_step(backend, model, optimizer)
        self._hooks.callback(gradients.refuse_partly_unused(backend, model))
        self._model, self._optimizer = model, optimizer
        self._no_peak = COMPILED if compiled(model) else None
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        if self._status is not None:
            self._status.running()
        if self.heartbeat is not None:
            if self._no_peak is None:  # hooks don't see the forward of compiled models
                self._clock.follow_units(model)
            ranks = accelerator.num_processes
            self.heartbeat.prepared(rank=self._rank, ranks=ranks, device=accelerator.device)
        if self._drops_steps and self._steps_file is not None and self._rank == 0:
            # Only now: every rank has loaded all that it resumes from.
            drop_steps_after(self._steps_file, self.steps_before)
        self.mark()

    def waiting_for_data(self) -> AbstractContextManager[None]:
        """Time the body as waiting for rows."""
        return self._clock.within("data", alone=True)

    def micro_batch(
        self,
        loss: torch.Tensor,
        *,
        tokens: int,
        supervised: torch.Tensor | None = None,
        sample_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> None:
        """Keep one micro-batch, after its backward, as tensors, without reading them.

        Args:
            loss: Its share of the step's loss, a scalar.
            tokens: All of its tokens, padding included.
            supervised: How many of them are trained on, a scalar.
            sample_ids: Of its rows.
            labels: Of its rows, where the loss may be computed outside of the model.
        """
        progressed()
        self._clock.begin("other")
        reduced = None
        if not self._verified and self._model is not None:
            reduced = backend_of(self._model).has_reduced()
        self._step.append(_MicroBatch(loss.detach(), tokens, supervised, sample_ids, reduced))
        if self._evidence is not None:
            self._evidence.micro_batch(sample_ids, labels)

    def step_done(self, *, learning_rate: float, skipped: bool = False) -> None:
        """Close an optimizer step. The one after the first is the probe that carries ledgers.

        A `GuardError` is of the step before this one.
        """
        progressed(step=True)
        self._send_heartbeat(skipped=skipped)
        self._end_probe(skipped=skipped)
        self._clock.step_done()
        self._steps.append(
            _RecordedStep(self._step, self._grad_norm, learning_rate, skipped, self._found_inf)
        )
        self._step, self._grad_norm, self._found_inf = [], None, None
        if self._evidence is not None:
            self._evidence.step_done()
        if self._status is not None:
            self._status.running(self.steps_before + len(self._steps))
        if self._evidence is not None and self._evidence.is_open:
            return  # its gathers are no traffic
        if self._verified and self._traffic is None and self._model is not None:
            self._start_ledgers()

    def resumed_after(self, step: int, losses: list[float] | None = None) -> None:
        """Say how many optimizer steps were done before this run went on with them.

        Their `losses` stand in its record; None where they are not known. Lines of later steps in
        the file of steps are dropped once everything is loaded.
        """
        self.steps_before = step
        self._earlier_losses = losses
        self._drops_steps = True
        if self.heartbeat is not None:
            self.heartbeat.steps_before = step
        if self._evidence is not None:
            self._evidence.resumed_after(step)

    def mark(self) -> None:
        """Restart the clock, after anything that doesn't belong to a step."""
        self._clock.restart()
        if self.heartbeat is not None:
            self.heartbeat.mark()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Keep the body, between two steps, out of times, ledgers and device peaks.

        The host's peak is the system's own count, which cannot be kept from it.
        """
        probing = self._ledger.running
        self._probe_hooks.close()
        if self.actual:  # before training there is no peak to keep
            self._keep_device_peaks()
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            if probing:
                self._start_ledgers()
            self.mark()

    def all_losses(self) -> list[float] | None:
        """Return the losses of all steps, also of those before this run; a collective.

        None where those before it are not known.
        """
        ranks = gather_objects(self._losses_of_rank())
        if self._earlier_losses is None:
            return None
        return [*self._earlier_losses, *map(statistics.fmean, zip(*ranks, strict=True))]

    def _losses_of_rank(self) -> list[float]:
        self._losses += [step.loss() for step in self._steps[len(self._losses) :]]
        return self._losses

    def outer_losses(self) -> tuple[float, float] | None:
        """Return the losses of the first and last step, None without any; every rank calls it."""
        losses = (self._steps[0].loss(), self._steps[-1].loss()) if self._steps else None
        ranks = gather_objects(losses)
        if losses is None:
            return None
        first, last = map(statistics.fmean, zip(*ranks, strict=True))
        return first, last

    @contextmanager
    def saving(self, model: Any) -> Iterator[None]:
        """Take the peaks, then time the body as the save, which is part of no step."""
        self.peaks()
        if self._evidence is not None:
            self._evidence.saving()
        self.check_before_save(model)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # queued work of the last step is no part of the save
        begun = time.perf_counter()
        yield
        self._save_seconds = time.perf_counter() - begun
        self.mark()

    def settle(self) -> None:
        """Wait until the last step has been judged; every rank calls it."""
        if self.heartbeat is not None:
            self.heartbeat.settle()

    def check_before_save(self, model: Any) -> None:
        """Judge the last step, and the weights of ranks that should hold the same; a collective.

        After a `GuardError` the model must not be saved.
        """
        self.settle()
        if self.heartbeat is not None:
            step = self.steps_before + len(self._steps)
            replica_checks.check_replicas(self.heartbeat.guards, model, step=step)

    def has_bad_step(self) -> bool:
        """Whether a guard only warned of a fault that makes checkpoints worthless."""
        guards = None if self.heartbeat is None else self.heartbeat.guards
        if guards is None or guards.first_bad_step is None:
            return False
        guards.no_checkpoint()
        return True

    def logged(self, step: int, **values: Any) -> None:
        """Append one line to `steps.jsonl`, which survives if the run dies later."""
        is_step = "loss" in values  # an evaluation has none
        if is_step and self.on_log is not None and self._rank == 0:
            self.on_log(step, values)
        if self._steps_file is not None and self._rank == 0:
            line = {"step": step} | {key: _plain(value) for key, value in values.items()}
            with open(self._steps_file, "a", encoding="utf-8", opener=without_links) as file:
                file.write(json_line(line))

    def peaks(self) -> None:
        """Take the peaks now: before the save, which is no part of training."""
        self._stop_ledgers()
        self._keep_device_peaks()
        self._bytes["host_peak_bytes"] = memory.host_peak_bytes()
        self._bytes["host_shared_bytes"] = forking.shared_bytes

    def _keep_device_peaks(self) -> None:
        """Take the device's peaks since they were reset, which are no smaller than those before."""
        for name, now in (
            ("peak_bytes", memory.device_peak_bytes()),
            ("peak_reserved_bytes", memory.device_peak_reserved_bytes()),
        ):
            peaks = (self._bytes.get(name), now)
            self._bytes[name] = max((peak for peak in peaks if peak is not None), default=None)

    def close(self) -> None:
        """Remove all modes and hooks, also in the middle of a step."""
        # In reverse order: each may have replaced a method of the one before.
        self._stop_ledgers()
        self._hooks.close()
        if self._evidence is not None:
            self._evidence.close()
        self._clock.close()

    def first_step_alone(self) -> None:
        """Examine only the first step: no later call will mark the end of a step."""
        self._stop_ledgers()
        self._clock.close()

    def _start_ledgers(self) -> None:
        # Inside of the ledgers, which wrap the same methods: hooks are a stack, too.
        self._probe_hooks.callback(self._watch_step_within_backward())
        self._probe_hooks.callback(self._ledger.stop)
        self._ledger.start(self._model)
        if self._no_peak is None:
            # Inside the other ledger, and stopped before it: modes and hooks are a stack.
            self._probe_hooks.callback(self._peak_ledger.stop)
            self._peak_ledger.start(self._model, self._optimizer, device=self._device)

    def _stop_ledgers(self) -> None:
        self._probe_hooks.close()
        self._model = self._optimizer = None

    def finish(self, *, throughput_steps: int = 0) -> dict[str, Any]:
        """Gather the measured part of a record; the same on every rank.

        The last `throughput_steps` steps were on packed rows, only for timing.
        """
        self.settle()
        if self._steps and not self._verified:
            raise Refused("no optimizer step was taken, so what engaged was never seen whole")
        if "host_peak_bytes" not in self._bytes:
            self.peaks()
        ranks = gather_objects(self._of_this_rank())
        merged = merge(ranks, throughput_steps=throughput_steps, probed=self._probed)
        if self._earlier_losses is None:
            merged["not_measured"]["earlier_losses"] = "the checkpoint does not hold them"
        return merged | self._of_all_ranks(mismatches=[])

    def refused(self, error: Refused) -> dict[str, Any]:
        """Return the measured part of a refused run's record, from the facts observed so far."""
        return unmeasured() | {
            "status": "refused",
            "reason": str(error),
            "num_processes": self.requested.num_processes,
            "losses": [],
            "learning_rates": [],
            "skipped_steps": [],
            "timed_seconds": [],
            "memory": dict.fromkeys(memory.CATEGORIES),
            "per_rank": [],
            "not_measured": {},
            **self._of_all_ranks(error.mismatches),
            **dict.fromkeys(
                ("sample_ids", "gradients", "random_forward", "first_step_seconds", "validation")
            ),
        }

    def _of_all_ranks(self, mismatches: list[Mismatch]) -> dict[str, Any]:
        guards = None if self.heartbeat is None else self.heartbeat.guards
        return {
            "rehearsal": self.rehearsal,
            "first_step": self.steps_before + 1,
            "earlier_losses": self._earlier_losses,
            "attestation": {
                "asked": attestation.as_recorded(
                    self.requested.before_first_step() | self.requested.after_first_step()
                ),
                "engaged": attestation.as_recorded(self.actual),
                "held": not mismatches,
                "mismatches": [asdict(mismatch) for mismatch in mismatches],
                "notes": self.notes,
            },
            "guards": {"mode": "off"} if guards is None else guards.described(),
        }

    # The first step

    def _watch_clipping(self, accelerator: Any, backend: Backend) -> None:
        original = accelerator.clip_grad_norm_

        def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            # If the step runs within backward, it is done by now.
            if not self._verified and not backend.steps_in_backward:
                self._keep_gradients(backend, scale=_scale_of(accelerator))
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
            of_all = not (args or kwargs) and _are_trained(parameters, self._model)
            if of_all and not backend.steps_in_backward:
                # Only in fp16 does Accelerate clip by the norm of unscaled gradients.
                unscales = accelerator.mixed_precision == "fp16"
                self._gather_gradients(scale=_scale_of(accelerator) if unscales else 1.0)
            with (
                self._clock.within("optimizer"),
                self._ledger.within("clipping"),
                self._peak_ledger.within("optimizer"),
            ):
                norm = original(parameters, max_norm, *args, **kwargs)
            self.clip = 0.0 if math.isinf(max_norm) else float(max_norm)
            self._grad_norm = norm
            return norm

        self._hooks.callback(replace_method(accelerator, "clip_grad_norm_", clip_grad_norm_))

    def _watch_first_step(self, backend: Backend, model: Any, optimizer: Any) -> None:
        def before() -> None:
            if self._verified:
                return
            if self._gradients is None or self._gradients.step <= len(self._steps):
                # No gradients were clipped since the step began.
                self._keep_gradients(backend, scale=backend.held_scale(optimizer))
            self.actual |= attestation.actual_at_step(model)
            self._bytes["gradients_bytes"] = memory.gradient_bytes(model)

        def after() -> None:
            skipped = backend.skipped(optimizer)
            if not backend.steps_in_backward:
                self._found_inf = skipped
            # fp16 may have skipped it: then the first step is yet to come.
            if not self._verified and not skipped:
                if backend.steps_in_backward:
                    undo()  # while no later replacement covers it; hooks of others have to stay
                self._after_first(model, optimizer)

        undo = backend.watch_step(optimizer, before=before, after=after)
        self._hooks.callback(undo)

    @property
    def _verified(self) -> bool:
        return "optimizer_class" in self.actual

    def _keep_gradients(self, backend: Backend, *, scale: float) -> None:
        """Keep the gradients of the first step that updates, which is the last one tried."""
        self._gradients = gradients.kept(backend, step=len(self._steps) + 1, scale=scale)

    def _after_first(self, model: Any, optimizer: Any) -> None:
        self.actual |= attestation.actual_after(model, optimizer)
        if "gradient_clipping" not in self.actual:
            self.actual["gradient_clipping"] = 0.0 if self.clip is None else self.clip
        # A step within the last backward comes before that micro-batch is recorded.
        unrecorded = int(backend_of(model).steps_in_backward)
        self.actual["gradient_accumulation_steps"] = len(self._step) + unrecorded
        earlier = [batch.reduced for batch in self._step[:-1]]
        if earlier and None not in earlier:
            self.actual["sync_each_batch"] = all(earlier)
        self._bytes |= memory.state_bytes(model, optimizer)
        self._bytes["nvme_bytes"] = memory.nvme_bytes(model)
        self.notes += attestation.kept_whole(self.actual)
        self._require(self.requested.after_first_step())
        self._judge_gradients()

    def _judge_gradients(self) -> None:
        """Say on rank 0 if the first step learned nothing, or one row alone; a collective."""
        if self._gradients is None:
            return
        step = self.steps_before + self._gradients.step
        shares = gather_objects(self._gradients.share())
        self.notes += gradients.not_judged(shares)
        for note in gradients.notes(shares, step=step):
            self._printed_notes.append(note)
            say_on_rank_0(note)
        self.notes += self._printed_notes

    def notes_to_print(self) -> list[str]:
        """Return the notes that were not printed in the first step."""
        return [note for note in self.notes if note not in self._printed_notes]

    # Every step

    def _send_heartbeat(self, *, skipped: bool) -> None:
        if self.heartbeat is None:
            return
        self._peak_ledger.stop()  # the heartbeat is no part of a step's memory
        with self._ledger.within("guards"):
            self.heartbeat.step_done(
                losses=[batch.loss for batch in self._step],
                grad_norm=self._grad_norm,
                # DeepSpeed skips in fp32 as well, where it means that something is wrong.
                skipped=(skipped or self._found_inf) if self._scales_loss else None,
                order=self._order.value,
                busy_seconds=self._clock.busy_seconds,
                sample_ids=[batch.sample_ids for batch in self._step],
            )

    # The step after the first

    def _gather_gradients(self, *, scale: float) -> None:
        """Gather the full gradients of the probe step before they are clipped; a collective."""
        if not self._ledger.running:
            return
        self._keep_device_peaks()
        with _disable_current_modes():  # the ledgers count what a step itself does
            self._full_gradients = gradients.gather_full(backend_of(self._model), scale=scale)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def _watch_step_within_backward(self) -> Undo:
        """Gather the gradients before the engine steps, where it clips and steps by itself."""
        backend, optimizer = backend_of(self._model), self._optimizer
        if not backend.steps_in_backward:
            return nothing
        return backend.watch_step(
            optimizer,
            before=lambda: self._gather_gradients(scale=backend.held_scale(optimizer)),
            after=nothing,
        )

    def _hold_norm(self) -> None:
        """Hold the norm that clipped to the gathered gradients; a collective.

        Raises:
            Refused: on every rank, if they differ or ranks have different gradients.
        """
        norm = self._grad_norm
        if norm is None:
            norm = backend_of(self._model).clip_norm()
        held = (self._full_gradients, None if norm is None else number(norm))
        attestation.refuse(gradients.clipping_mismatches(gather_objects(held)))
        self._full_gradients = None

    def _end_probe(self, *, skipped: bool) -> None:
        if not self._ledger.running:
            return
        self._probe_hooks.close()
        step = len(self._steps) + 1
        self._probed.append(step)
        if skipped:
            return  # fp16 left out the update, and the gathering after it
        ranks = self.requested.num_processes
        self._traffic = {
            "step": step,
            "micro_batches": len(self._step),
            "tokens": sum(batch.tokens for batch in self._step),
            "transport": traffic.transport(),
            "collectives": self._ledger.counted(),
            **traffic.textbook_volume(self._model, self.requested.strategy, ranks),
        }
        self._hold_norm()
        self._traffic_group = backend_of(self._model).traffic_group()
        self._slots = backend_of(self._model).slots()
        self._server_exchange = backend_of(self._model).server_exchange()
        if self._no_peak is None:
            self._peak = self._peak_ledger.counted(step)
        self._model = self._optimizer = None

    def _require(self, facts: dict[str, Any]) -> None:
        attestation.require(attestation.compare(facts, self.actual, rank=self._rank))

    # The end

    def _of_this_rank(self) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "machine": (machines.number(), socket.gethostname()),
            "data_parallel_rank": self._data_parallel_rank,
            "losses": self._losses_of_rank(),
            "grad_norms": [_plain(step.grad_norm) for step in self._steps],
            "learning_rates": [step.learning_rate for step in self._steps],
            "skipped": [number for number, s in enumerate(self._steps, 1) if s.skipped()],
            "sample_ids": [step.sample_ids() for step in self._steps],
            "tokens": [step.tokens() for step in self._steps],
            "supervised": [step.supervised() for step in self._steps],
            "phases": self._clock.seconds(),
            "warm_up": self._clock.warm_up(),
            "save_seconds": self._save_seconds,
            "memory": {key: self._bytes.get(key) for key in memory.CATEGORIES},
            "gradients": None if self._gradients is None else self._gradients.read(),
            "traffic": self._traffic,
            "pipeline": self._slots,
            "server_exchange": self._server_exchange,
            "traffic_group": self._traffic_group,
            "peak": self._peak,
            "no_peak": self._no_peak,
            "device": self._device,
            # The user's whole waiting time, with imports, process groups and the save.
            "seconds": age_seconds(),
        }


def drop_steps_after(steps_file: Path, step: int) -> None:
    """Drop the lines of steps that will be trained again; rank 0 calls it."""
    if not steps_file.exists():
        return
    lines: list[str] = []
    for written in steps_file.read_bytes().splitlines():
        try:
            line = written.decode()
            if json.loads(line)["step"] <= step:
                lines.append(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # cut off when the earlier run died, or damaged since
    write_text(steps_file, "".join(f"{line}\n" for line in lines))


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    loss: torch.Tensor
    tokens: int
    supervised: torch.Tensor | None
    sample_ids: torch.Tensor | None
    reduced: bool | None
    """Whether its backward reduced the gradients; None: not looked at, or not up to the loop."""


@dataclass(frozen=True, slots=True)
class _RecordedStep:
    """References of one optimizer step; its methods read them, and wait for the device."""

    batches: list[_MicroBatch]
    grad_norm: Any
    learning_rate: float
    reported_skipped: bool
    """Whether the loop knows that fp16 left out the update."""

    found_inf: torch.Tensor | bool | None

    def loss(self) -> float:
        return float(sum(batch.loss.double().item() for batch in self.batches))

    def tokens(self) -> int:
        return sum(batch.tokens for batch in self.batches)

    def sample_ids(self) -> list[int] | None:
        known = [batch.sample_ids for batch in self.batches if batch.sample_ids is not None]
        complete = len(known) == len(self.batches)
        return [int(number) for ids in known for number in ids.tolist()] if complete else None

    def skipped(self) -> bool:
        return self.reported_skipped or bool(self.found_inf)

    def supervised(self) -> int | None:
        known = [int(b.supervised) for b in self.batches if b.supervised is not None]
        return sum(known) if len(known) == len(self.batches) else None


def _scale_of(accelerator: Any) -> float:
    """Return the factor by which losses are multiplied; reading it waits for the device."""
    return 1.0 if accelerator.scaler is None else float(accelerator.scaler.get_scale())


def _are_trained(parameters: list[Any], model: Any) -> bool:
    """Whether parameters are all those of a model that train; not of no model."""
    if model is None:
        return False
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return {id(parameter) for parameter in parameters if parameter.requires_grad} == trained


def _plain(value: Any) -> Any:
    return number(value) if isinstance(value, torch.Tensor) else value
