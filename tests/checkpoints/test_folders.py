"""Which checkpoints there are, which go, and what becomes of a commit that died."""

import os
import platform
import shutil
from pathlib import Path

import pytest

from toolkit.checkpoints.atomic_folder import atomic_folder
from toolkit.checkpoints.folders import checkpoints_in, rotate, shares, tidy
from toolkit.measuring.recorder import drop_steps_after
from toolkit.records.manifests import MANIFEST


def save(output_dir, step):
    folder = output_dir / f"checkpoint-{step}"
    with atomic_folder(folder, kind="checkpoint", format=1, step=step, facts={}) as draft:
        (draft / "weights").write_text(str(step))
    return folder


def names(output_dir):
    return sorted(path.name for path in output_dir.iterdir())


def test_checkpoints_come_newest_step_first_and_nothing_else_is_one(tmp_path):
    for step in (2, 10, 9):
        save(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-11").write_text("a file")
    (tmp_path / ".checkpoint-12.draft-here-1").mkdir()
    assert [path.name for path in checkpoints_in(tmp_path)] == [
        "checkpoint-10",
        "checkpoint-9",
        "checkpoint-2",
    ]


@pytest.mark.parametrize(
    ("limit", "left"), [(None, {2, 4, 6}), (3, {2, 4, 6}), (2, {4, 6}), (1, {6})]
)
def test_the_oldest_go_first_and_the_newest_never(tmp_path, limit, left):
    for step in (2, 4):
        save(tmp_path, step)
    rotate(tmp_path, save(tmp_path, 6), limit=limit)
    assert names(tmp_path) == sorted(f"checkpoint-{step}" for step in left)


def test_what_a_run_that_went_back_left_behind_goes_before_what_it_went_back_to(tmp_path):
    for step in (5, 10):
        save(tmp_path, step)
    rotate(tmp_path, save(tmp_path, 7), limit=2)
    assert names(tmp_path) == ["checkpoint-5", "checkpoint-7"]


def test_the_best_one_stays_and_counts(tmp_path):
    best = save(tmp_path, 1)
    save(tmp_path, 2)
    rotate(tmp_path, save(tmp_path, 3), limit=2, keep=[best])
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-3"]


def test_what_an_earlier_death_left_of_the_same_name_is_in_nobodys_way(tmp_path):
    shutil.copytree(save(tmp_path, 2), tmp_path / ".checkpoint-2.gone")
    rotate(tmp_path, save(tmp_path, 4), limit=1)
    assert names(tmp_path) == ["checkpoint-4"]


def test_one_that_cannot_be_removed_stays_and_ends_no_run(tmp_path, monkeypatch, capsys):
    save(tmp_path, 2)
    newest = save(tmp_path, 4)
    tmp_path.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):  # root may do everything
            monkeypatch.setattr(Path, "rename", refused)
        rotate(tmp_path, newest, limit=1)
    finally:
        tmp_path.chmod(0o700)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    assert "checkpoint-2 stays: " in capsys.readouterr().out


def refused(path, target):
    raise PermissionError(13, "Permission denied", str(path))


def test_what_others_put_into_a_checkpoint_outlives_its_rotation(tmp_path):
    save(tmp_path, 2)
    (tmp_path / "checkpoint-2" / "notes").write_text("mine")
    theirs = tmp_path / "theirs"
    shutil.copytree(save(tmp_path, 3), theirs)
    (tmp_path / ".checkpoint-3.gone").symlink_to(theirs)
    rotate(tmp_path, save(tmp_path, 4), limit=1)
    assert names(tmp_path) == [
        "checkpoint-2.kept-1",
        "checkpoint-3.kept-1",
        "checkpoint-4",
        "theirs",
    ]
    assert os.listdir(tmp_path / "checkpoint-2.kept-1") == ["notes"]
    assert (tmp_path / "checkpoint-3.kept-1").is_symlink()
    assert (theirs / "weights").read_text() == "3"


def test_a_folder_that_was_not_committed_here_is_left_alone(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{}")
    rotate(tmp_path, save(tmp_path, 2), limit=1)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]


def test_what_died_is_tidied_up_and_what_was_aside_is_put_back(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "checkpoint-1").rename(tmp_path / ".checkpoint-1.aside")
    shutil.copytree(tmp_path / ".checkpoint-1.aside", tmp_path / ".checkpoint-2.gone")
    (tmp_path / f".checkpoint-3.draft-{platform.node()}-{2**22 + 1}").mkdir()
    tidy(tmp_path)
    assert names(tmp_path) == ["checkpoint-1"]
    assert (tmp_path / "checkpoint-1" / MANIFEST).is_file()


def test_ranks_share_the_reading_by_bytes():
    files = {"a": {"bytes": 100}, "b": {"bytes": 60}, "c": {"bytes": 50}, "d": {"bytes": 0}}
    dealt = shares(files, ranks=2)
    assert sorted(name for names in dealt for name in names) == ["a", "b", "c", "d"]
    assert sum(files[name]["bytes"] for name in dealt[0]) == 100
    assert shares(files, ranks=1) == [["a", "b", "c", "d"]]


def test_lines_of_steps_that_are_damaged_are_dropped_and_the_others_kept(tmp_path):
    file = tmp_path / "steps.jsonl"
    damaged = [b'{"step": 2, "text": "\xff"}', b'{"step": ', b"[" * 100_000, b"7", b"\xfe\xff"]
    file.write_bytes(b"\n".join([b'{"step": 1}', *damaged, b'{"step": 3}', b'{"step": 4}']))
    drop_steps_after(file, 3)
    assert file.read_text() == '{"step": 1}\n{"step": 3}\n'
