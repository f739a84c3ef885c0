"""Scripts that evaluate, each with one fault, and scripts of which no two runs are equal."""

from dataclasses import replace
from pathlib import Path

import pytest
from certificates import broken, tiered

from toolkit.certifying.repeated import gives_the_same, leaves_no_trace, twice_the_same
from toolkit.certifying.subject import Subject

TRACE, VALUE, HELD = "trace of an evaluation", "value of an evaluation", "held-out rows"
TWICE = "twice the same"

LOOP = {
    "keeps_the_mean": TRACE,
    "seeds_anew": TRACE,
    "stays_in_evaluation_mode": TRACE,
    "labels_by_chance": VALUE,
    "in_training_mode": HELD,
    "evaluates_training_rows": HELD,
}
TRAINER = {"rounds_its_weights": TRACE, "logs_another_loss": HELD}
APART = {
    "no_seed": "weights are others before it",
    "order_of_its_own": "reads other rows: their order has no seed",
    "noise_of_its_own": "random numbers that have no seed",
}

SWEPT = {
    "seeds_anew",
    "stays_in_evaluation_mode",
    "evaluates_training_rows",
    "order_of_its_own",
}


def certified(certificate_of, fault, *flags, only=("repeated",), **launch):
    checks, _, said = certificate_of("faulty_evaluator.py", fault, *flags, only=only, **launch)
    for name in broken(checks):
        assert checks[name]["where"].startswith("faulty_evaluator.py:"), said
    return checks, said


@pytest.mark.parametrize("fault", tiered(LOOP, SWEPT))
def test_a_fault_of_an_evaluation_is_named(fault, certificate_of):
    checks, said = certified(certificate_of, fault)
    assert broken(checks) == {LOOP[fault]}, said
    assert checks[TWICE]["answer"] == "holds", said


@pytest.mark.parametrize("fault", TRAINER)
def test_a_fault_of_a_trainers_evaluation_is_named(fault, certificate_of, tmp_path):
    checks, said = certified(certificate_of, fault, "--output_dir", tmp_path)
    assert broken(checks) == {TRAINER[fault]}, said


@pytest.mark.parametrize("fault", tiered(APART, SWEPT))
def test_the_first_place_where_two_runs_part_is_named(fault, certificate_of):
    checks, said = certified(certificate_of, fault)
    assert broken(checks) == set(), said
    assert checks[TWICE]["answer"] == "note", said
    assert APART[fault] in checks[TWICE]["words"]


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("ddp", []),
        ("zero3", ["--output_dir"]),
        pytest.param("fsdp", ["--output_dir"], marks=pytest.mark.sweep),
        ("fsdp", []),
    ],
)
def test_what_evaluates_well_holds(strategy, flags, certificate_of, tmp_path):
    flags = [*flags, tmp_path] if flags else []
    checks, said = certified(certificate_of, "sound", *flags, strategy=strategy)
    assert {check["answer"] for check in checks.values()} == {"holds"}, said
    assert ("without them the steps" in checks[TRACE]["words"]) == bool(flags)


def test_workers_that_draw_alike_are_named(certificate_of):
    checks, said = certified(certificate_of, "workers_alike", only=("rows",))
    assert broken(checks) == {"workers' seeds"}, said
    assert "worker 0 of rank 0 and worker 1 of rank 0" in said


def test_an_epoch_of_half_the_rows_is_named(certificate_of, tmp_path):
    flags = ["split_by_hand", "--output_dir", tmp_path]
    checks, said = certified(certificate_of, *flags, only=("rows", "log"))
    assert broken(checks) == {"same data"}, said
    assert checks["logged epoch"]["answer"] == "note", said


def test_nothing_is_claimed_of_what_was_not_evaluated():
    seen = {"rank": 0, "evaluations": [], "trainer": None}
    nothing = Subject(many=[seen], folder=Path(), notes=[])
    judges = (leaves_no_trace, gives_the_same, twice_the_same)
    assert {judge(nothing).answer for judge in judges} == {"not judged"}
    once = {
        "step": 1,
        "rows": [[1, 2]],
        "weights": [5],
        "values": [0.5],
        "training_mode": 0,
        "is_followed": False,
        "changed": ["a change at the end"],
        "random": [1, 2],
    }
    last = replace(nothing, many=[{**seen, "evaluations": [once]}])
    assert "no training followed" in leaves_no_trace(last).words
    assert gives_the_same(last).answer == "not judged"
    twice = {**once, "values": [0.7]}
    both = replace(nothing, many=[{**seen, "evaluations": [once, twice]}])
    assert gives_the_same(both).answer == "broken"
