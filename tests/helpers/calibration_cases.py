"""Runs that others measured, as jobs: models, settings, figures, and where each was published."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shapes_for_tests import llama

from toolkit.jobs.kept import KeptForms
from toolkit.jobs.shape import ModelShape, Tensor
from toolkit.planning.job import PlannedJob
from toolkit.strategies import STRATEGIES

GIB = 2**30
MIB = 2**20
GPUS_8 = 8


def kept_by(encoder):
    """What benchmarks/known_models.py counted of an encoder."""
    counted = json.loads(Path(__file__).with_name("encoders.json").read_text(encoding="utf-8"))
    rows = counted["rows"][encoder]
    return KeptForms(features=counted["features"], forms=counted["forms"], rows=rows)


def layer_norm(name, hidden, layer=None):
    return [
        Tensor(f"{name}.weight", (hidden,), "norm", layer),
        Tensor(f"{name}.bias", (hidden,), "bias", layer),
    ]


def linear(name, rows, columns, layer=None, *, kind="linear"):
    return [
        Tensor(f"{name}.weight", (rows, columns), kind, layer),
        Tensor(f"{name}.bias", (rows,), "bias", layer),
    ]


def encoder_blocks(*, hidden, layers, heads, vocab=50_000, positions=512):
    """The model of DeepSpeedExamples' training/bf16_master_weight/train.py."""
    tensors = [
        Tensor("embedding.weight", (vocab, hidden), "embedding"),
        Tensor("pos_embedding.weight", (positions, hidden), "positions"),
    ]
    for layer in range(layers):
        name = f"layers.{layer}"
        tensors += [
            Tensor(f"{name}.attention.in_proj_weight", (3 * hidden, hidden), "linear", layer),
            Tensor(f"{name}.attention.in_proj_bias", (3 * hidden,), "bias", layer),
            *linear(f"{name}.attention.out_proj", hidden, hidden, layer),
            *layer_norm(f"{name}.norm1", hidden, layer),
            *layer_norm(f"{name}.norm2", hidden, layer),
            *linear(f"{name}.ff.0", 4 * hidden, hidden, layer),
            *linear(f"{name}.ff.2", hidden, 4 * hidden, layer),
        ]
    tensors += linear("output_proj", vocab, hidden, kind="head")
    return ModelShape(
        name="nn.MultiheadAttention blocks",
        architecture="SimpleTransformerModel",
        tensors=tuple(tensors),
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=4 * hidden,
        vocab_size=vocab,
        max_positions=positions,
        tied=False,
        kept=kept_by("blocks"),
        gated=False,
        rotary=False,
        groups_heads=False,
    )


BLOCKS_254M = encoder_blocks(hidden=1024, layers=12, heads=16)
BLOCKS_7B = encoder_blocks(hidden=4096, layers=32, heads=32)
LLAMA_2_7B = llama(
    hidden=4096, intermediate=11008, layers=32, heads=32, kv_heads=32, vocab=32000, positions=4096
)


def deepspeed_example(*, gpus, bf16_states, model=BLOCKS_254M, batch=4, checkpointing="none"):
    """B.1: its two config files, baseline.json and bf16_full.json, and its loop."""
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 5e7,
            "stage3_param_persistence_threshold": 0,
        },
        "torch_autocast": {"enabled": False},
    }
    if bf16_states:
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        config["torch_autocast"] = {"enabled": True, "dtype": "torch.bfloat16"}
    return PlannedJob(
        model=model,
        strategy=STRATEGIES["zero3"],
        gpus=gpus,
        batch=batch,
        sequence=512,
        precision="bf16",
        optimizer="adamw_fused",  # DeepSpeed's FusedAdam
        attention="eager",
        checkpointing=checkpointing,
        deepspeed=config,
        zero_init=False,
        raises_logits=False,
        keeps_logits=True,
    )


