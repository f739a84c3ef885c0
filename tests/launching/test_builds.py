import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit.configs.requested import DEEPSPEED_FILE
from toolkit.engines.deepspeed_config import use_deepspeed_config
from toolkit.launching.builds import clear_stale_locks, extension_folders, stale_locks


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / "cpu_adam" / "lock"
    path.parent.mkdir()
    path.touch()
    make_old(path)
    return path


def make_old(path):
    hour_ago = time.time() - 3600
    os.utime(path, (hour_ago, hour_ago))


def test_a_lock_that_nobody_holds_is_cleared(lock):
    assert stale_locks() == [lock]
    assert clear_stale_locks() == [lock]
    assert not lock.exists()
    assert clear_stale_locks() == []


def test_a_lock_that_another_rank_clears_meanwhile_is_none(lock, monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [lock])  # as it was listed before
    lock.unlink()
    assert stale_locks() == []
    assert clear_stale_locks() == []


def test_a_rank_under_deepspeed_clears_it_and_says_so(lock, monkeypatch, capsys):
    monkeypatch.setenv(DEEPSPEED_FILE, "")  # written by the call, and put back after it
    use_deepspeed_config({"zero_optimization": {"stage": 2}}, rehearsal=True)
    assert not lock.exists()
    assert f"removed the lock of a build that was killed: {lock}" in capsys.readouterr().out


def test_a_young_lock_is_left_alone(lock):
    lock.touch()
    assert stale_locks() == []
    assert clear_stale_locks() == []
    assert lock.exists()


@pytest.mark.parametrize(
    "holding",
    [
        # As torch's FileBaton takes it.
        "import os; os.remove(lock); os.open(lock, os.O_CREAT | os.O_EXCL)",
        # As ninja works.
        "import os; os.chdir(os.path.dirname(lock))",
    ],
    ids=["holds the file", "works in the folder"],
)
def test_a_lock_with_a_living_builder_is_left_alone_until_it_dies(lock, holding):
    script = f"lock = {str(lock)!r}; {holding}; print(flush=True); import time; time.sleep(600)"
    builder = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=lock.parents[1]
    )
    try:
        assert builder.stdout
        builder.stdout.readline()
        make_old(lock)
        assert clear_stale_locks() == []
        assert lock.exists()
    finally:
        builder.kill()
        builder.communicate()
    assert clear_stale_locks() == [lock]


def test_the_default_folder_has_one_below_for_each_python_and_accelerator(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert extension_folders() == []
    (tmp_path / "torch_extensions" / "py311_cpu").mkdir(parents=True)
    assert extension_folders() == [tmp_path / "torch_extensions" / "py311_cpu"]


def test_the_lock_is_where_torch_puts_it():
    """Torch's own words, so that a release that moves its lock is noticed."""
    from importlib.util import find_spec

    spec = find_spec("torch")
    assert spec
    assert spec.origin
    utils = Path(spec.origin).parent / "utils"
    takes = (utils / "cpp_extension.py").read_text(encoding="utf-8")
    if "FileLock(os.path.join(build_directory, 'lock'))" in takes:
        return  # torch 2.15: the system's own lock on that file, which dies with its process
    assert "FileBaton(os.path.join(build_directory, 'lock'))" in takes
    assert "self.fd = os.open(self.lock_file_path, os.O_CREAT | os.O_EXCL)" in (
        utils / "file_baton.py"
    ).read_text(encoding="utf-8")


def test_the_lock_beside_a_build_that_ended_well_is_cleared_without_a_word(
    lock, monkeypatch, capsys
):
    """As torch 2.15 leaves it, which an older torch would wait for."""
    monkeypatch.setenv(DEEPSPEED_FILE, "")
    folder = lock.parent
    for name in ("cpu_adam.o", "cpu_adam.so"):
        (folder / name).touch()
        make_old(folder / name)
    use_deepspeed_config({"zero_optimization": {"stage": 2}}, rehearsal=True)
    assert not lock.exists()
    assert "lock" not in capsys.readouterr().out


def test_a_library_of_an_earlier_build_does_not_hide_that_the_last_one_was_killed(lock):
    folder = lock.parent
    (folder / "cpu_adam.so").touch()
    make_old(folder / "cpu_adam.so")
    (folder / "cpu_adam.o").touch()  # compiled anew, and not linked yet
    assert clear_stale_locks() == [lock]
