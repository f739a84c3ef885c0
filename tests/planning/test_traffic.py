"""What crosses the wire, against what was counted at the c10d calls of real processes.

Counted with torch 2.15, accelerate 1.15, transformers 5.23 and deepspeed 0.19.8 in rehearsals of a
stock Trainer, fourth step, clipping at 1, DDP without `find_unused_parameters`.
"""

from dataclasses import replace

import pytest
from shapes_for_tests import gpt2, llama

from toolkit.backends import backend_of
from toolkit.backends.deepspeed_json import deepspeed_config
from toolkit.backends.matrices import split_inputs, split_outputs
from toolkit.jobs.terms import Collective
from toolkit.planning.job import PlannedJob
from toolkit.planning.models.architectures import shape_from_config
from toolkit.planning.speed.traffic import collectives, cost_of_sync
from toolkit.strategies import STRATEGIES

LLAMA = llama(hidden=256, intermediate=385, layers=3, vocab=1003)
TIED = llama(hidden=256, intermediate=385, layers=3, vocab=1003, tied=True)
GPT2 = gpt2(hidden=256, layers=3, heads=4, vocab=1003, positions=64)
BIG = llama(hidden=4096, intermediate=11008, layers=32, heads=32, kv_heads=32, vocab=32000)


def job(strategy, model=LLAMA, **options):
    ranks = options.pop("gpus", max(2, STRATEGIES[strategy].num_processes))
    sized = STRATEGIES[strategy].on_ranks(ranks)
    return PlannedJob(model=model, strategy=sized, gpus=ranks, **options)


def payload(found, kind, purpose):
    return sum(c.payload_bytes for c in found if (c.kind, c.purpose) == (kind, purpose))


LAYER, EMBEDDING, TAIL = 493312, 257024, 257280
"""Elements of one decoder layer, of the embedding padded to 2 ranks, of head and last norm."""

