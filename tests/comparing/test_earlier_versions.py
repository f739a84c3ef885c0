"""Comparisons of three earlier commits: read, reported, continued and compared as today's are."""

import shutil
import tarfile
from pathlib import Path

import pytest

from toolkit.comparing.run.folders import differences
from toolkit.records.json_files import NOT_RECORDED, read_json, write_json
from toolkit.records.record import read_record
from toolkit.records.results import read_results

EARLIER = sorted(Path(__file__).with_name("earlier").glob("*.tar.xz"))
"""Named after day and commit. The recipe: toolkit compare --strategies single,ddp --max_steps 3
--global_batch_size 4 --output runs/first, without weights, logs and status files."""

NAMES = ("single-trainer", "ddp-trainer")


@pytest.fixture(scope="module")
def toolkit(command):
    def run(*words):
        done = command(*words, CUDA_VISIBLE_DEVICES="", COLUMNS="200")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def extracted(archive, folder):
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder


def texts(folder):
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(
    scope="module", params=EARLIER, ids=[archive.name.split(".")[0] for archive in EARLIER]
)
def reported(request, tmp_path_factory, toolkit):
    """An earlier comparison of which the report was made again, and its files before that."""
    folder = extracted(request.param, tmp_path_factory.mktemp("reported") / "first")
    before = texts(folder)
    toolkit("report", folder)
    return folder, before


@pytest.fixture
def earlier(reported, tmp_path):
    return shutil.copytree(reported[0], tmp_path / "first")


def test_there_are_three():
    assert len(EARLIER) == 3


def test_an_earlier_comparison_is_read_reported_continued_and_compared(
    earlier, reported, toolkit, tmp_path
):
    kept = read_json(earlier / "results.json")
    for name in NAMES:
        file = read_json(earlier / f"{name}-1" / "record.json")
        record = read_record(earlier / f"{name}-1")
        assert record["losses"] == file["losses"]
        assert record["training"]["cudnn_attention"] is None
        assert record["not_measured"]["training.cudnn_attention"] == NOT_RECORDED
        assert {**record["not_measured"], **file["not_measured"]} == record["not_measured"]

    before, after = reported[1], texts(earlier)
    changed = {"report.md", "results.csv", "report.html"}
    assert {name for name in after if before.get(name) != after[name]} <= changed
    assert after.keys() - before.keys() == {"report.html"}
    report = (earlier / "report.md").read_text()
    losses = [f"{row['final_loss']:.4f}" for row in kept["runs"]]
    assert all(f"| {loss} |" in report for loss in losses)

    again = ("compare", "--strategies", "single,ddp", "--max_steps", 3, "--global_batch_size", 4)
    said = toolkit(*again, "--output", earlier)
    assert said.count("is finished already") == 2
    assert {path.parent.name for path in earlier.rglob("spec.json")} == {f"{n}-1" for n in NAMES}
    results = read_results(earlier)
    assert results["complete"]
    for row, old in zip(results["runs"], kept["runs"], strict=True):
        same = ("name", "status", "losses", "grad_norms", "memory", "seconds", "phases", "traffic")
        assert {name: row[name] for name in same} == {
            name: {"host_shared_bytes": None, **old[name]} if name == "memory" else old[name]
            for name in same
        }

    newest = extracted(EARLIER[-1], tmp_path / "newest")
    assert "2 runs stand on both sides" in " ".join(toolkit("report", earlier, newest).split())


def test_a_report_is_not_written_over_where_the_results_are_damaged(earlier, toolkit):
    results = read_json(earlier / "results.json")
    del results["complete"]
    write_json(earlier / "results.json", results)
    (earlier / "ddp-trainer-1" / "record.json").write_text("{")
    before = texts(earlier)
    with pytest.raises(AssertionError, match=r"'complete' is missing.*the same `toolkit compare`"):
        toolkit("report", earlier)
    assert texts(earlier) == before


def test_only_settings_that_contradict_make_it_another_run():
    flags = ["--engine", "trainer", "--max_steps", "3", "--seed", "7"]
    then = {"strategy": "ddp", "num_processes": 2, "flags": flags}
    now = then | {"flags": [*flags[:4], "--dropout", "off", *flags[4:]]}
    assert differences(then, now) == ""
    assert differences(now, then) == "--dropout was off, and is not given now"
    seed = then | {"flags": [*now["flags"][:-1], "8"]}
    assert differences(then, seed) == "--seed was 7, and is 8 now"
    decay = now | {"flags": [*now["flags"], "--weight_decay", "0.1"]}
    assert differences(then, decay) == "--weight_decay was not given, and is 0.1 now"
    turned = then | {"flags": [*flags[2:4], *flags[:2], *flags[4:]]}
    assert differences(then, turned) == "the flags stood in another order"
    assert differences(then, now | {"tensor_size": 4}) == "tensor_size was None, and is 4 now"
