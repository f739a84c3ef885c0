import pytest

from toolkit.comparing.run.options import (
    CompareOptions,
    check_train_flags,
    read_scale,
    usual_rows,
)
from toolkit.comparing.run.plan import build_plan
from toolkit.errors import UsageError


def plan_of(*strategies, gpus=0, missing=lambda strategy: None, **options):
    chosen = {"strategies": strategies} if strategies else {}
    return build_plan(CompareOptions(**chosen | options), gpus=gpus, missing=missing)


def flag_of(run, name):
    return run.flags[run.flags.index(f"--{name}") + 1]


def test_the_default_is_six_strategies_under_the_trainer():
    plan = plan_of()
    assert [run.name for run in plan.runs] == [
        "single-trainer",
        "ddp-trainer",
        "zero1-trainer",
        "zero2-trainer",
        "zero3-trainer",
        "fsdp-trainer",
    ]
    assert plan.rehearsal


def test_every_run_sees_the_same_global_batch():
    plan = plan_of("single", "ddp", "fsdp_hybrid", global_batch_size=32)
    for run in plan.runs:
        rows = run.per_device_train_batch_size * run.gradient_accumulation_steps
        assert rows * run.num_processes == 32


def test_single_reads_the_micro_batches_of_the_ranks_one_after_the_other():
    single, ddp = plan_of("single", "ddp").runs
    assert single.per_device_train_batch_size == ddp.per_device_train_batch_size == 2
    assert single.gradient_accumulation_steps == 2 * ddp.gradient_accumulation_steps
    assert flag_of(single, "gradient_accumulation_steps") == "4"


def test_no_rank_goes_without_a_row_where_none_were_asked_for():
    assert usual_rows(2, 2) == CompareOptions().global_batch_size
    assert usual_rows(8, 2) == 16
    assert plan_of("ddp", num_processes=8, global_batch_size=usual_rows(8, 2)).runs


def test_tensor_groups_have_the_size_that_is_asked_for_and_rows_are_read_once():
    strategies = ("single", "tensor", "tensor_ddp")
    runs = {run.strategy.name: run for run in plan_of(*strategies, num_processes=4).runs}
    meshes = {name: run.strategy.mesh(run.num_processes) for name, run in runs.items()}
    assert meshes == {
        "single": "one rank",
        "tensor": "shards 2 x tensor 2",
        "tensor_ddp": "replicas 2 x tensor 2",
    }
    for run in runs.values():
        readers = run.strategy.data_parallel_size(run.num_processes)
        micro_batches = run.gradient_accumulation_steps
        assert run.per_device_train_batch_size * micro_batches * readers == 8
    (_, four) = plan_of("single", "tensor", num_processes=4, tensor_size=4).runs
    assert four.strategy.mesh(4) == "tensor 4"
    assert four.spec(rehearsal=True)["tensor_size"] == 4
    assert "tensor_size" not in runs["tensor"].spec(rehearsal=True)
    with pytest.raises(UsageError, match="no strategy here has some. Leave it out, or add tensor"):
        plan_of("ddp", tensor_size=2)


def test_fsdp_hybrid_gets_four_processes():
    assert plan_of("single", "fsdp_hybrid").runs[1].num_processes == 4


def test_single_is_added_as_the_control_and_said():
    plan = plan_of("zero2", "fsdp")
    assert [run.strategy.name for run in plan.runs] == ["single", "zero2", "fsdp"]
    assert "single is added" in plan.notes[0]
    assert [run.name for run in plan.fallbacks] == [
        "single-trainer",
        "ddp-trainer",
        "zero1-trainer",
    ]


def test_both_engines_have_one_control():
    plan = plan_of("ddp", engine="both")
    assert [run.name for run in plan.runs] == [
        "single-trainer",
        "single-loop",
        "ddp-trainer",
        "ddp-loop",
    ]
    assert {run.engine for run in plan.fallbacks} == {"trainer"}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision_goes_to_every_run(precision):
    for run in plan_of(precision=precision).runs:
        assert flag_of(run, precision) == "True"


def test_a_batch_that_does_not_divide_names_what_would():
    with pytest.raises(UsageError) as caught:
        plan_of("ddp", global_batch_size=18)
    text = str(caught.value)
    assert "18 rows does not divide" in text
    assert "--global_batch_size 16 or 20" in text
    assert "--gradient_accumulation_steps 1 or 3 or 9" in text


