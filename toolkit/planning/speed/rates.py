"""What machines reach of what their datasheets print: bounds, each with its mechanism and source.

A bound is from the least to the most that was seen. None is fitted to a row of a benchmark; the
tests hold the sums of all of them against public measurements.
"""

from __future__ import annotations

from typing import NamedTuple

from toolkit.jobs.terms import Interval

BEST_MATMUL = 0.87
"""Share of the dense rate that the best shape of a large bf16 product reaches, where the GPU
was not measured: the most of any NVIDIA GPU (A100, stas00/ml-engineering, MAMF table)."""

UNMEASURED_MATMUL = 0.5
"""The least that is expected of such a GPU."""

SHAPES = 0.65
"""Share of the best shape that the shapes of a training step reach, small and odd ones among them.
The least of some hundred published throughputs: those of tests/planning/test_speed.py lie within
what follows from it."""

GROUPED = 0.25
"""Factor on the least of that share in a model with experts, whose products are grouped and small.
Not fitted: PowerMoE-3b went three times as fast with other kernels than transformers' own
(fms-acceleration, refs/a100_80gb_moe.csv), and Qwen3-30B-A3B on H100s, under FSDP2 with
transformers 5, at 3,075 tokens a second and GPU, where 3,900 were the least by plan."""

FLASH_SHARE = {
    7: Interval(0.1, 0.5),
    8: Interval(0.2, 0.7),
    9: Interval(0.15, 0.55),
    10: Interval(0.15, 0.75),
}
"""Share of the dense rate in flash kernels, the masked half not counted, by the major number of the
compute capability; later ones as 10. FlashAttention-2 reaches 0.5 to 0.73 on an A100 (abstract of
arXiv 2307.08691). On an H100 it reaches 0.35 (abstract of arXiv 2407.08608), and cuDNN's kernel,
the other one that torch has, up to 0.55 in forward: 539 of 989 TFLOPS, heads of 128, causal, rows
of 16k (same paper). FlashAttention-3's 0.62 beside it, 0.75 at its best, are of a package
that torch does not bring. All are less for short rows. Volta and Turing have none of them, but
torch's memory-efficient kernels: assumed, as is the last."""

EAGER_SHARE = Interval(0.2, 0.6)
"""The same for eager attention's batched products; its scores cross memory beside that."""

MEMORY_SHARE = Interval(0.6, 0.92)
"""Share of the memory bandwidth in kernels that only move data: 0.9 for large copies (4.3 of 4.8
TB/s on an H200), less for the many small ones."""

# Bytes per value that one token's elementwise work moves in forward, in 16 bits. Eager HF code
# raises to fp32, squares, means, multiplies twice and casts in RMSNorm: 38. torch's LayerNorm and
# what a compiler or Liger fuses reads and writes once: 4.
EAGER_RMS_NORM, FUSED_NORM = 38, 4
EAGER_ROPE, FUSED_ROPE = 18, 4
"""Per value of queries and keys: halves swapped, two products, a sum; or one pass."""

RESIDUAL = 6
"""Two reads and a write, twice a layer."""

EAGER_GATE, FUSED_GATE = 10, 6
"""Per value of a gated MLP's width: activation and product apart, or in one."""

ACTIVATION = 4
"""Per value of a plain MLP's width."""

BACKWARD = 2
"""Elementwise backward reads a gradient beside each saved value and writes another."""

AUTOCAST = 1.6
"""Under autocast the residual stream and the norms are fp32 and every linear layer casts its input:
twice the bytes in most of the traffic."""

SCORE_BYTES = Interval(20, 60)
"""Per score of eager attention: scaling, mask, fp32 softmax and its backward, in 16 and 32 bits."""

LOGIT_BYTES = Interval(16, 46)
"""Per logit: written in 16 bits, raised to fp32, log-softmax, its gradient and the cast back, with
or without copies between them."""

CHUNKED_LOGIT_BYTES = Interval(4, 16)
"""The same in Liger's fused head and loss, whose chunks partly stay in cache."""

UNFUSED_LOGIT_BYTES = Interval.exactly(60)
"""The same in the toolkit's own chunks, too large for a cache, by one operation after the other:
raised 6, `logsumexp` 24, subtracted 8, exponentials 8, masked 8, cast 6 (chunked_loss.py)."""

COMPILED_LOGIT_BYTES = Interval(4, 8)
"""The same where they are compiled: read in 16 bits, once more if the cache lost it, and written as
the gradient; the product itself writes the rest."""

WEIGHT_BYTES = Interval(0, 26)
"""Per trained weight and micro-batch. Reading it is part of its product's time at best, unless few
tokens leave the product less time than its weight takes to cross memory; at worst it is cast to 16
bits, read twice, and its gradient cast and added in fp32: 6 + 4 + 16."""

BF16_WEIGHT_BYTES = Interval(0, 10)
"""The same with `bf16_weights`: read twice, and the gradient added in 16 bits, nothing cast."""

FROZEN_BYTES = Interval(0, 6)
"""Per frozen weight and micro-batch: read in forward, backward and when recomputed."""

DEQUANTISED_BYTES = Interval(2.5, 10)
"""Per 4-bit weight and pass: half a byte read, two written, at best. At worst what LitGPT's table
tells: 7B LoRA with nf4 takes 79 ms more than without for two passes on an A100, 9.5 bytes a weight
(Lightning-AI/litgpt, tutorials/resource-tables.md)."""

