"""A committed folder is whole at any moment: after kill -9, on a full disk, without an exchange."""

import os
import random
import resource
import signal
import subprocess
import sys
import time

import pytest

from toolkit.training import committing as room
from toolkit.training.committing import MANIFEST, Damaged, check, committing

COMMITS_FOR_EVER = """
import itertools, sys
from pathlib import Path
from toolkit.training import committing as room
if sys.argv[2] == "renames":
    room._exchanged = lambda one, other: False
for version in itertools.count(1):
    with room.committing(Path(sys.argv[1]), step=version) as draft:
        for name in ("a", "b", "deep/c"):
            (draft / name).parent.mkdir(exist_ok=True)
            (draft / name).write_text(str(version) * 1000)
    print(version, flush=True)
"""


def commit(folder, text, **facts):
    with committing(folder, **facts) as draft:
        (draft / "weights").write_text(text)
        (draft / "deep").mkdir()
        (draft / "deep" / "state").write_text(text * 2)


def content(folder):
    return {p.name: p.read_text() for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST}


def test_a_folder_is_replaced_as_a_whole_and_leaves_nothing_beside_it(tmp_path):
    folder = tmp_path / "final"
    with committing(folder, step=1) as draft:
        (draft / "weights-of-another-shape").write_text("old")
    commit(folder, "new", step=2, strategy="zero2")
    assert content(folder) == {"weights": "new", "state": "newnew"}
    assert check(folder)["step"] == 2
    assert check(folder)["strategy"] == "zero2"
    assert list(check(folder)["files"]) == ["deep/state", "weights"]
    assert os.listdir(tmp_path) == ["final"]


def test_a_draft_of_another_machine_may_be_alive_and_stays(tmp_path):
    draft = tmp_path / f".final.draft-elsewhere-{2**22 + 1}"
    draft.mkdir()
    commit(tmp_path / "final", "new")
    check(tmp_path / "final")
    assert draft.exists()


def test_what_an_earlier_commit_put_beside_others_goes(tmp_path):
    folder = tmp_path / "output"
    folder.mkdir()
    (folder / "model.bin").write_text("of someone else, and in the way")
    (folder / "notes").write_text("of someone else")
    with committing(folder) as draft:
        (draft / "model-1-of-2").write_text("old")
    with committing(folder, obsolete=("model.*",)) as draft:
        (draft / "weights").write_text("new")
    assert content(folder) == {"weights": "new", "notes": "of someone else"}


def test_what_others_put_into_a_folder_stays(tmp_path):
    folder = tmp_path / "output"
    (folder / "checkpoint-5").mkdir(parents=True)
    (folder / "checkpoint-5" / "trainer_state.json").write_text("{}")
    commit(folder, "old")
    commit(folder, "new")
    assert content(folder) == {"weights": "new", "state": "newnew", "trainer_state.json": "{}"}
    check(folder)
    assert os.listdir(tmp_path) == ["output"]


def test_a_body_that_fails_leaves_the_old_folder(tmp_path):
    folder = tmp_path / "final"
    commit(folder, "old")
    with pytest.raises(FileNotFoundError), committing(folder) as draft:
        (draft / "weights").write_text((draft / "nowhere").read_text())
    assert content(folder) == {"weights": "old", "state": "oldold"}
    assert os.listdir(tmp_path) == ["final"]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: (f / "weights").write_text("nex"), "has changed since it was saved"),
        (lambda f: (f / "weights").write_text("ne"), "has 2 bytes, it was saved with 3"),
        (lambda f: (f / "deep" / "state").unlink(), "state is missing"),
        (lambda f: (f / MANIFEST).write_text('{"files": '), "no manifest that can be read"),
        (lambda f: (f / MANIFEST).unlink(), "no manifest that can be read"),
        (lambda f: (f / MANIFEST).write_text("[]"), "no manifest that can be read"),
    ],
)
def test_damage_is_named(tmp_path, damage, sentence):
    folder = tmp_path / "final"
    commit(folder, "new")
    damage(folder)
    with pytest.raises(Damaged, match=sentence):
        check(folder)


@pytest.mark.parametrize("way", ["exchange", "renames"])
def test_kill_9_at_any_moment_leaves_a_whole_folder(tmp_path, way):
    folder = tmp_path / "final"
    chance = random.Random(7)
    seen = set()
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", COMMITS_FOR_EVER, folder, way], stdout=subprocess.PIPE, text=True
        )
        process.stdout.readline()
        time.sleep(chance.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        manifest = check(folder)
        assert set(content(folder).values()) == {str(manifest["step"]) * 1000}
        seen.add(manifest["step"])
    assert len(seen) > 1
    commit(folder, "new")
    assert content(folder) == {"weights": "new", "state": "newnew"}
    assert os.listdir(tmp_path) == ["final"]


def test_a_disk_that_takes_no_more_leaves_the_old_folder(tmp_path):
    folder = tmp_path / "final"
    commit(folder, "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"), committing(folder) as draft:
            (draft / "weights").write_bytes(bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    check(folder)
    assert content(folder) == {"weights": "old", "state": "oldold"}
    assert os.listdir(tmp_path) == ["final"]


def test_this_system_exchanges_two_folders_in_one_move(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    assert room._exchanged(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / "file").read_text() == "other"
    with pytest.raises(FileNotFoundError):
        room._exchanged(tmp_path / "one", tmp_path / "nowhere")
