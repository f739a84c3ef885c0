"""Whoever may read a folder may read every file that was saved into it."""

import os

import pytest
import torch
from safetensors.torch import save_file

from toolkit.checkpoints.atomic_folder import follow_umask


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_saved_files_follow_the_umask(tmp_path, umask, mask, mode):
    umask(mask)
    folder = tmp_path / "final"
    (folder / "below").mkdir(parents=True)
    save_file({"a": torch.ones(3)}, folder / "model.safetensors")
    (folder / "below" / "config.json").write_text("{}")
    outside = tmp_path / "outside"
    outside.touch(0o400)
    (folder / "link").symlink_to(outside)
    follow_umask(folder)
    for name in ("model.safetensors", "below/config.json"):
        assert (folder / name).stat().st_mode & 0o777 == mode
    assert outside.stat().st_mode & 0o777 == 0o400 & ~mask
