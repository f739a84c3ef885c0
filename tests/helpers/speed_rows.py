"""Throughput that others published, as jobs; `python tests/helpers/speed_rows.py` prints how far
the middle of each predicted interval is from it."""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, replace

from shapes_for_tests import llama

from toolkit.jobs.shape import ModelShape, Tensor
from toolkit.planning.job import PlannedJob
from toolkit.planning.models.family import FAMILIES
from toolkit.planning.speed.computing import multiplied_parameters
from toolkit.planning.speed.estimate import PlannedSpeed, estimate_speed
from toolkit.planning.speed.gpus import Gpu, gpu
from toolkit.strategies import STRATEGIES


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published measurement."""

    name: str
    year: int
    """Of the software."""

    job: PlannedJob
    card: Gpu
    network: float | None
    """Bytes per second of a node."""

    tokens_per_second: float
    """Of one GPU."""

    @property
    def regime(self) -> str:
        if self.job.strategy.offloads:
            return "offload"
        if self.job.method != "full":
            return "adapters"
        if self.job.sequence > 8192:
            return "rows above 8,192"
        return "one node" if self.job.nodes == 1 else "several nodes"

    def speed(self) -> PlannedSpeed:
        return estimate_speed(self.job, self.card, internode_bytes_per_second=self.network)

    def middle_over_measured(self) -> float:
        rate = self.speed().tokens_per_second
        return math.sqrt(rate.low * rate.high) / self.job.gpus / self.tokens_per_second


def mpt(layers, hidden, heads, positions):
    """MPT and nanoGPT's GPT-2: no biases, learned positions, tied head, vocabulary padded."""
    tensors = [
        Tensor("wte.weight", (50368, hidden), "embedding"),
        Tensor("wpe.weight", (positions, hidden), "positions"),
    ]
    for layer in range(layers):
        for name, shape, kind in (
            ("norm_1", (hidden,), "norm"),
            ("attn.Wqkv", (3 * hidden, hidden), "linear"),
            ("attn.out_proj", (hidden, hidden), "linear"),
            ("norm_2", (hidden,), "norm"),
            ("ffn.up_proj", (4 * hidden, hidden), "linear"),
            ("ffn.down_proj", (hidden, 4 * hidden), "linear"),
        ):
            tensors.append(Tensor(f"blocks.{layer}.{name}.weight", shape, kind, layer))
    tensors.append(Tensor("norm_f.weight", (hidden,), "norm"))
    return ModelShape(
        name="mpt",
        architecture="MPTForCausalLM",
        tensors=tuple(tensors),
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=4 * hidden,
        kept=FAMILIES["gpt2"].kept_forms("0", grouped=False),
        gated=False,
        rotary=False,
        vocab_size=50368,
        max_positions=positions,
        tied=True,
    )


MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (64, 9216, 72),
}

LLAMA2_7B = llama(
    hidden=4096, intermediate=11008, layers=32, heads=32, kv_heads=32, vocab=32000, name="7b"
)
LLAMA2_13B = llama(
    hidden=5120, intermediate=13824, layers=40, heads=40, kv_heads=40, vocab=32000, name="13b"
)
LLAMA3_8B = llama(
    hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, vocab=128256, name="8b"
)
LLAMA3_70B = llama(
    hidden=8192, intermediate=28672, layers=80, heads=64, kv_heads=8, vocab=128256, name="70b"
)
QWEN_7B = llama(
    hidden=4096, intermediate=11008, layers=32, heads=32, kv_heads=32, vocab=151936, name="qwen"
)
TINY_LLAMA = llama(
    hidden=2048, intermediate=5632, layers=22, heads=32, kv_heads=4, vocab=32000, name="tiny"
)
GPT2 = mpt(*MPT["125m"], 1024)

