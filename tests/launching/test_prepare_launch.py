"""`toolkit prepare`: what it says is what lies in the cache."""

import contextlib
import fcntl
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest
from typer.testing import CliRunner

from toolkit.cli import app
from toolkit.launching import preflight
from toolkit.training import preflight_process


@pytest.fixture
def prepare(session_cache, tmp_path):
    """Run the verb with the cache of the other tests, which may have the built-in model."""
    environment = os.environ | {"TOOLKIT_CACHE": str(session_cache), "HF_HUB_OFFLINE": "1"}

    def run(*words):
        command = [sys.executable, "-m", "toolkit.cli", "prepare", *map(str, words)]
        return subprocess.run(
            command, text=True, cwd=tmp_path, env=environment, check=False, capture_output=True
        )

    return run


@contextlib.contextmanager
def terminal():
    """Yield a terminal's file descriptor, and a list that gets what was written to it."""
    watched, written = pty.openpty()
    fcntl.ioctl(written, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    seen = []
    try:
        yield written, seen
    finally:
        os.close(written)
        seen.append(os.read(watched, 100_000).decode())
        os.close(watched)


def chats(path, count=20):
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b {n}"}]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_it_says_in_words_and_json_what_is_in_the_cache_and_does_it_once(
    prepare, cache, tmp_path, monkeypatch, caplog
):
    flags = ("--train_file", chats(tmp_path / "chats.jsonl"), "--validation_split_percentage", 30)
    first = prepare("--json", "--", *flags)
    assert first.returncode == 0, first.stderr
    assert first.stderr.count("Tokenising chats.jsonl") == 2  # to train on, and to evaluate on
    assert "%|" not in first.stderr  # no bar where nobody watches
    assert "chats of chats.jsonl are trained with roles" in first.stderr
    facts = json.loads(first.stdout)
    data, validation = facts["data"], facts["validation"]
    assert data["rows"] + validation["rows"] == 20

    def prepared_here(flags, **_):
        with contextlib.redirect_stdout(io.StringIO()) as answer:
            assert preflight_process.main(["--preview", *flags]) == 0
        return json.loads(answer.getvalue())

    monkeypatch.setattr(preflight, "prepare_once", prepared_here)
    again = CliRunner().invoke(app, ["prepare", "--", *map(str, flags)], catch_exceptions=False)
    assert again.exit_code == 0
    assert "Tokenising" not in again.output + caplog.text
    table, _, shown = again.stdout.partition("\n\n")
    said = dict(line.split(maxsplit=1) for line in table.splitlines() if line[:1] != " ")
    assert said["data"] == "chats.jsonl (chat)"
    assert said["chat"].split() == ["template", "roles"]
    assert said["packing"] == "none"
    assert said["cache"] == data["folder"]
    assert os.path.isfile(os.path.join(data["folder"], "facts.json"))
    share = f"{data['supervised_tokens'] / data['tokens']:.0%}"
    trained = said["tokens"] if "trained" in said["tokens"] else ""
    assert "⟦b " in shown  # the marks are there without a terminal, and its codes are not
    assert "\x1b" not in shown
    assert trained.split()[1:] == [str(data["supervised_tokens"]), f"({share})"]


def test_a_terminal_gets_a_bar(cache, tmp_path, monkeypatch):
    path = chats(tmp_path / "watched.jsonl")
    with terminal() as (stderr, seen), open(stderr, "w", closefd=False) as file:
        monkeypatch.setattr(sys, "stderr", file)
        assert preflight_process.main(["--train_file", str(path)]) == 0
    assert "Tokenising: 100%|" in seen[0]


def test_a_mistake_is_one_sentence_and_status_2(prepare):
    done = prepare("--", "--train_file", "nothing.jsonl")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "nothing.jsonl is not there" in done.stderr
