"""A run that failed: what its ranks last said, and what is known to help."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from toolkit.launching.outcome import shorten
from toolkit.launching.status import RankStatus
from toolkit.records.results import RankEnd

OUT_OF_MEMORY: Final = (
    "Use a smaller --global_batch_size or -- --max_length, or a strategy that shards or offloads "
    "more: zero3, fsdp, zero3_offload, fsdp_offload."
)

FIXES: Final[tuple[tuple[str, str], ...]] = (
    (
        r"libaio",
        "Install libaio's headers (libaio-dev on Debian and Ubuntu), then run again.",
    ),
    (
        r"Python\.h: No such file",
        "Install this Python's headers (python3-dev on Debian and Ubuntu), then run again.",
    ),
    (
        r"CUDA_HOME|nvcc.*not found|[Cc]uda.*does not match the version.*compile",
        "DeepSpeed compiles its NVMe offload with CUDA's own compiler: install the CUDA toolkit of "
        "torch's version, or choose a strategy without NVMe.",
    ),
    (r"No space left on device|Errno 28", "Free disk space, or choose another --output."),
    (
        r"[Aa]ddress already in use|EADDRINUSE",
        "Another program took the port; the same command with the same --output tries again.",
    ),
    (r"No module named '(\w+)", "A package is missing: run `pip install .` again."),
    (
        r"[Cc]onnection.*(huggingface|hf\.co)|(huggingface|hf\.co).*(offline|resolve|connect)",
        "The Hub cannot be reached: name a local folder or file, or go online once.",
    ),
)


def known_fix(
    status: str, reason: str | None, tail: Sequence[str], *, timeout: float
) -> str | None:
    """Return what helps against a failure, or None where nothing is known."""
    if status == "oom":
        return OUT_OF_MEMORY
    if status == "timeout":
        return (
            f"It was ended after {timeout:.0f} s. If its last lines show progress, "
            "give it more with --timeout."
        )
    if status == "refused":
        return (
            "What engaged is not what was asked, so its numbers would belong to another strategy. "
            "The table of its attestation shows both; look for a flag, an environment variable or "
            "a package version that turned it off."
        )
    words = "\n".join([reason or "", *tail])
    return next((fix for pattern, fix in FIXES if re.search(pattern, words)), None)


def rank_ends(statuses: Sequence[RankStatus]) -> list[RankEnd]:
    """Return the last that each rank said, by rank."""
    return [
        RankEnd(
            rank=said.rank,
            state=said.state,
            step=said.step,
            error=None if said.error is None else shorten(str(said.error)),
            peak_bytes=said.peak_bytes,
        )
        for said in statuses
    ]
