"""Remedies: every lever of the training script takes part, in the order of its price."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from toolkit.planning.job import PlannedJob
from toolkit.planning.levers import qlora_problem, unpacked_share
from toolkit.planning.memory.estimate import estimate_memory
from toolkit.planning.models.resolve import resolve_model, shape_from_count
from toolkit.planning.plan import plan
from toolkit.planning.remedies import remedies, together, ways_out
from toolkit.planning.render.plans import show_plan
from toolkit.planning.speed.gpus import built_in_gpus
from toolkit.planning.verdict import Room, fits
from toolkit.strategies import STRATEGIES

GIB = 2**30


def room(gib, host=None):
    return Room(gpu_bytes=round(gib * GIB), host_bytes=None if host is None else round(host * GIB))


def job(model="7b", strategy="ddp", **options):
    shape = shape_from_count(model) if "/" not in model else resolve_model(model)
    return PlannedJob(model=shape, strategy=STRATEGIES[strategy], **options)


def names(found):
    return [remedy.name for remedy in found]


def test_long_rows_fit_with_chunked_loss_and_checkpointing_and_with_nothing_else():
    row = plan(
        "meta-llama/Llama-3.1-8B", gpu="H100", gpus=8, sequence=32768, strategies="fsdp"
    ).rows[0]
    assert row.together.name == "chunked loss + activation checkpointing"
    assert row.together.verdict.answer == "fits"
    assert row.together.verdict.needed.high < 55 * GIB
    text = io.StringIO()
    show_plan(
        plan("meta-llama/Llama-3.1-8B", gpu="H100", gpus=8, sequence=32768, strategies="fsdp"),
        Console(file=text, width=200),
    )
    assert "Fits with: chunked loss + activation checkpointing" in text.getvalue()


@pytest.mark.parametrize("host", [None, 3, 2000])
@pytest.mark.parametrize("gib", [9, 21, 75])
@pytest.mark.parametrize(
    ("model", "gpus", "strategy"),
    [
        ("3b", 1, "single"),
        ("13b", 3, "ddp"),
        ("34b", 3, "zero2"),
        ("70b", 8, "fsdp"),
        ("70b", 2, "zero3_offload"),
    ],
)
def test_where_all_changes_together_are_not_enough_no_single_one_is(
    model, gpus, strategy, gib, host
):
    planned, here = job(model, strategy, gpus=gpus, batch=3), room(gib, host)
    assert not fits(planned, here)
    found = together(planned, here)
    alone = [remedy for remedy in remedies(planned, here) if remedy.verdict.fits]
    assert found is not None or not alone
    if found is not None:
        assert found.verdict.fits


def test_an_offload_that_ram_does_not_hold_is_no_part_of_what_fits():
    found = together(job("13b", gpus=2), room(22, host=3))
    assert found.verdict.answer == "fits"
    assert not found.job.strategy.offloads


def test_states_in_8_bits_come_before_adapters_and_only_where_they_can_step():
    found = names(remedies(job("7b", "zero2", gpus=8), room(22)))
    assert found.index("8-bit AdamW") < found.index("LoRA") < found.index("QLoRA")
    assert "8-bit AdamW" not in names(remedies(job("7b", "fsdp", gpus=8), room(5)))
    assert "weights in bf16" not in names(remedies(job("7b", "zero2", gpus=8), room(5)))


def test_one_gpu_moves_its_states_to_ram_by_paging_them():
    (paged,) = [r for r in remedies(job("3b", "single", gpus=1), room(40)) if "paged" in r.name]
    assert paged.job.optimizer == "paged_adamw"
    assert paged.verdict.host_needed.low > 0


def test_where_paging_is_not_enough_one_gpu_offloads():
    alone, here = job("3b", "single", gpus=1, checkpointing="full"), room(22, host=200)
    (offload,) = [r for r in remedies(alone, here) if r.job.strategy.offloads]
    assert offload.verdict.fits
    assert offload.job.gpus == 1
    paged = replace(alone, optimizer="paged_adamw")
    assert not fits(paged, here)
    assert together(alone, here).job.strategy is offload.job.strategy


def test_ddp_without_accumulation_saves_its_gradients_by_views_of_its_buckets():
    view = "gradients in DDP's buckets"
    once, summed = job("1b", gpus=2), job("1b", gpus=2, accumulation=2)
    assert view in names(remedies(once, room(15)))
    assert view not in names(remedies(summed, room(15)))
    assert view not in names(remedies(replace(once, strategy=STRATEGIES["fsdp"]), room(5)))


def test_a_chunked_loss_is_no_remedy_for_a_model_that_it_is_not_proven_for():
    wide = job("google/gemma-2-2b", sequence=8192)
    assert names(remedies(wide, room(20)))[0] == "chunked loss"
    unproven = replace(wide.model, architecture="OPTForCausalLM")
    assert "chunked loss" not in names(remedies(replace(wide, model=unproven), room(20)))


def test_another_gpu_is_the_smallest_of_the_table_that_holds_the_job():
    planned = job("7b", "zero3", gpus=4, checkpointing="full")
    needed = estimate_memory(planned).total.high
    (bigger,) = [r for r in ways_out(planned, room(20)) if " x " in r.name]
    sizes = sorted(gpu.memory_bytes for gpu in built_in_gpus().values())
    assert bigger.verdict.usable_bytes == next(size for size in sizes if size >= needed)
    assert bigger.verdict.fits
    assert bigger.name.startswith("4 x ")


def test_a_gpu_without_bf16_is_not_offered_to_a_job_in_bf16():
    planned = job("125m", "single", gpus=1)
    (bf16,) = [r for r in remedies(planned, room(3)) if r.name.startswith("one ")]
    (fp16,) = [
        r for r in remedies(replace(planned, precision="fp16"), room(3)) if r.name.startswith("one")
    ]
    table = built_in_gpus()
    assert table[bf16.name.removeprefix("one ")].has_bf16
    assert fp16.verdict.usable_bytes <= bf16.verdict.usable_bytes


def test_the_fewest_gpus_that_are_enough_and_in_whole_nodes():
    planned = job("meta-llama/Llama-3.1-405B", "fsdp", gpus=8, checkpointing="full")
    (more,) = [r for r in ways_out(planned, room(95)) if r.name.endswith("GPUs")]
    assert more.verdict.fits
    assert more.job.gpus % 8 == 0
    fewer = replace(more.job, gpus=more.job.gpus - 8, nodes=more.job.nodes - 1)
    assert not fits(fewer, room(95))


@pytest.mark.parametrize("strategy", ["ulysses", "tensor"])
def test_more_gpus_than_a_model_has_heads_are_no_remedy(strategy):
    short = job("meta-llama/Llama-3.1-8B", strategy, gpus=8, batch=64, sequence=8192)
    found = remedies(short, room(20))
    assert found
    for remedy in found:
        assert remedy.job.strategy.name != "ulysses" or remedy.job.gpus == 8


def test_shorter_rows_are_the_longest_that_fit_and_not_crumbs():
    planned = job("meta-llama/Llama-3.1-8B", "fsdp", gpus=8, sequence=16384)
    (shorter,) = [r for r in ways_out(planned, room(79)) if r.name.startswith("rows of")]
    assert shorter.verdict.fits
    assert not fits(replace(planned, sequence=shorter.job.sequence + 1), room(79))
    assert not [r for r in ways_out(planned, room(30)) if r.name.startswith("rows of")]


def test_fused_experts_keep_qlora_out_and_a_dense_model_does_not():
    mixture, dense = resolve_model("mistralai/Mixtral-8x7B-v0.1"), shape_from_count("7b")
    assert unpacked_share(mixture) > 0.9
    assert "fused experts" in qlora_problem(mixture)
    assert unpacked_share(dense) == 0
    assert qlora_problem(dense) is None
    sparse = PlannedJob(model=mixture, strategy=STRATEGIES["ddp"], gpus=4)
    found = names(remedies(sparse, room(40)))
    assert "LoRA" in found
    assert "QLoRA" not in found


def test_brackets_in_the_name_of_a_model_are_shown_as_they_are():
    found = plan("7b", gpu="L4", strategies="zero2")
    named = replace(found, model=replace(found.model, name="models/[bold]small[/bold]"))
    text = io.StringIO()
    show_plan(named, Console(file=text, width=200))
    assert "models/[bold]small[/bold]" in text.getvalue()
