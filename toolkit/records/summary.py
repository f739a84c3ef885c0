"""The summary of a run that ended well: on the terminal, in its record and in its model's card."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict

from toolkit.escaping import shell_line
from toolkit.records.fields import Count, FromOne, Size


class Summary(TypedDict):
    steps: Count
    """Optimizer steps of the whole training, those of earlier starts included."""

    epochs: Size
    """Rows trained, as a share of the rows of the data."""

    rows: Count
    """Rows trained, a repeated one each time."""

    tokens: Count
    """Their tokens, without padding."""

    first_loss: float | None
    """Loss of the first step; null where the checkpoint did not hold it."""

    last_loss: float
    """Loss of the last step."""

    perplexity: float | None
    """On the rows for evaluation, after the last step; null without any."""

    left_out: list[str]
    """Sentences on rows that were cut or dropped."""

    strategy: str
    """The strategy that was attested."""

    num_processes: FromOne
    """Number of ranks."""

    rehearsal: bool
    """Whether the run was a rehearsal on the CPU."""

    seconds: Size
    """From the start of the rank to the save of the model."""


def summary_lines(summary: Summary) -> list[str]:
    """Return the lines that stand on the terminal, and in the model's card."""
    first, perplexity = summary["first_loss"], summary["perplexity"]
    losses = f"{summary['last_loss']:.4f} at the last step"
    if first is not None:
        losses = f"{first:.4f} at the first step, {losses}"
    if perplexity is not None:
        losses += f"; perplexity {perplexity:,.2f} on the rows for evaluation"
    ranks, on_cpu = summary["num_processes"], summary["rehearsal"]
    devices = "the CPU" if on_cpu else "a GPU" if ranks == 1 else "a GPU each"
    processes = "1 process" if ranks == 1 else f"{ranks} processes"
    return [
        f"trained   {summary['steps']:,} steps, {_share(summary['epochs'])} epochs: "
        f"{summary['rows']:,} rows, {summary['tokens']:,} tokens",
        f"loss      {losses}",
        *(f"left out  {sentence}" for sentence in summary["left_out"]),
        f"attested  {summary['strategy']}, {processes} on {devices}",
        f"time      {timedelta(seconds=round(summary['seconds']))}",
    ]


def last_words(record: Mapping[str, Any], folder: Path, flags: Sequence[str]) -> list[str]:
    """Return the lines at the end of a run: its summary, the model's folder, commands to go on.

    Args:
        record: Content of `record.json` in `folder`.
        folder: As the user knows it.
        flags: Those that the run was started with.
    """
    method, model = record["training"], record["model"]["name"]
    final, whole = folder / "final", folder / ("merged" if method["merge"] else "final")
    is_adapter = method["method"] != "full"
    kind = f"adapters of {model}" if is_adapter else "the whole model"
    name = shlex.quote(folder.absolute().name)
    lines = [
        *summary_lines(record["summary"]),
        f"model     {final} ({kind})",
        f"try it    toolkit generate {shlex.quote(str(final))} 'Once upon a time'",
    ]
    if is_adapter and not method["merge"]:
        lines.append("go on     with --merge True a run saves a whole model, to go on from")
    else:
        others = without(flags, "model_name_or_path", "output_dir", "resume_from_checkpoint")
        words = [*others, "--model_name_or_path", str(whole), "--output_dir", f"{folder}-next"]
        lines.append(f"go on     toolkit train {shell_line(words)}")
    return [*lines, f"share it  hf upload {name} {shlex.quote(str(final))}"]


def without(flags: Sequence[str], *names: str) -> list[str]:
    """Return flags without those of these names, and without their values."""
    kept: list[str] = []
    leaves_out = False
    for word in flags:
        if word.startswith("--"):
            leaves_out = word.partition("=")[0][2:].replace("-", "_") in names
        if not leaves_out:
            kept.append(word)
    return kept


def _share(epochs: float) -> str:
    return f"{epochs:.2f}" if epochs >= 0.1 else f"{epochs:.2g}"
