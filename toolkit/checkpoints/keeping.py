"""When a run saves a checkpoint and which ones it keeps, the same under both engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoints.folders import checkpoint_folder, rotate
from toolkit.checkpoints.preemption import Preempted, Preemption, heartbeat_of
from toolkit.checkpoints.writing import save_checkpoint
from toolkit.engines.prepared import Prepared
from toolkit.launching.ranks import say
from toolkit.measuring.attestation import gather_objects
from toolkit.measuring.finite import require_finite
from toolkit.measuring.recorder import Recorder


@dataclass(kw_only=True)
class Keeper:
    """Saves the checkpoints of one run."""

    output_dir: Path
    facts: dict[str, Any]
    recorder: Recorder
    limit: int | None = None
    """Checkpoints to keep; None: all."""

    every: int | None = None
    """Steps between two of them; None: only when asked to stop."""

    last_step: int = 0
    """Of the training. A run that is asked to stop there ends as it would have anyway, and weights
    that packed rows have moved on are nobody's."""

    write_beside: Callable[[Path], None] | None = None
    """Writes into each checkpoint what a run that resumes goes on with; rank 0 calls it."""

    preemption: Preemption | None = None
    newest: Path | None = None
    """The last one that this run saved, or the one that it goes on from."""

    def prepared(self, prepared: Prepared) -> None:
        """Note what the loop trains with: there a keeper is one of the observers."""
        self._prepared = prepared

    def step_done(self, step: int) -> None:
        """Save after a step of the loop that is due, and leave where that was asked for."""
        if self.due(step):
            self.save(self._prepared, step)
            self.leave_if_asked(step)

    def due(self, step: int) -> bool:
        """Whether to save after this step; the same on every rank."""
        by_count = self.every is not None and step % self.every == 0 and step <= self.last_step
        return by_count or self.stopping(step)

    def stopping(self, step: int) -> bool:
        heartbeat = heartbeat_of(self.recorder)
        asked = self.preemption is not None and heartbeat is not None and heartbeat.stop_agreed
        return asked and step < self.last_step

    def save(
        self,
        prepared: Prepared,
        step: int,
        *,
        output_dir: Path | None = None,
        write_more: Callable[[Path], None] | None = None,
        keep: Collection[Path] = (),
    ) -> Path | None:
        """Save a checkpoint, and then remove those beyond the limit; every rank calls it.

        Returns:
            Where; None when a step was not finite and the guards only warned of it: what came of
            that is not worth a checkpoint.

        Raises:
            GuardError: on every rank, when the last step was not finite, or ranks hold other
                weights that should hold the same: nothing is written.
            SaveError: on every rank, when any could not write, or the last update made weights
                that are not finite.
        """
        with self.recorder.aside():
            self.recorder.check_before_save(prepared.model)
        if self.recorder.spoiled():
            return None
        folder = checkpoint_folder(output_dir or self.output_dir, step)

        def write_files(draft: Path) -> None:
            for write in (self.write_beside, write_more):
                if write is not None:
                    write(draft)

        with self.recorder.aside():
            require_finite(prepared.model, folder)
            taken = save_checkpoint(
                folder, prepared, step=step, facts=self.facts, write_more=write_files
            )
            if prepared.accelerator.is_main_process:
                say(f"saved {folder} in {taken:.1f} s")
                rotate(folder.parent, folder, limit=self.limit, keep=keep)
        self.newest = folder
        return folder

    def leave_if_asked(self, step: int) -> None:
        """End the run when all ranks have agreed to stop, after the step was saved if it could be.

        Raises:
            Preempted: on every rank.
        """
        if not self.stopping(step):
            return
        own = self.preemption.seconds_since_asked() if self.preemption else None
        asked = [seconds for seconds in gather_objects(own) if seconds is not None]
        saved = self.newest == checkpoint_folder(self.output_dir, step)
        raise Preempted(step, self.newest, saved=saved, seconds=max(asked, default=None))


def steps_between(args: Any, *, steps: int, rows: int, global_batch: int) -> int | None:
    """Return what `--save_strategy` and `--save_steps` mean in steps; None for no checkpoints."""
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if strategy == "epoch":
        return -(-rows // global_batch)
    if strategy != "steps":
        return None
    # Below 1 it is a share of the run, as in the Trainer.
    return math.ceil(args.save_steps * steps) if args.save_steps < 1 else int(args.save_steps)
