from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset
from small_models import tiny_llama

from toolkit.data.packing import pack
from toolkit.data.sampling_order import (
    Collator,
    count_steps,
    rows_needed,
    training_rows,
    validation_rows,
)
from toolkit.data.tokens import row_features, supervised_tokens
from toolkit.errors import UsageError
from toolkit.records.evidence import IGNORED
from toolkit.records.record import FILLER_ID


def numbered(rows):
    """Rows of different lengths, with tokens that say where they come from."""
    ids = [[number] * (2 + number % 3) for number in range(rows)]
    return Dataset.from_dict(
        {"input_ids": ids, "labels": ids, "sample_id": list(range(rows))},
        features=row_features(),
    )


def steps_by_rank(rows, *, ranks, per_device, accumulation):
    """Return `[step][rank] -> sample ids`, as Accelerate deals them to ranks."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler, SequentialSampler

    batches = [
        list(
            BatchSamplerShard(
                BatchSampler(SequentialSampler(rows), per_device, drop_last=False),
                num_processes=ranks,
                process_index=rank,
            )
        )
        for rank in range(ranks)
    ]
    ids = rows["sample_id"][:]
    return [
        [
            [ids[row] for batch in own[first : first + accumulation] for row in batch]
            for own in batches
        ]
        for first in range(0, len(batches[0]), accumulation)
    ]


def test_a_step_holds_the_same_rows_for_any_number_of_ranks():
    rows = training_rows(numbered(50), steps=9, global_batch=16, seed=3, max_length=4)
    assert len(rows) == 9 * 16
    control = steps_by_rank(rows, ranks=1, per_device=2, accumulation=8)
    assert len(control) == 9
    for ranks, per_device, accumulation in [(2, 2, 4), (4, 2, 2), (2, 4, 2), (4, 4, 1)]:
        steps = steps_by_rank(rows, ranks=ranks, per_device=per_device, accumulation=accumulation)
        assert len(steps) == len(control)
        for step, (whole,) in zip(steps, control, strict=True):
            dealt = sorted(sum(step, []))
            assert dealt == sorted(whole)
            trained = [row for row in dealt if row != FILLER_ID]
            assert trained
            assert len(set(trained)) == len(trained)  # disjoint between ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [24, 25, 31, 37, 47])
def test_each_row_is_trained_exactly_once_an_epoch(ranks, size):
    per_device, accumulation = 2, 12 // (2 * ranks)
    global_batch = per_device * accumulation * ranks
    steps = count_steps(size, global_batch=global_batch, max_steps=-1, num_train_epochs=3)
    dataset = numbered(size)
    rows = training_rows(dataset, steps=steps, global_batch=global_batch, seed=7, max_length=4)
    dealt = steps_by_rank(rows, ranks=ranks, per_device=per_device, accumulation=accumulation)
    assert len(dealt) == steps == 3 * -(-size // global_batch)
    a_epoch = steps // 3
    for first in range(0, steps, a_epoch):
        trained = Counter(
            row
            for step in dealt[first : first + a_epoch]
            for own in step
            for row in own
            if row != FILLER_ID
        )
        assert trained == Counter(range(size))
    assert all({len(own) for own in step} == {per_device * accumulation} for step in dealt)


def test_a_run_of_so_many_steps_goes_on_into_the_next_epoch():
    rows = training_rows(numbered(5), steps=3, global_batch=4, seed=0, max_length=4)
    ids = rows["sample_id"][:]
    assert sorted(ids[:5]) == list(range(5))
    assert ids[5:8] == [FILLER_ID] * 3
    assert sorted({*ids[8:]}) == sorted(ids[8:])
    assert set(ids[8:]) <= set(range(5))


def test_fillers_are_one_padding_token_that_nothing_is_learned_from():
    rows = training_rows(numbered(5), steps=2, global_batch=4, seed=0, max_length=4, pad_token_id=9)
    assert rows[7] == {"input_ids": [9], "labels": [IGNORED], "sample_id": FILLER_ID}
    assert len(rows) == 8


@pytest.mark.parametrize("size", [6, 8])
def test_each_row_is_evaluated_once_by_whole_batches(size):
    rows = validation_rows(numbered(size), global_batch=4, pad_token_id=9)
    assert rows["sample_id"][:] == [*range(size), *[FILLER_ID] * (8 - size)]
    assert rows["labels"][size:] == [[IGNORED]] * (8 - size)


def test_the_rows_that_steps_need_are_counted_over_ranks():
    values = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
    }
    assert rows_needed(values, num_processes=2) == 48
    assert rows_needed(values | {"max_steps": -1}, num_processes=2) is None


# What a micro-batch of fillers does


def gradients(model, batches, items):
    """Return loss and gradients of a step, weighted as both engines weigh it."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        inputs = {name: column for name, column in batch.items() if name != "sample_id"}
        loss = model(**inputs, num_items_in_batch=items).loss
        assert torch.isfinite(loss)
        loss.backward()
        total += loss.item()
    return total, {name: each.grad.clone() for name, each in model.named_parameters()}


