"""`toolkit doctor PATH`: the cause of a failed run, from its folder or from any log."""

import json
import os
import re
import subprocess
import sys

import pytest
from example_record import RECORD
from typer.testing import CliRunner

from toolkit.cli import app
from toolkit.jobs.terms import Interval
from toolkit.launching.processes import start_of
from toolkit.planning.of_run import job_of
from toolkit.planning.speed.estimate import estimate_speed
from toolkit.planning.speed.gpus import gpu as planned_gpu
from toolkit.records.json_files import write_json

OUT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
CLOSED = "RuntimeError: Connection closed by peer"
TRACE = 'Traceback (most recent call last):\n  File "a.py", line 3, in forward\n'
HEAVY = {"torch", "transformers", "accelerate", "deepspeed", "datasets", "numpy"}


def doctor(*words):
    result = CliRunner().invoke(app, ["doctor", *map(str, words)], catch_exceptions=False)
    return result.exit_code, result.output


def findings(*words):
    code, output = doctor(*words, "--json")
    answer = json.loads(output)
    assert code == (1 if answer["failed"] else 0)
    return [(finding["level"], finding["name"], finding) for finding in answer["findings"]]


def only(*words):
    ((level, name, finding),) = findings(*words)
    return level, name, finding["text"], finding["evidence"]


@pytest.fixture
def run(tmp_path):
    """Write the status files and the log of a run, and return its folder."""

    def write(*statuses, log=None, record=None):
        (tmp_path / "status").mkdir(exist_ok=True)
        for rank, (state, error) in enumerate(statuses):
            kind, _, message = (error or "").partition(": ")
            recorded = {"type": kind.rpartition(".")[2], "message": message}
            content = {
                "schema": 1,
                "rank": rank,
                "pid": 2**22 + 1 + rank,
                "state": state,
                "step": 3,
                "time": 0.0,
                "monotonic": 10.0 - rank,
                "started": 0.0,
                "error": recorded | {"traceback": f"{TRACE}{error}\n"} if error else None,
                "peak_bytes": None,
            }
            (tmp_path / "status" / f"rank-{rank}.json").write_text(json.dumps(content))
        if log is not None:
            (tmp_path / "stdout.log").write_text(log)
        if record is not None:
            write_json(tmp_path / "record.json", RECORD | record)
        return tmp_path

    return write


def test_a_path_that_does_not_exist_is_exit_code_2(tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "toolkit.cli", "doctor"]
    done = subprocess.run([*command, tmp_path / "none"], capture_output=True, text=True)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert lines == [
        f"toolkit: {tmp_path}/none does not exist. Name a log file, or the folder of a run."
    ]
    names = re.findall(r"^import time:.*\|\s*(\S+)$", done.stderr, re.MULTILINE)
    assert not HEAVY & {name.partition(".")[0] for name in names}
    (tmp_path / "empty").mkdir()
    assert subprocess.run([*command, tmp_path / "empty"], capture_output=True).returncode == 2


