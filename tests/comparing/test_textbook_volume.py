"""What a run sends beside the papers' volume is named, from counted collectives alone."""

import pytest

from toolkit.comparing.report.sections.traffic import difference_in_words

PSI = 1_000_000


@pytest.fixture
def sends(make_row):
    def sends(strategy, *collectives, papers, micro_batches=1, **changes):
        twice = {"all_reduce": 2}
        traffic = {
            "step": 2,
            "micro_batches": micro_batches,
            "transport": "gloo",
            "collectives": [
                {"purpose": purpose, "kind": kind, "elements": elements}
                for purpose, kind, elements in collectives
            ],
            "sent_elements": sum(
                elements * twice.get(kind, 1)
                for purpose, kind, elements in collectives
                if purpose in ("parameters", "gradients")
            ),
            "textbook_elements": papers,
            "trained_elements": PSI,
            "all_elements": PSI,
            "disagreements": [],
        }
        return difference_in_words(make_row(strategy=strategy, traffic=traffic, **changes))

    return sends


def test_what_the_papers_say_is_equal_whatever_else_is_sent(sends):
    gradients = ("gradients", "all_reduce", PSI)
    assert sends("ddp", gradients, ("buffers", "broadcast", 99), papers=2 * PSI) == "equal"
    assert sends("single", papers=0) == "nothing to send"


def test_zero2_is_named_for_its_all_reduce_in_every_micro_batch(sends):
    said = sends(
        "zero2",
        ("gradients", "all_reduce", 2 * PSI),
        ("parameters", "all_gather", PSI),
        papers=2 * PSI,
        micro_batches=2,
    )
    assert said.startswith("2.50 times: ")
    assert "all-reduces gradients where the paper reduce-scatters" in said
    assert "reduced in each of 2 micro-batches" in said


def test_zero1_reduces_once_and_is_not_blamed_for_more(sends):
    said = sends(
        "zero1",
        ("gradients", "all_reduce", PSI),
        ("parameters", "all_gather", PSI),
        papers=2 * PSI,
        micro_batches=2,
    )
    assert said == (
        "1.50 times: DeepSpeed all-reduces gradients where the paper reduce-scatters them"
    )


def test_what_deepspeed_does_is_said_of_no_other_backend(sends):
    collectives = ("gradients", "all_reduce", PSI), ("parameters", "all_gather", PSI)
    for strategy in ("tensor", "tensor_ddp"):
        assert "DeepSpeed" not in sends(strategy, *collectives, papers=PSI), strategy
    assert "DeepSpeed" in sends("zero1", *collectives, papers=2 * PSI)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [("zero3", "stage3_max_live_parameters"), ("fsdp", "outside of the layers")],
)
def test_what_is_gathered_once_instead_of_twice_is_named(sends, strategy, reason):
    said = sends(
        strategy,
        ("gradients", "reduce_scatter", PSI),
        ("parameters", "all_gather", PSI * 5 // 4),
        papers=3 * PSI,
    )
    assert said.startswith("0.75 times: ")
    assert reason in said
    assert "1.25 psi" in said


def test_padding_is_told_from_what_nobody_can_explain(sends):
    scattered = ("gradients", "reduce_scatter", PSI)
    padded = sends("fsdp", scattered, ("parameters", "all_gather", 2 * PSI + 64), papers=3 * PSI)
    assert padded == "1.00 times: tensors are padded to the ranks"
    unknown = sends("ddp", ("gradients", "all_reduce", PSI * 5 // 4), papers=2 * PSI)
    assert unknown == "1.25 times: the reason is not known"


def test_norms_that_a_tensor_group_does_not_split_are_named_where_the_plan_has_them(sends):
    reduced = ("gradients", "all_reduce", PSI // 2 + PSI // 800)

    def said(error):
        planned = {"errors": {"traffic_bytes": error}}
        return sends("tensor_ddp", reduced, papers=PSI, predicted=planned)

    assert said(0.0) == "1.00 times: each rank of a tensor group has the norms whole"
    assert said(0.01) == "1.00 times: the reason is not known"
    assert said(None) == "1.00 times: the reason is not known"


def test_a_run_without_a_count_says_why(make_row):
    row = make_row(traffic=None, not_measured={"traffic": "it ended before its second step"})
    assert difference_in_words(row) == "it ended before its second step"
