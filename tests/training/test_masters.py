"""bf16 weights with fp32 masters: steps as fp32 AdamW, states and checkpoints to the last bit."""

import copy

import pytest
import torch
from accelerate import Accelerator
from small_models import tiny_llama
from transformers import TrainingArguments

from toolkit.data.sampling_order import Collator
from toolkit.engines import masters
from toolkit.engines.backend import backend_of
from toolkit.engines.masters import (
    MasterAdamW,
    cast_to_bf16,
    clip_in_fp32,
    masters_of,
    moments_of,
    stepping_on_masters,
)
from toolkit.errors import UsageError
from toolkit.strategies import STRATEGIES
from toolkit.training import loop
from toolkit.training.fingerprint import facts_of_trainer
from toolkit.training.speed import Speed
from toolkit.training.speed_arguments import SpeedArguments, check_speed
from toolkit.training.trainer import ToolkitTrainer

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def pair(state_dtype=torch.float32):
    """A model with masters beside its copy in fp32, and the optimizers of both."""
    reference = tiny_llama()
    model = copy.deepcopy(reference)
    cast_to_bf16(model, state_dtype=state_dtype)
    kind, options = stepping_on_masters(model, torch.optim.AdamW, OPTIONS)
    assert kind is MasterAdamW
    steps = [
        optimizer(each.parameters(), weight_decay=0.1, **options)
        for optimizer, each in ((kind, model), (torch.optim.AdamW, reference))
    ]
    return model, reference, *steps


def take_steps(pairs, count, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    for _ in range(count):
        models = [model for model, _ in pairs]
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            gradient = torch.randn(parameters[0].shape, generator=numbers).bfloat16()
            for parameter in parameters:
                parameter.grad = gradient.to(parameter.dtype)
        for _, optimizer in pairs:
            optimizer.step()


def test_masters_step_as_fp32_adamw_does_with_the_same_gradients():
    model, reference, ours, theirs = pair()
    take_steps([(model, ours), (reference, theirs)], 6)
    for master, weight in zip(masters_of(model.parameters()), reference.parameters(), strict=True):
        torch.testing.assert_close(master, weight, rtol=1e-6, atol=1e-7)
    for parameter, master in zip(model.parameters(), masters_of(model.parameters()), strict=True):
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, master.bfloat16())


def test_weights_in_bf16_alone_would_part_from_them():
    """What the masters are for: steps too small for a bf16 weight are not lost."""
    small = {**OPTIONS, "lr": 1e-5}
    reference = tiny_llama()
    rounded = copy.deepcopy(reference).bfloat16()
    model = copy.deepcopy(reference)
    cast_to_bf16(model)
    optimizers = [
        MasterAdamW(model.parameters(), **small),
        torch.optim.AdamW(reference.parameters(), **small),
        torch.optim.AdamW(rounded.parameters(), **small),
    ]
    start = next(reference.parameters()).detach().clone()
    take_steps(list(zip((model, reference, rounded), optimizers, strict=True)), 20)
    moved = (next(reference.parameters()) - start).norm()
    off = (next(masters_of(model.parameters())) - next(reference.parameters())).norm()
    lost = (next(rounded.parameters()).float() - next(reference.parameters())).norm()
    assert off / moved < 1e-3 < 0.5 < lost / moved


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_was_saved_goes_on_to_the_last_bit(state_dtype, tmp_path):
    model, _, optimizer, _ = pair(state_dtype)
    take_steps([(model, optimizer)], 3)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    resumed, _, other, _ = pair(state_dtype)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))
    for each, of in ((model, optimizer), (resumed, other)):
        take_steps([(each, of)], 2, seed=7)
    for one, two in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)
        assert {k: v.dtype for k, v in optimizer.state[one].items()} == {
            k: v.dtype for k, v in other.state[two].items()
        }
        assert optimizer.state[one]["exp_avg"].dtype == state_dtype
    for one, two in zip(*(masters_of(m.parameters()) for m in (model, resumed)), strict=True):
        assert torch.equal(one, two)


