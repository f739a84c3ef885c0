"""Two ranks that see different things resume together or not at all."""

import json
import subprocess
import sys

import pytest

from toolkit.checkpoints.committing import committing

RANK = """
import json, sys
from pathlib import Path
import torch
from toolkit.checkpoints.resume_request import ResumeRequest
from toolkit.checkpoints.resuming import find_checkpoint
from toolkit.errors import UsageError
rank, folder, facts = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
store = torch.distributed.FileStore(str(folder / "store"), 2)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
try:
    print(find_checkpoint(ResumeRequest(folder), facts).step)
except UsageError as error:
    print(error)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("second", "said"),
    [({"seed": 1}, "4"), ({"seed": 2}, "seed is 1 in the checkpoint and 2 now. Resume with")],
)
def test_what_one_rank_has_otherwise_is_refused_by_both(tmp_path, second, said):
    described = {"kind": "checkpoint", "format": 1, "step": 4, "facts": {"seed": 1}}
    with committing(tmp_path / "checkpoint-4", **described) as draft:
        (draft / "rank-0.pt").write_bytes(b"state")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path), json.dumps(facts)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, facts in enumerate([{"seed": 1}, second])
    ]
    answers = [process.communicate(timeout=120)[0].strip() for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    assert answers[0] == answers[1]
    assert said in answers[0]
