"""One start of one run: its folder, its config files, its command line, and its end."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.comparing.run.comparison import Comparison
from toolkit.comparing.run.folders import COMMAND_FILE, FailedStart, Finished
from toolkit.comparing.run.plan import Run
from toolkit.comparing.run.progress import ProgressLines
from toolkit.configs import ConfigOptions
from toolkit.configs.files import write_configs
from toolkit.errors import UsageError
from toolkit.escaping import shell_line
from toolkit.files import write_text
from toolkit.launching.launch import launch_command, run, shown_command
from toolkit.launching.outcome import WARM_PROCESS_ENDED, Outcome
from toolkit.records.json_files import write_json
from toolkit.records.record import read_record
from toolkit.records.results import SPEC_FILE, Status


def start_run(
    comparison: Comparison,
    planned: Run,
    folder: Path,
    *,
    progress: ProgressLines,
    repeat: int = 1,
    evidence_flags: Sequence[str] = (),
) -> Finished | FailedStart:
    """Run `planned` in the new `folder` to its end, and return how it ended.

    Its lines and steps go to `progress`. `repeat` is the number of this start of the run, from 1.
    `evidence_flags` are not part of the settings that identify the run.
    """
    # Only this start keeps states there, and they are removed after it.
    swap_folder, disk = folder / "nvme", comparison.options.nvme_path
    if disk is not None:
        swap_folder = disk.absolute() / f"{comparison.folder.name}-{folder.name}"
    command, variables = write_run(
        replace(planned, flags=(*planned.flags, *evidence_flags)),
        folder,
        spec=planned.spec(rehearsal=comparison.plan.rehearsal),
        swap_folder=swap_folder,
    )
    try:
        outcome = run(
            command,
            folder=folder,
            timeout=comparison.options.timeout,
            num_processes=planned.num_processes,
            environment=variables,
            loopback=True,
            on_line=progress.line,
            on_step=progress.step,
        )
    finally:
        # The folder holds all optimizer states of the run, and the next run needs the space.
        shutil.rmtree(swap_folder, ignore_errors=True)
    return end_of(folder, outcome, repeat=repeat)


def once_more_cold(
    start: Callable[[], Finished | FailedStart], *, name: str, progress: ProgressLines
) -> Finished | FailedStart:
    """Call `start`, and again where the warm process ended before the run: then it starts cold."""
    while isinstance(end := start(), FailedStart) and end.reason == WARM_PROCESS_ENDED:
        progress.say(f"{name}: {end.reason} It is started again.")
    return end


def write_run(
    planned: Run, folder: Path, *, spec: dict[str, Any], swap_folder: Path
) -> tuple[list[str], dict[str, str]]:
    """Write settings, configs and command into the run's folder; return command and variables."""
    folder.mkdir()  # fails where it exists: no start writes into the folder of another
    write_json(folder / SPEC_FILE, spec, private=True)
    on_nvme = "nvme" in (planned.strategy.offload_optimizer, planned.strategy.offload_parameters)
    options = ConfigOptions(
        num_processes=planned.num_processes, nvme_path=swap_folder if on_nvme else None
    )
    files = write_configs(planned.strategy, folder, options=options)
    flags = ("--output_dir", str(folder), *planned.flags)
    single = not planned.strategy.is_distributed
    variables = visible_gpus(single=single, rehearsal=spec["rehearsal"])
    # Accelerate overwrites the variable with the GPU ids in the file of `single`, unless `all`.
    command = launch_command(
        files.accelerate, ["-m", "toolkit.train", *flags], gpu_ids="all" if single else None
    )
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    line = " ".join([*words, shell_line(shown_command(command))])
    write_text(folder / COMMAND_FILE, f"{line}\n", private=True)
    return command, variables


def visible_gpus(*, single: bool, rehearsal: bool) -> dict[str, str]:
    """Return the variable that shows a run its GPUs, if it has to be set."""
    if rehearsal:
        return {"CUDA_VISIBLE_DEVICES": ""}
    if not single:
        return {}
    # Only the first of the GPUs that the user made visible.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[0].strip()}


def end_of(folder: Path, outcome: Outcome, *, repeat: int) -> Finished | FailedStart:
    """Return the start in `folder` as it ended: finished only if it left a good record."""
    record, reason = None, outcome.reason
    status: Status = "failed" if outcome.status == "usage" else outcome.status
    try:
        record = read_record(folder)
    except UsageError as error:
        if status == "ok":
            status, reason = "failed", f"the run ended well but left no record: {error}"
    if status == "ok" and record is not None:
        if record["status"] == "ok":
            return Finished(record=record, folder=folder)
        status, reason = "failed", record["reason"] or "its record says that it failed"
    return FailedStart(
        status=status,
        reason=reason or "no reason was given",
        folder=folder,
        outcome=outcome,
        record=record,
        repeat=repeat,
    )
