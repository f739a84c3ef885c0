"""Every family that the planner knows, cut into three stages, computes as the whole model does."""

import copy

import pytest
import torch
from small_models import tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.backends.stages import costs_of, cut
from toolkit.engines.described import described
from toolkit.engines.pipelining.cutting import Window, cut_model
from toolkit.engines.pipelining.observed import observe
from toolkit.errors import UsageError
from toolkit.planning.models.architectures import shape_from_config
from toolkit.planning.models.counted import shape_of
from toolkit.planning.models.family import FAMILIES

WIDTHS = {
    "hidden": 32,
    "layers": 5,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn": 48,
    "vocab": 70,
    "positions": 64,
    "experts": 4,
    "active": 2,
    "expert": 24,
}
PECULIAR = {
    "opt-projected": ("opt", {"word_embed_proj_dim": 24}),
    "opt-after": ("opt", {"do_layer_norm_before": False}),
    "falcon-alibi": ("falcon", {"new_decoder_architecture": False, "alibi": True}),
    "granite-scaled": ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0}),
}
UNKNOWN = ("cohere", "glm4", "stablelm")
CASES = {kind: (kind, {}) for kind in (*FAMILIES, *UNKNOWN)} | PECULIAR
STAGES = 3


def small(kind, changes):
    family = FAMILIES["qwen3" if kind in UNKNOWN else kind]
    widths = {family.keys[role]: size for role, size in WIDTHS.items() if role in family.keys}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    if kind == "gptj":
        widths["rotary_dim"] = 4
    config = AutoConfig.for_model(kind, **widths | special | changes, use_cache=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.eval()


def rows():
    torch.manual_seed(1)
    ids = torch.randint(1, 70, (3, 9))
    mask = torch.arange(9) < torch.tensor([9, 4, 7])[:, None]
    return {
        "input_ids": ids.masked_fill(~mask, 0),
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~mask, -100),
    }


def kind_of(name):
    return CASES[name][0]


@pytest.mark.parametrize("name", CASES)
def test_stages_compute_the_loss_and_gradients_of_the_whole_model(name):
    model = small(*CASES[name])
    copies = [copy.deepcopy(model) for _ in range(STAGES)]
    shape = shape_of(described(model), name)
    if kind_of(name) in FAMILIES:
        known = shape_from_config(model.config.to_dict(), name=name)
        assert costs_of(known, "flops", sequence=9) == costs_of(shape, "flops", sequence=9)
    layers = cut(costs_of(shape, "flops", sequence=9), STAGES, name=name)
    assert [n for held in layers for n in held] == [*range(5)]
    cuts = [
        cut_model(whole, observe(whole), layers, rank=rank, rank_of=range(STAGES))
        for rank, whole in enumerate(copies)
    ]
    batch = rows()
    loss = model(**batch, num_items_in_batch=17).loss
    loss.backward()

    passed, hidden, outputs = None, [], []
    for stage, cut_here in enumerate(cuts):
        module = cut_here.stages[stage]
        module.window = Window([batch], 17)
        hidden.append(None if passed is None else passed.detach().requires_grad_())
        passed = module(hidden[-1], number=torch.zeros(1, dtype=torch.long))
        if stage < STAGES - 1:
            assert (passed.shape[-1], passed.dtype) == cut_here.hidden
        outputs.append(passed)
    assert passed.item() == pytest.approx(loss.item(), abs=1e-6)
    outputs[-1].backward()
    for output, after in zip(outputs[-2::-1], hidden[:0:-1], strict=True):
        output.backward(after.grad)

    summed = {}
    for whole, cut_here in zip(copies, cuts, strict=True):
        for own, parameter in whole.named_parameters():
            if parameter.grad is not None:
                kept = summed.setdefault(cut_here.names[own], torch.zeros_like(parameter))
                kept += parameter.grad
    for parameter, weight in model.named_parameters():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        cut_gradient = summed.get(parameter, torch.zeros_like(weight))
        torch.testing.assert_close(cut_gradient, gradient, rtol=1e-4, atol=1e-6)
    held = [sum(p.numel() for p in whole.parameters()) for whole in copies]
    assert max(held) < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: small("mixtral", {"output_router_logits": True}), "routers of all layers"),
        (lambda: without_a_list(tiny_llama()), "has no list of layers"),
        (lambda: with_skip(tiny_llama(num_hidden_layers=3)), "more of each other than the hidden"),
        (lambda: with_parameter(tiny_llama()), "model.extra would be in none"),
    ],
    ids=["router", "list", "skip", "parameter"],
)
def test_a_model_that_cannot_be_cut_is_refused_by_name(model, reason):
    whole = model()
    with pytest.raises(UsageError, match=rf"{type(whole).__name__}.*{reason}"):
        cut_model(whole, observe(whole), [range(1), range(1, 2)], rank=0, rank_of=(0, 1))


def without_a_list(model):
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    return model


def with_skip(model):
    """Let the last layer see the first one's result as well."""
    seen = []
    model.model.layers[0].register_forward_hook(lambda _, __, output: seen.append(output))
    model.model.layers[2].register_forward_pre_hook(lambda _, args: (args[0] + seen[-1],))
    return model


def with_parameter(model):
    model.model.extra = torch.nn.Parameter(torch.zeros(3))
    return model
