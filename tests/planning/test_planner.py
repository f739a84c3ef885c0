import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from io import StringIO
from itertools import pairwise

import pytest
from rich.console import Console
from typer.testing import CliRunner

from toolkit.cli import app
from toolkit.errors import UsageError
from toolkit.jobs.terms import CATEGORIES
from toolkit.planning.plan import plan
from toolkit.planning.render import plans
from toolkit.planning.render.plans import heading
from toolkit.planning.render.plot import GPU_COUNTS
from toolkit.planning.speed.traffic import collectives
from toolkit.strategies import STRATEGIES

GIB = 2**30
TERM_KEYS = ("category", "name", "bytes", "place", "phases", "formula", "inputs")
"""Of a term in schema 1."""


@pytest.fixture(scope="module")
def found():
    return plan("7b", gpus=2, gpu="L4", strategies="all", batch=2, tokens=1e9, dollars_per_hour=0.7)


def printed(show, *arguments, width=200):
    console = Console(file=StringIO(), width=width, force_terminal=False)
    show(*arguments, console)
    return console.file.getvalue()


def test_every_strategy_has_a_row_or_a_reason(found):
    names = {row.strategy.name for row in found.rows}
    assert names | set(found.left_out) == set(STRATEGIES)
    assert all(found.left_out.values())


def test_single_runs_on_one_gpu_whatever_was_asked(found):
    assert found.row("single").job.gpus == 1
    assert found.row("ddp").job.gpus == 2


def test_the_terms_that_live_at_the_peak_make_up_the_total(found):
    for row in found.rows:
        memory = row.memory
        alive = [t for t in memory.terms if t.place == "gpu" and memory.peak_phase in t.phases]
        assert sum(t.bytes.high for t in alive) == pytest.approx(memory.total.high)
        assert sum(t.bytes.low for t in alive) == pytest.approx(memory.total.low)
        parts = memory.by_category()
        assert set(parts) <= set(CATEGORIES)
        assert sum(part.high for part in parts.values()) == pytest.approx(memory.total.high)


def test_more_of_anything_never_needs_less_memory():
    def needed(**options):
        return [
            plan("1b", strategies=name, **{"batch": 2, "sequence": 1024} | options)
            .rows[0]
            .memory.total
            for name in ("ddp", "zero2", "zero3", "fsdp")
        ]

    base = needed()
    for more in ({"batch": 3}, {"sequence": 1100}, {"attention": "eager"}, {"accumulation": 2}):
        for before, after in zip(base, needed(**more), strict=True):
            # Gradients that stay from step to step leave no gaps of the step's sizes.
            assert after.high >= 0.99 * before.high, more
    for less in ({"checkpointing": True}, {"method": "lora"}, {"chunked_loss": True}, {"gpus": 4}):
        for before, after in zip(base, needed(**less), strict=True):
            assert after.high <= before.high, less


def test_json_holds_every_term_with_its_formula(found):
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["schema"] == 1
    assert data["model"]["parameters"] == found.model.parameters
    for row, known in zip(data["rows"], found.rows, strict=True):
        assert len(row["memory"]["terms"]) == len(known.memory.terms) > 5
        assert all(term["formula"] for term in row["memory"]["terms"])
        assert {tuple(term) for term in row["memory"]["terms"]} == {TERM_KEYS}
        assert row["memory"]["total"]["high"] == known.memory.total.high
        assert row["memory"]["states"]["optimizer"]["gpu"] == known.memory.states.optimizer.gpu
        assert row["cost"]["dollars"]["high"] > row["cost"]["dollars"]["low"] > 0
        assert row["verdict"]["answer"] == known.verdict.answer


def test_a_dictionary_holds_what_json_would_give_back(found):
    terms = found.to_dict()["rows"][0]["memory"]["terms"]
    assert terms == json.loads(json.dumps(terms))


def test_json_says_why_something_is_null():
    (row,) = plan("1b", strategies="ddp").to_dict()["rows"]
    for field in ("verdict", "speed", "largest_batch", "longest_sequence", "cost"):
        assert row[field] is None
        assert "--gpu" in row["not_planned"][field]


