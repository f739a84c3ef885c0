"""Scripts that know nothing of the toolkit, under configs made for GPUs, on a machine without."""

import ast
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time

import launches
import pytest
from places import ROOT, SCRIPTS

from toolkit import rehearse
from toolkit.engines.on_cpu import patch_transformers

STRATEGIES = ("ddp", "zero3", "fsdp")
ENGAGED = {
    "ddp": "distributed_type MULTI_GPU, num_processes 2, zero_stage 0, held_fraction 1.0",
    "zero3": "distributed_type DEEPSPEED, num_processes 2, zero_stage 3, held_fraction 0.5",
    "fsdp": "distributed_type FSDP, num_processes 2, zero_stage 0, held_fraction 0.5",
}


def losses_of(done, marker="LOSSES "):
    line = next(line for line in done.stdout.splitlines() if line.startswith(marker))
    return json.loads(line.removeprefix(marker))


@pytest.fixture(scope="module")
def accelerator_runs(launch):
    script = SCRIPTS / "plain_accelerator.py"
    runs = {name: launch(name, "-m", "toolkit.rehearse", script, "1.0") for name in STRATEGIES}
    return runs | {"unclipped": launch("zero3", "-m", "toolkit.rehearse", script)}


@pytest.fixture(scope="module")
def trainer_runs(launch, tmp_path_factory):
    script = SCRIPTS / "plain_trainer.py"
    folder = tmp_path_factory.mktemp("trainer")
    return folder, {
        name: launch(name, "-m", "toolkit.rehearse", script, folder / name) for name in STRATEGIES
    }


def test_a_large_model_trains_small_for_a_few_steps_and_is_saved(launch, tmp_path):
    """A 7B model of which there is a config alone, under both ways to load into shards."""
    from transformers import AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig

    large = tmp_path / "large"
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8}
    LlamaConfig(vocab_size=32000, dtype="bfloat16", **shape).save_pretrained(large)
    ByT5Tokenizer().save_pretrained(large)
    losses = {}
    for name in ("zero3", "fsdp"):
        asked = "--shrink" if name == "zero3" else "--shrink=auto"
        small = ["-m", "toolkit.rehearse", asked, "--steps", "3"]
        flags = ["--model", large, "--output_dir", tmp_path / name, "--disable_tqdm", "True"]
        done = launch(name, *small, ROOT / "examples" / "trainer.py", *flags)
        assert done.stdout.count("--shrink: ") == 1
        assert "2 of 32 layers, hidden size 64 of 4096" in done.stdout
        assert ("too many to train here as it is" in done.stdout) == (name == "fsdp")
        assert ENGAGED[name] in done.stdout
        state = json.loads((tmp_path / name / "trainer_state.json").read_text())
        losses[name] = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / name / "final")
        assert saved.config.num_hidden_layers == 2
        assert saved.config.vocab_size == 32000
    assert len(losses["zero3"]) == 3
    assert losses["fsdp"] == pytest.approx(losses["zero3"], abs=1e-5)


