"""The gates of a comparison catch the faults that only rows split over ranks can have."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_runs import judged, start_all, write_model

from toolkit import environment
from toolkit.strategies import STRATEGIES

SCRIPT = Path(__file__).parent / "faults" / "train_split_rows_with_faults.py"
FAULTS = {
    "labels_shifted_within_each_piece": {"loss", "grad_norm", "weights"},
    "loss_averaged_over_the_pieces": {"loss", "grad_norm", "weights"},
    "positions_that_restart_in_each_piece": {"loss", "grad_norm", "weights"},
    "gradients_divided_by_all_ranks": {"grad_norm"},
}
"""Each fault, and the gates that break for it; others may break as well."""


@pytest.fixture(scope="module", params=["context", "ulysses"])
def runs(request, tmp_path_factory, launch_environment) -> Path:
    if (missing := environment.missing_for(STRATEGIES[request.param])) is not None:
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("faults")
    model = write_model(folder / "model")
    return start_all(
        SCRIPT, folder / "runs", [model], FAULTS, launch_environment, strategy=request.param
    )


def test_sound_pieces_pass_every_gate(runs):
    judgement = judged(runs, "clean")
    assert judgement.gates == dict.fromkeys(("loss", "grad_norm", "weights", "data"), True)


@pytest.mark.parametrize(("fault", "gates"), FAULTS.items(), ids=list(FAULTS))
def test_a_fault_breaks_the_gates(runs, fault, gates):
    judgement = judged(runs, fault)
    assert {gate for gate, held in judgement.gates.items() if not held} >= gates, judgement
