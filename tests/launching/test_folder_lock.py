import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.errors import UsageError
from toolkit.launching.folder_lock import can_be_marked, is_marked, lock_folder

HOLDS = """
import sys, time
from pathlib import Path
from toolkit.launching.folder_lock import lock_folder
lock = lock_folder(Path(sys.argv[1]), "run")
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_gone_however_it_went(tmp_path):
    folder = tmp_path / "deep" / "run"
    command = [sys.executable, "-c", HOLDS, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"Another run is working in {folder}. Wait for it"):
            lock_folder(folder, "run")
        first.kill()
    with lock_folder(folder, "run"):
        assert is_marked(folder, "run")
    lock_folder(folder, "run").release()


def test_the_mark_says_whose_folder_it_is_and_an_older_lock_file_says_nothing(tmp_path):
    lock_folder(tmp_path / "run", "run").release()
    with pytest.raises(UsageError, match="is no lock file of a comparison"):
        lock_folder(tmp_path / "run", "comparison")
    assert is_marked(tmp_path / "run", "run")
    assert not can_be_marked(tmp_path / "run", "comparison")

    old = tmp_path / "old"
    old.mkdir()
    (old / ".lock").touch()
    assert can_be_marked(old, "run")
    assert not is_marked(old, "run")
    lock_folder(old, "run").release()
    assert is_marked(old, "run")


def link(path):
    path.symlink_to(path.parent / "victim")


def dangling_link(path):
    path.symlink_to(path.parent / "nowhere")


def somebodys_file(path):
    path.write_text("another program's\n")


@pytest.mark.parametrize("make", [link, dangling_link, somebodys_file, os.mkdir, os.mkfifo])
def test_what_is_no_lock_file_of_ours_is_refused_and_left_as_it_is(tmp_path, make):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    make(tmp_path / ".lock")
    before = os.lstat(tmp_path / ".lock")
    names = sorted(os.listdir(tmp_path))
    for worker in ("run", "comparison"):
        assert not can_be_marked(tmp_path, worker)
        assert not is_marked(tmp_path, worker)
        with pytest.raises(UsageError, match=r"\.lock is no lock file of a"):
            lock_folder(tmp_path, worker)
    assert victim.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == names
    assert os.path.samestat(os.lstat(tmp_path / ".lock"), before)
    assert os.lstat(tmp_path / ".lock").st_mtime_ns == before.st_mtime_ns


def test_undone_it_leaves_the_folder_as_it_was(tmp_path):
    lock_folder(tmp_path / "a" / "b", "run").undo()
    assert os.listdir(tmp_path) == []

    (tmp_path / "log").write_text("mine")
    lock_folder(tmp_path, "run").undo()
    assert os.listdir(tmp_path) == ["log"]

    lock_folder(tmp_path, "run").release()
    lock_folder(tmp_path, "run").undo()
    assert is_marked(tmp_path, "run")  # by the first


def test_a_lock_file_that_its_holder_has_removed_meanwhile_locks_nothing(tmp_path, monkeypatch):
    other = lock_folder(tmp_path, "run")
    locks = fcntl.flock

    def undone_just_before(number, operation):
        monkeypatch.setattr(fcntl, "flock", locks)
        other.undo()
        locks(number, operation)

    monkeypatch.setattr(fcntl, "flock", undone_just_before)
    with lock_folder(tmp_path, "run"), pytest.raises(UsageError, match="Another run is working"):
        lock_folder(tmp_path, "run")


def test_a_folder_below_a_file_or_on_a_read_only_file_system_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "run", Path("/proc/self/run")):
        with pytest.raises(UsageError, match=f"{folder} takes no files: "):
            lock_folder(folder, "run")
