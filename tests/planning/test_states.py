"""State bytes, to the byte: numbers worked out by hand, and the rules of each library.

tests/test_every_strategy.py holds them against real runs.
"""

from dataclasses import replace

import bitsandbytes
import pytest
import torch
from shapes_for_tests import gpt2, llama
from transformers import Adafactor

from toolkit.errors import UsageError
from toolkit.jobs import optimizers
from toolkit.jobs.shape import Tensor
from toolkit.jobs.terms import Held
from toolkit.jobs.weights import Tensors, weights_of
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.estimate import state_bytes
from toolkit.strategies import STRATEGIES

SMALL = llama(hidden=192, intermediate=768, vocab=1024)
"""The built-in model: 2,606,784 parameters in 39 tensors, 1,728 of them norms."""

# Odd on purpose: no dimension is divided by 2 or 3.
ODD = llama(
    hidden=101,
    intermediate=267,
    layers=3,
    heads=3,
    kv_heads=1,
    head_dim=26,
    vocab=2051,
    bias=True,
)
LARGE = llama(
    hidden=4096, intermediate=11008, layers=32, heads=32, kv_heads=32, vocab=32000, positions=4096
)


def job(strategy, *, model=SMALL, gpus=2, precision="no", **changes):
    return PlannedJob(
        model=model, strategy=STRATEGIES[strategy], gpus=gpus, precision=precision, **changes
    )


# As counted in rehearsals of two ranks on the built-in model (deepspeed 0.19.8, torch 2.13).
@pytest.mark.parametrize(
    ("strategy", "precision", "parameters", "master", "gradients", "optimizer"),
    [
        ("ddp", "no", 10_427_136, 0, 10_427_136, 20_854_428),
        ("zero1", "no", 10_427_136, 5_213_568, 5_213_952, 10_427_144),
        ("zero2", "no", 10_427_136, 5_213_568, 5_213_952, 10_427_144),
        ("zero2_offload", "no", 10_427_136, 5_213_568, 5_213_568, 10_427_136),
        ("zero3", "no", 5_220_480, 5_213_568, 5_213_568, 10_427_144),
        ("zero3_offload", "no", 5_220_480, 5_213_568, 10_427_136, 10_427_136),
        ("fsdp", "no", 5_213_568, 0, 5_213_568, 10_427_292),
        ("zero2", "bf16", 5_213_568, 5_213_568, 2_606_976, 10_427_144),
        ("zero3", "bf16", 2_610_240, 5_213_568, 2_606_784, 10_427_144),
        ("fsdp", "bf16", 5_213_568, 0, 5_213_568, 10_427_292),
    ],
)
def test_the_built_in_model_on_two_ranks(
    strategy, precision, parameters, master, gradients, optimizer
):
    assert state_bytes(job(strategy, precision=precision)).counted() == {
        "parameters_bytes": parameters,
        "master_bytes": master,
        "gradients_bytes": gradients,
        "optimizer_bytes": optimizer,
    }


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    "strategy", [name for name, s in STRATEGIES.items() if s.shards_optimizer and s.tensor == 1]
)
def test_the_ranks_together_hold_each_state_once_and_the_padding(strategy, precision):
    chosen = STRATEGIES[strategy]
    gpus = 4 if chosen.replicas > 1 else 3
    ranks = [
        state_bytes(job(strategy, model=ODD, gpus=gpus, precision=precision), rank).total
        for rank in range(gpus)
    ]
    moments = 8 * ODD.parameters * chosen.replicas
    held = sum(rank.in_memory + rank.nvme for rank in ranks)
    assert held > moments
    optimizer = sum(
        sum(
            getattr(
                state_bytes(job(strategy, model=ODD, gpus=gpus, precision=precision), r).optimizer,
                place,
            )
            for place in ("gpu", "host", "nvme")
        )
        for r in range(gpus)
    )
    assert moments <= optimizer <= 1.01 * moments


def test_fsdp_deals_out_rows_so_the_last_ranks_can_hold_fewer():
    ranks = [state_bytes(job("fsdp", model=ODD, gpus=8), rank) for rank in range(8)]
    assert ranks[0].optimizer.gpu > ranks[7].optimizer.gpu
    assert ranks[0].parameters == ranks[7].parameters  # padded alike


def test_zero_2_copies_the_tensors_at_a_rank_s_borders_whole():
    model = llama(layers=3)
    middle = state_bytes(job("zero2", model=model, gpus=3), 1).gradients.gpu
    assert middle > 4 * model.parameters / 3
    fullest_job = job("zero2", model=model, gpus=3)
    fullest = fullest_job.backend.fullest_states(fullest_job)
    assert fullest.gradients.gpu == max(
        state_bytes(job("zero2", model=model, gpus=3), rank).gradients.gpu for rank in range(3)
    )


def test_norms_and_biases_are_a_group_of_their_own():
    weights = weights_of(job("ddp", model=gpt2(hidden=66, layers=3, heads=3)))
    assert weights.decayed.elements + weights.undecayed.elements == weights.trained.elements
    # Two norms a layer and a last one, with biases, and four biases of linear layers.
    assert weights.undecayed.elements == 3 * (4 * 66 + 66 * (3 + 1 + 4 + 1)) + 2 * 66


def test_offloads_keep_nothing_of_the_states_on_the_gpu_but_what_stays_gathered():
    offloaded = state_bytes(job("zero3_offload", precision="bf16"))
    assert offloaded.parameters.gpu == 2 * 1728
    assert offloaded.optimizer.gpu == offloaded.master.gpu == offloaded.gradients.gpu == 0
    assert state_bytes(job("fsdp_offload")).total.gpu == 0
    zero2 = state_bytes(job("zero2_offload", precision="bf16"))
    assert zero2.parameters.gpu == 2 * SMALL.parameters
    assert zero2.total.gpu == zero2.parameters.gpu


