"""`toolkit report`: every report again, from `results.json` alone."""

import subprocess
import sys

import pytest

from toolkit.records.json_files import write_json

WRITTEN = ("report.md", "report.html", "results.csv")


def report(folder, cwd):
    command = [sys.executable, "-m", "toolkit.cli", "report", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_every_report_is_made_again_with_the_same_bytes(tmp_path, full_results):
    write_json(tmp_path / "results.json", full_results())
    texts = []
    for _ in range(2):
        done = report(tmp_path, tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "All 5 runs trained the same model" in " ".join(done.stdout.split())
        texts.append([(tmp_path / name).read_bytes() for name in WRITTEN])
        for name in WRITTEN:
            assert f"Written: {tmp_path / name}" in done.stdout
            (tmp_path / name).unlink()
    assert texts[0] == texts[1]


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
def test_with_nothing_to_read_it_is_one_sentence_and_a_2(tmp_path, files, said):
    folder = tmp_path / "there"
    for name, text in (files or {}).items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    if files == {}:
        folder.mkdir()
    done = report(folder, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not any((folder / name).exists() for name in WRITTEN)
