"""`toolkit report A B`: what is set against each other, and what is not."""

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from toolkit.comparing.report.diff.files import (
    differences,
    losses,
    memory,
    render_markdown,
    render_page,
    sections,
    show,
    speed,
    verdict,
)
from toolkit.comparing.report.diff.match import (
    combined_noise,
    loss_difference,
    match,
    speed_verdict,
)
from toolkit.records.json_files import write_json

SAME_DATA = {
    "rows per optimizer step": 16,
    "optimizer steps": 4,
    "precision": "fp32",
    "model": "tiny",
    "parameters": 1000,
    "data hash": "abc",
    "seed": 42,
    "method": "full",
}


@pytest.fixture
def two(tmp_path, full_results):
    """Write two comparisons, changed by hand, and match them."""

    def make(change_a=None, change_b=None, *, rehearsal=(False, False)):
        for folder, change, rehearses in zip("ab", (change_a, change_b), rehearsal, strict=True):
            results = full_results(rehearsal=rehearses)
            results["name"] = f"comparison-{folder}"
            results["fixed"] = dict(SAME_DATA)
            results["noise"] = {"share": 0.03, "basis": "repeats", "repeats": 3}
            if change:
                change(results)
            (tmp_path / folder).mkdir(exist_ok=True)
            write_json(tmp_path / folder / "results.json", results)
        return match(tmp_path / "a", tmp_path / "b")

    return make


def cells(section, run):
    row = next(row for row in section.rows if row[0] == run)
    return dict(zip(section.header, row, strict=True))


def printed(found):
    stream = io.StringIO()
    show(found, console=Console(file=stream, width=200))
    return " ".join(stream.getvalue().split())


def everywhere(found):
    return {
        "terminal": printed(found),
        "markdown": " ".join(render_markdown(found).replace("\\", "").split()),
        "page": " ".join(render_page(found).split()),
    }


def set_row(run, **values):
    def change(results):
        for row in results["runs"]:
            if row["name"] == run:
                row |= values

    return change


def test_equal_comparisons_differ_in_nothing(two):
    found = two()
    assert differences(found).rows == ()
    assert len(found.pairs) == len(found.a.results["runs"])
    assert found.only == ((), ())
    for run in ("ddp-trainer", "fsdp-trainer-x2", "ddp-loop"):
        assert cells(losses(found), run)["largest difference"] == "equal to the last bit"
        assert cells(memory(found), run)["states B - A"] == "equal"
        assert cells(speed(found), run)["which means"] == "too near to tell apart"
    said = verdict(found)
    assert said.startswith(f"{len(found.pairs)} runs stand on both sides.")
    assert "Losses are equal to the last bit." in said
    assert "In peak memory nothing changed." in said


def test_what_differs_is_listed_before_everything_else(two):
    def older(results):
        results["environment"] |= {
            "versions": {"torch": "2.11"},
            "gpus": [{"name": "L4", "memory_bytes": 2**34}] * 2,
            "commit": "aaa",
        }

    def newer(results):
        results["environment"] |= {
            "versions": {"torch": "2.13", "accelerate": "1.15"},
            "gpus": [{"name": "L4", "memory_bytes": 2**34}],
            "commit": "bbb",
            "driver": None,
        }
        results["fixed"]["learning rate"] = 1e-4
        results["runs"][1]["per_device_train_batch_size"] = 2
        results["runs"][1]["gradient_accumulation_steps"] = 4

    found = two(older, newer)
    assert sorted(map(list, differences(found).rows)) == [
        ["commit", "aaa", "bbb"],
        ["ddp-trainer: micro-batches of a step", "2", "4"],
        ["ddp-trainer: rows of a micro-batch", "4", "2"],
        ["driver", "not recorded", "none"],
        ["gpus", "2 x name L4, memory 16.00 GiB", "name L4, memory 16.00 GiB"],
        ["learning rate", "not recorded", "0.0001"],
        ["version of accelerate", "not recorded", "1.15"],
        ["version of torch", "2.11", "2.13"],
    ]
    assert next(iter(sections(found))).title == "What differs"
    for text in everywhere(found).values():
        assert text.index("version of torch") < text.rindex("Speed")


def test_other_data_keep_losses_apart_and_nothing_else(two):
    def other(results):
        results["fixed"]["data hash"] = "def"
        for row in results["runs"]:
            row["final_loss"] = 3.25 if row["final_loss"] is not None else None

    found = two(None, other)
    assert all(loss_difference(found, pair)[0] is None for pair in found.pairs)
    for pair in found.pairs:
        shown = cells(losses(found), pair.name)
        assert set(shown.values()) == {pair.name, "other data hash"}
    sentence = "Losses are not compared: not the same training: data hash is abc in A, def in B."
    for text in everywhere(found).values():
        assert sentence in text
        assert "3.25" not in text
    assert cells(speed(found), "ddp-trainer")["B / A"] == "1.000"
    assert cells(memory(found), "ddp-trainer")["peak B - A"] == "equal"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "another"),
        ("parameters", 1001),
        ("seed", 7),
        ("rows per optimizer step", 32),
        ("precision", "bf16"),
        ("optimizer steps", 5),
    ],
)
def test_another_training_keeps_losses_apart(name, value, two):
    found = two(None, lambda results: results["fixed"].update({name: value}))
    assert found.other_training.short == f"other {name}"


