"""Cells on the installed stack, on one with a fault in it, and what is known of releases."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import accelerate
import pytest
from typer.testing import CliRunner

from toolkit import environment, stack
from toolkit.cli import app
from toolkit.doctor.software import check_packages
from toolkit.planning.plan import plan
from toolkit.planning.render.recommendations import silent_faults
from toolkit.strategies import STRATEGIES
from toolkit.verifying import verify
from toolkit.verifying.verify import Found, all_cells, compared, faults_of, lines

DIVIDES = "loss = loss / self.gradient_accumulation_steps"
"""Of accelerate 1.15, `Accelerator.backward`."""


@pytest.fixture(scope="module")
def faulty_python(tmp_path_factory):
    """A Python whose Accelerate forgets that a loss is of one of several micro-batches."""
    place = tmp_path_factory.mktemp("faulty")
    venv.create(place, with_pip=False, symlinks=True)
    site = next(place.glob("lib/python*/site-packages"))
    installed = Path(accelerate.__file__).parent
    (site / "base.pth").write_text(f"{installed.parent}\n")
    shutil.copytree(installed, site / "accelerate", ignore=shutil.ignore_patterns("__pycache__"))
    file = site / "accelerate" / "accelerator.py"
    text = file.read_text()
    assert text.count(DIVIDES) == 1
    file.write_text(text.replace(DIVIDES, "pass"))
    return place / "bin" / "python"


def run(*words, cache):
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.cli", "verify", *words],
        env={**os.environ, "TOOLKIT_CACHE": str(cache), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.mark.short
def test_a_cell_is_right_here_and_red_where_accelerate_does_not_divide(faulty_python, tmp_path):
    code, printed = run("--only", "ddp-reused", cache=tmp_path)
    assert (code, printed.count("\n")) == (0, 1)
    assert printed.startswith("toolkit verify: 1 of 1 cells right over gloo")

    code, printed = run("--python", str(faulty_python), "--only", "ddp-reused", cache=tmp_path)
    assert code == 1
    red, cause, total = printed.splitlines()
    assert red.startswith("wrong: ddp-reused (DDP, a layer used twice, tied weights): step 1: ")
    assert "misses the true one by 2 of its size, and has 3 of its size" in red
    assert cause.strip().startswith("unknown: no thread is known")
    assert total.startswith("toolkit verify: 0 of 1 cells right")
    assert not (tmp_path / "verified").exists()  # neither had all cells


@pytest.mark.long
def test_an_upgrade_is_the_same_or_broken_and_zero2_is_right(faulty_python, tmp_path):
    code, printed = run("--against", sys.executable, "--only", "zero2-tied", cache=tmp_path)
    assert (code, printed.strip()) == (0, "the same")
    code, printed = run("--only", "trainer-ddp", cache=tmp_path)
    assert (code, "1 of 1 cells right" in printed) == (0, True)
    words = ("--against", str(faulty_python), "--only", "ddp-reused,ddp-clip", "--json")
    code, printed = run(*words, cache=tmp_path)
    found = json.loads(printed)
    assert (code, found["answer"]) == (1, "broken")
    assert found["words"][0].startswith(
        "ddp-clip (DDP, clipping): right here; wrong there step 1: the norm 7.3"
    )


@pytest.mark.long
def test_a_rank_that_hangs_ends_or_raises_is_no_right_answer():
    program = """
import os, time, stand_alone
for call in ((time.sleep, [(0,), (60,)]), (os._exit, [(3,)]), (int, [("1",), ("x",)]), (int, [()])):
    print(*stand_alone.forked(2.0, *call).values())