OPERAND_BYTES = 2
"""The least of a weight as an operand of a product: 16 bits, to which 4-bit ones are raised."""

ADAPTER_BYTES = Interval(8, 14)
"""Per input and output value of a layer with adapters, in forward, and as much in backward: peft
casts the input to the adapters' fp32 and autocast casts it back, A reads it, B writes an output,
which is scaled and added apart (peft 0.21, tuners/lora/layer.py). At best nothing is cast."""

FUSED_ADAPTER_BYTES = Interval(4, 8)
"""The same where a compiler fuses casts, scale and sum."""


class Kernels(NamedTuple):
    """Kernels that a decoder layer launches."""

    forward: int
    backward: int


KERNELS = Kernels(forward=48, backward=87)
ADAPTED_KERNELS = Kernels(forward=94, backward=130)
"""Without adapters, and with them on each linear layer: the operators that compute, views left out,
of a Llama's layer under autocast (counted with torch 2.15, transformers 5.23, peft 0.21)."""

COMPILED_KERNELS = Interval(0.2, 0.6)
"""Share of them that are left in a compiled layer: at best the products and attention, and a fused
kernel between two of them; at most the 70 of 135 that inductor makes of the same layer for a CPU,
where it fuses less (torch 2.15)."""

KERNEL_SECONDS = Interval(5e-6, 21e-6)
"""Host time to launch a kernel from Python; a step is never shorter than all of them. One core of a
cloud's EPYC took 10.7 microseconds for each of those of a tiny Llama, and 12.0 with adapters (torch
2.15, tensors of a few values): the fastest cores are about twice as fast. LitGPT's tables have the
most: 2.8 ms a layer with Adapter and 4.4 ms with LoRA, which train 3B and 7B where the GPU has
little to do (Lightning-AI/litgpt, tutorials/resource-tables.md)."""

OPTIMIZER_PASSES = Interval(1, 2.8)
"""A fused AdamW goes through its operands once; torch's foreach goes through them for each of its
operations."""

STEP_SECONDS = Interval(1e-3, 20e-3)
"""Host time of a step outside of forward and backward: clipping, logging, data. Assumed."""

OVERLAP = Interval(0.5, 1.0)
"""Share of the work beside a collective that can hide it: its kernels take multiprocessors and
memory bandwidth from that work. Assumed."""

NVLINK_SHARE = Interval(0.5, 1.0)
"""Share of one direction's bandwidth as bus bandwidth in NCCL: 0.57 at 16 MiB, 0.98 at 256 MiB with
8 H200 (stas00/ml-engineering, network/benchmarks); about 0.78 with 8 A100."""

PCIE_SHARE = Interval(0.15, 0.8)
"""The same over PCIe: 0.44 with 8 and 0.56 with 4 RTX 5090 (NVIDIA/nccl#1639). What cards without
peer access reach through the memory of a virtual machine is assumed."""

HOST_COPY_SHARE = Interval(0.4, 0.85)
"""Share of PCIe's bandwidth in copies of pinned memory; the least where GPUs share a root port.
Assumed but for the most, which 25 of 31.5 GB/s make common."""

LATENCY_SECONDS = Interval(6.6e-6, 36.6e-6)
"""Of one call: torch's own model (distributed/tensor/_collective_utils.py), and 20 to 30
microseconds of host overhead above it (stas00/ml-engineering)."""

HOP_SECONDS = 0.6e-6
NODE_HOP_SECONDS = 2.7e-6
"""Of one step of the ring, inside a node and between nodes (torch, as above)."""

NETWORK_SHARE = Interval(0.6, 0.94)
"""Of a node's network bandwidth: 376 of 400 GB/s between 4 nodes of 8 B200 (stas00/ml-engineering);
0.85 on average with 3 nodes of 8 A100 on 4 HDR links (NVIDIA/nccl-tests#119)."""

UNKNOWN_NETWORK = Interval(1.25e9, 400e9)
"""Bytes per second of a node in one direction, if the table has none for the GPU: 10 Gb/s Ethernet
to eight 400 Gb/s cards."""

LEAST_HOST_BANDWIDTH = 12e9
"""Bytes per second that a fused CPU optimizer moves for each GPU of a node, at least: two busy x86
cores with torch 2.15's AdamW, and clouds give no GPU less (g6.xlarge has 4 hyper-threads)."""

MOST_HOST_BANDWIDTH = 460e9
"""Of a whole node: three quarters of the 614 GB/s of two sockets with eight channels of DDR5-4800
each, as in hosts of eight H100. Two 24-core Xeons of 2020 moved 28 bytes a parameter in 0.22 to
0.26 s per 1e9 (ZeRO-Offload, arXiv 2101.06840, table 4, cited from memory)."""

UNFUSED_ON_CPU = Interval(2.8, 7)
"""Times that AdamW with `foreach` takes on a CPU instead of the fused one: as many passes as on a
GPU at best; 6.8 on those two cores."""

NVME_BANDWIDTH = Interval(1e9, 7e9)
"""Bytes per second of a node's disk: a network-attached one to a PCIe 4.0 drive's datasheet. It is
the first thing to measure before a real run."""
