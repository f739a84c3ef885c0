"""A machine to put together for the doctor: GPUs behind a made-up driver, and a clean shell."""

import os
import sys

import pytest
from made_up_driver import Gpu, Nvml


@pytest.fixture
def nvml(monkeypatch):
    """Put a driver in place of the machine's; two idle L4, unless other GPUs are given."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(*gpus, **facts):
        driver = Nvml(gpus or (Gpu(), Gpu()), **facts)
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        return driver

    return install


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """Take the shell's variables away, but for those that find programs and a home of its own."""
    for name in set(os.environ) - {"PATH", "PYTEST_CURRENT_TEST", "TMPDIR"}:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    return monkeypatch
