"""`accelerate launch ... -m toolkit.train` with nothing but Accelerate in between."""

import json
import os
from collections import Counter

import launches
import pytest
from killing import Run
from places import ROOT, SCRIPTS

from toolkit.launching.status import REQUEST_FILE, read_statuses
from toolkit.records.record import FILLER_ID, read_record


def test_the_line_of_the_readme_trains_saves_and_records(launch, tmp_path):
    done = launch(
        *("zero2_offload", "-m", "toolkit.train", "--max_steps", 2, "--output_dir", tmp_path / "o"),
        *("--scale_lr", "sqrt", "--base_batch_size", 4),
        # As on a machine where DeepSpeed cannot compile.
        CXX="there-is-no-such-compiler",
        cold=True,
    )
    assert done.returncode == 0, done.stdout
    record = read_record(tmp_path / "o")
    assert record["strategy"] == "zero2_offload"
    assert record["rehearsal"] is True
    assert len(record["losses"]) == 2
    assert record["attestation"]["engaged"]["optimizer_class"] == "AdamW"
    assert record["training"]["cudnn_attention"] is False  # torch allows it unless it is told
    assert done.stdout.count("4 rows x 2 processes x 2 micro-batches = 16 rows; ") == 1
    assert "learning rate 0.002, by the sqrt rule from 0.001 at 4 rows\n" in done.stdout
    assert record["learning_rates"][0] == record["training"]["learning_rate"] == 0.002
    assert "torch's AdamW steps on the CPU instead" in done.stdout
    notes = record["attestation"]["notes"]
    assert any("no compiler" in note for note in notes)
    assert any("was not judged: DeepSpeed keeps only the norms" in note for note in notes)
    assert record["not_measured"]["memory.peak_bytes"].startswith("a rehearsal")
    assert (tmp_path / "o" / "final" / "model.safetensors").exists()
    assert (tmp_path / "o" / "steps.jsonl").read_text().count("\n") == 2


def test_a_finished_run_that_is_started_again_has_nothing_to_do(
    launch, launch_environment, tmp_path
):
    out = tmp_path / "o"
    words = ("--max_steps", 2, "--save_steps", 1, "--max_train_samples", 32, "--output_dir", out)

    def train(*more):
        command = [*launches.TRAIN, *words, *more]
        return launches.run(command, folder=tmp_path, environment=launch_environment)

    first = train()
    assert first.returncode == 0, first.stdout
    before = content(out)
    requeued = ("--resume_from_checkpoint", "last")
    for again in (train(), train(*requeued)):
        assert again.returncode == 0, again.stdout
        assert f"toolkit: finished at step 2: {out} holds this run" in again.stdout
        assert "resuming" not in again.stdout
    (status,) = read_statuses(out / "status")
    assert (status.state, status.step) == ("finished", 2)
    rank = out / "status" / "rank-0.json"
    assert content(out) | {rank: None} == before | {rank: None}

    other = train("--seed", 7, *requeued)
    assert other.returncode == 2, other.stdout
    assert f"{out} holds the record of another run: seed is 42 in the record and 7 now" in (
        other.stdout
    )
    evaluated = train("--sample_prompts", 1)
    assert evaluated.returncode == 2
    assert "sample_prompts is None in the record and 1 now" in evaluated.stdout
    two = launch("ddp", "-m", "toolkit.train", *words)
    assert two.returncode != 0
    assert "world size is 1 in the record and 2 now" in two.stdout
    assert content(out) | {rank: None} == before | {rank: None}
    (out / "final").rename(out / "moved")
    assert "holds the record of another run. Choose" in train().stdout


HANDBOOK = """\
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_process_port: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""zero3.yaml of huggingface/alignment-handbook, for two processes and any free port."""

OFFLOAD = (
    HANDBOOK.replace("optimizer_device: none", "optimizer_device: cpu")
    .replace("zero_stage: 3", "zero_stage: 2\n  gradient_accumulation_steps: 2")
    .replace("mixed_precision: bf16", "mixed_precision: 'no'")
    .replace("  zero3_init_flag: true\n  zero3_save_16bit_model: true\n", "")
)