@pytest.mark.parametrize("value", ["0", "-1", "three", ""])
def test_a_wrong_number_of_steps_is_refused(value, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rehearse", "--shrink", f"--steps={value}", "script.py"])
    with pytest.raises(SystemExit) as ended:
        rehearse.main()
    assert ended.value.code == 2
    assert "--steps takes a number of optimizer steps from 1 on, not" in capsys.readouterr().err


def test_what_counts_steps_is_refused_without_them(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rehearse", "--observe", "folder", "script.py"])
    with pytest.raises(SystemExit) as ended:
        rehearse.main()
    assert ended.value.code == 2
    assert (
        "--observe and --for_ranks count optimizer steps: pass --steps" in capsys.readouterr().err
    )


@pytest.fixture(scope="module")
def sft_runs(launch, launch_environment, tmp_path_factory):
    """TRL's own script, on a data set folder, with the built-in model."""
    import os

    build = "from toolkit.training.model import build_model; print(build_model())"
    built = subprocess.run(
        [sys.executable, "-c", build],
        env=os.environ | launch_environment,
        text=True,
        capture_output=True,
        check=True,
    )
    folder = tmp_path_factory.mktemp("sft")
    data = folder / "data"
    data.mkdir()
    rows = [
        {"prompt": f"def f{i}(x, y):\n", "completion": f"Add x and y, {i} times over.\n"}
        for i in range(64)
    ]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "--model_name_or_path": built.stdout.splitlines()[-1],
        "--dtype": "float32",
        "--dataset_name": str(data),
        "--max_steps": "4",
        "--per_device_train_batch_size": "2",
        "--logging_steps": "1",
        "--report_to": "none",
        "--bf16": "False",
        "--save_strategy": "no",
    }
    words = [word for pair in flags.items() for word in pair]
    return {
        name: launch(
            *(name, "-m", "toolkit.rehearse", "-m", "trl.scripts.sft", *words),
            *("--output_dir", folder / name),
        )
        for name in STRATEGIES
    }


@pytest.mark.short
def test_a_plain_accelerator_script_engages_what_was_asked(accelerator_runs):
    for name in STRATEGIES:
        done = accelerator_runs[name]
        assert done.returncode == 0, done.stdout
        assert f"attested {name}: {ENGAGED[name]}" in done.stdout, done.stdout
        assert f"rehearsal of {name}: 2 ranks" in done.stdout


@pytest.mark.short
def test_a_plain_accelerator_script_learns_the_same_everywhere(accelerator_runs):
    control = losses_of(accelerator_runs["ddp"])
    assert len(control) == 8
    for name in ("zero3", "fsdp"):
        assert losses_of(accelerator_runs[name]) == pytest.approx(control, abs=1e-5), name


@pytest.mark.short
def test_what_a_script_clips_is_named_and_what_deepspeed_clips_instead(accelerator_runs):
    assert "toolkit: the script clips at 1.0" in accelerator_runs["fsdp"].stdout
    assert "toolkit: DeepSpeed clips at 1.0" in accelerator_runs["zero3"].stdout
    said = "the script does not clip, DeepSpeed does, at 1.0"
    assert said in accelerator_runs["unclipped"].stdout


def test_a_plain_trainer_script_engages_what_was_asked_and_learns_the_same(trainer_runs):
    folder, runs = trainer_runs
    control = losses_of(runs["ddp"])
    assert len(control) == 6
    for name, done in runs.items():
        assert done.returncode == 0, done.stdout
        assert f"attested {name}: {ENGAGED[name]}" in done.stdout, done.stdout
        assert losses_of(done) == pytest.approx(control, abs=1e-5), name
        # The bundled files let a stock Trainer save a whole model under every backend.
        assert (folder / name / "saved" / "model.safetensors").stat().st_size > 500_000


def test_trls_sft_script_engages_what_was_asked_and_learns_the_same(sft_runs):
    def losses(done):
        logged = re.findall(r"\{'loss': .*?\}", done.stdout)
        return [float(ast.literal_eval(entry)["loss"]) for entry in logged]

    control = losses(sft_runs["ddp"])
    assert len(control) == 4, sft_runs["ddp"].stdout
    for name, done in sft_runs.items():
        assert done.returncode == 0, done.stdout
        assert f"attested {name}: {ENGAGED[name]}" in done.stdout, done.stdout
        # The script prints four digits.
        assert losses(done) == pytest.approx(control, abs=2e-3), name


def test_what_a_script_s_own_flags_ask_engages_under_torchrun(
    trainer_runs, launch_environment, tmp_path
):
    """The usual way to start a script of transformers: no config of Accelerate's anywhere."""
    asked = {
        "zero3": ["--deepspeed", str(ROOT / "deepspeed_configs" / "zero3.json")],
        "fsdp": ["--fsdp", "full_shard auto_wrap"],
    }
    control = losses_of(trainer_runs[1]["ddp"])
    for name, words in asked.items():
        done = launches.run(
            (
                *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"),
                *("--standalone", "-m", "toolkit.rehearse"),
                *(SCRIPTS / "plain_trainer.py", tmp_path / name, *words),
            ),
            environment=launch_environment,
        )
        assert done.returncode == 0, done.stdout
        assert f"toolkit: {name} engaged" in done.stdout, done.stdout
        assert f"attested {name}: {ENGAGED[name]}" in done.stdout, done.stdout
        assert losses_of(done) == pytest.approx(control, abs=1e-5), name


def test_a_script_that_asks_for_gpus_and_the_hub_goes_on_and_all_is_said_once(launch_environment):
    """Under torchrun, where no config asks for a strategy."""
    # A port that is closed: a Hub that can't be reached, also where there is a network.
    hub = {"HF_HUB_OFFLINE": "", "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = launches.run(
        (
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"),
            *("--standalone", "-m", "toolkit.rehearse"),
            SCRIPTS / "asks_for_gpus_and_the_hub.py",
        ),
        environment=launches.cold(launch_environment) | hub,
    )
    assert done.returncode == 1, done.stdout
    assert done.stdout.count("RANKS 2 DEVICES 2 MEMORY (0, (0, 0), 0)") == 2, done.stdout
    assert re.findall(r"HUB (\d+) We couldn't connect", done.stdout) == ["0", "0"]
    for said in (
        "torch.cuda.reset_peak_memory_stats and its like return 0 in this rehearsal",
        "127.0.0.1 can't be reached",
        "toolkit: the script never passed a model and an optimizer through Accelerator.prepare",
        "toolkit: types-differ: ",
    ):
        assert done.stdout.count(said) == 1, (said, done.stdout)
    assert "deepspeed_shm_comm" not in done.stdout


def test_a_script_s_flag_that_contradicts_the_config_is_refused_and_both_are_named(
    launch, tmp_path
):
    file = ROOT / "deepspeed_configs" / "zero3.json"
    script = SCRIPTS / "plain_trainer.py"
    done = launch("ddp", "-m", "toolkit.rehearse", script, tmp_path, "--deepspeed", file)
    assert done.returncode != 0
    assert "rehearsal of ddp: 2 ranks" in done.stdout, done.stdout
    assert "The launcher's config asks for ddp" in done.stdout, done.stdout
    assert "and --deepspeed for zero3. Take --deepspeed out" in done.stdout


def test_deepspeed_fields_in_the_yaml_are_rehearsed_like_a_file(launch, tmp_path):
    """With an offload, which pins memory by default and needs a compiler or a change."""
    config = tmp_path / "theirs.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\n"
        "distributed_type: DEEPSPEED\n"
        "deepspeed_config:\n"
        "  gradient_accumulation_steps: 2\n"
        "  offload_optimizer_device: cpu\n"
        "  zero_stage: 2\n"
        "num_machines: 1\n"
        "num_processes: 2\n"
        "main_process_port: 0\n"
    )
    done = launch(
        *(config, "-m", "toolkit.rehearse", SCRIPTS / "plain_accelerator.py", "1.0"),
        CXX="there-is-no-such-compiler",
        cold=True,
    )
    assert done.returncode == 0, done.stdout
    assert "deepspeed: offload_optimizer.pin_memory: true -> false, no GPU" in done.stdout
    assert "torch's AdamW steps on the CPU instead" in done.stdout
    assert "attested zero2_offload: distributed_type DEEPSPEED, num_processes 2" in done.stdout
    assert "optimizer_class AdamW" in done.stdout
    assert len(losses_of(done)) == 8


