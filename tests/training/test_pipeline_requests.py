"""What a pipeline cannot do is one sentence before a rank starts."""

import pytest
from test_preflight import ROWS

from toolkit.errors import UsageError
from toolkit.strategies import STRATEGIES
from toolkit.training.arguments import own_arguments
from toolkit.training.preflight import preflight
from toolkit.training.split_requests import bubble_note, with_schedule

STEP = ("--gradient_accumulation_steps", "5")


@pytest.mark.parametrize(
    ("flags", "ranks", "reason"),
    [
        ([], 6, "has 4 layers, too few for 6 stages.*Start fewer ranks"),
        (["--pipeline_schedule", "interleaved"], 3, "has 4 layers, too few for 6 stages"),
        (["--pipeline_schedule", "interleaved"], 2, "cannot divide 5 micro-batches.*4 or 6"),
        (["--method", "lora"], 2, "pipeline does not work with --method lora"),
        (["--method", "qlora"], 2, "pipeline does not work with --method qlora"),
        (["--fp16", "true"], 2, "pipeline does not work with --fp16"),
        (["--compile_blocks", "true"], 2, "pipeline does not work with --compile_blocks"),
    ],
)
def test_a_request_that_no_pipeline_can_meet_is_refused(flags, ranks, reason, tmp_path):
    flags = [*ROWS, *STEP, "--engine", "loop", *flags]
    with pytest.raises(UsageError, match=reason):
        preflight(flags, num_processes=1, strategies=["pipeline"], ranks={"pipeline": [ranks]})


def test_fewer_micro_batches_than_stages_are_a_warning_with_the_bubble():
    own = own_arguments(["--pipeline_schedule", "gpipe"])
    values = {"gradient_accumulation_steps": 3}
    note = bubble_note(STRATEGIES["pipeline"], own, values, 4)
    assert "3 micro-batches in a step for 4 stages" in note
    assert "idle 50% of the time" in note
    assert bubble_note(STRATEGIES["pipeline"], own, values, 3) is None
    assert bubble_note(STRATEGIES["three_d"], own, values, 16) is None  # of two stages
    assert bubble_note(STRATEGIES["layer_split"], own, values, 4) is None
    assert bubble_note(STRATEGIES["ddp"], own, values, 4) is None


def test_the_flag_chooses_the_schedule_of_the_pipeline_alone():
    run = own_arguments(["--pipeline_schedule", "zero_bubble"]).run
    schedules = {name: with_schedule(s, run).schedule for name, s in STRATEGIES.items()}
    assert schedules.pop("pipeline") == schedules.pop("three_d") == "zero_bubble"
    assert schedules.pop("layer_split") == "one_at_a_time"
    assert set(schedules.values()) == {None}


@pytest.mark.parametrize(
    ("flags", "ranks", "reason"),
    [
        (["--pipeline_schedule", "zero_bubble"], 8, "three_d does not work with .*zero_bubble"),
        (["--method", "lora"], 8, "three_d does not work with --method lora"),
        (["--optim", "adafactor"], 8, "adafactor cannot step on parameters that tensor"),
        ([], 6, "needs a multiple of 4; 6 asked"),
    ],
)
def test_a_request_that_no_mesh_can_meet_is_refused(flags, ranks, reason):
    flags = [*ROWS, "--gradient_accumulation_steps", "4", "--engine", "loop", *flags]
    with pytest.raises(UsageError, match=reason):
        preflight(flags, num_processes=1, strategies=["three_d"], ranks={"three_d": [ranks]})
