"""Each fact that a strategy requests is compared: a fact that differs, or is missing, refuses."""

import pytest

from toolkit.measuring.attestation import MAY_BE_UNKNOWN, Requested, as_recorded, compare
from toolkit.strategies import STRATEGIES

EVERY_STRATEGY = {
    "model_split_by": "none",
    "activation_checkpointing": True,
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": 3,
    "precision": "bf16",
    "replicas": 1,
    "zero_stage": 0,
    "held_fraction": 1.0,
    "offload_optimizer": "none",
    "offload_parameters": "none",
    "parameter_dtypes": ["float32"],
}
DEEPSPEED = {
    "distributed_type": "DEEPSPEED",
    "wrapper": "DeepSpeedEngine",
    "parameter_dtypes": ["bfloat16"],
}
FSDP2 = {
    "distributed_type": "FSDP",
    "wrapper": "FSDPModule",
    "layers_wrapped": True,
    "reshard_after_forward": True,
    "held_fraction": 0.25,
}
STAGES = {
    "distributed_type": "MULTI_GPU",
    "wrapper": "none",
    "model_split_by": "pipeline 4",
    "pipeline_stages": 4,
    "mesh": "pipeline 4 x data 1 x tensor 1",
}
BEFORE = {
    "single": {"distributed_type": "NO", "wrapper": "none"},
    "ddp": {"distributed_type": "MULTI_GPU", "wrapper": "DistributedDataParallel"},
    "zero1": DEEPSPEED | {"zero_stage": 1},
    "zero2": DEEPSPEED | {"zero_stage": 2},
    "zero2_offload": DEEPSPEED | {"zero_stage": 2, "offload_optimizer": "cpu"},
    "zero3": DEEPSPEED | {"zero_stage": 3, "held_fraction": 0.25},
    "zero3_offload": DEEPSPEED
    | {"zero_stage": 3, "held_fraction": 0.25}
    | {"offload_optimizer": "cpu", "offload_parameters": "cpu"},
    "zero3_nvme": DEEPSPEED
    | {"zero_stage": 3, "held_fraction": 0.25}
    | {"offload_optimizer": "nvme", "offload_parameters": "nvme"},
    "fsdp": FSDP2,
    "fsdp_grad_op": FSDP2 | {"reshard_after_forward": False},
    "fsdp_offload": FSDP2 | {"offload_optimizer": "cpu", "offload_parameters": "cpu"},
    "fsdp_hybrid": FSDP2 | {"replicas": 2, "held_fraction": 0.5},
    "tensor": FSDP2 | {"distributed_type": "MULTI_GPU", "model_split_by": "tensor 2"},
    "tensor_ddp": FSDP2
    | {"distributed_type": "MULTI_GPU", "model_split_by": "tensor 2"}
    | {"replicas": 2, "held_fraction": 0.5},
    "context": FSDP2 | {"model_split_by": "context 4"},
    "ulysses": DEEPSPEED | {"zero_stage": 3, "held_fraction": 0.25, "model_split_by": "sequence 4"},
    "pipeline": STAGES | {"pipeline_schedule": "1f1b"},
    "layer_split": STAGES | {"pipeline_schedule": "one_at_a_time"},
    "three_d": STAGES
    | {"pipeline_schedule": "1f1b", "pipeline_stages": 2, "held_fraction": 0.5}
    | {"model_split_by": "pipeline 2, tensor 2", "mesh": "pipeline 2 x data 1 x tensor 2"},
    "parameter_server": {"distributed_type": "MULTI_GPU", "wrapper": "none", "servers": [0]},
}
"""What four ranks (`single`: one) request beside, or other than, EVERY_STRATEGY."""

