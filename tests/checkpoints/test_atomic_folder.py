"""A committed folder is whole at any moment: after kill -9, on a full disk, without an exchange."""

import contextlib
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys

import pytest

from toolkit.checkpoints import atomic_folder as room
from toolkit.checkpoints.atomic_folder import atomic_folder, check, remove_own
from toolkit.errors import UsageError
from toolkit.records.manifests import MANIFEST, Damaged, read_manifest, write_manifest

KILLED_AT_EACH_STEP = """
import itertools, json, os, shutil, signal, sys
from pathlib import Path
from toolkit.checkpoints import atomic_folder as room
from toolkit.records.manifests import Damaged

way, place = sys.argv[1], Path(sys.argv[2])
if way == "renames":
    room._exchanged = lambda one, other: False
folder = place / "final"

def commit(version):
    with room.atomic_folder(folder, step=version) as draft:
        for name in ("a", "b", "deep/c"):
            (draft / name).parent.mkdir(exist_ok=True)
            (draft / name).write_text(str(version) * 1000)

def is_killed_at(number):
    child = os.fork()
    if child == 0:
        steps = itertools.count(1)

        def watch(event, _):
            changes = event == "open" or event.startswith(("os.", "shutil.", "ctypes."))
            if changes and next(steps) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        commit(2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0

for number in itertools.count(1):
    shutil.rmtree(place, ignore_errors=True)
    commit(1)
    if way == "beside others":
        (folder / "notes").write_text("of someone else")
    killed = is_killed_at(number)
    try:
        step = room.check(folder)["step"]
    except Damaged:
        step = None
    files = {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}
    whole = all(files[name] == str(step) * 1000 for name in "abc") if step else None
    commit(3)
    left = sorted(os.listdir(place)), (folder / "a").read_text() == "3" * 1000
    notes = files.get("notes", "of someone else")
    print(json.dumps([killed, step, whole, left, notes]), flush=True)
    if not killed:
        break
"""
"""Each of Python's audit events of files is a place at which the second commit is killed once."""


def commit(folder, text, **facts):
    with atomic_folder(folder, **facts) as draft:
        (draft / "weights").write_text(text)
        (draft / "deep").mkdir()
        (draft / "deep" / "state").write_text(text * 2)


def content(folder):
    return {p.name: p.read_text() for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST}


def test_a_folder_is_replaced_as_a_whole_and_leaves_nothing_beside_it(tmp_path):
    folder = tmp_path / "final"
    with atomic_folder(folder, step=1) as draft:
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
    (folder / "notes").write_text("of someone else")
    with atomic_folder(folder) as draft:
        (draft / "model-1-of-2").write_text("old")
    with atomic_folder(folder, obsolete=("model-*",)) as draft:
        (draft / "weights").write_text("new")
    assert content(folder) == {"weights": "new", "notes": "of someone else"}


