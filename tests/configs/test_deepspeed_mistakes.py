"""A DeepSpeed JSON with mistakes in it, as far as they are found without DeepSpeed."""

import base64
import json
import math

import pytest

from toolkit.configs.check.deepspeed_file import IN_SECTIONS, TOP_LEVEL, all_mistakes
from toolkit.configs.requested import (
    DEEPSPEED_FILE,
    deepspeed_strategy,
    read_deepspeed_config,
    requested_strategy,
)
from toolkit.errors import UsageError
from toolkit.strategies import STRATEGIES

READ_ELSEWHERE = {"data_parallel_size", "sequence_parallel_size"}
"""What `deepspeed.initialize` looks up before it makes a `DeepSpeedConfig`."""

OF_THE_DOCS = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "gradient_clipping": 1.0,
    "communication_data_type": None,
    "prescale_gradients": False,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": "auto"},
    },
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 4},
        "offload_param": {"device": "cpu", "pin_memory": True, "max_in_cpu": 1e9},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "sub_group_size": 1e9,
    },
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False},
    "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "top_modules": 1},
    "tensorboard": {"enabled": False, "output_path": "runs", "job_name": "train"},
    "wandb": {"enabled": False, "group": "my_group"},
    "csv_monitor": {"enabled": False, "output_path": "runs"},
    "comms_logger": {"enabled": False, "verbose": False, "prof_all": True, "debug": False},
    "data_types": {"grad_accum_dtype": "fp32"},
    "checkpoint": {"tag_validation": "Warn", "load_universal": False},
}
"""Keys that DeepSpeed's and transformers' own examples use."""


class Asked(dict):
    """A dict that remembers which keys were looked up, in the dicts within it as well."""

    def __init__(self, content, seen, section=None):
        super().__init__(content)
        self.seen, self.section = seen, section

    def _note(self, key):
        self.seen.setdefault(self.section, set()).add(key)

    def get(self, key, default=None):
        self._note(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self._note(key)
        return super().__contains__(key)

    def keys(self):
        return self

    def __copy__(self):
        return self


def test_the_table_of_keys_is_what_deepspeed_looks_up():
    from deepspeed import DeepSpeedConfig

    seen = {}
    named = {"optimizer": {"type": "x", "params": {}}, "scheduler": {"type": "x", "params": {}}}
    sections = {key: Asked(named.get(key, {}), seen, key) for key in IN_SECTIONS}
    DeepSpeedConfig(Asked({"train_batch_size": 1} | sections, seen))
    assert set(TOP_LEVEL) == seen.pop(None) | READ_ELSEWHERE
    assert {key: set(names) for key, names in IN_SECTIONS.items()} == seen


def test_a_section_that_deepspeed_reads_for_other_models_alone_is_refused_where_it_asks_for_more():
    defaults = {"partition_activations": False, "number_checkpoints": None}
    assert all_mistakes({"activation_checkpointing": defaults}) == []
    asked = {"activation_checkpointing": defaults | {"cpu_checkpointing": True}}
    (mistake,) = all_mistakes(asked)
    assert "has no effect" in mistake.text
    assert "models that call deepspeed.checkpointing" in mistake.text
    assert "--gradient_checkpointing" in mistake.text


def test_steps_per_print_may_be_auto_since_accelerate_writes_over_it():
    from accelerate.utils import DeepSpeedPlugin

    config = {"zero_optimization": {"stage": 3}, "steps_per_print": "auto"}
    assert all_mistakes(config) == []
    assert DeepSpeedPlugin(hf_ds_config=config).deepspeed_config["steps_per_print"] == math.inf


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name.startswith("zero")])
def test_no_bundled_file_has_a_mistake(name, root):
    file = root / "deepspeed_configs" / f"{name}.json"
    assert read_deepspeed_config({DEEPSPEED_FILE: str(file)}) == json.loads(file.read_text())


def test_the_examples_of_the_docs_have_no_mistake():
    assert all_mistakes(OF_THE_DOCS) == []


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"gradient_cliping": 1},
            "gradient_cliping is no key .* (did you mean gradient_clipping?)",
        ),
        ({"zzz": 1}, "zzz is no key of DeepSpeed's."),
        ({"zero_optimization": 2}, "zero_optimization has to be an object, and is 2"),
        ({"bf16": None}, "bf16 has to be an object, and is None"),
        ({"train_batch_size": "16"}, "train_batch_size has to be a whole number"),
        ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu has to be"),
        ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps has to be"),
        ({"gradient_clipping": -1}, "gradient_clipping has to be a number of 0 or more"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping has to be a number"),
        ({"steps_per_print": "many"}, "steps_per_print has to be a whole number of 1"),
        ({"wall_clock_breakdown": "false"}, "wall_clock_breakdown has to be true or false"),
        ({"communication_data_type": "auto"}, "communication_data_type has to be a word other"),
        ({"optimizer": {"type": "Adam", "param": {}}}, "optimizer.param .* (did you mean params?)"),
        (
            {"activation_checkpointing": {"partitioned_activations": True}},
            "partitioned_activations .* (did you mean partition_activations?)",
        ),
    ],
)
def test_a_mistake_is_a_sentence_with_the_file_and_the_key(config, says, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(config))
    with pytest.raises(UsageError, match=says.replace("(", r"\(").replace("?)", r"\?\)")) as caught:
        read_deepspeed_config({DEEPSPEED_FILE: str(file)})
    assert str(caught.value).startswith(f"{file}: ")


def test_all_mistakes_are_named_at_once(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text('{"bf16": {"enabled": true}, "bf16": 1, "a": {"b": 1, "b": 2}, "dump_stat": 1}')
    with pytest.raises(UsageError) as caught:
        read_deepspeed_config({DEEPSPEED_FILE: str(file)})
    said = str(caught.value)
    for part in ("bf16 stands there more than once", "b stands there more than once"):
        assert part in said
    for part in ("bf16 has to be an object", "a is no key", "did you mean dump_state?"):
        assert part in said


def test_the_mistakes_of_a_base64_config_are_named_without_it():
    encoded = base64.urlsafe_b64encode(json.dumps({"gradient_cliping": 1}).encode()).decode()
    with pytest.raises(UsageError, match="^The DeepSpeed config: gradient_cliping is no key"):
        read_deepspeed_config({DEEPSPEED_FILE: encoded})


@pytest.mark.parametrize(
    "zero", [{"stage": "three"}, {"stage": None}, {"stage": 3, "offload_param": "cpu"}]
)
def test_a_strategy_that_cannot_be_read_is_a_sentence(zero, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"zero_optimization": zero}))
    asked = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file",
        DEEPSPEED_FILE: str(file),
    }
    with pytest.raises(UsageError, match=r"mine.json: zero_optimization.(stage|offload_param) is "):
        requested_strategy(asked)
    with pytest.raises(UsageError, match="needs a stage from 0 to 3, and an object for"):
        deepspeed_strategy({"zero_optimization": zero})


def test_a_file_of_bytes_is_no_json(tmp_path):
    (tmp_path / "ds.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"ds\.json is not JSON"):
        read_deepspeed_config({DEEPSPEED_FILE: str(tmp_path / "ds.json")})
