"""From the launcher's environment back to the strategy, for our files and for others'."""

import base64
import json
from types import SimpleNamespace

import pytest
import yaml
from accelerate import ParallelismConfig

from toolkit.backends import backend_of
from toolkit.configs import ConfigOptions
from toolkit.configs.check.translate import translate
from toolkit.configs.files import write_configs
from toolkit.configs.requested import (
    CUSTOM,
    DEEPSPEED_FILE,
    agreed_strategy,
    deepspeed_strategy,
    read_deepspeed_config,
    requested_processes,
    requested_replicas,
    requested_strategy,
    same_features,
)
from toolkit.errors import UsageError
from toolkit.measuring.script_attestation import watch
from toolkit.strategies import STRATEGIES, Strategy
from toolkit.training.trainer import _strategy_of

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "WORLD_SIZE": "2",
}
DEEPSPEED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file",
    "WORLD_SIZE": "2",
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_bundled_file_is_recognised(name, root, launched, monkeypatch):
    monkeypatch.chdir(root)
    environment = launched("--config_file", f"accelerate_configs/{name}.yaml")
    assert requested_strategy(environment, STRATEGIES[name]) is STRATEGIES[name]
    assert requested_processes(environment) == STRATEGIES[name].num_processes


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "single"])
def test_other_numbers_leave_the_strategy_what_it_is(name, tmp_path, launched):
    options = ConfigOptions(num_processes=8, precision="bf16")
    files = write_configs(STRATEGIES[name], tmp_path, options=options)
    environment = launched("--config_file", str(files.accelerate))
    assert requested_strategy(environment, STRATEGIES[name]) == STRATEGIES[name].on_ranks(8)
    assert requested_processes(environment) == 8


@pytest.mark.parametrize("name", ["context", "ulysses"])
def test_a_script_of_ones_own_is_refused_where_it_would_have_to_split_rows(
    name, root, launched, monkeypatch
):
    for variable, value in launched("--config_file", f"accelerate_configs/{name}.yaml").items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=f"{name} splits rows"), watch(rehearsal=True):
        pytest.fail("the script began")
    plain = dict.fromkeys(("deepspeed", "deepspeed_plugin", "fsdp_plugin_args"))
    with pytest.raises(UsageError, match=f"{name} does not train under a Trainer"):
        _strategy_of(SimpleNamespace(**plain, parallelism_config=None))


@pytest.mark.parametrize(("file", "named"), [("pipeline", None), ("parameter_server", "ddp")])
def test_a_file_that_only_starts_ranks_is_never_taken_for_ddp(
    file, named, root, launched, monkeypatch
):
    monkeypatch.chdir(root)
    environment = launched("--config_file", f"accelerate_configs/{file}.yaml")
    with pytest.raises(
        UsageError, match="Start toolkit.train with --strategy pipeline or layer_split"
    ):
        requested_strategy(environment, named and STRATEGIES[named])


def test_the_groups_of_a_hybrid_config_are_read_from_the_environment(root, launched, monkeypatch):
    monkeypatch.chdir(root)
    environment = launched("--config_file", "accelerate_configs/fsdp_hybrid.yaml")
    assert requested_replicas(environment) == STRATEGIES["fsdp_hybrid"].replicas == 2
    assert requested_replicas(environment | {"ACCELERATE_USE_PARALLELISM_CONFIG": "false"}) == 1
    assert requested_replicas({}) == 1


def test_a_flag_of_the_launcher_counts(root, launched, monkeypatch):
    monkeypatch.chdir(root)
    file = ("--config_file", "accelerate_configs/ddp.yaml")
    assert requested_processes(launched(*file, "--num_processes", "4")) == 4


