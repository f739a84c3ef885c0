"""The saving of a run's checkpoints in both engines: when, how the ranks write, which stay.

A checkpoint holds model, optimizer, schedule, fp16 scale, random numbers of each rank. The backend
writes model and optimizer (`engines`): whole by rank 0 under DDP and in a single process, as shards
under FSDP2. DeepSpeed writes its own files. A portable checkpoint has the same files under all of
them. A manifest proves that files are unchanged, not who wrote them, so none is read with an
unpickler that runs code in it.
"""

from __future__ import annotations

import math
import random
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

import numpy as np
import torch

from toolkit.checkpoints.atomic_folder import atomic_folder, room_missing, save_failure
from toolkit.checkpoints.folders import KIND, checkpoint_folder, rotate, shares
from toolkit.checkpoints.portable import is_portable, read_portable, read_weights, write_portable
from toolkit.checkpoints.portable_files import PORTABLE
from toolkit.checkpoints.preemption import Preempted, Preemption
from toolkit.engines.backend import backend_of
from toolkit.engines.wrapped import Wrapped
from toolkit.errors import SaveError, UsageError
from toolkit.launching.ranks import say
from toolkit.measuring.attestation import gather_objects
from toolkit.measuring.finite import require_finite
from toolkit.measuring.recorder import Recorder
from toolkit.records.json_files import SCHEMA, read_as, write_json
from toolkit.records.manifests import FORMAT, entry, file_names

Form = Literal["native", "portable"]


def write_own(draft: Path, wrapped: Wrapped, *, portable: bool = False) -> None:
    """Write this rank's own files; of a portable checkpoint, they matter for random numbers."""
    accelerator, backend = wrapped.accelerator, backend_of(wrapped.model)
    if not portable:
        backend.write_alone(draft, wrapped)
    scaler = accelerator.scaler  # of fp16
    states = {
        "random": _random_state(),
        "scheduler": wrapped.scheduler.state_dict(),
        "learning_rates": [float(group["lr"]) for group in wrapped.optimizer.param_groups],
        "scaler": None if scaler is None else scaler.state_dict(),
        "swapped": None if portable else backend.extra_state(),
    }
    torch.save(states, draft / f"rank-{accelerator.process_index}.pt")


def read_states(folder: Path, wrapped: Wrapped, *, step: int) -> None:
    """Read everything but the random numbers; every rank calls it, before the first step."""
    backend = backend_of(wrapped.model)
    if is_portable(folder):
        read_portable(folder, wrapped)
        backend.load_extra_state(None)
        return
    # Before the optimizer's groups below: reading its states also sets their learning rates.
    backend.read(folder, wrapped, step=step)
    states = _read_own(folder, wrapped.accelerator)
    backend.load_extra_state(states["swapped"])
    wrapped.scheduler.load_state_dict(states["scheduler"])
    for group, rate in zip(wrapped.optimizer.param_groups, states["learning_rates"], strict=True):
        group["lr"] = rate
    if states["scaler"] is not None:
        wrapped.accelerator.scaler.load_state_dict(states["scaler"])


def read_model(folder: Path, wrapped: Wrapped, *, step: int) -> None:
    """Read the model alone when training is over; every rank calls it."""
    if is_portable(folder):
        read_weights(folder, wrapped)
    else:
        backend_of(wrapped.model).read_model(folder, wrapped, step=step)


def read_random_state(folder: Path, accelerator: Any) -> None:
    """Put this rank's random numbers back, after the loader drew its own from them."""
    if not any(folder.glob("rank-*.pt")):  # made of another library's files
        return
    state = _read_own(folder, accelerator)["random"]
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    torch.random.set_rng_state(state["cpu"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])


