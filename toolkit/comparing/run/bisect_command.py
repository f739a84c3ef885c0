"""The command that compares one step of a row and its control, ready to be typed."""

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

    The step is the first that broke a gate; the first of all where that is it.

    Args:
        row: Of a run that broke a gate.
        control: What it broke it against.
        options: Of the comparison.
    """
    if control is None or (row["strategy"], row["engine"]) == (
        control["strategy"],
        control["engine"],
    ):
        return None
    at = first_broken_step(row["broken"], options.max_steps) if row["broken"] else 1
    # Under a scale the numbers that make this very run, else those that were asked for.
    scaled = bool(options.scale) and row["strategy"] != "single"
    accumulation = row["gradient_accumulation_steps"]
    asked: dict[str, Any] = {
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
        for name, value in asked.items()
        if value is not None and value != usual.get(name)
        for text in (f"--{name}", str(value))
    ]
    sides = [f"{each['strategy']}-{each['engine']}" for each in (control, row)]
    flags = ["--", *redacted_words(options.train_flags)] if options.train_flags else []
    command = shell_line(["toolkit", "compare", "--bisect", *sides, *words, *flags])
    # Fewer ranks may find GPUs enough where all runs of the comparison did not.
    return f"CUDA_VISIBLE_DEVICES= {command}" if row["rehearsal"] else command


def first_broken_step(broken: Sequence[Broken], last_step: int) -> int:
    """Return the first step that broke a gate; the last where none names a step."""
    steps = [each["first_step"] for each in broken if each["first_step"] is not None]
    # An evaluation before training is of step 0, and a run that ended early breaks one after it.
    return min(max(min(steps, default=last_step), 1), last_step)
