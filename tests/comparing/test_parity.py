import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from example_record import DATA

from toolkit.comparing.parity.gates import (
    GATES,
    first_common_step,
    judge,
    judge_control,
    limit_of,
)
from toolkit.comparing.parity.judgement import (
    GATED_STEPS,
    ROUNDED,
    Case,
    Rounding,
    broken_sentence,
)
from toolkit.comparing.run.comparison import measure_rounding
from toolkit.records.record import FILLER_ID

ALL_GATES = {"loss": True, "grad_norm": True, "weights": True, "data": True}
START = {"a": np.zeros((2, 3), np.float32)}


@pytest.fixture
def compare(tmp_path, make_record, write_weights):
    """Judge a run whose record has `changes` against a control of one process."""
    start = write_weights(tmp_path / "start", START)

    def judged(
        *, weights=1.0, control=None, first_step=1, steps=4, ranks=2, rounding=None, **changes
    ):
        write_weights(tmp_path / "run" / "final", {"a": np.full((2, 3), weights, np.float32)})
        write_weights(tmp_path / "control" / "final", {"a": np.ones((2, 3), np.float32)})
        reference = make_record(strategy="single", ranks=1, steps=steps, start=start)
        record = make_record(steps=steps, ranks=ranks, start=start) | changes
        return judge(
            Case(
                record=record,
                control=reference | (control or {}),
                folder=tmp_path / "run",
                control_folder=tmp_path / "control",
                first_step=first_step,
                rounding=rounding,
            )
        )

    return judged


def losses_with(change, *, at, steps=4):
    losses = [5.0 - step / 10 for step in range(steps)]
    losses[at - 1] += change
    return losses


def only_broken(judgement, gate):
    assert judgement.gates == ALL_GATES | {gate: False}
    (broken,) = judgement.broken
    assert broken["gate"] == gate
    return broken


def test_an_equal_run_holds_every_gate(compare):
    judgement = compare()
    assert judgement.gates == ALL_GATES
    assert judgement.broken == []
    assert judgement.gaps["loss_gap"] == {"max": 0.0, "mean": 0.0}
    assert judgement.gaps["grad_norm_gap"] == judgement.gaps["weight_gap"] == 0.0


def test_rounding_holds_every_gate(compare):
    judgement = compare(
        losses=losses_with(1.4e-6, at=3), grad_norms=[2.0 + 9e-5] * 4, weights=1 + 5.6e-5
    )
    assert judgement.gates == ALL_GATES
    assert judgement.gaps["loss_gap"]["max"] == pytest.approx(1.4e-6, rel=1e-3)
    assert judgement.gaps["loss_gap"]["mean"] == pytest.approx(1.4e-6 / 4, rel=1e-3)
    assert judgement.gaps["grad_norm_gap"] == pytest.approx(4.5e-5, rel=1e-3)
    assert judgement.gaps["weight_gap"] == pytest.approx(5.6e-5, rel=1e-2)


def test_the_mean_gap_has_a_sign(compare):
    below = [loss - 1e-6 for loss in losses_with(0, at=1)]
    assert compare(losses=below).gaps["loss_gap"]["mean"] == pytest.approx(-1e-6, rel=1e-3)


