"""What writes files: nothing of anybody else's is written through, whatever lies in the way."""

import os
import stat
from pathlib import Path

import pytest

from toolkit.configs.files import write_configs
from toolkit.errors import UsageError
from toolkit.files import check_takes_files, without_links, write_text
from toolkit.launching.status import StatusFile
from toolkit.records.json_files import write_json
from toolkit.strategies import get_strategy


@pytest.fixture
def victim(tmp_path):
    """A file of somebody's, outside the folder that is written to; it must stay as it is."""
    file = tmp_path / "victim"
    file.write_text("mine")
    yield file
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("record.json", lambda folder: write_json(folder / "record.json", {"a": 1})),
        ("note", lambda folder: write_text(folder / "note", "new")),
        ("rank-0.json", lambda folder: StatusFile(folder, 0).running(1)),
        ("zero2.json", lambda folder: write_configs(get_strategy("zero2"), folder)),
        ("zero2.yaml", lambda folder: write_configs(get_strategy("zero2"), folder)),
    ],
)
def test_a_link_that_is_planted_where_a_draft_goes_is_refused(
    tmp_path, victim, monkeypatch, name, write
):
    monkeypatch.setattr(os, "urandom", lambda count: b"\0" * count)  # no chance: it was guessed
    draft = tmp_path / "out" / f".{name}.{'00' * 8}.tmp"
    draft.parent.mkdir()
    draft.symlink_to(victim)
    with pytest.raises((FileExistsError, UsageError), match="File exists"):
        write(draft.parent)
    assert draft.is_symlink()
    assert not (draft.parent / name).exists()


def test_a_draft_has_a_name_by_chance_and_none_is_left(tmp_path, monkeypatch):
    drafts = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (drafts.append(a), replace(a, b)))
    for _ in range(2):
        write_text(tmp_path / "note", "new")
    assert len(set(drafts)) == 2
    assert os.listdir(tmp_path) == ["note"]


def test_a_file_that_is_a_link_is_replaced_itself(tmp_path, victim):
    (tmp_path / "note").symlink_to(victim)
    write_text(tmp_path / "note", "new")
    assert (tmp_path / "note").read_text() == "new"
    assert not (tmp_path / "note").is_symlink()


def test_who_may_read_a_file_is_for_the_umask_to_say_and_a_failure_leaves_no_draft(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "report", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "report").stat().st_mode) == 0o640
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "report", "\udc80")
    assert os.listdir(tmp_path) == ["report"]
    assert (tmp_path / "report").read_text() == "text"


def test_an_error_names_the_file_and_not_its_draft(tmp_path):
    (tmp_path / "report").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_text(tmp_path / "report", "text")
    assert caught.value.filename == str(tmp_path / "report")


@pytest.mark.parametrize("mode", ["a", "w"])
def test_a_file_that_is_opened_in_place_is_no_link(tmp_path, victim, mode):
    (tmp_path / "steps.jsonl").symlink_to(victim)
    with (
        pytest.raises(UsageError, match=r"steps.jsonl is a symbolic link"),
        open(tmp_path / "steps.jsonl", mode, opener=without_links),
    ):
        pass


def test_where_no_folder_can_be_is_found_before_anything_is_written(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(tmp_path)
    cases = {
        tmp_path / "file": f"takes no files: {tmp_path}/file is not a folder",
        tmp_path / "file" / "deep" / "out": f"takes no files: {tmp_path}/file is not a folder",
        tmp_path / "dangling": "dangling is not a folder",
        # No user may write there, root neither.
        Path("/proc/self/out"): "/proc/self is read-only, or not yours to write to",
    }
    for folder, said in cases.items():
        with pytest.raises(UsageError, match=f"^--output {folder} takes no files: ") as caught:
            check_takes_files(folder, flag="--output")
        assert said in str(caught.value)
    for folder in (tmp_path, tmp_path / "link", tmp_path / "new" / "one", Path("new")):
        check_takes_files(folder, flag="--output")
    assert sorted(os.listdir(tmp_path)) == ["dangling", "file", "link"]