def files(folder):
    """Return everything in a folder by its path: the bytes of files, the targets of links."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def test_folders_in_folders_move_in_beside_what_is_not_ours(tmp_path):
    folder = tmp_path / "final"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with atomic_folder(folder, step=1) as draft:
        (draft / "deep" / "er").mkdir(parents=True)
        (draft / "deep" / "er" / "c").write_text("1")
    check(folder)
    assert (folder / "deep" / "er" / "c").read_text() == "1"
    assert (folder / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_what_is_not_ours_and_in_the_way_is_kept_beside_the_new_files(tmp_path, capsys):
    folder = tmp_path / "output"
    (folder / "deep").mkdir(parents=True)
    (folder / "weights" / "of").mkdir(parents=True)
    theirs = {
        "weights/of/mine": b"a folder where a file goes",
        "deep/state": b"mine",
        "model.bin": b"it would be loaded in place of the new one",
        MANIFEST: b'{"name": "an app"}',
    }
    for name, text in theirs.items():
        (folder / name).write_bytes(text)
    (folder / "notes").write_text("in nobody's way")
    for _ in range(2):  # the second time nothing is in the way any more
        with atomic_folder(folder, obsolete=("model.*",)) as draft:
            (draft / "weights").write_text("new")
            (draft / "deep").mkdir()
            (draft / "deep" / "state").write_text("newnew")
    check(folder)
    kept = {f"kept-1/{name}": text for name, text in theirs.items()}
    new = {"weights": b"new", "deep/state": b"newnew", "notes": b"in nobody's way"}
    assert {n: c for n, c in files(folder).items() if n != MANIFEST} == kept | new
    assert capsys.readouterr().out.count("are kept in") == 1


LINKS = {
    "the folder": ("final", "."),
    "a file that is written": ("final/weights", "victim.txt"),
    "a folder that is written into": ("final/deep", "."),
    "the manifest": ("final/manifest.json", "victim.txt"),
    "the folder of an earlier death": (".final.aside", "."),
    "the draft": (f".final.draft-{platform.node()}-{os.getpid()}", "."),
    "the draft of a dead process": (f".final.draft-{platform.node()}-{2**22 + 1}", "."),
}


@pytest.mark.parametrize("way", ["exchange", "renames"])
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("committed_before", [False, True])
def test_no_link_is_followed_whatever_it_stands_for(
    tmp_path, monkeypatch, link, committed_before, way
):
    if way == "renames":
        monkeypatch.setattr(room, "_exchanged", lambda one, other: False)
    theirs, place = tmp_path / "theirs", tmp_path / "run"
    theirs.mkdir()
    for name in ("victim.txt", "weights", "state"):
        (theirs / name).write_text("precious")
    folder = place / "final"
    if committed_before:
        commit(folder, "old")
        commit(theirs, "of a run elsewhere")
    before = files(theirs)
    name, target = LINKS[link]
    planted = place / name
    if planted.is_dir():
        shutil.move(planted, tmp_path / "moved")
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.unlink(missing_ok=True)
    planted.symlink_to(theirs / target)
    for text in ("new", "newer"):
        commit(folder, text)
    assert files(theirs) == before
    check(folder)
    assert not folder.is_symlink()
    assert (folder / "weights").read_text() == "newer"
    assert (folder / "deep" / "state").read_text() == "newernewer"
    assert str(theirs / target) in files(place).values(), "the link itself is kept"


@pytest.mark.parametrize(
    "name",
    ["../../victim.txt", "{root}/victim.txt", "deep/../../../victim.txt", "", ".", "a//b", "a\0b"],
)
def test_a_manifest_names_nothing_outside_of_its_folder(tmp_path, name):
    (tmp_path / "victim.txt").write_text("precious")
    folder = tmp_path / "run" / "final"
    with atomic_folder(folder) as draft:
        (draft / "weights-1").write_text("old")
    (folder / "notes").write_text("of someone else")
    named = name.format(root=tmp_path)
    write_manifest(folder, {named: {"bytes": 8, "sha256": "0" * 64}})
    with pytest.raises(Damaged, match="lists names that cannot be files of it"):
        read_manifest(folder)
    commit(folder, "new")
    remove_own(folder)
    assert (tmp_path / "victim.txt").read_text() == "precious"


def test_only_what_the_manifest_lists_is_removed_with_a_folder(tmp_path):
    folder = tmp_path / "checkpoint-2"
    commit(folder, "old")
    (folder / "notes").write_text("of someone else")
    remove_own(folder)
    assert files(tmp_path) == {"checkpoint-2.kept-1/notes": b"of someone else"}


def test_a_folder_that_is_ours_alone_is_replaced_as_a_whole_or_kept_aside(tmp_path):
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "weights").write_text("of a stock Trainer")
    for text in ("new", "newer"):
        with atomic_folder(folder, shared=False) as draft:
            (draft / "weights").write_text(text)
        (folder / "notes").write_text(text)
    assert files(tmp_path) == {
        "checkpoint-2.kept-1/weights": b"of a stock Trainer",
        "checkpoint-2.kept-2/notes": b"new",
        "checkpoint-2/weights": b"newer",
        "checkpoint-2/notes": b"newer",
        f"checkpoint-2/{MANIFEST}": (folder / MANIFEST).read_bytes(),
    }


def test_a_card_that_was_edited_is_kept(tmp_path):
    folder = tmp_path / "final"
    for card in ("first", "second"):
        with atomic_folder(folder) as draft:
            (draft / "README.md").write_text(card)
        assert "kept-1" not in os.listdir(folder)
    (folder / "README.md").write_text("mine")
    with atomic_folder(folder) as draft:
        (draft / "README.md").write_text("third")
    assert (folder / "README.md").read_text() == "third"
    assert (folder / "kept-1" / "README.md").read_text() == "mine"


@pytest.mark.parametrize("content", [b"\xff\xfe\x80", b"[" * 100_000, b"", b"\x00" * 64])
def test_a_manifest_of_random_bytes_is_damage_and_stops_no_save(tmp_path, content):
    folder = tmp_path / "final"
    commit(folder, "old")
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(Damaged, match="no manifest that can be read"):
        check(folder)
    commit(folder, "new")
    assert (folder / "weights").read_text() == "new"
    check(folder)


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    """So a fact that is never compared cannot change unseen: a step, a strategy, a name."""
    folder = tmp_path / "final"
    commit(folder, "old", kind="checkpoint", format=1, step=6, facts={"seed": 1, "rate": 1e-3})
    whole = (folder / MANIFEST).read_bytes()
    original = read_manifest(folder)
    accepted = []
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (folder / MANIFEST).write_bytes(flipped)
        with contextlib.suppress(Damaged, UsageError):
            accepted.append((bit, read_manifest(folder) == original))
    assert accepted == []


def test_a_manifest_of_another_schema_is_refused_by_name(tmp_path):
    folder = tmp_path / "final"
    commit(folder, "old")
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"schema": 9}))
    with pytest.raises(UsageError, match=r"final was written by a newer toolkit: .* schema 9"):
        read_manifest(folder)
    old = {name: value for name, value in manifest.items() if name != "manifest_sha256"}
    (folder / MANIFEST).write_text(json.dumps(old | {"schema": 1}))
    with pytest.raises(Damaged, match="its schema is not 2"):
        read_manifest(folder)


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
    with pytest.raises(FileNotFoundError), atomic_folder(folder) as draft:
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


@pytest.mark.parametrize("way", ["exchange", "renames", "beside others"])
def test_kill_9_at_each_step_of_a_commit_leaves_a_whole_folder(tmp_path, way):
    """Beside files of others there are moments without a manifest, and then nothing is whole."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EACH_STEP, way, tmp_path / "place"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    # Files that no manifest lists any more are kept aside, and that is said between the lines.
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    *kills, last = map(json.loads, lines)
    assert len(kills) > 20
    assert last[:3] == [False, 2, True]
    for number, (killed, step, whole, left, notes) in enumerate([*kills, last], 1):
        assert killed is (number <= len(kills))
        assert left == [["final"], True], number
        assert notes == "of someone else"
        assert whole is (None if step is None else True), number
    steps = [step for _, step, *_ in kills]
    torn = [None] * steps.count(None)
    assert steps == [1] * steps.count(1) + torn + [2] * steps.count(2)
    assert steps.count(1) > 5
    assert bool(torn) is (way == "beside others")


def test_the_draft_of_a_writer_that_is_alive_stays_and_goes_with_it(tmp_path):
    writer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    draft = tmp_path / f".final.draft-{platform.node()}-{writer.pid}"
    draft.mkdir()
    (draft / room.DRAFT_MARK).touch()
    (draft / "weights").write_text("half of them")
    commit(tmp_path / "final", "new")
    assert (draft / "weights").read_text() == "half of them"
    writer.communicate(b"\n")
    commit(tmp_path / "final", "newer")
    assert os.listdir(tmp_path) == ["final"]


def test_a_disk_that_takes_no_more_leaves_the_old_folder(tmp_path):
    folder = tmp_path / "final"
    commit(folder, "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"), atomic_folder(folder) as draft:
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
