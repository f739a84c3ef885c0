"""The `toolkit` command: instant, and never a traceback for a mistake."""

import functools
import os
import pty
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version

import pytest
import typer.main
from typer.testing import CliRunner

from toolkit.cli import app

HEAVY = {"torch", "transformers", "accelerate", "deepspeed", "datasets", "peft", "numpy"}
MOST_MODULES = 330
"""Modules that a plain answer loads at most: loading them is what it takes its time for."""

ROOT = typer.main.get_command(app)
GROUPS = ("configs", "checkpoint")
VERBS = [
    (),
    *((name,) for name in ROOT.commands),
    *((group, name) for group in GROUPS for name in ROOT.commands[group].commands),
]

INSTALL_COMPLETION = "toolkit --install-completion"

PLAIN_ANSWERS = [
    *((*verb, "--help") for verb in VERBS),
    ("--version",),
    ("configs", "list"),
    ("configs", "show", "zero3"),
]


def toolkit(*words):
    command = [sys.executable, "-m", "toolkit.cli", *words]
    return subprocess.run(command, capture_output=True, text=True)


ANSWER = """
import atexit, os, sys
atexit.register(lambda: os.write({file}, " ".join(sys.modules).encode()))
sys.argv = ["toolkit", *{words}]
from toolkit.cli import main
main()
"""


@functools.cache
def answered(*words):
    """Run the command once; return its end, and the modules that it had loaded."""
    with tempfile.TemporaryFile() as loaded:
        code = ANSWER.format(file=loaded.fileno(), words=words)
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            pass_fds=[loaded.fileno()],
        )
        loaded.seek(0)
        return done, set(loaded.read().decode().split())


def imported_by(code):
    """Return the top-level packages that Python has loaded after `code`."""
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = re.findall(r"^import time:.*\|\s*(\S+)$", done.stderr, re.MULTILINE)
    return {name.partition(".")[0] for name in names}


def test_importing_the_package_imports_nothing_heavy():
    assert not HEAVY & imported_by("import toolkit; toolkit.STRATEGIES; toolkit.write_configs")


@pytest.mark.parametrize("words", PLAIN_ANSWERS, ids=" ".join)
def test_a_plain_answer_imports_little(words):
    done, loaded = answered(*words)
    assert done.returncode == 0
    assert "typer" in loaded
    assert not HEAVY & loaded
    assert len(loaded) <= MOST_MODULES


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_every_help_renders(words):
    done, _ = answered(*words, "--help")
    short = CliRunner().invoke(app, [*words, "-h"])
    assert done.returncode == short.exit_code == 0, done.stderr
    assert "Usage:" in done.stdout
    assert "Usage:" in short.stdout
    assert done.stderr == short.stderr == ""


def examples_of(words):
    """Return the examples that a help text ends with."""
    text = answered(*words, "--help")[0].stdout
    end = text.partition("\n  Examples:\n")[2]
    assert text.endswith(end)
    return [line.strip() for line in end.splitlines()]


