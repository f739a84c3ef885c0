import io
import math

import pytest
from rich.console import Console

from toolkit.comparing.report import (
    COLUMNS,
    REHEARSAL,
    cells,
    load_results,
    missing_reasons,
    print_report,
    render_markdown,
    size,
    verdict,
    write_report,
)
from toolkit.results import write_json

FAILED = {
    "status": "oom",
    "reason": "rank 1 failed at step 2: OutOfMemoryError",
    "losses": None,
    "final_loss": None,
    "loss_gap": None,
    "grad_norm_gap": None,
    "weight_gap": None,
    "gates": {},
    "tokens_per_second": None,
    "step_seconds": None,
    "memory": None,
    "per_rank": None,
    "attestation": None,
    "tail": ["Traceback", "torch.OutOfMemoryError: CUDA out of memory"],
    "fix": "Use a smaller batch.",
    "not_measured": dict.fromkeys(
        ["tokens_per_second", "step_seconds", "memory", "final_loss", "loss_gap"],
        "oom: rank 1 failed at step 2: OutOfMemoryError",
    ),
}


def table_rows(markdown):
    return [line for line in markdown.splitlines() if line.startswith("|")]


def printed(results):
    stream = io.StringIO()
    print_report(results, console=Console(file=stream, width=200))
    return stream.getvalue()


def test_no_cell_is_empty_and_every_gap_has_a_reason(make_results, make_row):
    results = make_results(make_row(), make_row(strategy="zero3", **FAILED))
    markdown = render_markdown(results)
    for line in table_rows(markdown):
        assert all(cell.strip() for cell in line.strip("|").split("|"))
    assert "n/a: zero3-trainer (all): oom: rank 1 failed at step 2: OutOfMemoryError" in markdown
    assert "n/a" in printed(results)


def test_one_missing_value_has_its_own_reason(make_results, make_row):
    row = make_row(
        tokens_per_second=None, not_measured={"tokens_per_second": "no packed rows were asked for"}
    )
    assert missing_reasons(make_results(row)) == [
        "n/a: ddp-trainer (tokens/s): no packed rows were asked for"
    ]


def test_every_column_is_there_for_every_row(make_results, make_row):
    results = make_results(make_row())
    for row in results["runs"]:
        assert set(cells(row, results["control"])) == set(COLUMNS)
    assert cells(results["runs"][0], results["control"])["gap"] == "control"


def test_a_rehearsal_says_what_carries_over_and_names_the_host(make_results, make_row):
    markdown = render_markdown(make_results(make_row()))
    assert REHEARSAL in markdown
    assert "peak host memory" in markdown
    assert "fastest" not in markdown


def test_on_gpus_the_fastest_is_named_unless_two_are_too_near(make_results, make_row):
    memory = make_row()["memory"] | {"peak_bytes": 2**31}
    gpu = {"rehearsal": False, "memory": memory}

    def said(speed):
        rows = [
            make_row(tokens_per_second=1000.0, **gpu),
            make_row(strategy="fsdp", tokens_per_second=speed, **gpu),
        ]
        results = make_results(*rows, rehearsal=False)
        results["runs"][0] |= gpu | {"tokens_per_second": 400.0}
        return verdict(results)

    assert "fsdp-trainer was the fastest (2,000 tokens/s)" in said(2000.0)
    assert "too near to tell apart" in said(1020.0)


def test_the_peak_is_the_device_s_on_gpus(make_row):
    memory = make_row()["memory"] | {"peak_bytes": 2**31}
    assert cells(make_row(memory=memory, rehearsal=False), None)["peak memory"] == "2.00 GiB"


def test_the_verdict_counts_what_agreed(make_results, make_row):
    text = verdict(
        make_results(make_row(), make_row(strategy="zero2", loss_gap={"max": 3e-6, "mean": 0.0}))
    )
    assert "2 other runs trained as single-trainer did, every gate held" in text
    assert "largest loss gap 3.0e-06, zero2-trainer" in text


def test_a_gate_that_was_not_judged_is_not_said_to_hold(make_results, make_row):
    row = make_row(gates={"loss": True, "data": True})
    assert "not judged everywhere: grad_norm, weights" in verdict(make_results(row))


