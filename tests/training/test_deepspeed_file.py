"""A DeepSpeed JSON held against DeepSpeed's own classes, as a rank does it."""

import json
import os
import stat

import pytest
from places import ROOT

from toolkit.configs.check.deepspeed_file import mistakes_of_deepspeed
from toolkit.configs.requested import DEEPSPEED_FILE
from toolkit.engines.deepspeed_config import (
    checked_deepspeed_config,
    use_deepspeed_config,
)
from toolkit.errors import UsageError
from toolkit.strategies import STRATEGIES
from toolkit.training.job import _same


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Return the sentence on a config with mistakes."""

    def check(config):
        file = tmp_path / "mine.json"
        file.write_text(json.dumps(config))
        monkeypatch.setenv(DEEPSPEED_FILE, str(file))
        with pytest.raises(UsageError) as caught:
            checked_deepspeed_config()
        return str(caught.value).removeprefix(f"{file}: ")

    return check


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name.startswith("zero")])
def test_deepspeed_refuses_nothing_in_a_bundled_file(name):
    file = ROOT / "deepspeed_configs" / f"{name}.json"
    assert mistakes_of_deepspeed(json.loads(file.read_text())) == []


def test_every_mistake_of_a_file_is_named_in_one_error(checked):
    said = checked(
        {
            "gradient_cliping": 1.0,
            "zero_optimization": {
                "stage": "three",
                "reduce_bucket_size": -5,
                "overlap_com": True,
                "stage3_prefetch_buket_size": 1,
                "offload_optimizer": {"device": "gpu", "pin_memry": True},
                "offload_param": "cpu",
            },
            "bf16": {"enabled": "maybe", "grad": 1},
            "fp16": {"enabled": True, "loss_scale_window": 0},
            "wandb": {"project_": "mine"},
            "nebula": {"enabled": True},
            "optimizer": {"type": 3},
            "communication_data_type": "fp23",
        }
    ).split("; ")
    expected = (
        "gradient_cliping is no key of DeepSpeed's (did you mean gradient_clipping?)",
        "zero_optimization.stage is 'three': Input should be 0, 1, 2, 3",
        "zero_optimization.reduce_bucket_size is -5: Input should be greater than 0",
        "zero_optimization.overlap_com is no key of DeepSpeed's (did you mean overlap_comm?)",
        "zero_optimization.stage3_prefetch_buket_size is no key of DeepSpeed's "
        "(did you mean stage3_prefetch_bucket_size?)",
        "zero_optimization.offload_optimizer.device is 'gpu': Input should be 'none', 'cpu'",
        "zero_optimization.offload_optimizer.pin_memry is no key of DeepSpeed's "
        "(did you mean pin_memory?)",
        "zero_optimization.offload_param is 'cpu': Input should be a valid dictionary",
        "bf16.enabled is 'maybe': Input should be a valid boolean",
        "bf16.grad is no key of DeepSpeed's",
        "fp16: fp16.loss_scale_window must be > 0",
        "wandb.project_ is no key of DeepSpeed's (did you mean project?)",
        "nebula: Nebula checkpointing has been removed",
        "optimizer: DeepSpeed cannot read it ('int' object has no attribute 'lower')",
        "communication_data_type: Invalid communication_data_type",
    )
    for sentence in expected:
        assert len([part for part in said if part.startswith(sentence)]) == 1, (sentence, said)
    assert len(said) == len(expected)


def test_sections_that_contradict_each_other_are_named(checked):
    both = {"bf16": {"enabled": True}, "fp16": {"enabled": True}}
    assert checked(both).startswith("bfloat16 and fp16 modes cannot be simultaneously enabled")


def test_what_the_run_fills_in_is_no_mistake():
    numbers = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 4}
    filled = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    assert mistakes_of_deepspeed(numbers | filled | {"bf16": {"enabled": "auto"}}) == []


@pytest.mark.parametrize(
    ("of_config", "of_flag", "same"),
    [(2, 2, True), (1, 1.0, True), ("0.5", 0.5, True), (True, True, True), (False, True, False)]
    + [(4, 2, False), ("one", 1.0, False), ([2], 2, False)],
)
def test_a_value_of_a_file_is_that_of_a_flag_whatever_its_type(of_config, of_flag, same):
    assert _same(of_config, of_flag) is same


def test_deepspeed_warns_of_nothing_while_it_is_asked(caplog, monkeypatch):
    from deepspeed.utils import logger

    monkeypatch.setattr(logger, "propagate", True)
    old = {"zero_optimization": {"stage": 2, "cpu_offload": True}, "vocabulary_size": 7}
    assert mistakes_of_deepspeed(old) == []
    assert caplog.messages == []
    assert not logger.disabled


@pytest.mark.parametrize("kind", ["link", "file", "another user's"])
def test_a_rank_swaps_to_no_folder_that_another_user_may_have_made(tmp_path, monkeypatch, kind):
    swap = tmp_path / "toolkit_nvme"
    for module in ("toolkit.backends.deepspeed_json", "toolkit.engines.deepspeed_config"):
        monkeypatch.setattr(f"{module}.NVME_PATH", swap)
    monkeypatch.setenv(DEEPSPEED_FILE, "")  # written by the call, and put back after it
    offload = {"device": "nvme", "nvme_path": str(swap)}
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": offload}}
    use_deepspeed_config(config, rehearsal=True)
    assert stat.S_IMODE(swap.stat().st_mode) == 0o700
    use_deepspeed_config(config, rehearsal=True)  # of another rank

    if kind == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: swap.stat().st_uid + 1)
    else:
        swap.rmdir()
        swap.touch() if kind == "file" else swap.symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(UsageError, match=f"{swap} is another user's, or no folder"):
        use_deepspeed_config(config, rehearsal=True)
