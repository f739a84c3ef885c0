"""Two caches with the built-in model and data, built once for all tests of this folder."""

import os
import subprocess
import sys

import pytest

BUILD = "from toolkit.training.model import build_model; print(build_model())"


@pytest.fixture(scope="session")
def built_at_once(tmp_path_factory):
    """A cache that two processes built at the same time, and what each of them returned."""
    cache = tmp_path_factory.mktemp("cache-of-two")
    environment = os.environ | {"TOOLKIT_CACHE": str(cache)}
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    # DeepSpeed writes a line of its own to stdout while it is imported.
    printed = [builder.communicate(timeout=120)[0].splitlines() for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    return cache, [lines[-1] for lines in printed]


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cache(session_cache, monkeypatch):
    """The cache of this process, kept between tests."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(session_cache))
    return session_cache
