"""The estimate as a whole: what its terms add up to, and how they answer to the job."""

from dataclasses import fields, replace

import pytest
from shapes_for_tests import gpt2, llama

from toolkit.errors import UsageError
from toolkit.jobs.weights import weights_of
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.estimate import estimate_memory
from toolkit.strategies import STRATEGIES

LLAMA_7B = llama(
    hidden=4096, intermediate=11008, layers=32, heads=32, kv_heads=32, vocab=32000, positions=4096
)
GIB = 2**30


def job(strategy="zero2", **changes):
    chosen = STRATEGIES[strategy]
    settings = {"model": LLAMA_7B, "gpus": 1 if strategy == "single" else chosen.num_processes}
    return PlannedJob(strategy=chosen, **settings | changes)


def test_a_changed_job_is_checked_as_a_new_one():
    before = job("zero3", batch=2)
    estimate_memory(before)
    assert vars(before).keys() == {field.name for field in fields(before)}  # nothing kept to copy
    assert before.with_(batch=3) == replace(before, batch=3)
    assert before == job("zero3", batch=2)
    with pytest.raises(UsageError, match="batch is 0"):
        before.with_(batch=0)
    with pytest.raises(TypeError, match="no rows"):
        before.with_(rows=3)


def term(estimate, name):
    return next(t for t in estimate.terms if name in t.name)


SPLIT = [name for name, one in STRATEGIES.items() if one.tensor > 1 or one.schedule is not None]
METHODS = [
    (strategy, method)
    for strategy in STRATEGIES
    for method in ("full", "lora", "qlora")
    if method == "full" or strategy not in SPLIT
    if method != "qlora" or not STRATEGIES[strategy].splits_rows
]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(("strategy", "method"), METHODS)
def test_categories_at_the_peak_add_up_to_the_total(strategy, method, checkpointing):
    estimate = estimate_memory(job(strategy, method=method, checkpointing=checkpointing))
    parts = estimate.by_category().values()
    assert sum(p.low for p in parts) == pytest.approx(estimate.total.low, rel=1e-9)
    assert sum(p.high for p in parts) == pytest.approx(estimate.total.high, rel=1e-9)
    assert estimate.allocated.low <= estimate.allocated.high <= estimate.reserved.high
    assert estimate.at_rest.low <= estimate.allocated.high
    assert all(t.formula for t in estimate.terms)
    assert all(0 <= t.bytes.low <= t.bytes.high for t in estimate.terms)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_states_in_the_terms_are_the_exact_ones(strategy):
    estimate = estimate_memory(job(strategy))
    exact = [
        t.bytes.low
        for t in estimate.terms
        if t.place == "gpu"
        and (t.category in ("parameters", "master", "optimizer") or t.name == "gradients")
    ]
    assert sum(exact) == estimate.states.total.gpu


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_term_is_at_least_more_than_it_is_at_most(strategy):
    """With a head that outweighs a layer by far, and micro-batches whose gradients are summed."""
    wide = llama(vocab=400_000)
    for accumulation in (1, 4):
        for one in estimate_memory(job(strategy, model=wide, accumulation=accumulation)).terms:
            assert one.bytes.low <= one.bytes.high, one


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_of_anything_never_needs_less(strategy):
    small = estimate_memory(job(strategy, batch=1, sequence=512)).total
    eager = () if STRATEGIES[strategy].splits_rows else ({"attention": "eager"},)
    for more in ({"batch": 2}, {"sequence": 1024}, *eager):
        large = estimate_memory(job(strategy, **{"batch": 1, "sequence": 512} | more)).total
        assert large.high >= small.high


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in SPLIT])
def test_checkpointing_and_adapters_save_memory(strategy):
    plain = estimate_memory(job(strategy, batch=4)).total.high
    assert estimate_memory(job(strategy, batch=4, checkpointing="full")).total.high < plain
    lora = estimate_memory(job(strategy, batch=4, method="lora")).total.high
    assert lora <= plain
    if not STRATEGIES[strategy].splits_rows:
        assert estimate_memory(job(strategy, batch=4, method="qlora")).total.high < plain


def test_cross_entropy_takes_12_bytes_for_each_logit():
    """TRL PR #6858 measured 47.55 GiB at 16,384 tokens, 248,320 words, hidden 2048."""
    model = llama(hidden=2048, layers=1, heads=16, kv_heads=16, vocab=248_320)
    logits = term(estimate_memory(job("zero3", model=model, batch=1, sequence=16_384)), "logits")
    assert logits.bytes.low == 12 * 16_384 * 248_320
    head = 2 * 248_320 * 2048
    assert (logits.bytes.low + 2 * head + 2 * 2 * 16_384 * 2048) / GIB == pytest.approx(
        47.55, rel=0.01
    )