COUNTED = [
    # strategy, model, options, (kind, purpose): elements * size of all calls in a step
    ("ddp", LLAMA, {"accumulation": 2}, {("all_reduce", "gradients"): (1636608 + 355584) * 4}),
    ("ddp", GPT2, {}, {("all_reduce", "gradients"): (2380032 + 262912) * 4}),
    (
        "ddp",
        LLAMA,
        {"method": "lora", "lora_rank": 8, "accumulation": 2},
        {("all_reduce", "gradients"): 89160 * 4},
    ),
    (
        "zero1",
        LLAMA,
        {"accumulation": 2},
        {
            ("all_reduce", "gradients"): 1992192 * 2,
            ("all_gather", "parameters"): (1792 + 1990400) * 2,
            ("all_reduce", "norm"): 2 * 4,
        },
    ),
    (
        "zero1",
        GPT2,
        {},
        {
            ("all_reduce", "gradients"): 2642944 * 2,
            ("all_gather", "parameters"): (10496 + 2632448) * 2,
        },
    ),
    (
        "zero2",
        LLAMA,
        {"accumulation": 2},
        {
            ("all_reduce", "gradients"): 1992192 * 2 * 2,
            ("all_gather", "parameters"): (1792 + 1990400) * 2,
        },
    ),
    (
        "zero2",
        LLAMA,
        {"precision": "no"},
        {
            ("all_reduce", "gradients"): 1992192 * 4,
            ("all_gather", "parameters"): (1792 + 1990400) * 4,
        },
    ),
    (
        "zero2",
        LLAMA,
        {"method": "lora", "lora_rank": 8, "accumulation": 2},
        {
            ("all_reduce", "gradients"): 89160 * 2 * 2,
            ("all_gather", "parameters"): 89160 * 2,
            ("all_reduce", "norm"): 4,
        },
    ),
    (
        "zero3",
        LLAMA,
        {"accumulation": 2},
        {
            ("all_gather", "parameters"): (1990400 * 2 + 256 * 7) * 2,
            ("reduce_scatter", "gradients"): 1992192 * 2 * 2,
            ("all_reduce", "norm"): 2 * 8,
        },
    ),
    (
        "zero3",
        TIED,
        {"accumulation": 2},
        {
            ("all_gather", "parameters"): (1733632 * 2 + 256 * 7) * 2,
            ("reduce_scatter", "gradients"): 1735424 * 2 * 2,
        },
    ),
    (
        "zero3",
        LLAMA,
        {"precision": "no"},
        {
            ("all_gather", "parameters"): (1990400 + 256 * 7) * 4,
            ("reduce_scatter", "gradients"): 1992192 * 4,
        },
    ),
    (
        "zero3",
        GPT2,
        {"accumulation": 2},
        {
            ("all_gather", "parameters"): (2632448 * 2 + 1024 * 3 + 256 * 20 + 768 * 3) * 2,
            ("reduce_scatter", "gradients"): 2642944 * 2 * 2,
        },
    ),
    (
        "zero3",
        LLAMA,
        {"method": "lora", "lora_rank": 8, "accumulation": 2},
        {
            ("all_gather", "parameters"): (1990400 * 2 + 256 * 7 + 89160) * 2,
            ("reduce_scatter", "gradients"): 89160 * 2 * 2,
        },
    ),
    (
        "zero3",
        LLAMA,
        {"method": "lora", "lora_rank": 8, "accumulation": 2, "checkpointing": "full"},
        {
            ("all_gather", "parameters"): (
                1990400 * 2 + 32768 * 12 + 65536 * 12 + 98560 * 18 + 256 * 7 + 89160
            )
            * 2,
        },
    ),
    (
        "fsdp",
        LLAMA,
        {"accumulation": 2},
        {
            ("all_gather", "parameters"): (EMBEDDING * 4 + TAIL * 2 + LAYER * 12) * 2,
            ("reduce_scatter", "gradients"): (EMBEDDING + TAIL + LAYER * 3) * 2,
        },
    ),
    (
        "fsdp",
        LLAMA,
        {"accumulation": 2, "checkpointing": "full"},
        {("all_gather", "parameters"): (EMBEDDING * 4 + TAIL * 2 + LAYER * 12) * 2},
    ),
    (
        "fsdp",
        LLAMA,
        {"precision": "no"},
        {
            ("all_gather", "parameters"): (EMBEDDING * 2 + TAIL + LAYER * 6) * 4,
            ("reduce_scatter", "gradients"): (EMBEDDING + TAIL + LAYER * 3) * 4,
        },
    ),
    (
        "fsdp",
        TIED,
        {"accumulation": 2},
        {
            ("all_gather", "parameters"): (TAIL * 2 + LAYER * 12) * 2,
            ("reduce_scatter", "gradients"): (TAIL + LAYER * 3) * 2,
        },
    ),
    (
        "fsdp",
        GPT2,
        {"accumulation": 2},
        {
            ("all_gather", "parameters"): (16384 * 2 + 257536 * 2 + 789760 * 12) * 2,
            ("reduce_scatter", "gradients"): (16384 + 257536 + 789760 * 3) * 2,
        },
    ),
    (
        "fsdp",
        LLAMA,
        {"method": "lora", "lora_rank": 8, "accumulation": 2},
        {
            ("all_gather", "parameters"): (256 * 2 + EMBEDDING * 6 + 523048 * 12) * 2,
            ("reduce_scatter", "gradients"): 29736 * 3 * 2,
        },
    ),
    (
        "fsdp_offload",
        LLAMA,
        {"accumulation": 2},
        {("all_gather", "parameters"): (EMBEDDING * 4 + TAIL * 2 + LAYER * 12) * 2},
    ),
    (
        "fsdp_grad_op",
        LLAMA,
        {"accumulation": 2},
        {
            ("all_gather", "parameters"): (EMBEDDING * 2 + TAIL * 2 + LAYER * 6) * 2,
            ("reduce_scatter", "gradients"): (EMBEDDING + TAIL + LAYER * 3) * 2,
        },
    ),
    (
        "fsdp_hybrid",
        LLAMA,
        {"accumulation": 2},
        {
            ("all_gather", "parameters"): (EMBEDDING * 4 + TAIL * 2 + LAYER * 12) * 2,
            ("reduce_scatter", "gradients"): (EMBEDDING + TAIL + LAYER * 3) * 2,
            ("all_reduce", "gradients"): (128512 + 128640 + 246656 * 3) * 2,
        },
    ),
    (
        "fsdp_hybrid",
        LLAMA,
        {"method": "lora", "lora_rank": 8, "accumulation": 2},
        {("all_reduce", "gradients"): 14868 * 3 * 2},
    ),
]


@pytest.mark.parametrize(("strategy", "model", "options", "counted"), COUNTED)
def test_payload_equals_what_was_counted_in_real_processes(strategy, model, options, counted):
    # A script that isn't ours runs the file as it is, which is not fitted to its model.
    as_written = deepspeed_config(STRATEGIES[strategy]) if strategy == "zero3" else None
    found = collectives(job(strategy, model, deepspeed=as_written, **options))
    assert {key: payload(found, *key) for key in counted} == counted


def test_a_lone_layer_s_matrices_are_split_as_those_of_several():
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4}
    for layers in (1, 3):
        config = {"model_type": "llama", "vocab_size": 1000, "num_hidden_layers": layers} | sizes
        shape = shape_from_config(config, name="small")
        # Of queries, keys, values, gate and up; of attention's result and down.
        assert (split_inputs(shape), split_outputs(shape)) == (5, 2)


def test_fsdp_adds_the_norms_of_all_tensors_up_at_once():
    [norm] = [c for c in collectives(job("fsdp")) if c.purpose == "norm"]
    assert (norm.calls, norm.elements) == (1, len(LLAMA.tensors))


