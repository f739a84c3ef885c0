"""torch's flight recorder, as the installed release has it."""

import json
import subprocess
import sys

from toolkit.engines.flight_recorder import COLLECTIVES

# In a process of its own: the recorder keeps the groups of all tests of this one.
IN_A_RANK = """
import dataclasses, json, torch
from toolkit.engines.flight_recorder import COLLECTIVES
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
before = COLLECTIVES.completed()
torch.distributed.all_reduce(torch.ones(3, 5))
torch.distributed.barrier()
(group,) = COLLECTIVES.groups()
print(json.dumps([COLLECTIVES.completed() - before, group.waits, dataclasses.asdict(group)]))
"""


def test_collectives_are_counted_and_named():
    done = subprocess.run(
        [sys.executable, "-c", IN_A_RANK], capture_output=True, text=True, check=True
    )
    completed, waits, group = json.loads(done.stdout.splitlines()[-1])
    assert (completed, waits, group["ranks"]) == (2, False, [0])
    assert [*group["last"].values()] == ["all_reduce of Float [3, 5]", "barrier"]
    assert group["entered"] == group["completed"] == 2


def test_without_a_process_group_there_are_none():
    assert (COLLECTIVES.completed(), COLLECTIVES.groups()) == (0, [])