def test_a_batch_must_divide_for_the_strategy_with_more_processes_too():
    with pytest.raises(UsageError, match="by 2 and by 4 processes"):
        plan_of("ddp", "fsdp_hybrid", global_batch_size=4)


@pytest.mark.parametrize("switch", ["DEEPSPEED", "FSDP", "PARALLELISM_CONFIG"])
def test_a_shell_whose_switch_goes_before_every_config_file_is_refused(switch, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{switch}", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")  # left over as well
    with pytest.raises(UsageError, match=f"unset ACCELERATE_USE_{switch}"):
        plan_of("single", "ddp")


def test_a_strategy_under_which_an_optimizer_cannot_step_is_skipped_with_the_reason():
    runs = plan_of("single", "zero2", "fsdp", train_flags=("--optim", "adafactor")).runs
    skipped = {run.strategy.name: run.skipped for run in runs if run.skipped}
    assert skipped.keys() == {"fsdp"}
    assert "--optim adafactor cannot step on parameters that FSDP2 shards" in skipped["fsdp"]
    with pytest.raises(UsageError, match="--optim galore_adamw is not known to train"):
        plan_of("single", "ddp", train_flags=("--optim=galore_adamw",))


def test_one_process_trains_under_deepspeed_and_fsdp_and_not_under_ddp():
    assert plan_of("single", num_processes=1).runs[0].num_processes == 1
    plan = plan_of("zero2_offload", "fsdp", num_processes=1)
    assert [(run.num_processes, run.skipped) for run in plan.runs] == [(1, None)] * 3
    assert "ddp needs at least 2" in next(
        run.skipped for run in plan.fallbacks if run.strategy.name == "ddp"
    )
    with pytest.raises(UsageError, match="ddp needs --num_processes 2"):
        plan_of("zero2", "ddp", num_processes=1)


def test_an_uneven_number_of_processes_does_not_make_two_groups():
    with pytest.raises(UsageError, match="--num_processes 6"):
        plan_of("fsdp_hybrid", num_processes=5, global_batch_size=10)


def test_an_unknown_strategy_names_the_closest():
    with pytest.raises(UsageError, match="Did you mean 'zero2'"):
        plan_of("zero_2")


def test_wrong_options_are_named_together():
    with pytest.raises(UsageError, match="--max_steps.*--engine.*--precision"):
        CompareOptions(max_steps=0, engine="both of them", precision="fp8")


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--per_device_train_batch_size", "--global_batch_size"),
        ("--per-device-train-batch-size=8", "--global_batch_size"),
        ("--output_dir", "--output"),
        ("--engine", "--engine"),
        ("--strategy=ddp", "--strategies"),
        ("--max_steps", "--max_steps"),
        ("--bf16", "--precision"),
        ("--fp16=True", "--precision"),
        ("--tf32", "TF32 off"),
        ("--dtype", "--precision"),
        ("--throughput_steps", "--throughput_steps"),
        ("--save_total_limit", "final weights"),
        ("--resume_from_checkpoint", "--output"),
        ("--deepspeed", "--strategies"),
    ],
)
def test_a_flag_that_compare_owns_is_refused_with_its_own_name(flag, instead):
    with pytest.raises(UsageError) as caught:
        check_train_flags(["--seed", "1", flag, "8"])
    assert instead in str(caught.value)
    assert flag.partition("=")[0].replace("-", "_").lstrip("_") in str(caught.value)


def test_other_flags_reach_every_run_as_they_stand():
    flags = ["--learning_rate", "3e-4", "--seed", "7"]
    for run in plan_of(train_flags=flags).runs:
        assert list(run.flags[-4:]) == flags


def test_fp16_under_deepspeed_is_skipped_in_a_rehearsal_only():
    rehearsed = {run.strategy.name: run.skipped for run in plan_of(precision="fp16").runs}
    assert rehearsed["ddp"] is None
    assert "fp16 on a CPU" in rehearsed["zero2"]
    assert all(run.skipped is None for run in plan_of(precision="fp16", gpus=2).runs)


def test_what_a_machine_lacks_is_the_reason_to_skip():
    plan = plan_of("ddp", "zero3_nvme", missing=lambda s: "no libaio" if "nvme" in s.name else None)
    assert [run.skipped for run in plan.runs] == [None, None, "no libaio"]


def test_with_two_gpus_the_strategy_of_four_is_skipped_and_the_others_use_them():
    plan = plan_of("ddp", "fsdp_hybrid", gpus=2)
    assert not plan.rehearsal
    assert plan.runs[1].skipped is None
    assert "needs 4 GPUs" in plan.runs[2].skipped