def test_the_table_has_no_empty_cell_and_the_bars_reach_the_limit(found):
    text = printed(plans.show_plan, found)
    for name in STRATEGIES:
        assert name in text
    assert "does not fit" in text
    bars = [line for line in text.splitlines() if line.startswith("zero3 ") and "|" in line]
    assert len(bars) == 1
    assert "O" in bars[0]


def test_one_strategy_alone_shows_limits_and_remedies():
    text = printed(plans.show_plan, plan("7b", gpus=2, gpu="L4", strategies="zero2", batch=4))
    assert "does not fit: a GPU is expected to need" in text
    assert "activation checkpointing: " in text
    assert "Costs: " in text
    assert "For sure fits no batch at all" in text
    small = printed(plans.show_plan, plan("125m", gpu="H100", strategies="ddp", tokens=1_000_000))
    assert "fits: a GPU is expected to need" in small
    assert "1,000,000 tokens take" in small


def test_70b_fits_32_h100_under_fsdp_once_gradients_are_synchronised_each_time():
    asked = {"gpu": "H100", "gpus": 32, "nodes": 4, "strategies": "fsdp", "accumulation": 4}
    without, synced = (
        plan("meta-llama/Llama-3.1-70B", checkpointing=True, sync_each_batch=sync, **asked).rows[0]
        for sync in (False, True)
    )
    assert (without.verdict.answer, synced.verdict.answer) == ("does not fit", "fits")
    assert without.together.job == synced.job
    assert "--sync_each_batch" in without.together.name
    assert "4 times a step, not once" in without.together.cost
    assert not any("--sync_each_batch" in remedy.name for remedy in synced.remedies)


def test_a_narrow_terminal_cuts_no_number(found):
    wide, narrow = (printed(plans.show_plan, found, width=width) for width in (300, 40))
    row = next(line for line in wide.splitlines() if line.startswith("zero3 "))
    assert row.rstrip() in narrow
    assert "…" not in narrow


def test_rows_longer_than_the_model_knows_are_noted_and_the_default_is_no_longer():
    assert plan("gpt2").rows[0].job.sequence == 1024
    for sequence, noted in ((None, 0), (4096, 0), (4097, 1)):
        notes = plan("meta-llama/Llama-2-7b-hf", sequence=sequence).notes
        assert [note.count("4,096 positions: longer rows") for note in notes] == [1] * noted


def test_hours_and_dollars_stand_in_the_table_once_tokens_are_given(found):
    text = printed(plans.show_plan, found)
    header = next(line for line in text.splitlines() if line.startswith("strategy"))
    assert header.split()[-2:] == ["hours", "dollars"]


def test_columns_that_need_words_are_explained_where_they_stand(found):
    text = printed(plans.show_plan, found)
    assert "rows: the largest micro-batch" in text
    assert "RAM GiB: needed on each node" in text
    without_gpu = printed(plans.show_plan, plan("7b"))
    assert "rows: " not in without_gpu
    assert "RAM GiB:" not in without_gpu


def test_ram_that_is_missing_is_the_margin_that_is_shown():
    (row,) = plan("7b", gpu="A100-80", strategies="zero3_offload", host_gib=64).rows
    assert row.verdict.answer == "does not fit"
    assert row.verdict.margin_bytes > 0 > row.verdict.worst_margin_bytes
    said = plans.verdict_sentence(row.verdict)
    assert "to spare at worst" in said
    assert "of 64," in said
    assert said.endswith("GiB short.")


def test_the_course_is_compared_only_with_what_it_teaches():
    lora = plan("1b", strategies="ddp", method="lora")
    assert "course" not in printed(plans.explain, lora, width=400)


def test_explain_prints_each_formula_with_its_inputs(found):
    text = printed(plans.explain, found, width=400)
    for row in found.rows:
        for term in row.memory.terms:
            assert term.formula in text
        for term in row.speed.terms:
            assert term.formula in text
        for one in collectives(row.job):
            assert f"{one.kind} of {one.purpose}: " in text
    assert text.count("model states by the course's formula") == len(found.rows)