# mosaicml/llm-foundry, scripts/train/benchmarking/README.md (2023): FSDP, bf16, 1600 Gb/s between
# A100 nodes. For every model on each GPU the rows of 2048 tokens, most and fewest nodes, and the
# shortest and longest sequence on one node.
MOSAIC = """
h100 70b 2048 64 8 4 full 1039
h100 70b 2048 32 2 16 full 882
h100 30b 8192 8 1 21 full 1384
h100 30b 2048 32 14 3 full 2308
h100 30b 2048 8 3 21 full 2002
h100 30b 1024 8 6 21 full 2084
h100 13b 32768 8 1 3 full 1976
h100 13b 2048 64 2 1 none 4800
h100 13b 2048 8 2 1 none 4792
h100 13b 1024 8 40 3 full 5502
h100 7b 65536 8 1 2 full 1956
h100 7b 2048 8 6 1 none 10643
h100 7b 1024 8 64 2 full 10203
h100 3b 65536 8 1 2 full 3262
h100 3b 2048 64 6 3 none 22525
h100 3b 2048 16 10 3 none 24142
h100 3b 512 8 40 6 none 27965
h100 1b 65536 8 1 2 full 5506
h100 1b 2048 64 20 1 none 44402
h100 1b 2048 8 14 1 none 45455
h100 1b 512 8 56 4 none 52275
h100 760m 32768 8 1 2 none 16291
h100 760m 2048 32 24 1 none 67971
h100 760m 2048 8 24 2 none 63147
h100 760m 512 8 96 2 none 83749
a100-80gb 70b 2048 64 8 4 full 410
a100-80gb 70b 2048 32 2 16 full 373
a100-80gb 30b 8192 8 1 21 full 574
a100-80gb 30b 2048 8 3 21 full 916
a100-80gb 30b 512 8 12 21 full 967
a100-80gb 13b 32768 8 1 3 full 1016
a100-80gb 13b 2048 8 2 3 none 2262
a100-80gb 13b 1024 8 40 3 full 2330
a100-80gb 7b 65536 8 1 2 full 1013
a100-80gb 7b 2048 8 6 2 none 4641
a100-80gb 7b 1024 8 64 2 full 4357
a100-80gb 3b 65536 8 1 2 full 1767
a100-80gb 3b 2048 8 10 2 none 10811
a100-80gb 3b 512 8 40 6 none 12127
a100-80gb 1b 65536 8 1 2 full 3044
a100-80gb 1b 2048 8 14 4 none 20513
a100-80gb 1b 512 8 56 4 none 23148
a100-80gb 760m 65536 8 1 2 full 4143
a100-80gb 760m 2048 8 24 2 none 32434
a100-80gb 760m 512 8 96 2 none 29446
a100-80gb 350m 65536 8 1 2 none 7524
a100-80gb 350m 2048 8 32 2 none 58782
a100-80gb 350m 512 8 128 2 none 69330
a100-80gb 125m 65536 8 1 2 none 20368
a100-80gb 125m 2048 8 40 2 none 142830
a100-80gb 125m 512 8 128 2 none 165681
a100-40gb 70b 2048 128 4 1 full 376
a100-40gb 70b 2048 64 2 1 full 276
a100-40gb 30b 2048 128 6 1 full 865
a100-40gb 30b 2048 32 4 1 full 857
a100-40gb 13b 8192 8 1 16 full 1407
a100-40gb 13b 2048 128 16 1 full 1972
a100-40gb 13b 2048 8 4 16 full 1668
a100-40gb 13b 512 8 16 16 full 1763
a100-40gb 7b 16384 8 1 4 full 2249
a100-40gb 7b 2048 128 18 1 full 3623
a100-40gb 7b 2048 8 12 4 full 3679
a100-40gb 7b 512 8 48 4 full 3895
a100-40gb 3b 32768 8 1 4 full 2955
a100-40gb 3b 2048 128 6 1 none 9538
a100-40gb 3b 2048 8 5 8 none 10065
a100-40gb 3b 512 8 20 8 none 11324
a100-40gb 1b 32768 8 1 4 full 5095
a100-40gb 1b 2048 128 10 1 none 18647
a100-40gb 1b 2048 8 8 8 none 19271
a100-40gb 1b 512 8 32 8 none 21782
a100-40gb 760m 32768 8 1 4 full 7183
a100-40gb 760m 2048 128 12 1 none 28940
a100-40gb 760m 2048 8 12 4 none 30173
a100-40gb 760m 512 8 48 4 none 34938
a100-40gb 350m 32768 8 1 4 none 13416
a100-40gb 350m 2048 128 18 1 none 51934
a100-40gb 350m 2048 8 16 4 none 55995
a100-40gb 350m 512 8 64 4 none 66284
a100-40gb 125m 32768 8 1 4 none 32651
a100-40gb 125m 2048 128 26 1 none 123936
a100-40gb 125m 2048 8 26 3 none 136334
a100-40gb 125m 512 8 104 3 none 156735
"""