def test_a_log_prints_its_cause_its_fix_and_its_lines(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(f"step 1\n{TRACE}{OUT}\n")
    code, output = doctor(log)
    assert code == 1
    first, fix, line = output.splitlines()
    assert first.startswith(
        "fail  cuda-out-of-memory: The GPU ran out of memory. It was in forward"
    )
    assert "Activation checkpointing" in fix
    assert line == f"      line 4: {OUT}"


def test_a_healthy_log_says_so(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("".join(f"{{'loss': '2.{step}'}}\n" for step in range(9)))
    assert doctor(log) == (0, "ok    run: None of its 9 lines tells of a failure.\n")


def test_a_run_that_only_seemed_to_go_well_is_no_ok(tmp_path, run):
    log = tmp_path / "train.log"
    log.write_text("{'loss': '0.0', 'grad_norm': 'nan'}\n" * 9 + "{'train_loss': '0.0'}\n")
    assert only(log)[:2] == ("fail", "not-finite")
    steps = "{'loss': '2.5', 'grad_norm': '1.5'}\n" * 9
    log.write_text(steps)
    assert only(log)[:2] == ("warn", "nothing-learned")
    folder = run(("finished", None), ("finished", None), log=steps)
    assert only(folder)[:2] == ("warn", "nothing-learned")


def test_the_logs_of_ranks_in_folders_are_read_together(tmp_path):
    """As torchrun --log-dir leaves them."""
    for rank, error in enumerate([CLOSED, "ValueError: the flux is off"]):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(f"{TRACE}{error}\n")
    level, name, text, evidence = only(tmp_path)
    assert (level, name) == ("fail", "unknown")
    assert "The first error of rank 1: ValueError: the flux is off" in text
    assert evidence == ["line 3, rank 1: ValueError: the flux is off"]


def test_a_rank_that_ran_out_alone_is_named_from_its_status(run):
    folder = run(("failed", CLOSED), ("failed", OUT), ("running", None))
    level, name, text, evidence = only(folder)
    assert (level, name) == ("fail", "cuda-out-of-memory")
    assert text.startswith("On rank 1 alone: ")
    assert evidence == [f"rank 1: {OUT}"]


def test_a_kill_is_read_from_the_log_beside_the_neighbours_error(run):
    report = "Root Cause (first observed failure):\n  rank      : 1 (local_rank: 1)\n"
    report += "  exitcode  : -9 (pid: 7)\n"
    _, name, text, _ = only(run(("failed", CLOSED), ("running", None), log=report))
    assert (name, text.partition(" was")[0]) == ("killed", "Rank 1")


def test_a_rank_that_vanished_without_a_word_is_unknown(run):
    level, name, text, _ = only(run(("finished", None), ("running", None)))
    assert (level, name) == ("fail", "unknown")
    assert text.startswith("Rank 1 was gone after step 3")


def test_a_rank_that_left_early_is_named_and_not_the_one_that_lost_it(run):
    folder = run(("failed", CLOSED), ("running", None))
    level, name, text, (line,) = only(folder)
    assert (level, name) == ("fail", "neighbour-gone")
    assert text.startswith("Rank 1 was gone after step 3, before the run was over")
    assert "exit code 0" in text
    assert line == f"rank 0: {CLOSED}"


def test_a_run_that_goes_on_ended_well_or_was_preempted_is_no_failure(run):
    folder = run(("finished", None), record={"status": "ok"})
    assert only(folder)[:3] == ("ok", "run", "It ended well.")
    file = folder / "status" / "rank-0.json"
    content = json.loads(file.read_text())
    alive = {"state": "running", "pid": os.getpid(), "started": start_of(os.getpid())}
    file.write_text(json.dumps(content | alive))
    assert "still running" in only(folder)[2]
    saved = {"type": "Preempted", "message": "Saved after step 3.", "traceback": ""}
    file.write_text(json.dumps(content | {"state": "preempted", "error": saved}))
    assert only(folder)[::2] == ("warn", "Saved after step 3.")


def test_a_slow_run_is_a_warning_and_no_failure(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("time (ms) | fwd: 30.0 | bwd: 60.0 | bwd_allreduce: 50.0 | step: 10.0\n" * 3)
    (ok, _, _), (level, name, finding) = findings(log)
    assert (ok, level, name) == ("ok", "warn", "slow-communication")
    assert "50% of the step" in finding["text"]


def test_a_run_whose_links_take_much_of_its_step_is_a_warning(run, tmp_path):
    """One run of ours has no DDP to be held against: the planner says what its links take."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    gpu = {"name": "NVIDIA GeForce RTX 4090", "memory_bytes": 24 * 2**30}
    facts = {
        "strategy": "zero3",
        "precision": "bf16",
        "rehearsal": False,
        "environment": {"gpus": [gpu, gpu]},
        "model": RECORD["model"] | {"path": str(tmp_path)},
        "step_seconds": {"median": 0.5, "p90": 0.6},
    }
    found = findings(run(("finished", None), record=facts))
    assert [(level, name) for level, name, _ in found] == [
        ("ok", "run"),
        ("warn", "slow-communication"),
    ]
    text = found[1][2]["text"]
    speed = estimate_speed(job_of(RECORD | facts), planned_gpu(gpu["name"]))
    kinds = ("all-gather of ", "reduce-scatter of ", "all-reduce of ", "reduce of ")
    sent = [term.seconds for term in speed.terms if term.name.startswith(kinds)]
    assert len(sent) > 1
    assert speed.sending == Interval.total(sent)
    low, high = (f"{seconds / 0.5:.0%}" for seconds in (speed.sending.low, speed.sending.high))
    assert f"By the planner {low} to {high} of its step of 0.5 s go to sending" in text
    assert "between 2 x RTX 4090" in text
    for less in (
        {"step_seconds": {"median": speed.sending.middle * 5.1, "p90": 60.0}},
        {"rehearsal": True},
        {"environment": {"gpus": [gpu, gpu | {"name": "NVIDIA L4"}]}},
        {"environment": {"gpus": [gpu | {"name": "NVIDIA Z1"}] * 2}},
        {"step_seconds": None},
    ):
        ((level, _, _),) = findings(run(("finished", None), record=facts | less))
        assert level == "ok"


def test_control_characters_of_a_log_do_not_reach_the_terminal(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(f"{TRACE}ValueError: a\x1b[31m b\x07 c\u202e\n")
    output = doctor(log)[1]
    assert not {"\x1b", "\x07", "\u202e"} & set(output)