def test_explain_says_where_a_term_lies_and_when_it_is_not_at_the_peak():
    offloaded = plan("7b", strategies="zero3_offload")
    (row,) = offloaded.rows
    text = printed(plans.explain, offloaded, width=400)
    for term in row.memory.terms:
        place = "" if term.place == "gpu" else f" [{term.place}]"
        lines = re.findall(rf"{re.escape(f'{term.category}: {term.name}{place}: ')}.*", text)
        alive = row.memory.peak_phase in term.phases
        assert any(("not at the peak" not in line) is alive for line in lines), term


def test_one_gpu_is_planned_with_offloads_in_place_of_sharding():
    names = [row.strategy.name for row in plan("7b", gpu="L4", gpus=1).rows]
    assert names == ["single", "zero2_offload", "zero3_offload", "fsdp_offload"]


def test_a_plan_without_a_gpu_says_what_a_gpu_would_add():
    assert "--gpu" in printed(plans.show_plan, plan("7b"))


@pytest.mark.parametrize("name", ["memory.svg", "memory.png"])
def test_the_figure_is_drawn(found, tmp_path, name):
    found.plot(tmp_path / name)
    if name.endswith("png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        return
    text = (tmp_path / name).read_text()
    ET.fromstring(text)
    for said in (
        "zero3_offload",
        "L4: ",
        "GiB on the fullest GPU",
        "by strategy",
        "by number of GPUs",
        f">{heading(found)[:20]}",
        ">GPUs</text>",
        *(f">{category}</text>" for row in found.rows for category in row.memory.by_category()),
    ):
        assert said in text
    places = [float(re.search(rf' x="([0-9.]+)"[^>]*>{n}</text>', text)[1]) for n in GPU_COUNTS]
    apart = [right - left for left, right in pairwise(places)]
    assert apart == pytest.approx([apart[0]] * len(apart))  # each is twice the one before


def test_a_figure_of_another_kind_is_refused(tmp_path):
    found = plan("7b", gpu="L4", gpus=1, strategies="single")
    with pytest.raises(UsageError, match=r"\.svg"):
        found.plot(tmp_path / "memory.pdf")
    with pytest.raises(UsageError, match="can't be written"):
        found.plot(tmp_path / "nowhere" / "memory.svg")


def test_a_notebook_sees_a_table_and_no_markup_of_a_users(tmp_path):
    import shutil

    folder = tmp_path / "<b>evil"
    folder.mkdir()
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "architectures": ["GPT2LMHeadModel"],
                "model_type": "gpt2",
                "n_embd": 64,
                "n_layer": 2,
                "n_head": 2,
                "vocab_size": 100,
                "n_positions": 64,
            }
        )
    )
    shutil.copy(config, folder)
    answer = plan(folder)
    html = answer._repr_html_()
    assert "<table>" in html
    assert '<th scope="row">zero3</th>' in html
    assert "allocated: GiB of tensors on the fullest GPU" in html
    assert "".join(repr(answer).split()).startswith("".join(plans.heading(answer).split()))
    assert "zero3" in repr(answer)
    assert "<b>evil" not in html
    assert "&lt;b&gt;evil" in html


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "no/such-model"}, "no/such-model"),
        ({"gpu": "L5"}, "L5"),
        ({"gpus": 0}, "gpus is 0"),
        ({"gpus": 3, "nodes": 2}, "3 GPUs don't spread evenly over 2 nodes"),
        ({"nodes": 0}, "nodes is 0"),
        ({"gpus": 512, "nodes": 2}, "a node has at most 16"),
        ({"gpus": 11}, "11 GPUs don't fill nodes"),
        ({"batch": -1}, "batch is -1"),
        ({"sequence": 10**12}, "sequence is"),
        ({"strategies": "zero4"}, "zero4"),
        ({"strategies": ()}, "Name a strategy"),
        ({"model": "gpt2", "sequence": 2048}, "learned positions for 1,024"),
        ({"model": "7,5b"}, "7,5b"),
        ({"host_gib": -5.0}, "host_gib"),
        ({"tokens": 0.0}, "tokens is 0"),
        ({"dollars_per_hour": -1.0}, "dollars_per_hour is -1.0"),
        ({"internode_gbps": float("nan")}, "internode_gbps"),
        ({"gpu": "T4", "precision": "bf16"}, "no bf16"),
    ],
)
def test_a_mistake_is_one_sentence(options, said):
    with pytest.raises(UsageError, match=said):
        plan(**{"model": "1b"} | options)