def test_one_gpu_is_not_enough_for_two_ranks_so_the_control_rehearses_too():
    assert plan_of("ddp", gpus=1).rehearsal


def test_a_scale_runs_each_distributed_strategy_with_every_count_and_single_once():
    plan = plan_of("ddp", "zero3", scale=(4, 1, 2))
    assert [(run.name, run.num_processes) for run in plan.runs] == [
        ("single-trainer", 1),
        ("ddp-trainer-x2", 2),
        ("ddp-trainer-x4", 4),
        ("zero3-trainer-x2", 2),
        ("zero3-trainer-x4", 4),
    ]
    assert [run.name for run in plan.fallbacks] == [
        "single-trainer",
        "ddp-trainer-x2",
        "zero1-trainer-x2",
    ]


def test_under_a_scale_every_run_has_the_same_micro_batch_and_the_same_global_batch():
    plan = plan_of("ddp", scale=(2, 3, 6), global_batch_size=36, gradient_accumulation_steps=1)
    shares = [
        (run.num_processes, run.per_device_train_batch_size, run.gradient_accumulation_steps)
        for run in plan.runs
    ]
    assert shares == [(1, 6, 6), (2, 6, 3), (3, 6, 2), (6, 6, 1)]
    assert flag_of(plan.runs[1], "gradient_accumulation_steps") == "3"


def test_a_count_that_does_not_make_the_groups_is_skipped_with_its_reason():
    plan = plan_of("fsdp_hybrid", scale=(2, 4))
    two, four = plan.runs[1:]
    assert "needs 4 or more in multiples of 2; 2 asked" in two.skipped
    assert four.skipped is None


def test_under_a_scale_counts_beyond_the_gpus_are_skipped_and_the_others_use_them():
    plan = plan_of("ddp", gpus=2, scale=(1, 2, 4))
    assert not plan.rehearsal
    assert [run.skipped is None for run in plan.runs] == [True, True, False]
    assert "needs 4 GPUs" in plan.runs[2].skipped
    rehearsed = plan_of("ddp", gpus=0, scale=(1, 2, 4))
    assert rehearsed.rehearsal
    assert all(run.skipped is None for run in rehearsed.runs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scale": (1, 2), "num_processes": 2}, "--scale and --num_processes exclude each other"),
        ({"scale": (0, 2)}, "--scale must be at least 1"),
        ({"repeats": 0}, "--repeats must be at least 1"),
        ({"dollars_per_hour": 0.0}, "--dollars-per-hour is a price above 0"),
        ({"dollars_per_hour": float("nan")}, "--dollars-per-hour is a price above 0"),
        ({"scale": (1,)}, "a count of 2 or more in --scale"),
        ({"scale": (1, 2), "strategies": ("single",)}, "--scale needs a distributed strategy"),
        (
            {"scale": (2, 4), "global_batch_size": 18},
            "--global_batch_size 16 or 24 (a multiple of 8)",
        ),
        (
            {"scale": (3, 4), "global_batch_size": 24, "gradient_accumulation_steps": 1},
            "Use --gradient_accumulation_steps 3 or 6.",
        ),
        (
            {"scale": (3, 4), "global_batch_size": 16},
            "--gradient_accumulation_steps 3 with a --global_batch_size that is a multiple of 12",
        ),
    ],
)
def test_what_a_scale_cannot_be_is_said_with_what_it_can(options, said):
    with pytest.raises(UsageError) as caught:
        plan_of(**({"strategies": ("ddp",)} | options))
    assert said in str(caught.value)


def test_what_an_error_of_a_scale_advises_is_taken():
    for scale, batch, steps in (((2, 4), 24, 2), ((3, 4), 24, 6), ((3, 4), 12, 3)):
        taken = {"global_batch_size": batch, "gradient_accumulation_steps": steps}
        for run in plan_of("ddp", scale=scale, **taken).runs:
            rows = run.per_device_train_batch_size * run.gradient_accumulation_steps
            assert rows * run.num_processes == batch, run.name


def test_a_scale_is_read_from_numbers_with_commas_between():
    assert read_scale("4, 1,2,2") == (1, 2, 4)
    for text in ("", "two", "1;2", "-1", "1.5"):
        with pytest.raises(UsageError, match="--scale takes numbers"):
            read_scale(text)
