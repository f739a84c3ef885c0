"""Any checkpoint that can be read, written as a portable one."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any, Final

from toolkit.checkpoints.atomic_folder import atomic_folder, room_missing
from toolkit.checkpoints.folders import KIND, checkpoint_folder
from toolkit.checkpoints.portable_files import (
    OPTIMIZER,
    PART_BYTES,
    PORTABLE,
    STATE_FILE,
    WEIGHTS,
    PortableState,
    plain_numbers,
)
from toolkit.checkpoints.reading import read_folder
from toolkit.checkpoints.stored import write_files
from toolkit.errors import UsageError
from toolkit.records.json_files import SCHEMA, write_json
from toolkit.records.manifests import FORMAT

TRAINER_STATE: Final = "trainer_state.json"

PARTS: Final = "part-{:05}.safetensors"

OWN: Final = ("losses.json", "rank-*.pt")
"""Files of the toolkit's own checkpoints that are the same in both forms."""


def convert(folder: Path, output: Path, *, base: Path | None = None) -> Path:
    """Write `output/checkpoint-<step>` in the portable form, and return it.

    Raises:
        UsageError: the folder cannot be read, or a run could not go on from what it holds.
        OSError: the disk has no room.
    """
    contents = read_folder(folder, base=base)
    lacks = [] if contents.states else ["no states of an optimizer"]
    lacks += ["no number of steps"] if contents.step is None else []
    if lacks:
        reasons = " and ".join([*lacks, *contents.missing])
        raise UsageError(
            f"{folder} has {reasons}: no run could go on from it. Write a model or an adapter: "
            f"toolkit checkpoint merge {folder} --output FOLDER"
        )
    assert contents.step is not None
    target = checkpoint_folder(output, contents.step)
    if target.resolve() == folder.resolve():
        raise UsageError(f"{target} is the checkpoint itself. Pass another --output.")
    require_room(
        target, sum(t.nbytes for t in (*contents.weights.values(), *contents.states.values()))
    )
    facts = {} if contents.manifest is None else contents.manifest["facts"]
    described: dict[str, Any] = {"kind": KIND, "format": FORMAT, "form": PORTABLE}
    with atomic_folder(target, shared=False, **described, step=contents.step, facts=facts) as draft:
        for pattern in (TRAINER_STATE, *(OWN if contents.library == "toolkit" else ())):
            for file in folder.glob(pattern):
                shutil.copyfile(file, draft / file.name)
        for name, tensors in ((WEIGHTS, contents.weights), (OPTIMIZER, contents.states)):
            write_files(tensors, draft / PORTABLE / name, PARTS, limit=PART_BYTES)
        ours = contents.library == "toolkit"
        state = PortableState(
            schema=SCHEMA,
            step=contents.step,
            ranks=contents.ranks or 1,
            strategy=contents.strategy if ours else f"{contents.library}: {contents.strategy}",
            groups=contents.groups,
            scheduler=plain_numbers(contents.scheduler),
            loss_scale=contents.loss_scale,
        )
        write_json(draft / PORTABLE / STATE_FILE, state)
    return target


def require_room(folder: Path, needed: int) -> None:
    """Require so many free bytes on the disk of a folder that is to be written.

    Raises:
        OSError: there are fewer.
    """
    if (missing := room_missing(folder, needed)) is not None:
        raise OSError(errno.ENOSPC, missing, str(folder))