def test_a_fused_loss_never_holds_all_logits():
    whole = term(estimate_memory(job(sequence=8192)), "logits").bytes.high
    chunked = term(estimate_memory(job(sequence=8192, chunked_loss=True)), "logits").bytes.high
    assert chunked < whole / 4


def test_our_chunks_are_of_as_many_tokens_as_is_asked_and_the_heads_gradient_is_in_fp32():
    asked = {"sequence": 8192, "chunked_loss": True}
    small, large = (
        term(estimate_memory(job(**asked, loss_chunk_tokens=n)), "logits").bytes.high
        for n in (1024, 2048)
    )
    # The product, the same in fp32, exponentials, and the gradient of the chunk before.
    assert large - small == 1024 * LLAMA_7B.vocab_size * (2 + 4 + 4 + 2)
    liger = job(**asked, batch=1)
    rows = 8192 // 8  # of a vocabulary of 32000 and a hidden size of 4096
    theirs = term(estimate_memory(liger), "logits").bytes.high
    ours = term(estimate_memory(replace(liger, loss_chunk_tokens=rows)), "logits").bytes.high
    head = LLAMA_7B.vocab_size * LLAMA_7B.hidden_size
    # Liger's kernel works in place, and needs no copy of the states that predict a target.
    more = rows * LLAMA_7B.vocab_size * (4 + 2) + 2 * 2 * 8192 * LLAMA_7B.hidden_size
    assert ours - theirs == (4 - 2) * head + more


def test_a_single_chunk_has_none_before_it_and_adapters_leave_the_head_without_a_gradient():
    asked = {"sequence": 1024, "chunked_loss": True, "loss_chunk_tokens": 1024, "batch": 1}
    logits = 1024 * LLAMA_7B.vocab_size * (2 + 4 + 4)
    states = 3 * 2 * 1024 * LLAMA_7B.hidden_size
    adapted = term(estimate_memory(job("single", method="lora", **asked)), "logits").bytes
    assert adapted.high == logits + states
    capped = job("single", method="lora", **asked, model=replace(LLAMA_7B, logit_softcap=True))
    more = 1024 * LLAMA_7B.vocab_size * 2 * 4
    assert term(estimate_memory(capped), "logits").bytes.high == adapted.high + more


ON_H200 = llama(
    hidden=2048,
    intermediate=8192,
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    vocab=128256,
    tied=True,
)
CHUNKED = {"chunked_loss": True, "loss_chunk_tokens": 1024}
FULL_ROWS = {"model": ON_H200, "batch": 4, "sequence": 2048, "padded": False}


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        ({}, 47074792448),
        ({"checkpointing": "full"}, 29273117696),
        ({"checkpointing": "selective"}, 36000797696),
        ({"checkpointing": "full", "optimizer": "adafactor"}, 19390286848),
        (CHUNKED, 37265446400),
        ({"batch": 1, "sequence": 8192, **CHUNKED}, 37268641280),
        ({"batch": 2, "precision": "no"}, 52441797632),
    ],
)
def test_bytes_that_an_h200_allocated_are_met_to_a_thousandth(options, measured):
    """H200, torch 2.11 (benchmarks/results/2026-11-26-gpu-kit.json)."""
    planned = estimate_memory(job("single", **FULL_ROWS | options)).allocated
    assert planned.high == pytest.approx(measured, rel=1e-3)


def test_padded_rows_in_fp32_have_a_kernel_and_full_ones_with_grouped_heads_have_none():
    def kept(model, **options):
        options = {"precision": "no", "batch": 2, "sequence": 2048} | options
        planned = estimate_memory(job("single", model=model, **options))
        return term(planned, "kept for backward").bytes

    full, padded = (kept(ON_H200, padded=padded) for padded in (False, True))
    assert full.low == full.high == padded.high
    # Scores of 2 rows, 32 heads and 16 layers; a mask in numbers takes their place.
    scores = 4 * 2 * 32 * 16 * 2048**2
    assert 0.9 * scores < padded.high - padded.low < scores
    ungrouped = replace(ON_H200, kv_heads=32)
    assert kept(ungrouped, padded=False).high < padded.low
    rehearsed = kept(ON_H200, padded=False, on_cpu=True)
    assert rehearsed.high < padded.low
    in_16_bits = kept(ON_H200, padded=False, precision="bf16")
    assert in_16_bits.high < rehearsed.high


