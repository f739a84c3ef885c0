import argparse
import json
import os
import sys

import pytest

from toolkit.errors import UsageError
from toolkit.files import write_text
from toolkit.launching.outcome import Ending, classify_end
from toolkit.launching.status import (
    RankError,
    RankStatus,
    StatusFile,
    guard,
    read_statuses,
    status_folder,
)

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"


def failed(rank, time, type_="RuntimeError", message="", state="failed"):
    error = RankError(type=type_, message=message, traceback="")
    return RankStatus(rank=rank, pid=1, state=state, step=3, time=time, started=0.0, error=error)


def test_the_file_holds_what_the_contract_names(tmp_path):
    StatusFile(tmp_path, 1).running(7)
    said = json.loads((tmp_path / "rank-1.json").read_text())
    names = {"schema", "rank", "pid", "state", "step", "time", "error", "peak_bytes"}
    assert said.keys() == names | {"monotonic", "started"}
    assert (said["schema"], said["rank"], said["pid"]) == (1, 1, os.getpid())
    assert (said["state"], said["step"], said["error"]) == ("running", 7, None)


def test_a_write_leaves_no_draft_behind(tmp_path):
    status = StatusFile(tmp_path, 0)
    for step in range(3):
        status.running(step)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.json"]


def test_no_step_waits_for_the_disk(tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(os, "fsync", waited.append)
    StatusFile(tmp_path, 0).running(1)
    assert waited == []
    write_text(tmp_path / "kept", "")
    assert waited  # other files are on the disk when they have been written


def test_torn_and_foreign_files_are_left_out(tmp_path):
    StatusFile(tmp_path, 2).running(1)
    StatusFile(tmp_path, 0).running(5)
    whole = (tmp_path / "rank-0.json").read_bytes()
    (tmp_path / "rank-1.json").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "rank-3.json").write_text("[]")
    (tmp_path / "rank-4.json").write_text(whole.decode().replace("running", "dancing"))
    (tmp_path / "rank-5.json").write_bytes(b"\xff\xfe")
    (tmp_path / "rank-6.json").write_text("")
    (tmp_path / "rank-7.json").write_text("[" * 100_000)
    (tmp_path / "rank-8.json").write_text(whole.decode().replace('"step": 5', '"step": Infinity'))
    (tmp_path / "rank-9.json").mkdir()
    pid = f'"pid": {os.getpid()}'
    (tmp_path / "rank-10.json").write_text(whole.decode().replace(pid, '"pid": -1'))
    assert [(status.rank, status.step) for status in read_statuses(tmp_path)] == [(0, 5), (2, 1)]


def test_a_missing_folder_reads_as_nobody(tmp_path):
    assert read_statuses(tmp_path / "never") == []


def test_the_launchers_folder_wins_over_the_output_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("TOOLKIT_STATUS_DIR", raising=False)
    assert status_folder(tmp_path) == tmp_path / "status"
    monkeypatch.setenv("TOOLKIT_STATUS_DIR", str(tmp_path / "given"))
    assert status_folder(tmp_path) == tmp_path / "given"


def test_a_guarded_body_ends_finished(tmp_path):
    status = StatusFile(tmp_path, 0)
    with guard(status):
        assert read_statuses(tmp_path)[0].state == "running"
        status.running(4)
    assert (read_statuses(tmp_path)[0].state, read_statuses(tmp_path)[0].step) == ("finished", 4)


class Refused(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (RuntimeError("the flux is off"), "failed"),
        (KeyboardInterrupt(), "failed"),
        (UsageError("no pad token"), "usage"),
        (Refused("asked zero3, engaged ddp"), "refused"),
        (SystemExit(1), "failed"),
        (SystemExit(2), "usage"),
        (SystemExit(3), "refused"),
    ],
)
def test_a_guarded_error_is_recorded_and_goes_on(tmp_path, error, state):
    status = StatusFile(tmp_path, 0)

    def body():
        with guard(status, refused_by=(Refused,)):
            status.running(2)
            raise error

    with pytest.raises(type(error)):
        body()
    said = read_statuses(tmp_path)[0]
    assert (said.state, said.step) == (state, 2)
    assert said.error
    words = f"it ends with exit code {error}" if isinstance(error, SystemExit) else str(error)
    assert (said.error.type, said.error.message) == (type(error).__name__, words)
    assert "in body" in said.error.traceback


