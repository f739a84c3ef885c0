"""What the tests of whole launches share: a cache of their own, and a launcher with an end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """Ctrl-C must reach what the tests start, also where a shell started them in the background.

    Such a shell has SIGINT ignored, and what is ignored stays so in every process below.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    import torch

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def launch_environment(tmp_path_factory):
    """The environment of a launched run: its own caches, and nothing of the tests' own process."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "FSDP_", "TOOLKIT_", "PYTEST"))
    }
    caches = tmp_path_factory.mktemp("caches")
    return kept | {
        "TOOLKIT_CACHE": str(caches / "toolkit"),
        "HF_HOME": str(caches / "hf"),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


@pytest.fixture(scope="session")
def launch(launch_environment):
    """Run `accelerate launch` from the repository root, under a checked-in file or another."""

    def run(strategy, *script, timeout=600, **environment):
        checked_in = ROOT / "accelerate_configs" / f"{strategy}.yaml"
        config = checked_in if checked_in.exists() else strategy
        command = ["accelerate", "launch", "--config_file", config, *script]
        return _run(command, cwd=ROOT, env=launch_environment | environment, timeout=timeout)

    return run


@pytest.fixture(scope="session")
def toolkit(launch_environment, tmp_path_factory):
    """Run the `toolkit` command in a folder of its own."""

    def run(*arguments, timeout=2400):  # DeepSpeed compiles for minutes, once
        here = tmp_path_factory.mktemp("here")
        return _run(["toolkit", *arguments], cwd=here, env=launch_environment, timeout=timeout)

    return run


def _run(command, **options):
    return subprocess.run(
        [str(word) for word in command],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        **options,
    )
