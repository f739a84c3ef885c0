"""Which rank the others wait for, from the reports of all."""

import pytest

from toolkit.launching.hang import Group, Hang, Report, read_report


def group(entered, completed, name="0", ranks=(0, 1), **last):
    return Group(
        name=name,
        ranks=[*ranks],
        entered=entered,
        completed=completed,
        last={int(number.strip("n")): of for number, of in last.items()},
    )


def report(rank, *groups, at="script.py:7 main", step=3):
    return Report(rank=rank, step=step, stacks={"main thread": ["a.py:1 f", at]}, groups=[*groups])


CASES = {
    "one has not entered": (
        [
            report(0, group(8, 7, n8="all_reduce of Float [5]")),
            report(1, group(7, 7, n7="barrier")),
        ],
        {},
        "rank 1 is missing: it has not entered all_reduce of Float [5] "
        "(number 8 in the group of ranks 0, 1), rank 0 has",
    ),
    "one waits in its own code, behind a finished collective": (
        [report(0, group(8, 7)), report(1, group(8, 8))],
        {},
        "rank 1 is missing: the others wait, and it does not",
    ),
    "they are in different ones": (
        [
            report(0, group(8, 7, n7="barrier", n8="all_reduce of Float [5]")),
            report(1, group(8, 7, n7="barrier", n8="broadcast of Float [5]")),
        ],
        {},
        "the ranks differ first in collective number 8: rank 0 in all_reduce of Float [5], "
        "rank 1 in broadcast of Float [5]",
    ),
    "the earlier difference is named": (
        [
            report(0, group(8, 7, n6="all_reduce of Float [5]", n8="barrier")),
            report(1, group(8, 7, n6="all_reduce of Float [6]", n8="all_gather")),
        ],
        {},
        "the ranks differ first in collective number 6: rank 0 in all_reduce of Float [5], "
        "rank 1 in all_reduce of Float [6]",
    ),
    "one waits in another group": (
        [
            report(0, group(8, 7, n8="all_reduce")),
            report(1, group(7, 7, n7="barrier"), group(3, 2, name="1", n3="all_gather")),
        ],
        {},
        "rank 1 is missing: it has not entered all_reduce (number 8 in the group of ranks 0, 1), "
        "rank 0 has",
    ),
    "torch does not tell who is in the group": (
        [report(0, group(8, 7, ranks=(), n8="barrier")), report(1, group(7, 7, ranks=()))],
        {},
        "rank 1 is missing: it has not entered barrier (number 8 in the group 0), rank 0 has",
    ),
    "one is stopped": (
        [report(0, group(8, 7, n8="barrier"))],
        {1: "is stopped (SIGSTOP)"},
        "rank 1 is missing: it is stopped (SIGSTOP)",
    ),
    "a receive that no recorder has": (
        [report(0, at="torch/distributed/distributed_c10d.py:2800 recv"), report(1)],
        {},
        "rank 1 is missing: the others wait, and it does not",
    ),
    "no rank waits": (
        [report(0), report(1)],
        {},
        "no rank waits for another one: each is in code of its own",
    ),
}


@pytest.mark.parametrize(("reports", "silent", "verdict"), CASES.values(), ids=CASES)
def test_the_rank_that_the_others_wait_for_is_named(reports, silent, verdict):
    assert [*Hang(seconds=5, reports=reports, silent=silent).missing()] == [verdict]


def test_each_rank_has_a_place_and_all_its_stacks():
    waiting = report(0, group(8, 7, n8="barrier"))
    begun = Report(rank=1, step=0, stacks={"main thread": ["a.py:1 f"], "feeder": ["b.py:2 g"]})
    hang = Hang(seconds=5, reports=[waiting, begun])
    assert [*hang.places()] == [
        "rank 0, after step 3, waits in barrier (number 8 in the group of ranks 0, 1) at "
        "script.py:7 main < a.py:1 f",
        "rank 1, before its first step was done, is at a.py:1 f",
    ]
    assert "rank 1, feeder:\n  b.py:2 g\n" in hang.stacks()


@pytest.mark.parametrize("text", ["", "{", '{"rank": 1}', "[]"])
def test_a_report_that_is_torn_is_none(text):
    assert read_report(text) is None