EVERY_OPTIMIZER = {
    "optimizer_class": ("AdamW",),
    "optimizer_dtypes": ["float32"],
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": 3,
    "sync_each_batch": True,
    "learning_rate": 5e-4,
    "weight_decay": 0.01,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
}
AFTER = {
    "single": {"optimizer_fraction": 1.0, "reduce_dtype": None},
    "ddp": {"optimizer_fraction": 1.0, "reduce_dtype": "float32"},
    "zero3_nvme": {"reduce_dtype": "bfloat16"},
    "fsdp_hybrid": {"optimizer_fraction": 0.5, "reduce_dtype": "bfloat16"},
    "tensor": {"optimizer_fraction": 0.25, "reduce_dtype": "float32"},
    "tensor_ddp": {"optimizer_fraction": 0.5, "reduce_dtype": "float32"},
    "ulysses": {"optimizer_fraction": 0.25, "reduce_dtype": "float32"},
    "pipeline": {"optimizer_fraction": 1.0, "reduce_dtype": None},
    "layer_split": {"optimizer_fraction": 1.0, "reduce_dtype": None},
    "three_d": {"optimizer_fraction": 0.5, "reduce_dtype": None},
    "parameter_server": {"optimizer_fractions": [1.0, 0.0, 0.0, 0.0], "reduce_dtype": "float32"},
}
SHARDED = {"optimizer_fraction": 0.25, "reduce_dtype": "bfloat16"}
"""What the strategies that AFTER does not name request beside EVERY_OPTIMIZER."""


def requested(name):
    return Requested(
        strategy=STRATEGIES[name],
        num_processes=1 if name == "single" else 4,
        precision="bf16",
        gradient_clipping=0.5,
        gradient_accumulation_steps=3,
        sync_each_batch=True,
        activation_checkpointing=True,
        optimizer_classes=("AdamW",),
        optimizer_settings={
            "learning_rate": 5e-4,
            "weight_decay": 0.01,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
        },
    )


def before(name):
    ranks = [0] if name == "single" else [0, 1, 2, 3]
    counted = {"num_processes": len(ranks), "ranks": ranks}
    return EVERY_STRATEGY | counted | BEFORE[name]


def after(name):
    facts = EVERY_OPTIMIZER | AFTER.get(name, SHARDED)
    if name in ("single", "ulysses", "parameter_server") or name.startswith("zero"):
        del facts["sync_each_batch"]  # not up to the training loop
    return facts


def engaged_as(facts):
    """Return the facts in the form in which a rank sees them."""
    seen = dict(facts)
    if "optimizer_class" in facts:
        seen["optimizer_class"] = facts["optimizer_class"][0]
    for name in ("learning_rate", "betas", "eps"):
        if name in facts:
            seen[name] = [facts[name]]
    if "weight_decay" in facts:
        seen["weight_decay"] = [0.0, facts["weight_decay"]]  # norms and biases do not decay
    return seen


CASES = [
    *((name, "before", fact) for name in BEFORE for fact in before(name)),
    *((name, "after", fact) for name in BEFORE for fact in after(name)),
]


def facts_of(name, moment):
    """Return what is requested, and what the tables above say that it has to be."""
    if moment == "before":
        return requested(name).before_first_step(), before(name)
    return requested(name).after_first_step(), after(name)


def test_the_tables_have_every_strategy():
    assert set(BEFORE) == set(STRATEGIES)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", BEFORE)
def test_a_strategy_requests_these_facts_and_no_other(name, moment):
    wanted, expected = facts_of(name, moment)
    assert wanted == expected
    assert compare(wanted, engaged_as(expected), rank=0) == []


OTHERWISE = {
    "distributed_type": "MULTI_CPU",
    "wrapper": "Module",
    "num_processes": 2,
    "ranks": [0, 0, 1, 1],
    "zero_stage": 9,
    "replicas": 3,
    "model_split_by": "tensor 8",
    "activation_checkpointing": False,
    "layers_wrapped": False,
    "offload_optimizer": "disk",
    "offload_parameters": "disk",
    "gradient_clipping": 1.0,
    "gradient_accumulation_steps": 1,
    "sync_each_batch": False,
    "pipeline_schedule": "gpipe",
    "pipeline_stages": 8,
    "mesh": "pipeline 1 x data 4 x tensor 1",
    "servers": [0, 1],
    "optimizer_fractions": [1.0, 0.0, 1.0, 0.0],
    "precision": "no",
    "parameter_dtypes": ["bfloat16", "float32"],
    "optimizer_class": "SGD",
    "optimizer_dtypes": ["bfloat16"],
    "reduce_dtype": "float16",
    "learning_rate": [5e-4, 1e-3],
    "weight_decay": [0.0, 0.011],
    "betas": [(0.9, 0.999)],
    "eps": [1e-6],
}