def _random_state() -> dict[str, Any]:
    """Return every generator's state of this rank, as plain values and tensors."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), [int(k) for k in keys], int(position), int(has_gauss), float(gauss)),
        "cpu": torch.random.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _read_own(folder: Path, accelerator: Any) -> dict[str, Any]:
    # `weights_only` unpickles tensors and plain values, and never runs code of the file.
    # Of fewer ranks that wrote, each file is read by several: only random numbers differ in them.
    files = len(list(folder.glob("rank-*.pt")))
    file = folder / f"rank-{accelerator.process_index % files}.pt"
    return torch.load(file, map_location="cpu", weights_only=True)


LOSSES_FILE: Final = "losses.json"


@dataclass(kw_only=True)
class CheckpointSaver:
    """Saves the checkpoints of one run."""

    output_dir: Path
    facts: dict[str, Any]
    recorder: Recorder
    limit: int | None = None
    """Checkpoints to keep; None: all."""

    every: int | None = None
    """Steps between two checkpoints; None: save only when asked to stop."""

    form: Form = "native"
    """`native`: the backend's own files, for the same strategy. `portable`: for any."""

    last_step: int = 0
    """Last step of the training. A run that is asked to stop there ends as it would have anyway,
    and weights after steps on packed rows are not worth saving."""

    write_beside: Callable[[Path], None] | None = None
    """Writes further results into each checkpoint for a run that resumes; rank 0 calls it."""

    preemption: Preemption | None = None
    newest: Path | None = None
    """The last checkpoint that this run saved, or the one that it resumed from."""

    def prepared(self, wrapped: Wrapped) -> None:
        """Note the wrapped objects of the loop, where a saver is one of the observers."""
        self._wrapped = wrapped

    def step_done(self, step: int) -> None:
        """Save after a step of the loop that is due, and leave where that was asked for."""
        if self.due(step):
            self.save(self._wrapped, step)
            self.leave_if_requested(step)

    def due(self, step: int) -> bool:
        """Whether to save after this step; the same on every rank."""
        by_count = self.every is not None and step % self.every == 0 and step <= self.last_step
        return by_count or self.stopping(step)

    def stopping(self, step: int) -> bool:
        if self.preemption is None or self.recorder.heartbeat is None:
            return False
        return self.recorder.heartbeat.stop_agreed and step < self.last_step

    def save(
        self,
        wrapped: Wrapped,
        step: int,
        *,
        output_dir: Path | None = None,
        write_more: Callable[[Path], None] | None = None,
        keep: Collection[Path] = (),
    ) -> Path | None:
        """Save a checkpoint, and then remove those beyond the limit; every rank calls it.

        Returns:
            The folder; None if a step was not finite and the guards only warned of it, since such
            weights are not worth a checkpoint.

        Raises:
            GuardError: on every rank, when the last step was not finite, or ranks hold other
                weights that should hold the same: nothing is written.
            SaveError: on every rank, when any could not write, or the last update made weights
                that are not finite.
        """
        with self.recorder.aside():
            self.recorder.check_before_save(wrapped.model)
        if self.recorder.has_bad_step():
            return None
        folder = checkpoint_folder(output_dir or self.output_dir, step)
        writers = [write for write in (self.write_beside, write_more) if write is not None]
        with self.recorder.aside():
            losses = self.recorder.all_losses()
            if losses is not None:
                writers.append(partial(_write_losses, losses))
            require_finite(wrapped.model, folder)
            begun = time.monotonic()
            _save_together(
                folder, wrapped, step=step, facts=self.facts, writers=writers, form=self.form
            )
            if wrapped.accelerator.is_main_process:
                say(f"saved {folder} in {time.monotonic() - begun:.1f} s")
                rotate(folder.parent, folder, limit=self.limit, keep=keep)
        self.newest = folder
        return folder

    def leave_if_requested(self, step: int) -> None:
        """End the run if all ranks have agreed to stop, after saving the step if possible.

        Raises:
            Preempted: on every rank.
        """
        if not self.stopping(step):
            return
        since_signal = self.preemption.seconds_since_signal() if self.preemption else None
        ranks = [seconds for seconds in gather_objects(since_signal) if seconds is not None]
        saved = self.newest == checkpoint_folder(self.output_dir, step)
        raise Preempted(step, self.newest, saved=saved, seconds=max(ranks, default=None))


class Losses(TypedDict):
    """The losses of all steps before a checkpoint."""

    schema: int
    losses: list[float]


def losses_before(folder: Path) -> list[float] | None:
    """Return the losses of the steps before a checkpoint; None for one of an older toolkit."""
    file = folder / LOSSES_FILE
    return read_as(file, Losses)["losses"] if file.exists() else None


def _write_losses(losses: list[float], draft: Path) -> None:
    write_json(draft / LOSSES_FILE, Losses(schema=SCHEMA, losses=losses))