def take(line):
    """Take a verb's command apart as its command line does, and run nothing."""
    _, verb, *words = shlex.split(line)
    return ROOT.commands[verb].make_context(verb, words, **ROOT.context_settings)


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_every_help_ends_with_examples(words, tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    lines = examples_of(words)
    assert len(lines) == 2
    for line in lines:
        assert " ".join(["toolkit", *words]) in line
        assert len(line) <= 76  # as it stands in a terminal of 80 columns, in one line
        ours = re.search(r"toolkit [^)|]*", line)[0]
        if ours.startswith(("toolkit configs", "toolkit plan", "toolkit recommend")):
            result = CliRunner().invoke(app, shlex.split(ours)[1:], catch_exceptions=False)
            assert result.exit_code == 0
            assert result.output
        elif ours != INSTALL_COMPLETION:
            # Behind -- stand flags of training, but for a script that is certified.
            take(ours if "certify" in words else ours.partition(" -- ")[0])


def test_flags_in_the_examples_are_those_of_training():
    from toolkit.training.arguments import own_arguments, training_values

    flags = [line.partition(" -- ")[2] for words in VERBS for line in examples_of(words)]
    flags = [line for line in flags if "train.py" not in line]
    assert any(flags)
    for line in filter(None, flags):
        training_values(own_arguments(shlex.split(line)))


def test_an_example_that_is_not_taken_would_be_noticed():
    with pytest.raises(Exception, match="--no-such-flag"):
        take("toolkit compare --no-such-flag")


def test_the_version_is_the_installed_one():
    done, _ = answered("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"toolkit {version('toolkit')}\n"


COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3|4|9|10)\d(?:;\d+)*m")


def shown(*words, terminal, **variables):
    """Return what the command writes to a terminal, or to a pipe."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE")
    }
    environment = kept | {"TERM": "xterm-256color", "COLUMNS": "80"} | variables
    command = [sys.executable, "-m", "toolkit.cli", *words]
    if not terminal:
        return subprocess.run(command, capture_output=True, env=environment).stdout.decode()
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        written = b""
        try:
            while part := os.read(ours, 65536):
                written += part
        except OSError:  # Linux says so that nobody writes any more
            pass
    os.close(ours)
    return written.decode()


@pytest.mark.parametrize(
    "words",
    [("--help",), ("compare", "--help"), ("plan", "7b"), ("recommend", "7b", "--gpu", "L4")],
)
def test_a_pipe_gets_plain_text(words):
    text = shown(*words, terminal=False)
    assert text
    assert "\x1b" not in text


def test_a_terminal_gets_colours_unless_no_color_is_set():
    words = ("plan", "7b", "--gpu", "L4")
    assert COLOUR.search(shown(*words, terminal=True))
    without = shown(*words, terminal=True, NO_COLOR="1")
    assert "zero3" in without
    assert not COLOUR.search(without)
    assert "\x1b" not in shown(*words, terminal=True, TERM="dumb")


@pytest.fixture
def completed(command):
    """Return what a shell is told may stand where the last of these words was begun."""

    def run(words, *, shell="bash"):
        line = " ".join(words)
        variables = {"_TOOLKIT_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line}
        variables |= {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        done = command(**variables)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("toolkit", "com"), ["compare"]),
        (("toolkit", "configs", "show", "zero2"), ["zero2", "zero2_offload"]),
        (("toolkit", "compare", "--strategies", "ddp,fsdp_h"), ["ddp,fsdp_hybrid"]),
        (("toolkit", "plan", "7b", "--strategy", "sin"), ["single"]),
        (("toolkit", "compare", "--engine", "l"), ["loop"]),
    ],
)
def test_a_shell_completes_verbs_options_and_strategies(words, wanted, completed):
    assert completed(words).split() == wanted
    assert all(name in completed(words, shell="zsh") for name in wanted)


@pytest.fixture
def in_bash(tmp_path):
    """Run lines in a bash that has the command, and a home of its own; return what they print."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    tool = tmp_path / "bin" / "toolkit"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m toolkit.cli "$@"\n')
    tool.chmod(0o755)

    def run(*lines):
        path = f"{tool.parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            # Of its last command bash becomes the process, and no shell is found above that one.
            [bash, "--norc", "-e", "-c", "\n".join([*lines, "true"])],
            capture_output=True,
            text=True,
            env=os.environ | {"PATH": path, "HOME": str(tmp_path)},
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    return run


COMPLETE = ("COMP_WORDS=(toolkit repo) COMP_CWORD=1", "_toolkit_completion toolkit")


@pytest.mark.parametrize(
    "lines",
    [
        ("script=$(toolkit --show-completion)", 'eval "$script"'),
        (f"{INSTALL_COMPLETION} >/dev/null", ". ~/.bashrc"),
    ],
    ids=["shown", "installed"],
)
def test_bash_itself_completes(in_bash, lines):
    assert in_bash(*lines, *COMPLETE, 'echo "${COMPREPLY[@]}"') == ["report"]


def test_help_says_how_to_complete():
    assert "--show-completion" in answered("--help")[0].stdout
    assert INSTALL_COMPLETION in examples_of(())


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
        (("configs", "write", "zero2", "--to", "x", "--num-processes", "0"), "at least 1 process,"),
        (("plan", "-7b"), "A count of parameters begins with no hyphen: 7b."),
        (("plan", "7b", "--strategy", "ddp,,fsdp"), "a comma that stands beside no name"),
    ],
)
def test_a_mistake_is_a_sentence_and_status_2(words, says, tmp_path, command):
    done = command(*words, cwd=tmp_path)
    assert done.returncode == 2
    # That model and data are being prepared is said before a flag of the training is refused.
    (begun,) = done.stdout.splitlines() if "--learning_rate" in words else [""]
    assert begun == "" or ": importing libraries" in begun or begun.startswith("Importing")
    assert done.stderr.startswith("toolkit: ")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [("compares",), ("compare", "--precision", "fp8"), ("compare", "--max_steps", "many")],
    ids=" ".join,
)
def test_what_the_command_line_itself_refuses_is_status_2_too(words, tmp_path, command):
    done = command(*words, cwd=tmp_path)
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
def test_a_path_that_cannot_be_used_is_a_sentence_and_status_2(words, says, tmp_path, command):
    (tmp_path / "file").touch()
    done = command(*words, cwd=tmp_path)
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


def test_a_full_folder_for_temporary_files_is_a_sentence(tmp_path):
    command = [sys.executable, "-m", "toolkit.cli", "compare", "--output", tmp_path / "one"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("toolkit: No usable temporary directory found in ")
    assert sentence.endswith("or not yours to write to: make room, or set TMPDIR.")
    assert not (tmp_path / "one").exists()


def test_a_bug_keeps_its_traceback(monkeypatch):
    from toolkit import cli

    def broken(**_):
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
