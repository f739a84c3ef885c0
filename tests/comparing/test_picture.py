"""`report.png`: its size, what it says, and what cannot break it."""

import contextlib
import json
import struct
import subprocess
import sys
from pathlib import Path

import matplotlib.text
import pytest

from toolkit.comparing.report import picture
from toolkit.comparing.report.names import redact_results
from toolkit.comparing.report.picture import page_colours, render_picture
from toolkit.comparing.report.verdict import verdict
from toolkit.errors import UsageError
from toolkit.planning.plan import plan
from toolkit.records.json_files import write_json

ROOT = Path(__file__).parents[2]

EVIL = "<b>alert</b>\"'&{{7*7}}$x_{$ \\frac{ % \x1b[31mred\x1b]0;t\x07 \ud800 \u202e 日本 _=1+1\n"


def pixels(png):
    """Return width and height, as the file itself says them."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


@contextlib.contextmanager
def noted_texts():
    """Note the texts that are drawn, each with the box that it takes, in pixels from below."""
    drawn = []
    draw = matplotlib.text.Text.draw

    def noted(self, renderer, *args, **kwargs):
        if self.get_text():
            drawn.append((self.get_text(), self.get_window_extent(renderer)))
        return draw(self, renderer, *args, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(matplotlib.text.Text, "draw", noted)
        yield drawn


@pytest.fixture
def texts():
    with noted_texts() as drawn:
        yield drawn


@pytest.fixture(scope="module")
def usual(full_results):
    """The picture of these results, unchanged, and its texts: drawn once."""
    with noted_texts() as drawn:
        return render_picture(full_results()), drawn


def words_of(texts):
    return [text for text, _ in texts]


def check_fits(texts):
    """Check that no text leaves the picture, and that none lies on another."""
    for number, (text, box) in enumerate(texts):
        assert box.x0 >= 0, text
        assert box.x1 <= picture.WIDTH, text
        assert box.y0 >= 0, text
        assert box.y1 <= picture.HEIGHT, text
        for other, its in texts[:number]:
            # A line's box has room for letters that hang; two such may touch.
            apart = box.x1 <= its.x0 + 1 or its.x1 <= box.x0 + 1
            assert apart or box.y1 <= its.y0 + 6 or its.y1 <= box.y0 + 6, (text, other)


@pytest.fixture
def report(command):
    return lambda folder, *flags: command("report", folder, *flags, cwd=folder)


def test_the_picture_lies_beside_the_results_and_is_said_where(tmp_path, full_results, report):
    write_json(tmp_path / "results.json", full_results())
    done = report(tmp_path, "--png")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"Written: {tmp_path / 'report.png'}\n"
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "report.png"}
    assert pixels((tmp_path / "report.png").read_bytes()) == (1200, 630)


def test_of_two_comparisons_there_is_no_picture(tmp_path, full_results, report):
    write_json(tmp_path / "results.json", full_results())
    done = report(tmp_path, str(tmp_path), "--png")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--png is for one comparison" in done.stderr


def test_a_folder_without_a_comparison_is_one_sentence_and_a_2(tmp_path, report):
    done = report(tmp_path, "--png")
    assert (done.returncode, done.stdout) == (2, "")
    assert "holds no results.json" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_it_is_one_sentence_and_a_2(tmp_path, full_results):
    write_json(tmp_path / "results.json", full_results())
    # A module that is None cannot be imported, and none of its name is found.
    code = f"""
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, *args):
        return None if name == "matplotlib" else PathFinder.find_spec(name, *args)

sys.meta_path[:] = [Without if each is PathFinder else each for each in sys.meta_path]
sys.argv = ["toolkit", "report", {str(tmp_path)!r}, "--png"]
from toolkit.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "toolkit: matplotlib is not installed. Run: pip install matplotlib\n"
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_it_says_the_verdict_the_memory_and_what_a_rehearsal_is(full_results, usual):
    png, texts = usual
    assert pixels(png) == (1200, 630)
    words = words_of(texts)
    assert verdict(full_results()) in " ".join(words)
    assert picture.REHEARSAL in words
    # Of 2^28 bytes each: four of states, and three quarters more at the fullest moment.
    assert words.count("1.00") == words.count("1.19") == 3
    assert "Measured on the fullest rank, GiB" in words
    assert {"states", "peak", "out of memory"} <= set(words)
    assert any(text.endswith("largest loss gap 1.2e-06") for text in words)
    check_fits(texts)


def test_on_gpus_the_peak_is_the_device_s_and_no_rehearsal_is_named(full_results, texts):
    results = full_results(rehearsal=False)
    results["environment"]["gpus"] = [{"name": "NVIDIA L4"}, {"name": "NVIDIA L4"}]
    render_picture(results)
    words = words_of(texts)
    assert words.count("1.25") == 3
    assert picture.REHEARSAL not in words
    assert any("fp32 · NVIDIA L4 · " in text for text in words)
    check_fits(texts)


@pytest.mark.parametrize("rehearsal", [True, False])
def test_results_in_which_little_was_counted_have_their_picture(bare_results, texts, rehearsal):
    assert pixels(render_picture(bare_results(rehearsal=rehearsal))) == (1200, 630)
    assert ("peak" in words_of(texts)) != rehearsal
    check_fits(texts)