def test_a_broken_gate_is_named_with_step_value_and_limit(make_results, make_row):
    broken = {
        "strategy": "ddp",
        "engine": "trainer",
        "gate": "grad_norm",
        "first_step": 1,
        "value": 1.0,
        "limit": 5e-4,
        "reason": "gradient norm apart from the control's",
    }
    row = make_row(gates={"loss": True, "grad_norm": False}, broken=[broken])
    results = make_results(row)
    for text in (verdict(results), render_markdown(results).replace("\\", ""), printed(results)):
        assert "the grad_norm gate broke at step 1" in " ".join(text.split())
        assert "is 1.00e+00, limit 5.00e-04" in " ".join(text.split())
    assert "| **broken** |" in render_markdown(results)


def test_failures_keep_their_last_lines_and_the_fix(make_results, make_row):
    markdown = render_markdown(make_results(make_row(strategy="zero3", **FAILED)))
    assert "zero3-trainer: oom" in markdown
    assert "torch.OutOfMemoryError: CUDA out of memory" in markdown
    assert "What helps: Use a smaller batch." in markdown
    assert "zero3-trainer failed" in verdict(make_results(make_row(strategy="zero3", **FAILED)))


def test_what_a_run_says_cannot_become_part_of_the_page(make_results, make_row):
    evil = "<script>alert(1)</script> | `x` [a](http://b)\n# heading"
    failed = FAILED | {"reason": evil, "tail": ["```", "</details><script>", "\x1b[31mred\x1b[0m"]}
    failed["not_measured"] = dict.fromkeys(failed["not_measured"], evil)
    results = make_results(make_row(strategy="zero3", **failed), name=evil)
    results["fixed"]["model"] = evil
    markdown = render_markdown(results)

    outside = markdown.split("````text")[0]
    assert "<script>" not in outside
    assert "&lt;script&gt;" in outside
    assert r"\| \`x\` \[a\]" in outside
    assert "\n# heading" not in markdown
    # The fence around the tail is longer than the one inside it.
    assert "````text\n```\n</details><script>\nred\n````" in markdown
    assert "\x1b" not in markdown


def test_markup_in_a_reason_is_printed_and_not_obeyed(make_results, make_row):
    failed = FAILED | {"not_measured": dict.fromkeys(FAILED["not_measured"], "[red]x[/nonsense]")}
    assert "[red]x[/nonsense]" in printed(make_results(make_row(**failed)))


def test_losses_that_are_not_finite_are_shown(make_row):
    row = make_row(final_loss=math.nan, loss_gap={"max": math.inf, "mean": math.nan})
    shown = cells(row, None)
    assert (shown["final loss"], shown["gap"]) == ("nan", "inf")


def test_a_control_other_than_single_is_named_with_the_reason(make_results, make_row):
    control = {"strategy": "ddp", "engine": "trainer", "reason": "single-trainer oom: no memory"}
    results = make_results(make_row(), control=control)
    assert "The control is ddp-trainer: single-trainer oom: no memory" in render_markdown(results)


@pytest.mark.parametrize(
    ("count", "shown"),
    [(None, "n/a"), (0, "0.0 MiB"), (2**20, "1.0 MiB"), (2**30, "1.00 GiB"), (2**29, "0.50 GiB")],
)
def test_sizes_are_powers_of_two(count, shown):
    assert size(count) == shown


def test_the_report_can_be_made_again_from_the_results_alone(tmp_path, make_results, make_row):
    results = make_results(make_row())
    write_json(tmp_path / "results.json", results)
    assert load_results(tmp_path) == results
    first = write_report(tmp_path).read_text()
    (tmp_path / "report.md").unlink()
    assert write_report(tmp_path).read_text() == first


def test_results_of_another_version_with_less_in_them_still_make_a_report(make_results, make_row):
    results = make_results(make_row())
    for added in ("name", "complete", "rehearsal", "precision", "fixed"):
        del results[added]
    assert "ddp" in render_markdown(results)


def test_a_comparison_without_a_run_says_so(make_results):
    results = make_results(runs=[], control=None, complete=False)
    assert verdict(results) == "No run has ended yet."
    assert render_markdown(results)
