"""The field's formulas against their sources, and against what the libraries allocate."""

import pytest
from shapes_for_tests import llama

from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.formulas import compare_with_formula, zero_bytes
from toolkit.strategies import STRATEGIES

GB = 1e9

# ZeRO paper (arXiv 1910.02054), Table 1: GB for stages 1, 2 and 3, as printed.
TABLE_1 = {
    (7.5e9, 1): ("120", "120", "120"),
    (7.5e9, 4): ("52.5", "41.3", "30"),
    (7.5e9, 16): ("35.6", "21.6", "7.5"),
    (7.5e9, 64): ("31.4", "16.6", "1.88"),
    (7.5e9, 256): ("30.4", "15.4", "0.47"),
    (7.5e9, 1024): ("30.1", "15.1", "0.12"),
    (128e9, 1): ("2048", "2048", "2048"),
    (128e9, 4): ("896", "704", "512"),
    (128e9, 16): ("608", "368", "128"),
    (128e9, 64): ("536", "284", "32"),
    (128e9, 256): ("518", "263", "8"),
    (128e9, 1024): ("513", "257", "2"),
    (1e12, 1): ("16000", "16000", "16000"),
    (1e12, 4): ("7000", "5500", "4000"),
    (1e12, 16): ("4750", "2875", "1000"),
    (1e12, 64): ("4187", "2218", "250"),
    (1e12, 256): ("4046", "2054", "62.5"),
    (1e12, 1024): ("4011", "2013", "15.6"),
}


@pytest.mark.parametrize(("size", "printed"), TABLE_1.items(), ids=lambda v: str(v))
def test_table_1_of_the_zero_paper_within_a_unit_of_its_last_digit(size, printed):
    parameters, ranks = size
    for stage, text in zip(("zero1", "zero2", "zero3"), printed, strict=True):
        unit = 10.0 ** -len(text.partition(".")[2])
        gigabytes = zero_bytes(stage, parameters, ranks, mixed=True) / GB
        assert gigabytes == pytest.approx(float(text), abs=unit)


@pytest.mark.parametrize(
    ("stage", "gigabytes"), [("ddp", 112), ("zero1", 84), ("zero2", 70), ("zero3", 56)]
)
def test_the_four_course_formulas_for_7b_on_2_gpus_in_fp32(stage, gigabytes):
    assert zero_bytes(stage, 7e9, 2, mixed=False) == gigabytes * GB


def saving(stage, ranks, *, mixed):
    """How many times less a stage needs than DDP."""
    whole, sharded = (zero_bytes(name, 1, ranks, mixed=mixed) for name in ("ddp", stage))
    return whole / sharded


def test_4_and_8_times_less_is_said_of_many_ranks_in_mixed_precision_only():
    assert saving("zero1", 1024, mixed=True) == pytest.approx(4, rel=0.01)
    assert saving("zero2", 1024, mixed=True) == pytest.approx(8, rel=0.01)
    assert saving("zero1", 2, mixed=False) == pytest.approx(1.33, abs=0.01)
    assert saving("zero2", 2, mixed=False) == pytest.approx(1.6, abs=0.01)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_lies_between_formula_and_implementation_is_named(strategy, precision):
    chosen = STRATEGIES[strategy]
    job = PlannedJob(model=llama(), strategy=chosen, gpus=chosen.num_processes, precision=precision)
    beside = compare_with_formula(job)
    named = sum(beside.differences.values())
    assert beside.course + named == pytest.approx(beside.implementation, abs=1)
    rest = [size for name, size in beside.differences.items() if "padding" in name]
    # What is not named one by one is a few tensors' edges.
    assert abs(sum(rest)) <= 0.001 * beside.implementation


def test_zero_1_in_fp32_holds_the_masters_that_the_course_leaves_out():
    model = llama()
    job = PlannedJob(model=model, strategy=STRATEGIES["zero1"], gpus=2, precision="no")
    differences = compare_with_formula(job).differences
    assert differences["fp32 masters"] == 4 * model.parameters / 2
