import torch

from toolkit.measuring.memory import count, host_peak_bytes


def test_a_storage_counts_once_however_many_views_keep_it_alive():
    flat = torch.zeros(100)
    assert count([flat, flat[:10], flat.view(10, 10)], set()) == 400


def test_a_small_view_counts_as_the_whole_storage_that_it_keeps_alive():
    assert count([torch.zeros(1000)[:1]], set()) == 4000


def test_what_one_category_counted_the_next_leaves_out():
    seen = set()
    shared = torch.zeros(8, dtype=torch.float16)
    assert count([shared], seen) == 16
    assert count([shared, torch.zeros(2)], seen) == 8


def test_released_parameters_are_empty_and_count_nothing():
    assert count([torch.empty(0), torch.empty(0)], set()) == 0


def test_the_host_peak_is_in_bytes():
    block = torch.ones(50_000_000)
    assert block.sum() > 0
    assert 200_000_000 < host_peak_bytes() < 100_000_000_000
