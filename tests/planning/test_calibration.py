"""Estimates against runs that others published, each named by its source."""

import statistics
from dataclasses import replace

import pytest
from benchmark_rows import ROOT  # makes benchmarks/ importable
from calibration_cases import AUTOCAST_FSDP1, BERT_LARGE, BLOCKS_7B, BLOCKS_254M, FUSED, MEASURED
from kit.cells import Machine
from kit.memory import cells, job_of
from planner_measured import GROUPS, details, rows, summary
from published_rows import HELD_OUT, is_drawn

from toolkit.jobs.terms import GIB, Interval
from toolkit.planning.memory.estimate import estimate_memory
from toolkit.planning.plan import plan
from toolkit.strategies import STRATEGIES

ROWS = rows()
ELSEWHERE = (AUTOCAST_FSDP1, FUSED)
"""Regimes whose tensors are other ones than a plan counts."""


def of_group(*groups):
    return [row for row in ROWS if row.group in groups]


def test_the_models_have_the_parameters_that_were_published():
    assert BLOCKS_254M.parameters == 254_128_976
    assert round(BLOCKS_7B.parameters / 1e9, 2) == 6.86
    assert BERT_LARGE.parameters == 335_143_938  # 335,141,888 of the encoder, and two labels


def test_a_third_of_the_rows_is_drawn_by_their_links_and_listed():
    every = dict.fromkeys(row.measured.link for row in ROWS)
    drawn = [row.measured.link for row in ROWS if is_drawn(row.measured)]
    assert HELD_OUT.read_text().splitlines() == list(dict.fromkeys(drawn))
    assert len(set(drawn)) == pytest.approx(len(every) / 3, rel=0.1)


def test_counted_bytes_are_within_10_percent_where_tensors_are_those_of_a_plan():
    counted = [row for row in ROWS if row.counted and row.measured.regime not in ELSEWHERE]
    assert len(counted) >= 50
    assert sum(row.holds for row in counted) >= 0.98 * len(counted)


@pytest.mark.parametrize("group", GROUPS)
def test_nine_of_ten_runs_are_between_expected_and_worst_which_are_near(group):
    found = [row for row in of_group(group) if not row.counted]
    assert len(found) >= 12
    assert sum(row.holds for row in found) >= 0.9 * len(found)
    assert statistics.median(row.width for row in found) <= 1.5


def test_a_unit_that_a_source_does_not_say_counts_as_both():
    (row,) = [row for row in ROWS if row.measured.name == "QLoRA 70B 2 x 2048 x 2, offloaded"]
    assert row.readings == pytest.approx((19.6, 18.25), abs=0.01)
    narrow = replace(row, planned=Interval(18.2, 18.3))
    assert narrow.holds
    assert not replace(narrow, measured=replace(row.measured, either_unit=False)).holds
    assert not replace(narrow, planned=Interval(18.3, 19.5)).holds


def test_the_interval_is_narrow_on_the_gpu_that_was_measured_and_wider_off_it():
    jobs = [job_of(cell.settings) for cell in cells(Machine(gpus=1, smoke=False, out=ROOT))]
    widths = {
        measured: statistics.median(
            estimate.worst / estimate.expected
            for estimate in (estimate_memory(job.with_(measured_gpu=measured)) for job in jobs)
        )
        for measured in (True, False)
    }
    assert widths[True] < 1.21 < widths[False]
    job = jobs[1].with_(measured_gpu=True)
    assert estimate_memory(job).pools.on == "measured"
    for strategy, gpus in (("ddp", 2), ("fsdp_offload", 1)):
        other = job.with_(strategy=STRATEGIES[strategy], gpus=gpus)
        assert estimate_memory(other).pools.on == "several"
    (on_h200,) = plan("1b", gpu="H200", gpus=1, strategies="single").rows
    (on_h100,) = plan("1b", gpu="H100", gpus=1, strategies="single").rows
    assert on_h200.memory.expected > on_h100.memory.expected
    assert on_h200.memory.worst < on_h100.memory.worst


def test_fsdp1_under_autocast_holds_the_inputs_of_checkpointed_layers_in_fp32():
    """With 2 more bytes for each of their elements, the five runs that are off hold."""
    found = [row for row in of_group("fitted", "seen") if row.measured.regime == AUTOCAST_FSDP1]
    found = [row for row in found if row.measured in MEASURED]
    assert len(found) == 8
    assert not any(row.holds for row in found if row.counted)
    for row in found:
        job, planned = row.measured.job, row.planned
        more = 2 * job.model.layers * job.model.hidden_size * job.micro_tokens / GIB
        if row.counted:
            backward = sum(
                term.bytes.middle
                for term in estimate_memory(job).terms
                if "backward" in term.phases
                and term.place == "gpu"
                and term.category not in ("context", "allocator")
            )
            assert backward / GIB + more == pytest.approx(row.measured.gib, rel=0.05)
        else:
            assert planned.low + more <= max(row.readings)


def test_expandable_segments_reserve_less_of_what_moves_and_as_much_of_what_stays():
    for measured in MEASURED:
        job = replace(measured.job, expandable_segments=False)
        default = estimate_memory(job)
        expandable = estimate_memory(replace(job, expandable_segments=True))
        assert default.allocated == expandable.allocated
        assert default.reserved.high > expandable.reserved.high
        assert expandable.reserved.high >= expandable.allocated.high


def test_the_committed_tables_are_what_the_script_prints_today():
    [file] = (ROOT / "benchmarks" / "results").glob("*-planner-measured.md")
    printed = [*summary(ROWS), *details(ROWS)]
    text = file.read_text().splitlines()
    assert [line for line in text if line.startswith("|")] == printed
