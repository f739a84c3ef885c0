"""What guards make of beats: when they stop, when they warn, and when they keep still."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.errors import GuardError
from toolkit.measuring import guards as of_guards
from toolkit.measuring.guards import (
    NORMS_NEEDED,
    PACE_KEPT,
    PACE_NEEDED,
    SKIPPED_IN_A_ROW,
    Guards,
    RankHealth,
    StepHealth,
    newest_checkpoint,
    odd_ones_out,
)
from toolkit.measuring.replica_checks import OrderCheck, checksums

NORMAL = {
    "loss_is_finite": True,
    "norm_is_finite": True,
    "skipped": False,
    "grad_norm": 1.0,
    "same_order": True,
    "busiest": 0,
    "busiest_seconds": 0.1,
    "idlest_seconds": 0.1,
    "seconds": 1.0,
}


def beat(step, **other):
    return StepHealth(step=step, **NORMAL | other)


def nobody():
    raise AssertionError("all is well, and yet the ranks gather")


def everyone(**of_rank_1):
    known = {"loss": 2.0, "grad_norm": 1.0, "order": 5, "sample_ids": [1, 2]}
    return [RankHealth(rank=0, **known), RankHealth(rank=1, **known | of_rank_1)]


def judged(guards, *beats, ranks=nobody):
    for each in beats:
        guards.check_step(each, ranks)


def usual(guards, steps=NORMS_NEEDED, **other):
    judged(guards, *(beat(step, **other) for step in range(1, steps + 1)))
    return steps + 1


# Numbers


@pytest.mark.parametrize(
    ("capability", "enabled", "told"),
    [((9, 0), True, True), ((10, 3), True, True), ((9, 0), False, False), ((8, 9), True, False)],
)
def test_a_kernel_that_is_known_for_nan_gradients_is_named(capability, enabled, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: enabled)
    with pytest.raises(GuardError, match="its losses are: nan on rank 1") as error:
        judged(
            Guards("stop"),
            beat(1, norm_is_finite=False),
            ranks=lambda: everyone(grad_norm=float("nan")),
        )
    assert ("enable_cudnn_sdp(False)" in str(error.value)) == told
    assert "Lower --learning_rate" in str(error.value)


def test_a_loss_that_is_not_finite_names_rank_step_and_rows():
    bad = beat(7, loss_is_finite=False)
    with pytest.raises(GuardError, match=r"step 7 .*: nan on rank 1; rank 1 trained rows 1, 2\."):
        judged(Guards(), bad, ranks=lambda: everyone(loss=float("nan")))


def test_gradients_that_are_not_finite_name_rank_and_step():
    bad = beat(7, norm_is_finite=False)
    with pytest.raises(GuardError, match=r"norm of step 7 .* though its losses are: inf on rank 1"):
        judged(Guards(), bad, ranks=lambda: everyone(grad_norm=float("inf")))


def test_a_norm_far_above_the_median_and_all_before_is_exploding():
    guards = Guards(grad_norm_factor=100.0)
    step = usual(guards, grad_norm=0.5)
    judged(guards, beat(step, grad_norm=49.0))
    with pytest.raises(GuardError, match=r"step 12 is 51, 102 times the median .*, 0\.5\."):
        judged(guards, beat(step + 1, grad_norm=51.0))


def test_a_norm_is_not_judged_before_a_median_is_known():
    guards = Guards()
    usual(guards, NORMS_NEEDED - 1)
    judged(guards, beat(NORMS_NEEDED, grad_norm=1e6))
    assert guards.warnings == []


def test_a_norm_is_no_explosion_that_was_seen_when_training_began():
    """A model that has learned its rows by heart, and then gets new ones."""
    guards = Guards()
    judged(guards, beat(1, grad_norm=5.0), *(beat(s, grad_norm=1e-3) for s in range(2, 90)))
    judged(guards, beat(90, grad_norm=4.0))
    assert guards.warnings == []


def test_norms_that_double_in_each_step_explode():
    guards = Guards()
    step = usual(guards)
    with pytest.raises(GuardError, match="median"):
        judged(guards, *(beat(step + n, grad_norm=2.0**n) for n in range(1, 12)))


def test_a_norm_that_nobody_asked_for_is_not_judged():
    guards = Guards()
    usual(guards, 40, grad_norm=None)
    assert guards.warnings == []


def test_fp16_may_skip_steps_but_not_for_ever():
    guards = Guards()
    skipped = [beat(s, skipped=True, grad_norm=None) for s in range(1, SKIPPED_IN_A_ROW + 1)]
    judged(guards, *skipped[:-1], beat(90), *skipped[:-1])
    with pytest.raises(GuardError, match=f"skipped the last {SKIPPED_IN_A_ROW} steps"):
        judged(guards, skipped[-1])


# Ranks


def test_ranks_that_read_in_another_order_are_named():
    with pytest.raises(GuardError, match=r"Rank 1 read the rows of step 3 in another order"):
        judged(Guards(), beat(3, same_order=False), ranks=lambda: everyone(order=6))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({0: 1, 1: 2}, "Rank 1"),
        ({0: 9, 1: 2, 2: 2}, "Rank 0"),
        ({0: 1, 1: 2, 2: 1, 3: 4}, "Rank 1 and rank 3"),
        ({0: 1, 1: 2, 2: 2, 3: 1}, "Rank 1 and rank 2"),
    ],
)
def test_who_differs_is_told_by_the_majority_and_then_by_rank_0(values, named):
    assert odd_ones_out(values) == named


def test_a_rank_that_stalls_is_named_and_the_run_goes_on(capsys):
    guards = Guards()
    step = usual(guards, PACE_NEEDED + 2)
    judged(guards, beat(step, busiest=3, busiest_seconds=2.1, seconds=3.0))
    (warning,) = guards.warnings
    assert (warning["kind"], warning["step"]) == ("slow rank", step)
    assert warning["text"].startswith(f"Rank 3 fell behind by step {step}: its own work took 2.10")
    assert warning["text"] in capsys.readouterr().out


def test_a_rank_that_stalls_stops_the_run_that_asked_for_it():
    guards = Guards("warn", slow_rank="stop")
    step = usual(guards, PACE_NEEDED + 2)
    with pytest.raises(GuardError, match="Rank 3 fell behind"):
        judged(guards, beat(step, busiest=3, busiest_seconds=2.1))


def test_the_first_steps_may_take_as_long_as_they_like():
    guards = Guards()
    judged(guards, *(beat(s, busiest_seconds=60.0) for s in range(1, PACE_NEEDED + 1)))
    assert guards.warnings == []


@pytest.mark.parametrize(
    "slower",
    [
        {"busiest_seconds": 1.05},  # less than a step
        {"busiest_seconds": 0.45, "seconds": 0.2},  # less than anybody would notice
    ],
)
def test_a_rank_that_is_a_little_slower_once_is_nobody_s_concern(slower):
    guards = Guards()
    step = usual(guards, PACE_NEEDED + 4)
    judged(guards, beat(step, **slower))
    assert guards.warnings == []


def test_a_rank_that_is_always_slower_is_named():
    guards = Guards()
    slower = {"busiest": 2, "busiest_seconds": 0.4}
    usual(guards, PACE_NEEDED + PACE_KEPT - 1, **slower)
    assert guards.warnings == []
    judged(guards, beat(99, **slower))
    assert "Rank 2 falls behind: up to step 99" in guards.warnings[0]["text"]
    assert "20 of 20 steps" in guards.warnings[0]["text"]


def test_ranks_that_are_slower_in_turns_are_not():
    guards = Guards()
    for step in range(1, 60):
        judged(guards, beat(step, busiest=step % 2, busiest_seconds=0.4))
    assert guards.warnings == []


# What follows


def test_a_warning_is_given_once_of_each_kind(capsys):
    guards = Guards("warn")
    bad = [beat(s, loss_is_finite=False) for s in (3, 4)]
    judged(guards, *bad, beat(5, same_order=False), ranks=lambda: everyone(loss=float("nan")))
    assert [(w["kind"], w["step"]) for w in guards.warnings] == [("loss", 3), ("data order", 5)]
    assert guards.first_bad_step == 3
    out = capsys.readouterr().out
    assert out.count("toolkit: warning: ") == 2
    assert guards.described()["warnings"] == guards.warnings


def test_what_stops_a_run_names_the_last_checkpoint_that_is_whole(tmp_path):
    guards = Guards(checkpoints=tmp_path)
    with pytest.raises(GuardError, match=r"No checkpoint was kept\."):
        judged(guards, beat(1, same_order=False), ranks=lambda: everyone(order=6))
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    (tmp_path / "checkpoint-11").mkdir()
    (tmp_path / "checkpoint-12.tmp").mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    with pytest.raises(GuardError, match=r"The last good checkpoint is \S+/checkpoint-10\."):
        judged(guards, beat(1, same_order=False), ranks=lambda: everyone(order=6))


def test_no_checkpoint_is_promised_once_where_steps_were_not_finite(capsys):
    guards = Guards("warn")
    judged(guards, beat(3, loss_is_finite=False), ranks=lambda: everyone(loss=float("nan")))
    capsys.readouterr()
    guards.no_checkpoint()
    guards.no_checkpoint()
    told = capsys.readouterr().out
    assert told == "toolkit: no checkpoint is written after step 3, which was not finite.\n"


def test_bounds_leave_fp16_room_to_find_its_scale():
    """From 2**16, the first of both libraries, a scale halves to 1 in 16 steps."""
    assert of_guards.SKIPPED_IN_A_ROW > 17


# Weights and order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_checksum_sees_one_bit(dtype):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(5, 3).to(dtype), requires_grad=False)
    before = checksums(module)
    module.weight.view(torch.uint8).view(-1)[7] ^= 1
    assert checksums(module) != before


def test_the_same_seed_gives_the_same_checksums():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )

    def built(seed):
        torch.manual_seed(seed)
        return checksums(LlamaForCausalLM(config))

    assert built(0) == built(0)
    differing = [name for name, found in built(1).items() if found != built(0)[name]]
    assert len(differing) == 8 + 1  # all but the norms, which begin as ones


def test_an_order_is_told_from_another_one_of_the_same_rows():
    def order_of(*batches):
        watch = OrderCheck()
        for batch in batches:
            watch.drawn(batch)
        return watch.value

    assert order_of([1, 2], [3, 4]) == order_of([1, 2], [3, 4])
    assert order_of([1, 2], [3, 4]) != order_of([3, 4], [1, 2])
    assert order_of([1, 2]) != order_of([1, 2], [3, 4])
    assert 0 < order_of([1, 2], [3, 4]) < 2**48
