"""The gates of a comparison catch the faults that only a parameter server can have."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_runs import judged, start_all, traced, write_model

from toolkit.comparing.bisect.finding import bisect

SCRIPT = Path(__file__).parent / "faults" / "train_with_a_server_and_faults.py"
FAULTS = {
    "worker_pulls_stale_weights": ({"loss", "grad_norm", "weights"}, "update"),
    "push_is_lost": ({"grad_norm", "weights"}, "gradients"),
    "averaged_over_the_workers": ({"grad_norm"}, "gradients"),
    "last_parameter_is_not_pulled": ({"loss", "grad_norm", "weights"}, "update"),
}
"""Each fault, the gates that break for it (others may as well), and the first link to differ."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model, launch_environment) -> Path:
    folder, flags = tmp_path_factory.mktemp("faults"), ["--evidence", model]
    return start_all(SCRIPT, folder, flags, FAULTS, launch_environment)


def test_a_sound_server_passes_every_gate(runs):
    judgement = judged(runs, "clean")
    assert judgement.gates == dict.fromkeys(("loss", "grad_norm", "weights", "data"), True)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_breaks_the_gates(runs, fault):
    judgement = judged(runs, fault)
    broken = {gate for gate, held in judgement.gates.items() if not held}
    assert broken >= FAULTS[fault][0], judgement


@pytest.mark.parametrize("fault", ["clean", *FAULTS])
def test_a_bisection_names_the_link_that_a_fault_breaks_first(runs, fault):
    found = bisect(
        traced(runs / "control" / "clean", "single"), traced(runs / fault, "parameter_server")
    )
    wanted = None if fault == "clean" else FAULTS[fault][1]
    assert (found.first and found.first.link) == wanted, found.first