def test_frozen_weights_and_those_in_16_bits_get_no_masters():
    model = tiny_llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    model.model.norm.weight.data = model.model.norm.weight.data.bfloat16()
    assert cast_to_bf16(model) == len([*model.parameters()]) - 2
    assert model.model.embed_tokens.weight.dtype == torch.float32
    assert moments_of(model) == "float32"
    assert moments_of(tiny_llama()) is None


def test_the_norm_of_bf16_gradients_is_that_of_fp32():
    model, accelerator = tiny_llama(), Accelerator(cpu=True)
    cast_to_bf16(model)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1 + number / 128)
    exact = sum(p.grad.double().square().sum() for p in model.parameters()).sqrt()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    rounded = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    clip_in_fp32(accelerator)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)
    assert abs(rounded.item() / exact.item() - 1) > 1e-4  # or this test would show nothing
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        expected = (gradient.float() / exact).bfloat16()
        torch.testing.assert_close(parameter.grad, expected, rtol=2**-7, atol=0)
    del vars(accelerator)["clip_grad_norm_"]


def trainer_of(folder, model, *, speed=None, **changes):
    values = {"output_dir": str(folder), "max_steps": 4, "report_to": [], "bf16": True}
    values |= {"use_cpu": True, "disable_tqdm": True, "remove_unused_columns": False}
    values |= {"save_strategy": "no", "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    numbers = torch.Generator().manual_seed(1)
    ids = [torch.randint(60, (12,), generator=numbers).tolist() for _ in range(8)]
    rows = [{"input_ids": row, "labels": row, "sample_id": at} for at, row in enumerate(ids)]
    return ToolkitTrainer(
        model=model,
        args=TrainingArguments(**values | changes),
        train_dataset=rows,
        data_collator=Collator(pad_token_id=0),
        speed=speed,
    )


BF16 = SpeedArguments(bf16_weights=True, loss_impl="chunked")


def test_a_trainer_takes_the_switches_and_saves_the_masters(tmp_path):
    plain, fast = (
        trainer_of(tmp_path / name, tiny_llama(), speed=speed)
        for name, speed in (("plain", None), ("fast", BF16))
    )
    for trainer in (plain, fast):
        trainer.train()
    assert type(fast.optimizer.optimizer) is MasterAdamW
    assert fast.record["losses"] == pytest.approx(plain.record["losses"], rel=2e-3)
    engaged = fast.record["attestation"]["engaged"]
    assert engaged["parameter_dtypes"] == ["bfloat16"]
    assert engaged["optimizer_dtypes"] == ["float32"]
    assert fast.record["attestation"]["asked"]["parameter_dtypes"] == ["bfloat16"]
    memory, elements = fast.record["memory"], sum(p.numel() for p in fast.model.parameters())
    assert memory["parameters_bytes"] == memory["gradients_bytes"] == 2 * elements
    assert memory["master_bytes"] == 4 * elements
    assert memory["optimizer_bytes"] == pytest.approx(8 * elements, rel=0.01)
    fast.save_model(str(tmp_path / "saved"))
    loaded = type(fast.model).from_pretrained(tmp_path / "saved")
    for weight, master in zip(
        loaded.parameters(), masters_of(fast.model.parameters()), strict=True
    ):
        assert weight.dtype == torch.float32
        assert torch.equal(weight, master)
    assert not torch.equal(master, master.bfloat16().float())


def test_a_trainer_has_its_switches_watch_the_training(tmp_path, monkeypatch):
    prepared = []
    monkeypatch.setattr(Speed, "prepared", lambda self, of: prepared.append(of.model))
    trainer = trainer_of(tmp_path, tiny_llama(), speed=BF16)
    trainer.train()
    assert prepared == [trainer.model]


@pytest.mark.parametrize("pinned", [True, False])
def test_both_engines_copy_batches_without_a_wait_where_they_are_pinned(
    pinned, tmp_path, monkeypatch
):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    args.dataloader_pin_memory = pinned  # which a CPU turns off
    trainer = ToolkitTrainer(model=tiny_llama(), args=args, train_dataset=[])
    assert trainer.accelerator.non_blocking is pinned
    made = []

    def accelerator(**options):
        made.append(options["dataloader_config"].non_blocking)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "Accelerator", accelerator)
    with pytest.raises(KeyboardInterrupt):
        loop.train_loop(tiny_llama(), args, [], None, recorder=None, scheduled_steps=1)
    assert made == [pinned]