"""
    folder = Path(verify.__file__).parent
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "raised TimeoutError: a rank was ended, or not done after 2 s",
        "raised BrokenProcessPool: a rank was ended, or not done after 2 s",
        "raised ValueError: invalid literal for int() with base 10: 'x'",
        "right",
    ]


def test_mistakes_are_named():
    done = CliRunner().invoke(app, ["verify", "--only", "nix"])
    assert "no cell is named so" in str(done.exception)
    done = CliRunner().invoke(app, ["verify", "--python", "/no/python", "--only", "ddp"])
    assert str(done.exception) == "/no/python is no Python that can be started. Name its path."


def test_a_python_without_torch_could_not_run_the_cells(tmp_path):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = tmp_path / "bare" / "bin" / "python"
    assert run("--python", str(python), "--only", "ddp", cache=tmp_path) == (3, "")


@pytest.mark.parametrize(
    ("cell", "releases", "thread"),
    [
        ("zero2-offload", {"deepspeed": "0.18.5"}, "issues/7967"),
        ("zero1-accumulates-fp32", {"deepspeed": "0.18.9"}, "issues/7985"),
        ("fsdp-resume-lora", {"accelerate": "1.14.0"}, "pull/4206"),
        ("trainer-zero3", {"deepspeed": "0.18.3"}, "issues/3877"),
        ("zero0-bf16", {"deepspeed": "0.19.0"}, "issues/3877"),
        ("zero2", {"deepspeed": "0.19.8"}, None),
        ("fsdp-resume-lora", {"accelerate": "1.15.0"}, None),
        ("zero2-onecycle", {"deepspeed": "0.19.0"}, "pull/8179"),
        ("trainer-tensor", {"transformers": "5.0.0"}, "pull/45994"),
        ("trainer-ddp", {"transformers": "5.0.0"}, None),
        ("trainer-ddp", {"transformers": "5.4.0"}, "issues/40709"),
    ],
)
def test_a_red_cell_is_matched_to_its_thread(cell, releases, thread):
    of_name = all_cells()[cell]
    found = Found(
        versions=releases, cells={cell: {"answer": "wrong", "words": "step 1", "seconds": 1}}
    )
    first = next(iter(faults_of(of_name, "wrong", releases)), None)
    assert (first and first["link"].endswith(thread)) or first is thread
    assert ("unknown: " if thread is None else thread) in lines(found)[1]


def test_the_table_names_cells_that_there_are():
    names = {*all_cells()}
    assert len(names) == len(verify.table()["cell"]) >= 40
    keys = verify.settings_of(all_cells()["zero2"]).keys()
    for fault in stack.known_faults():
        assert set(fault.get("cells", ())) <= names
        assert fault["where"].keys() <= keys
        assert "first" in fault or "meanwhile" in fault


ZERO2 = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "gradient_accumulation_steps": 3,
    "bf16": {"enabled": True},
}


@pytest.mark.parametrize(
    ("config", "release", "threads"),
    [
        (ZERO2, "0.18.5", {"7967", "8224"}),
        ({**ZERO2, "gradient_accumulation_steps": 1}, "0.18.5", {"8224"}),
        ({**ZERO2, "bf16": {"enabled": "auto"}}, "0.19.2", {"8224"}),
        ({**ZERO2, "bf16": {"enabled": False}}, "0.19.2", set()),
        (ZERO2, "0.19.8", set()),
    ],
)
def test_a_config_meets_the_faults_of_its_settings_alone(config, release, threads, monkeypatch):
    monkeypatch.setattr(environment, "versions", lambda: {"deepspeed": release, "torch": "2.9"})
    met = stack.met(stack.settings_of_deepspeed(config))
    found = {fault["link"].rpartition("/")[2] for fault in met}
    assert threads <= found
    assert {"7967", "8224"} & found == threads & {"7967", "8224"}
    for fault in met:
        assert stack.sentence(fault).startswith(f"deepspeed {release}: ")
        assert stack.advice([fault]).startswith("pip install 'deepspeed>=")


@pytest.mark.parametrize(
    ("engine", "release", "named"),
    [("trainer", "0.18.3", 1), ("loop", "0.18.3", 0), ("trainer", "0.19.0", 0)],
)
def test_a_loop_of_ours_is_not_blamed_for_what_it_does_by_itself(engine, release, named):
    """Its losses are scaled once under deepspeed 0.19.0, too: .ci/versions compares it there."""
    settings = stack.settings_of(
        STRATEGIES["zero2"], accumulation=2, precision="no", adapters=False, engine=engine
    )
    met = stack.met(settings, {"deepspeed": release, "torch": "2.9"})
    assert sum("divide" in fault["text"] for fault in met) == named


def test_two_stacks_are_the_same_changed_or_broken():
    right = {"answer": "right", "norm": 1.0}
    here = Found(defaults={"a.clip": "0.0", "b": "1"}, cells={"ddp": right})
    assert compared(here, here)[1] == ["the same"]
    moved = Found(defaults={"a.clip": "1.0", "c": "1"}, cells={"ddp": {**right, "norm": 1.0001}})
    assert compared(here, moved)[1] == ["changed", "a.clip 0.0 -> 1.0"]
    other = Found(cells={"ddp": {**right, "norm": 1.1}})
    document, said = compared(here, other)
    assert document["answer"] == said[0] == "broken"
    assert said[1:] == ["ddp (DDP, 3 micro-batches): the gradients have norm 1.1 there, 1 here"]


def test_what_was_found_is_cited_until_a_release_moves(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    assert environment.snapshot()["verified"] is None
    environment.stack_file().parent.mkdir()
    for answer, level in (("wrong", "warn"), ("right", "ok")):
        content = {"words": "toolkit verify: 2 of 2", "cells": {"ddp": {"answer": answer}}}
        environment.stack_file().write_text(json.dumps(content))
        assert environment.snapshot()["verified"] == "toolkit verify: 2 of 2"
        levels = [one.level for one in check_packages() if one.name == "verified"]
        assert levels == [level]
    monkeypatch.setattr(environment, "versions", lambda: {"torch": "9"})
    assert environment.verified() == {}


def test_check_and_recommend_warn_of_a_fault_that_the_settings_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "versions", lambda: {"deepspeed": "0.18.3", "torch": "2.9"})
    file = tmp_path / "zero2.json"
    file.write_text(json.dumps({**ZERO2, "train_micro_batch_size_per_gpu": 1}))
    done = CliRunner().invoke(app, ["check", str(file), "--json"])
    found = [one for one in json.loads(done.stdout)["findings"] if one["rule"] == "silent-fault"]
    assert any("deepspeed 0.18.3: ZeRO-1 and ZeRO-2 with CPU offload" in o["text"] for o in found)
    assert {one["severity"] for one in found} == {"warning"}

    (row,) = plan("7b", strategies="zero2_offload", gpus=2, gpu="L4", accumulation=3).rows
    warned = [*silent_faults(row.job)]
    assert any(line.startswith("Before you train: deepspeed 0.18.3: ") for line in warned)
    (row,) = plan("7b", strategies="ddp", gpus=2, gpu="L4", accumulation=3).rows
    assert not [*silent_faults(row.job)]
    monkeypatch.setattr(environment, "versions", lambda: {"deepspeed": "0.19.8", "torch": "2.9"})
    done = CliRunner().invoke(app, ["check", str(file), "--json"])
    assert "silent-fault" not in done.stdout


@pytest.mark.parametrize("verified", ["toolkit verify: 2 of 2 cells right", None])
def test_a_card_cites_what_was_verified(verified):
    from toolkit.training.card import Card

    text = Card(base="a", versions={"torch": "2.13"}, verified=verified).text(date="2026-01-01")
    assert ("toolkit verify" in text) is (verified is not None)
    assert text.endswith("\n\nSaved on 2026-01-01.\n")
