import io
import math
import re

import pytest
from rich.console import Console

from toolkit.comparing.report.runs_table import cells, runs_table
from toolkit.comparing.report.verdict import REHEARSAL, verdict
from toolkit.comparing.report.write import (
    print_report,
    render_markdown,
    render_page,
    title_of,
    write_report,
)
from toolkit.records.json_files import write_json
from toolkit.records.results import read_results

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
    assert "n/a: zero3 (all): oom: rank 1 failed at step 2: OutOfMemoryError" in markdown
    assert "n/a" in printed(results)


def test_one_missing_value_has_its_own_reason(make_results, make_row):
    row = make_row(
        tokens_per_second=None, not_measured={"tokens_per_second": "no packed rows were asked for"}
    )
    missing = "n/a: ddp-trainer (tokens/s, vs single-trainer): no packed rows were asked for"
    assert missing in runs_table(make_results(row), show_speed=True).notes
    assert not any("n/a" in note for note in runs_table(make_results(row)).notes)


def test_no_cell_of_any_row_is_empty(make_results, make_row):
    results = make_results(make_row())
    for row in results["runs"]:
        assert all(cells(row, results["control"]).values())
    assert cells(results["runs"][0], results["control"])["gap"] == "control"


def test_a_rehearsal_says_what_carries_over_and_names_the_host(make_results, make_row):
    markdown = render_markdown(make_results(make_row()))
    assert REHEARSAL in markdown
    assert "peak host memory" in markdown
    assert "fastest" not in markdown


def test_the_peak_is_the_device_s_on_gpus(make_row):
    memory = make_row()["memory"] | {"peak_bytes": 2**31}
    assert cells(make_row(memory=memory, rehearsal=False), None)["peak memory"] == "2.00 GiB"


def test_a_broken_gate_is_named_with_step_value_and_limit(make_results, make_row):
    broken = {
        "strategy": "ddp",
        "engine": "trainer",
        "name": "zero3-trainer",
        "gate": "grad_norm",
        "first_step": 1,
        "value": 1.0,
        "limit": 5e-4,
        "reason": "gradient norm apart from the control's",
    }
    row = make_row(gates={"loss": True, "grad_norm": False}, broken=[broken])
    results = make_results(row)
    assert verdict(results).startswith("ddp-trainer did not train the model that single-trainer")
    for text in (render_markdown(results).replace("\\", ""), printed(results)):
        assert "the grad_norm gate broke at step 1" in " ".join(text.split())
        assert "is 1.00e+00, limit 5.00e-04" in " ".join(text.split())
    assert "| **broken** |" in render_markdown(results)


def test_failures_keep_their_last_lines_and_the_fix(make_results, make_row):
    markdown = render_markdown(make_results(make_row(strategy="zero3", **FAILED)))
    assert "zero3: oom" in markdown
    assert "torch.OutOfMemoryError: CUDA out of memory" in markdown
    assert "What helps: Use a smaller batch." in markdown
    failed = make_row(strategy="zero3", **FAILED | {"status": "failed"})
    assert "zero3-trainer failed" in verdict(make_results(failed))


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


@pytest.mark.parametrize("rehearsal", [True, False])
def test_no_word_of_any_run_changes_a_table_or_a_heading(full_results, poisoned, rehearsal):
    def skeleton(markdown):
        fence, kept = "", []
        for line in markdown.splitlines():
            if fence:
                fence = "" if line == fence else fence
            elif opened := re.match("`{3,}", line):
                fence = opened[0]
            elif line.startswith("The whole log"):
                assert re.fullmatch(r"The whole log: (`+) ?[^`].*?\1", line)
            else:
                assert "<" not in line
                kept.append((line[:2], len(re.findall(r"(?<!\\)\|", line))))
        return kept

    results = full_results(rehearsal=rehearsal)
    evil = poisoned(results, " <script> | **x** `y` [a](http://b)\n# heading\n- item")
    plain, changed = render_markdown(results), render_markdown(evil)
    assert [each for each in skeleton(changed) if each[1]] == [
        each for each in skeleton(plain) if each[1]
    ]
    assert [each for each in skeleton(changed) if each[0] == "# "] == [("# ", 0)]


def test_markup_in_a_reason_is_printed_and_not_obeyed(make_results, make_row):
    failed = FAILED | {"not_measured": dict.fromkeys(FAILED["not_measured"], "[red]x[/nonsense]")}
    assert "[red]x[/nonsense]" in printed(make_results(make_row(**failed)))


def test_losses_that_are_not_finite_are_shown(make_row):
    row = make_row(final_loss=math.nan, loss_gap={"max": math.inf, "mean": math.nan})
    shown = cells(row, None)
    assert (shown["final loss"], shown["gap"]) == ("nan", "inf")


def test_a_control_other_than_single_is_named_with_the_reason(make_results, make_row):
    control = {"strategy": "ddp", "engine": "trainer", "reason": "single-trainer oom: no memory"}
    control |= {"name": "ddp-trainer"}
    results = make_results(make_row(), control=control)
    said = "Control: ddp; gaps are measured from it. single oom: no memory"
    assert said in render_markdown(results)