def test_a_script_that_refuses_its_flags_is_quoted(tmp_path, capsys):
    with pytest.raises(SystemExit), guard(StatusFile(tmp_path, 0)):
        argparse.ArgumentParser().parse_args(["--basemodel", "x"])
    said = read_statuses(tmp_path)[0]
    assert said.state == "usage"
    assert said.error.message == "its flags are refused: unrecognized arguments: --basemodel x"


@pytest.mark.parametrize("code", [0, None])
def test_leaving_early_with_status_0_is_not_finishing(tmp_path, code):
    with pytest.raises(SystemExit), guard(StatusFile(tmp_path, 0)):
        sys.exit(code)
    assert read_statuses(tmp_path)[0].state == "running"


def test_a_failure_that_the_body_recorded_stands(tmp_path):
    status = StatusFile(tmp_path, 0)

    def body():
        with guard(status):
            status.failed(ValueError("asked zero3, engaged ddp"), "refused")
            sys.exit(1)

    with pytest.raises(SystemExit):
        body()
    said = read_statuses(tmp_path)[0]
    assert said.state == "refused"
    assert str(said.error) == "ValueError: asked zero3, engaged ddp"


@pytest.mark.parametrize(
    ("type_", "message"),
    [
        ("RuntimeError", GLOO),
        ("RuntimeError", "Broken pipe"),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
        ("DistBackendError", "NCCL error: remote process exited or there was a network error"),
        ("DistNetworkError", "failed to recv, got 0 bytes"),
    ],
)
def test_an_earlier_echo_ranks_behind_the_original(type_, message):
    echo = failed(0, 1.0, type_, message)
    original = failed(1, 2.0, "ValueError", "the flux is off")
    assert classify_end(Ending(statuses=[echo, original])).reason.startswith(
        "rank 1 failed at step 3: V"
    )
    assert classify_end(Ending(statuses=[echo])).reason.startswith(
        f"rank 0 failed at step 3: {type_}"
    )


def test_among_originals_the_earliest_counts():
    late, early = failed(0, 2.0, "ValueError"), failed(1, 1.0, "UsageError", state="usage")
    assert classify_end(Ending(statuses=[late, early])).status == "usage"


def test_a_rank_that_runs_or_has_finished_has_not_failed(tmp_path):
    StatusFile(tmp_path, 0).finished()
    StatusFile(tmp_path, 1).running()
    assert not any(status.has_failed for status in read_statuses(tmp_path))


def test_a_rank_tells_its_peak_in_its_first_steps_and_when_it_fails_and_reads_it_never_between(
    tmp_path,
):
    status = StatusFile(tmp_path, 0)
    status.running()
    assert read_statuses(tmp_path)[0].peak_bytes is None
    read = []
    status.peak = lambda: read.append(status.step) or 100 + len(read)
    told = []
    for step in range(6):
        status.running(step)
        told.append(read_statuses(tmp_path)[0].peak_bytes)
    assert read == [0, 1, 2]
    assert told == [101, 102, 103, 103, 103, 103]
    status.failed(MemoryError("no more"))
    assert read_statuses(tmp_path)[0].peak_bytes == 104


def test_a_device_that_is_lost_does_not_hide_the_error(tmp_path):
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    status = StatusFile(tmp_path, 0)
    status.peak = lost
    status.failed(ValueError("the flux is off"))
    said = read_statuses(tmp_path)[0]
    assert said.error.message == "the flux is off"
    assert said.peak_bytes is None


@pytest.mark.parametrize("field", ["peak_bytes", "started", "error"])
def test_a_file_without_one_of_its_fields_is_left_out(tmp_path, field):
    StatusFile(tmp_path, 0).running(1)
    file = tmp_path / "rank-0.json"
    status = json.loads(file.read_text())
    del status[field]
    file.write_text(json.dumps(status))
    assert read_statuses(tmp_path) == []