def _mosaic(line):
    card, size, *numbers, checkpointing, seen = line.split()
    sequence, gpus, batch, accumulation = map(int, numbers)
    return Row(
        name=f"MPT-{size}, {gpus} {card}, {sequence} tokens",
        year=2023,
        job=PlannedJob(
            model=mpt(*MPT[size], sequence),
            strategy=STRATEGIES["fsdp"],
            gpus=gpus,
            nodes=max(1, gpus // 8),
            batch=batch,
            sequence=sequence,
            accumulation=accumulation,
            checkpointing=checkpointing,
        ),
        card=gpu(card),
        network=400e9 if card == "h100" else 200e9,
        tokens_per_second=int(seen),
    )


# torchtitan's own H100s have HBM2e and a limit of 500 W.
SLOWER_H100 = replace(gpu("h100"), name="H100, 500 W", memory_bandwidth=2.4e12, watts=500)
TITAN = {"strategy": "fsdp", "batch": 2, "sequence": 8192, "reduce_in_fp32": True}
MEASURED = {
    # torchtitan benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: without and with
    # torch.compile, selective checkpointing, 400 Gb/s a GPU.
    "titan 8B, 8 H100": (
        LLAMA3_8B,
        SLOWER_H100,
        8,
        TITAN | {"checkpointing": "every_second"},
        5762,
    ),
    "the same, compiled": (
        LLAMA3_8B,
        SLOWER_H100,
        8,
        TITAN | {"checkpointing": "every_second", "compile": True},
        6667,
    ),
    "titan 8B, 128 H100": (
        LLAMA3_8B,
        SLOWER_H100,
        128,
        TITAN | {"checkpointing": "every_second"},
        5605,
    ),
    # torchtitan docs/performance.md, 2024: 64 A100.
    "titan 8B, 64 A100": (
        LLAMA3_8B,
        "a100-80gb",
        64,
        TITAN | {"batch": 1, "checkpointing": "every_second"},
        2973,
    ),
    "titan 70B, 64 A100": (
        LLAMA3_70B,
        "a100-80gb",
        64,
        TITAN | {"batch": 1, "checkpointing": "full"},
        331,
    ),
    "titan 13B, 64 A100": (LLAMA2_13B, "a100-80gb", 64, TITAN | {"sequence": 4096}, 2162),
    # foundation-model-stack/fms-fsdp README.md: 400 Gb/s a node for A100, 800 for H100, compiled.
    "fms 13B, 128 A100": (
        LLAMA2_13B,
        "a100-80gb",
        128,
        {
            "strategy": "fsdp",
            "batch": 2,
            "sequence": 4096,
            "checkpointing": "every_second",
            "compile": True,
        },
        1800,
    ),
    "fms 13B, 96 H100": (
        LLAMA2_13B,
        "h100",
        96,
        {
            "strategy": "fsdp",
            "batch": 2,
            "sequence": 4096,
            "checkpointing": "every_second",
            "compile": True,
        },
        3800,
    ),
    # huggingface/blog deepspeed-to-fsdp-and-back.md, table 3: Granite 7B, 10.4 and 10.6 s a step of
    # 8 rows a GPU, hence 4096 tokens; MFU 0.41 and 0.40. Such a batch fits with checkpointing only.
    "HF FSDP 7B, 4 A100": (
        LLAMA2_7B,
        "a100-80gb",
        4,
        {"strategy": "fsdp", "batch": 8, "sequence": 4096, "checkpointing": "full"},
        3158.7,
    ),
    "HF ZeRO-3 7B, 4 A100": (
        LLAMA2_7B,
        "a100-80gb",
        4,
        {"strategy": "zero3", "batch": 8, "sequence": 4096, "checkpointing": "full"},
        3094.5,
    ),
    # jzhang38/TinyLlama README.md: 16 A100-40GB, fused kernels, 2M tokens a step.
    "TinyLlama, 16 A100": (
        TINY_LLAMA,
        "a100-40gb",
        16,
        {"strategy": "fsdp", "batch": 8, "sequence": 2048, "accumulation": 8},
        24_000,
    ),
    # karpathy/nanoGPT#110: 562 ms for 5 micro-batches of 12 rows of 1024 on each of 8 A100.
    "nanoGPT, 8 A100": (
        GPT2,
        "a100-40gb",
        8,
        {"strategy": "ddp", "batch": 12, "sequence": 1024, "accumulation": 5},
        5 * 12 * 1024 / 0.562,
    ),
    # karpathy/nanoGPT#182: 29 % of an A100's 312 TFLOPS by nanoGPT's count, on one RTX 4090.
    "nanoGPT, RTX 4090": (
        GPT2,
        "rtx 4090",
        1,
        {"strategy": "single", "batch": 12, "sequence": 1024, "accumulation": 5},
        0.29 * 312e12 / (6 * 124e6 + 12 * 12 * 768 * 1024),
    ),
} | {
    # QwenLM/Qwen README.md, Profiling of Memory and Speed: LoRA, one A100-80GB, 8 micro-batches of
    # one row, seconds an iteration. (Its Q-LoRA is on GPTQ kernels, which nothing here runs.)
    f"Qwen LoRA, {tokens} tokens": (
        QWEN_7B,
        "a100-80gb",
        1,
        {
            "strategy": "single",
            "method": "lora",
            "lora_rank": 64,
            "sequence": tokens,
            "accumulation": 8,
            "checkpointing": "full",
        },
        8 * tokens / seconds,
    )
    for tokens, seconds in (
        (256, 1.2),
        (512, 1.5),
        (1024, 2.8),
        (2048, 5.2),
        (4096, 10.1),
        (8192, 21.3),
    )
}


def _measured(name, model, card, gpus, options, seen):
    options = options | {"strategy": STRATEGIES[options["strategy"]]}
    return Row(
        name=name,
        year=2024,
        job=PlannedJob(model=model, gpus=gpus, nodes=max(1, gpus // 8), **options),
        card=card if isinstance(card, Gpu) else gpu(card),
        network={"a100-80gb": 50e9, "a100-40gb": 50e9}.get(card, 100e9),
        tokens_per_second=seen,
    )


# stas00/ml-engineering insights/when-to-upgrade-gpus/README.md: Llama-3.1-8B on 8 GPUs, a row of
# 8,192 tokens on each, torch 2.13, deepspeed 0.19; model TFLOPS with half of the scores. Attention,
# in kernels that torch does not bring, is an eighth of it; of longer rows it is most.
TFLOPS = """
h200 zero2 none 461
b200 zero2 none 778
h200 zero3 full 141
b200 zero3 full 167
"""


def _in_tflops(line):
    card, name, checkpointing, tflops = line.split()
    heavy = name == "zero3"  # with AdamW on the CPU, and Liger's loss
    strategy = STRATEGIES[name]
    per_token = 6 * (multiplied_parameters(LLAMA3_8B) + LLAMA3_8B.layers * 4096 * 8192)
    return Row(
        name=f"8B, 8 {card}, {name}{' with the CPU' if heavy else ''}",
        year=2026,
        job=PlannedJob(
            model=LLAMA3_8B,
            strategy=replace(strategy, offload_optimizer="cpu") if heavy else strategy,
            gpus=8,
            sequence=8192,
            checkpointing=checkpointing,
            chunked_loss=heavy,
        ),
        card=gpu(card),
        network=None,
        tokens_per_second=int(tflops) * 1e12 / per_token,
    )


ROWS = [
    *map(_mosaic, MOSAIC.strip().splitlines()),
    *(_measured(name, *values) for name, values in MEASURED.items()),
    *map(_in_tflops, TFLOPS.strip().splitlines()),
]


def by_regime():
    """Return the middle of the prediction over the measurement: all, by GPU, year and regime."""
    regimes = defaultdict(list)
    for row in ROWS:
        key = row.card.name, row.year, row.regime
        regimes[key].append(row.middle_over_measured())
    return dict(sorted(regimes.items()))


def table() -> str:
    lines = [
        "| GPU | software of | regime | rows | middle/measured, median | least | most |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, year, regime), ratios in by_regime().items():
        median, least, most = (f(ratios) for f in (statistics.median, min, max))
        numbers = f"{len(ratios)} | {median:.2f} | {least:.2f} | {most:.2f}"
        lines.append(f"| {name} | {year} | {regime} | {numbers} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
