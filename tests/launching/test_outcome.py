"""The judgement alone: from what was seen of a run to one sentence."""

import pytest

from toolkit.launching.outcome import (
    WARM_PROCESS_ENDED,
    Ending,
    classify_end,
    without_launcher_noise,
)
from toolkit.launching.status import RankError, RankStatus

E = "E1121 10:39:00.123456 4711 /v/site-packages/torch/distributed/elastic/multiprocessing/api.py"


def said(rank, state="running", *, step=3, time=10.0, error=None):
    return RankStatus(
        rank=rank,
        pid=100 + rank,
        state=state,
        step=step,
        time=time,
        started=0.0,
        error=RankError(type=error[0], message=error[1], traceback="") if error else None,
    )


@pytest.mark.parametrize(
    "error",
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."),
        ("RuntimeError", "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate me"),
        ("RuntimeError", "DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
        ("MemoryError", ""),
        ("OSError", "[Errno 12] Cannot allocate memory"),
    ],
)
def test_running_out_of_memory_is_its_own_kind(error):
    error = (error[0], error[1].replace("allocate me", "allocate memory"))
    outcome = classify_end(Ending(statuses=[said(0, "failed", error=error)], returncode=1))
    assert outcome.status == "oom"


def test_a_kill_that_the_kernel_counted_is_out_of_memory():
    ending = {
        "statuses": [said(0, "finished"), said(1)],
        "gone": {1: 11.0},
        "lines": [f"{E}:1002] failed (exitcode: -9) local_rank: 1 (pid: 101) of binary: python"],
        "returncode": 1,
    }
    assert classify_end(Ending(**ending, out_of_memory_kills=1)).status == "oom"
    for unseen in (0, None):
        assert classify_end(Ending(**ending, out_of_memory_kills=unseen)).status == "failed"
    assert classify_end(Ending(**ending)).status == "failed"


def test_an_ended_warm_process_is_the_cause_unless_a_rank_has_an_error_or_all_have_finished():
    ended = {"warm_process_ended": True, "returncode": -9, "lines": ["Loading weights: 100%"]}
    echo = said(0, "failed", error=("RuntimeError", "Connection closed by peer"))
    for statuses in ([], [said(0), said(1)], [echo, said(1)]):
        outcome = classify_end(Ending(statuses=statuses, gone={1: 11.0}, **ended))
        assert (outcome.status, outcome.reason) == ("failed", WARM_PROCESS_ENDED)
    failed = said(0, "failed", error=("ValueError", "no rows"))
    assert "no rows" in (classify_end(Ending(statuses=[failed, said(1)], **ended)).reason or "")
    finished = [said(0, "finished"), said(1, "finished")]
    assert classify_end(Ending(statuses=finished, num_processes=2, **ended)).status == "ok"


def test_a_death_wins_over_the_echo_it_made_though_it_was_seen_later():
    echo = said(0, "failed", time=10.0, error=("RuntimeError", "Connection closed by peer"))
    lines = [f"{E}:1002] failed (exitcode: -9) local_rank: 1 (pid: 101) of binary: python"]
    outcome = classify_end(
        Ending(statuses=[echo, said(1)], gone={1: 11.0}, lines=lines, returncode=1)
    )
    assert outcome.reason
    assert outcome.reason.startswith("rank 1 was killed (SIGKILL)")


def test_of_several_exit_codes_the_first_of_a_process_counts():
    """torchelastic repeats those of all that it ended in a table, the cause's among them."""
    lines = [
        f"{E}:1002] failed (exitcode: -9) local_rank: 1 (pid: 101) of binary: python",
        f"{E}:1002] failed (exitcode: -11) local_rank: 0 (pid: 100) of binary: python",
        "  exitcode  : -11 (pid: 100)",
        "  exitcode  : -15 (pid: 101)",
    ]
    ending = Ending(statuses=[said(0), said(1)], gone={0: 11.0, 1: 11.0}, lines=lines, returncode=1)
    outcome = classify_end(ending)
    assert outcome.reason
    assert outcome.reason.startswith("rank 1 was killed (SIGKILL)")


def test_a_rank_that_torchelastic_ended_is_not_the_cause():
    echo = said(0, "failed", time=10.0, error=("RuntimeError", "Connection closed by peer"))
    lines = ["  exitcode  : -15 (pid: 101)", "  exitcode  : 1 (pid: 100)"]
    outcome = classify_end(
        Ending(statuses=[echo, said(1)], gone={1: 11.0}, lines=lines, returncode=1)
    )
    assert outcome.reason == "rank 0 failed at step 3: RuntimeError: Connection closed by peer"