def test_ranks_of_several_machines_meet_at_the_interface_of_the_route_to_the_first(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert rehearse._interface(2) == "lo"
    monkeypatch.delenv("MASTER_PORT")
    assert rehearse._interface(2) is None
    assert rehearse._interface(4) == "lo"  # all on this machine


def test_folders_of_killed_launches_go_and_those_with_stacks_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, hung, young = (tmp_path / f"toolkit-{os.getuid()}-{pid}-0.00" for pid in (1, 2, 3))
    for folder in (killed, hung, young):
        folder.mkdir()
    (hung / rehearse.HANG_FILE).touch()
    long_ago = time.time() - rehearse.SWEEP_SECONDS - 1
    for path in (killed, hung, hung / rehearse.HANG_FILE):
        os.utime(path, (long_ago, long_ago))
    ours = rehearse.folder_of_launch()
    assert {*tmp_path.iterdir()} == {hung, young, ours}


def test_a_script_that_is_not_there_is_one_sentence(launch):
    done = launch("single", "-m", "toolkit.rehearse", "no_such_script.py")
    assert "There is no script no_such_script.py here" in done.stdout
    assert done.returncode != 0


def test_help_is_the_usage(launch_environment):
    for flag in ("--help", "-h"):
        done = launches.run(
            [sys.executable, "-m", "toolkit.rehearse", flag], environment=launch_environment
        )
        assert done.returncode == 0, done.stdout
        assert "Usage: accelerate launch --config_file FILE -m toolkit.rehearse" in done.stdout
        assert "There is no script" not in done.stdout


def test_a_deepspeed_file_with_mistakes_is_one_sentence_before_a_script_starts(
    launch_environment, tmp_path
):
    (tmp_path / "ds.json").write_text('{"gradient_cliping": 1, "bf16": {"enabledd": true}}')
    (tmp_path / "script.py").write_text("open('started', 'w')")
    asked = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.rehearse", "script.py"],
        cwd=tmp_path,
        env=launch_environment | asked,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1] == (
        "toolkit: ds.json: gradient_cliping is no key of DeepSpeed's (did you mean "
        "gradient_clipping?); bf16.enabledd is no key of DeepSpeed's (did you mean enabled?). "
        "Fix it, or generate it anew."
    )
    assert not (tmp_path / "started").exists()