def torchtitan(checkpointing):
    """B.2: FSDP1 of Llama-2-7B on 8 H100s, gradients reduced in fp32."""
    return PlannedJob(
        model=LLAMA_2_7B,
        strategy=STRATEGIES["fsdp"],
        gpus=GPUS_8,
        batch=8,
        sequence=2048,
        precision="bf16",
        checkpointing=checkpointing,
        reduce_in_fp32=True,
        keeps_logits=True,
        padded=False,
    )


def bert_large():
    hidden, layers = 1024, 24
    tensors = [
        Tensor("bert.embeddings.word_embeddings.weight", (30522, hidden), "embedding"),
        Tensor("bert.embeddings.position_embeddings.weight", (512, hidden), "positions"),
        Tensor("bert.embeddings.token_type_embeddings.weight", (2, hidden), "embedding"),
        *layer_norm("bert.embeddings.LayerNorm", hidden),
    ]
    for layer in range(layers):
        name = f"bert.encoder.layer.{layer}"
        tensors += [
            *linear(f"{name}.attention.self.query", hidden, hidden, layer),
            *linear(f"{name}.attention.self.key", hidden, hidden, layer),
            *linear(f"{name}.attention.self.value", hidden, hidden, layer),
            *linear(f"{name}.attention.output.dense", hidden, hidden, layer),
            *layer_norm(f"{name}.attention.output.LayerNorm", hidden, layer),
            *linear(f"{name}.intermediate.dense", 4 * hidden, hidden, layer),
            *linear(f"{name}.output.dense", hidden, 4 * hidden, layer),
            *layer_norm(f"{name}.output.LayerNorm", hidden, layer),
        ]
    tensors += linear("bert.pooler.dense", hidden, hidden)
    tensors += linear("classifier", 2, hidden, kind="head")
    return ModelShape(
        name="bert-large-uncased",
        architecture="BertForSequenceClassification",
        tensors=tuple(tensors),
        layers=layers,
        hidden_size=hidden,
        heads=16,
        kv_heads=16,
        head_dim=64,
        intermediate_size=4 * hidden,
        vocab_size=2,  # two labels, and no logits over a vocabulary
        max_positions=512,
        tied=False,
        dropout=True,
        kept=kept_by("bert"),
        gated=False,
        rotary=False,
        groups_heads=False,
    )


BERT_LARGE = bert_large()


def trainer_guide(**changes):
    """B.3: Hugging Face's guide to training on one GPU; the AdamW of its day takes the tensors one
    by one, so it needs no temporaries to speak of."""
    job = PlannedJob(
        model=BERT_LARGE,
        strategy=STRATEGIES["single"],
        gpus=1,
        batch=4,
        sequence=512,
        precision="no",
        optimizer="adamw_fused",
        attention="eager",
        zeroes_gradients=True,
    )
    return replace(job, **changes)


MISTRAL_7B = llama(
    hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, vocab=32000, positions=32768
)
YI_34B = llama(
    hidden=7168, intermediate=20480, layers=60, heads=56, kv_heads=8, vocab=64000, positions=4096
)
LLAMA_2_70B = llama(
    hidden=8192, intermediate=28672, layers=80, heads=64, kv_heads=8, vocab=32000, positions=4096
)
LLAMA_3_8B = llama(
    hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, vocab=128256, positions=8192
)


def fsdp_qlora(
    *, batch, sequence=2048, method="qlora", model=LLAMA_2_7B, strategy="fsdp", **changes
):
    """B.4: answer.ai's fsdp_qlora on two GPUs of 24 GB, with its default rank of 64."""
    job = PlannedJob(
        model=model,
        strategy=STRATEGIES[strategy],
        gpus=2,
        method=method,
        lora_rank=64,
        batch=batch,
        sequence=sequence,
        precision="bf16",
        checkpointing="full",
        keeps_logits=True,
        raises_frozen=False,
        padded=False,
    )
    return replace(job, **changes)


Figure = Literal["at_rest", "allocated", "reserved", "total"]
"""What was measured, by the name that the estimate has for it."""

