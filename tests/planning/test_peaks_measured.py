"""The peak of a whole step of a real model, counted tensor by tensor, against the estimate."""

import json
from contextlib import nullcontext

import pytest
import torch
from live_bytes import LiveBytes
from shapes_for_tests import llama
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.jobs.terms import sums_by_phase
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.estimate import WORKSPACES, estimate_memory
from toolkit.strategies import STRATEGIES
from toolkit.training.speed.chunked_loss import use_chunked_loss
from toolkit.training.speed.layers import checkpoint_layers

NARROW = {"hidden": 128, "intermediate": 344, "layers": 3, "heads": 4, "kv_heads": 2, "vocab": 256}
WORDY = {"hidden": 64, "intermediate": 172, "layers": 3, "heads": 4, "kv_heads": 4, "vocab": 4096}
WIDE = {"hidden": 256, "intermediate": 688, "layers": 3, "heads": 8, "kv_heads": 4, "vocab": 1024}


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors are faster with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(widths):
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=widths["vocab"],
            hidden_size=widths["hidden"],
            intermediate_size=widths["intermediate"],
            num_hidden_layers=widths["layers"],
            num_attention_heads=widths["heads"],
            num_key_value_heads=widths["kv_heads"],
            tie_word_embeddings=False,
            attn_implementation="sdpa",
            use_cache=False,
        )
    ).train()


def as_on_a_gpu(widths, precision):
    """Attention as a GPU computes full rows: grouped heads in fp32 have no kernel there."""
    grouped = widths["kv_heads"] < widths["heads"]
    return sdpa_kernel(SDPBackend.MATH) if grouped and precision == "no" else nullcontext()


def measure_peak(widths, *, batch, sequence, precision, checkpointing, accumulation):
    """Bytes at the peak of the second step."""
    torch.manual_seed(0)
    model = build(widths)
    checkpoint_layers(model, "all" if checkpointing == "full" else checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # as on a GPU
    ids = torch.randint(0, widths["vocab"], (batch, sequence))

    def step(ids, times):
        for _ in range(times):
            cast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
            with cast:
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(ids[:1, :8], 1)  # makes the optimizer's states
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    with (
        LiveBytes(*model.parameters(), *model.buffers(), *states) as live,
        as_on_a_gpu(widths, precision),
    ):
        step(ids, accumulation)
    return live.peak


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    ("widths", "settings", "phase"),
    [
        (NARROW, {"batch": 4, "sequence": 128, "accumulation": 1}, None),
        (NARROW, {"batch": 2, "sequence": 128, "accumulation": 3}, None),
        (WORDY, {"batch": 2, "sequence": 128, "accumulation": 1}, "loss"),
        (WIDE, {"batch": 1, "sequence": 32, "accumulation": 1}, "step"),
    ],
    ids=["activations", "accumulation", "logits", "states"],
)
def test_the_peak_of_a_step_is_met_and_not_undercut(
    widths, settings, phase, precision, checkpointing
):
    job = PlannedJob(
        model=llama(**widths),
        strategy=STRATEGIES["single"],
        gpus=1,
        precision=precision,
        checkpointing=checkpointing,
        padded=False,
        **settings,
    )
    estimate = estimate_memory(job)
    measured = measure_peak(widths, precision=precision, checkpointing=checkpointing, **settings)
    predicted = estimate.allocated.low - WORKSPACES.low
    assert 0.99 * measured <= predicted <= 1.06 * measured
    assert phase in (None, estimate.peak_phase)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_the_copies_of_all_layers_are_in_autocasts_cache_while_the_loss_is_computed(checkpointing):
    model = build(WIDE)
    checkpoint_layers(model, "all" if checkpointing == "full" else checkpointing)
    ids = torch.randint(0, WIDE["vocab"], (1, 32))
    cast = torch.autocast("cpu", torch.bfloat16)
    with LiveBytes(*model.parameters(), *model.buffers()) as live, cast:
        model(input_ids=ids, labels=ids)
    job = PlannedJob(
        model=llama(**WIDE),
        strategy=STRATEGIES["single"],
        gpus=1,
        sequence=32,
        optimizer="sgd",
        checkpointing=checkpointing,
    )
    tensors = [
        term
        for term in estimate_memory(job).terms
        if term.category not in ("context", "allocator") and term.bytes != WORKSPACES
    ]
    assert sums_by_phase(tensors)["loss"].low == pytest.approx(live.peak, rel=0.01)


LOOKED_UP = {"hidden": 256, "intermediate": 688, "layers": 2, "heads": 4, "kv_heads": 4}
LOOKED_UP |= {"vocab": 16384}


def profiled_peak(step, file):
    """Bytes at the fullest moment of a step above those before it, by the profiler.

    Not by a dispatch mode: while one looks on, autograd adds nothing up in place.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    found.export_chrome_trace(str(file))
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        now += int(event["args"]["Bytes"])
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("chunk", [None, 32])
@pytest.mark.parametrize(
    ("precision", "weights"), [("no", "float32"), ("bf16", "float32"), ("bf16", "bfloat16")]
)
def test_the_two_gradients_of_a_tied_embedding_are_met(
    precision, weights, chunk, accumulation, tmp_path
):
    if precision == "bf16":
        factors = torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16)
        product = profiled_peak(lambda: torch.mm(*factors), tmp_path / "product.json")
        if product > 2 * 64 * 64:
            pytest.skip("without bf16 instructions, this CPU adds up each product in fp32 buffers")
    job = PlannedJob(
        model=llama(**LOOKED_UP, tied=True),
        strategy=STRATEGIES["single"],
        gpus=1,
        sequence=8,
        precision=precision,
        dtype=weights,
        optimizer="sgd",
        accumulation=accumulation,
        chunked_loss=chunk is not None,
        loss_chunk_tokens=chunk,
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=LOOKED_UP["vocab"],
            hidden_size=LOOKED_UP["hidden"],
            intermediate_size=LOOKED_UP["intermediate"],
            num_hidden_layers=LOOKED_UP["layers"],
            num_attention_heads=4,
            tie_word_embeddings=True,
            use_cache=False,
        )
    ).to(getattr(torch, weights))
    if chunk is not None:
        use_chunked_loss(model.train(), chunk_tokens=chunk)
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    ids = torch.randint(0, LOOKED_UP["vocab"], (1, 8))

    def micro_batch():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()

    micro_batch()
    if accumulation == 1:
        model.zero_grad()
    else:
        held *= 2  # the first micro-batch's gradients
    measured = held + profiled_peak(micro_batch, tmp_path / "trace.json")
    estimate = estimate_memory(job)
    assert estimate.peak_phase in ("head", "backward")
    assert 0.99 * measured <= estimate.allocated.low - WORKSPACES.low <= 1.09 * measured
