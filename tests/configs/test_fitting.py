"""What a run changes in a DeepSpeed config, and that it says so."""

import copy

import pytest

from toolkit.backends.deepspeed_json import deepspeed_config, fit_to_run
from toolkit.configs import ConfigOptions
from toolkit.strategies import STRATEGIES

PARAMETERS, HIDDEN = 2_000_000, 128


def config_of(name, **options):
    return deepspeed_config(STRATEGIES[name], ConfigOptions(**options))


def zero_of(fitted):
    return fitted.config["zero_optimization"]


def test_nothing_known_changes_nothing():
    config = config_of("zero3_offload")
    fitted = fit_to_run(config)
    assert fitted.config == config
    assert fitted.changes == []


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero3_offload", "zero3_nvme"])
def test_the_config_that_was_read_stays_as_it_is(name):
    config = config_of(name)
    before = copy.deepcopy(config)
    fit_to_run(
        config,
        parameters=PARAMETERS,
        hidden_size=HIDDEN,
        gradient_clipping=0.0,
        rehearsal=True,
        can_build=False,
    )
    assert config == before


def test_buckets_are_a_part_of_a_small_model():
    zero2 = fit_to_run(config_of("zero2"), parameters=PARAMETERS)
    assert zero_of(zero2)["reduce_bucket_size"] == PARAMETERS // 16
    assert zero_of(zero2)["allgather_bucket_size"] == PARAMETERS // 16
    assert len(zero2.changes) == 2

    large = fit_to_run(config_of("zero2"), parameters=10**10)
    assert zero_of(large)["reduce_bucket_size"] == 50_000_000
    assert large.changes == []


@pytest.mark.parametrize(
    ("parameters", "live"), [(PARAMETERS, PARAMETERS // 16), (5 * 10**7, 10**9)]
)
def test_zero3_keeps_a_part_of_a_small_model_gathered_and_of_others_what_its_file_says(
    parameters, live
):
    zero = zero_of(fit_to_run(config_of("zero3"), parameters=parameters))
    assert zero["stage3_max_live_parameters"] == zero["stage3_max_reuse_distance"] == live


def test_zero3_of_a_small_model_shards_everything_but_its_smallest_tensors():
    fitted = fit_to_run(config_of("zero3"), parameters=PARAMETERS, hidden_size=HIDDEN)
    threshold = zero_of(fitted)["stage3_param_persistence_threshold"]
    assert HIDDEN < threshold < HIDDEN * HIDDEN
    assert zero_of(fitted)["stage3_prefetch_bucket_size"] == HIDDEN * HIDDEN * 9 // 10

    large = fit_to_run(config_of("zero3"), hidden_size=8192)
    assert zero_of(large)["stage3_param_persistence_threshold"] == 10_000


def test_a_size_that_the_user_made_smaller_is_kept():
    config = config_of("zero3")
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    config["zero_optimization"]["reduce_bucket_size"] = "auto"
    fitted = fit_to_run(config, parameters=PARAMETERS, hidden_size=HIDDEN)
    assert zero_of(fitted)["stage3_param_persistence_threshold"] == 0
    assert zero_of(fitted)["reduce_bucket_size"] == "auto"


@pytest.mark.parametrize("clipping", [0.0, 0.7])
def test_the_runs_clipping_is_written_where_the_file_says_auto(clipping):
    fitted = fit_to_run(config_of("zero2"), gradient_clipping=clipping)
    assert fitted.config["gradient_clipping"] == clipping
    assert "gradient_clipping" in fitted.changes[0]


def test_a_clipping_in_the_file_is_left_to_be_checked():
    config = config_of("zero2", gradient_clipping=0.5)
    fitted = fit_to_run(config, gradient_clipping=1.0)
    assert fitted.config["gradient_clipping"] == 0.5
    assert fitted.changes == []


def test_a_rehearsal_pins_no_memory():
    fitted = fit_to_run(config_of("zero3_offload"), rehearsal=True)
    assert zero_of(fitted)["offload_optimizer"]["pin_memory"] is False
    assert zero_of(fitted)["offload_param"]["pin_memory"] is False
    assert len(fitted.changes) == 2
    assert fit_to_run(config_of("zero3"), rehearsal=True).changes == []


def test_pinning_that_is_only_a_default_is_turned_off_too():
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    fitted = fit_to_run(config, rehearsal=True)
    assert zero_of(fitted)["offload_optimizer"]["pin_memory"] is False


def test_without_a_compiler_torch_steps_on_the_cpu_and_it_is_said():
    fitted = fit_to_run(config_of("zero2_offload"), can_build=False)
    assert fitted.config["zero_force_ds_cpu_optimizer"] is False
    assert "torch's AdamW" in fitted.changes[0]
    assert fit_to_run(config_of("zero2"), can_build=False).changes == []


@pytest.mark.parametrize("offload", [None, {"device": "none"}])
def test_an_offload_to_nowhere_is_none(offload):
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": offload}}
    fitted = fit_to_run(config, can_build=False)
    assert "zero_force_ds_cpu_optimizer" not in fitted.config


def test_a_config_without_zero_is_no_error():
    fitted = fit_to_run({"train_batch_size": 8}, parameters=PARAMETERS, rehearsal=True)
    assert fitted.config == {"train_batch_size": 8}
