"""Adapters begin alike everywhere, are saved whole, come back, and can be merged."""

import dataclasses
import json

import bitsandbytes as bnb
import pytest
import torch
from accelerate import Accelerator
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, get_peft_model
from safetensors.torch import load_file
from small_models import small_of, tiny_llama
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from toolkit.errors import SaveError, UsageError
from toolkit.measuring.memory import state_bytes
from toolkit.records.record import STARTING_ADAPTER
from toolkit.strategies import get_strategy
from toolkit.training import adapters, methods, saving
from toolkit.training.adapters import ADAPTER_FILE, load_for
from toolkit.training.arguments import ModelArguments
from toolkit.training.method_arguments import MethodArguments
from toolkit.training.methods import check_strategy, checked_method, meta_model
from toolkit.training.model import model_facts
from toolkit.training.quantized import keep_packed
from toolkit.training.saving import save_model

pytestmark = pytest.mark.filterwarnings(
    # peft 0.21 asks transformers 5.23 by the old name (peft/peft_model.py, PeftModel.__init__).
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

IDS = torch.tensor([[1, 5, 9, 3, 7, 2]])
LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """Its layers keep their weights inputs first."""
    folder = tmp_path_factory.mktemp("gpt2")
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_inner": 96, "n_positions": 32}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config(vocab_size=64, **shape, **special)).save_pretrained(folder)
    return folder


def method_of(folder, method="lora", *, precision="no", dtype=None, **flags):
    arguments = ModelArguments(model_name_or_path=str(folder), dtype=dtype)
    method = MethodArguments(method=method, **flags)
    return checked_method(method, arguments, model_facts(folder), precision=precision)


def adapted(folder, method="lora", *, start=None, seed=7, **flags):
    found = method_of(folder, method, **flags)
    arguments = ModelArguments(model_name_or_path=str(folder))
    return load_for(found, arguments, folder, seed=seed, start=start)


def trained(model):
    """Move every adapter from where it began, where B is zero and hides everything."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def test_adapters_begin_alike_whatever_was_drawn_before(llama):
    torch.manual_seed(1)
    one = adapted(llama)
    torch.rand(1000)
    other = adapted(llama)
    theirs = dict(other.named_parameters())
    trained_names = [name for name, each in one.named_parameters() if each.requires_grad]
    assert len(trained_names) == 2 * 2 * len(LAYERS)
    for name in trained_names:
        assert torch.equal(theirs[name], one.get_parameter(name))
        assert bool(theirs[name].any()) is ("lora_A" in name)
    assert not torch.equal(
        adapted(llama, seed=8).get_parameter(trained_names[0]), theirs[trained_names[0]]
    )


def test_the_draw_leaves_the_generator_as_it_was(llama):
    torch.manual_seed(3)
    expected = torch.rand(4)
    model = tiny_llama()
    torch.manual_seed(3)
    adapters.attach_adapters(model, method_of(llama), seed=7)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_every_linear_layer_but_the_head_is_adapted(tmp_path, tied):
    tiny_llama(tie_word_embeddings=tied).save_pretrained(tmp_path)
    method = method_of(tmp_path, lora_r=4)
    assert {name.rpartition(".")[2] for name in method.layers} == LAYERS
    model = adapted(tmp_path, lora_r=4)
    counted = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert counted == method.trained_parameters
    assert {name for name, _ in adapters.adapted_modules(model)} == set(method.layers)


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_trained_beside_adapters_come_back_alone_and_merged(
    tmp_path, accelerator, method, tied
):
    base, start = tmp_path / "base", tmp_path / "start.safetensors"
    tiny_llama(tie_word_embeddings=tied).save_pretrained(base)
    asked = method_of(base, method, lora_embeddings=True)
    model = adapted(base, method, lora_embeddings=True, start=start)
    whole = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    assert len(whole) == (1 if tied else 2)
    every = {each for each in model.parameters() if each.requires_grad}
    assert whole < every
    assert sum(each.numel() for each in every) == asked.trained_parameters
    assert {each.dtype for each in every} == {torch.float32}
    began = {name: tensor.clone() for name, tensor in load_file(start).items()}
    trained(model)
    save_model(accelerator, model, tmp_path / "final", strategy="single")
    save_model(accelerator, model, tmp_path / "merged", merge=True, strategy="single")
    saved = load_file(tmp_path / "final" / ADAPTER_FILE)
    assert saved.keys() == began.keys()
    assert not any(torch.equal(saved[name], began[name]) for name in saved)
    packed = {} if method == "lora" else {"quantization_config": model.config.quantization_config}
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "final", **packed)
    keep_packed(loaded)
    assert torch.equal(logits(loaded), logits(model))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert torch.allclose(logits(merged), logits(model), atol=1e-5)


def test_names_choose_layers_by_their_last_parts_or_whole(llama):
    by_last = method_of(llama, lora_target_modules=["q_proj", "v_proj"])
    assert len(by_last.layers) == 4
    whole = "model.layers.1.mlp.up_proj"
    assert method_of(llama, lora_target_modules=[whole]).layers == (whole,)
    model = adapted(llama, lora_target_modules=[whole])
    assert [name for name, _ in adapters.adapted_modules(model)] == [whole]


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_saved_adapter_comes_back_as_it_was_trained(
    tmp_path, accelerator, request, family, method
):
    folder = request.getfixturevalue(family)
    model = trained(adapted(folder, method))
    save_model(accelerator, model, tmp_path / "final", strategy="single")
    config = PeftConfig.from_pretrained(str(tmp_path / "final"))
    assert (config.base_model_name_or_path, config.inference_mode) == (str(folder), True)
    packed = {} if method == "lora" else {"quantization_config": model.config.quantization_config}
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "final", **packed)
    keep_packed(loaded)
    assert torch.allclose(logits(loaded), logits(model), atol=1e-6)
    assert not torch.allclose(
        logits(loaded), logits(AutoModelForCausalLM.from_pretrained(folder)), atol=1e-2
    )
    assert loaded.generate(input_ids=IDS, max_new_tokens=3, pad_token_id=0).shape[1] > 6


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_is_base_plus_what_the_adapters_add(tmp_path, accelerator, request, family):
    folder = request.getfixturevalue(family)
    model = trained(adapted(folder, lora_r=4, lora_alpha=12))
    save_model(accelerator, model, tmp_path / "merged", merge=True)
    merged, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype="auto", output_loading_info=True
    )
    assert not any(report[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.allclose(logits(merged), logits(model), atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    ours = merged.state_dict()
    for name, layer in adapters.adapted_modules(model):
        added = 3.0 * (layer.lora_B.default.weight @ layer.lora_A.default.weight)
        added = added.T if family == "gpt2" else added
        assert torch.equal(ours[f"{name}.weight"], base[f"{name}.weight"] + added), name
    kept = [
        name
        for name in base
        if f"{name.removesuffix('.weight')}" not in dict(adapters.adapted_modules(model))
    ]
    assert kept
    assert all(torch.equal(ours[name], base[name]) for name in kept)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_4_bit_weights_are_unpacked_to_be_merged(tmp_path, accelerator, request, family):
    folder = request.getfixturevalue(family)
    model = trained(adapted(folder, "qlora"))
    save_model(accelerator, model, tmp_path / "merged", merge=True)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert not hasattr(merged, "hf_quantizer")
    assert torch.allclose(logits(merged), logits(model), atol=1e-5)
    # The weights were packed: the merged ones are not those that lie in the folder.
    assert not torch.allclose(logits(merged), logits(trained(adapted(folder, "lora"))), atol=1e-3)


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def mixture(request, tmp_path_factory):
    """A model whose experts are fused, and the part of its weights that they are."""
    folder = tmp_path_factory.mktemp(request.param)
    changes = {"num_local_experts": 8} if request.param == "mixtral" else {}
    model = small_of(request.param, "sdpa", **changes)
    model.save_pretrained(folder)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    fused = sum(size for name, size in sizes.items() if ".experts." in name)
    ends = sum(size for name, size in sizes.items() if "embed" in name or "lm_head" in name)
    return folder, fused / (sum(sizes.values()) - ends)


def test_packing_a_model_whose_weights_are_mostly_fused_experts_is_refused(mixture, monkeypatch):
    folder, share = mixture
    monkeypatch.setattr(methods, "MOST_UNPACKED", share - 0.001)
    with pytest.raises(UsageError, match=rf"qlora would leave {share:.0%} of the weights of"):
        method_of(folder, "qlora")
    method_of(folder, "lora")


def test_a_mixture_of_experts_is_not_packed(tmp_path):
    small_of("mixtral", "sdpa", num_local_experts=8).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="experts are fused into single tensors"):
        method_of(tmp_path, "qlora")


def test_a_run_says_that_fused_experts_get_no_adapters(mixture, llama):
    folder, share = mixture
    method = method_of(folder)
    assert method.facts()["fused_experts"] == pytest.approx(share, abs=1e-4)
    (note,) = method.notes()
    assert f"the fused experts, {share:.0%} of the weights" in note
    assert "no adapters" in note
    assert method_of(llama).notes() == []
    assert method_of(llama).facts()["fused_experts"] is None
    assert method_of(llama, "qlora").notes() == []


def test_experts_that_are_no_linear_layers_are_left_alone_and_saved_as_their_family_does(
    tmp_path, accelerator
):
    small_of("qwen3_moe", "sdpa").save_pretrained(tmp_path / "base")
    model = trained(adapted(tmp_path / "base"))
    assert not any("experts" in name for name, _ in adapters.adapted_modules(model))
    save_model(accelerator, model, tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert torch.allclose(logits(merged), logits(model), atol=1e-5)
    assert "model.layers.0.mlp.experts.1.up_proj.weight" in load_file(
        tmp_path / "merged" / "model.safetensors"
    )


def test_layers_whose_names_peft_takes_for_those_of_experts_are_refused(tmp_path):
    """The dense layer of a mixture has names that its experts had before they were fused."""
    small_of("qwen3_moe", "sdpa", mlp_only_layers=[1]).save_pretrained(tmp_path)
    with pytest.raises(
        UsageError, match=r"\(down_proj, gate_proj, up_proj\) for theirs"
    ) as refused:
        method_of(tmp_path)
    targets = str(refused.value).rpartition("--lora_target_modules ")[2].rstrip(".").split()
    assert targets == ["k_proj", "o_proj", "q_proj", "v_proj"]
    with pytest.raises(UsageError, match=r"\(gate_proj\) for theirs"):
        method_of(tmp_path, lora_target_modules=["gate_proj"])
    attached = adapted(tmp_path, lora_target_modules=targets)
    assert {name.rpartition(".")[2] for name, _ in adapters.adapted_modules(attached)} == {*targets}


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_4_bit_weights_are_counted_to_the_byte_scales_included(llama, precision):
    model = adapted(llama, "qlora", precision=precision)
    size = 4 if precision == "no" else 2
    packed = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert len(packed) == 2 * len(LAYERS)
    total = 0
    for layer in packed:
        elements = layer.in_features * layer.out_features
        blocks = -(-elements // 64)
        # Two weights a byte; a byte for the scale of each block, whose own scales are fp32; and
        # the tables of both, with the offset between them.
        total += elements // 2 + blocks + 4 * -(-blocks // 256) + 4 * (16 + 256 + 1)
        assert layer.weight.dtype == (torch.float32 if size == 4 else torch.bfloat16)
    others = [each for each in model.parameters() if not isinstance(each, bnb.nn.Params4bit)]
    total += sum(each.numel() * (4 if each.requires_grad else size) for each in others)
    counted = state_bytes(model, torch.optim.AdamW(p for p in others if p.requires_grad))
    assert counted == {"parameters_bytes": total, "master_bytes": 0, "optimizer_bytes": 0}


def test_evaluating_leaves_packed_weights_as_they_are(llama):
    """bitsandbytes would pack them otherwise on some CPUs, in place."""
    model = adapted(llama, "qlora")
    layers = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert all(layer.support_avx512bf16_for_cpu is False for layer in layers)
    before = [layer.weight.detach().clone() for layer in layers]
    logits(model)
    for layer, weight in zip(layers, before, strict=True):
        assert torch.equal(layer.weight.view(torch.uint8), weight.view(torch.uint8))


def test_what_an_adapter_began_with_has_the_names_of_a_saved_one(tmp_path, accelerator, llama):
    model = adapted(llama, start=tmp_path / "run" / STARTING_ADAPTER)
    save_model(accelerator, model, tmp_path / "final")
    start = load_file(tmp_path / "run" / STARTING_ADAPTER)
    final = load_file(tmp_path / "final" / ADAPTER_FILE)
    assert start.keys() == final.keys()
    assert all(torch.equal(start[name], final[name]) for name in start)


def test_a_weight_that_was_gathered_empty_is_an_error_and_nothing_is_put_in_place(
    tmp_path, accelerator, llama, monkeypatch
):
    model = adapted(llama)
    original = saving.whole_weights

    def empty(*args, **options):
        for name, tensor in original(*args, **options):
            yield name, tensor[:0] if "1.mlp.up_proj.lora_B" in name else tensor

    monkeypatch.setattr(saving, "whole_weights", empty)
    with pytest.raises(SaveError, match=r"up_proj.lora_B.default.weight is \(0, 16\)"):
        save_model(accelerator, model, tmp_path / "final")
    assert not (tmp_path / "final").exists()


def test_a_weight_that_is_not_trained_any_more_is_missed(tmp_path, accelerator, llama):
    model = adapted(llama)
    model.model.layers[0].self_attn.q_proj.lora_B.default.weight.requires_grad_(False)
    with pytest.raises(SaveError, match=r"layers.0.self_attn.q_proj does not train both"):
        save_model(accelerator, model, tmp_path / "final")


def test_a_model_that_cannot_be_merged_is_an_error_after_everything_was_gathered(
    tmp_path, accelerator, llama
):
    model = adapted(llama)
    gathered = []
    original = saving._on_cpu

    def counting(*args):
        gathered.append(1)
        return original(*args)

    model.model.layers[0].self_attn.q_proj.scaling = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "_on_cpu", counting)
        with pytest.raises(SaveError, match="default"):
            save_model(accelerator, model, tmp_path / "merged", merge=True)
    assert len(gathered) == len(list(model.parameters()))


def test_neither_kind_of_save_leaves_files_of_the_other(tmp_path, accelerator, llama):
    (tmp_path / "notes.txt").write_text("mine")
    save_model(accelerator, adapted(llama), tmp_path)
    assert (tmp_path / ADAPTER_FILE).exists()
    save_model(accelerator, tiny_llama(), tmp_path)
    assert not list(tmp_path.glob("adapter*"))
    save_model(accelerator, adapted(llama), tmp_path)
    assert not list(tmp_path.glob("model*.safetensors"))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_somebodys_peft_model_is_saved_as_peft_saves_it(tmp_path, accelerator, llama):
    model = AutoModelForCausalLM.from_pretrained(llama)
    theirs = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"), "mine"
    )
    save_model(accelerator, theirs, tmp_path / "ours")
    theirs.save_pretrained(str(tmp_path / "theirs"))
    written = load_file(tmp_path / "theirs" / "mine" / ADAPTER_FILE)
    ours = load_file(tmp_path / "ours" / ADAPTER_FILE)
    assert ours.keys() == written.keys()
    assert all(torch.equal(ours[name], written[name]) for name in ours)


@pytest.mark.parametrize(
    ("precision", "asked", "dtype", "storage"),
    [
        ("no", None, "float32", "float32"),
        ("bf16", None, "bfloat16", "bfloat16"),
        ("fp16", None, "float16", "float16"),
        ("bf16", "float32", "float32", "bfloat16"),
        ("no", "bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_packed_weights_are_stored_in_what_engines_cast_to(llama, precision, asked, dtype, storage):
    method = method_of(llama, "qlora", precision=precision, dtype=asked)
    assert (method.dtype, method.storage) == (dtype, storage)
    assert method.trained_dtype == "float32"


def test_a_hub_model_is_named_as_the_user_named_it(llama):
    arguments = ModelArguments(model_name_or_path="owner/name", model_revision="v2")
    facts = model_facts(llama)
    found = checked_method(MethodArguments(method="lora"), arguments, facts, precision="no")
    assert (found.base_model, found.base_revision) == ("owner/name", "v2")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"lora_target_modules": ["q_prj"]}, r"q_prj is no layer of .*near: q_proj"),
        ({"lora_target_modules": ["lm_head"]}, "lm_head is the output head, which gets no"),
        ({"lora_target_modules": ["embed_tokens", "x"]}, "embed_tokens is no .*; x is no layer"),
        ({"dtype": "float16", "precision": "bf16"}, "--dtype float16 and computing in bfloat16"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(llama, flags, said):
    with pytest.raises(UsageError, match=said):
        method_of(llama, **flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"merge": True}, "--merge: there are no adapters with --method full. Leave it out"),
        ({"lora_r": 8, "lora_alpha": 4}, "--lora_r, --lora_alpha: there are no.* Leave them out"),
        ({"method": "lora", "lora_r": 0}, "--lora_r 0"),
        ({"method": "lora", "lora_alpha": 0}, "--lora_alpha 0"),
        ({"method": "lora", "lora_dropout": 1.0}, "--lora_dropout 1.0"),
        ({"method": "lora", "lora_target_modules": ["all-linear", "q_proj"]}, "not both"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags, said):
    with pytest.raises(UsageError, match=said):
        MethodArguments(**flags)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_checkpoint_that_is_quantised_already_is_refused(tmp_path, llama, method):
    config = json.loads((llama / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"quantised already \(bitsandbytes\).*that it was made"):
        method_of(tmp_path, method)


@pytest.mark.parametrize("version", [None, "0.49.2"])
def test_qlora_names_the_extra_that_brings_bitsandbytes(llama, monkeypatch, version):
    import importlib.metadata

    real = importlib.metadata.version

    def pretended(name):
        if name != "bitsandbytes":
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", pretended)
    with pytest.raises(UsageError, match=r"pip install .*'toolkit\[qlora\]'"):
        method_of(llama, "qlora")


def test_deepspeed_is_refused_frozen_weights_that_it_would_refuse_later(llama):
    method = method_of(llama, dtype="bfloat16")
    with pytest.raises(UsageError, match="zero3 computes in fp32 with weights in fp32 only"):
        check_strategy(method, get_strategy("zero3"), precision="no")
    check_strategy(method, get_strategy("fsdp"), precision="no")
    check_strategy(
        dataclasses.replace(method, dtype="float32"), get_strategy("zero3"), precision="no"
    )


def test_a_skeleton_has_every_layer_and_no_weights(llama):
    found = meta_model(llama)
    assert {each.device.type for each in found.parameters()} == {"meta"}
    loaded = AutoModelForCausalLM.from_pretrained(llama)
    assert [name for name, _ in found.named_modules()] == [n for n, _ in loaded.named_modules()]
