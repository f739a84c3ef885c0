"""Stages, slots and bubbles, by plain arithmetic."""

import itertools

import pytest
from shapes_for_tests import llama

from toolkit.backends.schedules import (
    SCHEDULES,
    Work,
    bubble,
    counted_slots,
    placed,
    refused_micro_batches,
    work_of,
)
from toolkit.backends.stages import Costs, costs_of, cut
from toolkit.errors import UsageError


def by_hand(name, ranks, micro_batches):
    """The order of GPipe and of one at a time, which need no thought."""
    numbers = range(micro_batches)
    if name == "gpipe":
        kinds = [("forward", n) for n in numbers] + [("backward", n) for n in numbers]
    else:
        kinds = [(kind, n) for n in numbers for kind in ("forward", "backward")]
    return [[Work(kind, rank, n) for kind, n in kinds] for rank in range(ranks)]


@pytest.mark.parametrize("name", ["gpipe", "one_at_a_time"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 3), (3, 7), (5, 2), (4, 1), (1, 3)])
def test_counted_slots_equal_the_formula(name, ranks, micro_batches):
    slots = counted_slots(by_hand(name, ranks, micro_batches), stages=ranks)
    expected = bubble(SCHEDULES[name], ranks=ranks, micro_batches=micro_batches)
    assert slots.bubble == pytest.approx(expected)


def test_formulas_are_those_of_the_papers():
    p, m = 3, 8
    shares = {n: bubble(s, ranks=p, micro_batches=m) for n, s in SCHEDULES.items()}
    assert shares == pytest.approx(
        {
            "gpipe": (p - 1) / (m + p - 1),
            "1f1b": (p - 1) / (m + p - 1),
            "interleaved": (p - 1) / (2 * m + p - 1),
            "zero_bubble": (p - 1) / (6 * m + p - 1),
            "one_at_a_time": (p - 1) / p,
        }
    )


def test_a_gap_in_the_recorded_work_is_named():
    first, second = by_hand("gpipe", 2, 2)
    with pytest.raises(ValueError, match="no rank recorded.*'backward', stage=0, micro_batch=1"):
        placed([first, second[:-1]], stages=2)


def test_work_is_written_as_torch_reads_it():
    from torch.distributed.pipelining.schedules import _Action

    kinds = ("forward", "backward", "backward_input", "backward_weight")
    for work in (Work(kind, 2, 13) for kind in kinds):
        assert work_of(work.code) == work
        action = _Action.from_str(work.code)
        name = action.computation_type.name.lower().replace("full_", "")
        assert (name, action.stage_index, action.microbatch_index) == work
    for code in ("", "F0", "1X0", "1F", "1F0 ", "-1F0"):
        with pytest.raises(ValueError, match="is no work of a schedule"):
            work_of(code)


def test_a_rank_of_a_v_holds_the_first_and_the_last_stage():
    ranks = 3
    in_turns = [SCHEDULES["interleaved"].stages_of(r, ranks=ranks) for r in range(ranks)]
    assert in_turns == [[0, 3], [1, 4], [2, 5]]
    v = [SCHEDULES["zero_bubble"].stages_of(r, ranks=ranks) for r in range(ranks)]
    assert v == [[0, 5], [1, 4], [2, 3]]


def test_interleaved_micro_batches_that_fill_no_rounds_are_refused_with_near_ones():
    refused = [
        m
        for m in range(1, 10)
        if refused_micro_batches(SCHEDULES["interleaved"], ranks=2, micro_batches=m)
    ]
    assert refused == [5, 7, 9]
    reason = refused_micro_batches(SCHEDULES["interleaved"], ranks=2, micro_batches=7)
    assert "6 or 8 would do" in reason
    assert not refused_micro_batches(SCHEDULES["1f1b"], ranks=2, micro_batches=7)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_no_other_cut_has_a_smaller_largest_stage(stages):
    costs = Costs((3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0), first=6.0, last=5.0)

    def largest(ends):
        cuts = [range(a, b) for a, b in itertools.pairwise((0, *ends, 7))]
        sums = [sum(costs.layers[n] for n in held) for held in cuts]
        sums[0] += costs.first
        sums[-1] += costs.last
        return max(sums)

    found = cut(costs, stages, name="a model")
    assert [n for held in found for n in held] == [*range(7)]
    assert all(found)
    best = min(map(largest, itertools.combinations(range(1, 7), stages - 1)))
    assert largest([held.stop for held in found[:-1]]) == best


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(UsageError, match="small has 3 layers, too few for 4 stages"):
        cut(Costs((1.0,) * 3, 0.0, 0.0), 4, name="small")


def test_costs_count_embeddings_and_head():
    model = llama(hidden=24, intermediate=40, layers=3, heads=3, kv_heads=1, vocab=101)
    elements = costs_of(model, "parameters", sequence=7)
    assert (elements.first, elements.last) == (101 * 24, 101 * 24 + 24)
    assert sum(elements.layers) + elements.first + elements.last == model.parameters
    flops = costs_of(model, "flops", sequence=7)
    assert (flops.first, flops.last) == (0, 2 * 101 * 24)
    products = 24 * (24 + 8 + 8 + 24) + 3 * 24 * 40
    assert flops.layers == (2 * products + 2 * 24 * 7,) * 3
    tied = llama(hidden=24, intermediate=40, layers=3, heads=3, kv_heads=1, vocab=101, tied=True)
    for balance, of_untied in (("parameters", elements), ("flops", flops)):
        assert costs_of(tied, balance, sequence=7) == of_untied