def test_a_config_file_with_an_error_is_refused_before_a_script_starts(launch, tmp_path):
    (tmp_path / "script.py").write_text("open(f'{__file__}-started', 'w')")
    text = (ROOT / "accelerate_configs" / "ddp.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(f"{text}num_processes: 2\n")
    done = launch(
        tmp_path / "mine.yaml", "-m", "toolkit.rehearse", tmp_path / "script.py", cold=True
    )
    assert done.returncode == 1
    assert done.stdout.count("num_processes stands there more than once") == 1, done.stdout
    assert [*tmp_path.glob("*started")] == []


def test_a_deepspeed_file_of_the_script_s_own_that_is_not_there_is_one_sentence(
    launch_environment, tmp_path
):
    script = (
        "from transformers import TrainingArguments\nTrainingArguments('out', deepspeed='no.json')"
    )
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.rehearse", "script.py"],
        cwd=tmp_path,
        env=launches.cold(launch_environment) | {"PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("toolkit: ")
    assert "no.json" in last
    assert "Traceback" not in done.stderr


def test_deepspeed_counts_devices_by_a_variable_and_starts_no_process_for_it(monkeypatch):
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    started = []
    monkeypatch.setattr(subprocess, "check_output", lambda *_: started.append(1) or b"")
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert CPU_Accelerator().device_count() == 2
    assert not started


def test_the_places_inside_accelerate_that_a_rehearsal_changes_are_still_there():
    """Fails when accelerate moves what `toolkit/engines/on_cpu.py` hooks into."""
    from accelerate.state import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import training_args

    assert list(inspect.signature(PartialState._prepare_backend).parameters) == [
        "self",
        "cpu",
        "sagemaker_dp",
        "backend",
    ]
    assert "ACCELERATE_TORCH_DEVICE" in inspect.getsource(PartialState.__init__)
    assert "cpu_offload" in inspect.getsource(FullyShardedDataParallelPlugin.set_cpu_offload)
    assert callable(training_args.is_torch_bf16_gpu_available)
    assert "build_shm_op()" in inspect.getsource(importlib.import_module("deepspeed.comm.torch"))


def test_arguments_imported_after_a_rehearsal_began_take_bf16_too(monkeypatch):
    import transformers.training_args
    import transformers.utils.import_utils

    for module in (transformers.utils, transformers.utils.import_utils, transformers.training_args):
        name = "is_torch_bf16_gpu_available"
        monkeypatch.setattr(module, name, getattr(module, name))  # as it was, afterwards
    spec = importlib.util.find_spec("transformers.training_args")
    monkeypatch.delitem(sys.modules, spec.name)
    patch_transformers()
    later = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, later)
    spec.loader.exec_module(later)
    assert later.is_torch_bf16_gpu_available()
