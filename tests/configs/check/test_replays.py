"""What a rule says is seen in the real library: it raises, ignores, falls back, takes a default."""

import pytest
import real_parsers
from config_sweep import findings_on
from places import ROOT

from toolkit.configs.check.documents import NOTHING, document_of
from toolkit.configs.check.flags import flags_document
from toolkit.configs.check.rules import findings_of
from toolkit.configs.check.setup import Setup, complete

FSDP2 = {
    "distributed_type": "FSDP",
    "num_processes": 2,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    },
}
ZERO = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "bf16": {"enabled": False}}


def rules_on(content, *, flags=(), json=False, environ=None):
    name = "mine.json" if json else "mine.yaml"
    import json as parser

    import yaml

    text = parser.dumps(content) if json else yaml.safe_dump(content)
    document = document_of(ROOT / name, text)
    kind = {"deepspeed": document} if json else {"accelerate": document}
    of_flags = flags_document(flags) if flags else NOTHING
    setup = Setup(**kind, flags=of_flags, environ=environ or {})
    complete(setup)
    return {finding.rule: finding for finding in findings_of(setup)}


def test_an_unknown_schedule_falls_back_in_deepspeed():
    import torch
    from deepspeed.runtime.lr_schedules import WarmupLR

    params = {"warmup_num_steps": 10, "warmup_type": "cosine"}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert WarmupLR(optimizer, **params).warmup_type == "log"
    found = rules_on(ZERO | {"scheduler": {"type": "WarmupLR", "params": params}}, json=True)
    assert "falls back to log" in found["unknown-value"].text


@pytest.mark.parametrize(
    ("section", "name", "module"),
    [("scheduler", "WarmupCosine", "lr_scheduler"), ("optimizer", "AdamX", None)],
)
def test_an_unknown_name_is_refused_by_deepspeed(section, name, module):
    import torch
    from deepspeed.runtime import lr_schedules

    names = torch.optim if module is None else torch.optim.lr_scheduler
    assert not hasattr(names, name)
    assert not hasattr(lr_schedules, name)
    found = rules_on(ZERO | {section: {"type": name, "params": {}}}, json=True)
    assert "refuse to make the engine" in found["unknown-value"].text


def test_a_default_that_moved_is_that_of_the_installed_release():
    from deepspeed import DeepSpeedConfig

    config = {key: value for key, value in ZERO.items() if key != "gradient_clipping"}
    read = DeepSpeedConfig(config | {"train_micro_batch_size_per_gpu": 1})
    found = rules_on(config, json=True)["moved-default"]
    assert read.gradient_clipping == 1.0
    assert "takes 1.0 (0.0 before 0.19.3, 1.0 from then on)" in found.text


def test_an_auto_that_nothing_fills_is_dropped():
    from deepspeed import DeepSpeedConfig

    zero = {"stage": 3, "stage3_max_live_parameters": "auto"}
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}
    assert DeepSpeedConfig(config).zero_config.max_live_parameters == 1_000_000_000
    assert "max_live_parameters: auto" in rules_on(config, json=True)["unfilled-auto"].text


def test_batch_sizes_that_do_not_multiply_are_refused_by_deepspeed():
    from deepspeed import DeepSpeedConfig

    sizes = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 1,
    }
    with pytest.raises(AssertionError, match="train_batch_size is not equal"):
        DeepSpeedConfig(sizes)
    content = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 2,
        "deepspeed_config": {"deepspeed_config_file": "named.json"},
    }
    found = {one.rule: one for one in findings_on(ROOT / "mine.yaml", content, ZERO | sizes)}
    assert "16, and 3 x 1 x 2 ranks is not" in found["batch-arithmetic"].text


def test_fsdp2_without_a_policy_wraps_nothing(tmp_path):
    content = FSDP2 | {"fsdp_config": {"fsdp_version": 2}}
    real = real_parsers.of_yaml(content, tmp_path / "a.yaml")["fsdp"]
    assert real["auto_wrap_policy"] == "None"
    assert "SHARDED_STATE_DICT" in real["state_dict_type"]
    found = rules_on(content)
    assert "no-wrap-policy" in found
    assert "(FSDP2's default)" in found["no-weights-saved"].text


