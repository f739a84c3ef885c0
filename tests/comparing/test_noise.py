import math
import random

import pytest

from toolkit.comparing.run.noise import noise_of, student_quantile


@pytest.mark.parametrize(
    ("degrees", "published"),
    [
        (1, 12.706),
        (2, 4.303),
        (5, 2.571),
        (6, 2.447),
        (10, 2.228),
        (30, 2.042),
        (120, 1.980),
        (10**6, 1.960),
    ],
)
def test_students_quantiles_are_those_of_the_tables(degrees, published):
    assert student_quantile(degrees) == pytest.approx(published, rel=1e-3)


def row_of(*speeds, status="ok", timed=()):
    repeats = [{"tokens_per_second": speed, "timed_seconds": list(timed)} for speed in speeds]
    return {"status": status, "tokens_per_second": speeds[0], "repeats": repeats}


def test_noise_is_pooled_over_the_repeats_of_all_runs_that_ended_well():
    rows = [row_of(100.0, 110.0), row_of(50.0, 50.0), row_of(1.0, 9.0, status="failed")]
    found, reason = noise_of(rows)
    assert reason is None
    assert (found["basis"], found["repeats"]) == ("repeats", 2)
    pooled = math.log(1.1) ** 2 / 2 / 2  # two degrees of freedom, one run without any spread
    assert found["share"] == pytest.approx(math.exp(4.302653 * math.sqrt(pooled)) - 1)


def test_a_run_of_one_start_among_repeats_makes_a_difference_less_sure():
    several, _ = noise_of([row_of(100.0, 104.0), row_of(80.0, 81.0)])
    one, _ = noise_of([row_of(100.0, 104.0), row_of(80.0, 81.0), row_of(60.0)])
    assert one["repeats"] == 1
    assert math.log1p(one["share"]) == pytest.approx(math.sqrt(2) * math.log1p(several["share"]))


def test_of_one_start_each_the_timed_steps_tell():
    found, _ = noise_of([row_of(100.0, timed=(0.9, 1.0, 1.1)), row_of(50.0, timed=(1.8, 2, 2.2))])
    assert (found["basis"], found["repeats"]) == ("steps", 1)
    expected = math.exp(student_quantile(4) * math.sqrt(0.01 * 2 / 3)) - 1
    assert found["share"] == pytest.approx(expected)


@pytest.mark.parametrize("rows", [[], [row_of(100.0, timed=(1.0, 1.1))], [row_of(None)]])
def test_without_repeats_or_three_timed_steps_there_is_a_reason_instead(rows):
    found, reason = noise_of(rows)
    assert found is None
    assert "--repeats" in reason


def test_runs_of_the_same_thing_differ_by_more_in_one_case_of_twenty():
    chance = random.Random(7)
    beyond = 0
    for _ in range(2000):
        speeds = [[math.exp(chance.gauss(0, 0.03)) for _ in range(3)] for _ in range(4)]
        found, _ = noise_of([row_of(*each) for each in speeds])
        first, second = (math.prod(each) ** (1 / 3) for each in speeds[:2])
        beyond += max(first, second) / min(first, second) - 1 > found["share"]
    assert 0.04 < beyond / 2000 < 0.06
