"""`toolkit explain`, `translate` and `schema`, held against the real libraries."""

import json

import pytest
import real_parsers
import yaml
from config_sweep import read
from places import ROOT
from real_parsers import every_file
from typer.testing import CliRunner

from toolkit.cli import app
from toolkit.configs.check.documents import NOTHING
from toolkit.configs.check.explain import effective
from toolkit.configs.check.flags import flags_document
from toolkit.configs.check.setup import read_setups
from toolkit.configs.check.translate import translate
from toolkit.errors import UsageError


def explained(file, *flags):
    (setup,) = read_setups([file], flags_document(flags) if flags else NOTHING, {})
    return {one.name: one for one in effective(setup)}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", ["zero1", "zero3_nvme"])
def test_the_values_are_those_of_the_real_deepspeed(name):
    from deepspeed import DeepSpeedConfig

    from toolkit.configs.check.deepspeed_file import without_auto

    file = ROOT / "deepspeed_configs" / f"{name}.json"
    real = DeepSpeedConfig(
        without_auto(json.loads(file.read_text())) | {"train_micro_batch_size_per_gpu": 1}
    )
    settings = explained(file)
    for section, model in (
        ("zero_optimization", real.zero_config),
        ("fp16", real.float16_config),
        ("bf16", real.bfloat16_config),
    ):
        for field, value in model.model_dump(by_alias=True, exclude_none=True).items():
            one = settings.get(f"{section}.{field}")
            if one is not None and one.value != "auto":
                assert one.value == value, one
    bucket = settings["zero_optimization.reduce_bucket_size"]
    assert bucket.source.startswith(f"{name}.json:")
    assert settings["zero_optimization.legacy_stage1"].source == "default of DeepSpeed 0.19.8"


@pytest.mark.parametrize("name", ["fsdp", "fsdp_grad_op", "fsdp_offload"])
def test_the_values_are_those_of_the_real_plugin(name, tmp_path):
    file = ROOT / "accelerate_configs" / f"{name}.yaml"
    real = real_parsers.of_yaml(yaml.safe_load(file.read_text()), tmp_path / "a.yaml")["fsdp"]
    settings = explained(file)
    for field in ("reshard_after_forward", "activation_checkpointing", "fsdp_version"):
        assert repr(settings[f"fsdp_{field.removeprefix('fsdp_')}"].value) == real[field]
    assert settings["fsdp_state_dict_type"].value in real["state_dict_type"]
    assert settings["fsdp_activation_checkpointing_offload"].source.startswith("default of Acc")


def test_auto_is_what_the_trainer_fills_in():
    file = ROOT / "accelerate_configs" / "zero2.yaml"
    words = ["--bf16", "True", "--per_device_train_batch_size", "4", "--max_grad_norm", "0.5"]
    settings = explained(file, *words)
    assert settings["train_batch_size"].value == 8
    assert settings["gradient_clipping"].value == 0.5
    assert settings["bf16.enabled"].value is True
    assert "auto in zero2.json" in settings["bf16.enabled"].source
    assert explained(file)["gradient_clipping"].value == "auto"


def of_fsdp1(**keys):
    section = {
        "fsdp_version": 1,
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_POST",
        "fsdp_offload_params": False,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_sync_module_states": True,
        "fsdp_use_orig_params": False,
    }
    common = {"distributed_type": "FSDP", "num_machines": 1, "num_processes": 2}
    return common | {"fsdp_config": section} | keys


@pytest.mark.parametrize(
    ("strategy", "bundled"), [("FULL_SHARD", "fsdp"), ("SHARD_GRAD_OP", "fsdp_grad_op")]
)
def test_a_translated_file_makes_the_plugin_of_the_bundled_one(strategy, bundled, tmp_path):
    mine = of_fsdp1(debug=False)
    mine["fsdp_config"]["fsdp_sharding_strategy"] = strategy
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine, sort_keys=False))
    made = translate(tmp_path / "mine.yaml")
    assert [note.partition(" has no")[0] for note in made.notes] == [
        "fsdp_backward_prefetch: BACKWARD_POST",
        "fsdp_use_orig_params: False",
    ]
    assert "\n\n" not in made.text
    ours = real_parsers.of_yaml(yaml.safe_load(made.text), tmp_path / "a.yaml")
    content, _ = read(ROOT / "accelerate_configs" / f"{bundled}.yaml")
    assert ours["fsdp"] == real_parsers.of_yaml(content, tmp_path / "b.yaml")["fsdp"]


def test_hybrid_sharding_stays_hybrid(tmp_path):
    mine = of_fsdp1(num_machines=2, num_processes=4)
    mine |= {"main_process_ip": "10.0.0.1", "main_process_port": 29500}
    mine["fsdp_config"]["fsdp_sharding_strategy"] = "HYBRID_SHARD"
    text = yaml.safe_dump(mine, sort_keys=False).replace("HYBRID_SHARD", "HYBRID_SHARD  # ours")
    (tmp_path / "mine.yaml").write_text(text)
    made = translate(tmp_path / "mine.yaml")
    assert "  fsdp_reshard_after_forward: true  # ours\n" in made.text
    ours = real_parsers.of_yaml(yaml.safe_load(made.text), tmp_path / "a.yaml")
    assert ours["mesh"] == {"dp_replicate": 2, "dp_shard": 2, "tp": 1, "cp": 1, "sp": 1}


def test_what_is_no_fsdp1_is_not_translated(tmp_path):
    with pytest.raises(UsageError, match="is for FSDP2 already"):
        translate(ROOT / "accelerate_configs" / "fsdp.yaml")
    with pytest.raises(UsageError, match="is no Accelerate YAML for FSDP"):
        translate(ROOT / "accelerate_configs" / "ddp.yaml")
    mine = of_fsdp1()
    mine["fsdp_config"]["fsdp_sharding_strategy"] = "NO_SHARD"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    with pytest.raises(UsageError, match="it is DDP"):
        translate(tmp_path / "mine.yaml")


@pytest.mark.parametrize("kind", ["accelerate", "deepspeed"])
def test_a_schema_knows_every_key_of_the_bundled_files(kind):
    schema = json.loads(CliRunner().invoke(app, ["schema", kind]).output)
    for file in every_file():
        if (file.suffix == ".json") != (kind == "deepspeed"):
            continue
        content, _ = read(file)
        assert content.keys() <= schema["properties"].keys()
        for section, values in content.items():
            known = schema["properties"][section].get("properties")
            if isinstance(values, dict) and known:
                assert values.keys() <= known.keys(), section
    assert schema["additionalProperties"] is False


def test_the_table_of_rules_in_the_docs_is_current(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    from reference import rules_table

    assert rules_table() in (ROOT / "docs" / "check.md").read_text()


def test_the_hook_and_the_action_of_the_docs_are_read_by_their_parsers():
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert {"id", "name", "entry", "language", "files"} <= hook.keys()
    text = (ROOT / "docs" / "check.md").read_text()
    uses, action = (yaml.safe_load(one.partition("```")[0]) for one in text.split("```yaml\n")[1:])
    assert uses["repos"][0]["hooks"] == [{"id": hook["id"]}]
    assert action["jobs"]["check"]["steps"][-1]["run"].endswith("toolkit check configs/*.yaml")
