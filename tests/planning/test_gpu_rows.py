"""The planner against what GPUs measured: every committed result of the GPU kit and the speed lab.

A row's prediction is made anew from its settings, so a change of the planner is judged by all rows.
"""

import pytest
from benchmark_rows import Result, rows, write
from gpu_kit_fit import (
    COPIED_MARGIN,
    MARGIN,
    copied_rows,
    gpu_of,
    lab_planned,
    lab_rows,
    measured_rows,
    miscounted,
    missed,
    seconds,
    timed_rows,
)
from kit import offload
from kit.cells import Machine
from places import ROOT

COMMITTED = sorted((ROOT / "benchmarks" / "results").glob("????-??-??-gpu-kit.json"))
LAB = sorted((ROOT / "benchmarks" / "results").glob("????-??-??-speed-lab.json"))
LIKELY = {"ratios": {"default": (1.15, 1.3)}, "workspaces": (20e6, 60e6), "context": (5e8, 9e8)}


def check(file):
    """Hold the planner to the rows of one result; return how many there were."""
    result = Result.read(file)
    assert not result.about["smoke"], f"{file.name} says nothing of a GPU"
    found, copied = measured_rows(result.of("memory")), copied_rows(result.of("offload"))
    misses = [sentence for row in found for sentence in missed(row)]
    misses += [sentence for row in copied for sentence in miscounted(row)]
    assert not misses, "\n".join(misses)
    return len(found) + len(copied)


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_the_planner_holds_for_every_committed_row_that_a_gpu_measured(file):
    if not check(file):
        pytest.skip(f"{file.name} has no rows of the parts memory and offload that were measured")


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_the_planned_seconds_of_a_step_are_those_that_a_gpu_took(file):
    result = Result.read(file)
    found = timed_rows(result.of("speed"))
    if not found:
        pytest.skip(f"{file.name} has no rows of the part speed that were measured")
    for row in found:
        planned, measured = seconds(row, gpu_of(result))
        assert planned.low < measured < planned.high, row["cell"]
        assert planned.middle == pytest.approx(measured, rel=0.1), row["cell"]


@pytest.mark.parametrize("file", LAB, ids=lambda file: file.stem)
def test_the_planner_holds_for_every_row_of_the_speed_lab_that_it_can_plan(file):
    result = Result.read(file)
    found = lab_rows(result.of("lab"))
    assert {row["settings"]["speed"].get("bf16_weights") for row in found} == {None, True}
    for row in found:
        allocated, planned, seconds = lab_planned(row, gpu_of(result))
        measured = row["measured"]["peak_allocated_bytes"]
        margin = MARGIN * measured
        assert allocated.low - margin <= measured <= allocated.high + margin, row["cell"]
        assert planned.low < seconds < planned.high, row["cell"]
        if row["settings"]["kernel"] is None:
            assert planned.middle == pytest.approx(seconds, rel=0.1), row["cell"]
        else:
            # A job names no kernel of attention: it is planned with the one that torch would take,
            # and cuDNN's and FlashAttention 4 are faster.
            assert planned.middle > seconds, row["cell"]


def test_a_gpu_s_result_is_committed_with_the_page_that_is_made_of_it():
    assert COMMITTED
    for file in COMMITTED:
        assert file.with_suffix(".md").read_text() == Result.read(file).markdown()


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


def launches(**off):
    """Rows of all offloads that copy what is planned, each way times a factor of its own."""
    made = []
    for cell in offload.cells(Machine(gpus=1, smoke=False, out=ROOT)):
        if cell.settings["kind"] != "launch":
            continue
        planned = offload.prediction(offload.job_of(cell.settings))
        copied = {
            way: {"bytes": round(planned[f"{way}_bytes"] * off.get(way, 1))}
            for way in ("to_device", "to_host")
        }
        made.append(
            {
                "part": "offload",
                "cell": cell.name,
                "status": "ok",
                "reason": None,
                "seconds": 1.0,
                "settings": cell.settings,
                "measured": {"copied": copied},
            }
        )
    return made


def test_bytes_that_offloads_copied_have_a_small_margin(tmp_path):
    inside = launches(to_device=1 + 0.9 * COPIED_MARGIN)
    assert check(write(tmp_path / "inside.json", inside)) == len(offload.LAUNCHES)
    with pytest.raises(AssertionError) as error:
        check(write(tmp_path / "outside.json", launches(to_host=1 - 1.2 * COPIED_MARGIN)))
    for row in launches():
        copied = row["measured"]["copied"]["to_host"]["bytes"] * (1 - 1.2 * COPIED_MARGIN)
        sentence = f"{row['cell']}: {copied / 2**30:.3f} GiB to host, and the planner says "
        assert sentence in str(error.value)
    assert " to device, " not in str(error.value)


def test_launches_without_a_profile_are_no_proof(tmp_path):
    made = launches(to_device=2)
    for row in made:
        row["measured"]["copied"] = None
    assert check(write(tmp_path / "none.json", made)) == 0


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
