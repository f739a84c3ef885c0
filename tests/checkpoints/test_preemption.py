"""SIGTERM asks once, in whatever rank; what is said of it names where to go on."""

import os
import signal

from toolkit.checkpoints.keeping import Keeper
from toolkit.checkpoints.preemption import Preempted, Preemption
from toolkit.launching.outcome import Ending, judge
from toolkit.launching.status import StatusFile, guard, read_statuses


def test_sigterm_asks_once_and_a_second_one_changes_nothing():
    asked = []
    preemption = Preemption(lambda: asked.append(1))
    before = signal.getsignal(signal.SIGTERM)
    with preemption.listening():
        assert preemption.seconds_since_asked() is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked == [1]
        assert 0 <= preemption.seconds_since_asked() < 5
    assert signal.getsignal(signal.SIGTERM) is before


def test_where_nothing_was_saved_it_says_where_to_go_on_all_the_same(tmp_path):
    folder = tmp_path / "checkpoint-4"
    text = str(Preempted(7, folder, saved=False, seconds=0.2))
    assert "nothing was saved after step 7: an earlier one was not finite" in text
    assert text.endswith(f"--resume_from_checkpoint {folder}")
    assert "no checkpoint" in str(Preempted(7, None, saved=False, seconds=None))


def test_weights_that_packed_rows_have_moved_on_are_not_saved(tmp_path):
    class Everybody:
        pulse = type("Agreed", (), {"stop_agreed": True})

    keeper = Keeper(
        output_dir=tmp_path,
        facts={},
        recorder=Everybody,
        every=5,
        last_step=20,
        preemption=Preemption(lambda: None),
    )
    due = {step for step in range(1, 41) if keeper.due(step)}
    assert due == set(range(1, 21))  # asked to stop, each; the last one by count
    assert not keeper.stopping(20)


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
    outcome = judge(Ending(statuses=[said], num_processes=2, returncode=1, lines=lines))
    assert outcome.status == "failed"
    assert outcome.reason == (
        f"preempted: saved at step 7 in {tmp_path}/run/checkpoint-7, 2.3 s after SIGTERM. Go on "
        f"with --resume_from_checkpoint last --output_dir {tmp_path}/run"
    )