@pytest.mark.parametrize(
    ("stage", "optimizer", "parameters", "name"),
    [
        (1, "none", "none", "zero1"),
        (2, "none", "none", "zero2"),
        (2, "cpu", "none", "zero2_offload"),
        (3, "none", "none", "zero3"),
        (3, "cpu", "cpu", "zero3_offload"),
        (3, "nvme", "nvme", "zero3_nvme"),
        (3, "cpu", "none", CUSTOM),
        (1, "cpu", "none", CUSTOM),
    ],
)
def test_a_config_with_its_fields_in_the_yaml(
    stage, optimizer, parameters, name, tmp_path, launched
):
    section = {
        "zero_stage": stage,
        "offload_optimizer_device": optimizer,
        "offload_param_device": parameters,
    }
    asked = requested_strategy(
        launched(*yaml_file(tmp_path, "DEEPSPEED", deepspeed_config=section))
    )
    assert asked.name == name
    assert asked.zero_stage == stage
    assert (asked.offload_optimizer, asked.offload_parameters) == (optimizer, parameters)


@pytest.mark.parametrize(
    ("section", "exported"),
    [
        ({"zero_stage": 3, "zero3_init_flag": True, "zero3_save_16bit_model": True}, {}),
        (
            {
                "zero_stage": 2,
                "offload_optimizer_device": "cpu",
                "gradient_accumulation_steps": 4,
                "gradient_clipping": 0.5,
            },
            {},
        ),
        ({"gradient_clipping": 0.0, "gradient_accumulation_steps": "auto"}, {}),
        (
            {"zero_stage": 3, "offload_param_device": "nvme"},
            {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/mnt/fast"},
        ),
    ],
)
def test_fields_in_the_yaml_are_the_config_that_accelerate_makes_of_them(
    section, exported, tmp_path, launched, monkeypatch
):
    from accelerate.utils import DeepSpeedPlugin

    environment = exported | launched(*yaml_file(tmp_path, "DEEPSPEED", deepspeed_config=section))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = dict(DeepSpeedPlugin().deepspeed_config)
    del made["steps_per_print"]  # this only keeps DeepSpeed quiet
    assert read_deepspeed_config(environment) == made


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "three", "zero_optimization.stage is 'three'"),
        ("ACCELERATE_GRADIENT_CLIPPING", "much", "deepspeed_config in the YAML: gradient_clipping"),
    ],
)
def test_a_field_in_the_yaml_that_is_no_number_is_named(name, value, said):
    with pytest.raises(UsageError, match=said):
        requested_strategy(DEEPSPEED | {name: value})


@pytest.mark.parametrize(
    ("sharding", "strategy"),
    [("FULL_SHARD", "fsdp"), (2, "fsdp_grad_op"), ("HYBRID_SHARD", "fsdp_hybrid")],
)
def test_a_config_for_fsdp1_is_refused_with_the_command_that_makes_it_one_for_fsdp2(
    tmp_path, launched, sharding, strategy
):
    section = {"fsdp_sharding_strategy": sharding, "fsdp_state_dict_type": "LOCAL_STATE_DICT"}
    machines = 2 if strategy == "fsdp_hybrid" else 1
    more = {"num_machines": machines, "num_processes": 4, "fsdp_config": section}
    more |= {"main_process_ip": "10.0.0.1", "main_process_port": 29500, "machine_rank": 0}
    words = yaml_file(tmp_path, "FSDP", **more)
    with pytest.raises(UsageError, match="toolkit translate FILE --to fsdp"):
        requested_strategy(launched(*words))
    (file,) = tmp_path.glob("*.yaml")
    made = translate(file)
    assert "SHARDED_STATE_DICT in its place" in " ".join(made.notes)
    file.write_text(made.text)
    assert requested_strategy(launched(*words)).name == strategy


WORDS_OF_SPLITS = {
    "tp_size": r"tensor parallel \(parallelism_config_tp_size\): 2 beside {}",
    "cp_size": r"context parallel \(parallelism_config_cp_size\): 2 beside {}",
    "sp_size": r"sequence parallel \(parallelism_config_sp_size\): 2 beside {}",
}


