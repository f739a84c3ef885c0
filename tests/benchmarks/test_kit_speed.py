"""The speed part of the GPU kit: what it computes by itself."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def speed(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("kit.speed")


@pytest.fixture
def machine(speed, tmp_path):
    return importlib.import_module("kit.cells").Machine(gpus=1, smoke=False, out=tmp_path)


def test_utilization_is_that_of_the_convention_by_hand(speed):
    shape = importlib.import_module("kit.models").shape_of(speed.MODEL, smoke=False)
    layer = 2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048
    parameters = 128_256 * 2048 + 16 * layer + 2048
    of_a_token = 6 * parameters + 12 * 16 * 2048 * 4096
    share = speed.utilization(50_000, shape, tokens=4096, flops=989.4e12)
    assert share == pytest.approx(50_000 * of_a_token / 989.4e12)
    assert 0.45 < share < 0.46


def test_every_row_is_compared_with_rows_of_the_part(speed, machine):
    cells = {cell.name: cell.settings for cell in speed.cells(machine)}
    assert len(cells) == len(speed.cells(machine))
    for settings in cells.values():
        assert settings["table"] in speed.TABLES
        for base in [*settings["bases"].values(), settings.get("same_rows", "stock")]:
            assert base in cells
        trained = ("rows", "tokens", "batch")
        like = cells[settings.get("same_rows", next(iter(settings["bases"].values())))]
        assert [settings[name] for name in trained] == [like[name] for name in trained]