def test_without_a_recorded_hash_losses_are_not_known_to_belong_together(two):
    def forgotten(results):
        del results["fixed"]["data hash"]

    found = two(forgotten, forgotten)
    assert found.other_training.short == "data hash not recorded"
    assert "not known to be the same training" in verdict(found)


@pytest.mark.parametrize(
    ("changed", "value", "step", "shown"),
    [
        ([5.0, 4.5, 4.25, 4.0], 0.0, 1, "equal to the last bit"),
        ([5.0, 4.5, 4.75, 4.1], 0.5, 3, "5.0e-01 at step 3"),
        ([5.0, math.nan, 4.25, 4.0], math.inf, 2, "inf at step 2"),
    ],
)
def test_the_largest_difference_is_found_step_by_step(changed, value, step, shown, two):
    found = two(None, set_row("fsdp-trainer-x2", losses=changed))
    pair = next(pair for pair in found.pairs if pair.name == "fsdp-trainer-x2")
    assert loss_difference(found, pair) == ((value, step), None)
    assert cells(losses(found), "fsdp-trainer-x2")["largest difference"] == shown
    if value:
        assert f"({pair.name}, step {step})" in verdict(found)


def test_losses_that_are_not_finite_on_both_sides_are_the_same(two):
    change = set_row("fsdp-trainer-x2", losses=[5.0, math.nan, math.inf, 4.0])
    found = two(change, change)
    pair = next(pair for pair in found.pairs if pair.name == "fsdp-trainer-x2")
    assert loss_difference(found, pair)[0] == (0.0, 1)


def test_runs_of_another_batch_or_length_have_no_loss_in_common(two):
    found = two(set_row("ddp-loop", losses=[5.0]), set_row("fsdp-trainer-x2", num_processes=2))
    notes = " ".join(losses(found).notes)
    assert "ddp-loop (largest difference): A has losses of 1 steps, B of 4" in notes
    found = two(None, set_row("fsdp-trainer-x2", per_device_train_batch_size=8))
    notes = " ".join(losses(found).notes)
    assert "16 rows in an optimizer step in A, 32 in B" in notes


@pytest.mark.parametrize(
    ("speeds", "means"),
    [
        ((1000.0, 1100.0), "B is faster"),
        ((1000.0, 1029.0), "too near to tell apart"),
        ((1029.0, 1000.0), "too near to tell apart"),
        ((1031.0, 1000.0), "B is slower"),
    ],
)
def test_a_speed_is_another_only_beyond_the_noise(speeds, means, two):
    found = two(*(set_row("ddp-trainer", tokens_per_second=speed) for speed in speeds))
    shown = cells(speed(found), "ddp-trainer")
    assert shown["which means"] == means
    assert shown["B / A"] == f"{speeds[1] / speeds[0]:.3f}"
    said = verdict(found)
    assert ("B is faster in ddp-trainer (1.10 times A)" in said) is (means == "B is faster")
    assert ("B is slower in ddp-trainer (0.97 times A)" in said) is (means == "B is slower")


def test_the_noise_of_both_sides_counts(two):
    def loud(results):
        results["noise"] = {"share": 0.2, "basis": "steps", "repeats": 1}

    found = two(None, loud)
    expected = math.exp(math.sqrt((math.log(1.03) ** 2 + math.log(1.2) ** 2) / 2)) - 1
    assert combined_noise(found.a, found.b) == (pytest.approx(expected), None)
    assert (speed_verdict(found, 1.13), speed_verdict(found, 1.15)) == ("near", "faster")
    assert "on the steps of one start each" in speed(found).text
    # Of two sides with the same noise it is the same.
    assert two().noise == pytest.approx(0.03)


def test_an_unknown_noise_is_said_in_words(two):
    def silent(results):
        results["noise"] = None
        results["not_measured"] = {"noise": "one start of each run"}

    found = two(silent, set_row("ddp-trainer", tokens_per_second=2000.0))
    assert cells(speed(found), "ddp-trainer")["which means"] == "not known"
    assert "is not known: A: one start of each run" in speed(found).text
    assert "ddp-trainer 2.00" in verdict(found)
    assert "was not measured on both sides" in verdict(found)
    assert "faster" not in verdict(found)


def test_a_rehearsal_is_not_held_against_a_gpu(two):
    found = two(rehearsal=(True, False))
    words = "one side is a rehearsal on the CPU, the other ran on GPUs"
    shown = cells(speed(found), "ddp-trainer")
    assert (shown["B / A"], shown["which means"]) == ("n/a", "n/a")
    assert cells(memory(found), "ddp-trainer")["peak B - A"] == "n/a"
    assert cells(memory(found), "ddp-trainer")["states B - A"] == "equal"
    assert words in " ".join(memory(found).notes)
    for text in everywhere(found).values():
        assert f"Speeds are not compared: {words}." in text