def steps_between(args: Any, *, steps: int, rows: int, global_batch: int) -> int | None:
    """Return `--save_strategy` and `--save_steps` as a number of steps; None: no checkpoints."""
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if strategy == "epoch":
        return -(-rows // global_batch)
    if strategy != "steps":
        return None
    # Below 1 it is a share of the run, as in the Trainer.
    return math.ceil(args.save_steps * steps) if args.save_steps < 1 else int(args.save_steps)


def _save_together(
    folder: Path,
    wrapped: Wrapped,
    *,
    step: int,
    facts: dict[str, Any],
    writers: Collection[Callable[[Path], None]],
    form: Form,
) -> None:
    """Write one draft by all ranks, and put it in place as a whole; a collective.

    Another entry in its place that was not committed here is kept aside. `folder` lies on a file
    system that all ranks share, `step` counts the finished optimizer steps, `facts` must be equal
    in a run that resumes from it, and `writers` add files to the draft, on rank 0.

    Raises:
        SaveError: on every rank, when it does not fit on the disk or any could not write its part;
            `folder` is as it was.
    """
    accelerator, backend = wrapped.accelerator, backend_of(wrapped.model)
    entries: dict[str, dict[str, Any]] = {}
    portable = form == PORTABLE

    def open_draft() -> str | None:
        if not accelerator.is_main_process:
            return None
        described = {"kind": KIND, "format": FORMAT, "step": step, "facts": facts}
        described |= {"form": form} if portable else {}
        commit = atomic_folder(folder, listed=entries, shared=False, **described)
        return str(undo.enter_context(commit))

    def see_draft() -> None:
        if not draft.is_dir():
            raise FileNotFoundError(
                f"{draft} is not there: --output_dir must be on a file system that all ranks share"
            )

    def write_parts() -> None:
        if failed is not None:
            raise failed
        write_own(draft, wrapped, portable=portable)
        for write in writers if accelerator.is_main_process else ():
            write(draft)

    def entries_of_share() -> dict[str, dict[str, Any]]:
        sizes = {name: {"bytes": (draft / name).stat().st_size} for name in file_names(draft)}
        names = shares(sizes, ranks=accelerator.num_processes)[accelerator.process_index]
        return {name: entry(draft, name) for name in names}

    needed = sum(gather_objects(backend.checkpoint_bytes(wrapped)))
    missing = _on_every_rank(folder, lambda: room_missing(folder, needed))[0]  # rank 0 looked
    if missing is not None:
        raise SaveError(f"{folder} was not saved: {missing}")
    with ExitStack() as undo:
        draft = Path(_on_every_rank(folder, open_draft)[0])
        _on_every_rank(folder, see_draft)
        if portable:
            strategy = str(facts.get("strategy", facts.get("backend")))
            write = partial(write_portable, draft, wrapped, step=step, strategy=strategy)
        else:
            write = partial(backend.write_together, draft, wrapped, step=step)
        failed = _write_together(draft, folder, write, accelerator.process_index)
        _on_every_rank(folder, write_parts)
        for of_rank in _on_every_rank(folder, entries_of_share):
            entries |= of_rank
        commit = undo.pop_all()
    _on_every_rank(folder, commit.close)


def _write_together(
    draft: Path, folder: Path, write: Callable[[], Exception | None], rank: int
) -> Exception | None:
    """Write by all ranks together, and return the error of this rank's files, if it could go on."""
    try:
        return write()
    except UsageError:
        raise
    except Exception as error:  # other ranks may be stuck in theirs, and could not be told
        # Rank 0 may have removed the draft while this rank wrote into it.
        shutil.rmtree(draft, ignore_errors=True)
        raise SaveError(
            f"{folder} was not saved. rank {rank}: {save_failure(error, folder)}"
        ) from error


def _on_every_rank(folder: Path, act: Callable[[], Any]) -> list[Any]:
    """Return the results of `act` on every rank; a collective.

    Raises:
        SaveError: on every rank, when it failed on any.
    """
    value, error = None, None
    try:
        value = act()
    except Exception as failure:  # the other ranks wait: they must hear of any error
        error = save_failure(failure, folder)
    values, errors = zip(*gather_objects((value, error)), strict=True)
    failures = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]
    if failures:
        raise SaveError(f"{folder} was not saved. {'; '.join(failures)}")
    return list(values)
