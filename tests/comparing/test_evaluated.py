"""Evaluations in a comparison: judged like the training loss, and shown with the samples."""

import csv
import io
import math

import numpy as np
import pytest

from toolkit.comparing.parity.gates import judge
from toolkit.comparing.parity.judgement import Case
from toolkit.comparing.report.runs_table import runs_table
from toolkit.comparing.report.sections import parts
from toolkit.comparing.report.sections.agreement import agreement, evaluation, samples
from toolkit.comparing.report.table_file import render_table
from toolkit.comparing.report.verdict import verdict
from toolkit.comparing.report.write import render_markdown, render_page


def evaluated(*losses, steps=(0, 2, 4), tokens=50, rows=7):
    return [
        {
            "step": step,
            "loss": loss,
            "perplexity": math.exp(loss),
            "tokens": tokens,
            "rows": rows,
            "seconds": 0.25 * (1 + step),
        }
        for step, loss in zip(steps, losses, strict=True)
    ]


CONTROL = evaluated(5.0, 4.5, 4.0)


@pytest.fixture
def compare(tmp_path, make_record, write_weights):
    """Judge the evaluations of a run against those of a control, all else being equal."""
    start = write_weights(tmp_path / "start", {"a": np.zeros((2, 3), np.float32)})
    for name in ("run", "control"):
        write_weights(tmp_path / name / "final", {"a": np.ones((2, 3), np.float32)})

    def judged(found, control=CONTROL, **changes):
        reference = make_record(strategy="single", ranks=1, steps=4, start=start)
        record = make_record(steps=4, start=start) | {"evaluation": found} | changes
        return judge(
            Case(
                record=record,
                control=reference | {"evaluation": control},
                folder=tmp_path / "run",
                control_folder=tmp_path / "control",
            )
        )

    return judged


def test_evaluations_within_the_gate_of_the_loss_hold_theirs(compare):
    judgement = compare(evaluated(5.0, 4.5 + 3e-6, 4.0 - 2e-6))
    assert judgement.gates["evaluation"] is True
    assert judgement.gaps["eval_loss_gap"] == pytest.approx(3e-6, rel=1e-3)
    assert judgement.broken == []


@pytest.mark.parametrize(
    ("found", "step", "said"),
    [
        (evaluated(5.0, 4.5 + 2e-5, 4.0), 2, "evaluation loss apart from the control's"),
        (evaluated(5.0, 4.5, math.nan), 4, "evaluation loss apart"),
        (evaluated(5.0, 4.0, steps=(0, 4)), 2, "the run did not evaluate here"),
        (evaluated(5.0, 4.5, 4.0, rows=8), 0, "other rows or tokens"),
        (evaluated(5.0, 4.5, 4.0, tokens=49), 0, "other rows or tokens"),
        (None, 0, "the run did not evaluate here"),
    ],
)
def test_an_evaluation_apart_or_of_something_else_breaks_it_at_its_step(compare, found, step, said):
    judgement = compare(found)
    assert judgement.gates["evaluation"] is False
    (broken,) = judgement.broken
    assert (broken["gate"], broken["first_step"]) == ("evaluation", step)
    assert said in broken["reason"]
    assert {name for name, held in judgement.gates.items() if not held} == {"evaluation"}


def test_where_the_control_evaluated_nothing_there_is_no_such_gate(compare):
    judgement = compare(evaluated(5.0, 4.5, 4.0), control=None)
    assert "evaluation" not in judgement.gates
    assert judgement.not_measured["eval_loss_gap"] == "nobody asked for it"


def test_a_run_that_was_resumed_is_judged_from_there_on(compare):
    judgement = compare(evaluated(4.0, steps=(4,)), first_step=3)
    assert judgement.gates["evaluation"] is True


def test_where_no_evaluation_was_compared_no_gate_holds(compare):
    control = evaluated(5.0, 4.5, 4.0, steps=(0, 2, 40))
    judgement = compare(evaluated(4.0, steps=(40,)), control=control, first_step=3)
    assert "evaluation" not in judgement.gates
    assert "went on at step 3" in judgement.not_measured["gates.evaluation"]
    assert judgement.gaps["eval_loss_gap"] == 0
    judgement = compare(evaluated(4.0, steps=(40,)), control=evaluated(4.0, steps=(40,)))
    assert "evaluation" not in judgement.gates
    assert "within the first 20 steps" in judgement.not_measured["gates.evaluation"]


