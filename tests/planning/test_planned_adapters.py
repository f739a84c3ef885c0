"""Adapters, counted as the installed peft attaches them; fused experts are no linear layers."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.errors import UsageError
from toolkit.jobs.shape import Tensor
from toolkit.jobs.weights import expert_adapters, weights_of
from toolkit.planning.job import PlannedJob
from toolkit.planning.models.architectures import shape_from_config
from toolkit.planning.models.resolve import resolve_model
from toolkit.planning.plan import plan
from toolkit.planning.render.commands import train_command
from toolkit.strategies import STRATEGIES
from toolkit.training.adapters import load_for
from toolkit.training.arguments import ModelArguments
from toolkit.training.method_arguments import MethodArguments
from toolkit.training.methods import checked_method
from toolkit.training.model import model_facts

WIDTHS = {
    "vocab_size": 97,
    "hidden_size": 60,
    "intermediate_size": 148,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "num_hidden_layers": 3,
    "num_experts_per_tok": 2,
}
ADAPTED = {
    "mixtral": {"num_local_experts": 7},
    "qwen3_moe": {"num_experts": 7, "moe_intermediate_size": 52},
    "olmoe": {"num_experts": 7},
}
LEFT_ALONE = {
    "qwen2_moe": {"num_experts": 7, "moe_intermediate_size": 52},
    "granitemoe": {"num_local_experts": 7},
    "gpt_oss": {"num_local_experts": 7},
}
EVERY = ADAPTED | LEFT_ALONE
RANK = 6


pytestmark = [
    # peft 0.21 asks transformers 5.23 by a name that goes in v6.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    # peft 0.21 has other ranks for fused experts, also where the targets leave them out.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]
OTHERS = {
    "gpt2": {"vocab_size": 97, "n_embd": 60, "n_head": 5, "n_layer": 3, "n_positions": 64},
    "gpt_neox": {
        "vocab_size": 97,
        "hidden_size": 60,
        "intermediate_size": 148,
        "num_attention_heads": 5,
        "num_hidden_layers": 3,
    },
}


def config_of(family):
    values = OTHERS[family] if family in OTHERS else WIDTHS | EVERY[family]
    return AutoConfig.for_model(family, **values)


def attached(family, targets):
    """Trained parameters of a real model with peft's adapters on these layers."""
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_config(config_of(family))
    options = peft.LoraConfig(
        r=RANK,
        target_modules=targets,
        task_type="CAUSAL_LM",
        fan_in_fan_out=family == "gpt2",  # its linear layers are Conv1D
    )
    model = peft.get_peft_model(model, options)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("family", EVERY)
def test_adapters_of_experts_are_those_that_peft_attaches(family):
    shape = shape_from_config(config_of(family).to_dict(), name=family)
    job = PlannedJob(
        model=shape, strategy=STRATEGIES["single"], gpus=1, method="lora", lora_rank=RANK
    )
    linear = weights_of(job).trained.elements
    names = {t.name.split(".")[-2] for t in shape.of_kind("linear")}
    assert linear == attached(family, sorted(names))
    assert linear + expert_adapters(shape, RANK) == attached(family, "all-linear")
    assert (expert_adapters(shape, RANK) > 0) == (family in ADAPTED)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("mixtral", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("gpt2", ["c_attn", "attn.c_proj"]),
        ("gpt_neox", ["query_key_value", "dense"]),
    ],
)
def test_adapters_of_attention_alone_are_those_that_the_written_names_attach(family, names):
    shape = shape_from_config(config_of(family).to_dict(), name=family)
    job = PlannedJob(
        model=shape,
        strategy=STRATEGIES["single"],
        gpus=1,
        method="lora",
        lora_rank=RANK,
        lora_targets="attention",
    )
    words = train_command(job, Path("fsdp.yaml"), rate=2e-4)
    place = words.index("--lora_target_modules") + 1
    assert words[place : place + len(names) + 1] == [*names, "--model_name_or_path"]
    assert weights_of(job).trained.elements == attached(family, names) > 0


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "mixtral"])
def test_embeddings_beside_adapters_are_those_that_a_run_trains(tmp_path, family):
    config = config_of(family)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    flags = {"method": "lora", "lora_r": RANK, "lora_embeddings": True}
    asked = MethodArguments(**flags)
    arguments = ModelArguments(model_name_or_path=str(tmp_path))
    method = checked_method(asked, arguments, model_facts(tmp_path), precision="no")
    model = load_for(method, arguments, tmp_path, seed=1, start=None)
    shape = shape_from_config(config.to_dict(), name=family)
    single = STRATEGIES["single"]
    job = PlannedJob(
        model=shape,
        strategy=single,
        gpus=1,
        method="lora",
        lora_rank=RANK,
        lora_embeddings=True,
    )
    counted = [(t.name, t.elements) for t in weights_of(job).trained.listed]
    trained = [(n, p.numel()) for n, p in model.named_parameters() if p.requires_grad]
    assert [name for name, _ in counted] == [name for name, _ in trained]
    assert sum(n for _, n in counted) == sum(n for _, n in trained) == method.trained_parameters
    assert {name for name, _ in counted} > {name for name, _ in trained if ".lora_" in name}
    assert "--lora_embeddings" in train_command(job, Path("ddp.yaml"), rate=2e-4)
    with pytest.raises(UsageError, match="trains the embeddings anyway"):
        replace(job, method="full")


def test_where_no_layer_is_of_attention_by_its_name_there_is_nothing_to_adapt():
    made_up = replace(resolve_model("7b"), tensors=(Tensor("mixer.weight", (8, 8), "linear", 0),))
    job = PlannedJob(
        model=made_up,
        strategy=STRATEGIES["single"],
        gpus=1,
        method="lora",
        lora_targets="attention",
    )
    with pytest.raises(UsageError, match="7b has no linear layers of attention by their names"):
        weights_of(job)


@pytest.mark.parametrize(
    ("method", "words"), [("lora", "get no adapters."), ("qlora", "and stay unquantised.")]
)
def test_a_plan_says_what_adapters_leave_out_of_a_mixture_of_experts(method, words):
    notes = " ".join(plan("mistralai/Mixtral-8x7B-v0.1", method=method).notes)
    assert "45,097,156,608 parameters" in notes
    assert words in notes
    assert "no linear layers" not in " ".join(plan("7b", method=method).notes)


def test_no_adapters_of_experts_are_counted_where_some_layers_are_dense():
    values = config_of("qwen3_moe").to_dict() | {"decoder_sparse_step": 2}
    assert expert_adapters(shape_from_config(values, name="mixed"), RANK) == 0
