"""A save that the disk has no room for ends the run by that name, and leaves what was saved."""

import subprocess
import sys

import pytest
from places import ROOT

from toolkit.launching.status import read_statuses


@pytest.mark.parametrize(("form", "mebibytes"), [("native", 10), ("portable", 6)])
def test_a_full_disk_is_named_by_the_run_that_it_ends(
    tmp_path, launch_environment, form, mebibytes
):
    """Under ZeRO-2, whose files DeepSpeed writes: torch alone says `unexpected pos` of it."""
    folder = tmp_path / "run"
    launch = ["accelerate", "launch", "--config_file", "accelerate_configs/zero2.yaml"]
    train = ["-m", "toolkit.train", "--max_steps", "4", "--save_steps", "2"]
    train += ["--checkpoint_form", form]
    # The size of a file has a limit: weights fit into one, a rank's part of the optimizer does not.
    limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({mebibytes} << 20,) * 2)"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import os, resource, sys; {limit}; os.execvp(sys.argv[1], sys.argv[1:])",
        ]
        + [*launch, *train, "--output_dir", str(folder)],
        cwd=ROOT,
        env=launch_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert f"{folder / 'checkpoint-2'} was not saved. rank " in done.stdout
    assert "no space left on the disk of" in done.stdout
    assert {status.state for status in read_statuses(folder / "status")} == {"failed"}
    assert not [path.name for path in folder.iterdir() if "checkpoint" in path.name]