def test_switches_without_a_model_or_that_do_not_fit_are_refused(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(UsageError, match="speed needs a model"):
        ToolkitTrainer(args=args, model_init=tiny_llama, speed=BF16)
    with pytest.raises(UsageError, match="--bf16_weights computes in bf16"):
        ToolkitTrainer(model=tiny_llama(), args=args, speed=BF16)


def test_a_checkpoint_with_masters_is_not_of_the_same_training_as_one_without(tmp_path):
    facts = [
        facts_of_trainer(trainer_of(tmp_path, tiny_llama(), speed=speed), STRATEGIES["single"])
        for speed in (None, BF16)
    ]
    assert "bf16_weights" not in facts[0]  # as in checkpoints that are older than the switch
    assert facts[1]["bf16_weights"] == "with moments in float32"


@pytest.mark.parametrize(
    ("strategy", "values", "message"),
    [
        ("fsdp", {"bf16": True, "optim": "adamw_torch"}, "is for one process and ddp, and this is"),
        ("single", {"bf16": False, "optim": "adamw_torch"}, "computes in bf16: pass --bf16 true"),
        ("ddp", {"bf16": True, "optim": "sgd"}, "an AdamW of its own, and --optim is sgd"),
    ],
)
def test_what_excludes_masters_is_refused_by_flag_and_left_out_of_tuned(strategy, values, message):
    with pytest.raises(UsageError, match=message):
        check_speed(SpeedArguments(bf16_weights=True), values, strategy=STRATEGIES[strategy])
    check_speed(SpeedArguments(tuned=True), values, strategy=STRATEGIES[strategy])
    args = TrainingArguments(output_dir="none", report_to=[], use_cpu=True, **values)
    speed = Speed(SpeedArguments(tuned=True), args, strategy=STRATEGIES[strategy])
    speed.apply(tiny_llama())
    assert "bf16_weights" not in speed.on
    assert message in speed.left_out["bf16_weights"]


def test_moments_in_bf16_need_masters():
    with pytest.raises(UsageError, match="--optimizer_state_dtype is for the optimizer of"):
        check_speed(
            SpeedArguments(optimizer_state_dtype="bfloat16"), {}, strategy=STRATEGIES["ddp"]
        )


def test_a_backend_puts_and_gives_the_weights_that_are_stepped_on():
    model = tiny_llama()
    cast_to_bf16(model)
    backend, parameter = backend_of(model), model.model.norm.weight
    numbers = torch.linspace(0, 1, len(parameter))
    backend.set_full_weight(parameter, numbers)
    assert torch.equal(backend.full_weight(parameter), numbers)
    assert torch.equal(parameter, numbers.bfloat16())


def test_two_graphs_update_tensors_of_any_size_as_the_operations_do():
    model, other, ours, compiled = *pair()[:1], *pair()[:1], None, None
    for each in (model, other):
        kind, options = stepping_on_masters(each, torch.optim.AdamW, OPTIONS)
        ours, compiled = compiled, kind(each.parameters(), weight_decay=0.1, **options)
    torch._dynamo.reset()
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    graph = torch.compile(masters._update, dynamic=True, backend="aot_eager")
    take_steps([(model, ours)], 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masters, "_update", graph)
        take_steps([(other, compiled)], 2)
    assert stats["unique_graphs"] - before == 2  # of vectors, and of matrices
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    torch._dynamo.reset()