def test_a_micro_batch_of_fillers_trains_nothing_and_breaks_nothing():
    """The last step of an epoch, dealt to two ranks: one has a row, the other none at all."""
    model = tiny_llama()
    rows = training_rows(
        numbered(5), steps=2, global_batch=4, seed=0, max_length=4, pad_token_id=9
    ).to_list()[4:]
    collate = Collator(pad_token_id=9)
    alone, filled = collate(rows[:1]), [collate(rows[:2]), collate(rows[2:])]
    items = sum(supervised_tokens(row["labels"]) for row in rows)
    assert items == supervised_tokens(rows[0]["labels"]) > 0
    assert filled[1]["labels"].unique().tolist() == [IGNORED]
    loss, wanted = gradients(model, [alone], items)
    same_loss, same = gradients(model, filled, items)
    assert same_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in wanted.items():
        torch.testing.assert_close(same[name], gradient, rtol=1e-5, atol=1e-7)
    nothing, none = gradients(model, filled[1:], items)
    assert nothing == 0.0
    assert all(gradient.eq(0).all() for gradient in none.values())


# Order in an epoch, and the packed rows behind it


def test_each_epoch_is_a_permutation_of_its_own():
    rows = training_rows(numbered(8), steps=4, global_batch=4, seed=0, max_length=4)
    first, second = rows["sample_id"][:8], rows["sample_id"][8:]
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second


def test_the_order_depends_on_the_seed_alone():
    def order(seed):
        return training_rows(numbered(32), steps=2, global_batch=8, seed=seed, max_length=4)[
            "sample_id"
        ][:]

    assert order(1) == order(1) != order(2)
    # Known numbers: the order must not move with a release of numpy.
    assert order(1) == np.random.Generator(np.random.PCG64(1)).permutation(32)[:16].tolist()


def test_packed_rows_follow_the_ragged_ones():
    dataset = numbered(8)
    rows = training_rows(dataset, steps=2, global_batch=4, seed=0, throughput_steps=3, max_length=5)
    assert len(rows) == 20
    assert rows["sample_id"][8:] == list(range(-1, -13, -1))
    assert {len(ids) for ids in rows["input_ids"][8:]} == {5}


def test_packing_wraps_around_and_learns_every_token():
    dataset = numbered(4)  # lengths 2, 3, 4, 2
    rows = pack(dataset, length=4, rows=4)
    assert rows["input_ids"][:] == [[0, 0, 1, 1], [1, 2, 2, 2], [2, 3, 3, 0], [0, 1, 1, 1]]
    assert rows["labels"][:] == rows["input_ids"][:]
    assert rows["sample_id"][:] == [-1, -2, -3, -4]


def test_too_few_rows_for_a_step():
    with pytest.raises(UsageError, match="takes 8 rows and the data have only 4. Lower"):
        training_rows(numbered(4), steps=1, global_batch=8, seed=0, max_length=4)


def test_steps_are_counted_from_epochs_where_no_number_is_given():
    assert count_steps(50, global_batch=16, max_steps=7, num_train_epochs=2) == 7
    assert count_steps(50, global_batch=16, max_steps=-1, num_train_epochs=2) == 8
    assert count_steps(48, global_batch=16, max_steps=-1, num_train_epochs=2) == 6
    assert count_steps(50, global_batch=16, max_steps=-1, num_train_epochs=0.5) == 2


def test_in_reverse_each_step_has_the_same_micro_batches_the_last_one_first():
    options = {"steps": 5, "global_batch": 6, "seed": 3, "max_length": 4}
    rows, backwards = (
        training_rows(numbered(8), reverse=reverse, **options)["sample_id"][:]
        for reverse in (False, True)
    )
    for begin in range(0, len(rows), 6):
        assert backwards[begin : begin + 6] == rows[begin : begin + 6][::-1]
