"""The known families are counted again, with the transformers that is installed."""

import json

import pytest
import torch

from toolkit.jobs.kept import FULL
from toolkit.measuring.meta_model import build, decoder_layers, describe, passes
from toolkit.planning.memory.layers import bytes_outside, layer_bytes
from toolkit.planning.models.architectures import shape_from_config
from toolkit.planning.models.family import FAMILIES

ROWS, SEQUENCE, RANK = 2, 40, 24
WIDTHS = {
    "hidden": 120,
    "layers": 4,
    "heads": 6,
    "kv_heads": 3,
    "head_dim": 28,
    "ffn": 236,
    "vocab": 331,
    "positions": 64,
    "experts": 6,
    "active": 2,
    "expert": 44,
    "shared": 52,
}

OTHERS = {"gptj": {"rotary_dim": WIDTHS["head_dim"]}, "opt": {"attention_dropout": 0.1}}


def config_of(model_type, **changes):
    family = FAMILIES[model_type]
    config = {family.keys[role]: size for role, size in WIDTHS.items() if role in family.keys}
    config |= OTHERS.get(model_type, {})
    if "head_dim" not in family.keys or model_type == "olmoe":  # it runs with no other
        config[family.keys["hidden"]] = WIDTHS["heads"] * WIDTHS["head_dim"]
    if "decoder_sparse_step" in family.defaults:
        config["decoder_sparse_step"] = 2
    if "pad_token_id" in vars(transformers_config(model_type)):
        config["pad_token_id"] = None
    return {"model_type": model_type, **config, **changes}


def transformers_config(model_type):
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_parameters_are_those_that_are_shipped(model_type):
    config = config_of(model_type)
    shape = shape_from_config(config, name=model_type)
    model = build(config, torch.float32)
    counted = describe(model, *decoder_layers(model))
    tensors = [t for t in counted["tensors"] if not (shape.tied and t[2] == "head")]
    assert tensors == [(t.name, list(t.shape), t.kind, t.layer) for t in shape.tensors]
    for field in (
        *("architecture", "layers", "hidden_size", "heads", "vocab_size", "tied", "experts"),
        *("active_experts", "qk_norm", "gated", "rotary", "norms_per_layer"),
    ):
        assert counted[field] == getattr(shape, field), field


@pytest.mark.parametrize("eager", [False, True], ids=["flash", "eager"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_bytes_are_those_that_are_shipped(model_type, eager):
    """In widths and with settings that no formula was read from."""
    config = config_of(model_type)
    shape = shape_from_config(config, name=model_type)
    for size, dtype in {4: torch.float32, 2: torch.bfloat16}.items():
        model = build(config, dtype, eager=eager)
        for regime, targets, count in passes(model, size, RANK):
            rank = 0 if regime in FULL and targets == "none" else RANK
            if rank and not (model_type in ("llama", "gpt2", "mixtral") and eager is False):
                continue
            count.run(ROWS, SEQUENCE)
            given = {"fused": not eager, "adapters": rank, "targets": targets}
            for kind, twin in zip(shape.layer_kinds, count.twins, strict=True):
                planned = layer_bytes(shape, regime, SEQUENCE, kind=kind, **given)
                counted = count.kept[twin].per_token(ROWS * SEQUENCE)
                *parts, peak = counted
                assert [planned.saved, planned.boundary, planned.products] == pytest.approx(
                    parts[:3], rel=0.002
                )
                # Of a part of a head that is rotated, the formula has all of it.
                assert planned.backward_peak == pytest.approx(peak, rel=0.02)
            outside = sum(size * n for size, n in count.outside.items()) / ROWS / SEQUENCE
            assert bytes_outside(shape, regime, SEQUENCE, **given) == pytest.approx(outside)


def test_each_family_that_is_shipped_is_small():
    for model_type, family in FAMILIES.items():
        assert family.architecture.endswith(("ForCausalLM", "LMHeadModel")), model_type
        assert len(json.dumps(family.kept)) < 4_000_000
