"""Runs that others measured, as jobs: models, settings and where each was published."""

from __future__ import annotations

from dataclasses import replace

from shapes_for_tests import llama

from toolkit.planning.job import PlannedJob
from toolkit.planning.models.shape import Block, ModelShape, Tensor
from toolkit.strategies import STRATEGIES

GIB = 2**30
MIB = 2**20
GPUS_8 = 8


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
        # need_weights is left on, so torch computes the scores.
        block=Block(
            norm="layer",
            order="post",
            activation="gelu",
            qkv="fused",
            gate_up="none",
            rotary="none",
            softmax="plain",
            fused_attention=False,
        ),
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
        block=Block(
            norm="layer",
            order="post",
            activation="gelu",
            gate_up="none",
            rotary="none",
            softmax="plain",
        ),
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


def fsdp_qlora(*, batch, sequence, method="qlora"):
    """B.4: answer.ai's fsdp_qlora on two GPUs of 24 GB, with its default rank of 64."""
    return PlannedJob(
        model=LLAMA_2_7B,
        strategy=STRATEGIES["fsdp"],
        gpus=2,
        method=method,
        lora_rank=64,
        batch=batch,
        sequence=sequence,
        precision="bf16",
        checkpointing="full",
        keeps_logits=True,
    )
