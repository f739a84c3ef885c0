"""Two ranks that see different things resume together or not at all."""

import json
import subprocess
import sys

import pytest

from toolkit.checkpoints.atomic_folder import atomic_folder

pytestmark = pytest.mark.long  # each test starts two ranks

RANK = """
import json, os, sys
from pathlib import Path
import torch
from toolkit.checkpoints.resume_request import ResumeRequest
from toolkit.checkpoints.resuming import find_checkpoint
from toolkit.errors import UsageError
rank, facts = int(sys.argv[1]), json.loads(sys.argv[3])
os.chdir(sys.argv[2])
store = torch.distributed.FileStore(sys.argv[4], 2)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
try:
    print(find_checkpoint(ResumeRequest(Path()), facts).step)
except UsageError as error:
    print(error)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


FACTS = {"seed": 1}


def write_checkpoint(folder, *, content=b"state"):
    with atomic_folder(folder, kind="checkpoint", format=1, step=4, facts=FACTS) as draft:
        (draft / "rank-0.pt").write_bytes(content)


def answers_of(folders, facts, store):
    """Return what each of two ranks prints, in a folder and with facts of its own."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(folder), json.dumps(known), str(store)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, (folder, known) in enumerate(zip(folders, facts, strict=True))
    ]
    answers = [process.communicate(timeout=300)[0].strip() for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    return answers


@pytest.mark.parametrize(
    ("second", "said"),
    [({"seed": 1}, "4"), ({"seed": 2}, "seed is 1 in the checkpoint and 2 now. Resume with")],
)
def test_what_one_rank_has_otherwise_is_refused_by_both(tmp_path, second, said):
    write_checkpoint(tmp_path / "checkpoint-4")
    answers = answers_of([tmp_path] * 2, [FACTS, second], tmp_path / "store")
    assert answers[0] == answers[1]
    assert said in answers[0]


def test_two_machines_with_folders_of_their_own_do_not_mix_two_checkpoints(tmp_path):
    """Each is whole, under a path that is the same on both: here, a relative one."""
    for rank, content in enumerate([b"of one training", b"of another one"]):
        write_checkpoint(tmp_path / str(rank) / "checkpoint-4", content=content)
    folders = [tmp_path / "0", tmp_path / "1"]
    for answer in answers_of(folders, [FACTS, FACTS], tmp_path / "store"):
        assert "No checkpoint can be resumed from" in answer
        assert "the ranks read different manifests" in answer
