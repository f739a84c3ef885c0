"""Signs of life of the ranks of a launch, as their neighbours read them."""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace

import pytest

from toolkit.launching.processes import start_of
from toolkit.launching.watchdog import RankFiles


@pytest.fixture
def signs_of(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")

    def of_rank(number):
        monkeypatch.setenv("RANK", str(number))
        return RankFiles(tmp_path)

    return of_rank


def test_each_rank_reads_what_the_others_have_written_and_nothing_else(signs_of, tmp_path):
    zero, one = signs_of(0), signs_of(1)
    zero.write(3.0)
    one.write(5.0, left=True)
    (tmp_path / "alive-rank-2.json").write_text((tmp_path / "alive-rank-1.json").read_text())
    later = {sign.rank: sign for sign in zero.read()}
    assert later[0].idle_now() >= 3.0
    assert [later[number].left for number in (0, 1)] == [False, True]
    (tmp_path / "alive-rank-1.json").write_text('{"rank": 1, "ho')
    assert [sign.rank for sign in one.read() if not sign.left] == [0]


def test_a_rank_of_a_larger_launch_before_is_none_of_this_one(signs_of, tmp_path):
    zero = signs_of(0)
    zero.write(0.0)
    old = (tmp_path / "alive-rank-0.json").read_text().replace('"rank": 0', '"rank": 2')
    (tmp_path / "alive-rank-2.json").write_text(old)
    assert [sign.rank for sign in zero.read()] == [0]


def test_the_last_rank_that_leaves_takes_the_files_along(signs_of, tmp_path):
    zero, one = signs_of(0), signs_of(1)
    zero.write(0.0, left=True)
    zero.clear()  # rank 1 has not come yet
    one.write(0.0)
    one.clear()
    assert len(zero.read()) == 2
    one.write(0.0, left=True)
    one.clear()
    assert not tmp_path.exists()


def test_a_rank_that_died_counts_as_one_that_has_left(signs_of, tmp_path):
    zero, one = signs_of(0), signs_of(1)
    one.write(0.0)
    content = json.loads((tmp_path / "alive-rank-1.json").read_text())
    (tmp_path / "alive-rank-1.json").write_text(json.dumps(content | {"pid": 2**22 + 1}))
    zero.write(0.0, left=True)
    zero.clear()
    assert not tmp_path.exists()


class Shared(dict):
    """What ranks of all machines read, in place of the store of a launch."""

    put = dict.__setitem__


def test_machines_without_a_folder_in_common_see_each_other(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    shared, signs = Shared(), []
    for number in (0, 1):
        (tmp_path / str(number)).mkdir()
        monkeypatch.setenv("RANK", str(number))
        signs.append(RankFiles(tmp_path / str(number), shared))
        signs[-1].write(3.0)
    monkeypatch.setenv("RANK", "0")
    zero, one = signs[0].read()
    assert (zero.is_here, one.is_here, one.idle) == (True, False, 3.0)
    begun = time.monotonic()
    # What stays the same grows old; what is new is young, whatever the other machine's clock says.
    (_, again), heard = signs[0].read(), one.heard
    assert again.heard == heard <= begun
    signs[1].write(0.0)
    _, new = signs[0].read()
    assert new.heard >= begun
    signs[1].put("hang-rank-1.json", "a report")
    assert signs[0].get("hang-rank-1.json") == "a report"
    signs[1].remove("hang-rank-1.json")
    assert signs[0].get("hang-rank-1.json") is None
    signs[0].write(0.0, left=True)
    signs[0].clear()  # rank 1 clears its own folder
    assert not (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()


def test_why_a_rank_is_silent(signs_of):
    rank = signs_of(0)
    rank.write(0.0)
    (sign,) = rank.read()
    assert (sign.lives(), sign.stands()) == (True, False)
    assert "native code" in sign.why_silent()
    assert "left" in replace(sign, left=True).why_silent()
    child = subprocess.Popen(["sleep", "600"])
    try:
        of_child = replace(sign, pid=child.pid, started=start_of(child.pid))
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert of_child.lives()
        assert of_child.stands()
        assert "SIGSTOP" in of_child.why_silent()
    finally:
        child.kill()
        child.wait()
    assert (of_child.lives(), of_child.stands()) == (False, True)
    assert of_child.why_silent() == "is gone"


def test_of_another_machine_the_readers_clock_counts_and_its_processes_are_not_looked_for(signs_of):
    rank = signs_of(0)
    rank.write(2.0)
    (sign,) = rank.read()
    far = replace(sign, host="1 (elsewhere)", heard=time.monotonic() - 40, pid=2**22 + 1)
    assert 42 <= far.idle_now() < 52
    assert (far.is_here, far.lives(), far.stands()) == (False, True, False)
    assert far.why_silent() == "does not answer from machine 1 (elsewhere)"
    near = replace(sign, monotonic=time.monotonic() - 70)
    assert 72 <= near.idle_now() < 82
