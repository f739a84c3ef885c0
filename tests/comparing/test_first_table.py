"""The table that a comparison ends with: its columns, its names, and how wide it is."""

import copy
import io
import re

import pytest
from rich.console import Console

from toolkit.comparing.report.names import for_readers
from toolkit.comparing.report.runs_table import peaks_out_of_order, runs_table
from toolkit.comparing.report.table_file import render_table
from toolkit.comparing.report.write import print_report, render_markdown, render_page

MIB = 2**20


def printed(results, *, width=80, **options):
    stream = io.StringIO()
    print_report(results, console=Console(file=stream, width=width), **options)
    return stream.getvalue()


@pytest.fixture
def six(make_results, make_row):
    """The usual six under one engine, in a rehearsal or on GPUs."""

    def make(*, rehearsal=True, names=("ddp", "zero1", "zero2", "zero3", "fsdp")):
        rows = [make_row(strategy=name, rehearsal=rehearsal) for name in names]
        results = copy.deepcopy(make_results(*rows, rehearsal=rehearsal))
        for row in results["runs"]:
            row["rehearsal"] = rehearsal
            row["memory"]["peak_bytes"] = None if rehearsal else 12_345 * MIB
        return results

    return make


@pytest.mark.parametrize("rehearsal", [True, False])
def test_states_stand_beside_the_peak(six, rehearsal):
    table = runs_table(six(rehearsal=rehearsal))
    at = list(table.header).index("states")
    assert table.header[at + 1].startswith("peak")
    assert {row[at] for row in table.rows} == {"15.3 MiB"}


def test_a_rehearsal_has_no_speed_in_its_first_table_unless_asked(six):
    results = six()
    for text in (printed(results), render_markdown(results).split("## ")[0]):
        assert "tokens/s" not in text
        assert "vs ddp" not in text
    assert re.search(r"tokens/s +vs ddp +step +states", printed(results, show_speed=True))
    assert "1,000" in printed(results, show_speed=True)
    assert "tokens/s" in printed(six(rehearsal=False))


def test_the_engine_is_named_only_where_both_ran(six, make_row):
    results = six()
    before = copy.deepcopy(results)
    shown = (printed(results), render_page(results), render_markdown(results))
    for text in shown:
        # Folders and commands keep it.
        assert not re.search(r"(single|fsdp)-trainer(?!-1)", text)
        assert "engine" not in text.split("Control")[0]
    assert results == before
    assert ",ddp-trainer," in render_table(results)

    results["runs"].append(make_row(engine="loop"))
    for text in (printed(results), render_markdown(results)):
        assert "Control: single-trainer" in text
        assert "engine" in text
    assert "ddp-loop" in render_page(results)


def test_names_are_short_everywhere_and_folders_stay(six):
    results = six()
    reason = "single-trainer oom: see single-trainer-1/stdout.log"
    results["control"] = {
        **{"strategy": "ddp", "engine": "trainer"},
        **{"reason": reason, "name": "ddp-trainer"},
    }
    results["runs"][1]["name"] = "ddp-trainer-x4"
    gate = {"strategy": "zero1", "engine": "trainer", "gate": "loss", "reason": "apart"}
    gate |= {"name": "zero1-trainer"}
    results["runs"][2]["broken"] = [gate | dict.fromkeys(("first_step", "value", "limit"))]
    shown = for_readers(results)
    assert [row["name"] for row in shown["runs"][:3]] == ["single", "ddp-x4", "zero1"]
    assert shown["control"]["reason"] == "single oom: see single-trainer-1/stdout.log"
    assert shown["runs"][2]["broken"][0]["name"] == "zero1"
    assert for_readers(shown) == shown


LONG = ("ddp", "zero2_offload", "zero3_offload", "zero3_nvme", "fsdp_grad_op", "fsdp_hybrid")


@pytest.mark.parametrize("names", [("ddp", "zero1", "zero2", "zero3", "fsdp"), LONG])
@pytest.mark.parametrize("rehearsal", [True, False])
@pytest.mark.parametrize("show_speed", [True, False])
@pytest.mark.parametrize("width", [80, 60])
def test_the_table_fits_and_breaks_no_cell(six, width, show_speed, rehearsal, names):
    results = six(rehearsal=rehearsal, names=names)
    results["runs"][1]["gates"]["loss"] = False
    results["runs"][2] |= {"status": "oom", "memory": None}
    text = printed(results, width=width, show_speed=show_speed)
    assert max(map(len, text.splitlines())) <= width
    rows = [line.split() for line in text.splitlines() if line.startswith(names[-1])]
    wanted = ["4.9000", "15.3", "MiB", "ok", "1.2e-06"]
    wanted += [] if rehearsal and not show_speed else ["1,000", "1.00x", "0.500", "s"]
    cells = [cell for row in rows for cell in row]
    assert set(wanted) <= set(cells)
    head = [line for line in text.splitlines() if line.startswith("strategy")]
    assert len(head) == len(rows)
    assert all(line.startswith("─") for line in _after(text, head))
    if names != LONG and width == 80 or (rehearsal and not show_speed):
        assert len(rows) == 1


