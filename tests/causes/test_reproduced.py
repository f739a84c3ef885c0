"""Causes that are reproduced: real programs fail of them, and their output names them."""

import os
import re
import subprocess
import sys

import launches
import pytest
from places import SCRIPTS

from toolkit.causes.diagnosis import diagnose, slow_causes
from toolkit.causes.failures import read_failures
from toolkit.causes.lines import lines_of
from toolkit.causes.table import causes

pytestmark = pytest.mark.long  # ranks are among the programs

SIGNALS = {"SEGV": "segmentation-fault", "KILL": "killed", "BUS": "bus-error"}
SIGNALS |= {"ILL": "illegal-instruction"}

IN_A_RANK = {
    "raise": ("unknown", (1,), "rank 1: ArithmeticError: the third step went wrong"),
    "kill": ("killed", (1,), "Rank 1 was killed (SIGKILL)"),
    "leave": ("neighbour-gone", (0,), "ended without an error in this log"),
    "skip": ("collective-not-reached", (0,), "Rank 0 waited: look at rank 1 first."),
    "shapes": ("collective-mismatch", (0, 1), "On every rank: "),
    "params": ("other-model-on-a-rank", (0, 1), "On every rank: DDP got another model"),
    "save": ("bitsandbytes-under-fsdp1", (0, 1), "On every rank: "),
    "save-uneven": ("bitsandbytes-under-fsdp1", (0, 1), "On every rank: "),
    "stop": ("stopped-from-outside", (), "(signal 15)"),
}
"""Cause, ranks, and part of the text, by how the second of two ranks fails."""


COLD = {"shapes": "DETAIL", "stop": "OFF"}
"""Torch reads the variable when it is imported; a launcher that is stopped is its ranks' parent."""


def diagnosis_of(text):
    log = read_failures(lines_of(text.splitlines()))
    return diagnose(log) or next(iter(slow_causes(log)), None)


def output_of(command, **variables):
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | variables,
        timeout=600,
    )
    return done.stdout.decode(errors="replace")


@pytest.fixture(scope="module")
def by_one_process(tmp_path_factory):
    """The output of each failure of one process, with the name of its cause."""
    folder = tmp_path_factory.mktemp("ways")
    command = [sys.executable, "-W", "ignore", SCRIPTS / "fail_in_many_ways.py", folder]
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "CUDA_VISIBLE_DEVICES": ""}
    output = output_of(command, **variables)
    (folder / "log").write_text(output)
    parts = output.split("===== ")[1:]
    return [(name, text) for name, _, text in (part.partition("\n") for part in parts)]


def test_each_failure_of_one_process_is_named(by_one_process):
    named = {(name, getattr(diagnosis_of(text), "name", None)) for name, text in by_one_process}
    assert [pair for pair in sorted(named, key=str) if pair[0] != pair[1]] == []


def test_the_evidence_of_each_is_a_line_of_its_log(by_one_process):
    for name, text in by_one_process:
        diagnosis = diagnosis_of(text)
        lines = text.splitlines()
        for shown in diagnosis.evidence:
            number, _, line = shown.partition(": ")
            there = lines[int(re.fullmatch(r"line (\d+)(?:, rank 0)?", number)[1]) - 1]
            assert line[:60] in there, name


def test_every_cause_is_reproduced_or_cites_its_source(by_one_process):
    reproduced = {name for name, _ in by_one_process} | set(SIGNALS.values())
    reproduced |= {name for name, _, _ in IN_A_RANK.values()}
    reproduced.add("hang")  # in tests/test_hangs.py
    reproduced.add("machine-gone")  # in tests/test_several_machines.py
    cited = {cause.name for cause in causes() if cause.source is not None}
    assert {cause.name for cause in causes()} - reproduced <= cited
    assert reproduced - {"unknown"} <= {cause.name for cause in causes()}


def test_a_signal_is_named_by_the_shells_own_words():
    for name, cause in SIGNALS.items():
        output = output_of(["bash", "-c", f"(kill -{name} $BASHPID); sleep 0"])
        diagnosis = diagnosis_of(output)
        assert diagnosis is not None, output
        assert diagnosis.name == cause


@pytest.mark.parametrize("how", IN_A_RANK)
def test_a_rank_that_fails_is_told_from_its_neighbour(how, launch_environment):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    command += [SCRIPTS / "fail_in_a_rank.py", how]
    environment = launch_environment
    if how in COLD:
        environment = launches.cold(environment) | {"TORCH_DISTRIBUTED_DEBUG": COLD[how]}
    output = launches.run(command, environment=environment).stdout
    diagnosis = diagnosis_of(output)
    cause, ranks, words = IN_A_RANK[how]
    assert diagnosis is not None, output
    assert (diagnosis.name, diagnosis.ranks) == (cause, ranks), output
    assert words in diagnosis.text
