"""Estimates against runs that others published, each named by its source.

Allocated bytes within 10%; reserved and NVML bytes inside the printed interval, whose ends are at
most 20% from its middle.
"""

import pytest
from calibration_cases import (
    BERT_LARGE,
    BLOCKS_7B,
    BLOCKS_254M,
    GIB,
    MIB,
    deepspeed_example,
    fsdp_qlora,
    torchtitan,
    trainer_guide,
)

from toolkit.planning.memory.estimate import estimate_memory


def assert_within(interval, measured):
    assert interval.low <= measured <= interval.high
    assert interval.high <= 1.2 * interval.middle


def test_the_models_have_the_parameters_that_were_published():
    assert BLOCKS_254M.parameters == 254_128_976
    assert round(BLOCKS_7B.parameters / 1e9, 2) == 6.86
    assert BERT_LARGE.parameters == 335_143_938  # 335,141,888 of the encoder, and two labels


# DeepSpeedExamples, training/bf16_master_weight/README.md; GPU not stated.
@pytest.mark.parametrize(
    ("gpus", "bf16_states", "after_step", "peak"),
    [(1, False, 4.14, 5.93), (1, True, 2.71, 5.73), (4, False, 1.29, 3.57), (4, True, 0.94, 4.44)],
    ids=["1-gpu-fp32-master", "1-gpu-bf16", "4-gpus-fp32-master", "4-gpus-bf16"],
)
def test_deepspeed_zero_3_of_254m_parameters(gpus, bf16_states, after_step, peak):
    estimate = estimate_memory(deepspeed_example(gpus=gpus, bf16_states=bf16_states))
    assert estimate.at_rest.middle == pytest.approx(after_step * GIB, rel=0.1)
    assert estimate.allocated.middle == pytest.approx(peak * GIB, rel=0.1)


# The same page: 4 GPUs, hidden 4096, 32 layers, 32 heads, batch 1. No constant was made with these.
@pytest.mark.parametrize(
    ("bf16_states", "checkpointing", "after_step", "peak"),
    [
        (False, "none", 25.74, 41.28),
        (True, "none", 16.17, 33.20),
        (False, "full", 25.74, 31.38),
        (True, "full", 16.17, 18.93),
    ],
)
def test_deepspeed_zero_3_of_7b_parameters(bf16_states, checkpointing, after_step, peak):
    job = deepspeed_example(
        gpus=4, bf16_states=bf16_states, model=BLOCKS_7B, batch=1, checkpointing=checkpointing
    )
    estimate = estimate_memory(job)
    assert estimate.at_rest.middle == pytest.approx(after_step * GIB, rel=0.01)
    assert estimate.allocated.middle == pytest.approx(peak * GIB, rel=0.1)


# pytorch/torchtitan PR #165: Llama-2-7B, 8 H100s, batch 8, sequence 2048.
@pytest.mark.parametrize(
    ("checkpointing", "active", "reserved"),
    [("full", 23.58, 32.14), ("selective", 50.35, 63.90)],
)
def test_torchtitan_fsdp_of_llama_2_7b(checkpointing, active, reserved):
    estimate = estimate_memory(torchtitan(checkpointing))
    assert estimate.allocated.middle == pytest.approx(active * GIB, rel=0.1)
    assert_within(estimate.reserved, reserved * GIB)


# Hugging Face's documentation, bert-large-uncased on one V100, sequence 512, by NVML.
@pytest.mark.parametrize(
    ("changes", "nvml"),
    [
        ({}, 14949),
        ({"batch": 1, "accumulation": 4}, 8681),
        ({"batch": 1, "accumulation": 4, "checkpointing": "full"}, 6775),
        ({"precision": "fp16"}, 13939),
        ({"optimizer": "adamw_8bit"}, 13085),
    ],
    ids=["plain", "accumulation", "checkpointing", "fp16", "adam-8-bit"],
)
def test_hugging_face_guide_to_one_gpu(changes, nvml):
    assert_within(estimate_memory(trainer_guide(**changes)).total, nvml * MIB)


# answer.ai, fsdp_qlora: Llama-2-7B on two GPUs of 24 GB.
@pytest.mark.parametrize(
    ("batch", "sequence", "reserved"),
    [(1, 512, 4.98), (1, 2048, 5.21), (4, 2048, 11.22), (10, 2048, 20.97)],
)
def test_answer_ai_qlora_of_llama_2_7b(batch, sequence, reserved):
    estimate = estimate_memory(fsdp_qlora(batch=batch, sequence=sequence))
    assert_within(estimate.reserved, reserved * GIB)


def test_answer_ai_lora_of_llama_2_7b():
    estimate = estimate_memory(fsdp_qlora(batch=1, sequence=2048, method="lora"))
    assert estimate.allocated.middle == pytest.approx(9.16 * GIB, rel=0.1)
    assert_within(estimate.reserved, 10.22 * GIB)
