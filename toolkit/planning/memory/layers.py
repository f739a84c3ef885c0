"""Bytes of one layer of a model for each token, by the dtypes that a job runs in."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from toolkit.errors import UsageError
from toolkit.jobs.kept import FP32, LayerBytes, Regime
from toolkit.jobs.options import LoraTargets
from toolkit.jobs.shape import ModelShape
from toolkit.planning.job import PlannedJob


def regime_of(job: PlannedJob) -> Regime:
    """Return the dtypes of a job.

    DDP and one process run fp32 weights under autocast. DeepSpeed casts the weights. FSDP2 casts
    them as it gathers them, and Accelerate runs autocast as well.
    """
    dropped = job.method != "full" and job.lora_dropout > 0
    return replace(_regime_of(job), compiled=job.compiles, adapter_dropout=dropped)


def _regime_of(job: PlannedJob) -> Regime:
    compute, backend = job.compute_size, job.backend
    if backend.casts_weights or job.precision == "no":
        autocast = backend.autocasts(job)
        return Regime(compute=compute, weight=compute, autocast=autocast, adapter=compute)
    if job.stream_in_fp32:
        packed = job.method == "qlora"
        return Regime(compute=compute, weight=FP32, autocast=True, returns_input=packed)
    weight = backend.weight_size(job) if job.method == "full" else compute
    return Regime(compute=compute, weight=weight, autocast=True)


WIDEST_GROUPED = 256
"""Widest head with which transformers passes grouped keys and values to SDPA as they are."""


def keeps_scores(job: PlannedJob) -> bool:
    """Whether SDPA computes rows without a mask in torch's own operations, which keep the scores.

    Without a mask, transformers does not repeat the keys and values that query heads share
    (`use_gqa_in_sdpa`). In fp32, no kernel on a GPU takes these: flash and cuDNN attention compute
    in 16 bits, and memory-efficient attention wants as many keys as queries (torch 2.11). Where
    ranks share rows, attention is another, and not measured in fp32.
    """
    model, elsewhere = job.model, job.on_cpu or job.backend.splits_rows
    if job.compute_size != FP32 or job.attention != "flash" or elsewhere:
        return False
    grouped = model.groups_heads and model.kv_heads < model.heads
    return grouped and model.head_dim <= WIDEST_GROUPED


@lru_cache(maxsize=4096)
def layer_bytes(
    model: ModelShape,
    regime: Regime,
    sequence: int,
    *,
    fused: bool,
    adapters: int = 0,
    targets: LoraTargets = "all-linear",
    kind: int = 0,
) -> LayerBytes:
    """Return the bytes of a layer for each token of a row of `sequence` tokens.

    With `fused`, attention runs in a kernel that never holds the scores, if the class supports it.
    `adapters` is the rank of LoRA's matrices beside the linear layers that are `targets`, 0 for
    training in full. `kind` is one of `layer_kinds`.

    Raises:
        UsageError: the model was not counted with this attention.
    """
    key = _key(model, regime, targets if adapters else "none", fused=fused)
    return model.kept.of_layer(key, kind, {**model.widths, "sequence": sequence, "rank": adapters})


@lru_cache(maxsize=1024)
def bytes_outside(
    model: ModelShape,
    regime: Regime,
    sequence: int,
    *,
    fused: bool,
    adapters: int = 0,
    targets: LoraTargets = "all-linear",
) -> float:
    """Return the bytes of a token that the last norm and the head keep.

    Raises:
        UsageError: the model was not counted with this attention.
    """
    key = _key(model, regime, targets if adapters else "none", fused=fused)
    return model.kept.outside(key, {**model.widths, "sequence": sequence, "rank": adapters})


def _key(model: ModelShape, regime: Regime, targets: str, *, fused: bool) -> str:
    key = regime.key(targets, fused=fused)
    if key not in model.kept.rows:
        raise UsageError(
            f"{model.name}: what autograd keeps of {model.architecture} could not be counted with "
            f"{'flash' if fused else 'eager'} attention. {model.note}"
        )
    return key
