"""`toolkit train`: from a file of rows to a model by one verb, and a sentence for each mistake."""

import json
import re
import shlex
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from places import ROOT
from rich.console import Console

from toolkit import cli, train_command
from toolkit.environment import InstalledGpu
from toolkit.errors import UsageError
from toolkit.jobs.terms import GIB
from toolkit.launching.outcome import Outcome
from toolkit.records.record import read_record
from toolkit.train_command import Choice, TrainCommand, TrainOptions

TEXTS = ["the quick brown fox ", "jumps over the lazy dog ", "small birds sing in the rain "]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    texts = [(TEXTS[n % 3] * (1 + n % 7)).strip() for n in range(44)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def begun(launch_environment, tmp_path):
    """Start `toolkit` in the folder of a test."""
    with ExitStack() as stack:

        def start(*words):
            process = subprocess.Popen(
                ["toolkit", *map(str, words)],
                cwd=tmp_path,
                env=launch_environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            return stack.enter_context(process)

        yield start


@pytest.mark.short
def test_a_stranger_gets_from_alpaca_rows_to_an_answer(begun, small_model, tmp_path):
    rows = [
        {"instruction": f"Add {n} and {n + 1}.", "input": "", "output": f"It is {2 * n + 1}."}
        for n in range(300)
    ]
    rows[7]["output"] *= 100
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    words = ["--train_file", "rows.json", "--model_name_or_path", small_model, "--method", "lora"]
    done = begun("train", *words, "--output_dir", "out")
    printed, _ = done.communicate(timeout=600)
    assert done.returncode == 0, printed
    assert "instruction, input, output are read as a turn of the user and a reply" in printed
    lines = printed.partition("\n\n")[2].strip().splitlines()
    names = ["trained", "loss", "left out", "attested", "time", "model", "try it", "go on"]
    assert [line[:10].strip() for line in lines] == [*names, "share it"]
    assert lines[0].startswith("trained   38 steps, 1.00 epochs: 300 rows, ")
    cut = re.fullmatch(r"left out  1 of 300 texts are cut .* \(--max_length (\d+) .*\)", lines[2])
    assert int(cut[1]) > 512  # the model's positions
    assert "1 of 300 texts are cut to --max_length" in printed[: printed.index("step 1/38")]
    assert lines[5].startswith("model     out/final (adapters of ")
    (command,) = [line.removeprefix("try it    ") for line in lines if line.startswith("try it")]
    assert shlex.split(command)[:3] == ["toolkit", "generate", "out/final"]
    answered = begun("generate", "out/final", "Add 3 and 4.", "--max-new-tokens", 8)
    answer, _ = answered.communicate(timeout=600)
    assert answered.returncode == 0, answer


def test_one_verb_trains_says_what_came_of_it_and_goes_on(begun, rows, tmp_path):
    small = ["--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 1]
    done = begun("train", "--train_file", rows.name, *small, "--output_dir", "out")
    printed, _ = done.communicate(timeout=600)
    assert done.returncode == 0, printed
    assert "strategy single: this machine has no GPU, so it trains on the CPU" in printed
    shown, _, words = printed.partition("\n\n")
    assert re.findall(r"^step (\d+)/11: loss", shown, re.M)[:1] == ["1"]
    assert "step 11/11: loss " in shown
    record = read_record(tmp_path / "out")
    summary = record["summary"]
    assert (summary["steps"], summary["epochs"], summary["rows"]) == (11, 1.0, 44)
    assert summary["tokens"] == record["data"]["tokens"]
    assert (summary["first_loss"], summary["last_loss"]) == (
        record["losses"][0],
        record["losses"][-1],
    )
    lines = words.strip().splitlines()
    assert lines[0] == f"trained   11 steps, 1.00 epochs: 44 rows, {summary['tokens']:,} tokens"
    assert lines[2] == "attested  single, 1 process on the CPU"
    assert lines[4:6] == [
        "model     out/final (the whole model)",
        "try it    toolkit generate out/final 'Once upon a time'",
    ]
    card = (tmp_path / "out/final/README.md").read_text()
    assert "\n".join(lines[:4]) in card
    log = (tmp_path / "out/stdout.log").read_text()
    assert [*map(int, re.findall(r"^step (\d+)/11", log, re.M))] == [*range(1, 12)]

    # The command that it prints trains the model further.
    (go_on,) = [line.removeprefix("go on     ") for line in lines if line.startswith("go on")]
    assert go_on.startswith("toolkit train --strategy single --train_file ")
    again = begun(*shlex.split(go_on)[1:], "--max_steps", 2)
    further, _ = again.communicate(timeout=600)
    assert again.returncode == 0, further
    later = read_record(tmp_path / "out-next")["summary"]
    assert later["first_loss"] < summary["first_loss"] - 1
    assert later["epochs"] == 8 / 44

    # A run of other flags is refused by the ranks, and leaves the folder as it was.
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    other = begun("train", "--train_file", rows.name, *small, "--seed", 7, "--output_dir", "out")
    refused, _ = other.communicate(timeout=600)
    assert other.returncode == 2
    assert "toolkit: out holds the record of another run: seed is 42" in refused
    after = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert before == after


def test_a_stopped_training_saves_and_the_printed_command_ends_as_if_it_never_was(
    begun, small_training, rows, tmp_path
):
    flags = ["--strategy", "ddp", "--train_file", rows.name, "--max_steps", 24, *small_training]
    flags += ["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 1]
    whole = begun("train", *flags, "--output_dir", "whole")
    printed, _ = whole.communicate(timeout=600)
    assert whole.returncode == 0, printed

    stopped = begun("train", *flags, "--output_dir", "stopped")
    lines = []
    for line in stopped.stdout:
        lines.append(line)
        if line.startswith("step 1/"):
            stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(600) == 128 + signal.SIGTERM, lines
    assert "toolkit: SIGTERM: the ranks save after their step and leave" in "".join(lines)
    assert any(re.match("toolkit: preempted: saved at step ", line) for line in lines), lines
    (command,) = [line.partition("go on with: ")[2] for line in lines if "go on with: " in line]
    assert "--strategy ddp" in command
    resumed = begun(*shlex.split(command)[1:])
    printed, _ = resumed.communicate(timeout=600)
    assert resumed.returncode == 0, printed
    assert (tmp_path / "stopped" / "stdout-1.log").exists()
    one, other = (read_record(tmp_path / name) for name in ("whole", "stopped"))
    assert one["losses"] == [*other["earlier_losses"], *other["losses"]]
    assert one["summary"]["last_loss"] == other["summary"]["last_loss"]
    assert other["summary"]["first_loss"] == one["losses"][0]


def test_a_config_of_ones_own_launches_it(begun, rows, tmp_path):
    config = ROOT / "accelerate_configs" / "fsdp.yaml"
    words = ["--config", config, "--train_file", rows.name, "--max_steps", 2]
    done = begun("train", *words, "--num_processes", 2)
    printed, _ = done.communicate(timeout=600)
    assert done.returncode == 0, printed
    (folder,) = (tmp_path / "runs").glob("run-*")
    assert read_record(folder)["strategy"] == "fsdp"
    assert f"model     {folder.relative_to(tmp_path)}/final" in printed


OF_FSDP1 = """\
distributed_type: FSDP
num_processes: 2
mixed_precision: bf16
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: FULL_SHARD
"""

MISTAKES = [
    ("train --train-fil rows.jsonl", "Did you mean --train_file?"),
    ("train --train_file there.jsonl", "--train_file there.jsonl is not there"),
    ("train --strategy zero5", "There is no strategy 'zero5'. Did you mean 'zero3'?"),
    ("train --strategy ddp --config x.yaml", "--strategy and --config both name the launch."),
    ("train --config there.yaml", "--config there.yaml is not there"),
    ("train --config bad.yaml", "bad.yaml:3: mixed_precision: no is false in YAML"),
    ("train --config fsdp1.yaml", "toolkit translate fsdp1.yaml --to fsdp > fsdp2.yaml"),
    ("train --strategy", "Option '--strategy' requires an argument"),
    ("trainn", "No such command 'trainn'. Did you mean 'train'?"),
    ("compare --learning_rate 1e-4", "toolkit compare -- --learning_rate ..."),
    ("train --train_file rows.pdf", "ends in '.pdf'"),
    ("train --train_file empty.jsonl", "is empty: zero training rows"),
    ("train --model_name_or_path ./there", "--model_name_or_path ./there is not there"),
    ("train --model_name_or_path .", "is a folder without config.json"),
    ("train --dataset_name ./there", "--dataset_name ./there is not there"),
    ("train --max_steps many", "--max_steps many is not a whole number."),
    ("train --learning_rate 1e", "--learning_rate 1e is not a number."),
    ("train --max_length 1", "--max_length 1 leaves no token to predict"),
    ("train --method lorra", "invalid choice: 'lorra'"),
    ("train rows.jsonl", "'rows.jsonl' belongs to no flag."),
]
SHORT = MISTAKES[:10]
"""The others start a process each, as these do in part, and find the same kinds of mistakes."""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [pytest.param(*m, marks=[] if m in SHORT else [pytest.mark.long]) for m in MISTAKES],
    ids=lambda value: value,
)
def test_a_mistake_is_a_sentence_and_nothing_is_written(words, sentence, command, tmp_path):
    for name in ("rows.pdf", "empty.jsonl"):
        (tmp_path / name).write_text("x" if name == "rows.pdf" else "")
    (tmp_path / "bad.yaml").write_text(
        OF_FSDP1.replace("mixed_precision: bf16", "mixed_precision: no")
    )
    (tmp_path / "fsdp1.yaml").write_text(OF_FSDP1)
    before = sorted(tmp_path.iterdir())
    done = command(*shlex.split(words), cwd=tmp_path)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("toolkit: ")
    assert sentence in lines[0]
    assert sorted(tmp_path.iterdir()) == before


def started_on(gpus, flags, monkeypatch, folder):
    """Return how `toolkit train` ends on a machine with these GPUs, and the launch it makes there.

    The launch itself is left out: its ranks would need the GPUs.
    """
    started = []

    def run(command, **options):
        started.append((command, options))
        return Outcome(status="usage", reason="no GPU", tail=[], seconds=None, statuses=[])

    monkeypatch.setattr(train_command.environment, "gpus", lambda: gpus)
    monkeypatch.setattr(train_command, "run", run)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["toolkit", "train", *flags])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, started


def gpus_of(size):
    return [InstalledGpu(name="small", memory_bytes=int(size * GIB), capability=(8, 0))] * 2


@pytest.mark.long
def test_on_gpus_what_fits_is_launched_and_what_does_not_is_refused(
    monkeypatch, rows, as_launched, capsys
):
    folder = rows.parent
    code, started = started_on(gpus_of(40), ["--train_file", rows.name], monkeypatch, folder)
    assert code == 2  # of the launch that is left out
    ((command, options),) = started
    assert options["num_processes"] == 2
    assert options["environment"] == {}
    assert command[command.index("--strategy") + 1] == "ddp"
    config = command[command.index("--config_file") + 1]
    assert config.endswith("ddp.yaml")
    assert "toolkit: strategy ddp: the first that fits, with " in capsys.readouterr().out
    assert not [*folder.glob("runs/*")]

    flags = ["--train_file", rows.name, "--strategy", "ddp"]
    code, started = started_on(gpus_of(0.25), flags, monkeypatch, folder)
    assert (code, started) == (2, [])
    assert "toolkit: ddp is too large for this machine: it needs " in capsys.readouterr().err
    # A checkpoint that is named names the folder, too.
    resume = ["--anyway", "--resume_from_checkpoint", "runs/mine/checkpoint-3"]
    code, started = started_on(gpus_of(0.25), [*flags, *resume], monkeypatch, folder)
    ((_, options),) = started
    assert options["folder"] == Path("runs/mine")


def test_a_strategy_that_training_refuses_is_passed_over_by_name(monkeypatch, capsys):
    gpus = gpus_of(40)
    monkeypatch.setattr(train_command.environment, "gpus", lambda: gpus)
    command = TrainCommand(["--sync_each_batch", "True"], TrainOptions(), Console(width=200))

    def prepare(options):
        if "--strategies=zero1" in options:
            raise UsageError("--sync_each_batch is for FSDP2 and ddp, and this is zero1.")

    def choose(run, _, *, others, refused):
        assert others
        name = "fsdp" if "zero1" in refused else "zero1"
        return Choice(strategy=name, reason="the first that fits", fits=True)

    monkeypatch.setattr(command, "_prepare", prepare)
    monkeypatch.setattr(train_command, "choose", choose)
    assert command._chosen({"strategy": "ddp", "num_processes": 2}) == "fsdp"
    assert command._flags_of_ranks[-2:] == ["--strategy", "fsdp"]
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "toolkit: passed over zero1: --sync_each_batch is for FSDP2 and ddp, and this is zero1.",
        "toolkit: strategy fsdp: the first that fits",
    ]
