from dataclasses import replace

import pytest

from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.estimate import estimate_memory
from toolkit.planning.models.resolve import shape_from_count
from toolkit.planning.remedies import CHANGES, remedies, together
from toolkit.planning.verdict import Room, fits, judge, largest_batch, longest_sequence
from toolkit.strategies import STRATEGIES

GIB = 2**30


@pytest.fixture(scope="module")
def job():
    return PlannedJob(model=shape_from_count("1b"), strategy=STRATEGIES["zero2"], batch=2)


def room(gib, host=None):
    return Room(gpu_bytes=round(gib * GIB), host_bytes=None if host is None else round(host * GIB))


def test_the_answer_turns_exactly_at_the_ends_of_the_estimate(job):
    memory = estimate_memory(job)
    low, high = int(memory.total.low), -int(-memory.total.high // 1)
    answers = {
        bytes_there: judge(memory, Room(gpu_bytes=bytes_there)).answer
        for bytes_there in (high + 1, high - 1, low + 1, low - 1)
    }
    assert list(answers.values()) == ["fits", "tight", "tight", "does not fit"]


def test_the_margin_is_what_is_left_at_the_upper_end(job):
    memory = estimate_memory(job)
    verdict = judge(memory, room(10_000))
    assert verdict.margin_bytes == 10_000 * GIB - memory.total.high


def test_a_node_with_too_little_ram_is_no_fit_however_large_the_gpu():
    job = PlannedJob(model=shape_from_count("1b"), strategy=STRATEGIES["zero3_offload"])
    assert judge(estimate_memory(job), room(10_000)).answer == "fits with RAM"
    assert judge(estimate_memory(job), room(10_000, host=1)).answer == "does not fit"
    assert judge(estimate_memory(job), room(10_000, host=10_000)).answer == "fits"


@pytest.mark.parametrize("gib", [16, 24, 40, 80])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp", "fsdp_offload"])
def test_one_row_or_token_more_than_the_largest_no_longer_fits(job, gib, strategy):
    job = replace(job, strategy=STRATEGIES[strategy])
    rows = largest_batch(job, room(gib))
    assert not fits(replace(job, batch=rows + 1), room(gib))
    assert rows == 0 or fits(replace(job, batch=rows), room(gib))
    tokens = longest_sequence(job, room(gib))
    positions = job.model.max_positions
    assert tokens == positions or not fits(replace(job, sequence=tokens + 1), room(gib))
    assert tokens == 0 or fits(replace(job, sequence=tokens), room(gib))


def test_the_longest_row_is_found_whatever_a_config_says_of_positions(job):
    model = replace(job.model, max_positions=10**12)
    tokens = longest_sequence(replace(job, model=model), room(40))
    assert tokens == longest_sequence(job, room(40)) > 1024


def test_remedies_come_in_the_order_of_their_cost_and_each_saves_memory():
    job = PlannedJob(
        model=shape_from_count("7b"), strategy=STRATEGIES["ddp"], batch=4, accumulation=2
    )
    found = remedies(job, room(84))
    names = [remedy.name for remedy in found]
    assert names[:2] == ["chunked loss", "selective checkpointing"]
    assert names[2:4] == ["activation checkpointing", "batch 1 with 8 accumulated"]
    assert names[6:10] == ["8-bit AdamW", "LoRA", "QLoRA", "weights in bf16"]
    assert names[10:] == ["2 x B300"]
    before = estimate_memory(job).total
    for remedy in found:
        larger = remedy.verdict.usable_bytes > 84 * GIB
        assert larger or remedy.verdict.needed.high < before.high, remedy.name
        assert remedy.cost
    for remedy in found[:6]:
        rows = remedy.job.batch * remedy.job.accumulation * remedy.job.gpus
        assert rows == job.batch * job.accumulation * job.gpus, remedy.name


def test_changes_made_together_fit_and_none_of_them_is_idle():
    job = PlannedJob(
        model=shape_from_count("7b"), strategy=STRATEGIES["ddp"], batch=4, accumulation=2
    )
    found = together(job, room(20, host=1000))
    assert found is not None
    assert found.verdict.answer == "fits"
    assert fits(found.job, room(20, host=1000))
    parts = found.name.split(" + ")
    assert 1 < len(parts) < len(CHANGES)
    assert "LoRA" not in parts
    assert not fits(replace(found.job, strategy=job.strategy), room(20))
    assert not fits(replace(found.job, checkpointing="none"), room(20))


def test_what_nothing_can_help_is_said_to_be_so():
    job = PlannedJob(model=shape_from_count("10t"), strategy=STRATEGIES["ddp"])
    assert together(job, room(1)) is None


def test_a_job_that_is_sharded_flash_and_tiny_has_few_remedies_left(job):
    lean = replace(
        job,
        strategy=STRATEGIES["zero3_offload"],
        batch=1,
        checkpointing="full",
        chunked_loss=True,
        method="qlora",
    )
    assert all("GPUs" in r.name or r.job == lean for r in remedies(lean, room(1)))


def test_a_variant_of_a_strategy_has_the_remedies_of_what_it_shards():
    job = PlannedJob(model=shape_from_count("7b"), strategy=STRATEGIES["zero2"])
    variant = replace(job, strategy=replace(job.strategy, name="zero2_variant"))
    assert [remedy.name for remedy in remedies(variant, room(22))] == [
        remedy.name for remedy in remedies(job, room(22))
    ]


def test_ram_that_is_not_known_is_a_condition_in_whole_gib(job):
    offloaded = replace(job, strategy=STRATEGIES["zero3_offload"])
    memory = estimate_memory(offloaded)
    verdict = judge(memory, room(10_000))
    gib = int(verdict.words.replace(",", "").split()[5])
    assert verdict.fits
    assert verdict.words == f"fits if each node has {gib:,} GiB of RAM"
    assert judge(memory, room(10_000, host=gib)).answer == "fits"
    assert judge(memory, room(10_000, host=gib - 1)).answer != "fits"
    assert judge(memory, room(memory.total.low / GIB + 0.01)).answer == "tight"
    assert judge(estimate_memory(job), room(10_000)).answer == "fits"
    assert largest_batch(offloaded, room(10_000)) >= 1


def test_changes_without_a_condition_on_ram_go_before_an_offload():
    job = PlannedJob(model=shape_from_count("7b"), strategy=STRATEGIES["ddp"], batch=4)
    assert together(job, room(22)).verdict.answer == "fits"
    assert together(job, room(22, host=2000)).job.strategy.offloads
    lean = replace(job, strategy=STRATEGIES["zero3_offload"])
    assert together(lean, room(14)).verdict.answer == "fits with RAM"
