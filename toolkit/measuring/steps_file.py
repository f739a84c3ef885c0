"""`steps.jsonl`: one line a step, of a run that may yet die and be resumed."""

from __future__ import annotations

import json
from pathlib import Path

from toolkit.files import write_text


def drop_steps_after(steps_file: Path, step: int) -> None:
    """Drop the lines of steps that will be trained again; rank 0 calls it."""
    if not steps_file.exists():
        return
    kept: list[str] = []
    for written in steps_file.read_bytes().splitlines():
        try:
            line = written.decode()
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # torn by the death that is being recovered from, or damaged since
    write_text(steps_file, "".join(f"{line}\n" for line in kept))
