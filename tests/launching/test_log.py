"""`stdout.log` holds every byte that is printed but secrets, and is for its owner alone."""

import subprocess
import sys

import psutil
import pytest

from toolkit.launching.launch import run

SECRET = "s3cret/välue+of-mine"


@pytest.fixture
def log_of(tmp_path):
    """Run a script that can print `SECRET`, and return what stands in the log."""

    def start(script, *flags, **options):
        before = (
            "import os, sys, time\nsecret = os.environb[b'MY_PASSWORD']\nout = sys.stdout.buffer\n"
        )
        outcome = run(
            [sys.executable, "-c", before + script, *flags],
            folder=tmp_path,
            timeout=60,
            environment={"MY_PASSWORD": SECRET},
            **options,
        )
        assert outcome.status == "ok"
        assert (tmp_path / "stdout.log").stat().st_mode & 0o777 == 0o600
        return (tmp_path / "stdout.log").read_bytes()

    return start


def test_a_secret_is_removed_where_it_comes_in_two_pieces(log_of):
    lines = []
    log = log_of(
        "for part in (b'one ', secret[:8], secret[8:], b' two\\n'):\n"
        "    os.write(1, part)\n"
        "    time.sleep(0.1)\n"
        "os.write(2, b'of ' + sys.argv[2].encode() + b', no newline')\n",
        "--hub_token",
        "tok-of-the-hub",
        on_line=lines.append,
    )
    assert log == b"one [removed] two\nof [removed], no newline"
    assert lines == ["one [removed] two", "of [removed], no newline"]


def test_other_bytes_arrive_as_they_were_printed(log_of):
    log = log_of(
        "out.write(bytes(range(256)) * 300 + 'é模'.encode() * 40_000 + 'x\\n'.encode('utf-16'))\n"
        "out.write(b'10%\\r100%\\r\\n')\n"
    )
    expected = bytes(range(256)) * 300 + "é模".encode() * 40_000 + "x\n".encode("utf-16")
    assert log == expected + b"10%\r100%\r\n"


def test_a_line_without_end_goes_on_and_a_secret_at_the_cut_does_not(log_of, tmp_path):
    log = log_of(
        # The cut falls somewhere inside: every place of the secret lies at one of the cuts.
        "for _ in range(60_000):\n"
        "    out.write(b'-' * 29 + secret)\n"
        "out.flush()\n"
        f"while os.path.getsize({str(tmp_path / 'stdout.log')!r}) < 1_000_000:\n"
        "    time.sleep(0.02)\n"
    )
    assert log == (b"-" * 29 + b"[removed]") * 60_000


def test_a_flood_arrives_whole_and_holds_no_one_up_for_long(log_of):
    begun = cpu_seconds()
    log = log_of(
        "line = b'{step} tokens/s 123.4, loss 2.5, a length of words ' + b'x' * 50\n"
        "for number in range(100_000):\n"
        "    out.write(b'%d %s\\n' % (number, line))\n"
    )
    lines = log.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(100_000))
    assert cpu_seconds() - begun < 45


def cpu_seconds():
    """Of this process and the children that have ended."""
    used = psutil.Process().cpu_times()
    return used.user + used.system + used.children_user + used.children_system


def test_the_log_is_replaced_and_no_link_is_followed(log_of, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "stdout.log").symlink_to(victim)
    assert log_of("out.write(b'new\\n')\n") == b"new\n"
    assert victim.read_text() == "kept"


def test_what_was_printed_before_the_owner_died_is_in_the_log(tmp_path, wait_until, living):
    owner = (
        "import sys; from pathlib import Path; from toolkit.launching.launch import run\n"
        "run(sys.argv[2:], folder=Path(sys.argv[1]), timeout=60)\n"
    )
    script = "import time; print('last words', flush=True); time.sleep(600)"
    log = tmp_path / "stdout.log"
    with subprocess.Popen(
        [sys.executable, "-c", owner, str(tmp_path), sys.executable, "-c", script]
    ) as process:
        wait_until(lambda: log.exists() and log.read_text() == "last words\n")
        process.kill()
    wait_until(lambda: not living())
    assert log.read_text() == "last words\n"