@pytest.mark.parametrize(
    ("text", "engine", "strategy", "precision", "said"),
    [
        (
            HANDBOOK,
            "trainer",
            "zero3",
            "bf16",
            "computing in bf16, by the launcher's mixed_precision",
        ),
        (
            OFFLOAD,
            "loop",
            "zero2_offload",
            "no",
            "pin_memory: true -> false, no GPU to pin memory for",
        ),
    ],
    ids=["handbook", "offload"],
)
def test_deepspeed_fields_in_the_yaml_train_in_its_precision(
    launch, tmp_path, text, engine, strategy, precision, said
):
    config = tmp_path / "theirs.yaml"
    config.write_text(text)
    done = launch(
        *(config, "-m", "toolkit.train", "--engine", engine, "--max_steps", 2),
        *("--output_dir", tmp_path / "o"),
    )
    assert done.returncode == 0, done.stdout
    record = read_record(tmp_path / "o")
    assert (record["strategy"], record["precision"]) == (strategy, precision)
    assert record["attestation"]["engaged"]["precision"] == precision
    assert len(record["losses"]) == 2
    assert done.stdout.count(f"toolkit: {said}") + done.stdout.count(f"optimizer.{said}") == 1
    assert (tmp_path / "o" / "final" / "model.safetensors").exists()


def test_checkpointing_that_the_config_asks_for_stands_in_the_record(launch, tmp_path):
    bundled = (ROOT / "accelerate_configs" / "fsdp.yaml").read_text()
    config = tmp_path / "theirs.yaml"
    asked = bundled.replace("checkpointing: false", "checkpointing: true")
    assert asked != bundled
    config.write_text(asked)
    out = tmp_path / "o"
    script = SCRIPTS / "train_and_leave.py"
    done = launch(config, script, "--max_steps", 2, "--output_dir", out)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("leaving without a process group") == 2
    record = read_record(out)
    assert record["training"]["activation_checkpointing"] is True
    assert record["attestation"]["engaged"]["activation_checkpointing"] is True
    words = ("--gradient_checkpointing", "--output_dir", tmp_path / "twice")
    twice = launch(config, "-m", "toolkit.train", *words)
    assert "would both checkpoint the layers: leave one of them out" in twice.stdout


def test_a_launch_that_contradicts_its_arguments_is_one_sentence_and_leaves_nothing(
    launch, tmp_path
):
    done = launch(
        *("ddp", "-m", "toolkit.train", "--strategy", "zero3"),
        *("--output_dir", tmp_path / "o"),
    )
    assert done.returncode != 0
    said = "toolkit: --strategy zero3 was asked, but the launcher's config file is for ddp"
    assert said in done.stdout
    assert not (tmp_path / "o").exists()