def test_the_command_answers_without_torch_and_with_status_2_for_a_mistake(tmp_path):
    script = (
        "import sys; sys.argv = ['toolkit', *sys.argv[1:]]\n"
        "from toolkit.cli import app\n"
        "app(standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'huggingface_hub'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    for words in (
        ["plan", "7b", "--gpus", "2"],
        ["plan", "0.5b", "--gpu", "L4", "--all", "--json"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", script, *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"]
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.cli", "plan", "7b", "--gpu", "nothing"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("json_flag", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize(
    ("words", "answers", "code"),
    [
        ("Qwen/Qwen2.5-0.5B --gpu L4 --strategy ddp,zero3", {"fits"}, 0),
        ("Qwen/Qwen2.5-0.5B --gpu L4 --strategy zero3 --batch 2", {"tight"}, 0),
        ("7b --gpu L4 --strategy ddp,zero3", {"does not fit"}, 1),
        ("7b --strategy ddp,zero3", {None}, 0),
    ],
    ids=["fits", "tight", "nothing", "no-gpu"],
)
def test_the_exit_code_is_1_where_nothing_fits_and_the_answer_is_printed(
    words, answers, code, json_flag
):
    result = CliRunner().invoke(app, ["plan", *words.split(), *json_flag], catch_exceptions=False)
    assert result.exit_code == code
    if not json_flag:
        assert "GPUs " in result.stdout
        return
    rows = json.loads(result.stdout)["rows"]
    assert {row["verdict"] and row["verdict"]["answer"] for row in rows} == answers


def test_where_none_of_several_fits_the_nearest_is_named_as_the_next_to_plan():
    answer = plan("7b", gpu="L4", gpus=2, strategies="ddp,zero3,zero1")
    (note,) = [note for note in answer.all_notes if "None of these fits" in note]
    assert "--strategy zero3" in note
    assert note in answer._repr_html_()
    for others in ({"strategies": "zero3"}, {"gpu": "B300"}, {"gpu": None}):
        answer = plan("7b", **{"gpu": "L4", "gpus": 2, "strategies": "ddp,zero3"} | others)
        assert not any("None of these fits" in note for note in answer.all_notes)


def test_many_gpus_without_nodes_are_planned_as_nodes_of_eight_and_a_note_says_so():
    answer = plan("7b", gpu="H100", gpus=512, strategies="fsdp")
    assert answer.row("fsdp").job.nodes == 64
    assert any("64 nodes of 8" in note for note in answer.notes)
    given = plan("7b", gpu="H100", gpus=512, nodes=64, strategies="fsdp")
    assert not any("nodes of" in note for note in given.notes)
    assert given.row("fsdp").speed == answer.row("fsdp").speed


def test_an_assumed_network_is_told_on_the_page_and_in_json():
    answer = plan("7b", gpu="H100", gpus=16, strategies="fsdp")
    speed = answer.to_dict()["rows"][0]["speed"]
    assert speed["internode_assumed"] is True
    assert speed["internode_bytes_per_second"] == {"low": 400e9, "high": 400e9}
    assert "3,200 Gb/s" in answer._repr_html_()
    own = plan("7b", gpu="H100", gpus=16, strategies="fsdp", internode_gbps=100)
    assert own.to_dict()["rows"][0]["speed"]["internode_assumed"] is False
    assert "3,200 Gb/s" not in own._repr_html_()


