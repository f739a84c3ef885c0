"""Predicted throughput against public measurements, and what the terms of a step must do."""

import dataclasses
import math
import re
import statistics

import pytest
from speed_rows import (
    LLAMA2_7B,
    LLAMA3_8B,
    MPT,
    ROWS,
    TINY_LLAMA,
    by_regime,
    mpt,
)

from toolkit.backends.pipeline import Pipeline
from toolkit.errors import UsageError
from toolkit.jobs.terms import Interval
from toolkit.planning.job import PlannedJob, nodes_for
from toolkit.planning.memory import estimate
from toolkit.planning.memory.estimate import state_bytes
from toolkit.planning.models.resolve import resolve_model
from toolkit.planning.plan import plan
from toolkit.planning.speed import rates
from toolkit.planning.speed.computing import (
    attention_flops,
    linear_flops,
    model_flops,
    multiplied_parameters,
)
from toolkit.planning.speed.estimate import cost, estimate_speed
from toolkit.planning.speed.gpus import gpu
from toolkit.strategies import STRATEGIES

WIDEST = {
    "one node": 2.8,
    "several nodes": 2.8,
    "rows above 8,192": 3.3,
    "adapters": 4.2,
    "offload": 4.5,
}
"""Of the ends of a step's interval: an interval that holds everything says nothing."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_measured_throughput_lies_in_the_interval(row):
    speed = row.speed()
    rate = speed.tokens_per_second
    assert rate.low / row.job.gpus <= row.tokens_per_second <= rate.high / row.job.gpus
    assert speed.step_seconds.high < WIDEST[row.regime] * speed.step_seconds.low


def test_middles_are_near_what_was_measured_in_each_regime():
    for regime, ratios in by_regime().items():
        assert 0.75 < statistics.median(ratios) < 1.45, regime
    every = [row.middle_over_measured() for row in ROWS]
    assert statistics.median(every) == pytest.approx(1.05, abs=0.05)
    within = [1 / 1.3 < ratio < 1.3 for ratio in every]
    assert sum(within) >= 0.9 * len(within)


def test_adapters_take_passes_over_the_inputs_and_outputs_of_their_layers():
    # The median was 1.22 without them.
    assert statistics.median(by_regime()["A100-80GB", 2024, "adapters"]) < 1.1
    job = small(model=LLAMA2_7B, method="lora", lora_rank=3)
    wider = dataclasses.replace(job, lora_rank=48)
    name = "adapters' inputs and outputs"
    moved, as_much = (dict_of(estimate_speed(each, gpu("l4")))[name] for each in (job, wider))
    # Of a layer: six inputs and five outputs of the hidden size, one and two of the MLP's width.
    values = job.micro_tokens * 32 * (11 * 4096 + 3 * 11008)
    assert moved.low == pytest.approx(2 * 8 * values / (0.92 * 300e9))
    assert as_much == moved
    assert name not in dict_of(estimate_speed(small(), gpu("l4")))


def test_compiled_layers_launch_less_and_move_less_but_compute_as_much():
    eager, compiled = (
        estimate_speed(small(batch=1, sequence=256, compile=it), gpu("h100"))
        for it in (False, True)
    )
    for name in ("waiting for launches", "norms, activations, residuals"):
        assert dict_of(compiled)[name].high < dict_of(eager)[name].high
    assert dict_of(compiled)["products with weights"] == dict_of(eager)["products with weights"]
    assert compiled.step_seconds.high < eager.step_seconds.high
    assert "keep what their products read and write" in " ".join(compiled.notes)


def test_under_zero_3_nothing_is_compiled_and_a_note_says_so():
    eager, compiled = (
        estimate_speed(small("zero3", compile=it), gpu("h100")) for it in (False, True)
    )
    assert compiled.step_seconds == eager.step_seconds
    assert compiled.notes == (
        "Under ZeRO-3 layers can't be compiled: it is planned without --compile.",
    )


def test_more_gpus_in_a_node_come_with_more_of_its_host():
    one, eight = (
        dict_of(estimate_speed(small("zero2_offload", gpus=gpus, nodes=nodes), gpu("l4")))
        for gpus, nodes in ((8, 8), (8, 1))
    )
    name = "optimizer on the CPU"
    # The states lie on eight nodes of one GPU, or all of them on one node of eight.
    assert eight[name].high == pytest.approx(one[name].high)
    assert eight[name].low > one[name].low


def test_long_rows_on_a_hopper_are_planned_with_kernels_that_torch_has():
    # Of 65,536 tokens on 8 H100 in the table above; attention is the most of its step. The middle
    # was 1.52 times the measured rate with FlashAttention-3's share.
    job = PlannedJob(
        model=mpt(*MPT["7b"], 65536),
        strategy=STRATEGIES["fsdp"],
        gpus=8,
        sequence=65536,
        accumulation=2,
        checkpointing="full",
    )
    speed = estimate_speed(job, gpu("h100"))
    rate = speed.tokens_per_second
    assert 0.8 < math.sqrt(rate.low * rate.high) / 8 / 1956 < 1.4
    attention = next(term for term in speed.terms if term.name == "attention")
    flops = attention_flops(job) * job.micro_tokens * job.accumulation
    assert 0.5 < flops / attention.seconds.low / gpu("h100").flops("bf16") < 0.6


def test_mfu_is_torchtitans_for_its_own_rows():
    # Its benchmark page says 33 % and 39 % of 989 TFLOPS for 5762 and 6667 tokens/s.
    flops = model_flops(LLAMA3_8B, 8192)
    assert [round(100 * seen * flops / 989e12, 1) for seen in (5762, 6667)] == [33.7, 39.0]


def small(strategy="ddp", **options):
    options = {"model": TINY_LLAMA, "gpus": 2, "batch": 2, "sequence": 1024} | options
    return PlannedJob(strategy=STRATEGIES[strategy], **options)


def seconds(job, card="a100-80gb", **options):
    return estimate_speed(job, gpu(card), **options).step_seconds


def slower(one, other):
    return one.low > other.low and one.high > other.high


ALL = [
    small(name, gpus=max(2, each.num_processes))
    for name, each in STRATEGIES.items()
    if name != "single"
]


@pytest.mark.parametrize("job", [small("single", gpus=1), *ALL], ids=lambda job: job.strategy.name)
def test_terms_add_up_to_the_step(job):
    speed = estimate_speed(job, gpu("l4"))
    for end in ("low", "high"):
        parts = [getattr(term.seconds, end) for term in speed.terms]
        assert all(part >= 0 for part in parts)
        assert sum(parts) == pytest.approx(getattr(speed.step_seconds, end))
    assert 0 < speed.step_seconds.low < speed.step_seconds.high
    assert speed.tokens_per_second.high == speed.step_tokens / speed.step_seconds.low
    assert 0 < speed.mfu.low < speed.mfu.high < 1


def test_lora_skips_the_gradients_of_frozen_weights():
    full, lora = (small(method=method, lora_rank=1) for method in ("full", "lora"))
    assert linear_flops(lora) / linear_flops(full) == pytest.approx(2 / 3, abs=0.01)
    assert slower(seconds(full), seconds(lora))


def test_full_checkpointing_computes_the_layers_once_more():
    plain, again = (small(model=LLAMA2_7B, checkpointing=how) for how in ("none", "full"))
    assert linear_flops(again) / linear_flops(plain) == pytest.approx(4 / 3, abs=0.01)
    assert attention_flops(again) > attention_flops(plain)
    assert slower(seconds(again), seconds(plain))


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        ({"attention": "eager", "sequence": 8192}, {"attention": "flash", "sequence": 8192}),
        ({"precision": "no"}, {"precision": "bf16"}),
        ({"chunked_loss": False}, {"chunked_loss": True}),
        ({"method": "qlora"}, {"method": "lora"}),
        ({"batch": 4}, {"batch": 2}),
        ({"optimizer": "adamw"}, {"optimizer": "sgd"}),
    ],
)
def test_more_work_takes_longer(worse, better):
    worse, better = seconds(small(**worse)), seconds(small(**better))
    assert worse.low >= better.low
    assert worse.high > better.high


@pytest.mark.parametrize(
    ("slow", "fast"),
    [
        ("zero2", "zero1"),
        ("zero2_offload", "zero2"),
        ("zero3_offload", "zero3"),
        ("zero3_nvme", "zero3_offload"),
        ("fsdp_offload", "fsdp"),
    ],
)
def test_what_travels_more_takes_longer(slow, fast):
    assert slower(
        seconds(small(slow, accumulation=4), "l4"), seconds(small(fast, accumulation=4), "l4")
    )


def test_accumulation_spares_ddp_its_collectives():
    once, four = (estimate_speed(small(accumulation=n), gpu("l4")) for n in (1, 4))
    assert four.tokens_per_second.low > once.tokens_per_second.low


def test_zero_without_overlap_hides_nothing():
    job = small("zero1", model=LLAMA2_7B)
    terms = {term.name: term.seconds for term in estimate_speed(job, gpu("l4")).terms}
    wire = 2 * LLAMA2_7B.parameters * 2 / 2
    assert terms["all-reduce of gradients"].low >= wire / gpu("l4").pcie_bandwidth
    file = {"zero_optimization": {"stage": 1, "overlap_comm": True}}
    overlapped = estimate_speed(dataclasses.replace(job, deepspeed=file), gpu("l4"))
    assert slower(terms["all-reduce of gradients"], dict_of(overlapped)["all-reduce of gradients"])


def dict_of(speed):
    return {term.name: term.seconds for term in speed.terms}


def copied(strategy, **options):
    """Bytes of one step to the host and from it, of a model that fits in what ZeRO-3 keeps."""
    model = resolve_model("Qwen/Qwen2.5-0.5B")
    job = PlannedJob(model=model, strategy=STRATEGIES[strategy], gpus=1, **options)
    terms = {term.name: term.inputs for term in estimate_speed(job, gpu("h200")).terms}
    inputs = terms["copies to and from the host"]
    return inputs["bytes to the host"], inputs["bytes from the host"]


@pytest.mark.parametrize(
    ("strategy", "to_host", "from_host"),
    [
        ("fsdp_offload", 1_976_131_129, 3_411_594_352),
        ("zero2_offload", 1_976_133_747, 988_065_600),
        ("zero3_offload", 2_964_196_697, 1_976_131_144),
    ],
)
def test_copies_of_one_micro_batch_are_those_that_a_profiler_counted(strategy, to_host, from_host):
    """H200, torch 2.11, deepspeed 0.19.8 (benchmarks/results/2026-11-26-gpu-kit.json)."""
    assert copied(strategy, batch=4, sequence=1024) == pytest.approx((to_host, from_host), rel=2e-3)


def test_several_micro_batches_are_summed_up_over_the_gpu():
    """Once more down and up for each, in bf16; ZeRO-3 did so with the only one already."""
    elements = resolve_model("Qwen/Qwen2.5-0.5B").parameters
    down, up = copied("zero2_offload", accumulation=3)
    assert (down, up) == ((3 * 2 + 4) * elements, (2 + 2 * 2) * elements)
    down, up = copied("zero3_offload", accumulation=3)
    assert (down, up) == pytest.approx(((3 * 2 + 4) * elements, 3 * (2 + 2) * elements), rel=1e-3)
    (one_down, one_up), (down, up) = (copied("fsdp_offload", accumulation=n) for n in (1, 3))
    assert (down, up) == (one_down, 3 * one_up)


def test_zero_3_brings_a_model_that_it_cannot_keep_twice_a_micro_batch():
    job = small("zero3_offload", model=LLAMA2_7B, gpus=1)
    terms = {term.name: term.inputs for term in estimate_speed(job, gpu("h200")).terms}
    brought = terms["copies to and from the host"]["bytes from the host"] / 2 / LLAMA2_7B.parameters
    # Its gradients once, and its weights twice less the billion elements that stay.
    assert 1 + 2 - 1.05e9 / LLAMA2_7B.parameters < brought < 3


def test_few_tokens_wait_for_launches():
    busy, idle = (
        dict_of(estimate_speed(small(batch=n, sequence=n * 512), gpu("h100"))) for n in (8, 1)
    )
    assert busy["waiting for launches"].low == 0
    assert idle["waiting for launches"].low > 0


def test_few_tokens_are_no_faster_than_their_weights_cross_memory():
    # With 16 tokens a product of an L4 waits for memory: 2 bytes a weight in each of 3 passes.
    short, long = (small(gpus=1, strategy="single", batch=1, sequence=n) for n in (16, 2048))
    crossing = 3 * 2 * multiplied_parameters(TINY_LLAMA) / (0.92 * 300e9)
    assert estimate_speed(short, gpu("l4")).step_seconds.low >= crossing
    terms = dict_of(estimate_speed(short, gpu("l4")))
    together = terms["products with weights"].low + terms["reading weights"].low
    assert together == pytest.approx(crossing)
    assert dict_of(estimate_speed(long, gpu("l4")))["reading weights"].low == 0


def test_the_network_between_nodes_matters_and_is_asked_for():
    job = small("fsdp", gpus=16, nodes=2, model=LLAMA2_7B)
    slow, fast = (seconds(job, internode_bytes_per_second=rate) for rate in (3e9, 200e9))
    assert slower(slow, fast)
    assert estimate_speed(small(), gpu("h100")).notes == ()
    assert "not known" in " ".join(estimate_speed(small(), gpu("l4")).notes)


def test_without_a_network_a_usual_one_is_assumed_and_named():
    job = small("fsdp", gpus=16, nodes=2, model=LLAMA2_7B)
    h100 = gpu("h100")
    assumed = estimate_speed(job, h100)
    given = estimate_speed(job, h100, internode_bytes_per_second=400e9)
    assert assumed.step_seconds == given.step_seconds
    assert (assumed.internode_assumed, given.internode_assumed) == (True, False)
    assert assumed.internode_bytes_per_second == given.internode_bytes_per_second
    (note,) = assumed.notes
    assert "3,200 Gb/s" in note
    assert "--internode-gbps" in note
    assert given.notes == ()


def test_where_clouds_differ_both_ends_are_assumed():
    job = small("fsdp", gpus=16, nodes=2, model=LLAMA2_7B)
    l4 = gpu("l4")
    network = l4.network_bandwidth
    assumed, slow, fast = (
        estimate_speed(job, l4, internode_bytes_per_second=rate)
        for rate in (None, network.low, network.high)
    )
    assert network.low < network.high
    assert assumed.step_seconds.low == fast.step_seconds.low
    assert assumed.step_seconds.high == slow.step_seconds.high
    assert "10 to 100 Gb/s" in " ".join(assumed.notes)


def test_a_gpu_without_a_known_network_spans_all_of_them():
    card = dataclasses.replace(gpu("h100"), network_bandwidth=None)
    job = small("fsdp", gpus=16, nodes=2, model=LLAMA2_7B)
    unknown = estimate_speed(job, card)
    assert unknown.internode_assumed
    assert "not known" in " ".join(unknown.notes)
    assert unknown.step_seconds.high > estimate_speed(job, gpu("h100")).step_seconds.high


def test_one_node_has_no_network_between_nodes():
    speed = estimate_speed(small(), gpu("h100"))
    assert speed.internode_bytes_per_second is None
    assert not speed.internode_assumed


@pytest.mark.parametrize(("gpus", "nodes"), [(8, 1), (9, 3), (12, 2), (16, 2), (20, 4), (512, 64)])
def test_gpus_fill_the_fewest_nodes_of_eight_that_hold_them_evenly(gpus, nodes):
    assert nodes_for(gpus) == nodes


@pytest.mark.parametrize("gpus", [11, 13, 121, 1009])
def test_gpus_that_fill_no_nodes_evenly_are_refused_with_a_count_that_does(gpus):
    with pytest.raises(UsageError, match=f"{gpus} GPUs don't fill .*, or give --nodes") as refusal:
        nodes_for(gpus)
    below, above = map(int, re.findall(r"Choose (\d+) or (\d+)", str(refusal.value))[0])
    assert below < gpus < above
    assert nodes_for(below) * 8 == below
    assert nodes_for(gpus, gpus) == gpus


@pytest.mark.parametrize("gpus", [0, -3, True, 2.5, 10**9])
def test_a_count_that_is_none_is_refused_by_its_name(gpus):
    with pytest.raises(UsageError, match=r"gpus is .* whole number from 1 to 100,000"):
        nodes_for(gpus)
    with pytest.raises(UsageError, match="nodes is"):
        nodes_for(8, gpus)


def test_a_node_with_more_gpus_than_machines_have_is_refused():
    assert nodes_for(32, 2) == 2
    with pytest.raises(UsageError, match="256 in each.* at most 16.* --nodes 64"):
        nodes_for(512, 2)


def test_half_of_a_hybrids_traffic_stays_inside_its_nodes():
    whole, hybrid = (
        seconds(small(name, gpus=16, nodes=2, model=LLAMA2_7B), internode_bytes_per_second=10e9)
        for name in ("fsdp", "fsdp_hybrid")
    )
    assert slower(whole, hybrid)


@pytest.mark.parametrize("card", ["t4", "v100-32gb"])
def test_a_gpu_without_bf16_asks_for_fp16(card):
    with pytest.raises(UsageError, match="no bf16 .* Ask for precision fp16"):
        estimate_speed(small(), gpu(card))
    assert estimate_speed(small(precision="fp16"), gpu(card)).step_seconds.low > 0


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_network_that_is_none_is_refused(rate):
    with pytest.raises(UsageError, match="between nodes"):
        seconds(small(), internode_bytes_per_second=rate)


def test_cost_is_hours_of_all_gpus():
    speed = estimate_speed(small(), gpu("l4"))
    paid = cost(speed, 1000 * speed.step_tokens, dollars_per_hour=0.8)
    assert paid.tokens == 1000 * speed.step_tokens == 1000 * 2 * 2 * 1024
    assert paid.hours.low == pytest.approx(1000 * speed.step_seconds.low / 3600)
    assert paid.dollars.high == pytest.approx(paid.hours.high * 2 * 0.8)
    assert cost(speed, paid.tokens - 1, None).steps == 1000
    assert cost(speed, 1, None).dollars is None


@pytest.mark.parametrize("tokens", [0, -5])
def test_a_cost_of_nothing_is_refused(tokens):
    with pytest.raises(UsageError, match="whole number from 1"):
        cost(estimate_speed(small(), gpu("l4")), tokens, None)


@pytest.mark.parametrize("module", [rates, estimate], ids=lambda module: module.__name__)
def test_no_interval_of_a_module_is_upside_down(module):
    intervals = {name: value for name, value in vars(module).items() if isinstance(value, Interval)}
    assert intervals
    assert not [name for name, value in intervals.items() if not 0 <= value.low <= value.high]


def test_a_parameter_server_is_as_slow_as_its_link_and_holds_what_no_worker_does():
    a100, model = gpu("A100-80"), resolve_model("1b")

    def planned(strategy, gpus):
        job = PlannedJob(model=model, strategy=STRATEGIES[strategy], gpus=gpus)
        return job, estimate_speed(job, a100).sending.high

    (two, seconds), (eight, more) = planned("parameter_server", 2), planned("parameter_server", 8)
    assert more == pytest.approx(7 * seconds, rel=0.01)
    (_, reduced), (_, with_more) = planned("ddp", 2), planned("ddp", 8)
    assert with_more < 3 * max(reduced, seconds)
    states = [state_bytes(eight, rank) for rank in (0, 1)]
    assert states[1].optimizer.gpu == 0 < states[0].optimizer.gpu
    assert states[1].parameters == states[0].parameters == state_bytes(two, 1).parameters
    buffers = eight.backend.lasting_buckets(eight)
    assert buffers == 7 * two.backend.lasting_buckets(two)
    assert buffers == sum(
        t.bytes.high for t in estimate.estimate_memory(eight).terms if "arriv" in t.name
    )


# With many rows, the last stage needs the most memory: it has the logits.
@pytest.mark.parametrize("batch", [1, 60])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize(("model", "ranks"), [("gpt2", 4), ("8b", 8), ("google/gemma-3-1b-pt", 3)])
def test_stages_that_have_no_more_than_others_change_no_estimate_of_a_pipeline(
    model, ranks, schedule, batch, monkeypatch
):
    strategy = dataclasses.replace(STRATEGIES["pipeline"], schedule=schedule)
    shape = resolve_model(model)
    job = PlannedJob(
        model=shape,
        strategy=strategy,
        gpus=ranks,
        batch=batch,
        accumulation=5,
        sequence=700,
        checkpointing="full",
    )
    few = job.backend.different_parts(job)
    micro_batches = [(batch, 700), (3, 90), (batch, 411)]

    def answers():
        memory, speed = estimate.estimate_memory(job), estimate_speed(job, gpu("H100"))
        peak = estimate.step_peak(job, micro_batches).high
        return memory.worst, peak, speed.step_seconds.high

    expected = answers()
    monkeypatch.setattr(Pipeline, "different_parts", Pipeline.parts_of_ranks)
    assert answers() == pytest.approx(expected, rel=1e-12)
    assert len(few) < ranks


def test_no_stage_of_a_model_with_learned_positions_turns_heads():
    job = PlannedJob(
        model=resolve_model("gpt2"), strategy=STRATEGIES["pipeline"], gpus=4, accumulation=4
    )
    of_a_layer = set()
    for part in job.backend.parts_of_ranks(job):
        terms = {term.name: term for term in estimate_speed(part, gpu("H100")).terms}
        moved = terms["norms, activations, residuals"].seconds.high
        of_a_layer.add(round(moved / part.model.layers, 12))
    assert len(of_a_layer) == 1


def test_a_model_with_experts_is_planned_as_wide_as_its_products_and_its_experts_as_gathered():
    asked = {"gpu": "H100", "gpus": 8, "batch": 2, "sequence": 4096, "checkpointing": True}
    (row,) = plan("Qwen/Qwen3-30B-A3B", strategies="fsdp", **asked).rows
    rate = row.speed.tokens_per_second
    assert rate.low / 8 < 3_075 < rate.high / 8  # transformers 5 under FSDP2
    assert any("Expert parallelism" in note for note in row.speed.notes)
    (whole,) = plan("Qwen/Qwen3-30B-A3B", strategies="ddp", **asked).rows
    (dense,) = plan("7b", strategies="fsdp", **asked).rows
    for other in (whole, dense):
        assert not any("Expert parallelism" in note for note in other.speed.notes)