WHOLE, WHOLE_ADAPTERS, SHARDED, ADAPTERS, OFFLOADED, AUTOCAST_FSDP1, FUSED = (
    "in full, whole on each GPU",
    "adapters, whole on each GPU",
    "in full, sharded",
    "adapters, sharded",
    "adapters, offloaded",
    "4-bit adapters under FSDP1 and autocast",
    "kernels of unsloth's kind, some with Liger's",
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One published figure of a run."""

    name: str
    regime: str
    job: PlannedJob
    figure: Figure
    gib: float
    source: str
    stack: str = ""
    either_unit: bool = False
    """Its unit may be 10^9 bytes as well as 2^30: the source says GB, and not which."""

    @property
    def link(self) -> str:
        return f"{self.source} {self.name}"


def of_deepspeed():
    """B.1, and the runs of 7B parameters on the same page, which no constant was made with."""
    source = "DeepSpeedExamples, training/bf16_master_weight"
    runs = [
        (
            f"254M on {gpus}, {'bf16' if bf16 else 'fp32'} states",
            {"gpus": gpus, "bf16_states": bf16},
        )
        for gpus, bf16 in ((1, False), (1, True), (4, False), (4, True))
    ]
    large = {"gpus": 4, "model": BLOCKS_7B, "batch": 1}
    runs += [
        (
            f"7B on 4, {'bf16' if bf16 else 'fp32'} states, checkpointing {kind}",
            large | {"bf16_states": bf16, "checkpointing": kind},
        )
        for kind in ("none", "full")
        for bf16 in (False, True)
    ]
    figures = [(4.14, 5.93), (2.71, 5.73), (1.29, 3.57), (0.94, 4.44)]
    figures += [(25.74, 41.28), (16.17, 33.20), (25.74, 31.38), (16.17, 18.93)]
    for (name, settings), (at_rest, peak) in zip(runs, figures, strict=True):
        row = Measured(
            name=name,
            regime=SHARDED,
            job=deepspeed_example(**settings),
            figure="at_rest",
            gib=at_rest,
            source=source,
        )
        yield row
        yield replace(row, figure="allocated", gib=peak)


def of_torchtitan():
    """B.2 with FSDP2's rows of the same page, as shares of 95.04 GiB; FSDP1's there in GiB."""
    for fsdp, kind, active, reserved in (
        ("FSDP1", "full", 23.58, 32.14),
        ("FSDP1", "every_second", 50.35, 63.90),
        ("FSDP2", "full", 0.2392 * 95.0396, 0.3264 * 95.0396),
        ("FSDP2", "every_second", 0.5213 * 95.0396, 0.6251 * 95.0396),
    ):
        row = Measured(
            name=f"Llama-2-7B 8 x 2048, {fsdp}, checkpointing {kind.replace('_', ' ')}",
            regime=SHARDED,
            job=torchtitan(kind),
            figure="allocated",
            gib=active,
            source="torchtitan#165",
        )
        yield row
        yield replace(row, figure="reserved", gib=reserved)
    # Its launcher sets expandable_segments:True.
    yield Measured(
        name="Llama-3.1-8B 2 x 8192, FSDP2, checkpointing selective, expandable segments",
        regime=SHARDED,
        job=replace(
            torchtitan("every_second"),
            model=LLAMA_3_8B,
            batch=2,
            sequence=8192,
            expandable_segments=True,
        ),
        figure="reserved",
        gib=82.4,
        source="torchtitan, docs/performance.md",
    )


def of_the_guide():
    """B.3, without the 1343 MiB that its CUDA context took."""
    for name, changes, nvml in (
        ("4 x 512", {}, 14949),
        ("1 x 512 x 4", {"batch": 1, "accumulation": 4}, 8681),
        (
            "1 x 512 x 4, checkpointing",
            {"batch": 1, "accumulation": 4, "checkpointing": "full"},
            6775,
        ),
        ("4 x 512, fp16", {"precision": "fp16"}, 13939),
        ("4 x 512, Adam in 8 bits", {"optimizer": "adamw_8bit"}, 13085),
    ):
        yield Measured(
            name=f"bert-large {name}",
            regime=WHOLE,
            job=trainer_guide(**changes),
            figure="reserved",
            gib=(nvml - 1343) * MIB / GIB,
            source="Hugging Face, perf_train_gpu_one",
        )


def of_answer_ai():
    """B.4 and the rest of its page: peaks of reserved memory, and two of allocated."""
    lora, offload, whole = {"method": "lora"}, {"strategy": "fsdp_offload"}, {"strategy": "ddp"}
    for regime, name, settings, figure, gib in (
        (ADAPTERS, "QLoRA 7B 1 x 512", {"batch": 1, "sequence": 512}, "reserved", 4.98),
        (ADAPTERS, "QLoRA 7B 1 x 2048", {"batch": 1}, "reserved", 5.21),
        (ADAPTERS, "QLoRA 7B 4 x 2048", {"batch": 4}, "reserved", 11.22),
        (ADAPTERS, "QLoRA 7B 10 x 2048", {"batch": 10}, "reserved", 20.97),
        (ADAPTERS, "LoRA 7B 1 x 512", lora | {"batch": 1, "sequence": 512}, "allocated", 8.28),
        (ADAPTERS, "LoRA 7B 1 x 512", lora | {"batch": 1, "sequence": 512}, "reserved", 10.24),
        (ADAPTERS, "LoRA 7B 1 x 2048", lora | {"batch": 1}, "allocated", 9.16),
        (ADAPTERS, "LoRA 7B 1 x 2048", lora | {"batch": 1}, "reserved", 10.22),
        (ADAPTERS, "LoRA 7B 4 x 2048", lora | {"batch": 4}, "reserved", 16.14),
        (ADAPTERS, "LoRA 7B 6 x 2048", lora | {"batch": 6}, "reserved", 21.35),
        (ADAPTERS, "QLoRA Yi-34B 2 x 2048", {"batch": 2, "model": YI_34B}, "reserved", 23.05),
        (WHOLE_ADAPTERS, "QLoRA 7B 8 x 2048", whole | {"batch": 8}, "reserved", 20.94),
        (WHOLE_ADAPTERS, "LoRA 7B 4 x 2048", whole | lora | {"batch": 4}, "reserved", 22.04),
        (OFFLOADED, "LoRA 7B 10 x 2048", offload | lora | {"batch": 10}, "reserved", 22.69),
        (OFFLOADED, "QLoRA 7B 12 x 2048", offload | {"batch": 12}, "reserved", 22.38),
        (
            OFFLOADED,
            "QLoRA Mistral-7B 12 x 2048",
            offload | {"batch": 12, "model": MISTRAL_7B},
            "reserved",
            22.54,
        ),
        (
            OFFLOADED,
            "QLoRA Mistral-7B 1 x 24576",
            offload | {"batch": 1, "sequence": 24576, "model": MISTRAL_7B},
            "reserved",
            22.54,
        ),
        (
            OFFLOADED,
            "QLoRA Yi-34B 4 x 2048",
            offload | {"batch": 4, "model": YI_34B},
            "reserved",
            22.98,
        ),
        (
            OFFLOADED,
            "QLoRA 70B 2 x 2048",
            offload | {"batch": 2, "model": LLAMA_2_70B},
            "reserved",
            14.92,
        ),
    ):
        yield Measured(
            name=name,
            regime=regime,
            job=fsdp_qlora(**settings),
            figure=figure,
            gib=gib,
            source="answer.ai, fsdp_qlora, benchmarks_03_2024.md",
        )


def of_peft():
    """QLoRA of 70B on two GPUs in peft's documentation, in what it calls GB."""
    for offloaded, strategy, gib in ((False, "fsdp", 35.6), (True, "fsdp_offload", 19.6)):
        yield Measured(
            name=f"QLoRA 70B 2 x 2048 x 2{', offloaded' if offloaded else ''}",
            regime=AUTOCAST_FSDP1,
            job=fsdp_qlora(
                batch=2,
                model=LLAMA_2_70B,
                strategy=strategy,
                accumulation=2,
                lora_rank=8,
                lora_dropout=0.1,
                keeps_logits=False,
            ),
            figure="total",
            gib=gib,
            either_unit=True,
            source="peft, docs/source/accelerate/fsdp.md",
        )


def of_fms():
    """Runs of Hugging Face's Trainer on A100s, with both torch's peak and NVML's bytes.

    Left out is full training under FSDP, whose weights and states are all in 16 bits. The adapters
    there are on the attention alone; those of a plan on all linear layers.
    """
    for regime, name, model, changes, peak_bytes, nvml in (
        (WHOLE, "in full 4", MISTRAL_7B, {"method": "full", "batch": 4}, 72971724288, 77705),
        (WHOLE, "in full 8", MISTRAL_7B, {"method": "full", "batch": 8}, 72972117504, 74383),
        (WHOLE_ADAPTERS, "LoRA 4", MISTRAL_7B, {"method": "lora", "batch": 4}, 26108963328, 29731),
        (WHOLE_ADAPTERS, "LoRA 8", MISTRAL_7B, {"method": "lora", "batch": 8}, 37098695168, 43195),
        (WHOLE_ADAPTERS, "QLoRA 4", MISTRAL_7B, {"batch": 4}, 15860019712, 19931),
        (WHOLE_ADAPTERS, "QLoRA 8", MISTRAL_7B, {"batch": 8}, 26849751552, 34355),
        (
            WHOLE_ADAPTERS,
            "QLoRA 4, the rest in fp32",
            MISTRAL_7B,
            {"batch": 4, "raises_frozen": True},
            22825932800,
            27023,
        ),
        (
            WHOLE_ADAPTERS,
            "QLoRA 8, the rest in fp32",
            MISTRAL_7B,
            {"batch": 8, "raises_frozen": True},
            40278956032,
            47145,
        ),
        (WHOLE_ADAPTERS, "QLoRA 4", LLAMA_2_70B, {"batch": 4}, 68159977472, 72829),
        (ADAPTERS, "LoRA 2", MISTRAL_7B, {"method": "lora", "batch": 2}, 15123161088, 18697),
        (ADAPTERS, "LoRA 4", MISTRAL_7B, {"method": "lora", "batch": 4}, 21433753600, 26235),
        (AUTOCAST_FSDP1, "QLoRA 2", MISTRAL_7B, {"batch": 2}, 9974622720, 13497),
        (AUTOCAST_FSDP1, "QLoRA 4", MISTRAL_7B, {"batch": 4}, 16587205120, 21479),
        (AUTOCAST_FSDP1, "QLoRA 2", LLAMA_2_70B, {"batch": 2}, 46524471808, 52632),
    ):
        gpus = 2 if regime in (ADAPTERS, AUTOCAST_FSDP1) else 1
        settings = {"method": "qlora", "raises_frozen": False} | changes
        size = "70B" if model is LLAMA_2_70B else "Mistral-7B"
        row = Measured(
            name=f"{size} {name.replace(',', ' x 4096,') if ',' in name else f'{name} x 4096'}",
            regime=regime,
            job=PlannedJob(
                model=model,
                strategy=STRATEGIES["single" if gpus == 1 else "fsdp"],
                gpus=gpus,
                lora_rank=16,
                sequence=4096,
                precision="bf16",
                dtype="bfloat16",
                checkpointing="full",
                padded=False,
                **settings,
            ),
            figure="allocated",
            gib=peak_bytes / GIB,
            source="fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv",
        )
        yield row
        yield replace(row, figure="total", gib=nvml * MIB / GIB)


MEASURED = (
    *of_deepspeed(),
    *of_torchtitan(),
    *of_the_guide(),
    *of_answer_ai(),
    *of_fms(),
    *of_peft(),
)
