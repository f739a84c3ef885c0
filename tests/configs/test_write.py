"""`toolkit configs write`, as a user calls it."""

import json
import os
import shlex

import pytest
import yaml
from places import ROOT
from typer.testing import CliRunner

from toolkit.cli import app, main
from toolkit.configs import ConfigOptions
from toolkit.configs.files import cached_configs, write_configs
from toolkit.configs.requested import requested_strategy, same_features
from toolkit.errors import UsageError
from toolkit.planning.recommend import recommend
from toolkit.planning.render.commands import paste_line
from toolkit.planning.render.recommendations import recommendation_lines, write_recommendation
from toolkit.strategies import STRATEGIES

NOT_DEEPSPEED = [name for name, each in STRATEGIES.items() if each.backend != "deepspeed"]


def write(*words):
    """Run `toolkit configs write`; a UsageError comes through as it is."""
    result = CliRunner().invoke(app, ["configs", "write", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output.split()


@pytest.fixture
def refused(monkeypatch, capsys):
    """Return the sentence that the command ends with, and check that it is one, with status 2."""

    def refuse(*words):
        monkeypatch.setattr("sys.argv", ["toolkit", "configs", "write", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        printed = capsys.readouterr()
        assert caught.value.code == 2
        assert printed.out == ""
        assert printed.err.startswith("toolkit: ")
        assert printed.err.count("\n") == 1
        return printed.err.removeprefix("toolkit: ").strip()

    return refuse


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_is_written_with_absolute_paths_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launcher, *deepspeed = write(name, "--to", "made/here")
    config = yaml.safe_load((tmp_path / "made/here" / f"{name}.yaml").read_text())
    assert launcher == str(tmp_path / "made/here" / f"{name}.yaml")
    if STRATEGIES[name].backend == "deepspeed":
        assert deepspeed == [str(tmp_path / "made/here" / f"{name}.json")]
        assert config["deepspeed_config"]["deepspeed_config_file"] == deepspeed[0]
    else:
        assert deepspeed == []
    assert sorted(path.name for path in (tmp_path / "made/here").iterdir()) == sorted(
        os.path.basename(path) for path in (launcher, *deepspeed)
    )


def test_every_option_of_deepspeed_stands_in_the_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launcher, deepspeed = write(
        *("zero3_offload", "--to", "x", "--num-processes", "8", "--precision", "bf16"),
        *("--accumulation", "4", "--clipping", "0.5"),
        *("--offload-device", "nvme", "--nvme-path", "swap"),
    )
    config = json.loads((tmp_path / deepspeed).read_text())
    assert yaml.safe_load((tmp_path / launcher).read_text())["num_processes"] == 8
    assert config["bf16"]["enabled"] is True
    assert config["fp16"]["enabled"] is False
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 0.5
    zero = config["zero_optimization"]
    for place in (zero["offload_optimizer"], zero["offload_param"]):
        assert place["device"] == "nvme"
        assert place["nvme_path"] == str(tmp_path / "swap")
    assert "aio" in config


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_the_precision_stands_where_the_backend_reads_it(precision, tmp_path):
    for name in ("single", "ddp", "fsdp"):
        (launcher,) = write(name, "--to", str(tmp_path), "--precision", precision)
        with open(launcher) as file:
            assert yaml.safe_load(file)["mixed_precision"] == precision
    launcher, deepspeed = write("zero2", "--to", str(tmp_path), "--precision", precision)
    with open(launcher) as file:
        assert "mixed_precision" not in yaml.safe_load(file)
    with open(deepspeed) as file:
        config = json.load(file)
    assert config["bf16"]["enabled"] is (precision == "bf16")
    assert config["fp16"]["enabled"] is (precision == "fp16")


def test_no_clipping_is_a_zero_and_not_left_open(tmp_path):
    _, deepspeed = write("zero1", "--to", str(tmp_path), "--clipping", "0")
    with open(deepspeed) as file:
        assert json.load(file)["gradient_clipping"] == 0


def test_the_layer_of_fsdp_and_the_groups_of_fsdp_hybrid(tmp_path):
    (launcher,) = write(
        *("fsdp_hybrid", "--to", str(tmp_path), "--num-processes", "8"),
        *("--layer", "LlamaDecoderLayer"),
    )
    with open(launcher) as file:
        config = yaml.safe_load(file)
    assert config["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer"
    assert config["parallelism_config"]["parallelism_config_dp_replicate_size"] == 2
    assert config["parallelism_config"]["parallelism_config_dp_shard_size"] == 4


SEVERAL = ("--num-machines", "2", "--main-process-ip", "10.0.0.1", "--main-process-port", "29500")


@pytest.mark.parametrize(("words", "groups"), [((), 2), (("--replicas", "4"), 4)])
def test_a_hybrid_group_stays_within_its_machine(words, groups, tmp_path, launched):
    asked = ("fsdp_hybrid", "--to", str(tmp_path), "--num-processes", "8", *words)
    config = write(*asked, *SEVERAL)[0]
    rank = launched("--config_file", config)
    assert rank["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == str(groups)
    assert rank["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == str(8 // groups)
    found = requested_strategy(rank)
    assert (found.name, found.replicas) == ("fsdp_hybrid", groups)


def test_hybrid_sharding_has_a_group_in_each_node_and_its_files_and_commands_start_it(
    tmp_path, launched
):
    found = recommend("7b", gpu="H100", gpus=1024)
    job = found.choice.job
    assert (job.strategy.name, job.nodes, job.strategy.replicas) == ("fsdp_hybrid", 128, 128)
    text = "\n".join(recommendation_lines(found))
    assert "fsdp_hybrid on 1024 GPUs in 128 groups" in text
    assert "on each of the 128 nodes, with RANK from 0 to 127" in text
    written = write_recommendation(found, tmp_path)
    pasted = paste_line(found.options[0]).replace('"$(toolkit configs path fsdp_hybrid)"', "X")
    bundled = str(ROOT / "accelerate_configs" / "fsdp_hybrid.yaml")
    file = yaml.safe_load((tmp_path / "fsdp_hybrid.yaml").read_text())
    machines = {"num_machines": 128, "main_process_ip": "ADDRESS", "main_process_port": 29500}
    assert {key: file[key] for key in machines} == machines
    for words in (written, [bundled if word == "X" else word for word in shlex.split(pasted)]):
        flags = words[2 : words.index("-m")]
        rank = launched(*["1" if word == "RANK" else word for word in flags])
        assert same_features(requested_strategy(rank), job.strategy)
        assert rank["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "8"


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_several_machines_start_by_the_same_file(name, tmp_path, launched):
    asked = (name, "--to", str(tmp_path), "--num-processes", "4", "--machine-rank", "1")
    result = CliRunner().invoke(app, ["configs", "write", *asked, *SEVERAL])
    file = tmp_path / f"{name}.yaml"
    assert [line for line in result.output.splitlines() if line.startswith("machine ")] == [
        f"machine {number}: accelerate launch --config_file {file} --machine_rank {number} "
        "-m toolkit.train --output_dir SHARED_FOLDER"
        for number in (0, 1)
    ]
    config = yaml.safe_load(file.read_text())
    machines = {key: config[key] for key in config if "machine" in key or "main" in key}
    assert machines == {
        "machine_rank": 1,
        "num_machines": 2,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
    }
    assert config["num_processes"] == 4
    if name == "zero3":
        assert config["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_accelerate_takes_what_was_written(name, precision, tmp_path, launched):
    files = write_configs(
        STRATEGIES[name],
        tmp_path,
        options=ConfigOptions(precision=precision),
    )
    environment = launched("--config_file", str(files.accelerate))
    # In a DeepSpeed run the JSON says it, and the launcher's word is `no`.
    says = precision or "no"
    assert environment["ACCELERATE_MIXED_PRECISION"] == ("no" if files.deepspeed else says)


def test_files_that_are_there_are_left_alone_without_force(tmp_path, refused):
    write("zero2", "--to", str(tmp_path))
    launcher, deepspeed = tmp_path / "zero2.yaml", tmp_path / "zero2.json"
    launcher.write_text("mine\n")
    deepspeed.unlink()
    said = refused("zero2", "--to", str(tmp_path), "--accumulation", "2")
    assert str(launcher) in said
    assert "--force" in said
    assert launcher.read_text() == "mine\n"
    assert not deepspeed.exists()

    write("zero2", "--to", str(tmp_path), "--accumulation", "2", "--force")
    assert "deepspeed_config_file" in launcher.read_text()
    assert json.loads(deepspeed.read_text())["gradient_accumulation_steps"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["zero2.json", "zero2.yaml"]


MISTAKES = {
    "an unknown strategy": (("zero4",), "Did you mean 'zero3'?"),
    "fsdp_hybrid on 3": (("fsdp_hybrid", "--num-processes", "3"), "multiples of 2"),
    "fsdp_hybrid on 2": (("fsdp_hybrid", "--num-processes", "2"), "needs 4 or more"),
    "single on 2": (("single", "--num-processes", "2"), "use ddp"),
    "ddp on 1": (("ddp", "--num-processes", "1"), "use single"),
    "zero3 on 0": (("zero3", "--num-processes", "0"), "at least 1 process,"),
    "fsdp on -2": (("fsdp", "--num-processes", "-2"), "at least 1 process,"),
    "zero2 offloads to NVMe": (
        ("zero2_offload", "--offload-device", "nvme"),
        "Use zero3_nvme",
    ),
    "zero2 offloads nothing": (("zero2", "--offload-device", "cpu"), "zero2_offload"),
    "offload without a place": (("zero3_offload", "--offload-device", "none"), "is zero3"),
    "zero2_offload without a place": (("zero2_offload", "--offload-device", "none"), "is zero2"),
    "a path that nothing uses": (("zero3_offload", "--nvme-path", "/x"), "does not use NVMe"),
    "accumulation outside DeepSpeed": (("ddp", "--accumulation", "2"), "--accumulation"),
    "clipping outside DeepSpeed": (("fsdp", "--clipping", "1"), "--clipping"),
    "offload outside DeepSpeed": (("fsdp", "--offload-device", "cpu"), "fsdp_offload"),
    "a layer outside FSDP": (("zero3", "--layer", "LlamaDecoderLayer"), "--layer"),
    "no number of ranks for two machines": (("ddp", *SEVERAL), "--num-processes"),
    "ranks that two machines can't share": (
        ("ddp", "--num-processes", "3", *SEVERAL),
        "a multiple of 2",
    ),
    "machines without an address": (
        ("ddp", "--num-processes", "4", "--num-machines", "2"),
        "--main-process-ip",
    ),
    "no such machine": (
        ("ddp", "--num-processes", "4", "--machine-rank", "2", *SEVERAL),
        "from 0 to 1",
    ),
    "no machine": (("ddp", "--num-machines", "0"), "1 machine or more"),
    "no such port": (
        ("ddp", "--num-processes", "4", *SEVERAL, "--main-process-port", "65536"),
        "from 1 to 65535",
    ),
    "an address of one machine": (("ddp", "--main-process-ip", "10.0.0.1"), "--num-machines"),
    "one process on several machines": (
        ("single", "--num-processes", "2", *SEVERAL),
        "use ddp",
    ),
    "a group on two machines": (
        ("fsdp_hybrid", "--num-processes", "12", "--replicas", "3", *SEVERAL),
        "multiples of 2",
    ),
    "one group": (("fsdp_hybrid", "--replicas", "1"), "use fsdp"),
    "groups outside fsdp_hybrid": (("fsdp", "--replicas", "2"), "--replicas is for fsdp_hybrid"),
    "no accumulation": (("zero2", "--accumulation", "0"), "1 step or more"),
    "a negative clip": (("zero2", "--clipping", "-1"), "0 for no clipping"),
    "a clip that is no number": (("zero2", "--clipping", "nan"), "0 for no clipping"),
    "an endless clip": (("zero2", "--clipping", "inf"), "0 for no clipping"),
}


@pytest.mark.parametrize(("words", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_sentence_and_nothing_is_written(words, says, tmp_path, refused):
    assert says in refused(*words, "--to", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_every_mistake_is_named_at_once(tmp_path, refused):
    said = refused("ddp", "--to", str(tmp_path), "--accumulation", "2", "--clipping", "1")
    assert "--accumulation" in said
    assert "--clipping" in said


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_is_a_sentence(place, tmp_path, refused):
    (tmp_path / "file").write_text("kept")
    assert str(tmp_path / place) in refused("ddp", "--to", str(tmp_path / place))
    assert (tmp_path / "file").read_text() == "kept"


def test_an_unknown_choice_is_refused_by_the_command_line(tmp_path):
    words = ("zero2", "--to", str(tmp_path), "--precision", "fp8")
    result = CliRunner().invoke(app, ["configs", "write", *words])
    assert result.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_precision_is_refused_by_the_library():
    with pytest.raises(UsageError, match="no, bf16, fp16"):
        ConfigOptions(precision="fp8")


@pytest.mark.parametrize("name", STRATEGIES)
def test_path_names_files_that_any_folder_can_use(name, tmp_path, monkeypatch, launched):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["configs", "path", name], catch_exceptions=False)
    assert result.exit_code == 0
    path = result.output.strip()
    assert path.startswith(str(tmp_path / "cache"))
    launched("--config_file", path)
    # The second time finds the same file.
    assert str(cached_configs(STRATEGIES[name]).accelerate) == path


@pytest.mark.parametrize("name", STRATEGIES)
def test_show_prints_what_is_checked_in(name, root):
    result = CliRunner().invoke(app, ["configs", "show", name], catch_exceptions=False)
    assert (root / "accelerate_configs" / f"{name}.yaml").read_text() in result.output
    if name not in NOT_DEEPSPEED:
        assert (root / "deepspeed_configs" / f"{name}.json").read_text() in result.output


def test_list_has_a_line_a_strategy():
    result = CliRunner().invoke(app, ["configs", "list"], catch_exceptions=False)
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines] == list(STRATEGIES)
    assert all(STRATEGIES[line.split()[0]].summary in line for line in lines)