def test_an_abort_after_the_end_that_cost_a_neighbour_its_end_is_named():
    lines = ["  exitcode  : -6 (pid: 100)", "  exitcode  : -15 (pid: 101)"]
    ending = Ending(
        statuses=[said(0, "finished"), said(1)], gone={1: 11.0}, lines=lines, returncode=1
    )
    assert classify_end(ending).reason == (
        "rank 0 had finished and then died of SIGABRT; "
        "the launcher ended the other ranks before they were through."
    )


def test_an_abort_after_the_end_is_named_though_the_neighbour_never_spoke():
    lines = ["  exitcode  : -6 (pid: 100)", "  exitcode  : -15 (pid: 101)"]
    ending = Ending(statuses=[said(0, "finished")], lines=lines, num_processes=2, returncode=1)
    reason = classify_end(ending).reason
    assert reason
    assert reason.startswith("rank 0 had finished and then died of SIGABRT")


def test_a_rank_that_never_spoke_is_missed():
    outcome = classify_end(Ending(statuses=[said(0, "finished")], num_processes=2, returncode=0))
    assert outcome.status == "failed"
    assert outcome.reason == "The launcher ended with status 0, but rank 1 wrote no status file."


def test_a_refusal_names_its_rank():
    refusal = said(1, "refused", step=0, error=("Refused", "asked ZeRO-3, engaged DDP"))
    outcome = classify_end(Ending(statuses=[said(0), refusal], returncode=1))
    assert outcome.status == "refused"
    assert outcome.reason == "rank 1 refused the run: Refused: asked ZeRO-3, engaged DDP"


def test_a_long_message_is_cut():
    outcome = classify_end(
        Ending(statuses=[said(0, "failed", error=("E", "x" * 5000))], returncode=1)
    )
    assert outcome.reason
    assert len(outcome.reason) < 700


def test_the_launchers_wall_is_taken_off_and_the_ranks_traceback_stays():
    rank = [
        "step 1",
        "[rank1]: Traceback (most recent call last):",
        "[rank1]: ValueError: the flux is off",
        "Traceback (most recent call last):",
        '  File "script.py", line 3, in <module>',
        "ValueError: the flux is off",
    ]
    wall = [
        f"W{E[1:]}:1028] Sending process 100 closing signal SIGTERM",
        f"{E}:1002] failed (exitcode: 1) local_rank: 1 (pid: 101) of binary: python",
        "Traceback (most recent call last):",
        '  File "/v/torch/distributed/run.py", line 1, in run',
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "=" * 60,
        "script.py FAILED",
        "-" * 60,
        "  exitcode  : 1 (pid: 101)",
        "=" * 60,
    ]
    simple = [
        "Traceback (most recent call last):",
        '  File "/v/accelerate/commands/launch.py", line 1, in simple_launcher',
        "subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 1.",
    ]
    assert without_launcher_noise(rank + wall) == rank
    assert without_launcher_noise(rank + simple) == rank
    assert without_launcher_noise(rank) == rank


def test_a_single_rank_dies_under_the_simple_launcher():
    line = "subprocess.CalledProcessError: Command '['python']' died with <Signals.SIGSEGV: 11>."
    ending = Ending(statuses=[said(0)], gone={0: 11.0}, lines=[line], returncode=1)
    assert classify_end(ending).reason == "rank 0 died at step 3 of SIGSEGV."


def test_every_rank_that_ran_out_of_memory_is_named():
    out = ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.")
    echo = ("RuntimeError", "Connection closed by peer")
    statuses = [
        said(0, "failed", time=11.0, error=out),
        said(1, "failed", time=12.0, error=echo),
        said(3, "failed", time=10.0, error=out),
    ]
    outcome = classify_end(Ending(statuses=statuses, returncode=1))
    assert outcome.status == "oom"
    assert outcome.reason
    assert outcome.reason.startswith("ranks 0 and 3 ran out of memory; rank 3 failed at step 3: ")
    alone = classify_end(Ending(statuses=statuses[1:], returncode=1))
    assert alone.reason
    assert alone.reason.startswith("rank 3 failed at step 3: ")


def test_a_guard_s_sentence_is_the_reason_whichever_rank_was_read_first():
    error = ("GuardError", "The loss of step 7 is not finite: nan on rank 1.")
    ranks = [said(1, "failed", time=9.0, error=error), said(0, "failed", error=error)]
    outcome = classify_end(Ending(statuses=ranks, returncode=1))
    assert (outcome.status, outcome.reason) == ("failed", error[1])
