"""The planner against what GPUs measured: every committed result of `gpu_kit.py` is held to it.

A row's prediction is made anew from its settings, so a change of the planner is judged by all rows.
"""

import pytest
from benchmark_rows import Result, rows, write
from gpu_kit_fit import MARGIN, measured_rows, missed
from places import ROOT

COMMITTED = sorted((ROOT / "benchmarks" / "results").glob("????-??-??-gpu-kit.json"))
NONE_YET = pytest.param(
    None,
    marks=pytest.mark.skip(reason="no GPU result is committed yet, so the planner is held to none"),
    id="no GPU result is committed yet",
)
LIKELY = {"ratios": {"default": (1.15, 1.3)}, "workspaces": (20e6, 60e6), "context": (5e8, 9e8)}


def check(file):
    """Hold the planner to the rows of one result; return how many there were."""
    result = Result.read(file)
    assert not result.about["smoke"], f"{file.name} says nothing of a GPU"
    found = measured_rows(result.of("memory"))
    misses = [sentence for row in found for sentence in missed(row)]
    assert not misses, "\n".join(misses)
    return len(found)


@pytest.mark.parametrize(
    "file", COMMITTED or [NONE_YET], ids=lambda file: getattr(file, "stem", "")
)
def test_the_planner_holds_for_every_committed_row_that_a_gpu_measured(file):
    if not check(file):
        pytest.skip(f"{file.name} has no rows of the part memory that were measured")


def test_rows_inside_of_the_planners_intervals_pass_and_are_counted(tmp_path):
    made = rows(**LIKELY)
    assert check(write(tmp_path / "inside.json", made)) == len(made) == 24


def test_allocated_bytes_have_a_margin_and_no_more(tmp_path):
    [exact] = rows(**LIKELY, jobs=1)
    needed = exact["measured"]["whole"]["allocated_bytes"]
    inside, outside = (
        rows(**LIKELY, jobs=1, off_by=round(share * MARGIN * needed)) for share in (0.9, 1.2)
    )
    assert check(write(tmp_path / "inside.json", inside)) == 1
    with pytest.raises(AssertionError) as error:
        check(write(tmp_path / "outside.json", outside))
    assert_names(str(error.value), outside[0], "allocated")


def test_a_row_that_reserved_more_than_is_predicted_fails_by_its_name_and_numbers(tmp_path):
    made = rows(**LIKELY | {"ratios": {"expandable": (1.5, 1.5)}}, jobs=3)
    with pytest.raises(AssertionError) as error:
        check(write(tmp_path / "outside.json", made))
    for row in made:
        assert_names(str(error.value), row, "reserved")


def assert_names(text, row, kind):
    measured = row["measured"]["whole"][f"{kind}_bytes"] / 2**30
    assert f"{row['cell']}: {measured:.3f} GiB {kind}, and the planner says " in text


def test_rows_without_a_measurement_are_no_proof(tmp_path):
    made = rows(**LIKELY, jobs=4)
    made[0] |= {"status": "out of memory", "measured": {}}
    made[1]["measured"]["allocator_retries"] = 1
    made[2]["measured"]["allocated_before_bytes"] = 2**30
    made[3]["measured"]["whole"] = dict.fromkeys(made[3]["measured"]["whole"])
    assert check(write(tmp_path / "none.json", made)) == 0


def test_a_smoke_run_is_not_taken_for_a_gpu(tmp_path):
    with pytest.raises(AssertionError, match="says nothing of a GPU"):
        check(write(tmp_path / "smoke.json", rows(**LIKELY), smoke=True))