def test_mistakes_leave_with_status_2_and_nothing_written(launch_environment, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "record.json").write_text("{}")
    unfinished = tmp_path / "unfinished"
    (unfinished / "checkpoint-5").mkdir(parents=True)
    for folder in (taken, unfinished):
        (folder / ".lock").write_text("toolkit run folder\n")
    somebodys = tmp_path / "somebodys"
    (somebodys / "final").mkdir(parents=True)
    for name in ("final/model.safetensors", "steps.jsonl", "train.log"):
        (somebodys / name).write_text("mine")
    (somebodys / "status").symlink_to(unfinished)
    late_evidence = ("--evidence", "kept", "--evidence_step", "9", "--max_steps", "8")
    cases = {
        ("--train_file", "missing.jsonl"): "missing.jsonl",
        ("--output_dir", str(taken)): "holds the record of another run",
        ("--output_dir", str(somebodys)): (
            "would write over it: final/, steps.jsonl, status/ (a symbolic link). Move it away"
        ),
        ("--output_dir", str(somebodys / "train.log" / "o")): "train.log is not a folder",
        ("--output_dir", "/proc/self/o"): "/proc/self is read-only, or not yours",
        ("--evidence", str(somebodys / "train.log" / "o")): "train.log is not a folder",
        ("--no_such_flag", "1"): "no_such_flag",
        ("--engine", "loop", "--torch_compile", "True"): "--torch_compile",
        ("--engine", "loop", "--accelerator_config", "{}"): "--accelerator_config",
        ("--evidence", "kept", "--torch_compile", "True"): "--evidence looks into",
        ("--evidence", "kept", "--evidence_step", "2", "--evidence_weights", str(taken)): (
            "holds no weights-before.safetensors. Name the --evidence folder of a run that kept"
        ),
        late_evidence: "--evidence_step 9 lies beyond the 8 steps of the training",
        # Packed rows for the speed come after the training, and nothing is kept of them.
        (*late_evidence, "--throughput_steps", "3"): "lies beyond the 8 steps of the training",
        ("--resume_from_checkpoint",): "pass the --output_dir of the run",
        ("--save_steps", "0"): "--save_steps 0",
        ("--save_strategy", "best"): "--save_strategy best is not known here",
        ("--ignore_data_skip", "True"): "--ignore_data_skip",
        ("--resume_from_checkpoint", "last", "--output_dir", str(unfinished / "checkpoint-5")): (
            "holds no checkpoint to resume from"
        ),
        ("--output_dir", str(unfinished)): "a run that was not finished, the newest of step 5",
        ("--output_dir", str(unfinished), "--resume_from_checkpoint"): (
            "checkpoint-5 has no manifest that can be read"
        ),
        ("--engine", "loop", "--eval_steps", "5"): "--eval_steps",
        ("--validation_file", "missing.txt"): "missing.txt",
        ("--learning_rate", "-1", "--max_steps", "0"): "--max_steps 0: use 1 or more, or -1",
        ("--deepspeed", "ds.json", "--push_to_hub"): "--deepspeed: the launcher's config file says",
        ("--fsdp", "full_shard"): "--fsdp: the launcher's config file says it",
    }
    inline = {  # what the launcher exports of a YAML that names no DeepSpeed file
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
    }
    accumulates = ("--gradient_accumulation_steps", "2")
    cases[accumulates] = "--gradient_accumulation_steps is 2 and the launcher's config says 4"
    accelerated = ("--fp16",)
    cases[accelerated] = (
        "--fp16 was passed, and the launcher's mixed_precision asks for bf16. Leave --fp16 out"
    )
    smoothed = ("--label_smoothing_factor", "0.1", "--max_train_samples", "9")
    cases[smoothed] = "--label_smoothing_factor divides by the tokens of each micro-batch"
    deepspeed_file = tmp_path / "ds.json"
    deepspeed_file.write_text('{"gradient_cliping": 1, "zero_optimization": {"stage": "three"}}')
    misspelt = ("--max_steps", "1")
    cases[misspelt] = (
        f"{deepspeed_file}: gradient_cliping is no key of DeepSpeed's (did you mean "
        "gradient_clipping?); zero_optimization.stage is 'three': "
    )
    exports = {
        ("--train_file", "missing.jsonl"): {"TOOLKIT_CACHE": str(tmp_path / "built")},
        accelerated: {"ACCELERATE_MIXED_PRECISION": "bf16"},
        accumulates: inline,
        misspelt: {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(deepspeed_file),
        },
    }
    left_over = ("--max_steps", "2")
    cases[left_over] = "unset ACCELERATE_USE_DEEPSPEED"
    exports[left_over] = {"ACCELERATE_USE_DEEPSPEED": "true"}
    before = content(tmp_path)
    for flags, said in cases.items():
        exported = exports.get(flags, {})
        done = launches.run(
            [*launches.TRAIN, *flags], folder=tmp_path, environment=launch_environment | exported
        )
        assert done.returncode == 2, done.stdout
        assert said in done.stdout
        assert "Traceback" not in done.stdout
    assert content(tmp_path) == before


