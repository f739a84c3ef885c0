"""Upper ends of what strategies hold beside the states, by hand for Llama 3.1 8B and 70B."""

from dataclasses import replace

import pytest

from toolkit.planning.memory.estimate import estimate_memory
from toolkit.planning.plan import plan

SIZE = 2
"""Bytes of an element in bf16."""

WIDTH, INNER, KEYS, VOCABULARY, LAYERS = 4096, 14336, 1024, 128256, 32
LAYER = 2 * WIDTH * WIDTH + 2 * WIDTH * KEYS + 3 * WIDTH * INNER + 2 * WIDTH
HEAD = WIDTH * VOCABULARY
TAIL = HEAD + WIDTH
"""The head and the last norm; the embedding is a unit of its own."""

ALL = LAYERS * LAYER + TAIL + HEAD

WIDTH_70B, VOCABULARY_70B = 8192, 128256
UNIT_70B = WIDTH_70B * VOCABULARY_70B + WIDTH_70B
"""Of the 70B model the head with the norm is larger than a layer of 855,654,400 elements."""

BUCKET = 50_000_000
MAX_LIVE = 1_000_000_000
"""What the generated files set for models of this size."""


def terms(strategy, *, model="meta-llama/Llama-3.1-8B", gpus=4, **options):
    (row,) = plan(model, gpu="H100", gpus=gpus, strategies=(strategy,), **options).rows
    assert row.job.precision == "bf16"
    return {
        (term.name, term.phases[0]): (term.bytes.low, term.bytes.high)
        for term in estimate_memory(row.job).terms
    }


def test_fsdp_holds_up_to_three_layers_in_backward_and_at_the_end_of_forward():
    held = terms("fsdp")
    two_to_three = (2 * LAYER * SIZE, 3 * LAYER * SIZE)
    at_work = "the layer at work, the one after it, and a buffer of the all-gather"
    assert held[at_work, "backward"] == two_to_three
    last = "the last layer, gathered for backward, and buffers of all-gathers"
    assert held[last, "loss"] == two_to_three
    tail = "head and last norm, gathered from forward into backward"
    assert held[tail, "loss"] == (TAIL * SIZE, TAIL * SIZE)


def test_fsdp_holds_a_unit_s_gradients_and_two_inputs_of_reduce_scatters():
    held = terms("fsdp")
    head = "whole gradients of the head, and what they are reduced in"
    assert held[head, "head"] == (TAIL * SIZE, 2 * TAIL * SIZE)
    unit = "whole gradients of a unit, and what they are reduced in"
    assert held[unit, "backward"] == (2 * TAIL * SIZE, 3 * TAIL * SIZE)


def test_fsdp_that_keeps_what_it_gathered_holds_the_whole_model_and_the_last_buffers():
    held = terms("fsdp_grad_op")
    whole = "gathered weights, kept until backward is through"
    assert held[whole, "loss"] == (ALL * SIZE, ALL * SIZE)
    last = "buffers of the last all-gathers, which forward ends with"
    assert held[last, "loss"] == (0, (LAYER + TAIL) * SIZE)


@pytest.mark.parametrize(("overlaps", "buckets"), [(None, 1), (False, 1), (True, 2)])
def test_zero2_holds_two_buckets_where_reducing_overlaps_backward(overlaps, buckets, tmp_path):
    (row,) = plan("meta-llama/Llama-3.1-8B", gpu="H100", gpus=4, strategies=("zero2",)).rows
    zero = {"stage": 2, "reduce_bucket_size": BUCKET}
    zero |= {} if overlaps is None else {"overlap_comm": overlaps}
    job = replace(row.job, deepspeed={"zero_optimization": zero})
    (held,) = [
        term.bytes
        for term in estimate_memory(job).terms
        if term.name == "buckets that gradients are reduced in"
    ]
    assert (held.low, held.high) == (buckets * BUCKET * SIZE,) * 2


def test_zero3_holds_what_forward_and_backward_pass_within_its_distance():
    """With checkpointing each layer is met three times in place of twice."""
    name = ("gathered weights", "loss")
    options = {"model": "meta-llama/Llama-3.1-70B", "gpus": 8}
    _, high = terms("zero3", **options)[name]
    assert high == (MAX_LIVE // 2 + UNIT_70B) * SIZE
    _, high = terms("zero3", checkpointing=True, **options)[name]
    assert high == (MAX_LIVE // 3 + UNIT_70B) * SIZE