def test_one_run_none_and_runs_without_any_number_have_one_too(make_results, make_row, texts):
    assert pixels(render_picture(make_results())) == (1200, 630)
    assert {"single", "15.3"} <= set(words_of(texts))
    texts.clear()
    empty = make_results(runs=[], control=None, complete=False, fixed={}, environment={})
    diverged = make_results(control=None)
    diverged["runs"][0] |= {"memory": None, "losses": [float("inf")] * 2}
    failed = make_results(control=None)
    failed["runs"][0] |= {"status": "failed", "reason": "full", "memory": None, "losses": None}
    for results in (empty, diverged, failed):
        assert pixels(render_picture(results)) == (1200, 630)
        assert "No run has measured its memory." in words_of(texts)
        planned = "The planner knows none of these strategies." not in words_of(texts)
        assert planned is bool(results["runs"])
        check_fits(texts)
        texts.clear()


def test_the_engine_is_named_where_both_ran(full_results, make_results, make_row, texts):
    render_picture(make_results(make_row()))
    assert "ddp" in words_of(texts)
    texts.clear()
    render_picture(make_results(make_row(), make_row(engine="loop")))
    assert {"ddp-trainer", "ddp-loop"} <= set(words_of(texts))


def test_texts_of_results_cannot_break_it(full_results, poisoned, texts):
    evil = poisoned(full_results(), EVIL * 3)
    assert pixels(render_picture(redact_results(evil))) == (1200, 630)
    check_fits(texts)
    assert not any("\x1b" in text or "\n" in text for text in words_of(texts))
    assert any(text.startswith("single-trainer<") for text in words_of(texts))


@pytest.mark.parametrize("name", ["_hidden", "x" * 5000, "$\\frac{$", "日本", "\n", " "])
def test_names_that_are_hostile_do_not_break_it(full_results, texts, name):
    results = full_results()
    for row in results["runs"]:
        row |= {"strategy": name, "name": name}
    results["control"] |= {"strategy": name, "name": name}
    assert pixels(render_picture(redact_results(results))) == (1200, 630)
    check_fits(texts)


def test_runs_beyond_its_room_are_counted(full_results, texts):
    results = full_results()
    results["runs"] = results["runs"] * 5
    render_picture(results)
    assert "and 19 more, in report.html" in words_of(texts)
    assert words_of(texts).count("and 19 more, in report.html") == 2
    check_fits(texts)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 0.0, -1.0, 1e300])
def test_losses_that_are_odd_are_drawn_or_left_out(full_results, texts, odd):
    results = full_results()
    results["runs"][1] |= {"losses": [4.0, odd, odd, 5.0], "final_loss": odd}
    results["runs"][2] |= {"losses": [odd], "final_loss": odd}
    assert pixels(render_picture(results)) == (1200, 630)
    check_fits(texts)


def test_states_that_a_device_does_not_hold_are_explained(full_results, usual, texts):
    assert picture.OFFLOADED not in words_of(usual[1])
    results = full_results()
    results["runs"][1] |= {"strategy": "zero2_offload", "name": "zero2_offload-trainer"}
    render_picture(results)
    assert picture.OFFLOADED in words_of(texts)
    assert any(text.startswith("zero2_off") and text.endswith("*") for text in words_of(texts))


def test_beside_what_was_measured_stands_what_the_planner_has_at_7b(usual):
    words = words_of(usual[1])
    assert "Planned at 7B, a GPU, GiB" in words
    plans = {count: plan("7b", gpus=count) for count in (2, 4)}
    for count, name in ((2, "ddp"), (2, "fsdp"), (4, "fsdp"), (2, "zero3")):
        held = plans[count].row(name).memory.allocated.middle / 2**30
        assert f"{held:,.{0 if held >= 100 else 1}f}" in words


def test_a_strategy_that_cannot_be_planned_says_so(full_results, texts):
    results = full_results()
    results["runs"][1]["strategy"] = "fsdp_hybrid"
    render_picture(results)
    assert "not planned" in words_of(texts)
    check_fits(texts)


def test_the_same_data_give_the_same_bytes(full_results, usual):
    assert render_picture(full_results()) == usual[0]


def test_its_colours_are_the_page_s():
    colours = page_colours()
    assert colours["paper"] == "#ffffff"
    assert {"ink", "muted", "card", "bad", "warn", "faint", "part-0", "part-1"} <= colours.keys()
    assert {f"series-{number}" for number in range(8)} <= colours.keys()


def test_a_secret_does_not_reach_it(tmp_path, full_results, texts):
    results = full_results()
    results["fixed"]["model"] = "hf_" + "a" * 34
    # What the toolkit writes itself has no secrets; a file may have come another way.
    (tmp_path / "results.json").write_text(json.dumps(results))
    picture.write_picture(tmp_path)
    assert words_of(texts)
    assert not any("hf_aaa" in text for text in words_of(texts))


def test_the_committed_picture_is_one():
    assert pixels((ROOT / "docs" / "images" / "comparison.png").read_bytes()) == (1200, 630)


def test_a_folder_that_takes_no_files_is_a_sentence(tmp_path, full_results, report):
    write_json(tmp_path / "results.json", full_results())
    (tmp_path / "report.png").mkdir()
    done = report(tmp_path, "--png")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "report.png" in done.stderr
    with pytest.raises((OSError, UsageError)):
        picture.write_picture(tmp_path)