def test_a_loss_apart_breaks_its_gate_at_its_step(compare):
    broken = only_broken(compare(losses=losses_with(2e-5, at=3)), "loss")
    assert broken["first_step"] == 3
    assert broken["value"] == pytest.approx(2e-5, rel=1e-3)
    assert broken["limit"] == 1e-5
    assert broken_sentence(broken) == (
        "ddp-trainer: the loss gate broke at step 3: "
        "loss apart from the control's (is 2.00e-05, limit 1.00e-05)."
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_shown_as_what_it_is(compare, loss):
    losses = losses_with(0, at=1)
    losses[1] = loss
    judgement = compare(losses=losses)
    broken = only_broken(judgement, "loss")
    assert broken["first_step"] == 2
    assert str(broken["value"]) == str(loss)
    assert not math.isfinite(judgement.gaps["loss_gap"]["max"])


def test_losses_that_are_not_finite_on_both_sides_are_no_agreement(compare):
    losses = [5.0, math.inf, 4.8, 4.7]
    assert compare(losses=losses, control={"losses": losses}).gates["loss"] is False


def test_doubled_gradients_break_the_gradient_gate_and_no_other(compare):
    broken = only_broken(
        compare(grad_norms=[4.0] * 4, losses=losses_with(4.8e-7, at=4)), "grad_norm"
    )
    assert (broken["first_step"], broken["value"], broken["limit"]) == (1, 1.0, 5e-4)


def gradients(**norms):
    return {"step": 1, "norms": {"large": 2.0, "small": 0.02} | norms}


def test_one_small_gradient_apart_breaks_the_gradient_gate_and_is_named(compare):
    """The norm of all of them moves by 4e-5."""
    control = {"gradients": gradients()}
    judgement = compare(gradients=gradients(small=0.01), control=control)
    broken = only_broken(judgement, "grad_norm")
    assert broken_sentence(broken) == (
        "ddp-trainer: the grad_norm gate broke at step 1: the gradient norms of 1 of 2 parameters "
        "are apart from the control's, most that of small (is 5.00e-01, limit 1.00e-03)."
    )
    assert judgement.gaps["gradient_difference"] == {"value": 0.5, "tensor": "small"}
    assert compare(gradients=gradients(small=0.02 + 1e-8), control=control).gates == ALL_GATES


def test_a_gradient_that_is_rounding_alone_is_held_against_all_of_them_together(compare):
    """Such as that of a key's bias, which changes no output."""
    control = {"gradients": gradients(bias=1e-9)}
    judgement = compare(gradients=gradients(bias=7e-9), control=control)
    assert judgement.gates == ALL_GATES
    assert judgement.gaps["gradient_difference"]["value"] < 1e-5


@pytest.mark.parametrize("missing", ["run", "control"])
def test_a_parameter_that_one_of_them_does_not_train_is_apart(compare, missing):
    more, fewer = gradients(frozen=0.5), gradients()
    ours, theirs = (fewer, more) if missing == "run" else (more, fewer)
    judgement = compare(gradients=ours, control={"gradients": theirs})
    assert only_broken(judgement, "grad_norm")["reason"].endswith("most that of frozen")


def test_gradients_that_are_not_finite_are_apart(compare):
    judgement = compare(gradients=gradients(small=math.nan), control={"gradients": gradients()})
    assert only_broken(judgement, "grad_norm")["value"] == math.inf


def test_gradients_of_other_steps_or_of_an_older_record_are_not_compared(compare):
    control = {"gradients": gradients()}
    judgement = compare(gradients=gradients(small=9.0) | {"step": 2}, control=control)
    assert judgement.gates == ALL_GATES
    assert judgement.not_measured["gradient_difference"] == (
        "the run's first step that updates is step 2, the control's 1"
    )
    judgement = compare(control=control)
    assert judgement.gates == ALL_GATES
    assert "the run has none" in judgement.not_measured["gradient_difference"]


@pytest.mark.parametrize("whose", ["both", "control"])
def test_a_model_whose_forward_is_random_is_not_judged_and_the_reason_stands(compare, whose):
    reason = "two forwards of the same tokens differ"
    changes = {"random_forward": reason}
    apart = {"losses": losses_with(0.3, at=2), "grad_norms": [3.0] * 4, "weights": 2.0}
    judgement = compare(
        **apart | (changes if whose == "both" else {}),
        control=changes,
    )
    assert judgement.gates == {}
    assert judgement.broken == []
    for gate in ALL_GATES:
        assert judgement.not_measured[f"gates.{gate}"] == reason
    assert judgement.gaps["loss_gap"]["max"] == pytest.approx(0.3)


def test_an_optimizer_whose_update_depends_on_how_zero_cuts_is_judged_up_to_it(
    compare, make_record
):
    training = make_record()["training"] | {"optimizer": "adafactor"}
    apart = {"training": training, "losses": losses_with(2e-3, at=2), "weights": 1.5}
    cut = compare(strategy="zero2", **apart)
    assert cut.gates == {}
    assert cut.broken == []
    assert cut.gaps["loss_gap"]["max"] == pytest.approx(2e-3)
    assert cut.not_measured["gates.weights"].startswith("adafactor makes one update of a whole")
    whole = compare(strategy="ddp", **apart)
    assert {broken["gate"] for broken in whole.broken} == {"loss", "weights"}
    first = compare(strategy="zero2", **apart | {"losses": losses_with(2e-3, at=1)})
    assert {broken["gate"] for broken in first.broken} == {"loss"}
    # In fp16 one of them may have updated before the first step that all of them took.
    fp16 = apart | {"precision": "fp16", "skipped_steps": [1, 2], "losses": losses_with(1, at=3)}
    skipped = {"precision": "fp16", "skipped_steps": [1]}
    assert compare(strategy="zero2", first_step=3, control=skipped, **fp16).broken == []
    nan = compare(strategy="zero2", **apart | {"losses": losses_with(math.nan, at=3)})
    (broken,) = nan.broken
    assert (broken["gate"], broken["first_step"]) == ("loss", 3)


def test_a_forward_that_is_random_in_the_run_alone_excuses_nothing(compare):
    judgement = compare(random_forward="it is random", losses=losses_with(2e-5, at=3))
    only_broken(judgement, "loss")
    assert judgement.notes == ["it is random"]


def test_rows_that_differ_break_their_gate_for_a_random_model_too(compare):
    random = {"random_forward": "it is random"}
    judgement = compare(control=random, **random, data=DATA | {"hash": "another"})
    assert judgement.gates == {"data": False}


def test_weights_apart_break_their_gate(compare):
    broken = only_broken(compare(weights=1 + 8.6e-4), "weights")
    assert broken["first_step"] is None
    assert broken["value"] == pytest.approx(8.6e-4, rel=1e-2)


def test_each_run_s_weights_are_measured_from_where_it_began(compare, tmp_path, write_weights):
    """0.7001 is 0.69921875 in bf16: DeepSpeed's masters begin there, those of our own do not."""
    write_weights(tmp_path / "start", {"a": np.full((2, 3), 0.7001, np.float32)})
    off = 0.69921875 - 0.7001

    def judged(wrapper, *, masters=24, **changes):
        engaged = {"wrapper": wrapper, "parameter_dtypes": ["bfloat16"]}
        attestation = {"held": True, "mismatches": [], "engaged": engaged}
        return compare(
            weights=1 + off, attestation=attestation, memory={"master_bytes": masters}, **changes
        )

    assert judged("DeepSpeedEngine").gates["weights"] is True
    only_broken(judged("DDP"), "weights")
    assert judged("none", masters=0).gates["weights"] is True  # loaded in bf16, without masters
    alike = {"attestation": {"engaged": {"parameter_dtypes": ["bfloat16"], "wrapper": "none"}}}
    only_broken(
        judged("none", masters=0, control=alike | {"memory": {"master_bytes": 0}}), "weights"
    )


def test_weights_are_not_gated_after_many_steps_but_the_gap_stands(compare):
    judgement = compare(steps=GATED_STEPS + 1, weights=2.0)
    assert judgement.gaps["weight_gap"] == pytest.approx(1.0)
    assert "weights" not in judgement.gates
    assert "21 steps" in judgement.not_measured["gates.weights"]


def test_later_steps_are_reported_and_not_gated(compare):
    steps = GATED_STEPS + 10
    judgement = compare(
        steps=steps,
        losses=losses_with(0.5, at=GATED_STEPS + 1, steps=steps),
        grad_norms=[2.0] * GATED_STEPS + [3.0] * 10,
    )
    assert judgement.gates["loss"]
    assert judgement.gates["grad_norm"]
    assert judgement.gaps["loss_gap"]["max"] == pytest.approx(0.5)
    assert judgement.gaps["grad_norm_gap"] == pytest.approx(0.5)


def test_the_last_gated_step_is_gated(compare):
    losses = losses_with(0.5, at=GATED_STEPS, steps=GATED_STEPS + 10)
    judgement = compare(steps=GATED_STEPS + 10, losses=losses)
    assert judgement.broken[0]["first_step"] == GATED_STEPS


def test_the_same_rows_on_both_ranks_break_the_data_gate(compare):
    ids = [[[0, 1, 2, 3], [0, 1, 2, 3]]] * 4
    broken = only_broken(compare(sample_ids=ids), "data")
    assert broken["first_step"] == 1
    assert "read by 2 ranks" in broken["reason"]


def test_the_rows_of_another_step_break_the_data_gate(compare, make_record):
    ids = make_record()["sample_ids"]
    ids[2] = [[0, 1, 2, 3], [4, 5, 6, 99]]
    broken = only_broken(compare(sample_ids=ids), "data")
    assert broken["first_step"] == 3
    assert "7" in broken["reason"]
    assert "99" in broken["reason"]


def test_another_split_of_the_same_rows_is_the_same_data(compare):
    assert compare(sample_ids=[[[7, 5, 3, 1], [0, 2, 4, 6]]] * 4).gates == ALL_GATES


def test_the_rows_of_one_rank_alone_break_the_data_gate(compare):
    broken = only_broken(compare(sample_ids=[[list(range(8))]] * 4), "data")
    assert "1 ranks were recorded, there are 2" in broken["reason"]


def test_fillers_of_a_short_step_are_on_any_rank_and_no_row_of_theirs_is_judged(compare):
    alone = [[[0, 1, 2, *[FILLER_ID] * 5]]] * 4
    dealt = [[[2, FILLER_ID, FILLER_ID, FILLER_ID], [0, 1, FILLER_ID, FILLER_ID]]] * 4
    assert compare(sample_ids=dealt, control={"sample_ids": alone}).gates == ALL_GATES
    idle = [[[0, 1, 2, FILLER_ID], [FILLER_ID] * 4]] * 4
    assert compare(sample_ids=idle, control={"sample_ids": alone}).gates == ALL_GATES
    twice = [[[0, 1, 2, FILLER_ID], [0, FILLER_ID, FILLER_ID, FILLER_ID]]] * 4
    broken = only_broken(compare(sample_ids=twice, control={"sample_ids": alone}), "data")
    assert "row 0 was read by 2 ranks" in broken["reason"]
    lost = [[[0, 1, FILLER_ID, FILLER_ID], [FILLER_ID] * 4]] * 4
    broken = only_broken(compare(sample_ids=lost, control={"sample_ids": alone}), "data")
    assert "1 rows of the control's were not read, such as 2" in broken["reason"]


def test_other_labels_of_the_same_data_break_the_data_gate(compare):
    data = {"name": "stdlib", "hash": "abc", "rows": 100}
    same = compare(data=data | {"tokens_hash": "1"}, control={"data": data | {"tokens_hash": "1"}})
    assert same.gates == ALL_GATES
    other = compare(data=data | {"tokens_hash": "1"}, control={"data": data | {"tokens_hash": "2"}})
    assert "other tokens or labels" in only_broken(other, "data")["reason"]


def test_other_data_break_the_data_gate(compare):
    data = DATA | {"hash": "other"}
    assert "other data" in only_broken(compare(data=data), "data")["reason"]


def test_later_rows_that_differ_are_noted(compare, make_record):
    steps = GATED_STEPS + 2
    ids = make_record(steps=steps)["sample_ids"]
    ids[-1] = [[0, 1, 2, 3], [4, 5, 6, 99]]
    judgement = compare(steps=steps, sample_ids=ids)
    assert judgement.gates["data"]
    assert judgement.notes[0].startswith(f"step {steps}:")


def test_a_run_that_stopped_early_holds_no_step_gate(compare):
    judgement = compare(losses=[5.0, 4.9], grad_norms=[2.0, 2.0], sample_ids=[[[0], [1]]] * 2)
    assert (
        judgement.gates["loss"] is judgement.gates["grad_norm"] is judgement.gates["data"] is False
    )
    assert judgement.broken[0]["first_step"] == 3
    assert "2 steps, the control 4" in judgement.broken[0]["reason"]


def test_two_runs_that_both_stopped_early_hold_no_gate(compare):
    short = {"losses": [5.0], "grad_norms": [2.0]}
    judgement = compare(**short, control=short)
    assert judgement.gates["loss"] is False
    assert "asked were 4" in judgement.broken[0]["reason"]


def test_gradient_norms_that_only_the_control_has_are_no_pass(compare):
    assert only_broken(compare(grad_norms=None), "grad_norm")["first_step"] == 1
    assert only_broken(compare(grad_norms=[2.0, None, 2.0, 2.0]), "grad_norm")["first_step"] == 2


def test_gradient_norms_that_the_control_lacks_cannot_be_judged(compare):
    judgement = compare(control={"grad_norms": None})
    assert "grad_norm" not in judgement.gates
    assert "the control has no gradient norms" in judgement.not_measured["gates.grad_norm"]


def test_sample_ids_that_are_missing_are_no_pass(compare):
    assert "no sample ids" in only_broken(compare(sample_ids=None), "data")["reason"]
    judgement = compare(control={"sample_ids": None})
    assert "data" not in judgement.gates
    assert "gates.data" in judgement.not_measured


def test_weights_that_the_run_did_not_save_are_no_pass(compare):
    assert "saved no weights" in only_broken(compare(final=None), "weights")["reason"]


def test_weights_without_a_known_start_cannot_be_judged(compare):
    model = {"name": "tiny", "path": None, "parameters": 6}
    judgement = compare(model=model, control={"model": model})
    assert "weights" not in judgement.gates
    assert judgement.gaps["weight_gap"] is None
    assert "starting weights" in judgement.not_measured["weight_gap"]


def test_another_start_breaks_the_weights_gate(compare):
    model = {"name": "tiny", "path": "/elsewhere", "parameters": 6}
    assert "started from /elsewhere" in only_broken(compare(model=model), "weights")["reason"]


def test_fp16_is_compared_from_the_first_step_that_no_run_skipped(compare, make_record):
    records = [make_record(skipped_steps=steps) for steps in ([1], [1, 2], [])]
    assert first_common_step(records) == 3
    losses = [math.inf, 9.0, 4.8, 4.7]
    norms = [math.inf, math.inf, 2.0, 2.0]
    fp16 = {"precision": "fp16", "losses": losses, "grad_norms": norms, "skipped_steps": [1, 2]}
    judgement = compare(**fp16, control={"skipped_steps": [1, 2]}, first_step=3)
    assert judgement.gates == ALL_GATES
    assert judgement.gaps["loss_gap"]["max"] == pytest.approx(0.0)


def test_fp16_runs_that_skipped_different_steps_have_no_comparable_weights(compare):
    judgement = compare(precision="fp16", skipped_steps=[1], first_step=2, weights=9.0)
    assert "weights" not in judgement.gates
    assert "skipped different steps" in judgement.not_measured["gates.weights"]


def test_fp16_runs_that_skipped_different_steps_are_shown_and_not_gated(compare):
    apart = [5.0, 4.9, 9.9, 9.9]
    judgement = compare(precision="fp16", skipped_steps=[1], losses=apart, first_step=2)
    assert not {"loss", "grad_norm"} & judgement.gates.keys()
    assert not judgement.broken
    assert judgement.gaps["loss_gap"]["max"] > 1
    assert "[1] and []" in judgement.not_measured["gates.loss"]


def test_fp16_that_diverged_is_no_pass_whatever_it_skipped(compare):
    lost = [5.0, 4.9, math.nan, math.nan]
    judgement = compare(precision="fp16", skipped_steps=[3, 4], losses=lost, first_step=1)
    assert judgement.gates["loss"] is False


def test_fp16_that_skipped_every_gated_step_is_no_pass(compare):
    judgement = compare(precision="fp16", skipped_steps=[1, 2, 3, 4], first_step=5)
    assert judgement.gates["loss"] is judgement.gates["grad_norm"] is False


LIMITS = {
    "loss": {"no": 1e-5, "bf16": 7e-2, "fp16": 2e-2},
    "grad_norm": {"no": 5e-4, "bf16": 1e-2, "fp16": 1e-2},
    "gradients": {"no": 1e-3, "bf16": 0.2, "fp16": 0.2},
    "weights": {"no": 3e-4, "bf16": 0.2, "fp16": 0.2},
    "evaluation": {"no": 1e-5, "bf16": 7e-2, "fp16": 2e-2},
}
"""As they were measured; whoever changes one has to change it here, too."""


def evaluated(loss):
    return [{"step": 4, "loss": loss, "perplexity": 1.0, "tokens": 5, "rows": 2, "seconds": 1.0}]


def apart(gate, distance):
    """Return a run's fields, or its weights, that are this far from the control's."""
    match gate:
        case "loss":
            return {"losses": losses_with(distance, at=3)}
        case "grad_norm":
            return {"grad_norms": [2.0, 2.0, 2.0, 2.0 * (1 - distance)]}
        case "gradients":
            return {"gradients": gradients(small=0.02 * (1 + distance))}
        case "weights":
            return {"weights": 1 + distance}
        case "evaluation":
            return {"evaluation": evaluated(4.0 - distance)}


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("gate", LIMITS)
def test_a_gate_holds_up_to_its_limit_and_breaks_beyond_it(compare, gate, precision):
    control = {"precision": precision, "gradients": gradients(), "evaluation": evaluated(4.0)}
    equal = {"precision": precision, "gradients": gradients(), "evaluation": evaluated(4.0)}
    limit = LIMITS[gate][precision]
    assert limit_of(gate, precision) == limit
    every = ALL_GATES | {"evaluation": True}
    near = compare(control=control, **equal | apart(gate, 0.98 * limit))
    assert near.gates == every, near.broken
    far = compare(control=control, **equal | apart(gate, 1.02 * limit))
    named = GATES[gate].part_of or gate
    assert far.gates == every | {named: False}
    (broken,) = far.broken
    assert (broken["gate"], broken["limit"]) == (named, limit)
    assert broken["value"] == pytest.approx(1.02 * limit, rel=1e-2)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_gap_that_is_not_a_number_stays_so_wherever_it_stands(compare, at):
    """`max` of Python returns NaN only where NaN comes first."""
    norms = [2.0] * 4
    norms[at - 1] = math.nan
    judgement = compare(losses=losses_with(math.nan, at=at), grad_norms=norms)
    assert math.isnan(judgement.gaps["loss_gap"]["max"])
    assert math.isnan(judgement.gaps["loss_gap"]["mean"])
    assert math.isnan(judgement.gaps["grad_norm_gap"])
    assert {broken["first_step"] for broken in judgement.broken} == {at}


def test_evaluations_are_gated_up_to_the_last_gated_step_and_not_beyond(compare):
    def after(step, loss):
        return [evaluated(loss)[0] | {"step": step}]

    for step, holds in ((GATED_STEPS, False), (GATED_STEPS + 1, None)):
        judgement = compare(evaluation=after(step, 9.0), control={"evaluation": after(step, 4.0)})
        assert judgement.gates.get("evaluation") is holds
        assert judgement.gaps["eval_loss_gap"] == 5.0


def test_gradient_norms_of_a_step_that_either_run_skipped_are_not_compared(compare):
    norms = [2.0, math.inf, 2.0, 2.0]
    same = {"precision": "fp16", "skipped_steps": [2]}
    judgement = compare(grad_norms=norms, control=same, **same)
    assert judgement.gates == ALL_GATES
    assert judgement.gaps["grad_norm_gap"] == 0.0


def rounding(loss, *, weights=None):
    """Distances of the control from itself, the same in each of four steps."""
    steps = dict.fromkeys(range(1, 5), loss)
    return Rounding(steps={"loss": steps, "evaluation": {0: loss, 2: loss}}, weights=weights)


def test_a_gap_that_rounding_explains_ends_the_judged_steps_and_says_so(compare):
    judgement = compare(losses=losses_with(9e-4, at=3), rounding=rounding(1e-4))
    assert judgement.gates == ALL_GATES
    assert judgement.judged_steps == 2
    assert judgement.notes == [f"judged up to step 2: from step 3 on, {ROUNDED}"]
    assert compare(rounding=rounding(1e-4)).judged_steps is None


def test_a_gap_beyond_what_rounding_explains_or_in_the_first_step_breaks_its_gate(compare):
    assert (
        only_broken(compare(losses=losses_with(2e-3, at=3), rounding=rounding(1e-4)), "loss")[
            "first_step"
        ]
        == 3
    )
    # A later one breaks it too, where an earlier one is explained.
    losses = [
        ours + theirs for ours, theirs in zip(losses_with(9e-4, at=3), [0, 0, 0, 1], strict=True)
    ]
    assert only_broken(compare(losses=losses, rounding=rounding(1e-4)), "loss")["first_step"] == 4
    assert (
        only_broken(compare(losses=losses_with(9e-4, at=1), rounding=rounding(1e-4)), "loss")[
            "first_step"
        ]
        == 1
    )
    assert (
        only_broken(compare(losses=losses_with(math.nan, at=3), rounding=rounding(1e-4)), "loss")[
            "first_step"
        ]
        == 3
    )


def test_where_rounding_explains_the_second_step_already_nothing_is_said_to_hold(compare):
    judgement = compare(
        losses=losses_with(9e-4, at=2),
        grad_norms=[2.0, 2.1, 2.0, 2.0],
        weights=1.01,
        rounding=Rounding(
            steps={name: dict.fromkeys(range(1, 5), 1.0) for name in ("loss", "grad_norm")},
            weights=0.1,
        ),
    )
    assert judgement.gates == {}
    assert judgement.not_measured["gates.loss"] == f"from the first update on, {ROUNDED}"
    assert judgement.not_measured["gates.weights"] == ROUNDED


def test_final_weights_are_held_against_those_of_the_control_s_second_training(compare):
    judgement = compare(weights=1.001, rounding=rounding(0.0, weights=3e-4))
    assert judgement.not_measured["gates.weights"] == ROUNDED
    only_broken(compare(weights=1.002, rounding=rounding(0.0, weights=3e-4)), "weights")
    only_broken(compare(weights=1.001, rounding=rounding(0.0)), "weights")


def test_rounding_is_measured_only_between_two_trainings_on_the_same_rows(compare, make_record):
    control = make_record(strategy="single", ranks=1)
    control["sample_ids"] = [[[1, 2]], [[3, 4]], [[5, 6]], [[7, 8]]]
    again = control | {
        "sample_ids": [[[2, 1]], [[4, 3]], [[6, 5]], [[8, 7]]],
        "losses": losses_with(2e-6, at=2),
    }
    case = Case(record=again, control=control, folder=Path(), control_folder=Path())
    measured = measure_rounding(case)
    assert measured.steps["loss"] == {
        1: 0.0,
        **dict.fromkeys((2, 3, 4), pytest.approx(2e-6, rel=1e-3)),
    }
    other = again | {"sample_ids": [[[2, 3]], [[4, 1]], [[6, 5]], [[8, 7]]]}
    assert measure_rounding(replace(case, record=other)) is None


def test_every_precision_has_gates():
    limits = [gate.limits for gate in GATES.values() if gate.limits is not None]
    assert all(set(by_precision) == {"no", "bf16", "fp16"} for by_precision in limits)
    gates = ("loss", "grad_norm", "weights")
    assert [limit_of(gate, "no") for gate in gates] == [1e-5, 5e-4, 3e-4]


def test_the_control_answers_for_itself(make_record):
    assert judge_control(make_record(strategy="single", ranks=1)).gates == {}
    bad = judge_control(make_record(losses=[5.0, math.nan, 4.0, 4.0]))
    assert bad.gates == {"loss": False}
    assert bad.broken[0]["first_step"] == 2
    doubled = judge_control(make_record(sample_ids=[[[0, 1], [0, 1]]] * 4))
    assert doubled.gates == {"data": False}
