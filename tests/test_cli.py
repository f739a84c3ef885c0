"""The `toolkit` command: instant, and never a traceback for a mistake."""

import re
import resource
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "accelerate", "deepspeed", "datasets", "peft", "numpy"}
SECONDS = 0.5
"""The goal is a third of a second on an idle machine; the rest is for one that is not."""

PLAIN_ANSWERS = [
    ("--help",),
    ("compare", "--help"),
    ("report", "--help"),
    ("prepare", "--help"),
    ("configs", "--help"),
    ("configs", "list"),
    ("configs", "show", "zero3"),
]


def toolkit(*words, cwd=None):
    command = [sys.executable, "-m", "toolkit.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def imported_by(code):
    """Return the top-level packages that Python has loaded after `code`."""
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = re.findall(r"^import time:.*\|\s*(\S+)$", done.stderr, re.MULTILINE)
    return {name.partition(".")[0] for name in names}


def test_importing_the_package_imports_nothing_heavy():
    assert not HEAVY & imported_by("import toolkit; toolkit.STRATEGIES; toolkit.write_configs")


@pytest.mark.parametrize("words", PLAIN_ANSWERS, ids=" ".join)
def test_a_plain_answer_imports_nothing_heavy(words):
    code = f"""
import sys
from toolkit.cli import app
app({list(words)!r}, standalone_mode=False)
"""
    loaded = imported_by(code)
    assert "typer" in loaded
    assert not HEAVY & loaded


@pytest.mark.parametrize("words", [("--help",), ("configs", "list")], ids=" ".join)
def test_a_plain_answer_is_instant(words):
    taken = []
    while min(taken, default=SECONDS) >= SECONDS and len(taken) < 10:
        before = cpu_seconds_of_children()
        assert toolkit(*words).returncode == 0
        taken.append(cpu_seconds_of_children() - before)
    assert min(taken) < SECONDS


def cpu_seconds_of_children():
    """CPU time: a machine that is busy with other things stretches the clock, and this far less."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("compare",),
        ("report",),
        ("configs",),
        *(("configs", n) for n in ("list", "show", "write", "path")),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_help_renders(words, flag):
    done = toolkit(*words, flag)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("configs", "show", "zero4"), "Did you mean 'zero3'?"),
        (("configs", "path", "fsdp1"), "Did you mean 'fsdp'?"),
        (("compare", "--strategies", "ddp,zeroo2"), "Did you mean 'zero2'?"),
        (("compare", "--strategies", ","), "--strategies is empty"),
        (("compare", "--max_steps", "0"), "--max_steps must be at least 1"),
        (("compare", "--global_batch_size", "6"), "--global_batch_size"),
        (("compare", "--", "--output_dir", "x"), "--output"),
        (("compare", "--timeout", "nan"), "--timeout must be at least 1, it is nan"),
        (("compare", "--dollars-per-hour", "nan"), "--dollars-per-hour is a price above 0"),
        (("compare", "--strategies", "ddp", "--", "--learning_rate", "nan"), "--learning_rate nan"),
        (("configs", "write", "zero2", "--to", "x", "--clipping", "nan"), "cannot be clipped"),
        (("configs", "write", "zero2", "--to", "x", "--clipping=-1"), "cannot be clipped"),
        (("configs", "write", "zero2", "--to", "x", "--accumulation", "0"), "1 step or more"),
        (("configs", "write", "zero2", "--to", "x", "--num-processes", "0"), "at least 2"),
    ],
)
def test_a_mistake_is_a_sentence_and_status_2(words, says, tmp_path):
    done = toolkit(*words, cwd=tmp_path)
    assert done.returncode == 2
    # What is wrong with a training is found after it was said what begins.
    begun = done.stdout.splitlines() if "--learning_rate" in words else []
    assert "".join(begun[1:]) == ""
    assert done.stdout == "".join(f"{line}\n" for line in begun)
    assert done.stderr.startswith("toolkit: ")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [("compares",), ("compare", "--precision", "fp8"), ("compare", "--max_steps", "many")],
    ids=" ".join,
)
def test_what_the_command_line_itself_refuses_is_status_2_too(words, tmp_path):
    done = toolkit(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("configs", "list"), ("plan", "7b")], ids=" ".join)
def test_a_full_disk_that_is_printed_to_is_a_sentence_and_status_1(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "toolkit.cli", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "toolkit: There is no space left: No space left on device. Free some, and try again.\n"
    )


LONG = "x" * 300


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("compare", "--strategies", "ddp", "--output", LONG), "File name too long"),
        (("report", LONG), "File name too long"),
        (("configs", "write", "ddp", "--to", "file/below"), "Not a directory"),
        (("configs", "write", "ddp", "--to", LONG), "File name too long"),
        (("plan", "7b", "--gpu", "L4", "--gpu-file", "."), "Is a directory"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None,
)
def test_a_path_that_cannot_be_used_is_a_sentence_and_status_2(words, says, tmp_path):
    (tmp_path / "file").touch()
    done = toolkit(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("room", [0, 100])
def test_config_files_that_find_no_room_leave_nothing_behind(tmp_path, room):
    command = [sys.executable, "-m", "toolkit.cli", "configs", "write", "zero3", "--to", tmp_path]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no space left" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_bug_keeps_its_traceback(monkeypatch):
    from toolkit import cli

    def broken():
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main()


def test_public_names_are_all_there():
    import toolkit as package

    assert "ToolkitTrainer" in package.__all__
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = package.no_such_name
