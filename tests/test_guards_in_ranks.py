"""Guards in real ranks: what goes wrong on one stops all; while all is well they cost one call."""

import json

import pytest
from places import ROOT, SCRIPTS

from toolkit.launching.launch import launch_command, run
from toolkit.launching.status import read_statuses
from toolkit.measuring.replica_checks import BY_RANK_0

BAD_STEP = 12
STEPS = 16

COST = ["plain", "off", "on"]
RUNS = {
    "ddp": [
        *COST,
        "clean",
        "clean_loop",
        "nan",
        "nan_at_a_save",
        "nan_at_a_save_loop",
        "nan_warned",
        "nan_loop",
        "exploding",
        "exploding_loop",
        "infinite_gradients",
        "unused",
        "unused_loop",
        "weights",
        "weights_loop",
        "order",
        "order_loop",
        "seed",
        "parted",
        "parted_warned",
        "parted_loop",
        "slow",
        "slow_rows",
        "slow_stopped",
    ],
    "fsdp": [*COST, "clean_loop", "nan", "exploding_loop", "weights", "order", "slow"],
    "zero2": [
        *COST,
        "clean",
        "nan",
        "exploding",
        "infinite_gradients",
        "weights",
        "order",
        "parted",
        "slow",
    ],
    "zero3": [*COST, "clean", "nan", "exploding", "weights", "order", "slow_rows"],
}

PULSE = ["c10d.allreduce_.default", [["torch.float64", 56]]]