@pytest.mark.parametrize(
    ("kind", "field", "words"),
    [
        (kind, field, words)
        for field, words in WORDS_OF_SPLITS.items()
        for kind in ("FSDP", "DEEPSPEED")
        if (kind, field) not in (("DEEPSPEED", "sp_size"), ("FSDP", "cp_size"))  # which are ours
    ],
)
def test_a_config_that_splits_the_model_otherwise_is_refused_by_name(
    kind, field, words, tmp_path, launched
):
    """As Accelerate's `tp_hsdp.yaml`."""
    sections = {
        "FSDP": {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}},
        "DEEPSPEED": {"deepspeed_config": {"zero_stage": 3}},
    }[kind]
    split = {
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": 1,
            "parallelism_config_dp_shard_size": 1,
            f"parallelism_config_{field}": 2,
        },
    }
    environment = launched(*yaml_file(tmp_path, kind, **sections, **split))
    with pytest.raises(UsageError, match=words.format("FSDP" if kind == "FSDP" else "DeepSpeed")):
        requested_strategy(environment)


@pytest.mark.parametrize(("ranks", "readers"), [(2, 1), (4, 2)])
def test_the_ranks_that_share_a_row_are_those_of_the_file(ranks, readers, tmp_path, launched):
    sizes = {"parallelism_config_sp_size": 2, "parallelism_config_dp_shard_size": readers}
    words = yaml_file(
        tmp_path, "DEEPSPEED", deepspeed_config={"zero_stage": 3}, parallelism_config=sizes
    )
    wanted = requested_strategy(launched(*words) | {"WORLD_SIZE": str(ranks)})
    assert (wanted.name, wanted.data_parallel_size(ranks)) == ("ulysses", readers)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"zero_stage": 0}, "needs a ZeRO stage from 1 to 3"),
        ({"zero_stage": 2, "offload_optimizer_device": "cpu"}, "not proven with an offload"),
    ],
)
def test_rows_are_split_beside_no_other_deepspeed(section, said, tmp_path, launched):
    sizes = {"parallelism_config_sp_size": 2, "parallelism_config_dp_shard_size": 1}
    words = yaml_file(tmp_path, "DEEPSPEED", deepspeed_config=section, parallelism_config=sizes)
    with pytest.raises(UsageError, match=said):
        requested_strategy(launched(*words) | {"WORLD_SIZE": "2"})


def test_the_size_of_a_tensor_group_is_that_of_the_file(tmp_path, launched):
    sizes = {"parallelism_config_tp_size": 4, "parallelism_config_dp_shard_size": 2}
    words = yaml_file(tmp_path, "MULTI_GPU", parallelism_config=sizes)
    wanted = requested_strategy(launched(*words) | {"WORLD_SIZE": "8"})
    assert (wanted.name, wanted.tensor, wanted.data_parallel_size(8)) == ("tensor", 4, 2)


@pytest.mark.parametrize(
    ("name", "ranks", "size", "readers", "replicas"),
    [("tensor", 8, 4, 2, 1), ("tensor", 4, 4, 1, 1), ("tensor_ddp", 6, 2, 3, 3)],
)
def test_tensor_groups_of_any_size_keep_their_name(
    name, ranks, size, readers, replicas, tmp_path, launched
):
    options = ConfigOptions(num_processes=ranks, tensor_size=size)
    file = write_configs(STRATEGIES[name], tmp_path, options=options).accelerate
    environment = launched("--config_file", str(file)) | {"WORLD_SIZE": str(ranks)}
    wanted = requested_strategy(environment)
    assert (wanted.name, wanted.tensor, wanted.replicas) == (name, size, replicas)
    assert wanted.data_parallel_size(ranks) == readers
    assert agreed_strategy(environment, STRATEGIES[name], named="--strategy") == wanted
    other = "tensor" if name == "tensor_ddp" else "tensor_ddp"
    with pytest.raises(UsageError, match="asks for"):
        agreed_strategy(environment, STRATEGIES[other], named="--strategy")