def test_rows_that_ranks_do_not_divide_are_padded():
    model = llama(hidden=96, intermediate=100, layers=1, heads=4, kv_heads=4, vocab=101)
    found = collectives(job("fsdp", model, gpus=3, precision="no"))
    padded = sum(-(-t.shape[0] // 3) * 3 * (t.elements // t.shape[0]) for t in model.tensors)
    assert padded > model.parameters
    assert payload(found, "reduce_scatter", "gradients") == 4 * padded


def test_the_ring_sends_a_share_of_the_payload():
    reduce = Collective(
        kind="all_reduce",
        purpose="gradients",
        elements=1000,
        element_size=4,
        dtype="float32",
        times=1,
        calls=1,
        ranks=4,
    )
    assert reduce.wire_bytes == 2 * 3 / 4 * 4000
    (gather, *_) = (c for c in collectives(job("fsdp", gpus=8)) if c.kind == "all_gather")
    assert gather.wire_bytes == 7 / 8 * gather.payload_bytes


def test_ddp_sends_gradients_in_the_dtype_of_its_weights_whatever_it_computes_in():
    sent = [
        payload(collectives(job("ddp", dtype=weights)), "all_reduce", "gradients")
        for weights in ("float32", "bfloat16")
    ]
    assert sent == [4 * LLAMA.parameters, 2 * LLAMA.parameters]


def test_reducing_in_fp32_doubles_the_gradients_and_nothing_else():
    plain, raised = (collectives(job("fsdp", reduce_in_fp32=raised)) for raised in (False, True))
    for purpose, factor in (("gradients", 2), ("parameters", 1)):
        kind = "reduce_scatter" if purpose == "gradients" else "all_gather"
        assert payload(raised, kind, purpose) == factor * payload(plain, kind, purpose)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "single"])
def test_gradients_cross_the_wire_once_a_step_or_in_every_micro_batch(strategy):
    """As counted with real processes; DeepSpeed goes by its stage, a server is pushed to once."""
    # The heads of ulysses have to divide, and the layers of stages.
    gpus = {"ulysses": 2, "pipeline": 3, "layer_split": 3, "three_d": 8}.get(strategy, 6)
    asked = {"gpus": gpus, "accumulation": 3}
    once = collectives(job(strategy, **asked))
    often = collectives(job(strategy, **asked, sync_each_batch=True))
    by_engine = STRATEGIES[strategy].reads_deepspeed_json
    times = 1 if by_engine or strategy in ("three_d", "parameter_server") else 3
    for before, after in zip(once, often, strict=True):
        more = times if before.purpose == "gradients" else 1
        assert after.payload_bytes == more * before.payload_bytes
    alone = {"gpus": gpus, "sync_each_batch": True}
    assert collectives(job(strategy, **alone)) == collectives(job(strategy, gpus=gpus))


def test_what_synchronising_costs_is_said_in_bytes_and_as_a_share():
    asked = job("fsdp", BIG, gpus=32, nodes=4, accumulation=5)
    reduced = 2 * BIG.parameters
    # Two gathers of almost all of it in each micro-batch, and one reduction a step.
    share = 4 / (2 * 5 + 1)
    said = cost_of_sync(asked)
    assert (
        f"5 times a step, not once: each GPU sends {4 * 31 / 32 * reduced / 2**30:.3g} GiB" in said
    )
    assert share == pytest.approx(float(said[said.index("+") :].rstrip("%")) / 100, abs=0.02)
    assert cost_of_sync(replace(asked, sync_each_batch=True)) == said
    alone = job("fsdp_offload", BIG, gpus=1, accumulation=5)
    assert alone.sync_saves_memory
    assert cost_of_sync(alone) == "gradients are copied to the host 5 times a step, not once"


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_one_gpu_sends_nothing(strategy):
    found = collectives(job(strategy, gpus=1))
    assert all(collective.wire_bytes == 0 for collective in found)
    assert all(collective.kind != "all_gather" for collective in found)
    # DeepSpeed calls its reductions over one rank too; a run of one process is held to them.
    assert bool(found) == STRATEGIES[strategy].reads_deepspeed_json
    assert backend_of(STRATEGIES[strategy]).textbook(trained=1, everything=1, ranks=1) == 0