def test_of_two_rehearsals_no_speed_is_claimed(two):
    found = two(None, set_row("ddp-trainer", tokens_per_second=9000.0), rehearsal=(True, True))
    assert "whose speeds say nothing about GPUs" in verdict(found)
    assert "faster" not in verdict(found)
    for text in everywhere(found).values():
        assert "tokens/s" not in text
        assert "status A" in text
    assert "tokens/s A" in speed(replace(found, show_speed=True)).header


def test_memory_and_traffic_changes_have_their_sign_and_share(two):
    def leaner(results):
        row = results["runs"][2]
        row["memory"] = row["memory"] | {"peak_bytes": 2**29, "optimizer_bytes": 2**27}
        row["traffic"]["collectives"][0]["payload_bytes"] = 2**30

    found = two(None, leaner)
    shown = cells(memory(found), "fsdp-trainer-x2")
    assert shown["peak B - A"] == "-0.12 GiB (-20.0%)"
    assert shown["states B - A"] == "-0.12 GiB (-25.0%)"
    assert shown["traffic B - A"] == "+0.50 GiB (+100.0%)"
    assert "In peak memory fsdp-trainer-x2 changed most, by -0.12 GiB (-20.0%)." in verdict(found)


def test_a_run_that_failed_on_one_side_is_named_with_the_reason(two):
    fixed = {"status": "ok", "reason": None, "tokens_per_second": 500.0, "losses": [5.0] * 4}
    found = two(None, set_row("zero3-trainer", **fixed))
    assert "zero3-trainer: oom in A, ok in B." in verdict(found)
    shown = cells(speed(found), "zero3-trainer")
    assert (shown["status A"], shown["status B"]) == ("oom", "ok")
    assert (shown["tokens/s A"], shown["tokens/s B"], shown["B / A"]) == ("n/a", "500", "n/a")
    notes = " ".join(speed(found).notes)
    assert "A: oom: rank 1 failed at step 2: OutOfMemoryError" in notes
    assert "tokens/s A" in notes
    assert "tokens/s B" not in notes


def test_runs_match_by_strategy_engine_and_processes(two):
    def more(results):
        results["runs"][1]["num_processes"] = 4
        results["runs"].append(results["runs"][2] | {"num_processes": 8})

    found = two(None, more)
    assert [(row["strategy"], row["num_processes"]) for row in found.only[0]] == [("ddp", 2)]
    assert [(row["strategy"], row["num_processes"]) for row in found.only[1]] == [
        ("ddp", 4),
        ("fsdp", 8),
    ]
    of_one_side = sections(found)[-1]
    assert not of_one_side.text
    assert [*of_one_side.header] == ["run", "processes", "side", "status"]
    assert [*of_one_side.rows[0]] == ["ddp-trainer", "2", "A", "ok"]
    assert len(of_one_side.rows) == 3

    found = two(None, lambda results: results.update(runs=[]))
    assert verdict(found).startswith("A and B have no run in common")


def test_what_a_run_says_cannot_become_part_of_the_page(two, monkeypatch):
    evil = "<script>alert(1)</script> | `x` [a](http://b)\n# heading"

    def taken(results):
        results["name"] = evil
        results["fixed"]["data hash"] = evil
        results["runs"][-1]["reason"] = "=cmd()"

    found = two(taken, lambda results: results["environment"].update(platform=evil))
    page, markdown = render_page(found), render_markdown(found)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "default-src 'none'" in page
    assert "<script>" not in markdown
    assert "\n# heading" not in markdown
    assert r"\| \`x\` \[a\]" in markdown


def test_the_verb_prints_and_writes_only_where_it_is_told(two, tmp_path, command):
    two(None, lambda results: results["fixed"].update({"data hash": "def"}))
    before = sorted(tmp_path.rglob("*"))
    done = command("report", "a", "b", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "A: comparison-a (a)" in done.stdout
    assert "Losses are not compared" in done.stdout
    assert sorted(tmp_path.rglob("*")) == before

    done = command("report", "a", "b", "--to", "c/d", cwd=tmp_path)
    assert done.returncode == 0
    assert sorted(path.name for path in (tmp_path / "c" / "d").iterdir()) == [
        "side-by-side.html",
        "side-by-side.md",
    ]


def test_mistakes_are_one_sentence_and_a_2(two, tmp_path, command):
    two()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for arguments, said in (
        (("a", "link"), "are the same comparison"),
        (("a", "empty"), "holds no results.json"),
        (("none", "b"), "none is not a folder"),
        (("a", "--to", "c"), "--to is for two comparisons"),
        (("a", "b", "--to", "file"), "file takes no files"),
    ):
        done = command("report", *arguments, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
