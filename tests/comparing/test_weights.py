import json
import math
import struct

import numpy as np
import pytest
import torch

from toolkit.comparing import weights
from toolkit.comparing.weights import WeightsError, open_weights, same_weights, weight_gap

RANDOM = np.random.default_rng(0)
START = {
    "embed.weight": RANDOM.normal(size=(5, 3)).astype(np.float32),
    "norm.weight": np.ones(3, np.float32),
    "bias": RANDOM.normal(size=4).astype(np.float32),
}


def moved(by, tensors=START):
    return {name: (tensor + by).astype(tensor.dtype) for name, tensor in tensors.items()}


def test_the_gap_is_relative_to_the_way_of_the_control(tmp_path, write_weights):
    run = write_weights(tmp_path / "run", moved(0.11))
    control = write_weights(tmp_path / "control", moved(0.10))
    start = write_weights(tmp_path / "start", START)
    assert weight_gap(run, control, start).share == pytest.approx(0.1, rel=1e-4)
    assert weight_gap(control, control, start) == (0.0, {"value": 0.0, "tensor": "bias"})


@pytest.mark.parametrize("piece", [1, 4, 1 << 22])
def test_shards_and_pieces_change_nothing(tmp_path, write_weights, monkeypatch, piece):
    monkeypatch.setattr(weights, "PIECE", piece)
    run = write_weights(tmp_path / "run", moved(0.11), shards=2)
    control = write_weights(tmp_path / "control", moved(0.10))
    start = write_weights(tmp_path / "start", START, shards=3)
    assert weight_gap(run, control, start).share == pytest.approx(0.1, rel=1e-4)


UNEVEN = {
    "a": RANDOM.normal(size=(5, 3)).astype(np.float32),
    "b": RANDOM.normal(size=17).astype(np.float16),
    "c": RANDOM.normal(size=(2, 3, 7)).astype(np.float32),
}
"""15, 17 and 42 numbers: pieces of 4, 7 or 16 end within each tensor."""


def moved_unevenly(seed):
    """Return every number moved by another amount, the last ones of a tensor the most."""
    moves = np.random.default_rng(seed)
    return {
        name: (
            tensor
            + (moves.normal(size=tensor.size) * np.arange(1, tensor.size + 1)).reshape(tensor.shape)
        ).astype(tensor.dtype)
        for name, tensor in UNEVEN.items()
    }


def length_of(tensors, others):
    """Return the length of the difference, all numbers at once in float64."""
    gaps = [
        tensors[name].astype(np.float64).ravel() - others[name].astype(np.float64).ravel()
        for name in tensors
    ]
    return np.linalg.norm(np.concatenate(gaps))


@pytest.mark.parametrize("piece", [1, 4, 7, 16, 1 << 22])
def test_no_number_is_left_out_of_a_gap_that_differs_everywhere(
    tmp_path, write_weights, monkeypatch, piece
):
    monkeypatch.setattr(weights, "PIECE", piece)
    run, control = moved_unevenly(1), moved_unevenly(2)
    gap = weight_gap(
        write_weights(tmp_path / "run", run, shards=2),
        write_weights(tmp_path / "control", control),
        write_weights(tmp_path / "start", UNEVEN),
    )
    assert gap.share == pytest.approx(
        length_of(run, control) / length_of(control, UNEVEN), rel=1e-9
    )
    largest = {name: abs(run[name].astype(float) - control[name]).max() for name in run}
    assert gap.difference["tensor"] == max(largest, key=largest.__getitem__)
    assert gap.difference["value"] == pytest.approx(max(largest.values()), rel=1e-9)