def test_ddp_pays_for_its_buckets_unless_gradients_live_in_them():
    apart = estimate_memory(job("ddp"))
    inside = estimate_memory(job("ddp", gradient_as_bucket_view=True))
    assert apart.allocated.high - inside.allocated.high > 3 * LLAMA_7B.parameters
    assert term(apart, "buckets").bytes.low == 4 * LLAMA_7B.parameters


def test_gradients_in_buckets_are_held_twice_until_they_are_reduced():
    inside = job("ddp", gradient_as_bucket_view=True, accumulation=3)
    synced = replace(inside, sync_each_batch=True)
    assert inside.sync_saves_memory
    beside = estimate_memory(inside).allocated.low - estimate_memory(synced).allocated.low
    assert beside == 4 * LLAMA_7B.parameters


def test_ddp_under_autocast_holds_16_bit_copies_of_its_weights():
    estimate = estimate_memory(job("ddp"))
    linear = sum(t.elements for t in LLAMA_7B.of_kind("linear", "head"))
    copies = [t.bytes.low for t in estimate.terms if "cast by autocast" in t.name]
    assert sum(copies) == 2 * linear
    # A fused loss makes the head's gradient in forward, and needs its copy no longer.
    for fused, phases in ((False, ("loss", "head")), (True, ("loss",))):
        head = term(estimate_memory(job("ddp", chunked_loss=fused)), "head cast by autocast")
        assert head.phases == phases
    assert not any("autocast" in t.name for t in estimate_memory(job("fsdp")).terms)


def test_fsdp_sums_up_whole_gradients_between_micro_batches():
    """Mixtral on 8 A100s ran with 1 micro-batch and not with 2 (accelerate's documentation)."""
    one = estimate_memory(job("fsdp", gpus=8))
    two = estimate_memory(job("fsdp", gpus=8, accumulation=2))
    assert two.allocated.low - one.allocated.low > 0.5 * 2 * LLAMA_7B.parameters
    assert term(two, "without sync").bytes.low == 2 * LLAMA_7B.parameters


def test_fsdp_that_synchronises_at_every_micro_batch_holds_only_shards_between_them():
    one, two, synced = (
        estimate_memory(job("fsdp", gpus=8, **options))
        for options in ({}, {"accumulation": 2}, {"accumulation": 2, "sync_each_batch": True})
    )
    assert not any("without sync" in t.name for t in synced.terms)
    assert synced.states == one.states
    shards = 4 * LLAMA_7B.parameters // 8
    held = [t.bytes.low for t in synced.terms if t.name == "gradients" and "loss" in t.phases]
    assert held == pytest.approx([shards], rel=1e-4)
    # Beside them, at most what a single micro-batch needs, and the reduced shard of a unit.
    unit = 2 * 4 * max(LLAMA_7B.layer_parameters) / 8
    assert one.allocated.high < synced.allocated.high < one.allocated.high + shards + unit
    assert synced.allocated.high < two.allocated.low


@pytest.mark.parametrize(
    "strategy",
    [name for name in STRATEGIES if name[:4] != "fsdp" and name not in ("tensor_ddp", "context")],
)
def test_when_gradients_are_synchronised_changes_the_memory_of_fsdp_alone(strategy):
    two = job(strategy, accumulation=2)
    synced = replace(two, sync_each_batch=True)
    assert estimate_memory(synced).terms == estimate_memory(two).terms
    assert not two.sync_saves_memory


def test_the_two_gradients_of_a_tied_embedding_meet_where_it_is_whole():
    tied = llama(hidden=256, intermediate=385, layers=3, vocab=32003, tied=True)
    meet = {
        name
        for name in STRATEGIES
        if name not in SPLIT
        for t in estimate_memory(job(name, model=tied, batch=1, sequence=64)).terms
        if "tied embedding" in t.name
    }
    assert meet == {"single", "ddp", "parameter_server"}


