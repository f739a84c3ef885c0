"""bf16 weights with fp32 masters, planned: their bytes, their step, and what they go with."""

import json
from pathlib import Path

import pytest
import torch
from example_record import TRAINING
from live_bytes import LiveBytes
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.engines.masters import MasterAdamW, cast_to_bf16, masters_of
from toolkit.errors import UsageError
from toolkit.planning import levers
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.activations import activations_of, cast_weights, loss_bytes
from toolkit.planning.memory.estimate import estimate_memory, state_bytes
from toolkit.planning.memory.formulas import compare_with_formula
from toolkit.planning.models.architectures import shape_from_config
from toolkit.planning.models.resolve import resolve_model
from toolkit.planning.of_run import job_of
from toolkit.planning.plan import plan
from toolkit.planning.remedies import remedies
from toolkit.planning.render.commands import train_command
from toolkit.planning.speed.computing import SpeedTerm
from toolkit.planning.speed.estimate import estimate_speed
from toolkit.planning.speed.gpus import gpu
from toolkit.planning.speed.traffic import collectives
from toolkit.planning.verdict import Room
from toolkit.strategies import STRATEGIES

CONFIG = AutoConfig.for_model(
    "llama",
    architectures=["LlamaForCausalLM"],
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=96,
    tie_word_embeddings=False,
)
SHAPE = shape_from_config(CONFIG.to_dict(), name="small")
LLAMA = "meta-llama/Llama-3.2-1B"
MOMENTS = ["float32", "bfloat16"]


def job(strategy="single", *, model=SHAPE, **options):
    gpus = 1 if strategy == "single" else 2
    settings = {"gpus": gpus, "optimizer": "adamw_fused", "bf16_weights": "float32"} | options
    return PlannedJob(model=model, strategy=STRATEGIES[strategy], **settings)


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("moments", MOMENTS)
def test_states_and_temporaries_are_those_of_the_optimizer(moments):
    model = AutoModelForCausalLM.from_config(CONFIG)
    cast_to_bf16(model, state_dtype=getattr(torch, moments))
    optimizer = MasterAdamW(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())

    def gradients():
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)

    gradients()
    optimizer.step()
    masters = list(masters_of(parameters))
    own = [t for s in optimizer.state.values() for name, t in s.items() if name != "master"]
    planned = state_bytes(job(bf16_weights=moments))
    assert planned.counted() == {
        "parameters_bytes": bytes_of(parameters),
        "master_bytes": bytes_of(masters),
        "gradients_bytes": bytes_of(parameter.grad for parameter in parameters),
        "optimizer_bytes": bytes_of(own),
    }
    with LiveBytes(*parameters, *masters, *own, *(p.grad for p in parameters)) as live:
        before = live.now
        optimizer.step()
    [term] = _step_terms(job(bf16_weights=moments, on_cpu=True))
    assert live.peak - before == pytest.approx(term.bytes.high, rel=0.01)
    # On a GPU one kernel reads and writes each tensor; torch's `foreach` takes all roots at once.
    assert not list(_step_terms(job(bf16_weights=moments, optimizer="adamw")))
    assert list(_step_terms(job(bf16_weights=None, optimizer="adamw")))


def _step_terms(planned):
    return planned.backend.step(planned)


def test_nothing_is_cast_in_forward_and_the_stream_is_in_16_bits():
    lean, plain = (job(bf16_weights=kept, batch=4) for kept in ("float32", None))
    loaded = job(bf16_weights=None, batch=4, dtype="bfloat16")
    assert list(cast_weights(plain, loss_bytes(plain), ends_full=False))
    assert not list(cast_weights(lean, loss_bytes(lean), ends_full=False))
    saved, of_plain, of_loaded = (activations_of(each).saved for each in (lean, plain, loaded))
    assert saved == of_loaded < of_plain


