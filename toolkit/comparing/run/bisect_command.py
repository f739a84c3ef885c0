"""The `toolkit compare --bisect` command for a row that broke a gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from toolkit.comparing.run.options import CompareOptions
from toolkit.escaping import shell_line
from toolkit.records.results import Broken, Control, Row
from toolkit.redaction import redacted_words


def bisect_command(row: Row, control: Control | None, options: CompareOptions) -> str | None:
    """Return the command that bisects a row and its control; None where they are one run.

    It names the first step that broke a gate, unless that is the first of all.

    Args:
        row: The row of a run that broke a gate.
        control: The run that it was judged against.
        options: Those of the comparison.
    """
    if control is None or (row["strategy"], row["engine"]) == (
        control["strategy"],
        control["engine"],
    ):
        return None
    at = first_broken_step(row["broken"], options.max_steps) if row["broken"] else 1
    # Under a scale the numbers that make this very run, else those of the options.
    scaled = bool(options.scale) and row["strategy"] != "single"
    accumulation = row["gradient_accumulation_steps"]
    flags: dict[str, Any] = {
        "num_processes": row["num_processes"] if scaled else options.processes,
        "gradient_accumulation_steps": accumulation
        if scaled
        else options.gradient_accumulation_steps,
        "global_batch_size": options.global_batch_size,
        "precision": options.precision,
        "nvme_path": options.nvme_path,
        **({} if at == 1 else {"max_steps": options.max_steps, "at": at}),
    }
    usual = asdict(CompareOptions()) | {"num_processes": CompareOptions().processes}
    words = [
        text
        for name, value in flags.items()
        if value is not None and value != usual.get(name)
        for text in (f"--{name}", str(value))
    ]
    sides = [f"{run['strategy']}-{run['engine']}" for run in (control, row)]
    train_flags = ["--", *redacted_words(options.train_flags)] if options.train_flags else []
    command = shell_line(["toolkit", "compare", "--bisect", *sides, *words, *train_flags])
    # Fewer ranks may find GPUs enough where all runs of the comparison did not.
    return f"CUDA_VISIBLE_DEVICES= {command}" if row["rehearsal"] else command


def first_broken_step(broken: Sequence[Broken], last_step: int) -> int:
    """Return the first step that broke a gate; the last where none names a step."""
    steps = [step for gate in broken if (step := gate["first_step"]) is not None]
    # An evaluation before training is of step 0, and a run that ended early breaks one after it.
    return min(max(min(steps, default=last_step), 1), last_step)
