"""The scripts of `examples/`, as people have them at home, under the configs made for GPUs."""

import difflib
import json
import sys

import launches
import pytest
from places import ROOT

from toolkit.comparing.parity.gates import limit_of

EXAMPLES = ROOT / "examples"
SCRIPTS = ("trainer.py", "toolkit_trainer.py", "accelerate_loop.py", "trl_sft.py")
STRATEGIES = ("ddp", "zero2", "zero3", "fsdp")
STEPS = 4
COMMON = ("--max_steps", STEPS, "--learning_rate", 1e-3)
TIERS = {
    # The cheapest script, under the config that changes most.
    ("accelerate_loop.py", "zero3"): pytest.mark.short,
    ("trainer.py", "ddp"): pytest.mark.long,
    ("toolkit_trainer.py", "fsdp"): pytest.mark.long,
    ("trl_sft.py", "zero2"): pytest.mark.long,
}
"""Each script and each config once; every script under every config is a sweep."""


def flags_of(script, rows, folder):
    """Return the flags for so many rows in each process's forward."""
    if script == "accelerate_loop.py":
        return *COMMON, "--batch_size", rows
    size = ("--per_device_train_batch_size", rows)
    return *COMMON, *size, "--save_strategy", "no", "--output_dir", folder


def losses_of(done, folder):
    """Return the losses that a Trainer keeps in its state, or those that a loop prints."""
    assert done.returncode == 0, done.stdout
    state = folder / "trainer_state.json"
    if state.exists():
        history = json.loads(state.read_text())["log_history"]
    else:
        lines = done.stdout.splitlines()
        history = [json.loads(line) for line in lines if line.startswith('{"step"')]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.fixture(scope="module")
def control(launch_environment, tmp_path_factory):
    """Run a script as one process, not as a rehearsal, and return its losses."""
    known = {}

    def losses(script):
        script = script.replace("toolkit_", "")  # the script that it differs from by two lines
        if script not in known:
            folder = tmp_path_factory.mktemp("control")
            command = (sys.executable, EXAMPLES / script, *flags_of(script, 8, folder))
            done = launches.run(command, environment=launch_environment)
            known[script] = losses_of(done, folder)
        return known[script]

    return losses


@pytest.mark.parametrize(
    ("script", "strategy"),
    [
        pytest.param(script, name, marks=TIERS.get((script, name), pytest.mark.sweep))
        for script in SCRIPTS
        for name in STRATEGIES
    ],
)
def test_an_example_learns_under_every_config_what_one_process_learns(
    script, strategy, launch, control, tmp_path
):
    words = (EXAMPLES / script, *flags_of(script, 4, tmp_path))
    done = launch(strategy, "-m", "toolkit.rehearse", *words)
    losses = losses_of(done, tmp_path)
    assert f"toolkit: attested {strategy}: " in done.stdout, done.stdout
    assert len(losses) == STEPS
    assert losses[0] - losses[-1] > 0.1  # it learns, far beyond the limit below
    assert losses == pytest.approx(control(script), abs=limit_of("loss", "no"))


def test_our_trainer_takes_the_place_of_transformers_by_two_lines():
    texts = [(EXAMPLES / name).read_text().splitlines() for name in SCRIPTS[:2]]
    changed = [line for line in difflib.ndiff(*texts) if line[0] in "+-"]
    assert [line[0] for line in changed].count("+") == 2
    assert [line[0] for line in changed].count("-") == 2


def test_the_examples_stay_small():
    assert {path.name for path in EXAMPLES.glob("*.*")} == {*SCRIPTS, "README.md", "data.jsonl"}
    for name in SCRIPTS:
        assert len((EXAMPLES / name).read_text().splitlines()) < 60, name
    assert len((EXAMPLES / "README.md").read_text().splitlines()) <= 25
    assert (EXAMPLES / "data.jsonl").stat().st_size <= 60_000