@pytest.fixture(scope="module", params=RUNS)
def ranks(request, launch, tmp_path_factory):
    """What both ranks saw of each run under one strategy: name -> [rank 0, rank 1]."""
    strategy = request.param
    output = tmp_path_factory.mktemp(strategy)
    script = SCRIPTS / "guards_in_ranks.py"
    ended = launch(strategy, script, output, *RUNS[strategy], OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.stdout[-6000:]
    return {
        name: [json.loads((output / name / f"rank-{r}.json").read_text()) for r in (0, 1)]
        for name in RUNS[strategy]
    } | {"folder": output, "strategy": strategy}


def stopped(ranks, name):
    """Return what stopped a run, the same words on each rank, no later than a step too late."""
    first, second = ranks[name]
    assert "crash" not in first | second, (first.get("crash"), second.get("crash"))
    assert first["error"] is not None
    assert first["error"] == second["error"]
    assert first["step"] == second["step"]
    return first["error"], first["step"]


def runs_of(ranks, *names):
    return [name for name in names if name in ranks]


def test_with_guards_off_each_step_asks_for_the_collectives_of_the_plain_trainer(ranks):
    for plain, off in zip(ranks["plain"], ranks["off"], strict=True):
        assert len(plain["steps"]) == 5
        assert all(plain["steps"])
        assert off["steps"][2:] == plain["steps"][2:]
        # What was gathered to hold the norm that clips to it; objects take two calls.
        probe = without(off["steps"][1], plain["steps"][1])
        assert [str(call[1][0][0]) for call in probe] == ["torch.int64", "torch.uint8"], probe
        # Objects are gathered, two calls each: the folder's lock before the first step, what
        # engaged before and after it, the shares of its gradients, and what gets none under DDP.
        besides = without(off["steps"][0], plain["steps"][0])
        assert {str(call[1][0][0]) for call in besides} <= {"torch.int64", "torch.uint8"}
        assert len(besides) == (12 if ranks["strategy"] == "ddp" else 10)


def test_with_guards_on_a_step_has_one_more_all_reduce(ranks):
    for off, on in zip(ranks["off"], ranks["on"], strict=True):
        for unguarded, guarded in zip(off["steps"][1:], on["steps"][1:], strict=True):
            assert without(guarded, unguarded) == [PULSE]
            assert len(guarded) == len(unguarded) + 1


def test_parameters_that_one_rank_alone_leaves_out_are_named_before_they_are_reduced(ranks):
    for name in runs_of(ranks, "unused", "unused_loop"):
        error, step = stopped(ranks, name)
        assert step == 0
        assert error.startswith("4 parameters get no gradient on some ranks alone, the first is ")
        assert "model.layers.1.mlp.down_proj.weight on rank 1: " in error
        assert "find_unused_parameters=True" in error


def test_the_ledger_names_the_heartbeat(ranks):
    def of_guards(seen):
        rows = seen["record"]["traffic"]["collectives"]
        return [row for row in rows if row["purpose"] == "guards"]

    for off, on in zip(ranks["off"], ranks["on"], strict=True):
        assert of_guards(off) == []
        (row,) = of_guards(on)
        assert (row["kind"], row["calls"], row["payload_bytes"]) == ("all_reduce", 1, 56)
        others = [r for r in on["record"]["traffic"]["collectives"] if r["purpose"] != "guards"]
        assert others == off["record"]["traffic"]["collectives"]


def test_the_heartbeat_leaves_every_loss_as_it_was(ranks):
    assert ranks["on"][0]["record"]["losses"] == ranks["off"][0]["record"]["losses"]


def test_a_run_that_goes_well_is_left_alone(ranks):
    for name in runs_of(ranks, "clean", "clean_loop", "on"):
        for seen in ranks[name]:
            assert seen["error"] is None, seen
            assert "crash" not in seen, seen["crash"]
            assert seen["record"]["guards"]["warnings"] == []


def test_what_nobody_can_watch_is_said_with_its_reason(ranks):
    """FSDP's RAM-efficient loading hands out rank 0's weights, whatever the others hold."""
    not_watched = ranks["on"][0]["record"]["guards"]["not_watched"]
    by_rank_0 = {"initial weights": BY_RANK_0} if ranks["strategy"] == "fsdp" else {}
    assert not_watched == by_rank_0


def test_a_loss_that_is_not_finite_stops_all_ranks_and_no_checkpoint_follows(ranks):
    for name in runs_of(ranks, "nan", "nan_loop"):
        error, step = stopped(ranks, name)
        assert f"The loss of step {BAD_STEP} is not finite: nan on rank 1;" in error
        assert step <= BAD_STEP + 1
    error, _ = stopped(ranks, "nan")
    kept = sorted(path.name for path in (ranks["folder"] / "nan").glob("checkpoint-*"))
    assert kept == ["checkpoint-10", "checkpoint-5"]
    assert f"The last good checkpoint is {ranks['folder'] / 'nan' / 'checkpoint-10'}." in error


def test_the_trainer_does_not_log_a_loss_that_is_not_finite_as_0(ranks):
    logged = ranks["nan"][0]["logged"]
    assert len(logged) == BAD_STEP
    assert logged[-1] != logged[-1]
    assert all(loss > 1 for loss in logged[:-1])


def test_a_step_that_went_wrong_is_judged_before_it_is_saved(ranks):
    for name in runs_of(ranks, "nan_at_a_save", "nan_at_a_save_loop"):
        error, step = stopped(ranks, name)
        assert f"step {BAD_STEP}" in error
        assert step == BAD_STEP
        assert not list((ranks["folder"] / name).glob("checkpoint-*"))


def test_guards_that_warn_let_the_run_end_without_a_checkpoint_of_it(ranks):
    for name in runs_of(ranks, "nan_warned"):
        for seen in ranks[name]:
            assert seen["step"] == STEPS
            (warning,) = seen["record"]["guards"]["warnings"]
            assert (warning["kind"], warning["step"]) == ("loss", BAD_STEP)
            losses = seen["record"]["losses"]
            assert losses[BAD_STEP - 2] == losses[BAD_STEP - 2]
            assert all(loss != loss for loss in losses[BAD_STEP - 1 :])
        kept = {path.name for path in (ranks["folder"] / name).glob("checkpoint-*")}
        assert kept == {"checkpoint-5", "checkpoint-10"}
        first, second = (seen["printed"] for seen in ranks[name])
        assert first.count(f"toolkit: warning: {warning['text']}") == 1
        assert "warning" not in second


def test_an_exploding_gradient_norm_stops_all_ranks(ranks):
    for name in runs_of(ranks, "exploding", "exploding_loop"):
        error, step = stopped(ranks, name)
        assert f"The gradient norm of step {BAD_STEP} is " in error
        assert "times the median" in error
        assert step <= BAD_STEP + 1


def test_gradients_that_are_not_finite_stop_all_ranks_though_the_losses_are(ranks):
    for name in runs_of(ranks, "infinite_gradients"):
        error, step = stopped(ranks, name)
        assert f"The gradient norm of step {BAD_STEP} is not finite, though its losses are" in error
        assert step <= BAD_STEP + 1


def test_ranks_with_other_weights_are_stopped_before_a_backend_can_hide_it(ranks):
    for name in runs_of(ranks, "weights", "weights_loop"):
        error, step = stopped(ranks, name)
        assert error.startswith("Rank 1 loaded other weights than the others: 16 of 21 parameters")
        assert "model.embed_tokens.weight" in error
        assert step == 0


def test_ranks_that_read_the_rows_in_another_order_are_stopped_at_once(ranks):
    for name in runs_of(ranks, "order", "order_loop", "seed"):
        error, step = stopped(ranks, name)
        assert error.startswith("Rank 1 read the rows of step 1 in another order than the others.")
        assert step <= 2


PARTED = (
    f"by step {STEPS}: 1 of 21 parameters differ that should be equal, the first is "
    "model.layers.1.mlp.up_proj.weight."
)


def test_ranks_whose_weights_part_late_are_stopped_before_anything_is_saved(ranks):
    for name in runs_of(ranks, "parted", "parted_loop"):
        error, step = stopped(ranks, name)
        assert error.startswith(f"Rank 1 parted from the others {PARTED}")
        assert step == STEPS
        assert not (ranks["folder"] / name / "final").exists()
    for name in runs_of(ranks, "parted"):
        error, _ = stopped(ranks, name)
        kept = [path.name for path in (ranks["folder"] / name).glob("checkpoint-*")]
        assert kept == [f"checkpoint-{STEPS // 2}"]
        assert f"The last good checkpoint is {ranks['folder'] / name / kept[0]}." in error


def test_guards_that_warn_of_ranks_that_part_let_no_checkpoint_follow(ranks):
    for name in runs_of(ranks, "parted_warned"):
        for seen in ranks[name]:
            assert seen["step"] == STEPS
            (warning,) = seen["record"]["guards"]["warnings"]
            assert (warning["kind"], warning["step"]) == ("replicas", STEPS)
        kept = {path.name for path in (ranks["folder"] / name).glob("checkpoint-*")}
        assert kept == {f"checkpoint-{STEPS // 2}"}


def test_groups_that_each_shard_a_whole_model_are_held_against_each_other(launch, tmp_path):
    """Of fsdp_hybrid's four ranks the second and the last hold the same half."""
    runs = ("saved_loop", "parted_loop")
    script = SCRIPTS / "guards_in_ranks.py"
    ended = launch("fsdp_hybrid", script, tmp_path, *runs, OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.stdout[-6000:]
    for rank in range(4):
        saved, parted = (
            json.loads((tmp_path / name / f"rank-{rank}.json").read_text()) for name in runs
        )
        assert saved["error"] is None, saved
        assert "crash" not in saved, saved["crash"]
        assert parted["error"].startswith(f"Rank 3 parted from the others {PARTED}"), parted
    assert (tmp_path / "saved_loop" / "final" / "model.safetensors").exists()
    assert not (tmp_path / "parted_loop" / "final").exists()


SPLITTING = ("tensor", "tensor_ddp", "three_d")


@pytest.fixture(scope="module")
def in_groups(launch, tmp_path_factory):
    """What four ranks saw of short runs in tensor groups, and where each was saved."""
    output = tmp_path_factory.mktemp("groups")
    runs = [*SPLITTING, *(f"{name}_parted" for name in SPLITTING), "rounded", "not_rounded"]
    runs += ["counted_twice", "one_gradient_apart"]
    script = SCRIPTS / "guards_in_ranks.py"
    ended = launch("tensor_ddp", script, output, *runs, OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.stdout[-6000:]
    return {
        name: [json.loads((output / name / f"rank-{r}.json").read_text()) for r in range(4)]
        for name in runs
    } | {"folder": output}


def errors_of(in_groups, name):
    """Return what each rank of a run stopped with, and whether the model was saved."""
    crashes = [seen["crash"] for seen in in_groups[name] if "crash" in seen]
    assert not crashes, crashes[0]
    saved = (in_groups["folder"] / name / "final" / "model.safetensors").exists()
    return {seen["error"] for seen in in_groups[name]}, saved


@pytest.mark.parametrize("strategy", SPLITTING)
def test_weights_that_a_tensor_group_has_whole_are_held_against_each_other(in_groups, strategy):
    assert errors_of(in_groups, strategy) == ({None}, True)
    (error,), saved = errors_of(in_groups, f"{strategy}_parted")
    assert error.startswith("Rank 3 parted from the others by step 3: 1 of ")
    assert "the first is model.layers.1.input_layernorm.weight." in error
    assert not saved


def test_where_sums_come_in_any_order_weights_of_a_group_may_differ_by_rounding_alone(in_groups):
    assert errors_of(in_groups, "rounded") == ({None}, True)
    (error,), saved = errors_of(in_groups, "not_rounded")
    assert error.startswith("Rank 3 parted from the others by step 3: 1 of ")
    assert not saved


def test_a_norm_that_counts_copies_wrongly_is_refused_after_the_probe_step(in_groups):
    (error,), saved = errors_of(in_groups, "counted_twice")
    assert "gradient norm that clips: asked" in error
    assert "(rank 0)" in error
    assert [seen["step"] for seen in in_groups["counted_twice"]] == [1] * 4
    assert not saved


def test_so_is_a_gradient_that_one_rank_of_a_tensor_group_has_otherwise(in_groups):
    (error,), saved = errors_of(in_groups, "one_gradient_apart")
    assert "gradient norm of model.layers.1.input_layernorm.weight: asked" in error
    assert not saved


def test_a_rank_that_falls_behind_is_named_and_the_run_goes_on(ranks):
    for name in runs_of(ranks, "slow", "slow_rows"):
        for seen in ranks[name]:
            assert seen["step"] == STEPS
            warnings = seen["record"]["guards"]["warnings"]
            assert [warning["kind"] for warning in warnings] == ["slow rank"], seen
            assert warnings[0]["text"].startswith(f"Rank 1 fell behind by step {BAD_STEP}: ")


def test_a_rank_that_falls_behind_stops_a_run_that_asked_for_it(ranks):
    for name in runs_of(ranks, "slow_stopped"):
        error, step = stopped(ranks, name)
        assert error.startswith(f"Rank 1 fell behind by step {BAD_STEP}: ")
        assert step <= BAD_STEP + 1


@pytest.mark.parametrize("engine", ["trainer", "loop"])
def test_a_run_that_a_guard_stops_says_so_in_one_sentence(
    engine, as_launched, tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    script = [str(SCRIPTS / "train_to_nan.py"), "--output_dir", str(tmp_path / "out")]
    script += ["--engine", engine, "--max_steps", "20", "--gradient_accumulation_steps", "1"]
    config = ROOT / "accelerate_configs" / "zero1.yaml"
    outcome = run(
        launch_command(config, script, num_processes=2),
        folder=tmp_path,
        timeout=300,
        num_processes=2,
        loopback=True,
    )
    assert outcome.status == "failed"
    assert outcome.reason.startswith("The loss of step 5 is not finite: nan on rank 1;")
    statuses = read_statuses(tmp_path / "status")
    assert [status.state for status in statuses] == ["failed", "failed"]
    assert {status.error.message for status in statuses} == {outcome.reason}
    assert not (tmp_path / "out" / "final").exists()
    assert not (tmp_path / "out" / "record.json").exists()


def without(calls, others):
    """Return the calls that are left when each of the others is taken away once."""
    left = list(calls)
    for other in others:
        left.remove(other)
    return left
