"""One checkpoint, written by all ranks into one draft, and committed when all are through."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from toolkit.checkpoints.committing import committing
from toolkit.checkpoints.disk import in_words, room_missing
from toolkit.checkpoints.folders import shares
from toolkit.checkpoints.integrity import KIND
from toolkit.checkpoints.states import write_own
from toolkit.engines.backend import backend_of
from toolkit.engines.prepared import Prepared
from toolkit.errors import SaveError, UsageError
from toolkit.measuring.attestation import gather_objects
from toolkit.records.manifests import FORMAT, entry, file_names


def save_checkpoint(
    folder: Path,
    prepared: Prepared,
    *,
    step: int,
    facts: dict[str, Any],
    write_more: Callable[[Path], None] | None = None,
) -> float:
    """Write the state after `step` and put it in place as a whole; a collective.

    What stands in its place and was not committed here is kept aside.

    Args:
        folder: On a file system that all ranks share.
        prepared: What is trained.
        step: Optimizer steps that are done.
        facts: What a run that resumes from it must have in common.
        write_more: Writes further files into the draft, on rank 0.

    Returns:
        Seconds that it took.

    Raises:
        SaveError: on every rank, when it does not fit on the disk or any could not write its part;
            `folder` is as it was.
    """
    begun = time.monotonic()
    accelerator = prepared.accelerator
    listed: dict[str, dict[str, Any]] = {}

    def open_draft() -> str | None:
        if not accelerator.is_main_process:
            return None
        described = {"kind": KIND, "format": FORMAT, "step": step, "facts": facts}
        commit = committing(folder, listed=listed, shared=False, **described)
        return str(undo.enter_context(commit))

    def write_parts() -> None:
        write_own(draft, prepared)
        if write_more is not None and accelerator.is_main_process:
            write_more(draft)

    def close() -> None:
        commit.close()

    backend = backend_of(prepared.model)
    needed = sum(gather_objects(backend.checkpoint_bytes(prepared)))
    missing = _together(folder, lambda: room_missing(folder, needed))[0]  # rank 0 looked
    if missing is not None:
        raise SaveError(f"{folder} was not saved: {missing}")
    with ExitStack() as undo:
        draft = Path(_together(folder, open_draft)[0])
        _together(folder, lambda: _see(draft))
        try:
            backend.write_together(draft, prepared, step=step)
        except UsageError:
            raise
        except Exception as error:  # not told by `_together`: other ranks may be stuck in theirs
            who = f"rank {accelerator.process_index}"
            raise SaveError(f"{folder} was not saved. {who}: {in_words(error, folder)}") from error
        _together(folder, write_parts)
        for found in _together(folder, lambda: _entries(draft, accelerator)):
            listed |= found
        commit = undo.pop_all()
    _together(folder, close)
    return time.monotonic() - begun


def _together(folder: Path, act: Callable[[], Any]) -> list[Any]:
    """Return what `act` returned on every rank.

    Raises:
        SaveError: on every rank, when it failed on any.
    """
    value, error = None, None
    try:
        value = act()
    except Exception as failure:  # the other ranks wait: whatever it is, they must hear of it
        error = in_words(failure, folder)
    everyone = gather_objects((value, error))
    errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(everyone) if error]
    if errors:
        raise SaveError(f"{folder} was not saved. {'; '.join(errors)}")
    return [value for value, _ in everyone]


def _see(draft: Path) -> None:
    if not draft.is_dir():
        raise FileNotFoundError(
            f"{draft} is not there: --output_dir must be on a file system that all ranks share"
        )


def _entries(draft: Path, accelerator: Any) -> dict[str, dict[str, Any]]:
    """Sync and hash this rank's share of the files."""
    sizes = {name: {"bytes": (draft / name).stat().st_size} for name in file_names(draft)}
    own = shares(sizes, ranks=accelerator.num_processes)[accelerator.process_index]
    return {name: entry(draft, name) for name in own}