def otherwise(fact, wanted):
    if fact.endswith("_fraction"):
        return wanted + (0.06 if wanted < 1 else -0.06)  # a share is off by padding, never by this
    return not wanted if fact == "reshard_after_forward" else OTHERWISE[fact]


@pytest.mark.parametrize(("name", "moment", "fact"), CASES)
def test_a_fact_that_differs_is_refused_alone_and_by_name(name, moment, fact):
    wanted, expected = facts_of(name, moment)
    seen = engaged_as(expected) | {fact: otherwise(fact, expected[fact])}
    (mismatch,) = compare(wanted, seen, rank=3)
    assert str(mismatch).startswith(f"{fact}: asked {wanted[fact]}, engaged {seen[fact]} (rank 3)")


@pytest.mark.parametrize(("name", "moment", "fact"), CASES)
def test_a_fact_that_was_not_seen_is_refused_but_for_those_that_cannot_always_be(
    name, moment, fact
):
    wanted, expected = facts_of(name, moment)
    seen = engaged_as(expected)
    del seen[fact]
    mismatches = compare(wanted, seen, rank=0)
    unseen = {
        "layers_wrapped",
        "gradient_clipping",
        "gradient_accumulation_steps",
        "sync_each_batch",
        "optimizer_fraction",
        "optimizer_fractions",
        "optimizer_dtypes",
        "learning_rate",
        "weight_decay",
        "betas",
        "eps",
    }
    assert unseen == MAY_BE_UNKNOWN
    assert bool(mismatches) is (fact not in unseen)


@pytest.mark.parametrize("fraction", ["held_fraction", "optimizer_fraction"])
@pytest.mark.parametrize("gap", [-0.04, 0.04])
def test_padding_moves_a_share_by_less_than_a_twentieth(fraction, gap):
    moment = "before" if fraction == "held_fraction" else "after"
    wanted, expected = facts_of("zero3", moment)
    assert compare(wanted, engaged_as(expected) | {fraction: 0.25 + gap}, rank=0) == []


def test_weights_loaded_in_another_dtype_are_not_held_to_that_of_the_precision():
    loaded = Requested(
        strategy=STRATEGIES["ddp"], num_processes=2, precision="bf16", dtype="bfloat16"
    )
    assert "parameter_dtypes" not in loaded.before_first_step()
    assert not {"optimizer_dtypes", "reduce_dtype"} & loaded.after_first_step().keys()


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_gradients_are_held_to_fp32_only_where_nothing_is_cast(precision):
    wanted = Requested(strategy=STRATEGIES["ddp"], num_processes=2, precision=precision)
    facts = wanted.after_first_step()
    assert facts.get("gradient_dtypes") == (["float32"] if precision == "no" else None)


def test_gradients_that_are_summed_in_another_dtype_are_refused():
    wanted = Requested(
        strategy=STRATEGIES["zero2"], num_processes=2, precision="no", accumulation_dtype="bfloat16"
    ).after_first_step()
    assert "gradient_dtypes" not in wanted
    seen = {"reduce_dtype": "float32", "accumulation_dtype": ["float32"]}
    (mismatch,) = compare(wanted, seen, rank=0)
    assert mismatch.what == "accumulation_dtype"
    assert compare(wanted, seen | {"accumulation_dtype": ["bfloat16", "float32"]}, rank=0) == []


def test_a_record_keeps_the_older_name_of_the_share_that_a_rank_holds():
    facts = {"zero_stage": 3, "held_fraction": 0.5}
    assert as_recorded(facts) == facts | {"sharded_fraction": 0.5}
    assert as_recorded({}) == {}