def test_nvme_paths_of_a_yaml_never_reach_a_rank(tmp_path):
    section = {
        "zero_stage": 3,
        "offload_param_device": "nvme",
        "offload_param_nvme_path": "/fast",
        "zero3_save_16bit_model": True,
    }
    content = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": section}
    real = real_parsers.of_yaml(content, tmp_path / "a.yaml")
    assert "/fast" not in str(real)
    assert "never reaches a rank" in rules_on(content)["ignored-key"].text


def test_keys_of_fsdp1_are_left_aside_by_fsdp2(tmp_path):
    section = FSDP2["fsdp_config"] | {"fsdp_backward_prefetch": "BACKWARD_POST"}
    real = real_parsers.of_yaml(FSDP2 | {"fsdp_config": section}, tmp_path / "a.yaml")["fsdp"]
    assert real["backward_prefetch"] == "None"
    found = rules_on(FSDP2 | {"fsdp_config": section})["ignored-key"]
    assert found.severity == "warning"


def test_the_reshard_of_fsdp1_is_masked(tmp_path):
    section = FSDP2["fsdp_config"] | {
        "fsdp_version": 1,
        "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
    }
    real = real_parsers.of_yaml(FSDP2 | {"fsdp_config": section}, tmp_path / "a.yaml")["fsdp"]
    assert "FULL_SHARD" in real["sharding_strategy"]
    found = rules_on(FSDP2 | {"fsdp_config": section})["ignored-key"]
    assert (found.severity, found.edits[0].text) == ("error", "fsdp_sharding_strategy")


def test_what_the_json_owns_is_refused_beside_it(tmp_path):
    section = {"deepspeed_config_file": "named.json", "zero_stage": 2}
    content = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": section}
    with pytest.raises(real_parsers.Refused, match="will be ignored"):
        real_parsers.of_yaml(content, tmp_path / "a.yaml", ZERO)
    found = {one.rule: one for one in findings_on(ROOT / "mine.yaml", content, ZERO)}
    assert "(named.json has 2): Accelerate refuses that" in found["contradiction"].text
    assert found["contradiction"].edits


def test_flags_that_contradict_a_json_are_refused_by_the_trainer():
    from transformers import TrainingArguments

    config = ZERO | {"gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": "auto"}
    arguments = TrainingArguments(output_dir="x", deepspeed=config, use_cpu=True, max_grad_norm=1.0)
    assert any("steps=4" in line for line in arguments.hf_deepspeed_config.mismatches)
    found = rules_on(config, json=True, flags=["--max_grad_norm", "1.0"])["contradiction"]
    assert found.text.startswith("gradient_accumulation_steps is 4, and the flags say")


@pytest.mark.parametrize(
    "words", [["--learning_rate", "1e"], ["--max_steps", "many"], ["--bf16", "perhaps"]]
)
def test_a_flag_of_another_type_is_refused_by_the_parser(words):
    from transformers import HfArgumentParser, TrainingArguments

    with pytest.raises(SystemExit):
        HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    found = rules_on(ZERO, json=True, flags=words)["refused-value"]
    assert (found.severity, found.text.partition(" is")[0]) == ("error", " ".join(words))


def test_one_process_where_several_are_written(tmp_path):
    content = {"distributed_type": "MULTI_CPU", "num_processes": 4, "use_cpu": True}
    real = real_parsers.of_yaml(content, tmp_path / "a.yaml")["environ"]
    assert "WORLD_SIZE" not in real
    assert rules_on(content)["process-count"].severity == "error"


def test_a_variable_of_another_launch_counts_and_one_that_the_file_sets_does_not():
    left = {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "FSDP_IGNORED_MODULES": "lm_head"}
    found = rules_on(FSDP2, environ=left)
    assert found["unseen-setting"].text.startswith("FSDP_IGNORED_MODULES stands in this shell")
    found = rules_on(FSDP2, environ={"ACCELERATE_USE_DEEPSPEED": "true"})
    assert found["unseen-setting"].severity == "error"


def test_a_class_that_the_model_lacks(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    section = FSDP2["fsdp_config"] | {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayr"}
    flags = ["--model_name_or_path", str(tmp_path)]
    found = rules_on(FSDP2 | {"fsdp_config": section}, flags=flags)["no-wrap-policy"]
    assert "Did you mean LlamaDecoderLayer?" in found.fix