def test_sharding_inside_of_replicas_of_tensor_groups_is_refused(tmp_path, launched):
    sizes = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    mesh = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    words = yaml_file(tmp_path, "MULTI_GPU", parallelism_config=mesh)
    with pytest.raises(UsageError, match="sharding inside of replicas of tensor groups"):
        requested_strategy(launched(*words) | {"WORLD_SIZE": "8"})


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("fsdp", {"tensor_size": 2}, "fsdp has no tensor groups"),
        ("tensor", {"tensor_size": 1}, "two ranks or more"),
        ("tensor", {"tensor_size": 4, "num_processes": 6}, "a multiple of 4; 6 asked"),
        ("tensor_ddp", {"num_processes": 2}, "2 groups of at least 2 processes"),
        ("tensor_ddp", {"num_processes": 8, "replicas": 2}, "--replicas is for fsdp_hybrid"),
    ],
)
def test_groups_that_a_strategy_does_not_have_are_refused(name, options, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        write_configs(STRATEGIES[name], tmp_path, options=ConfigOptions(**options))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "name", [n for n, strategy in STRATEGIES.items() if not backend_of(strategy).has_key]
)
def test_a_file_that_only_starts_ranks_wants_the_strategy_by_name(
    name, tmp_path, launched, monkeypatch
):
    file = write_configs(STRATEGIES[name], tmp_path).accelerate
    environment = launched("--config_file", str(file)) | {"WORLD_SIZE": "2"}
    assert requested_strategy(environment, STRATEGIES[name]) == STRATEGIES[name]
    for other in (None, STRATEGIES["ddp"]):
        with pytest.raises(
            UsageError, match="Start toolkit.train with --strategy pipeline or layer_split"
        ):
            requested_strategy(environment, other)
    # No script that Accelerate lays out trains as under ddp by mistake.
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match="dp_shard_size must be at least 1"):
        ParallelismConfig()


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size: 2"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size: 2"),
    ],
)
def test_a_deepspeed_file_that_splits_the_model_otherwise_is_refused(section, words):
    config = {"zero_optimization": {"stage": 1}} | section
    with pytest.raises(UsageError, match=words):
        requested_strategy(DEEPSPEED | {DEEPSPEED_FILE: encoded(config)})


def test_what_accelerate_would_leave_unreduced_is_refused(tmp_path, launched):
    section = {"fsdp_version": 2, "fsdp_ignored_modules": ".*norm.*"}
    environment = launched(*yaml_file(tmp_path, "FSDP", fsdp_config=section))
    with pytest.raises(UsageError, match="would not average the gradients"):
        requested_strategy(environment)