def test_zero_buckets_are_those_of_the_file_that_a_run_would_use():
    assert term(estimate_memory(job("zero2")), "buckets").bytes.low == 2 * 50_000_000
    small = llama()
    fitted = estimate_memory(job("zero2", model=small))
    assert term(fitted, "buckets").bytes.low == 2 * (small.parameters // 16)
    filled_in = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
    automatic = estimate_memory(job("zero2", deepspeed=filled_in))
    assert term(automatic, "buckets").bytes.low == 2 * 4096**2
    silent = estimate_memory(job("zero2", deepspeed={"zero_optimization": {"stage": 2}}))
    assert term(silent, "buckets").bytes.low == 2 * 500_000_000


@pytest.mark.parametrize("value", ["many", -1, True, 1e99])
def test_a_bucket_that_is_no_number_is_refused(value):
    broken = {"zero_optimization": {"stage": 2, "reduce_bucket_size": value}}
    with pytest.raises(UsageError, match="reduce_bucket_size"):
        estimate_memory(job("zero2", deepspeed=broken))


def test_one_gpu_has_no_nccl():
    assert not any(t.name == "NCCL" for t in estimate_memory(job("single")).terms)
    assert any(t.name == "NCCL" for t in estimate_memory(job("ddp")).terms)


def test_offloads_ask_a_node_for_what_all_of_its_ranks_keep_there():
    one = estimate_memory(job("zero3_offload", gpus=8, nodes=1)).host_bytes
    two = estimate_memory(job("zero3_offload", gpus=8, nodes=2)).host_bytes
    assert two.high == pytest.approx(one.high / 2)
    # 2 weights, 2 gradients, 4 gradients in fp32, 4 masters, 8 moments; pinned ones rounded up.
    assert one.low >= 20 * LLAMA_7B.parameters
    assert one.high <= 29 * LLAMA_7B.parameters + 8 * 3 * GIB
    assert estimate_memory(job("zero3")).host_bytes.high == 0


def test_nvme_offload_keeps_states_on_disk_and_buffers_in_ram():
    estimate = estimate_memory(job("zero3_nvme"))
    assert estimate.nvme_bytes.low > 16 * LLAMA_7B.parameters
    assert estimate.host_bytes.high < estimate_memory(job("zero3_offload")).host_bytes.high


def test_a_step_has_nvme_buffers_where_a_rank_s_piece_of_a_mebibyte_is_in_a_file():
    # Half of a 64-wide model is less, half of a 512-wide one more.
    for hidden, in_files in ((64, False), (512, True)):
        shape = llama(hidden=hidden, intermediate=2 * hidden, layers=2, heads=4, vocab=256)
        rehearsed = estimate_memory(job("zero3_nvme", model=shape, precision="no", on_cpu=True))
        assert (rehearsed.states.total.nvme > 0) is in_files
        buffers = [t.place for t in rehearsed.terms if t.name.startswith("buffers for optimizer")]
        assert ("gpu" in buffers) is in_files, hidden


def test_dropout_keeps_masks():
    with_masks, without = gpt2(), gpt2(dropout=False)
    kept = [
        term(estimate_memory(job("single", model=m, sequence=512)), "kept").bytes.low
        for m in (with_masks, without)
    ]
    # Two masks of a byte an element in each layer, after attention and after the MLP.
    assert kept[0] - kept[1] == 2 * 12 * 512 * 768


def test_an_offload_leaves_the_scales_of_4_bit_weights_on_the_gpu():
    """They are no parameters, so neither FSDP nor DeepSpeed moves them."""
    scales = weights_of(job("fsdp", method="qlora")).quantisation_bytes
    assert scales > 100e6
    for strategy in ("fsdp_offload", "zero3_offload", "zero3_nvme"):
        held = estimate_memory(job(strategy, method="qlora")).states.parameters
        assert scales <= held.gpu < 1.1 * scales
        plain = estimate_memory(job(strategy, method="lora")).states.parameters
        assert plain.gpu < 0.1 * scales


def test_what_stays_is_reserved_once_and_what_moves_with_gaps():
    """Of the same bytes: weights and states alone, and activations alone."""
    states = estimate_memory(job("single", sequence=1, optimizer="adamw_fused", measured_gpu=True))
    assert states.reserved.high < 1.15 * states.allocated.high
    rows = {"method": "qlora", "lora_rank": 1, "batch": 8, "sequence": 8192}
    moves = estimate_memory(job("single", **rows))
    assert moves.reserved.high > 1.3 * moves.allocated.high
    expandable = estimate_memory(job("single", **rows, expandable_segments=True))
    assert expandable.reserved.high < 1.13 * expandable.allocated.high
    assert (moves.expected, moves.worst) == (moves.total.low, moves.total.high)


def test_dropout_of_adapters_keeps_a_copy_and_a_mask_of_each_input():
    plain, dropped = (
        term(estimate_memory(job("single", method="lora", lora_dropout=share)), "kept").bytes.low
        for share in (0.0, 0.1)
    )
    inputs = sum(t.shape[1] for t in LLAMA_7B.of_kind("linear"))
    # The adapters are in fp32, and autocast lowers their inputs: the mask alone is new.
    assert dropped - plain == 2048 * inputs


def test_rows_without_padding_need_no_copies_for_a_mask():
    few = replace(LLAMA_7B, kv_heads=8)
    padded, full = (
        term(estimate_memory(job("single", model=few, batch=2, padded=p)), "kept").bytes
        for p in (True, False)
    )
    assert padded.low == full.low == full.high < padded.high