def test_all_workers_traffic_is_at_the_server_and_grows_with_them():
    def moved(gpus, rank, nodes=1):
        found = collectives(job("parameter_server", gpus=gpus, nodes=nodes), rank=rank)
        by_kind = {(c.kind, c.purpose): 0 for c in found}
        for c in found:
            by_kind[c.kind, c.purpose] += c.payload_bytes
        return by_kind

    weights = 4 * LLAMA.parameters
    for gpus in (2, 3, 8):
        everything = (gpus - 1) * weights
        at_server = {("receive", "gradients"): everything, ("send", "parameters"): everything}
        assert moved(gpus, 0) == at_server
        assert moved(gpus, gpus - 1) == {
            ("send", "gradients"): weights,
            ("receive", "parameters"): weights,
        }
    assert moved(8, 0, nodes=2) == at_server
    between = [c for c in collectives(job("parameter_server", gpus=8, nodes=2)) if c.nodes > 1]
    assert {c.payload_bytes for c in between} == {4 * weights}
    # An all-reduce stays below twice the model, which a ring of any length sends.
    assert collectives(job("ddp", gpus=8))[0].wire_bytes == 2 * 7 / 8 * weights


def test_textbook_volumes_are_two_and_three_times_the_model():
    psi = BIG.parameters
    volumes = {
        name: backend_of(strategy).textbook(trained=psi, everything=psi, ranks=2) / psi
        for name, strategy in STRATEGIES.items()
        if name != "single"
    }
    assert {name for name, volume in volumes.items() if volume == 2} == {
        "ddp",
        "zero1",
        "zero2",
        "zero2_offload",
        "fsdp_grad_op",
    }
    assert {volume for name, volume in volumes.items() if name.startswith("zero3")} == {3}
    assert volumes["fsdp"] == volumes["fsdp_hybrid"] == 3
    served = STRATEGIES["parameter_server"]
    assert backend_of(served).textbook(trained=psi, everything=psi, ranks=9) == 8 * psi


def test_deepspeed_sends_three_psi_where_the_paper_has_two():
    found = collectives(job("zero1", BIG, gpus=1024))
    sent = sum(c.wire_bytes for c in found) / 2
    assert sent == pytest.approx(3 * BIG.parameters, rel=0.01)


def test_a_large_model_is_gathered_twice_but_for_its_end_under_zero3():
    (gather, *_) = collectives(job("zero3", BIG))
    once = sum(t.elements for t in BIG.tensors if t.elements > 10_000)
    # What the last 1e9 elements hold is still there when backward comes to it.
    assert 2 * once - 1e9 <= gather.elements <= 2 * once - 0.9e9
    assert not gather.exact


@pytest.mark.parametrize(
    ("live", "reuse", "checkpointing", "counted"),
    [
        (800_000, 0, "none", 8158976),
        (1_000_000, 1_000_000, "none", 7961856),
        (1_000_000, 1_000_000, "full", 8060416),
    ],
)
def test_zero3_keeps_as_much_gathered_as_it_may(live, reuse, checkpointing, counted):
    model = llama(hidden=256, intermediate=385, layers=8, vocab=1003)
    zero = deepspeed_config(STRATEGIES["zero3"])["zero_optimization"] | {
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": reuse,
    }
    asked = job("zero3", model, checkpointing=checkpointing, deepspeed={"zero_optimization": zero})
    found = sum(c.elements for c in collectives(asked) if c.purpose == "parameters")
    assert found == pytest.approx(counted, rel=0.03)


def test_a_file_can_have_deepspeed_reduce_in_fp32():
    file = deepspeed_config(STRATEGIES["zero2"]) | {"communication_data_type": "fp32"}
    plain, raised = (collectives(job("zero2", deepspeed=given)) for given in (None, file))
    assert payload(raised, "all_reduce", "gradients") == 4 * LLAMA.parameters
    assert payload(plain, "all_reduce", "gradients") == 2 * LLAMA.parameters
    gathered = [payload(found, "all_gather", "parameters") for found in (plain, raised)]
    assert gathered[0] == gathered[1]


def test_groups_say_which_machines_they_lie_on():
    inside = collectives(job("fsdp", gpus=8))
    across = collectives(job("fsdp", gpus=16, nodes=2))
    assert {c.scope for c in inside} == {"inside a node"}
    assert {c.scope for c in across} == {"between nodes"}

    hybrid = collectives(job("fsdp_hybrid", gpus=16, nodes=2))
    scopes = {(c.kind, c.purpose): c.scope for c in hybrid}
    assert scopes["all_gather", "parameters"] == "inside a node"
    assert scopes["all_reduce", "gradients"] == "between nodes"
    (between,) = (c for c in hybrid if (c.kind, c.purpose) == ("all_reduce", "gradients"))
    assert (between.ranks, between.rings) == (2, 8)


def test_four_bit_weights_are_gathered_as_they_are_stored():
    found = {
        method: payload(collectives(job("fsdp", BIG, method=method)), "all_gather", "parameters")
        for method in ("lora", "qlora")
    }
    linear = sum(t.elements for t in BIG.of_kind("linear"))
    # Twice, in forward and backward: 2 bytes each became half a byte.
    assert found["lora"] - found["qlora"] == pytest.approx(2 * 1.5 * linear, rel=1e-6)
