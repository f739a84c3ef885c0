"""Reports of ranks, compared where they saw the same models."""

from toolkit.measuring.between_ranks import FAILED, ModelReport, Report, notes


def report(name, rank):
    model = ModelReport(
        name=name,
        data_parallel_rank=rank,
        at_start=None,
        tensors={},
        prepared_before={},
        added=[],
        rows=[1, 2],
        different_rows=2,
        bypassed=0,
    )
    return Report(ended_well=True, models=[model], optimizers=[], notes=[])


def test_models_are_compared_where_all_ranks_saw_the_same_ones():
    (said,) = notes([report("Llama", 0), report("Llama", 1)])
    assert said.startswith("all ranks read equal rows, in each of 2 forwards of Llama")
    assert notes([report("Llama", 0), report("Gemma", 1)]) == []
    assert notes([report("Llama", 0), FAILED]) == []
    assert notes([report("Llama", 0)]) == []