def test_zero_3_that_offloads_parameters_alone_steps_on_the_gpu():
    on_gpu = job("zero3", precision="bf16")
    alone = replace(on_gpu, strategy=replace(on_gpu.strategy, offload_parameters="cpu"))
    states, expected = state_bytes(alone), state_bytes(on_gpu)
    assert states.master == expected.master
    assert states.gradients == expected.gradients
    assert states.optimizer == expected.optimizer


def test_a_bucket_size_that_is_no_number_is_named_though_nothing_is_planned_with_it():
    broken = {"zero_optimization": {"stage": 2, "allgather_bucket_size": "large"}}
    with pytest.raises(UsageError, match="allgather_bucket_size .* is 'large'"):
        state_bytes(job("zero2", deepspeed=broken))


def test_nvme_takes_states_in_pieces_and_parameters_past_a_billion():
    large = state_bytes(job("zero3_nvme", model=LARGE, precision="bf16"))
    elements = weights_of(job("ddp", model=LARGE)).decayed.partitioned(2)
    assert large.master.nvme == 4 * elements
    assert large.optimizer.nvme == 8 * elements
    # One piece is just above a billion, so it finds no room in the billion that RAM may keep.
    assert large.parameters.nvme > 4e9
    small = state_bytes(job("zero3_nvme", precision="bf16"))
    assert small.parameters.nvme == 0


def test_lora_pays_for_adapters_and_holds_the_base_once():
    full = state_bytes(job("ddp", precision="bf16", model=LARGE))
    lora = state_bytes(job("ddp", precision="bf16", model=LARGE, method="lora"))
    adapters = 16 * 32 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    assert lora.gradients == Held(gpu=4 * adapters)
    assert lora.parameters.gpu == 2 * LARGE.parameters + 4 * adapters
    assert full.gradients.gpu == 4 * LARGE.parameters


def test_qlora_holds_linear_layers_in_4_bits_with_their_constants():
    asked = job("ddp", precision="bf16", model=LARGE, method="qlora", raises_frozen=False)
    qlora = state_bytes(asked)
    raised = state_bytes(replace(asked, raises_frozen=True))
    sharded = replace(asked, strategy=STRATEGIES["fsdp"])
    assert state_bytes(replace(sharded, raises_frozen=True)) == state_bytes(sharded)
    linear = sum(t.elements for t in LARGE.of_kind("linear"))
    others = LARGE.parameters - linear
    assert raised.parameters.gpu - qlora.parameters.gpu == 2 * others
    adapters = 16 * 32 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    per_weight = (qlora.parameters.gpu - 2 * others - 4 * adapters) / linear
    # Half a byte; a byte for 64 weights; 4 bytes for 256 of those; tables.
    assert per_weight == pytest.approx(0.5 + 1 / 64 + 4 / (64 * 256), rel=1e-4)


@pytest.mark.parametrize(
    ("optimizer", "per_parameter"),
    [
        ("adamw", 8),
        ("adamw_fused", 8),
        ("sgd", 0),
        ("sgd_momentum", 4),
        ("lion", 4),
        ("adafactor", 0.0017),
    ],
)
def test_optimizers_differ_in_what_they_keep(optimizer, per_parameter):
    states = state_bytes(job("single", model=LARGE, gpus=1, optimizer=optimizer)).optimizer
    assert states.gpu / LARGE.parameters == pytest.approx(per_parameter, rel=0.02)


def test_8_bit_adam_keeps_scales_beside_its_bytes_and_embeddings_in_fp32():
    states = state_bytes(job("single", model=LARGE, gpus=1, optimizer="adamw_8bit")).optimizer
    embeddings = sum(t.elements for t in LARGE.of_kind("embedding", "positions"))
    expected = (2 + 8 / 256) * (LARGE.parameters - embeddings) + 8 * embeddings
    assert states.gpu == pytest.approx(expected, rel=1e-4)


def test_paged_states_live_in_ram():
    states = state_bytes(job("single", model=LARGE, gpus=1, optimizer="paged_adamw")).optimizer
    assert states == Held(host=8 * LARGE.parameters)


def test_deepspeed_in_fp32_wants_weights_in_fp32():
    with pytest.raises(UsageError, match="float32 weights"):
        state_bytes(replace(job("zero2"), dtype="bfloat16"))


def test_the_planner_and_the_loop_leave_the_same_names_out_of_decay():
    from toolkit.jobs.weights import _UNDECAYED
    from toolkit.training.loop import NO_DECAY

    assert _UNDECAYED.pattern == "|".join(NO_DECAY)


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw", "adafactor", "sgd_momentum"])
def test_states_of_an_optimizer_are_those_that_it_makes(name):
    shapes = [(40,), (4095,), (4096,), (4097,), (65, 67), (3, 50, 41)]
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    makers = {
        "adamw_8bit": bitsandbytes.optim.AdamW8bit,
        "adamw": torch.optim.AdamW,
        "adafactor": lambda made: Adafactor(made, relative_step=True),
        "sgd_momentum": lambda made: torch.optim.SGD(made, lr=0.1, momentum=0.9),
    }
    optimizer = makers[name](parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    held = {
        tensor.untyped_storage().data_ptr(): tensor.numel() * tensor.element_size()
        for states in optimizer.state.values()
        for tensor in states.values()
        if isinstance(tensor, torch.Tensor)
    }
    tensors = Tensors(tuple(Tensor(f"{n}", shape, "linear") for n, shape in enumerate(shapes)))
    assert optimizers.of_tensors(name, tensors, 4) == sum(held.values())
