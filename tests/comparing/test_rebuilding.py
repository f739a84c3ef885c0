"""Results that were lost, made again from the folders of the runs."""

import io
import json
import subprocess

import pytest
from rich.console import Console

from toolkit.comparing.run.comparison import Comparison
from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.plan import build_plan
from toolkit.comparing.run.rebuilding import rebuilt, restore
from toolkit.errors import UsageError
from toolkit.launching.status import StatusFile
from toolkit.records.json_files import write_json
from toolkit.records.results import read_results

LOST = {
    "missing": None,
    "cut off": b'{"schema": 1, "runs": [',
    "no text": b"\xff\xfe\x00garbage",
    "nested": b"[" * 100_000,
    "another shape": b'{"schema": 1, "control": null, "environment": {}, "runs": [{}]}',
}


def restored(folder):
    stream = io.StringIO()
    restore(folder, console=Console(file=stream, width=200))
    return stream.getvalue()


@pytest.mark.parametrize("content", LOST.values(), ids=LOST)
def test_lost_results_are_made_again_and_what_was_there_is_kept(run_folders, content):
    file = run_folders / "results.json"
    if content is not None:
        file.write_bytes(content)

    printed = restored(run_folders)

    results = read_results(run_folders)
    assert [row["name"] for row in results["runs"]] == [
        *("single-trainer", "ddp-trainer", "fsdp-trainer")
    ]
    assert results["control"]["name"] == "single-trainer"
    assert all(row["gates"]["loss"] for row in results["runs"][1:])
    assert results["fixed"]["rows per optimizer step"] == 16
    assert results["fixed"]["flags for every run"] == "--seed 7"
    assert results["environment"] == {"gpus": [{"name": "NVIDIA L4", "memory_bytes": 2**34}]}
    lost = "results.json was lost, and it was made again from the runs"
    assert results["not_measured"]["dollars_per_hour"] == lost
    assert "made again from the runs beside it" in printed
    assert str(file) in printed
    if content is not None:
        assert file.with_name("results.json.damaged").read_bytes() == content
    assert restored(run_folders) == ""


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_what_is_fixed_stays_the_same_when_results_are_made_again(tmp_path, precision):
    options = CompareOptions(precision=precision, train_flags=("--seed", "7", "--weight_decay=0.1"))
    plan = build_plan(options, gpus=2, missing=lambda _: None)
    for run in plan.runs:
        (tmp_path / f"{run.name}-1").mkdir()
        write_json(tmp_path / f"{run.name}-1" / "spec.json", run.spec(rehearsal=plan.rehearsal))
    live = Comparison(folder=tmp_path, plan=plan, options=options, environment={})
    assert rebuilt(tmp_path).results()["fixed"] == live.results()["fixed"]


def test_a_second_damage_does_not_overwrite_the_first(run_folders):
    for content in ("first", "second"):
        (run_folders / "results.json").write_text(content)
        restored(run_folders)
    names = ("results.json.damaged", "results.json.damaged-2")
    assert [(run_folders / name).read_text() for name in names] == ["first", "second"]


def test_the_report_of_lost_results_says_what_is_not_known(run_folders, command):
    done = command("report", run_folders)
    assert (done.returncode, done.stderr) == (0, "")
    assert "results.json is missing: it is made again from the runs beside it." in done.stdout
    for name in ("report.md", "report.html"):
        assert "dollars_per_hour: results.json was lost" in (run_folders / name).read_text()


def test_a_record_that_is_damaged_as_well_leaves_a_row_that_failed_with_its_reason(run_folders):
    (run_folders / "ddp-trainer-1" / "record.json").write_bytes(b"\x00\xff")
    (run_folders / "fsdp-trainer-1" / "spec.json").write_text("{}")
    restored(run_folders)
    single, ddp = read_results(run_folders)["runs"]
    assert single["status"] == "ok"
    assert ddp["status"] == "failed"
    assert "ddp-trainer-1/record.json is not JSON" in ddp["reason"]


def test_a_run_that_failed_has_its_last_words_from_its_ranks_and_its_log(run_folders):
    failed = run_folders / "ddp-trainer-1"
    (failed / "record.json").unlink()
    status = StatusFile(failed / "status", 0)
    status.running(3)
    status.failed(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    (failed / "stdout.log").write_bytes(b"\xff\nthe last line\n")
    restored(run_folders)
    row = read_results(run_folders)["runs"][1]
    assert row["status"] == "oom"
    assert "rank 0 failed at step 3" in row["reason"]
    assert row["tail"][-1] == "the last line"
    assert (row["seconds"], row["cost"]) == (None, None)
    assert row["not_measured"]["seconds"].startswith("oom: ")


def test_a_known_fix_is_found_above_the_last_lines_that_are_shown(run_folders):
    failed = run_folders / "ddp-trainer-1"
    (failed / "record.json").unlink()
    lines = ["OSError: [Errno 28] No space left on device", *map(str, range(40))]
    (failed / "stdout.log").write_text("\n".join(lines))
    restored(run_folders)
    row = read_results(run_folders)["runs"][1]
    assert row["cause"].startswith("The disk, or a quota on it, is full.")
    assert row["fix"].startswith("Free space")
    assert row["tail"] == lines[-30:]


def test_a_run_that_was_killed_has_no_end_that_is_known(run_folders):
    (run_folders / "single-trainer-1" / "record.json").unlink()
    StatusFile(run_folders / "single-trainer-1" / "status", 0).running(2)
    comparison = rebuilt(run_folders)
    assert comparison.rows["single-trainer"]["reason"].startswith("rank 0 was gone at step 2")
    control = comparison.control()
    assert control["name"] == "ddp-trainer"
    assert control["reason"].startswith("single-trainer failed: rank 0 was gone")


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
    with pytest.raises(UsageError, match=r"results\.json does not exist"):
        restored(folder)
    done = command("report", folder)
    assert done.returncode == 2
    assert [path.name for path in folder.iterdir()] == ["ddp-trainer-1"]


def test_two_comparisons_side_by_side_are_restored_first(run_folders, tmp_path, command):
    other = tmp_path / "other"
    subprocess.run(["cp", "-r", str(run_folders), str(other)], check=True)
    done = command("report", run_folders, other)
    assert done.returncode == 0, done.stderr
    assert "3 runs stand on both sides" in " ".join(done.stdout.split())
