"""`toolkit report`: every report again, from `results.json` alone."""

import cProfile
import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from toolkit.comparing.report.write import remake
from toolkit.records.json_files import write_json

WRITTEN = ("report.md", "report.html", "results.csv")


def test_every_report_is_made_again_with_the_same_bytes(tmp_path, full_results, command):
    write_json(tmp_path / "results.json", full_results())
    texts = []
    words = [sys.executable, "-m", "toolkit.cli", "report", str(tmp_path)]
    # Each has the imports of another process: Python orders its sets anew there.
    for report in (
        lambda: command(*words[3:], cwd=tmp_path),
        lambda: subprocess.run(words, capture_output=True, text=True, cwd=tmp_path),
    ):
        done = report()
        assert (done.returncode, done.stderr) == (0, "")
        assert "All 5 runs trained the same model" in " ".join(done.stdout.split())
        texts.append([(tmp_path / name).read_bytes() for name in WRITTEN])
        for name in WRITTEN:
            assert f"Written: {tmp_path / name}" in done.stdout
            (tmp_path / name).unlink()
    assert texts[0] == texts[1]


MOST_CALLS = 150_000
"""Calls of functions for one more run in a report: 120,000, and 290,000 where each part of a bar is
an artist and each text is redacted wherever it stands."""


def calls_for(runs, folder, full_results):
    """Return how many functions are called for the reports of so many more runs."""
    results = full_results(rehearsal=False)
    row = results["runs"][1]
    for number in range(runs):
        copy = {"name": f"x{number}", "num_processes": 2 + number}
        results["runs"].append(row | copy)
    write_json(folder / "results.json", results)
    profile = cProfile.Profile(subcalls=False)
    profile.runcall(remake, folder, console=Console(file=io.StringIO()))
    return sum(entry.callcount for entry in profile.getstats())


def test_the_work_for_a_report_grows_with_its_runs_and_no_faster(tmp_path, full_results):
    write_json(tmp_path / "results.json", full_results(rehearsal=False))
    remake(tmp_path, console=Console(file=io.StringIO()))  # imports and caches
    none, some, twice = (calls_for(runs, tmp_path, full_results) for runs in (0, 5, 10))
    assert twice - some < 1.1 * (some - none)
    assert (twice - none) / 10 < MOST_CALLS


@pytest.mark.parametrize("content", [None, b"\x00\xff"])
def test_of_lost_results_it_says_which_command_makes_them_again(run_folders, command, content):
    file = run_folders / "results.json"
    if content is not None:
        file.write_bytes(content)
    before = sorted(run_folders.rglob("*"))
    for folders in ([run_folders], [run_folders, run_folders]):
        done = command("report", *folders)
        assert done.returncode == 2
        assert f"{file} " in (said := " ".join(done.stderr.split()))
        assert f"the same `toolkit compare` with --output {run_folders} makes it again" in said
    assert sorted(run_folders.rglob("*")) == before


def test_results_of_a_newer_toolkit_are_refused_by_name_and_left_alone(run_folders, command):
    write_json(run_folders / "results.json", {"schema": 2})
    done = command("report", run_folders)
    assert done.returncode == 2
    assert "results.json has schema 2" in done.stderr
    assert json.loads((run_folders / "results.json").read_text()) == {"schema": 2}


def test_a_folder_without_a_spec_of_ours_is_no_comparison(tmp_path, command):
    folder = tmp_path / "somebodys"
    (folder / "ddp-trainer-1").mkdir(parents=True)
    (folder / "ddp-trainer-1" / "spec.json").write_text('{"openapi": "3.0"}')
    done = command("report", folder)
    assert done.returncode == 2
    assert "holds no results.json" in done.stderr
    assert "the same `toolkit compare`" not in done.stderr
    assert [path.name for path in folder.iterdir()] == ["ddp-trainer-1"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (None, "is not a folder"),
        ({}, "holds no results.json"),
        ({"record.json": "{}"}, "is one run of a comparison. Name the folder above it."),
        ({"results.json": "{"}, "is not JSON"),
        ({"results.json": "[]"}, "was not written by the toolkit"),
        ({"results.json": '{"schema": 99}'}, "A newer toolkit wrote it"),
        ({"results.json": '{"schema": 1}'}, "is not complete"),
        (
            {"results.json": '{"schema": 1, "control": null, "environment": {}, "runs": [{}]}'},
            "is not complete",
        ),
    ],
)
def test_with_nothing_to_read_it_is_one_sentence_and_a_2(tmp_path, command, files, said):
    folder = tmp_path / "there"
    for name, text in (files or {}).items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    if files == {}:
        folder.mkdir()
    done = command("report", folder, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not any((folder / name).exists() for name in WRITTEN)
