"""A signal asks once, in whatever rank; what is said of it names where to go on."""

import inspect
import os
import signal

import pytest

from toolkit.checkpoints.preemption import Preempted, Preemption
from toolkit.checkpoints.saver import CheckpointSaver
from toolkit.launching.outcome import Ending, classify_end
from toolkit.launching.status import StatusFile, guard, read_statuses


@pytest.fixture
def hangup():
    """Set what the process does with SIGHUP, as whoever started it might have."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_once_and_a_second_one_changes_nothing(number, hangup):
    hangup(signal.SIG_DFL)
    asked = []
    preemption = Preemption(lambda: asked.append(1))
    before = signal.getsignal(number)
    with preemption.listening():
        assert preemption.seconds_since_signal() is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked == [1]
        assert 0 <= preemption.seconds_since_signal() < 5
    assert signal.getsignal(number) is before


def test_a_hangup_that_nohup_has_ignored_stays_ignored(hangup, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    hangup(signal.SIG_IGN)
    asked = []
    with Preemption(lambda: asked.append(1)).listening():
        os.kill(os.getpid(), signal.SIGHUP)
    assert asked == []


def test_a_rank_saves_when_torchelastic_hands_a_hangup_on_though_nohup_has_it_ignored(
    hangup, monkeypatch
):
    from torch.distributed.elastic.multiprocessing import api

    assert "SIGTERM,SIGINT,SIGHUP,SIGQUIT" in inspect.getsource(api.PContext.start)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    hangup(signal.SIG_IGN)
    asked = []
    with Preemption(lambda: asked.append(1)).listening():
        os.kill(os.getpid(), signal.SIGHUP)
    assert asked == [1]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_where_nothing_was_saved_it_says_where_to_go_on_all_the_same(tmp_path):
    folder = tmp_path / "checkpoint-4"
    text = str(Preempted(7, folder, saved=False, seconds=0.2))
    assert "nothing was saved after step 7: an earlier one was not finite" in text
    assert text.endswith(f"--resume_from_checkpoint {folder}")
    assert "no checkpoint" in str(Preempted(7, None, saved=False, seconds=None))


def test_weights_that_packed_rows_have_moved_on_are_not_saved(tmp_path):
    class Everybody:
        heartbeat = type("Agreed", (), {"stop_agreed": True})

    saver = CheckpointSaver(
        output_dir=tmp_path,
        facts={},
        recorder=Everybody,
        every=5,
        last_step=20,
        preemption=Preemption(lambda: None),
    )
    due = {step for step in range(1, 41) if saver.due(step)}
    assert due == set(range(1, 21))  # asked to stop, each; the last one by count
    assert not saver.stopping(20)


def test_a_preempted_run_says_so_in_its_status_and_its_outcome(tmp_path):
    error = Preempted(7, tmp_path / "run" / "checkpoint-7", saved=True, seconds=2.31)
    status = StatusFile(tmp_path, 0)
    try:
        with guard(status):
            status.running(7)
            status.preempted(str(error))
            raise error
    except Preempted:
        pass
    (said,) = read_statuses(tmp_path)
    assert (said.state, said.step) == ("preempted", 7)
    # The other rank was ended by the launcher before it could say a word of it.
    lines = [f"      exitcode : -15 (pid: {said.pid + 1})"]
    outcome = classify_end(Ending(statuses=[said], num_processes=2, returncode=1, lines=lines))
    assert outcome.status == "failed"
    assert outcome.reason == (
        f"preempted: saved at step 7 in {tmp_path}/run/checkpoint-7, 2.3 s after the signal. Go on "
        f"with --resume_from_checkpoint last --output_dir {tmp_path}/run"
    )