@pytest.mark.parametrize("batch", [1, 16])
def test_beside_masters_and_wider_moments_it_is_a_job_with_weights_loaded_in_bf16(batch):
    """Also where backward is fullest at its end, with two gradients of a tied embedding."""
    shape = {"model": resolve_model(LLAMA), "batch": batch, "sequence": 256}
    kept, loaded = job(**shape), job(bf16_weights=None, dtype="bfloat16", **shape)
    more = estimate_memory(kept).allocated.low - estimate_memory(loaded).allocated.low
    assert more == (4 + 2 * (4 - 2)) * shape["model"].parameters


def test_a_compiled_chunk_has_its_product_its_gradient_and_that_of_the_chunk_before():
    chunked = {"chunked_loss": True, "loss_chunk_tokens": 64, "sequence": 512, "batch": 2}
    held = {}
    for compiles in (False, True):
        of_loss = loss_bytes(job(compile=compiles, **chunked))
        held[compiles] = of_loss.logits * 1024 - 3 * 2 * 64 * 1024
        assert of_loss.fixed == 4 * 96 * 64
    assert held[True] == 64 * 96 * (2 + 2 + 2)
    assert held[False] == 64 * 96 * (2 + 4 + 4 + 2)
    one = loss_bytes(job(compile=True, **chunked | {"loss_chunk_tokens": 1024}))
    assert one.logits * 1024 - 3 * 2 * 64 * 1024 == 1024 * 96 * (2 + 2)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"strategy": "zero2"}, "one process or ddp, not zero2"),
        ({"strategy": "fsdp"}, "one process or ddp, not fsdp"),
        ({"strategy": "parameter_server"}, "one process or ddp, not parameter_server"),
        ({"precision": "fp16"}, "precision bf16, not fp16"),
        ({"method": "lora"}, "all weights trained, not lora"),
        ({"dtype": "bfloat16"}, "weights loaded in float32, not bfloat16"),
        ({"optimizer": "sgd"}, "AdamW, not sgd"),
    ],
)
def test_jobs_that_they_have_no_place_in_are_refused(options, problem):
    with pytest.raises(UsageError, match=f"bf16_weights needs {problem}. Leave it out."):
        job(**options)


def test_a_change_that_they_do_not_go_with_takes_them_out():
    kept = job("ddp")
    assert kept.with_(batch=2).bf16_weights == "float32"
    assert kept.with_(strategy=STRATEGIES["zero2"]) == job("zero2", bf16_weights=None)
    assert levers.EIGHT_BIT_STATES.applied(kept).bf16_weights is None
    assert levers.LORA.applied(kept) == job("ddp", method="lora", bf16_weights=None)
    assert job(bf16_weights=None).with_(bf16_weights="bfloat16") == job(bf16_weights="bfloat16")
    with pytest.raises(UsageError, match="one process or ddp"):
        kept.with_(strategy=STRATEGIES["zero2"], bf16_weights="float32")


def test_advice_for_a_run_that_is_out_of_memory_can_be_given_and_pasted():
    found = remedies(job("ddp", model=resolve_model(LLAMA), batch=8), Room(gpu_bytes=20 << 30))
    changed = {remedy.name: remedy.job for remedy in found}
    assert changed["activation checkpointing"].bf16_weights == "float32"
    sharded = [job for job in changed.values() if job.strategy.sharding != "whole"]
    assert sharded
    assert {job.bf16_weights for job in sharded} == {None}
    words = " ".join(train_command(found[0].job, Path("ddp.yaml"), rate=1e-5))
    assert "--bf16_weights True --optimizer_state_dtype float32" in words


@pytest.mark.parametrize("moments", [None, *MOMENTS])
def test_a_record_names_the_dtype_of_the_moments(tmp_path, moments):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    on = {} if moments is None else {"bf16_weights": {"cast": 21, "moments": moments}}
    training = TRAINING | {"speed": {"tuned": False, "on": on, "left_out": {}}}
    run = {
        "strategy": "ddp",
        "num_processes": 2,
        "precision": "bf16",
        "model": {"name": "small", "path": str(tmp_path), "parameters": SHAPE.parameters},
        "training": training,
    }
    assert job_of(run).bf16_weights == moments


