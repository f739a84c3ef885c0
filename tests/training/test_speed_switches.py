"""The switches that make training faster or smaller: each is on, and nothing it learns changes."""

import importlib
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from datasets import Dataset
from small_models import small_of, tiny_llama
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.configs.proven_models import PROVEN_MODELS
from toolkit.data.sampling_order import Collator
from toolkit.data.tokens import load_tokenizer
from toolkit.errors import UsageError
from toolkit.measuring.peak import PeakLedger
from toolkit.records.evidence import IGNORED
from toolkit.strategies import STRATEGIES
from toolkit.training.arguments import own_arguments, training_values
from toolkit.training.evaluation import continuations, loss_and_tokens
from toolkit.training.loop import ddp_options
from toolkit.training.model import build_model
from toolkit.training.precision import requested_precision, with_precision
from toolkit.training.speed import Speed
from toolkit.training.speed.layers import CHECKPOINTING, SAVED_PRODUCTS, checkpoint_layers
from toolkit.training.speed.lean_batches import (
    LeanCollator,
    block_causal_mask,
    spare_the_device,
    takes_masks_as_given,
)
from toolkit.training.speed_arguments import SpeedArguments, check_model, check_speed
from toolkit.training.trainer import ToolkitTrainer

SYNCS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"}
"""Operations that hand the host what only the device knows."""


