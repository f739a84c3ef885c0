"""torch's flight recorder, as the installed release has it."""

import torch

from toolkit.engines.flight_recorder import COLLECTIVES


def test_collectives_are_counted_and_named(one_rank):
    before = COLLECTIVES.completed()
    torch.distributed.all_reduce(torch.ones(3, 5))
    torch.distributed.barrier()
    group = COLLECTIVES.groups()[-1]
    assert COLLECTIVES.completed() == before + 2
    assert (group.ranks, group.waits) == ([0], False)
    assert [*group.last.values()][-2:] == ["all_reduce of Float [3, 5]", "barrier"]
    assert group.entered == group.completed == max(group.last)


def test_without_a_process_group_there_are_none():
    assert (COLLECTIVES.completed(), COLLECTIVES.groups()) == (0, [])
