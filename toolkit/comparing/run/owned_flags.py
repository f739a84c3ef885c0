"""Flags of `toolkit.train` that a comparison sets itself, and what to use in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from toolkit.errors import UsageError

KEEPS_FINAL: Final = "every run starts at step 1 and keeps its final weights only"
CONFIGURED: Final = "the strategy's own config file says it; name the strategy with --strategies"

OWNED_FLAGS: Final[dict[str, str]] = {
    "per_device_train_batch_size": "derived from compare's own --global_batch_size",
    "auto_find_batch_size": "derived from compare's own --global_batch_size",
    "gradient_accumulation_steps": (
        "compare has its own --gradient_accumulation_steps, in front of the --"
    ),
    "output_dir": "compare has its own --output",
    "engine": "compare has its own --engine, in front of the --",
    "strategy": "compare has its own --strategies",
    "max_steps": "compare has its own --max_steps, in front of the --",
    "max_train_steps": "compare has its own --max_steps, in front of the --",
    "num_train_epochs": "a comparison counts steps; compare has its own --max_steps",
    "bf16": "compare has its own --precision",
    "fp16": "compare has its own --precision",
    "tf32": "a comparison keeps TF32 off, or its gates would not hold; there is --precision bf16",
    "dropout": "a comparison sets it to 0, or its gates would not hold; toolkit.train keeps it",
    "throughput_steps": "compare has its own --throughput_steps, in front of the --",
    "dtype": "a comparison loads fp32 weights everywhere; compare has its own --precision",
    "resume_from_checkpoint": f"{KEEPS_FINAL}; give the same --output to resume the comparison",
    "deepspeed": CONFIGURED,
    "fsdp": CONFIGURED,
    "fsdp_config": CONFIGURED,
    "parallelism_config": CONFIGURED,
    "accelerator_config": CONFIGURED,
    "ddp_backend": CONFIGURED,
    "evidence": "toolkit compare --bisect sets it",
    "evidence_step": "toolkit compare --bisect has its own --at",
    "evidence_weights": "toolkit compare --bisect sets it",
    "local_rank": "the launcher sets it",
    "use_cpu": "set CUDA_VISIBLE_DEVICES= in front of toolkit compare to rehearse on the CPU",
}


def check_train_flags(flags: Sequence[str]) -> None:
    """Refuse flags of `toolkit.train` that a comparison sets itself.

    Raises:
        UsageError: names every such flag and what to use in its place.
    """
    findings: list[str] = []
    for flag in flags:
        if not flag.startswith("--"):
            continue
        name = flag[2:].partition("=")[0].replace("-", "_")
        if name in OWNED_FLAGS:
            findings.append(f"--{name}: {OWNED_FLAGS[name]}")
        elif name.startswith("save_"):
            findings.append(f"--{name}: {KEEPS_FINAL}")
    if findings:
        raise UsageError(
            "These flags are not free in a comparison, where every run is the same training. "
            + " ".join(f"{finding}." for finding in dict.fromkeys(findings))
        )
