"""What a run's recorder holds the engaged optimizer against."""

from types import SimpleNamespace

import pytest

from toolkit.training.run import optimizer_settings


def arguments(deepspeed_config):
    plugin = None
    if deepspeed_config is not None:
        plugin = SimpleNamespace(deepspeed_config=deepspeed_config)
    return SimpleNamespace(
        weight_decay=0.1,
        learning_rate=1e-3,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        optim=SimpleNamespace(value="adamw_torch"),
        deepspeed_plugin=plugin,
    )


@pytest.mark.parametrize("config", [None, {}, {"zero_optimization": {"stage": 2}}])
def test_the_groups_are_to_hold_the_learning_rate_of_the_flags(config):
    assert optimizer_settings(arguments(config)) == {
        "weight_decay": 0.1,
        "learning_rate": 1e-3,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
    }


def test_a_scheduler_of_the_deepspeed_file_owns_the_learning_rate():
    settings = optimizer_settings(arguments({"scheduler": {"type": "WarmupLR"}}))
    assert settings == {"weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
