"""Values in print: units, places, and nothing that is empty."""

import math

import pytest

from toolkit.comparing.report.words import (
    dollars,
    flat,
    number,
    seconds,
    share,
    size,
    size_between,
    switches_in_words,
)


def test_switches_that_are_for_one_backend_say_so():
    chunked = {"loss_impl": "chunked", "loss_chunk_tokens": 1024, "lean_masks": "no mask asked for"}
    layers = {"checkpoint_layers": {"asked": "every:2", "layers": [0]}}
    single = {"speed": {"tuned": True, "on": chunked | layers, "left_out": {}}}
    ddp = {"speed": {"tuned": True, "on": chunked | layers | {"ddp_bucket_view": True}}}
    assert switches_in_words([single, ddp]) == (
        "loss_impl chunked, loss_chunk_tokens 1024, lean_masks no mask asked for, "
        "checkpoint_layers every:2, ddp_bucket_view (where it applies)"
    )
    assert switches_in_words([{"speed": {"on": {}}}]) == "none"


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (None, "n/a"),
        (0, "0.0 MiB"),
        (16, "16 B"),
        (50_000, "50,000 B"),
        (2**20, "1.0 MiB"),
        (2**29, "0.50 GiB"),
        (2**30, "1.00 GiB"),
    ],
)
def test_sizes_are_powers_of_two(count, shown):
    assert size(count) == shown


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (31 * 2**30, 38 * 2**30, "31.0 to 38.0 GiB"),
        (2**29, 2**30, "0.50 to 1.00 GiB"),
        (2**20, 2**21, "1.00 to 2.00 MiB"),
        (-(2**30), 2**31, "-1.00 to 2.00 GiB"),
    ],
)
def test_two_sizes_share_the_unit_of_the_larger(low, high, shown):
    assert size_between(low, high) == shown


@pytest.mark.parametrize(
    ("of", "value", "shown"),
    [
        (seconds, 0.25, "0.250 s"),
        (seconds, 0.0021, "2.1 ms"),
        (seconds, 0.0, "0.000 s"),
        (seconds, 7.25, "7.250 s"),
        (seconds, 12.345, "12.3 s"),
        (seconds, 75.4, "75 s"),
        (seconds, math.nan, "nan"),
        (share, 0.0312, "3.1%"),
        (share, 0.4, "40%"),
        (dollars, 1234.5, "$1,234.50"),
        (dollars, 0.0012, "$0.0012"),
    ],
)
def test_a_number_has_as_many_places_as_it_can_bear(of, value, shown):
    assert of(value) == shown
    assert of(None) == "n/a"


def test_what_is_not_finite_is_shown_as_it_is():
    assert number(math.inf, "{:.1e}") == "inf"


def test_what_was_recorded_becomes_one_line():
    gpus = [{"name": "A", "memory_bytes": 2**34}, {"name": "B", "memory_bytes": 2**33}]
    assert flat(gpus) == "name A, memory 16.00 GiB; name B, memory 8.00 GiB"
    assert (flat(True), flat(None), flat([]), flat({})) == ("yes", "none", "none", "none")
