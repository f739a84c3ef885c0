"""A disk that is too small is seen before a save, and named when it fills up during one."""

import errno
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file

from toolkit.checkpoints.atomic_folder import room_missing, save_failure
from toolkit.engines.fsdp_shards import write_shards


@contextmanager
def small_files():
    """Let no file grow beyond 64 KiB: what stands in for a full disk without being root.

    A fixture would hold for pytest as well, whose own output may be a larger file.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


WRITERS = {
    "python": lambda folder: (folder / "file").write_bytes(bytes(1 << 20)),
    "torch": lambda folder: torch.save({"state": torch.zeros(1 << 18)}, folder / "file"),
    "safetensors": lambda folder: save_file({"weight": torch.zeros(1 << 18)}, folder / "file"),
    "shards": lambda folder: write_shards(folder / "sharded", {"state": torch.zeros(1 << 18)}),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_whoever_writes_a_full_disk_is_named(tmp_path, one_rank, writer):
    # Each writer has a type of its own.
    with pytest.raises(Exception) as error, small_files():  # noqa: PT011
        WRITERS[writer](tmp_path)
    words = save_failure(error.value, tmp_path)
    assert words.startswith(f"no space left on the disk of {tmp_path}, or a limit on the size of")
    assert "Make room and start again (a training: from its last checkpoint)" in words


@pytest.mark.parametrize("script", ["toolkit.train", "toolkit.rehearse"])
def test_a_rank_on_a_full_disk_ends_with_one_line_and_no_traceback(
    cold_environment, tmp_path, script
):
    flags = ["--max_steps", "1", "--output_dir", str(tmp_path / "run")]
    if script == "toolkit.rehearse":
        (tmp_path / "script.py").write_text("open('large', 'wb').write(bytes(1 << 20))\n")
        flags = ["script.py"]
    done = subprocess.run(
        [sys.executable, "-m", script, *flags],
        cwd=tmp_path,
        env=cold_environment,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, 1 << 13)),
        timeout=300,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("toolkit: ")
    assert "no space left" in last.lower()  # of the caches, or where they are there of the model


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_behind_another_error_is_named(tmp_path, number):
    error = RuntimeError("Saving failed")
    error.__cause__ = OSError(number, "any words")
    assert "no space left" in save_failure(error, tmp_path)


def test_another_error_keeps_its_words(tmp_path):
    error = PermissionError(errno.EACCES, "Permission denied", "file")
    assert save_failure(error, tmp_path) == "PermissionError: [Errno 13] Permission denied: 'file'"


def test_room_is_asked_of_the_file_system_that_the_folder_will_be_on(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    folder = tmp_path / "not" / "there yet"
    assert room_missing(folder, free // 2) is None
    words = room_missing(folder, 2 * free)
    assert words is not None
    assert words.startswith(f"no space left on the disk of {folder}: the save takes ")
    assert not folder.parent.exists()