def test_more_gpus_fill_the_node_and_then_whole_nodes_like_it():
    def more(gpus, **options):
        row = plan("30b", gpu="A100-80", gpus=gpus, strategies="fsdp", **options).row("fsdp")
        return next(remedy.job for remedy in row.remedies if " GPUs" in remedy.name)

    filled, of_5, of_8 = more(3), more(10, nodes=2), more(8)
    assert of_8.gpus == 8 * of_8.nodes > 8
    assert of_5.gpus == 5 * of_5.nodes > 10
    assert filled.gpus == of_8.gpus


def test_gradients_reduced_in_fp32_send_twice_the_bytes_under_fsdp_alone():
    def sent(*flags):
        words = ["plan", "1b", "--strategy", "ddp,fsdp", "--json", *flags]
        rows = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)["rows"]
        return [
            sum(c["payload_bytes"] for c in row["traffic"] if "gradients" in c["purpose"])
            for row in rows
        ]

    (ddp, fsdp), (same, raised) = sent(), sent("--reduce-in-fp32")
    assert (same, raised) == (ddp, 2 * fsdp)
    assert fsdp > 0


def test_compiling_is_an_option_of_the_command_line_with_its_note_in_the_answer():
    def rows(*flags):
        words = ["plan", "1b", "--gpu", "a100-80gb", "--batch", "8", "--strategy", "ddp,zero3"]
        words += ["--json", *flags]
        return json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)["rows"]

    for eager, compiled, less in zip(rows(), rows("--compile"), (True, False), strict=True):
        assert (eager["job"]["compile"], compiled["job"]["compile"]) == (False, True)
        high = [row["speed"]["step_seconds"]["high"] for row in (eager, compiled)]
        assert (high[1] < high[0]) == less
        assert "ompile" in " ".join(compiled["speed"]["notes"])
        held = [row["memory"]["allocated"]["high"] for row in (eager, compiled)]
        assert (held[1] < held[0]) == less


def test_one_gpu_has_a_row_for_each_strategy_that_runs_on_one_process():
    found = plan("3b", gpus=1, gpu="l4", strategies="all", host_gib=200, checkpointing=True)
    splits = {"tensor", "tensor_ddp", "context", "ulysses", "pipeline", "layer_split", "three_d"}
    assert set(found.left_out) == {"ddp", "fsdp_hybrid", "parameter_server", *splits}
    assert "needs at least 2 processes" in found.left_out["ddp"]
    answers = {row.strategy.name: row.verdict.answer for row in found.rows}
    assert answers["single"] == "does not fit"
    assert answers["zero2_offload"] == answers["zero3_offload"] == "fits"
    for row in found.rows:
        assert row.speed.step_seconds.low > 0


def test_three_figures_stand_in_the_table_and_in_the_json():
    made = plan("7b", gpu="A100-80", gpus=8, strategies="fsdp")
    memory = made.to_dict()["rows"][0]["memory"]
    assert memory["allocated"]["high"] < memory["expected_bytes"] < memory["worst_bytes"]
    assert (memory["total"]["low"], memory["total"]["high"]) == (
        memory["expected_bytes"],
        memory["worst_bytes"],
    )
    header = printed(plans.show_plan, made).splitlines()[1]
    assert header.split()[2:5] == ["allocated", "expected", "worst"]


def test_the_command_line_has_both_kinds_of_checkpointing_and_expandable_segments():
    def worst(*flags):
        words = [
            "plan",
            "7b",
            "--gpus",
            "8",
            "--batch",
            "4",
            "--strategy",
            "fsdp",
            "--json",
            *flags,
        ]
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        (row,) = json.loads(result.stdout)["rows"]
        return row["memory"]["worst_bytes"]

    plain, full, selective = worst(), worst("--checkpointing"), worst("--selective")
    assert full < selective < plain
    assert worst("--selective", "--checkpointing") == selective
    assert worst("--expandable-segments") < plain