def test_megatron_is_refused_by_name():
    with pytest.raises(UsageError, match="Megatron-LM"):
        requested_strategy({"ACCELERATE_USE_MEGATRON_LM": "true", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("switch", ["DEEPSPEED", "FSDP", "PARALLELISM_CONFIG"])
def test_a_switch_that_an_earlier_launch_left_in_the_shell_is_refused(
    switch, root, launched, monkeypatch
):
    monkeypatch.chdir(root)
    monkeypatch.setenv(f"ACCELERATE_USE_{switch}", "true")
    environment = launched("--config_file", "accelerate_configs/ddp.yaml")
    with pytest.raises(UsageError, match=f"unset ACCELERATE_USE_{switch}"):
        requested_strategy(environment)


def test_what_a_script_asks_holds_where_no_config_asks():
    zero2 = deepspeed_strategy({"zero_optimization": {"stage": 2}})
    # DeepSpeed's plugin sets the first one in the rank.
    torchrun = {"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"}
    assert agreed_strategy(torchrun, zero2, named="--deepspeed") is STRATEGIES["zero2"]


def test_a_script_that_asks_for_another_thing_than_the_config_is_refused_and_both_are_named(
    root, launched, monkeypatch
):
    monkeypatch.chdir(root)
    zero2 = deepspeed_strategy({"zero_optimization": {"stage": 2}})
    for name in ("ddp", "zero3"):
        environment = launched("--config_file", f"accelerate_configs/{name}.yaml")
        environment |= {"ACCELERATE_USE_DEEPSPEED": "true"}
        with pytest.raises(UsageError, match=f"asks for {name}, and --deepspeed for zero2"):
            agreed_strategy(environment, zero2, named="--deepspeed")
    environment = launched("--config_file", "accelerate_configs/zero2.yaml")
    assert agreed_strategy(environment, zero2, named="--deepspeed") is STRATEGIES["zero2"]
    assert agreed_strategy(environment, None, named="") is STRATEGIES["zero2"]


def test_a_plain_process_is_single():
    assert requested_strategy({}) is STRATEGIES["single"]
    assert requested_strategy({"WORLD_SIZE": "2"}) is STRATEGIES["ddp"]
    assert requested_processes({}) == 1


def test_fsdp_that_is_none_of_ours_has_a_name_of_its_own():
    kept = FSDP | {"FSDP_RESHARD_AFTER_FORWARD": "false", "FSDP_OFFLOAD_PARAMS": "true"}
    asked = requested_strategy(kept)
    assert asked.name == CUSTOM
    assert asked.shards_parameters
    assert asked.offload_parameters == "cpu"


def test_features_are_compared_and_names_are_not():
    zero2 = STRATEGIES["zero2"]
    mine = Strategy(name="mine", backend="deepspeed", zero_stage=2, summary="x", num_processes=8)
    assert same_features(zero2, mine)
    assert not same_features(zero2, STRATEGIES["zero2_offload"])
    assert not same_features(STRATEGIES["fsdp"], STRATEGIES["fsdp_hybrid"])


def test_parameters_offloaded_below_stage_3_are_refused():
    zero = {"stage": 2, "offload_param": {"device": "cpu"}}
    with pytest.raises(UsageError, match="Use stage 3"):
        requested_strategy(DEEPSPEED | {DEEPSPEED_FILE: encoded({"zero_optimization": zero})})


def test_an_offload_that_is_null_is_none():
    zero = {"stage": 3, "offload_param": None, "offload_optimizer": None}
    environment = DEEPSPEED | {DEEPSPEED_FILE: encoded({"zero_optimization": zero})}
    assert requested_strategy(environment) is STRATEGIES["zero3"]


def test_a_config_handed_over_as_base64_is_read():
    config = {"zero_optimization": {"stage": 1}}
    assert read_deepspeed_config({DEEPSPEED_FILE: encoded(config)}) == config


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (
            "deepspeed_configs/zero2.json",
            "It comes with the toolkit: start from the repository root, or pass the config that "
            "toolkit configs path zero2 prints.",
        ),
        ("deepspeed_configs/zero9.json", "A relative path begins in the folder that the launch"),
        ("zero2", "A relative path begins in the folder that the launch was started from"),
        ("./abcd", "write an absolute path (as deepspeed_config_file, or in the flag)"),
        ("nowhere/ds", "write an absolute path (as deepspeed_config_file, or in the flag)"),
        ("/nowhere/ds.json", "Correct it where it is named"),
    ],
)
def test_a_json_that_is_not_there_is_named_with_where_it_was_looked_for(
    name, advice, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is asked for, and there is no file") as caught:
        read_deepspeed_config({DEEPSPEED_FILE: name})
    said = str(caught.value)
    assert f"there is no file {tmp_path / name}. " in said
    assert advice in said
    assert ("repository" in said) is (name == "deepspeed_configs/zero2.json")


@pytest.mark.parametrize("text", ["{'stage': 3}", "", "[1, 2]", '"zero3"', '{"a": 1,}'])
def test_a_file_that_is_no_json_object_is_named(text, tmp_path):
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(UsageError, match=r"ds\.json"):
        read_deepspeed_config({DEEPSPEED_FILE: str(tmp_path / "ds.json")})


def encoded(config):
    return base64.urlsafe_b64encode(json.dumps(config).encode()).decode()


def yaml_file(folder, distributed_type, **sections):
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": distributed_type,
        "num_machines": 1,
        "num_processes": 2,
        "main_process_port": 0,
    }
    path = folder / "theirs.yaml"
    path.write_text(yaml.safe_dump(config | sections))
    return "--config_file", str(path)
