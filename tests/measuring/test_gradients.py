"""What the gradients of the first step show: that nothing is learned, or one row alone."""

import pytest
import torch

from toolkit.engines.tensors import heaviest_row
from toolkit.measuring.gradients import Share, notes


def share(total, square=0.0, *, name="table", row=3):
    return Share(total=total, unknown=None, name=name, row=row, square=square)


@pytest.mark.parametrize(("rows", "width"), [(5, 3), (3, 1), (2, 7)])
def test_the_heaviest_row_of_a_flat_part_is_found_wherever_the_part_begins_and_ends(rows, width):
    whole = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).flatten()
    for begin in range(len(whole)):
        for end in range(begin + 1, len(whole) + 1):
            part = torch.zeros_like(whole)
            part[begin:end] = whole[begin:end]
            expected = part.view(rows, width).square().sum(1)
            square, row = heaviest_row(whole[begin:end], first=begin, width=width)
            assert int(row) == int(expected.argmax())
            assert square == pytest.approx(float(expected.max()))


def test_a_row_that_is_cut_at_the_border_of_two_ranks_is_put_together():
    (note,) = notes([share(60.1, 60.0), share(39.95, 39.9)], step=1)
    assert note.startswith("row 3 of table holds 99.9% of the gradient of step 1 (its norm is 9.9")
    assert "the token with the id 3" in note


def test_neither_a_heavy_row_nor_one_of_many_parameters_is_named():
    assert notes([share(60.0, 58.0), share(40.0, 40.0)], step=1) == []
    assert notes([share(100.0, 60.0), share(100.0, 99.0, row=4)], step=1) == []


def test_gradients_that_are_all_zero_or_not_finite_are_named():
    assert "every gradient of step 7 is zero" in notes([share(0.0), share(0.0)], step=7)[0]
    assert "not finite" in notes([share(float("nan"), float("nan")), share(1.0)], step=1)[0]
