"""The script that fits the allocator's constants finds those that rows were made with."""

import subprocess
import sys

import pytest
from benchmark_rows import job_of, rows, write
from gpu_kit_fit import TODAY, Constants, fit, key_of, measured_rows, outer, predicted
from places import ROOT

from toolkit.planning.memory.estimate import MOVING, estimate_memory

MIB = 1 << 20
KNOWN = {
    "ratios": {"default": (1.043, 1.506), "expandable": (1.012, 1.068)},
    "workspaces": (2 * 40 * MIB, 2 * 48 * MIB),
    "context": (600 * MIB, 700 * MIB),
}


def run(file):
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_kit_fit.py"), str(file)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def of(name, output):
    """The cells of a row of a table of Markdown."""
    line = next(line for line in output.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_constants_that_rows_were_made_with_are_found():
    found = fit(measured_rows(rows(**KNOWN)))
    default, expandable = (found.moving[name, "plain"] for name in ("default", "expandable"))
    assert (default.low, default.high) == pytest.approx((1.04, 1.51))
    assert (expandable.low, expandable.high) == pytest.approx((1.01, 1.07))
    assert (found.workspaces.low, found.workspaces.high) == (80 * MIB, 96 * MIB)
    assert (found.context.low, found.context.high) == (600 * MIB, 700 * MIB)


def test_what_is_fitted_is_rounded_outwards_and_what_is_round_stays():
    assert outer([1.021, 1.379], step=0.01) == outer([1.02, 1.38], step=0.01)
    assert outer([8.125, 32.0], step=0.125).high == 32


def test_with_the_fitted_constants_no_row_is_outside():
    """With today's they are: more is reserved than those say, and less."""
    made = rows(**KNOWN, constants=fit(rows(**KNOWN)))
    fitted = fit(made)
    assert any(outside(row, TODAY) for row in made)
    assert not any(outside(row, fitted) for row in made)


def outside(row, constants):
    """Whether a peak of a row is not where the constants have it."""
    settings = row["settings"]
    intervals = predicted(estimate_memory(job_of(settings)), constants, key_of(settings))
    return any(
        not interval.low <= row["measured"]["whole"][f"{kind}_bytes"] <= interval.high
        for kind, interval in intervals.items()
    )


def test_other_workspaces_move_both_ends_of_a_prediction():
    [row] = rows(**KNOWN | {"ratios": {"default": (1.2, 1.2)}}, jobs=1)
    estimate, key = estimate_memory(job_of(row["settings"])), key_of(row["settings"])
    more = Constants(
        moving=TODAY.moving,
        workspaces=TODAY.workspaces + TODAY.workspaces,
        context=TODAY.context,
    )
    before, after = (predicted(estimate, each, key)["allocated"] for each in (TODAY, more))
    assert before == estimate.allocated
    assert after == estimate.allocated + TODAY.workspaces


def test_the_script_shows_both_constants_residuals_and_what_is_missed(tmp_path):
    done = run(write(tmp_path / "result.json", rows(**KNOWN)))
    assert done.returncode == 0, done.stderr
    assert of("MOVING, plain", done.stdout)[1:3] == ["1.01 to 1.40", "1.04 to 1.51"]
    assert of("EXPANDABLE, plain", done.stdout)[1:3] == ["1.00 to 1.12", "1.01 to 1.07"]
    counts = {kind: int(of(f"MOVING, {kind}", done.stdout)[4]) for kind in MOVING}
    assert counts == {"plain": 16, "checkpointed": 5, "logits": 3}
    assert of("WORKSPACES, MiB", done.stdout)[2:] == ["80.00 to 96.00", "88.00", "48"]
    assert of("CONTEXT, MiB", done.stdout)[2] == "600.00 to 700.00"
    allocated, reserved = of("llama-1b 2x2048 adamw_8bit, default", done.stdout)[2:7:3]
    assert allocated == "0"
    assert reserved.startswith("-")
    assert "\nllama-1b 2x2048 adamw_8bit, default: " in done.stdout


def test_one_setting_of_the_allocator_alone_is_fitted_and_the_other_named(tmp_path):
    made = rows(**KNOWN, jobs=8)
    few = [row for row in made if row["settings"]["allocator"] == "default"] + made[8:10]
    done = run(write(tmp_path / "result.json", few))
    assert done.returncode == 0, done.stderr
    assert of("EXPANDABLE", done.stdout)[2:] == ["too few rows", "", "2"]
    assert of("MOVING, plain", done.stdout)[4] == "6"


@pytest.mark.parametrize(
    ("made", "about", "said"),
    [
        ({"jobs": 3}, {}, "too few rows of the part memory to fit to: 3 default, 3 expandable"),
        ({}, {"smoke": True}, "is a smoke run on a CPU"),
    ],
    ids=["few", "smoke"],
)
def test_what_can_not_be_fitted_to_ends_with_a_reason(tmp_path, made, about, said):
    done = run(write(tmp_path / "result.json", rows(**KNOWN, **made), **about))
    assert done.returncode == 2
    assert said in done.stderr
    assert not done.stdout