def _after(text, heads):
    lines = text.splitlines()
    return [lines[number + 1] for number, line in enumerate(lines) if line in heads]


def test_two_engines_processes_and_evaluations_fit_as_well(full_results):
    results = full_results(rehearsal=False)
    evaluated = {"step": 4, "loss": 4.0, "perplexity": 54.6, "rows": 7, "tokens": 50}
    for row in results["runs"][:-1]:
        row["evaluation"] = [evaluated]
    for width in (120, 80, 60):
        text = printed(results, width=width)
        assert max(map(len, text.splitlines())) <= width
        assert "54.60" in text
        assert "procs" in text


def test_without_a_terminal_or_with_no_color_nothing_is_coloured(six, monkeypatch):
    assert "\x1b" not in printed(six())
    stream = io.StringIO()
    print_report(six(), console=Console(file=stream, width=80, force_terminal=True))
    assert "\x1b[32mok" in stream.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    print_report(six(), console=Console(file=stream, width=80, force_terminal=True))
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", stream.getvalue())


def test_a_stream_that_takes_ascii_alone_gets_the_table():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    from toolkit.tables.grid import Section
    from toolkit.tables.terminal import tables

    section = Section("", ["strategy", "status"], [["ddp", "ok"]])
    console = Console(file=stream, width=80)
    for table in tables(section, width=80):
        console.print(table)
    stream.flush()
    assert b"ddp" in raw.getvalue()


PARTS = {"parameters": 4, "master": 0, "gradients": 4, "optimizer": 8}


@pytest.fixture
def counted(make_row):
    def make(strategy, *, states=PARTS, **peak):
        held = {f"{name}_bytes": size * MIB for name, size in states.items()}
        together = states | {"activations": 2, "other": 1} | peak
        categories = {name: size * MIB for name, size in together.items()}
        total = {"total_bytes": sum(categories.values()), "categories": categories}
        peak = {"step": 2, "phase": "backward"} | total
        return make_row(strategy=strategy, memory=make_row()["memory"] | held, peak=peak)

    return make


HALF = {"parameters": 2, "master": 0, "gradients": 2, "optimizer": 4}


@pytest.mark.parametrize(
    ("category", "said"),
    [
        ("parameters", "15.0 MiB more are weights gathered for a moment."),
        ("gradients", "15.0 MiB more are gradients on their way between the ranks."),
        ("activations", "15.0 MiB more are activations."),
    ],
)
def test_a_peak_that_turns_the_order_of_the_states_says_why(counted, make_results, category, said):
    beside = {"activations": 2} | HALF
    high = counted("zero3", states=HALF, **{category: beside[category] + 15})
    results = make_results(counted("ddp"), counted("fsdp", states=HALF), high)
    (line,) = peaks_out_of_order(results)
    assert line == (
        f"zero3-trainer holds smaller states than ddp-trainer and peaks higher: at its fullest "
        f"moment {said}"
    )
    assert line in runs_table(results).notes


def test_an_order_that_is_not_turned_needs_no_words(counted, make_results):
    assert not peaks_out_of_order(make_results(counted("ddp"), counted("fsdp", states=HALF)))
    # Nor does one that offload turns: what it keeps on the host are states too.
    high = counted("zero3_offload", states=HALF, other=16)
    assert not peaks_out_of_order(make_results(counted("ddp"), high))


def test_a_device_s_peak_that_the_tensors_don_t_explain_is_the_allocator_s(six):
    results = six(rehearsal=False, names=("ddp", "fsdp"))
    results["runs"][2]["memory"] |= {"optimizer_bytes": 0, "peak_bytes": 2**35}
    (line,) = peaks_out_of_order(results)
    assert line.startswith("fsdp-trainer holds smaller states than single-trainer and ddp-trainer")
    assert line.endswith("what its kernels and the allocator hold beside its tensors.")
