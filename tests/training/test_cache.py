import os
import signal
import subprocess
import sys

import pytest

from toolkit.environment import cache_root
from toolkit.errors import UsageError
from toolkit.training.cache import build_once

STUCK_BUILDER = """
import sys, time
from pathlib import Path
from toolkit.training.cache import build_once

def build(folder):
    (folder / "half").write_text("half")
    print("building", flush=True)
    time.sleep(600)

build_once(Path(sys.argv[1]), build)
"""


def test_the_cache_is_where_the_variable_says(monkeypatch, tmp_path):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("TOOLKIT_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(cache_root()) == "/home/someone/.cache/toolkit"


def test_what_is_there_is_not_built_again(tmp_path):
    built = []
    for _ in range(2):
        build_once(tmp_path / "folder", built.append)
    assert len(built) == 1


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "half").write_text("half")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        build_once(tmp_path / "folder", build)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_builder_that_was_killed_holds_up_nobody(tmp_path):
    folder = tmp_path / "folder"
    builder = subprocess.Popen(
        [sys.executable, "-c", STUCK_BUILDER, str(folder)], stdout=subprocess.PIPE, text=True
    )
    with builder:
        assert builder.stdout.readline() == "building\n"
        os.kill(builder.pid, signal.SIGKILL)
    assert not folder.exists()
    build_once(folder, lambda building: (building / "whole").write_text("whole"))
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_a_cache_that_cannot_be_written_is_a_mistake_of_the_user(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="TOOLKIT_CACHE"):
        build_once(tmp_path / "file" / "folder", lambda building: None)