class Operations(TorchDispatchMode):
    """Counts what is called."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    @property
    def waits(self):
        return {name: self.calls[name] for name in SYNCS & self.calls.keys()}


def rows(lengths=(9, 23, 5, 16), *, packed=False):
    numbers = torch.Generator().manual_seed(1)
    made = []
    for number, length in enumerate(lengths):
        ids = torch.randint(60, (length,), generator=numbers).tolist()
        row = {"input_ids": ids, "sample_id": number}
        row["labels"] = [IGNORED] * (length // 2) + ids[length // 2 :]
        if packed:
            half = length // 2
            row["position_ids"] = [*range(half), *range(length - half)]
        made.append(row)
    return made


def learned(model, batch):
    model.zero_grad()
    inputs = {name: value for name, value in batch.items() if name != "sample_id"}
    loss = model(**inputs, num_items_in_batch=torch.tensor(29)).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(one, other, *, within=1e-5):
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    size = max(each.abs().max() for each in one[1].values())
    for name in one[1]:
        assert (one[1][name] - other[1][name]).abs().max() / size < within, name


# Lean masks


@pytest.mark.parametrize("architecture", sorted(PROVEN_MODELS))
def test_padding_on_the_right_needs_no_mask_in_the_models_that_are_taken(architecture):
    model = small_of(PROVEN_MODELS[architecture], "eager")
    collate = Collator(pad_token_id=0)
    lean = LeanCollator(collate=collate, names_positions=False, drops_masks=True)
    batch = lean(rows())
    assert "attention_mask" not in batch
    assert_equal(learned(model, collate(rows())), learned(model, batch))


def test_padding_on_the_left_is_not_taken_for_that_on_the_right():
    def collate(_):
        return {"attention_mask": torch.tensor([[0, 1, 1]])}

    with pytest.raises(ValueError, match="padding on the right"):
        LeanCollator(collate=collate, names_positions=False, drops_masks=True)([])


def test_the_mask_of_packed_rows_is_that_of_transformers():
    collate = Collator(pad_token_id=0)
    batch = collate(rows(packed=True))
    theirs = learned(tiny_llama(), batch)
    model = tiny_llama()
    spare_the_device(model)
    assert_equal(theirs, learned(model, batch))
    seen = block_causal_mask(torch.tensor([[0, 1, 2, 0, 1, 0, 0]]))[0, 0].int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]


def test_a_batch_that_comes_with_a_mask_is_masked_as_ever():
    model = tiny_llama()
    left = Collator(pad_token_id=0)(rows())
    left = {name: left[name].flip(1) for name in ("input_ids", "attention_mask", "labels")}
    with torch.no_grad():
        before = model(**left).logits
        spare_the_device(model)
        assert torch.equal(model(**left).logits, before)
        assert not torch.equal(model(input_ids=left["input_ids"]).logits, before)
    assert model.config._attn_implementation == "sdpa"


def test_windows_and_eager_attention_keep_the_masks_of_transformers():
    assert takes_masks_as_given(small_of("mistral", "sdpa", sliding_window=None))
    assert not takes_masks_as_given(small_of("mistral", "sdpa", sliding_window=4))
    assert not takes_masks_as_given(small_of("gemma3_text", "sdpa"))
    assert not takes_masks_as_given(tiny_llama(attention="eager"))
    model = small_of("mistral", "sdpa", sliding_window=4)
    batch = Collator(pad_token_id=0)(rows())
    wanted = learned(model, batch)
    speed = Speed(SpeedArguments(lean_masks=True))
    speed.apply(model)
    assert_equal(wanted, learned(model, speed.collating(Collator(pad_token_id=0))(rows())))


@pytest.mark.parametrize("packed", [False, True])
def test_a_tuned_step_asks_the_device_nothing_where_a_plain_one_does(packed):
    collate, model = Collator(pad_token_id=0), tiny_llama()
    with Operations() as plain:
        learned(model, collate(rows(packed=packed)))
    speed = Speed(SpeedArguments(tuned=True))
    speed.apply(model)
    batch = speed.collating(collate)(rows(packed=packed))
    inputs = {name: value for name, value in batch.items() if name != "sample_id"}
    with Operations() as tuned:
        model(**inputs, num_items_in_batch=torch.tensor(29)).loss.backward()
    assert plain.waits["aten::_local_scalar_dense"] > 1  # transformers', and the test's own
    assert tuned.waits == {}


def test_the_speed_of_a_model_that_takes_nothing_is_said():
    speed = Speed(SpeedArguments(tuned=True))
    speed.apply(small_of("opt", "eager"))
    assert speed.on == {}
    assert speed.left_out.keys() == {"loss_impl", "lean_masks", "bf16_weights"}
    assert speed.collating(len) is len
    for named in ({"loss_impl": "chunked"}, {"lean_masks": True}):
        with pytest.raises(UsageError, match="not proven for OPTForCausalLM"):
            Speed(SpeedArguments(**named)).apply(small_of("opt", "eager"))


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_the_loss_of_routers_is_left_as_it_is_for_it_would_count_padding(kind):
    def routed():
        return small_of(kind, "eager", output_router_logits=True, router_aux_loss_coef=1.0)

    collate = Collator(pad_token_id=0)
    padded, wanted = collate(rows()), learned(routed(), collate(rows()))
    del padded["attention_mask"]
    assert abs(learned(routed(), padded)[0] - wanted[0]) > 1e-3
    model, speed = routed(), Speed(SpeedArguments(tuned=True))
    speed.apply(model)
    assert speed.left_out.keys() == {"loss_impl", "lean_masks", "bf16_weights"}
    assert "--lean_masks would change the routers' loss" in speed.left_out["lean_masks"]
    assert_equal(wanted, learned(model, speed.collating(collate)(rows())))
    with pytest.raises(UsageError, match="routers' loss.*--lean_masks false"):
        Speed(SpeedArguments(lean_masks=True)).apply(routed())


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"use_liger_kernel": True}, "--use_liger_kernel both replace the loss"),
        ({"label_smoothing_factor": 0.1}, "leaves no logits for --label_smoothing_factor"),
    ],
)
def test_tuned_gives_way_to_what_else_is_asked_of_the_loss(asked, why, tmp_path, monkeypatch):
    tuned = SpeedArguments(tuned=True)
    monkeypatch.setattr("toolkit.training.speed_arguments.find_spec", lambda _: object())
    check_speed(tuned, asked, strategy=STRATEGIES["ddp"])
    with pytest.raises(UsageError, match=why):
        check_speed(SpeedArguments(loss_impl="chunked"), asked, strategy=STRATEGIES["ddp"])
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    for name, value in asked.items():
        setattr(args, name, value)
    speed = Speed(tuned, args)
    speed.apply(tiny_llama())
    assert speed.on.keys() == {"lean_masks"}
    assert why in speed.left_out["loss_impl"]
    with pytest.raises(UsageError, match=why):
        Speed(SpeedArguments(loss_impl="chunked"), args).apply(tiny_llama())


# Activation checkpointing


@pytest.mark.parametrize(
    ("chosen", "layers"),
    [("all", [0, 1, 2, 3]), ("every:2", [0, 2]), ("3", [0, 1, 2]), ("selective", [0, 1, 2, 3])],
)
def test_the_chosen_layers_are_computed_again_and_learn_the_same(chosen, layers):
    batch = Collator(pad_token_id=0)(rows())
    plain = tiny_llama(num_hidden_layers=4, attention_dropout=0.1)
    with Operations() as once:
        torch.manual_seed(3)
        wanted = learned(plain, batch)
    model = tiny_llama(num_hidden_layers=4, attention_dropout=0.1)
    assert checkpoint_layers(model, chosen) == layers
    with Operations() as again:
        torch.manual_seed(3)
        found = learned(model, batch)
    assert_equal(wanted, found)
    products, others = (
        [mode.calls[name] for mode in (once, again)] for name in ("aten::mm", "aten::silu")
    )
    assert others[1] - others[0] == len(layers)
    # Seven matrices a layer, and what the last one gives is needed by none of its own backward.
    # `selective` keeps what they gave.
    assert products[1] - products[0] == (0 if chosen == "selective" else 6 * len(layers))
    marked = [m.gradient_checkpointing for m in model.modules() if _is_layer(m)]
    assert [number for number, on in enumerate(marked) if on] == layers


def _is_layer(module):
    return isinstance(module, GradientCheckpointingLayer)


def test_none_leaves_the_model_alone_and_too_many_layers_are_refused():
    model = tiny_llama()
    assert checkpoint_layers(model, "none") == []
    assert not getattr(model, f"is_{CHECKPOINTING}")
    for chosen in ("3", "every:3"):
        with pytest.raises(UsageError, match="only 2 layers"):
            checkpoint_layers(model, chosen)
    with pytest.raises(UsageError, match="has no layers"):
        checkpoint_layers(torch.nn.Linear(2, 2), "all")


def test_what_selective_keeps_are_operations_that_torch_has():
    assert len(SAVED_PRODUCTS) == 9
    assert all(isinstance(each, torch._ops.OpOverload) for each in SAVED_PRODUCTS)


@pytest.mark.parametrize(
    ("chosen", "every"),
    [
        ("none", False),
        ("all", True),
        ("every:1", True),
        ("4", True),
        ("every:2", False),
        ("3", False),
        ("selective", False),
    ],
)
def test_it_is_known_whether_every_layer_is_computed_again_as_a_whole(chosen, every):
    speed = Speed(SpeedArguments(checkpoint_layers=chosen))
    speed.apply(tiny_llama(num_hidden_layers=4))
    assert speed.checkpoints_all is every


def test_the_loop_obeys_the_trainers_own_flag_as_the_trainer_does(tmp_path):
    args = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        **{
            CHECKPOINTING: True,
            f"{CHECKPOINTING}_kwargs": {"every_n_layers": 2, "use_reentrant": False},
        },
    )
    model = tiny_llama(num_hidden_layers=4)
    Speed(SpeedArguments()).apply(model, loop=args)
    marked = [m.gradient_checkpointing for m in model.modules() if _is_layer(m)]
    assert marked == [True, False, True, False]


# Compiling


COMPILED = SpeedArguments(
    compile_blocks=True, compile_backend="aot_eager", checkpoint_layers="1", tuned=True
)


# torch._dynamo 2.13 reads it of every tensor that enters a graph (variables/builder.py).
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_are_compiled_in_place_and_learn_the_same():
    collate = Collator(pad_token_id=0)
    wanted = learned(tiny_llama(), collate(rows()))
    model = tiny_llama()
    names = list(model.state_dict())
    speed = Speed(COMPILED)
    speed.apply(model)
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = learned(model, speed.collating(collate)(rows()))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    torch._dynamo.reset()
    assert list(model.state_dict()) == names
    assert speed.on["compile_blocks"] == {"layers": 2, "backend": "aot_eager"}
    assert_equal(wanted, found)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_share_one_graph_and_other_lengths_have_one_more():
    model, graphs = tiny_llama(num_hidden_layers=12), []
    arguments = SpeedArguments(compile_blocks=True, compile_backend="aot_eager", tuned=True)
    Speed(arguments).apply(model)
    torch._dynamo.reset()
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    for length in (8, 12, 16, 9):
        ids = torch.randint(60, (2, length))
        model(input_ids=ids, labels=ids).loss.backward()
        graphs.append(stats["unique_graphs"] - before)
    torch._dynamo.reset()
    # Of the layers, of the last norm and of the loss, which takes any number of tokens.
    assert graphs == [3, 5, 5, 5]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_are_still_compiled_after_evaluations_and_samples(cache):
    accelerator, tokenizer = Accelerator(cpu=True), load_tokenizer(build_model())
    model, speed = (
        tiny_llama(num_hidden_layers=12, vocabulary=len(tokenizer)),
        Speed(SpeedArguments(compile_blocks=True, compile_backend="aot_eager", tuned=True)),
    )
    speed.apply(model)
    texts = Dataset.from_list(rows((9, 23, 5, 16, 12, 12, 30)))
    collate = speed.collating(Collator(pad_token_id=0))
    torch._dynamo.reset()
    stats = torch._dynamo.utils.counters["stats"]
    loss_and_tokens(accelerator, model, texts, collate, batch_rows=2)
    evaluated = stats["unique_graphs"]
    prompts = [tokenizer.encode(text) for text in ("def add(a, b):\n", "def sub")]
    assert all(continuations(accelerator, model, prompts, tokenizer))
    assert stats["unique_graphs"] == evaluated
    graphs = []
    for length in (8, 12, 16, 9):
        ids = torch.randint(60, (2, length))
        model(input_ids=ids, labels=ids).loss.backward()
        graphs.append(stats["unique_graphs"] - evaluated)
    torch._dynamo.reset()
    assert graphs[0] >= 1
    assert graphs[1:] == [graphs[1]] * 3, "the lengths of a batch are compiled once more, if at all"


def test_a_backend_that_torch_lacks_is_refused():
    arguments = SpeedArguments(compile_blocks=True, compile_backend="aot-eager")
    with pytest.raises(UsageError, match="--compile_backend aot-eager: torch has .*aot_eager"):
        Speed(arguments).apply(tiny_llama())


# DDP's buckets


def test_the_loop_wraps_as_the_arguments_say(tmp_path):
    args = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        ddp_bucket_cap_mb=7,
        ddp_static_graph=True,
        ddp_broadcast_buffers=False,
        ddp_find_unused_parameters=False,
    )
    made = ddp_options(args, bucket_view=True).to_kwargs()
    assert made == {
        "bucket_cap_mb": 7,
        "static_graph": True,
        "broadcast_buffers": False,
        "gradient_as_bucket_view": True,
    }


@pytest.mark.parametrize("wanted", [False, True])
def test_the_trainer_makes_its_accelerator_with_the_buckets_asked_for(wanted, tmp_path):
    """`_build_accelerator_args` is not public: this fails when transformers asks elsewhere."""
    trainer = ToolkitTrainer(
        model=tiny_llama(),
        args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none"),
        ddp_bucket_view=wanted,
    )
    handler = trainer.accelerator.ddp_handler
    assert isinstance(handler, DistributedDataParallelKwargs)
    assert handler.gradient_as_bucket_view is wanted


def test_gradients_in_buckets_are_held_once_at_the_peak_as_the_ledger_counts_it(one_rank):
    peaks, losses = {}, {}
    for within in (False, True):
        model = DistributedDataParallel(tiny_llama(vocabulary=999), gradient_as_bucket_view=within)
        optimizer = torch.optim.AdamW(model.parameters())
        ledger, ids = PeakLedger(), torch.arange(8).unsqueeze(0)
        for step in range(4):  # the second makes the buckets anew
            if step == 3:
                ledger.start(model, optimizer, device="cpu")
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ledger.stop()
        peaks[within], losses[within] = ledger.counted(4), loss.item()
    assert losses[True] == losses[False]
    gradients = sum(4 * parameter.numel() for parameter in model.parameters())
    assert peaks[False]["categories"]["gradients"] == 2 * gradients
    assert peaks[True]["categories"]["gradients"] == gradients
    assert peaks[False]["total_bytes"] - peaks[True]["total_bytes"] == gradients


def test_gradients_in_buckets_lie_beside_them_too_until_they_are_reduced(one_rank):
    held = {}
    for synced in (False, True):
        model = DistributedDataParallel(tiny_llama(vocabulary=999), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters())
        ledger, ids = PeakLedger(), torch.arange(8).unsqueeze(0)
        for step in range(3):
            if step == 2:
                ledger.start(model, optimizer, device="cpu")
            for micro_batch in range(3):
                with nullcontext() if synced or micro_batch == 2 else model.no_sync():
                    model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ledger.stop()
        held[synced] = ledger.counted(3)["total_bytes"]
    gradients = sum(4 * parameter.numel() for parameter in model.parameters())
    assert held[False] - held[True] == gradients


# Flags


def test_tuned_switches_on_what_is_not_switched_off_by_name():
    tuned = own_arguments(["--tuned", "true", "--ddp_bucket_view", "false"]).speed
    assert tuned.chunked_loss
    assert tuned.uses_lean_masks
    assert tuned.prefetched_layers == 1
    assert not tuned.gradients_in_buckets
    assert not tuned.compile_blocks
    assert tuned.checkpoint_layers == "none"
    plain = own_arguments([]).speed
    assert plain == SpeedArguments()
    assert plain.prefetched_layers == 0
    assert own_arguments(["--loss_impl", "chunked"]).speed.chunked_loss


def test_tuned_logs_seldom_and_fuses_adamw_unless_told_otherwise():
    tuned, ddp, zero3 = SpeedArguments(tuned=True), STRATEGIES["ddp"], STRATEGIES["zero3"]
    fused, seldom = "--optim=adamw_torch_fused", "--logging_steps=10"
    assert tuned.with_flags(["--seed", "3"], ddp) == ["--seed", "3", seldom, fused]
    assert tuned.with_flags([], zero3) == [seldom]
    passed = ["--logging-steps", "1", "--optim=adamw_torch"]
    assert tuned.with_flags(passed, ddp) == passed
    assert SpeedArguments().with_flags([], ddp) == []


@pytest.mark.parametrize(
    ("rest", "launched", "fused"),
    [
        (["--fp16"], None, False),
        (["--fp16", "--seed", "3"], None, False),
        (["--fp16", "True"], "no", False),
        (["--fp16", "False"], None, True),
        (["--fp16=false", "--fp16_full_eval"], "bf16", True),
        ([], "fp16", False),
        ([], "bf16", True),
    ],
)
def test_fp16_keeps_its_optimizer_whose_skipped_steps_are_known(rest, launched, fused):
    env = {} if launched is None else {"ACCELERATE_MIXED_PRECISION": launched}
    rest, _ = with_precision(rest, env)
    flags = SpeedArguments(tuned=True).with_flags(rest, STRATEGIES["fsdp"])
    assert ("--optim=adamw_torch_fused" in flags) is fused
    assert "--logging_steps=10" in flags
    values = training_values(own_arguments(rest))
    assert fused is (requested_precision(values) != "fp16")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--checkpoint_layers", "some"], "--checkpoint_layers some: use none, all, every:2"),
        (["--checkpoint_layers", "every:0"], "--checkpoint_layers every:0"),
        (["--loss_chunk_tokens", "0"], "--loss_chunk_tokens 0: use 1 or more"),
        (["--fsdp_prefetch", "-1"], "--fsdp_prefetch -1: use 0 or more"),
    ],
)
def test_values_that_mean_nothing_are_refused(flags, says):
    with pytest.raises(UsageError, match=says):
        own_arguments(flags)


@pytest.mark.parametrize(
    ("flags", "values", "strategy", "says"),
    [
        ({"loss_impl": "chunked"}, {"use_liger_kernel": True}, "ddp", "both replace the loss"),
        ({}, {"use_liger_kernel": True}, "ddp", "--use_liger_kernel needs a GPU"),
        ({"loss_impl": "chunked"}, {"label_smoothing_factor": 0.1}, "ddp", "leaves no logits"),
        (
            {"checkpoint_layers": "2"},
            {"activation_checkpointing": True},
            "ddp",
            "both choose layers",
        ),
        ({"compile_blocks": True}, {"torch_compile": True}, "ddp", "both compile the layers"),
        ({"ddp_bucket_view": True}, {}, "zero2", "--ddp_bucket_view is for ddp"),
        ({"compile_blocks": True}, {}, "zero3", "gives up .recompile_limit."),
        ({"fsdp_prefetch": 2}, {}, "ddp", "--fsdp_prefetch is for FSDP2, and this is ddp"),
        ({"sync_each_batch": True}, {}, "zero1", "--sync_each_batch is for FSDP2 and ddp"),
        (
            {"sync_each_batch": True},
            {"gradient_accumulation_steps": 1},
            "fsdp",
            "changes nothing with one micro-batch",
        ),
    ],
)
def test_switches_that_contradict_what_else_is_asked_are_refused(flags, values, strategy, says):
    with pytest.raises(UsageError, match=says):
        check_speed(SpeedArguments(**flags), values, strategy=STRATEGIES[strategy], on_gpu=False)


@pytest.mark.parametrize(
    "flags", [{"ddp_bucket_view": True}, {"fsdp_prefetch": 2}, {"sync_each_batch": True}]
)
def test_the_control_of_a_comparison_takes_the_switches_of_the_others(flags):
    arguments = SpeedArguments(**flags)
    check_speed(arguments, {}, strategy=STRATEGIES["single"], on_gpu=False)
    with pytest.raises(UsageError):
        check_speed(arguments, {}, strategy=STRATEGIES["zero1"], on_gpu=False)


ROUTED = {"architectures": ["MixtralForCausalLM"], "output_router_logits": True}


@pytest.mark.parametrize(
    ("flags", "config", "says"),
    [
        ({"loss_impl": "chunked"}, {"architectures": ["OPTForCausalLM"]}, "for OPTForCausalLM"),
        ({"lean_masks": True}, {}, "--lean_masks: not proven for a model without a named"),
        ({"checkpoint_layers": "5"}, {"num_hidden_layers": 4}, "5: the model has only 4 layers"),
        ({"checkpoint_layers": "every:3"}, {"n_layer": 2}, "the model has only 2 layers"),
        ({"checkpoint_layers": "4"}, {"num_hidden_layers": 4}, None),
        ({"tuned": True}, {"architectures": ["OPTForCausalLM"]}, None),
        ({"loss_impl": "chunked"}, {"architectures": ["LlamaForCausalLM"]}, None),
        ({"loss_impl": "chunked"}, ROUTED, "--loss_impl chunked: not with the routers' loss"),
        ({"lean_masks": True}, ROUTED, "--lean_masks: not with the routers' loss"),
        ({"tuned": True}, ROUTED, None),
    ],
)
def test_what_a_model_cannot_do_is_known_before_it_is_loaded(flags, config, says, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if says is None:
        check_model(SpeedArguments(**flags), tmp_path)
        return
    with pytest.raises(UsageError, match=says):
        check_model(SpeedArguments(**flags), tmp_path)


def test_the_record_names_the_trainers_own_switches_as_well(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, ddp_bucket_cap_mb=7)
    assert Speed(SpeedArguments()).facts(args)["on"] == {"ddp_bucket_cap_mb": 7}


def test_all_that_does_not_go_together_is_said_at_once():
    arguments = SpeedArguments(compile_blocks=True, loss_impl="chunked", fsdp_prefetch=1)
    values = {"torch_compile": True, "label_smoothing_factor": 0.1}
    with pytest.raises(UsageError) as refused:
        check_speed(arguments, values, strategy=STRATEGIES["ddp"], evidence=True)
    assert str(refused.value).count(";") == 3


# What is measured


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "fsdp_grad_op", "zero2"])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_the_benchmark_calls_tuned_is_what_the_flag_switches_on(
    strategy, compiled, monkeypatch
):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    made = importlib.import_module("kit.variants").variants(strategy, compiled=compiled)
    names = [each.name for each in made]
    assert len(set(names)) == len(names)
    asked, tuned = (
        SpeedArguments(**next(each for each in made if each.name == "tuned").speed),
        SpeedArguments(tuned=True),
    )
    switches = ["chunked_loss", "uses_lean_masks", "compile_blocks", "checkpoint_layers"]
    of = {"ddp": ["gradients_in_buckets"], "fsdp": ["prefetched_layers"]}
    switches += of.get(STRATEGIES[strategy].backend, [])
    for switch in switches:
        assert getattr(asked, switch) == getattr(tuned, switch), switch
    on = {each.name: each.switches for each in made}
    assert "packing" not in on["tuned"]
    assert on["recipe"] - on["tuned"] == {"packing"} | ({"compiled layers"} if compiled else set())
    assert list(on.values()).count(on["tuned"]) == 1
    fused = "--optim=adamw_torch_fused" in tuned.with_flags([], STRATEGIES[strategy])
    assert ("fused optimizer" in on["tuned"]) is fused
