"""The gates of a comparison catch what makes a run another training, and let a sound one through.

The first 14 faults are those of which the size was measured before the gates were set: from
reading the same rows on both ranks down to doubled gradients, which move the loss by 5e-7. Clipping
is active in every step, since it hides the faults of scale.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fault_runs import start, write_model

from toolkit.comparing.parity.gates import judge
from toolkit.comparing.parity.judgement import Case, Judgement
from toolkit.comparing.run.comparison import may_be_rounding, measure_rounding
from toolkit.records.record import Record, read_record

pytestmark = pytest.mark.short

ALL = {"loss", "grad_norm", "weights"}
FAULTS = {
    "same_data_on_both_ranks": ALL | {"data"},
    "other_data_order": ALL | {"data"},
    "other_initial_weights": ALL,
    "gradients_not_synchronised": ALL,
    "adam_for_adamw": ALL,
    "learning_rate_doubled": ALL,
    "dropout_with_a_seed_per_rank": ALL,
    "scheduler_stepped_by_every_rank": ALL,
    "not_clipped": ALL,
    "clipped_by_the_norm_of_a_shard": ALL,
    "adam_epsilon_1e_6": {"loss", "weights"},
    "no_weight_decay": {"weights"},
    "gradients_rounded_to_bf16": {"weights"},
    "gradients_doubled": {"grad_norm"},
    "half_the_gradient_of_one_matrix": {"grad_norm"},
    "half_the_gradient_of_one_norm": {"grad_norm"},
}
"""Each fault, and the gates that break for it by a margin; others may break as well."""


SHORT = (
    "same_data_on_both_ranks",
    "gradients_not_synchronised",
    "adam_epsilon_1e_6",
    "no_weight_decay",
    "half_the_gradient_of_one_matrix",
)
"""One fault of each set of gates, for the short tier."""

REST = tuple(name for name in FAULTS if name not in SHORT)

AT_A_HIGH_RATE = (
    "same_data_on_both_ranks",
    "learning_rate_doubled",
    "clipped_by_the_norm_of_a_shard",
    "half_the_gradient_of_one_norm",
)
SWEPT = [n for n in FAULTS if FAULTS[n] != {"weights"} and n not in AT_A_HIGH_RATE]
"""Both have the faults that part a run from its control before rounding can."""


def tiered(names):
    """Return the faults as parameters, of which those of the rest belong to the long tier."""
    return [pytest.param(n, marks=[pytest.mark.long] * (n in REST)) for n in names]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, launch_environment) -> Path:
    """Return the folder with the runs of the short tier, of `clean`, and of `control/clean`."""
    folder = tmp_path_factory.mktemp("faults")
    model = write_model(folder / "model")
    controls = ("clean", "reversed/clean")
    start("single", folder, [model, folder / "control", *controls], launch_environment)
    start("ddp", folder, [model, folder, "clean", *SHORT], launch_environment)
    return folder


@pytest.fixture(scope="module")
def rest(runs: Path, launch_environment) -> None:
    """Add the runs of the other faults."""
    start("ddp", runs / "rest", [runs / "model", runs, *REST], launch_environment)


@pytest.fixture(scope="module")
def fast(runs: Path, launch_environment) -> None:
    """Add runs at a high learning rate: the control, a sound one and some of the faults."""
    folder, model = runs / "fast", runs / "model"
    controls = ("fast/clean", "fast+reversed/clean")
    start("single", folder, [model, runs / "control", *controls], launch_environment)
    names = [f"fast/{name}" for name in ("clean", *AT_A_HIGH_RATE)]
    start("ddp", folder, [model, runs, *names], launch_environment)


@pytest.fixture(scope="module")
def swept(fast, runs: Path, launch_environment) -> None:
    """Add those of the other faults."""
    names = [f"fast/{name}" for name in SWEPT]
    start("ddp", runs / "swept", [runs / "model", runs, *names], launch_environment)


@pytest.fixture(scope="module")
def control(runs: Path) -> Record:
    return read_record(runs / "control" / "clean")


@pytest.fixture(scope="module")
def judged(runs: Path, request):
    def judged(name: str, *, rounding: bool = False) -> Judgement:
        if name in REST:
            request.getfixturevalue("rest")
        kind = "fast/" if name.startswith("fast/") else ""
        folder = runs / "control" / f"{kind}clean"
        again = runs / "control" / f"{'fast+' if kind else ''}reversed" / "clean"
        once_more = Case(
            record=read_record(again),
            control=read_record(folder),
            folder=again,
            control_folder=folder,
        )
        measured = measure_rounding(once_more)
        run = replace(once_more, record=read_record(runs / name), folder=runs / name)
        return judge(replace(run, rounding=measured if rounding else None))

    return judged


def test_the_short_tier_has_a_fault_of_each_set_of_gates() -> None:
    kinds = [FAULTS[name] for name in SHORT]
    assert all(gates in kinds for gates in FAULTS.values())


def test_clipping_is_active_in_every_step(control: Record) -> None:
    limit = control["training"]["max_grad_norm"]
    assert len(control["grad_norms"]) == 20
    assert min(control["grad_norms"]) > 2 * limit


def test_a_sound_run_passes_every_gate(judged) -> None:
    judgement = judged("clean")
    assert judgement.gates == dict.fromkeys(("loss", "grad_norm", "weights", "data"), True)


@pytest.mark.parametrize(
    ("fault", "tensor"),
    [
        ("half_the_gradient_of_one_matrix", "model.layers.1.self_attn.k_proj.weight"),
        pytest.param(
            "half_the_gradient_of_one_norm",
            "model.layers.1.post_attention_layernorm.weight",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_a_fault_in_one_small_gradient_is_seen_and_its_parameter_named(judged, fault, tensor):
    judgement = judged(fault)
    assert judgement.gaps["gradient_difference"] == {
        "value": pytest.approx(0.5, rel=1e-3),
        "tensor": tensor,
    }
    (broken,) = [one for one in judgement.broken if one["gate"] == "grad_norm"]
    assert broken["first_step"] == 1
    assert broken["reason"] == (
        "the gradient norms of 1 of 21 parameters are apart from the control's, most that of "
        f"{tensor}"
    )


@pytest.mark.parametrize("fault", tiered(FAULTS))
def test_a_fault_breaks_the_gates(judged, fault: str) -> None:
    gates = FAULTS[fault]
    judgement = judged(fault)
    assert {gate for gate, held in judgement.gates.items() if not held} >= gates, judgement
    # What rounding alone may do is known where a fault acts late, and excuses none of them.
    judgement = judged(fault, rounding=True)
    assert {gate for gate, held in judgement.gates.items() if not held} >= gates, judgement


@pytest.mark.long
@pytest.mark.usefixtures("fast")
def test_at_a_high_learning_rate_a_sound_run_is_judged_up_to_the_step_where_rounding_takes_over(
    judged,
) -> None:
    assert may_be_rounding(judged("fast/clean"))
    judgement = judged("fast/clean", rounding=True)
    assert not judgement.broken
    assert judgement.gates == dict.fromkeys(("loss", "grad_norm", "data"), True)
    assert 2 < judgement.judged_steps < 20
    assert f"judged up to step {judgement.judged_steps}: " in judgement.notes[0]
    assert "rounding alone explains the gap" in judgement.not_measured["gates.weights"]


@pytest.mark.long
@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("fault", AT_A_HIGH_RATE)
def test_at_a_high_learning_rate_a_fault_is_still_no_rounding(judged, fault: str) -> None:
    judgement = judged(f"fast/{fault}", rounding=True)
    assert judgement.broken, judgement


@pytest.mark.sweep
@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize("fault", SWEPT)
def test_nor_is_any_other_fault(judged, fault: str) -> None:
    judgement = judged(f"fast/{fault}", rounding=True)
    assert judgement.broken, judgement