def test_gradients_cross_the_wire_in_16_bits():
    [lean], [plain] = (
        [call for call in collectives(job("ddp", bf16_weights=kept)) if call.purpose == "gradients"]
        for kept in ("float32", None)
    )
    assert plain.payload_bytes == 2 * lean.payload_bytes


def terms(**options) -> dict[str, SpeedTerm]:
    asked = job(model=resolve_model(LLAMA), batch=8, **options)
    return {term.name: term for term in estimate_speed(asked, gpu("h200")).terms}


def test_a_step_reads_and_writes_masters_moments_gradients_and_weights_once():
    read = {
        moments: terms(bf16_weights=moments)["optimizer"].inputs["bytes a parameter"]
        for moments in MOMENTS
    }
    # The gradient is read for its norm, scaled in place, and read: 8; the weight is written: 2.
    assert read == {"float32": 8 + 2 + 8 + 16, "bfloat16": 8 + 2 + 8 + 8}
    one_kernel, in_passes = (
        terms(bf16_weights=kept, optimizer="adamw")["optimizer"].inputs["passes"]
        for kept in ("float32", None)
    )
    assert one_kernel.high < in_passes.high


def test_weights_in_16_bits_move_less_in_forward_and_backward():
    lean, plain = terms(compile=True), terms(compile=True, bf16_weights=None)
    moved = "norms, activations, residuals"
    # Nothing is cast, so what a compiler fuses is all there is.
    assert lean[moved].inputs["bytes"].low == lean[moved].inputs["bytes"].high
    assert plain[moved].seconds.high == pytest.approx(1.6 * lean[moved].seconds.high)
    assert lean["reading weights"].seconds.high < plain["reading weights"].seconds.high / 2


def test_the_loss_moves_the_fewest_bytes_where_it_is_compiled():
    own = {"chunked_loss": True, "loss_chunk_tokens": 1024}
    moved = {
        name: terms(**options)["logits and loss"].inputs["bytes"].middle
        for name, options in (
            ("compiled", own | {"compile": True}),
            ("Liger", {"chunked_loss": True}),
            ("whole", {}),
            ("one by one", own),
        )
    }
    assert sorted(moved, key=moved.__getitem__) == ["compiled", "Liger", "whole", "one by one"]


@pytest.mark.parametrize("moments", MOMENTS)
def test_the_difference_from_the_course_is_named(moments):
    found = compare_with_formula(job(bf16_weights=moments))
    assert found.implementation == found.course + sum(found.differences.values())
    # The course counts the masters among the 12 bytes of the optimizer.
    assert found.differences.keys() - {"moments in bf16"} == {"the optimizer's step counters"}
    assert found.differences.get("moments in bf16", 0) == (
        0 if moments == "float32" else -4 * SHAPE.parameters
    )


def test_without_mixed_precision_weights_in_bf16_are_gathered_and_computed_in_bf16():
    """A run of Hugging Face's Trainer on two A100s (fms-acceleration, refs/a100_80gb.csv)."""
    asked = {"gpus": 2, "batch": 4, "sequence": 4096, "precision": "no", "dtype": "bfloat16"}
    found = plan("mistralai/Mistral-7B-v0.1", strategies="fsdp", checkpointing=True, **asked)
    (row,) = found.rows
    assert row.memory.allocated.middle == pytest.approx(36_763_056_128, rel=0.03)
    assert {(c.dtype, c.element_size) for c in collectives(row.job) if c.purpose != "norm"} == {
        ("bfloat16", 2)
    }
    assert "full, pure bf16, adamw" in repr(found)
    mixed = plan("1b", gpus=2, strategies="ddp", dtype="bfloat16").rows[0].job
    assert mixed.compute_size == mixed.with_(precision="no").compute_size == 2
    assert mixed.with_(precision="no", dtype="float32").compute_size == 4