def content(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_second_run_in_the_folder_of_one_that_works_there_is_refused_and_changes_nothing(
    launch, launch_environment, tmp_path
):
    run = Run("single", "loop", tmp_path / "first", launch_environment, ("--max_steps", 100_000))
    first = run.start()
    try:
        run.await_step(1, first)
        done = launch(
            *("ddp", "-m", "toolkit.train", "--output_dir", run.output),
            TOOLKIT_STATUS_DIR=str(tmp_path / "second"),
        )
        assert done.returncode != 0
        said = f"toolkit: Another run is working in {run.output}. Wait for it"
        assert done.stdout.count(said) == 1, done.stdout
        states = [each.state for each in read_statuses(tmp_path / "second")]
        # The launcher ends the second when the first has left, which is no later than its note.
        assert states in (["usage", "usage"], ["usage", "running"])
        assert first.poll() is None
        assert sorted(os.listdir(run.output)) == [".lock", "status", "steps.jsonl"]
        files = {name for name in os.listdir(run.output / "status") if name[0] != "."}
        files.discard(REQUEST_FILE)  # of the first run too
        assert {name.partition("rank-")[2].partition(".")[0] for name in files} == {"0"}
        before = run.statuses()[0].step
        run.await_step(before + 1, first)
    finally:
        run.kill_all(first)
    steps = [line["step"] for line in run.lines()]
    assert steps == sorted(set(steps))


def test_two_ranks_train_each_of_an_uneven_number_of_chats_once_an_epoch(launch, tmp_path):
    chats = [
        [{"from": "human", "value": f"say {n}"}, {"from": "gpt", "value": f"{n} " * (n % 5 + 1)}]
        for n in range(21)
    ]
    lines = (json.dumps({"conversations": chat}) + "\n" for chat in chats)
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    done = launch(
        *("fsdp", "-m", "toolkit.train", "--train_file", tmp_path / "chats.jsonl"),
        *("--num_train_epochs", 2, "--engine", "loop", "--output_dir", tmp_path / "o"),
    )
    assert done.returncode == 0, done.stdout
    record = read_record(tmp_path / "o")
    assert len(record["losses"]) == 4  # 16 rows a step: two steps an epoch, of which one is short
    for first in (0, 2):
        ranks = [ids for step in record["sample_ids"][first : first + 2] for ids in step]
        read = Counter(row for ids in ranks for row in ids)
        assert read.pop(FILLER_ID) == 11
        assert read == Counter(range(21))
    idle = record["sample_ids"][1][1]
    assert set(idle[-4:]) == {FILLER_ID}  # the second rank's last micro-batch had no row at all
    template = (tmp_path / "o" / "final" / "chat_template.jinja").read_text()
    assert "{%- generation -%}" in template


def test_what_an_update_broke_is_not_saved_and_the_run_has_failed(launch, tmp_path):
    """Rows of the embedding without a gradient become 0 / 0; the loss was that of before."""
    done = launch(
        *("single", "-m", "toolkit.train", "--max_steps", 2, "--adam_epsilon", 0),
        *("--save_steps", 1, "--output_dir", tmp_path / "o"),
    )
    assert done.returncode == 1, done.stdout
    said = "checkpoint-1 was not saved: the last update left weights that are not finite (model."
    assert said in done.stdout
    assert not [path.name for path in (tmp_path / "o").iterdir() if path.name[0] in "cf"]
    assert not (tmp_path / "o" / "record.json").exists()


def test_a_model_that_the_last_update_broke_is_not_saved(launch, tmp_path):
    done = launch(
        *("single", "-m", "toolkit.train", "--max_steps", 1, "--adam_epsilon", 0),
        *("--engine", "loop", "--output_dir", tmp_path / "o"),
    )
    assert done.returncode == 1, done.stdout
    assert "final was not saved: the last update left weights that are not" in done.stdout
    assert {path.name for path in (tmp_path / "o").iterdir()} <= {".lock", "status", "steps.jsonl"}
