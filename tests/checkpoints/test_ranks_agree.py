"""Two ranks that see different things resume together or not at all."""

import json
import subprocess
import sys

import pytest
from places import HELPERS

from toolkit.checkpoints.atomic_folder import atomic_folder

pytestmark = pytest.mark.long  # each test starts two ranks

RANKS = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from forked_ranks import become_a_rank
import torch
from toolkit.checkpoints.resume_request import ResumeRequest
from toolkit.checkpoints.resuming import find_checkpoint
from toolkit.errors import UsageError
for line in sys.stdin:
    case = json.loads(line)
    if os.fork() == 0:
        break
    os.wait()
    print(json.dumps([Path(case["store"] + name).read_text() for name in ("-0", "-1")]), flush=True)
else:
    sys.exit(0)
rank = become_a_rank(2)
os.chdir(case["folders"][rank])
store = torch.distributed.FileStore(case["store"], 2)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
try:
    answer = str(find_checkpoint(ResumeRequest(Path()), case["facts"][rank]).step)
except UsageError as error:
    answer = str(error)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
Path(f"{case['store']}-{rank}").write_text(answer)
"""


@pytest.fixture(scope="module")
def answers_of():
    """Return what each of two ranks answers, in a folder and with facts of its own.

    The ranks are forks of a process that has imported all.
    """
    with subprocess.Popen(
        [sys.executable, "-c", RANKS, str(HELPERS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as forking:

        def answers(folders, facts, store):
            case = {"folders": [*map(str, folders)], "facts": facts, "store": str(store)}
            forking.stdin.write(f"{json.dumps(case)}\n")
            forking.stdin.flush()
            return json.loads(forking.stdout.readline())

        yield answers
    assert forking.returncode == 0


FACTS = {"seed": 1}


def write_checkpoint(folder, *, content=b"state"):
    with atomic_folder(folder, kind="checkpoint", format=1, step=4, facts=FACTS) as draft:
        (draft / "rank-0.pt").write_bytes(content)


@pytest.mark.parametrize(
    ("second", "said"),
    [({"seed": 1}, "4"), ({"seed": 2}, "seed is 1 in the checkpoint and 2 now. Resume with")],
)
def test_what_one_rank_has_otherwise_is_refused_by_both(answers_of, tmp_path, second, said):
    write_checkpoint(tmp_path / "checkpoint-4")
    answers = answers_of([tmp_path] * 2, [FACTS, second], tmp_path / "store")
    assert answers[0] == answers[1]
    assert said in answers[0]


def test_two_machines_with_folders_of_their_own_do_not_mix_two_checkpoints(answers_of, tmp_path):
    """Each is whole, under a path that is the same on both: here, a relative one."""
    for rank, content in enumerate([b"of one training", b"of another one"]):
        write_checkpoint(tmp_path / str(rank) / "checkpoint-4", content=content)
    folders = [tmp_path / "0", tmp_path / "1"]
    for answer in answers_of(folders, [FACTS, FACTS], tmp_path / "store"):
        assert "No checkpoint can be resumed from" in answer
        assert "the ranks read different manifests" in answer
