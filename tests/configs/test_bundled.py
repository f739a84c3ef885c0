"""The checked-in files: what the generator writes, and what the libraries take without a word."""

import json
import subprocess
import sys

import pytest
import yaml

from toolkit.backends.deepspeed_json import AUTO
from toolkit.configs.files import write_bundled
from toolkit.strategies import STRATEGIES

DEEPSPEED = [name for name, strategy in STRATEGIES.items() if strategy.backend == "deepspeed"]
ON_FSDP = [name for name, strategy in STRATEGIES.items() if strategy.backend == "fsdp"]
FOLDERS = ("accelerate_configs", "deepspeed_configs")

# `commands/launch.py:deepspeed_launcher` and `DeepSpeedPlugin` refuse these beside a JSON.
JSON_OWNED = {
    "mixed_precision",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
}


@pytest.fixture
def yaml_of(root):
    return lambda name: yaml.safe_load((root / "accelerate_configs" / f"{name}.yaml").read_text())


@pytest.fixture
def json_of(root):
    return lambda name: json.loads((root / "deepspeed_configs" / f"{name}.json").read_text())


def files_below(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for name in FOLDERS
        for path in (folder / name).iterdir()
    }


def test_the_checked_in_files_are_what_the_generator_writes(root, tmp_path):
    written = write_bundled(tmp_path)
    assert len(written) == len(STRATEGIES) + len(DEEPSPEED)
    assert files_below(root) == files_below(tmp_path), "run `python -m toolkit.configs`"


def test_one_command_makes_them_anew(root, tmp_path):
    command = [sys.executable, "-m", "toolkit.configs", str(tmp_path)]
    subprocess.run(command, check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)
    assert files_below(root) == files_below(tmp_path)


@pytest.mark.parametrize("name", STRATEGIES)
def test_accelerate_loads_every_file_and_understands_it(root, name):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(root / "accelerate_configs" / f"{name}.yaml"))
    kind = {"single": "NO", "deepspeed": "DEEPSPEED", "fsdp": "FSDP"}
    assert config.distributed_type == kind.get(STRATEGIES[name].backend, "MULTI_GPU")
    assert config.num_processes == STRATEGIES[name].num_processes
    assert config.num_machines == 1
    assert config.mixed_precision is None


@pytest.mark.parametrize("name", ON_FSDP)
def test_no_fsdp_key_is_one_that_the_launcher_ignores(yaml_of, name):
    from accelerate.commands.launch import launch_command_parser

    known = vars(launch_command_parser().parse_args(["script.py"]))
    config = yaml_of(name)
    keys = config["fsdp_config"].keys() | config.get("parallelism_config", {}).keys()
    assert keys <= known.keys()


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_precision_and_the_layer_are_left_to_the_run(yaml_of, name):
    config = yaml_of(name)
    assert "mixed_precision" not in config
    assert "downcast_bf16" not in config
    assert "fsdp_transformer_layer_cls_to_wrap" not in config.get("fsdp_config", {})


@pytest.mark.parametrize("name", STRATEGIES)
def test_only_single_is_pinned_to_a_gpu_and_only_it_needs_no_port(yaml_of, name):
    config = yaml_of(name)
    assert config.get("gpu_ids") == ("0" if name == "single" else None)
    assert config.get("main_process_port") == (None if name == "single" else 0)


@pytest.mark.parametrize("name", DEEPSPEED)
def test_a_yaml_never_repeats_what_its_json_owns(yaml_of, name):
    config = yaml_of(name)
    assert not JSON_OWNED & (config.keys() | config["deepspeed_config"].keys())
    assert config["deepspeed_config"]["deepspeed_config_file"] == f"deepspeed_configs/{name}.json"
    assert config["deepspeed_config"]["zero3_init_flag"] is (STRATEGIES[name].zero_stage == 3)


@pytest.mark.parametrize("name", DEEPSPEED)
def test_auto_stands_for_what_belongs_to_the_run_and_for_nothing_else(json_of, name):
    config = json_of(name)
    assert {path for path, value in leaves(config) if value == AUTO} == {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "bf16.enabled",
        "fp16.enabled",
    }


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_takes_every_file_and_reads_every_key(json_of, name, precision, monkeypatch):
    from deepspeed.runtime.config import DeepSpeedConfig

    if precision == "fp16":
        # DeepSpeed asks the CPU whether it can compute in fp16, and it says no.
        monkeypatch.setattr(
            "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported",
            lambda self: True,
        )
    config = Read(resolved(json_of(name), precision=precision))
    parsed = DeepSpeedConfig(config)

    assert config.keys() <= config.seen, "DeepSpeed ignores a key it does not know"
    strategy = STRATEGIES[name]
    assert parsed.zero_optimization_stage == strategy.zero_stage
    assert parsed.train_batch_size == 8
    assert parsed.gradient_clipping == 0.7
    assert parsed.bfloat16_config.enabled is (precision == "bf16")
    assert parsed.float16_config.enabled is (precision == "fp16")
    zero = parsed.zero_config
    places = (zero.offload_optimizer, zero.offload_param)
    devices = ["none" if place is None else str(place.device) for place in places]
    assert devices == [strategy.offload_optimizer, strategy.offload_parameters]
    assert zero.param_persistence_threshold == (10_000 if strategy.zero_stage == 3 else 100_000)
    assert zero.overlap_comm is (strategy.zero_stage == 3)


@pytest.mark.parametrize("name", DEEPSPEED)
def test_no_key_below_zero_optimization_is_unknown_or_deprecated(json_of, name, caplog):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = json_of(name)["zero_optimization"]
    fields = DeepSpeedZeroConfig.model_fields
    known = fields.keys() | {field.alias for field in fields.values() if field.alias}
    assert zero.keys() <= known
    DeepSpeedZeroConfig(**zero)
    assert "deprecated" not in caplog.text
    with pytest.raises(ValueError, match="no_such_key"):
        DeepSpeedZeroConfig(**zero, no_such_key=1)


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_file_names_a_place_on_the_machine_that_made_it(root, name):
    text = (root / "accelerate_configs" / f"{name}.yaml").read_text()
    assert str(root) not in text
    if name in DEEPSPEED:
        text = (root / "deepspeed_configs" / f"{name}.json").read_text()
        assert str(root) not in text


def resolved(config, *, precision):
    """Fill `auto` as `Accelerator.prepare` does; it raises where one is left."""
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config=config, gradient_accumulation_steps=2)
    plugin.set_mixed_precision(precision)
    plugin.deepspeed_config_process(
        **{
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "train_batch_size": 8,
            "gradient_clipping": 0.7,
        }
    )
    assert AUTO not in [value for _, value in leaves(plugin.deepspeed_config)]
    return plugin.deepspeed_config


def leaves(config, prefix=""):
    for key, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class Read(dict):
    """A dict that remembers which of its keys were asked for."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = set()

    def __copy__(self):
        return self

    def __getitem__(self, key):
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.seen.add(key)
        return super().get(key, default)
