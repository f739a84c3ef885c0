"""torch's flight recorder, as the installed release has it."""

import json
import subprocess
import sys

# In a process of its own: the recorder keeps the groups of all tests of this one.
IN_A_RANK = """
import dataclasses, json, time, torch
from toolkit.engines.flight_recorder import COLLECTIVES

def read(completed=0):
    # A collective returns before gloo's own thread records that it is over.
    limit = time.monotonic() + 60
    while COLLECTIVES.completed() < completed and time.monotonic() < limit:
        time.sleep(0.01)
    groups = COLLECTIVES.groups()
    waits = [group.waits for group in groups]
    print(json.dumps([COLLECTIVES.completed(), waits, [*map(dataclasses.asdict, groups)]]))

read()
for completed, shapes in (3, ([3, 5], [7])), (5, ([2],)):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    for shape in shapes:
        torch.distributed.all_reduce(torch.ones(shape))
    torch.distributed.barrier()
    read(completed)
    torch.distributed.destroy_process_group()
read()
"""


def test_collectives_are_counted_and_named():
    done = subprocess.run(
        [sys.executable, "-c", IN_A_RANK], capture_output=True, text=True, check=True
    )
    before, first, second, after = map(json.loads, done.stdout.splitlines())
    assert before == after == [0, [], []]
    completed, waits, (group,) = first
    assert (completed, waits, group["ranks"]) == (3, [False], [0])
    assert [*group["last"].values()] == [
        "all_reduce of Float [3, 5]",
        "all_reduce of Float [7]",
        "barrier",
    ]
    assert group["entered"] == group["completed"] == 3
    # A group of the same name as one that was destroyed begins anew.
    completed, waits, (group,) = second
    assert (completed, waits, group["entered"]) == (5, [False], 2)
    assert [*group["last"].values()] == ["all_reduce of Float [2]", "barrier"]
