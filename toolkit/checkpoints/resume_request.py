"""The request of `--resume_from_checkpoint`, read without torch and before ranks communicate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toolkit.checkpoints.folders import checkpoints_in
from toolkit.errors import UsageError
from toolkit.records.manifests import checkpoint_step
from toolkit.records.record import RECORD_FILE

LAST: Final = "last"


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """The folder of a run's checkpoints, and one of them where the user named it."""

    output_dir: Path
    named: Path | None = None


def requested_checkpoint(values: Mapping[str, Any]) -> ResumeRequest | None:
    """Return the request to resume; None for a run from the start.

    Raises:
        UsageError: there is no run to resume; or the run would start from the beginning where an
            unfinished one has left checkpoints; or its rule for saving is not known here.
    """
    strategy = values.get("save_strategy")
    name = str(getattr(strategy, "value", strategy))
    if name not in ("None", "no", "steps", "epoch"):
        raise UsageError(f"--save_strategy {name} is not known here: use no, steps or epoch.")
    output_dir = Path(values["output_dir"])
    named = _named_checkpoint(values["resume_from_checkpoint"])
    if named is None:
        _refuse_a_second_start(output_dir)
        return None
    if named == LAST:
        return _last_in(output_dir)
    path = Path(named)
    if not path.is_dir():
        raise UsageError(
            f"--resume_from_checkpoint {named} is no folder. Pass a checkpoint-<step> folder, the "
            "folder of a run, or last."
        )
    return ResumeRequest(path.parent, path) if checkpoint_step(path) is not None else _last_in(path)


def folder_to_resume(resume: str | None, output_dir: str | None) -> str | None:
    """Return the folder that a run goes on in when `--output_dir` doesn't say.

    Raises:
        UsageError: `last` was asked for, and no folder was named.
    """
    named = _named_checkpoint(resume)
    if named is None or output_dir is not None:
        return output_dir
    if named == LAST:
        raise UsageError(
            "--resume_from_checkpoint last takes the newest checkpoint in --output_dir: pass the "
            "--output_dir of the run."
        )
    path = Path(named)
    return str(path.parent if checkpoint_step(path) is not None else path)


def _named_checkpoint(resume: str | None) -> str | None:
    """Return the value of `--resume_from_checkpoint`; None if it is off.

    A file of arguments, and HF's own scripts, ask for the last checkpoint by `true`.
    """
    if resume is None or resume.lower() in ("none", "false", ""):
        return None
    return LAST if resume.lower() in ("true", LAST) else resume


def _last_in(folder: Path) -> ResumeRequest:
    if not checkpoints_in(folder) and not list(folder.glob(".checkpoint-*.aside")):
        raise UsageError(
            f"{folder} holds no checkpoint to resume from. Nothing was started: to train from the "
            "beginning, leave --resume_from_checkpoint out."
        )
    return ResumeRequest(folder)


def _refuse_a_second_start(output_dir: Path) -> None:
    checkpoints = checkpoints_in(output_dir)
    if checkpoints and not (output_dir / RECORD_FILE).exists():
        raise UsageError(
            f"{output_dir} holds checkpoints of a run that was not finished, the newest of step "
            f"{checkpoint_step(checkpoints[0])}. Pass --resume_from_checkpoint last to go on with "
            "it, or another --output_dir."
        )
