import errno
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
from functools import cache as cache_of_calls

import pytest

from toolkit.data import sources
from toolkit.data.arguments import DataArguments
from toolkit.data.cache import build_once, read_cached
from toolkit.data.dataset import prepare_data
from toolkit.environment import cache_root
from toolkit.errors import UsageError
from toolkit.training.model import build_model

STUCK_BUILDER = """
import sys, time
from pathlib import Path
from toolkit.data.cache import build_once

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
    assert {path.name for path in folder.iterdir()} == {"whole", "manifest.json"}


def test_a_cache_that_cannot_be_written_is_a_mistake_of_the_user(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="TOOLKIT_CACHE"):
        build_once(tmp_path / "file" / "folder", lambda building: None)


def test_a_full_disk_is_one_sentence(tmp_path):
    def build(building):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UsageError, match="can't be written .No space left on device.*_CACHE"):
        build_once(tmp_path / "folder", build)


# What differs from its manifest


def build_words(folder):
    (folder / "inside").mkdir()
    (folder / "words").write_bytes(b"one two three")
    (folder / "inside" / "more").write_bytes(b"four")


def contents(folder):
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def flip(path, at=-1):
    """Turn one bit of a file over."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def replace_by_a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("a file")


def replace_by_a_link(folder):
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


DAMAGES = {
    "flipped": (lambda folder: flip(folder / "words"), "words has changed"),
    "cut off": (lambda folder: cut(folder / "inside" / "more"), "more has 3 bytes"),
    "missing": (lambda folder: (folder / "words").unlink(), "words is missing"),
    "added": (lambda folder: (folder / "new").touch(), "new is not in the manifest"),
    "a link": (lambda folder: link(folder / "inside" / "more"), "is not in the manifest"),
    "emptied": (empty, "has no manifest"),
    "older": (lambda folder: (folder / "manifest.json").unlink(), "has no manifest"),
    "no text": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\x00"), "manifest"),
    "deep": (lambda folder: (folder / "manifest.json").write_text("[" * 10**5), "manifest|folder"),
    "no object": (lambda folder: (folder / "manifest.json").write_text("[1]"), "manifest"),
    "a file": (replace_by_a_file, "folder is not a folder"),
    "linked": (replace_by_a_link, "folder is not a folder"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_what_differs_is_built_again_and_said(damage, said, tmp_path, caplog):
    folder = build_once(tmp_path / "folder", build_words)
    clean = contents(folder)
    damage(folder)
    assert build_once(folder, build_words) == folder
    assert contents(folder) == clean
    assert not folder.is_symlink()
    (message,) = caplog.messages
    assert message.startswith("The cache was damaged and is built again: ")
    assert said.split("|")[0] in message or said.split("|")[-1] in message
    assert not list(tmp_path.glob(".*"))
    build_once(folder, build_words)
    assert len(caplog.messages) == 1


def test_who_has_a_damaged_folder_open_keeps_it(tmp_path):
    folder = build_once(tmp_path / "folder", build_words)
    with (folder / "words").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cut(folder / "inside" / "more")
        build_once(folder, build_words)
        assert mapped[:] == file.read() == b"one two three"
        assert not (folder / "words").samefile(f"/proc/self/fd/{file.fileno()}")
        mapped.close()


def test_what_cannot_be_built_again_is_named(tmp_path):
    def gone(building):
        raise UsageError("The source is gone.")

    folder = build_once(tmp_path / "folder", build_words)
    flip(folder / "words")
    with pytest.raises(UsageError, match="can't be built again.*words has changed.*source is gone"):
        build_once(folder, gone)
    with pytest.raises(UsageError, match=r"^The source is gone\.$"):
        build_once(tmp_path / "other", gone)
    assert build_once(folder, build_words) == folder


def test_a_cache_that_only_others_may_write_is_read_while_it_is_whole(tmp_path):
    folder = build_once(tmp_path / "folder", build_words)
    victim = tmp_path / "victim"
    victim.write_text("not ours")
    lock = tmp_path / "folder.lock"
    lock.unlink()
    lock.symlink_to(victim)  # which is not followed: it can't be locked
    assert build_once(folder, build_words) == folder
    flip(folder / "words")
    with pytest.raises(UsageError, match="can't be written .*words has changed.*TOOLKIT_CACHE"):
        build_once(folder, build_words)
    assert victim.read_text() == "not ours"


@pytest.mark.parametrize("content", [b"\xff", b"{", b"[" * 100_000, b"[]", b"7"])
def test_a_file_that_changes_after_the_check_is_one_sentence(content, tmp_path):
    (tmp_path / "facts.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"facts\.json was changed.*Run the command again"):
        read_cached(tmp_path / "facts.json")


# Once for each launch

RANK = """
import sys
from pathlib import Path
from toolkit.data.cache import build_once, check_seconds

def build(folder):
    sys.exit("built again")

build_once(Path(sys.argv[1]), build)
print(check_seconds())
"""


def seconds_in_ranks(folder, count):
    """Start ranks of one launch, whose launcher is this process, and return what each timed."""
    environment = os.environ | {"WORLD_SIZE": str(count)}
    command = [sys.executable, "-c", RANK, str(folder)]
    ranks = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    return [float(rank.communicate(timeout=120)[0]) for rank in ranks]


def test_one_rank_of_a_launch_checks_for_all(tmp_path):
    folder = build_once(tmp_path / "folder", build_words)
    notes = tmp_path / "folder.checked"
    notes.unlink()
    first, second = seconds_in_ranks(folder, 2)
    assert first > 0
    assert first == pytest.approx(second, abs=1e-5)  # written down with six digits
    assert len(notes.read_text().splitlines()) == 1
    # A process alone is a launch of its own.
    seconds_in_ranks(folder, 1)
    assert len(notes.read_text().splitlines()) == 2
    # What can't be read there is looked at again.
    notes.write_bytes(b"\xff\n" * 3)
    seconds_in_ranks(folder, 2)
    assert len(notes.read_text(errors="replace").splitlines()) == 4


def test_damage_that_keeps_size_and_time_is_found_by_the_next_launch(tmp_path):
    folder = build_once(tmp_path / "folder", build_words)
    times = (folder / "words").stat()
    with (folder / "words").open("r+b") as file:
        file.write(b"ONE")
    os.utime(folder / "words", ns=(times.st_atime_ns, times.st_mtime_ns))
    command = [sys.executable, "-c", RANK, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "words has changed since it was saved" in done.stderr
    assert "Traceback" not in done.stderr


# The built-in model and data, and tokens

ROWS = DataArguments(max_train_samples=40)


@pytest.fixture(scope="module", autouse=True)
def sources_read_once():
    """The same Python has the same sources: parsing them takes most of the time of a cache."""
    documented_functions = sources._documented_functions
    read = cache_of_calls(lambda root: [*documented_functions(root)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_documented_functions", read)
        yield


@pytest.fixture(scope="module")
def clean_cache(tmp_path_factory):
    """A cache of its own with the built-in model, data and tokens, and what is in it."""
    root = tmp_path_factory.mktemp("clean") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLKIT_CACHE", str(root))
        prepare_data(ROWS, build_model())
    return root, in_cache(root)


def in_cache(root):
    return {
        name: content
        for name, content in contents(root).items()
        if not name.endswith((".lock", ".checked"))
    }


def fewer_layers(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 2}))


def one_of(root, pattern):
    (path,) = root.glob(pattern)
    return path


POISONS = {
    "weights": ("small-llama-*/model.safetensors", flip),
    "config": ("small-llama-*/config.json", lambda path: fewer_layers(path.parent)),
    "tokenizer": ("small-llama-*/tokenizer.json", lambda path: path.unlink()),
    "built-in rows": ("standard-library-*/rows.jsonl", cut),
    "built-in hash": ("standard-library-*/hash", lambda path: path.write_bytes(b"\xff\xfe")),
    "emptied data": ("standard-library-*/hash", lambda path: empty(path.parent)),
    "arrow": ("tokens/*/rows/data-*.arrow", lambda path: flip(path, at=path.stat().st_size // 2)),
    "facts": ("tokens/*/facts.json", lambda path: path.write_bytes(b"\xff\x00\x9c")),
    "deep facts": ("tokens/*/facts.json", lambda path: path.write_text("[" * 10**5)),
    "state": ("tokens/*/rows/state.json", cut),
}


@pytest.mark.parametrize(("pattern", "poison"), POISONS.values(), ids=POISONS)
def test_a_poisoned_cache_is_as_it_was_built(
    pattern, poison, clean_cache, tmp_path, monkeypatch, caplog
):
    root, clean = clean_cache
    copy = shutil.copytree(root, tmp_path / "cache")
    monkeypatch.setenv("TOOLKIT_CACHE", str(copy))
    path = one_of(copy, pattern)
    poison(path)
    data = prepare_data(ROWS, build_model())
    assert len(data.load()) == 40
    assert in_cache(copy) == clean
    (message,) = (text for text in caplog.messages if "damaged" in text)
    assert str(path.relative_to(copy)).split("/")[0] in message


def test_a_launch_with_a_poisoned_cache_trains_as_with_a_clean_one(clean_cache, launch, tmp_path):
    def run(cache, output):
        done = launch(
            *("ddp", "-m", "toolkit.train", "--max_train_samples", "40", "--max_steps", "1"),
            *("--output_dir", tmp_path / output),
            TOOLKIT_CACHE=str(cache),
            CUDA_VISIBLE_DEVICES="",
        )
        assert done.returncode == 0, done.stdout
        return json.loads((tmp_path / output / "record.json").read_text()), done.stdout

    cache = shutil.copytree(clean_cache[0], tmp_path / "cache")
    poisoned = shutil.copytree(cache, tmp_path / "poisoned")
    for name in ("weights", "built-in rows", "arrow"):
        pattern, poison = POISONS[name]
        poison(one_of(poisoned, pattern))
    clean, told = run(cache, "clean")
    record, told_of_damage = run(poisoned, "run")
    assert "The cache was damaged" not in told
    assert told_of_damage.count("The cache was damaged and is built again: ") == 3
    assert record["losses"] == clean["losses"]
    assert record["data"]["tokens_hash"] == clean["data"]["tokens_hash"]
    assert 0 < clean["warm_up"]["cache_seconds"] < clean["warm_up"]["start_seconds"]
    assert in_cache(poisoned) == in_cache(cache) == clean_cache[1]