def test_what_was_asked_of_a_reader_comes_in_order(full_results):
    markdown = render_markdown(full_results(rehearsal=False))
    wanted = [
        "# Comparison",
        "| strategy |",
        "- Control: single-trainer",
        "- Baseline of speed: ddp-trainer",
        "## Speed and cost",
        "## Memory, the fullest rank",
        "## The fullest moment of a step",
        "## Memory over the ranks",
        "## Traffic of one optimizer step",
        "## Collectives of parameters and gradients",
        "## Other collectives",
        "## Agreement with the control",
        "## Time of an optimizer step",
        "## Time before and after",
        "## Scaling",
        "## What was the same in every run",
        "## Environment",
        "## Commands",
        "## Failures",
        "## Limits",
    ]
    places = [markdown.index(text) for text in wanted]
    assert places == sorted(places)


@pytest.mark.parametrize("rehearsal", [True, False])
def test_no_cell_of_any_table_is_empty_and_each_gap_is_told(full_results, rehearsal):
    results = full_results(rehearsal=rehearsal)
    # One gap of every kind, each with its own reason.
    row = results["runs"][1]
    gaps = ("phases", "warm_up", "save_seconds", "spread", "peak", "traffic", "weight_difference")
    gaps += ("supervised_tokens_per_second", "compute", "cost")
    for number, name in enumerate(gaps):
        row[name] = None
        row["not_measured"][name] = f"reason number {number}"
    markdown = render_markdown(results, show_speed=True)
    for line in table_rows(markdown):
        assert all(cell.strip() for cell in line.strip("|").split("|")), line
    for number, name in enumerate(gaps):
        assert f"reason number {number}" in markdown, name


def test_what_no_table_shows_is_named_at_the_end(make_results, make_row):
    missing = {"cost": "no GPU", "grad_norms": "DeepSpeed keeps them", "memory.peak_bytes": "a CPU"}
    row = make_row(cost=None, grad_norms=None, not_measured=missing)
    markdown = render_markdown(make_results(row), show_speed=True)
    below = markdown[markdown.index("## Not measured") :]
    assert "- ddp, cost: no GPU" in below
    assert "- ddp, grad_norms: DeepSpeed keeps them" in below
    assert "a CPU" not in below.split("## Limits")[0]


@pytest.mark.parametrize("rehearsal", [True, False])
def test_results_in_which_little_was_counted_make_every_report(bare_results, rehearsal, tmp_path):
    results = bare_results(rehearsal=rehearsal)
    write_json(tmp_path / "results.json", results)
    assert read_results(tmp_path) == results
    markdown = render_markdown(results, show_speed=True)
    assert "ddp-trainer" in printed(results)
    for absent in ("## Speed", "## Scaling"):
        assert absent not in markdown
    assert "was not measured: no run was started twice" in markdown
    for line in table_rows(markdown):
        assert all(cell.strip() for cell in line.strip("|").split("|")), line


def test_a_narrow_terminal_breaks_no_number(full_results):
    results = full_results()
    results["runs"] = [row for row in results["runs"] if row["num_processes"] < 4][:-1]
    stream = io.StringIO()
    print_report(results, console=Console(file=stream, width=80), show_speed=True)
    lines = stream.getvalue().splitlines()
    rows = [line for line in lines if " ok " in line]
    assert len(rows) == 4
    for line in rows:
        assert len(line) <= 80
        assert "0.500 s" in line
    # What finds no room stands below, each run named again.
    below = [line for line in lines if re.search(r" (control|1\.2e-06) *$", line)]
    assert [line.split()[:2] for line in below] == [line.split()[:2] for line in rows]


def test_the_report_can_be_made_again_from_the_results_alone(tmp_path, make_results, make_row):
    results = make_results(make_row())
    write_json(tmp_path / "results.json", results)
    assert read_results(tmp_path) == results
    first = write_report(tmp_path).read_text()
    (tmp_path / "report.md").unlink()
    assert write_report(tmp_path).read_text() == first


@pytest.mark.parametrize(
    ("changes", "name", "title"),
    [
        ({"date": "2026-11-05"}, "mine", "small-llama on texts, 5 November 2026"),
        ({}, "20261127-104500", "small-llama on texts, 27 November 2026"),
        ({}, "mine", "small-llama on texts"),
        ({"fixed": {"model": "/a/b/small-llama"}}, "mine", "small-llama"),
        ({"fixed": {"model": "Qwen/Qwen2.5-0.5B"}}, "mine", "Qwen/Qwen2.5-0.5B"),
        ({"fixed": {}}, "mine", "Comparison mine"),
    ],
)
def test_the_title_is_model_data_and_date(make_results, changes, name, title):
    fixed = {"fixed": {"model": "small-llama", "data": "texts"}}
    results = make_results(name=name, **fixed | changes)
    assert title_of(results) == title
    assert render_markdown(results).startswith(f"# {title}\n")
    assert f"<h1>{title}</h1>" in render_page(results)


def test_a_comparison_without_a_run_says_so(make_results):
    results = make_results(runs=[], control=None, complete=False)
    assert verdict(results) == "No run has ended yet."
    assert render_markdown(results)
