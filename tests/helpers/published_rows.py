"""Memory that others published, as jobs, beside `calibration_cases.py`: rows that no constant was
made with before 2026-11-27, each with its link.

A figure whose source does not say whether its GB are 10^9 bytes or 2^30 counts as either.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from calibration_cases import (
    ADAPTERS,
    AUTOCAST_FSDP1,
    FUSED,
    GIB,
    GPUS_8,
    LLAMA_2_7B,
    LLAMA_3_8B,
    MIB,
    MISTRAL_7B,
    SHARDED,
    WHOLE,
    WHOLE_ADAPTERS,
    Measured,
)
from shapes_for_tests import llama

from toolkit.planning.job import PlannedJob
from toolkit.planning.models.resolve import resolve_model
from toolkit.strategies import STRATEGIES

POWERLM_3B = llama(
    hidden=2304, intermediate=9216, layers=40, heads=36, kv_heads=36, vocab=49152, tied=True
)
"""Its weights at rest after a step of pure bf16 are 6 bytes of 3.51 billion parameters."""

QWEN = {
    "1.8B": (2048, 5504, 24, 16, 151936),
    "7B": (4096, 11008, 32, 32, 151936),
    "14B": (5120, 13696, 40, 40, 152064),
    "72B": (8192, 24576, 80, 64, 152064),
}
"""Hidden size, width of the MLP, layers, heads and vocabulary of the first Qwen, by its configs."""

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)


def of_qwen():
    """Adapters of rank 64 on all linear layers, checkpointed, on A100s with torch 2.0 in 2023.

    Left out are its rows of 4 bits, which GPTQ has packed, those of two machines, and those with
    trained embeddings: their copies are in 16 bits there, and in fp32 in `toolkit.train`. Where
    several GPUs hold one model, the figure is their sum.
    """
    readme = "https://github.com/QwenLM/Qwen/blob/main/README.md#profiling-of-memory-and-speed"
    lora = {"method": "lora"}
    for size, strategy, gpus, changes, figures in (
        ("1.8B", "single", 1, lora, (6.7, 7.4, 8.4, 11.0, 16.2, 21.8)),
        ("1.8B", "zero3", 1, {}, (43.5, 43.5, 43.5, 43.5, 47.1, 48.3)),
        ("7B", "single", 1, lora, (20.1, 20.4, 21.5, 23.8, 29.7, 36.6)),
        ("7B", "zero3", 2, {}, (139.2, 148.0, 162.0)),
        ("14B", "single", 1, lora, (34.6, 35.1, 35.3, 37.4, 42.5, 55.2)),
        ("72B", "zero3", 4, lora, (215.4, 217.7, 222.6, 228.8, 249.0, 289.2)),
    ):
        hidden, intermediate, layers, heads, vocab = QWEN[size]
        shape = llama(
            hidden=hidden,
            intermediate=intermediate,
            layers=layers,
            heads=heads,
            kv_heads=heads,
            vocab=vocab,
        )
        regime = {1: WHOLE_ADAPTERS, 2: SHARDED, 4: ADAPTERS}[gpus] if changes else SHARDED
        method = "LoRA" if changes else "full"
        for length, figure in zip(LENGTHS, figures, strict=False):
            yield Measured(
                name=f"Qwen-{size} {method} 1 x {length} x 8 on {gpus}, {strategy}",
                regime=regime,
                job=PlannedJob(
                    model=shape,
                    strategy=STRATEGIES[strategy],
                    gpus=gpus,
                    sequence=length,
                    accumulation=8,
                    precision="bf16",
                    checkpointing="full",
                    lora_rank=64,
                    lora_dropout=0.05 if changes else 0.0,
                    **changes,
                ),
                figure="total",
                gib=figure / gpus,
                either_unit=True,
                source=readme,
                stack="Qwen's own code, torch 2.0",
            )


def of_fms_later():
    """Later files of fms-acceleration: pure bf16 under FSDP1, Mixtral, PowerLM, and fused kernels.

    `foak` are kernels of unsloth's kind. Adapters have a dropout of 0.1, and are on attention.
    """
    base = "https://github.com/foundation-model-stack/fms-acceleration/blob/main/scripts/benchmarks"
    mixtral = resolve_model("mistralai/Mixtral-8x7B-v0.1")
    first, later = "a100_80gb.csv", "a100_80gb_update_cross_entropy_and_deps.csv"
    granite, liger = "a100_80gb_granite.csv", "a100_80gb_liger.csv"
    full = {"method": "full", "precision": "no"}
    raised = {"method": "full"}  # to fp32 by Accelerate: 16 bytes a parameter at rest
    lora = {"method": "lora", "lora_dropout": 0.1}
    qlora = {"method": "qlora", "lora_dropout": 0.1}
    fused = {"chunked_loss": True}
    named = {id(MISTRAL_7B): "Mistral-7B", id(mixtral): "Mixtral", id(LLAMA_3_8B): "Llama-3-8B"}
    dry = {"lora_dropout": 0.0}
    for file, config, model, gpus, batch, changes, peak, nvml in (
        (first, "none", MISTRAL_7B, 2, 2, full, 36762859520, 44706),
        (first, "none", MISTRAL_7B, 2, 4, full, 36763056128, 53907),
        (first, "none", mixtral, 2, 2, lora | dry, 57540387840, 62617),
        (first, "none", mixtral, 2, 4, lora | dry, 64347637760, 69848),
        (later, "none", MISTRAL_7B, 1, 4, full, 72434837504, 77256),
        (later, "none", MISTRAL_7B, 1, 8, full, 72435230720, 72988),
        (later, "none", MISTRAL_7B, 2, 2, full, 36225939968, 44382),
        (later, "none", MISTRAL_7B, 2, 4, full, 36226136576, 53587),
        (later, "none", MISTRAL_7B, 1, 4, lora, 26704571904, 29576),
        (later, "none", MISTRAL_7B, 1, 8, lora, 38742912512, 43232),
        (later, "none", MISTRAL_7B, 2, 2, lora, 15144870400, 18678),
        (later, "none", MISTRAL_7B, 2, 4, lora, 21959827968, 26328),
        (later, "none", mixtral, 2, 2, lora, 57554708992, 63398),
        (later, "none", mixtral, 2, 4, lora, 64851605504, 70747),
        (later, "peft-bnb", MISTRAL_7B, 1, 4, qlora, 16373838336, 19912),
        (later, "peft-bnb", MISTRAL_7B, 1, 8, qlora, 28412178944, 34016),
        (later, "peft-bnb", MISTRAL_7B, 2, 2, qlora, 9424594432, 13284),
        (later, "peft-bnb", MISTRAL_7B, 2, 4, qlora, 15970067968, 21299),
        (granite, "none", POWERLM_3B, 1, 4, full, 35134836736, 47683),
        (granite, "none", POWERLM_3B, 1, 8, full, 47059390976, 52927),
        (granite, "none", POWERLM_3B, 2, 2, raised, 35198512128, 43779),
        (granite, "none", POWERLM_3B, 2, 4, raised, 35169178112, 45698),
        (granite, "none", POWERLM_3B, 1, 4, lora, 20193463808, 24383),
        (granite, "none", POWERLM_3B, 1, 8, lora, 33176473088, 41093),
        (granite, "none", POWERLM_3B, 2, 2, lora, 10322532864, 13849),
        (granite, "none", POWERLM_3B, 2, 4, lora, 16835885568, 22076),
        (granite, "peft-bnb", POWERLM_3B, 1, 4, qlora, 15151677952, 19379),
        (granite, "peft-bnb", POWERLM_3B, 1, 8, qlora, 28134687232, 35837),
        (granite, "peft-bnb", POWERLM_3B, 2, 2, qlora, 7826759168, 11269),
        (granite, "peft-bnb", POWERLM_3B, 2, 4, qlora, 14319836672, 19406),
        (liger, "foak", LLAMA_3_8B, 1, 4, lora, 37644015616, 50711),
        (liger, "foak", LLAMA_3_8B, 1, 4, qlora, 27259280384, 41221),
        (liger, "foak", LLAMA_3_8B, 1, 8, qlora, 48632712192, 75995),
        (liger, "foak", LLAMA_3_8B, 2, 4, lora, 31606073856, 47323),
        (liger, "foak", LLAMA_3_8B, 2, 4, qlora, 26509831680, 43054),
        (liger, "foak", LLAMA_3_8B, 2, 8, qlora, 47883263488, 78267),
        (liger, "foak", LLAMA_3_8B, 4, 4, raised, 47584840192, 66986),
        (liger, "foak", LLAMA_3_8B, 4, 4, lora, 27551078912, 43643),
        (liger, "foak", LLAMA_3_8B, 4, 8, lora, 48924510720, 78865),
        (liger, "foak", LLAMA_3_8B, 4, 4, qlora, 25112976896, 42590.5),
        (liger, "foak", LLAMA_3_8B, 4, 8, qlora, 46486408704, 77795.5),
        (liger, "foak-liger", LLAMA_3_8B, 1, 4, lora | fused, 24905936896, 25465),
        (liger, "foak-liger", LLAMA_3_8B, 1, 8, lora | fused, 33567698944, 34681),
        (liger, "foak-liger", LLAMA_3_8B, 1, 16, lora | fused, 50891223040, 53115),
        (liger, "foak-liger", LLAMA_3_8B, 1, 4, qlora | fused, 14411297792, 15527),
        (liger, "foak-liger", LLAMA_3_8B, 1, 8, qlora | fused, 22936744960, 24359),
        (liger, "foak-liger", LLAMA_3_8B, 1, 16, qlora | fused, 39987639296, 42409),
        (liger, "foak-liger", LLAMA_3_8B, 2, 4, lora | fused, 23383704064, 26877),
        (liger, "foak-liger", LLAMA_3_8B, 2, 8, lora | fused, 36071997952, 41607),
        (liger, "foak-liger", LLAMA_3_8B, 2, 16, lora | fused, 61448585728, 70589),
        (liger, "foak-liger", LLAMA_3_8B, 2, 4, qlora | fused, 17850271232, 22164),
        (liger, "foak-liger", LLAMA_3_8B, 2, 8, qlora | fused, 30402250240, 35872),
        (liger, "foak-liger", LLAMA_3_8B, 2, 16, qlora | fused, 55506208256, 63878),
        (liger, "foak-liger", LLAMA_3_8B, 4, 4, raised | fused, 40168839680, 54707.5),
        (liger, "foak-liger", LLAMA_3_8B, 4, 8, raised | fused, 44061352448, 63613),
        (liger, "foak-liger", LLAMA_3_8B, 4, 16, raised | fused, 60306944512, 79252.5),
        (liger, "foak-liger", LLAMA_3_8B, 4, 4, lora | fused, 19315503616, 23197),
        (liger, "foak-liger", LLAMA_3_8B, 4, 8, lora | fused, 32003797504, 37981),
        (liger, "foak-liger", LLAMA_3_8B, 4, 16, lora | fused, 57380385280, 66909),
        (liger, "foak-liger", LLAMA_3_8B, 4, 4, qlora | fused, 16453416448, 21677),
        (liger, "foak-liger", LLAMA_3_8B, 4, 8, qlora | fused, 29005395456, 35376),
        (liger, "foak-liger", LLAMA_3_8B, 4, 16, qlora | fused, 54109353472, 63405),
    ):
        method, name = changes["method"], named.get(id(model), "PowerLM-3b")
        if config.startswith("foak"):
            regime = FUSED
        elif method == "full":
            regime = WHOLE if gpus == 1 else SHARDED
        elif gpus == 1:
            regime = WHOLE_ADAPTERS
        else:
            regime = AUTOCAST_FSDP1 if method == "qlora" else ADAPTERS
        row = Measured(
            name=f"{name} {method} {batch} x 4096 on {gpus}, {config}",
            regime=regime,
            job=PlannedJob(
                model=model,
                strategy=STRATEGIES["single" if gpus == 1 else "fsdp"],
                gpus=gpus,
                lora_rank=16,
                lora_targets="attention",
                batch=batch,
                sequence=4096,
                dtype="bfloat16",
                checkpointing="full",
                padded=False,
                **changes,
            ),
            figure="allocated",
            gib=peak / GIB,
            source=f"{base}/refs/{file}",
            stack=f"fms-acceleration, {config}",
        )
        yield row
        yield replace(row, figure="total", gib=nvml * MIB / GIB)


def of_longlora():
    """LoRA on attention of Llama-2-7B, rank 8, under ZeRO-2 on 8 A100s, arXiv 2309.12307, 2023."""
    for length, figure in ((8192, 25.7),):
        yield Measured(
            name=f"Llama-2-7B LoRA 1 x {length} x 8 on 8, zero2",
            regime=ADAPTERS,
            job=PlannedJob(
                model=LLAMA_2_7B,
                strategy=STRATEGIES["zero2"],
                gpus=GPUS_8,
                method="lora",
                lora_rank=8,
                lora_targets="attention",
                sequence=length,
                accumulation=8,
                checkpointing="full",
                padded=False,
            ),
            figure="total",
            gib=figure,
            either_unit=True,
            source="https://arxiv.org/html/2309.12307v2",
            stack="LongLoRA, 2023",
        )


PUBLISHED = (*of_qwen(), *of_fms_later(), *of_longlora())
"""Rows of 2026-11-27."""

HELD_OUT = Path(__file__).with_name("held_out_rows.txt")
"""Links of the rows that no constant may be fitted to, one a line."""


def is_drawn(row: Measured) -> bool:
    """Whether a row is one of the third that is kept out of every fit, by the hash of its link."""
    return int(hashlib.sha256(row.link.encode()).hexdigest(), 16) % 3 == 0