@pytest.mark.parametrize("piece", [4, 16, 1 << 22])
@pytest.mark.parametrize(
    ("name", "place"), [("a", 0), ("a", 14), ("b", 16), ("c", 15), ("c", 16), ("c", 41)]
)
def test_one_number_that_differs_is_seen_wherever_it_lies(
    tmp_path, write_weights, monkeypatch, piece, name, place
):
    monkeypatch.setattr(weights, "PIECE", piece)
    control = moved_unevenly(2)
    run = {key: tensor.copy() for key, tensor in control.items()}
    run[name].reshape(-1)[place] += np.float16(0.5)
    of_run = write_weights(tmp_path / "run", run)
    of_control = write_weights(tmp_path / "control", control)
    start = write_weights(tmp_path / "start", UNEVEN)
    gap = weight_gap(of_run, of_control, start)
    assert gap.share == pytest.approx(0.5 / length_of(control, UNEVEN), rel=2e-2)  # float16
    assert gap.difference["tensor"] == name
    assert gap.difference["value"] == pytest.approx(0.5, rel=2e-2)
    assert not same_weights(of_run, of_control)
    assert same_weights(of_control, of_control)


def test_bfloat16_is_read(tmp_path, write_weights):
    # The upper halves of these float32 numbers are the bfloat16 ones.
    exact = np.array([1.5, -0.0078125, 3e38, np.inf], np.float32).view(np.uint32) >> 16
    header = {"a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    run = tmp_path / "run"
    run.mkdir()
    file = run / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + exact.astype("<u2").tobytes())

    (numbers,) = open_weights(run)["a"].pieces()

    assert numbers.dtype == np.float64
    assert numbers.tolist() == (exact.astype(np.uint32) << 16).view(np.float32).tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_a_start_in_16_bits_moves_is_no_part_of_the_gap(tmp_path, write_weights, dtype):
    """Even where it is more than the update, what a run did otherwise is told as it is."""
    generator = np.random.default_rng(1)
    first = generator.normal(size=(400, 300)).astype(np.float32)
    update = np.float32(1e-4) * np.sign(generator.normal(size=first.shape)).astype(np.float32)
    begun = torch.from_numpy(first).to(getattr(torch, dtype)).float().numpy()
    folders = {
        name: write_weights(tmp_path / name, {"w": weight})
        for name, weight in {
            "start": first,
            "control": first + update,
            "same": begun + update,
            "half": begun + update / 2,
        }.items()
    }

    def gap(run, control, *began_in):
        paths = (folders[run], folders[control], folders["start"])
        return weight_gap(*paths, began_in=began_in or (None, None)).share

    assert gap("same", "control") > 0.5
    assert gap("same", "control", dtype, None) == pytest.approx(0.0, abs=1e-3)
    assert gap("half", "control", dtype, None) == pytest.approx(0.5, abs=1e-3)
    # As of a control that is a run of ZeRO, where one process does not fit.
    assert gap("control", "same", None, dtype) == pytest.approx(0.0, abs=1e-3)
    assert gap("control", "half", None, dtype) == pytest.approx(1.0, abs=2e-3)
    assert gap("half", "same", dtype, dtype) == pytest.approx(0.5, abs=1e-3)


def test_rounding_to_bf16_is_torch_s(tmp_path):
    numbers = np.concatenate(
        [RANDOM.normal(size=9999), [0.0, -0.0, 1.00390625, 1.01171875, 3e38, 1e-39]]
    ).astype(np.float32)
    ours = weights._rounded(numbers.astype(np.float64), "bfloat16")
    assert ours.tolist() == torch.from_numpy(numbers).bfloat16().double().tolist()


def test_tied_weights_may_be_stored_once_or_twice(tmp_path, write_weights):
    twice = moved(0.1) | {"lm_head.weight": moved(0.1)["embed.weight"].copy()}
    run = write_weights(tmp_path / "run", twice)
    control = write_weights(tmp_path / "control", moved(0.1))
    start = write_weights(tmp_path / "start", START)
    assert weight_gap(run, control, start).share == 0.0
    assert weight_gap(control, run, start).share == 0.0


def test_a_second_matrix_with_numbers_of_its_own_is_no_tied_copy(tmp_path, write_weights):
    run = write_weights(tmp_path / "run", moved(0.1) | {"lm_head.weight": np.ones((5, 3), "f4")})
    control = write_weights(tmp_path / "control", moved(0.1))
    with pytest.raises(WeightsError, match="the control lacks lm_head.weight"):
        weight_gap(run, control, control)


