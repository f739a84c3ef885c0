import pytest
import torch

from toolkit.engines.tensors import storage_bytes
from toolkit.measuring.attestation import Requested
from toolkit.measuring.memory import (
    CATEGORIES,
    device_peak_bytes,
    device_peak_reserved_bytes,
    host_peak_bytes,
    nvme_bytes,
)
from toolkit.measuring.merging import merge
from toolkit.measuring.recorder import Recorder
from toolkit.measuring.traffic import NOT_COUNTED
from toolkit.records.fields import REHEARSED
from toolkit.strategies import STRATEGIES

OF_THE_ALLOCATOR = ("peak_bytes", "peak_reserved_bytes")


def test_a_storage_counts_once_however_many_views_keep_it_alive():
    flat = torch.zeros(100)
    assert storage_bytes([flat, flat[:10], flat.view(10, 10)], set()) == 400


def test_a_small_view_counts_as_the_whole_storage_that_it_keeps_alive():
    assert storage_bytes([torch.zeros(1000)[:1]], set()) == 4000


def test_what_one_category_counted_the_next_leaves_out():
    seen = set()
    shared = torch.zeros(8, dtype=torch.float16)
    assert storage_bytes([shared], seen) == 16
    assert storage_bytes([shared, torch.zeros(2)], seen) == 8


def test_released_parameters_are_empty_and_count_nothing():
    assert storage_bytes([torch.empty(0), torch.empty(0)], set()) == 0


def test_the_host_peak_is_in_bytes():
    block = torch.ones(50_000_000)
    assert block.sum() > 0
    assert 200_000_000 < host_peak_bytes() < 100_000_000_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what is said to be missing")
def test_without_a_gpu_its_allocator_says_nothing_and_the_record_says_why():
    assert device_peak_bytes() is None
    assert device_peak_reserved_bytes() is None
    counted = dict.fromkeys(CATEGORIES, 1) | dict.fromkeys(OF_THE_ALLOCATOR)
    found = merge([rank_that_recorded(counted)], throughput_steps=0, probed=[])
    assert found["memory"] == counted
    for name in OF_THE_ALLOCATOR:
        assert found["not_measured"][f"memory.{name}"] == REHEARSED


def test_a_model_that_swaps_nothing_has_no_bytes_on_disk():
    assert nvme_bytes(torch.nn.Linear(2, 2)) == 0


def test_the_peak_of_a_record_is_that_of_the_rank_with_the_most():
    ranks = [rank_that_recorded(peak={"total_bytes": total}) for total in (3, 5, 4)]
    found = merge(ranks, throughput_steps=0, probed=[])
    assert found["peak"] == {"total_bytes": 5}
    assert [rank["peak"]["total_bytes"] for rank in found["per_rank"]] == [3, 5, 4]
    assert "peak" not in found["not_measured"]


def test_a_rank_without_a_peak_leaves_the_record_without_one():
    ranks = [rank_that_recorded(peak={"total_bytes": 3}), rank_that_recorded()]
    found = merge(ranks, throughput_steps=0, probed=[])
    assert found["peak"] is None
    assert found["not_measured"]["peak"] == NOT_COUNTED


def rank_that_recorded(memory=None, *, peak=None):
    """What a recorder gathers from a rank that ended before its first step."""
    recorder = Recorder(Requested(strategy=STRATEGIES["single"], num_processes=1), rehearsal=True)
    recorder.peaks()
    of_rank = recorder._of_this_rank()
    return of_rank | {"peak": peak, "memory": of_rank["memory"] | (memory or {})}