SAMPLES = [{"prompt": "def add(a, b):\n", "before": "xx", "after": "Return | the sum."}]


@pytest.fixture
def shown(full_results):
    def make():
        results = full_results()
        for number, row in enumerate(results["runs"][:-1]):
            row["evaluation"] = evaluated(5.0, 4.0 + number * 1e-7, steps=(0, 4))
            row["eval_loss_gap"] = None if number == 0 else number * 1e-7
            row["gates"] = row["gates"] | ({"evaluation": True} if number else {})
            row["samples"] = [dict(each) for each in SAMPLES]
        results["runs"][2]["samples"][0]["after"] = "Another."
        return results

    return make


def line(section, run):
    (found,) = [row for row in section.rows if row[0] == run]
    return dict(zip(section.header, found, strict=True))


def test_the_table_has_the_last_evaluation_of_each_run(shown, full_results):
    table = runs_table(shown())
    assert list(table.header)[-2:] == ["eval loss", "perplexity"]
    assert list(table.rows[1])[-2:] == ["4.0000", "54.60"]
    assert list(table.rows[-1])[-2:] == ["n/a", "n/a"]
    assert "eval loss" not in runs_table(full_results()).header


def test_the_section_has_before_and_after_and_the_gap_to_the_control(shown):
    section = evaluation(shown())
    found = line(section, "ddp-trainer")
    assert found["loss before"] == "5.000000"
    assert found["loss after"] == "4.000000"
    assert found["perplexity after"] == "54.598"
    assert found["gap to the control"] == "1.0e-07"
    assert (found["rows"], found["tokens"], found["seconds"]) == ("7", "50", "1.250 s")
    assert line(section, "single-trainer")["gap to the control"] == "control"
    assert line(agreement(shown()), "ddp-trainer")["gate: evaluation"] == "held"


def test_runs_that_wrote_the_same_share_a_line(shown):
    rows = [list(row) for row in samples(shown()).rows]
    assert [(row[0], row[2], row[3]) for row in rows] == [
        ("def add(a, b):\n", "xx", "Return | the sum."),
        ("def add(a, b):\n", "xx", "Another."),
    ]
    assert rows[1][1] == "fsdp-trainer-x2"
    assert "ddp-trainer" in rows[0][1]
    results = shown()
    for row in results["runs"][:-1]:
        row["samples"] = [SAMPLES[0] | {"before": ""}]
    (alike,) = samples(results).rows
    assert list(alike[1:]) == ["every run", "(nothing)", "Return | the sum."]


def test_nothing_of_it_stands_in_a_comparison_that_did_not_evaluate(full_results, bare_results):
    for results in (full_results(), bare_results()):
        assert {"evaluation", "samples"}.isdisjoint(part.id for part in parts(results))
        assert "gate: evaluation" not in agreement(results).header
        assert "evaluation" not in render_markdown(results)
        render_page(results)
        render_table(results)


def test_a_gate_that_was_not_judged_is_named_in_the_verdict(shown):
    results = shown()
    assert "not judged" not in verdict(results)
    del results["runs"][1]["gates"]["evaluation"]
    assert "not judged everywhere: evaluation" in verdict(results)


def test_every_number_has_a_column_of_the_csv(shown):
    lines = list(csv.DictReader(io.StringIO(render_table(shown()))))
    ddp, failed = lines[1], lines[-1]
    assert float(ddp["eval_loss_before"]) == 5.0
    assert float(ddp["eval_loss_after"]) == 4.0 + 1e-7
    assert float(ddp["eval_perplexity_after"]) == math.exp(4.0 + 1e-7)
    assert (ddp["eval_rows"], ddp["eval_tokens"], ddp["gate_evaluation"]) == ("7", "50", "true")
    assert ddp["sample_1_after"] == "Return | the sum."
    assert (failed["eval_loss_after"], failed["sample_1_after"]) == ("", "")


def test_what_a_model_wrote_is_text_on_every_page(shown):
    results = shown()
    for row in results["runs"][:-1]:
        row["samples"][0]["after"] = "<script>alert(1)</script> | `x` [a](http://b)"
    page, text = render_page(results), render_markdown(results)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>" not in text
    assert r"\| \`x\` \[a\]" in text