def test_a_missing_tensor_is_named(tmp_path, write_weights):
    part = {name: tensor for name, tensor in moved(0.1).items() if name != "bias"}
    run = write_weights(tmp_path / "run", part)
    control = write_weights(tmp_path / "control", moved(0.1))
    with pytest.raises(WeightsError, match="the run lacks bias"):
        weight_gap(run, control, control)


def test_a_weight_that_is_not_a_number_gives_a_gap_that_is_none(tmp_path, write_weights):
    run = write_weights(tmp_path / "run", moved(np.float32(np.nan)))
    control = write_weights(tmp_path / "control", moved(0.1))
    start = write_weights(tmp_path / "start", START)
    gap, difference = weight_gap(run, control, start)
    assert math.isnan(gap)
    assert math.isnan(difference["value"])
    assert difference["tensor"] == "bias"  # the first that is not a number


def test_the_largest_difference_is_of_one_element_and_says_in_which_tensor(tmp_path, write_weights):
    apart = moved(0.1)
    apart["embed.weight"][3, 1] += 0.5
    apart["norm.weight"][2] -= 0.25
    run = write_weights(tmp_path / "run", apart)
    control = write_weights(tmp_path / "control", moved(0.1))
    start = write_weights(tmp_path / "start", START)
    difference = weight_gap(run, control, start).difference
    assert difference == {"value": pytest.approx(0.5, rel=1e-6), "tensor": "embed.weight"}


@pytest.mark.parametrize(
    ("lost", "said"),
    [("abcde", "a, b, c, d, e$"), ("abcdef", "e and 1 more"), ("abcdefg", "2 more")],
)
def test_of_many_missing_tensors_five_are_named_and_the_others_counted(
    tmp_path, write_weights, lost, said
):
    whole = START | {name: np.ones(2, np.float32) for name in lost}
    run = write_weights(tmp_path / "run", moved(0.11, whole))
    control = write_weights(tmp_path / "control", moved(0.10, whole))
    start = write_weights(tmp_path / "start", START)
    with pytest.raises(WeightsError, match=said):
        weight_gap(run, control, start)


def test_a_control_that_went_nowhere_is_no_measure(tmp_path, write_weights):
    start = write_weights(tmp_path / "start", START)
    with pytest.raises(WeightsError, match="ended where it started"):
        weight_gap(start, start, start)


@pytest.mark.parametrize("cut", [4, 60, -8])
def test_a_file_that_is_cut_off_is_named(tmp_path, write_weights, cut):
    start = write_weights(tmp_path / "start", START)
    torn = write_weights(tmp_path / "torn", START) / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:cut])
    with pytest.raises(WeightsError, match="model.safetensors"):
        weight_gap(torn.parent, start, start)


def header(**changes):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    text = json.dumps({"a": entry}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


DAMAGED = {
    "nothing": b"",
    "cut within its length": b"\x01\x02",
    "cut within its header": header()[:20],
    "cut within its numbers": header()[:-1],
    "no JSON": struct.pack("<Q", 4) + b"\xff\xfe\x00\x01",
    "nested": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "a list": struct.pack("<Q", 2) + b"[]",
    "another field": header().replace(b"shape", b"shapf"),
    "a shape of words": header(shape=["2"]),
    "a shape below zero": header(shape=[-2]),
    "another shape": header(shape=[3]),
    "offsets of one": header(data_offsets=[8]),
    "offsets below zero": header(data_offsets=[-8, 0]),
    "an unknown dtype": header(dtype="F31"),
    "a dtype of a list": header(dtype=["F32"]),
    "a length beyond all": struct.pack("<Q", 2**63) + b"{}",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_weights_are_a_weights_error_that_names_the_file(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "../other.safetensors"}}',
    ],
)
def test_a_damaged_index_is_a_weights_error_that_names_it(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json"):
        open_weights(tmp_path)


def test_what_the_damaged_files_are_made_from_is_whole(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(header())
    assert open_weights(tmp_path).keys() == {"a"}
