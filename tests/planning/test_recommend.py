import json
import re
import shlex
from dataclasses import replace
from html import escape
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from toolkit.cli import app
from toolkit.data.arguments import DataArguments
from toolkit.errors import UsageError
from toolkit.jobs.options import USUAL_STRATEGIES
from toolkit.jobs.terms import Interval
from toolkit.planning.learning_rate import LearningRate
from toolkit.planning.levers import CHECKPOINTING, SELECTIVE
from toolkit.planning.memory.estimate import estimate_memory
from toolkit.planning.plan import plan
from toolkit.planning.recommend import recommend
from toolkit.planning.render.commands import paste_line
from toolkit.planning.render.recommendations import (
    describe_job,
    recommendation_lines,
    write_recommendation,
)
from toolkit.planning.search import FULL, RUNGS, SAME_SPEED, SHARDED, SPLIT, WHOLE, Search, rank
from toolkit.strategies import STRATEGIES
from toolkit.training.arguments import own_arguments

GRID = [
    (model, gpu, gpus)
    for model in ("125m", "1b", "7b", "13b", "70b")
    for gpu in ("T4", "L4", "A100-80")
    for gpus in (1, 2, 8)
]


@pytest.fixture(scope="module")
def answers():
    return {
        (model, gpu, gpus): recommend(model, gpu=gpu, gpus=gpus, global_batch=32)
        for model, gpu, gpus in GRID
    }


def test_what_is_recommended_fits_for_sure_and_keeps_the_global_batch(answers):
    assert sum(found.choice is not None for found in answers.values()) > len(answers) / 2
    for asked, found in answers.items():
        for one in (found.choice, *found.runners_up):
            if one is None:
                continue
            assert one.verdict.fits, asked
            assert one.job.batch * one.job.accumulation * one.job.readers == 32, asked
            assert one.job.gpus == asked[2]


def test_a_plan_of_the_choice_says_the_same(answers):
    for (model, gpu, gpus), found in answers.items():
        if found.choice is None:
            continue
        job = found.choice.job
        again = plan(
            model,
            gpu=gpu,
            gpus=gpus,
            strategies=job.strategy.name,
            tensor_size=job.strategy.tensor if job.strategy.tensor > 1 else None,
            method=job.method,
            batch=job.batch,
            accumulation=job.accumulation,
            optimizer=job.optimizer,
            checkpointing=job.checkpointing == "full",
            sync_each_batch=job.sync_each_batch,
            chunked_loss=job.chunked_loss,
        )
        # A plan has Liger's chunks, the choice those of toolkit.train, and more switches.
        as_run = replace(
            again.rows[0].job,
            loss_chunk_tokens=1024 if job.chunked_loss else None,
            gradient_as_bucket_view=job.gradient_as_bucket_view,
            dtype=job.dtype,
            checkpointing=job.checkpointing,
        )
        assert estimate_memory(as_run).total == found.choice.verdict.needed


def test_a_model_that_fits_whole_is_trained_whole(answers):
    for (model, gpu, gpus), found in answers.items():
        if found.choice is None:
            continue
        whole = plan(model, gpu=gpu, gpus=gpus, strategies="ddp" if gpus > 1 else "single")
        if whole.rows[0].verdict.answer == "fits" and found.choice.job.method == "full":
            assert found.choice.job.strategy.name in WHOLE, (model, gpu, gpus)
            assert "comes first" in " ".join(found.reasons)


def test_a_model_that_does_not_fit_whole_is_sharded_and_the_reasons_say_why():
    found = recommend("7b", gpu="A100-80", gpus=8, global_batch=32)
    assert found.choice.job.strategy.name in SHARDED
    assert found.choice.job.method == "full"
    said = " ".join(found.reasons)
    assert "does not fit on one A100" in said
    assert "ddp does not fit" in said
    assert "GiB short" in said


def test_full_before_lora_before_qlora():
    methods = [
        recommend(model, gpu="L4", gpus=2).choice.job.method for model in ("125m", "3b", "34b")
    ]
    assert methods[0] == "full"
    assert methods == sorted(methods, key=["full", "lora", "qlora"].index)
    assert methods[-1] != "full"


def test_a_method_that_was_asked_for_is_kept_or_nothing_fits():
    found = recommend("70b", gpu="T4", gpus=2, method="full", host_gib=64)
    assert found.choice is None
    assert found.closest.job.method == "full"
    assert "Nothing fits for sure" in " ".join(found.reasons)


def test_an_offload_is_held_against_the_ram_of_the_node():
    rich = recommend("13b", gpu="L4", gpus=2, method="full", host_gib=1000)
    assert rich.choice.job.strategy.offloads
    poor = recommend("13b", gpu="L4", gpus=2, method="full", host_gib=50)
    assert poor.choice is None
    unknown = recommend("13b", gpu="L4", gpus=2, method="full")
    assert unknown.choice.job.strategy.offloads
    assert unknown.choice.verdict.answer == "fits with RAM"
    assert "--host-gib" in unknown.reasons[-1]


def test_a_gpu_without_bf16_gets_fp16_and_a_word_why(answers):
    found = answers["125m", "T4", 2]
    assert found.choice.job.precision == "fp16"
    assert any("no bf16" in reason for reason in found.reasons)
    assert answers["125m", "L4", 2].choice.job.precision == "bf16"
    for precision, word in (("no", "fp32"), ("fp16", "fp16")):
        described = describe_job(replace(found.choice.job, precision=precision))
        assert f" accumulated, {word}" in described


def test_the_goal_of_memory_finds_the_least_of_it():
    lean = recommend("1b", gpu="A100-80", gpus=8, goal="memory")
    fast = recommend("1b", gpu="A100-80", gpus=8, goal="speed")
    assert lean.choice.verdict.needed.high < fast.choice.verdict.needed.high
    assert lean.choice.tokens_per_second <= fast.choice.tokens_per_second
    for one in lean.runners_up:
        assert one.verdict.needed.high >= lean.choice.verdict.needed.high


def test_runners_up_are_two_other_strategies(answers):
    for found in answers.values():
        names = [one.job.strategy.name for one in (found.choice, *found.runners_up) if one]
        assert len(set(names)) == len(names) <= 3


def test_learning_rates_after_the_two_rules():
    rate = LearningRate(base=2e-5, base_batch=16, batch=64)
    assert (rate.by("linear"), rate.by("sqrt")) == (rate.linear, rate.square_root)
    assert rate.linear == pytest.approx(8e-5)
    assert rate.square_root == pytest.approx(4e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"global_batch": 31, "method": "lora"}, "can't be spread over 2 GPUs"),
        ({"global_batch": 0}, "can't be spread"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"base_batch": -1}, "base_batch is -1"),
        ({"gpu": "L5"}, "L5"),
    ],
)
def test_a_mistake_is_one_sentence(options, said):
    with pytest.raises(UsageError, match=said):
        recommend("1b", **{"gpu": "L4", "gpus": 2} | options)


def test_a_batch_that_only_strategies_spread_which_cannot_step_is_a_mistake():
    # 62 layers make no pipeline of 64, and paged states are not cut into tensor groups.
    batch = {"gpu": "T4", "gpus": 64, "global_batch": 8}
    with pytest.raises(UsageError, match="8 rows can't be spread over 64 GPUs"):
        recommend("google/gemma-3-27b-it", **batch, optimizer="paged_adamw")


def test_the_files_that_are_written_are_those_of_the_command(tmp_path):
    found = recommend("125m", gpu="L4", gpus=2, learning_rate=1e-4, base_batch=8)
    words = write_recommendation(found, tmp_path)
    config = words[words.index("--config_file") + 1]
    assert config == str(tmp_path / f"{found.choice.job.strategy.name}.yaml")
    assert (tmp_path / f"{found.choice.job.strategy.name}.yaml").exists()
    line = shlex.join(words)
    assert "-m toolkit.train" in line
    assert "--learning_rate 0.0004" in line
    assert "--bf16 True" in line
    with pytest.raises(UsageError):
        write_recommendation(found, tmp_path)


def test_the_flags_of_the_command_are_flags_of_the_script(tmp_path, monkeypatch):
    from toolkit.training.arguments import (
        own_arguments,
        training_arguments,
        training_values,
    )

    for model, gpus in (("125m", 2), ("7b", 8)):
        found = recommend(model, gpu="A100-80", gpus=gpus)
        words = write_recommendation(found, tmp_path / model)
        flags = words[words.index("toolkit.train") + 1 :]
        # bf16 is for GPUs; the parser itself would say so here.
        own = own_arguments([word for word in flags if word not in ("--bf16", "True")])
        args = training_arguments(training_values(own))
        assert args.per_device_train_batch_size == found.choice.job.batch
        assert args.gradient_accumulation_steps == found.choice.job.accumulation


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_are_trained_by_the_command_that_is_written(method, tmp_path):
    from toolkit.training.arguments import own_arguments

    found = recommend("3b", gpu="L4", gpus=2, method=method)
    words = write_recommendation(found, tmp_path)
    own = own_arguments(words[words.index("toolkit.train") + 1 :])
    assert (own.method.method, own.method.lora_r) == (method, found.choice.job.lora_rank)
    assert own.run.strategy == found.choice.job.strategy.name
    reasons = " ".join(found.reasons)
    assert f"toolkit.train --method {method} --lora_r 16 trains them" in reasons
    assert "no adapters" not in reasons


def test_nodes_meet_at_a_port_and_a_count_is_no_model(tmp_path):
    found = recommend("7b", gpu="A100-80", gpus=16, nodes=2)
    line = shlex.join(write_recommendation(found, tmp_path))
    assert "--num_machines 2 --machine_rank RANK --main_process_ip ADDRESS" in line
    assert "--main_process_port 29500" in line
    assert "--model_name_or_path MODEL" in line
    assert f"--strategy {found.choice.job.strategy.name}" in line


def test_a_plan_of_hybrid_sharding_has_a_group_in_each_node():
    found = plan("7b", gpu="H100", gpus=32, strategies="fsdp_hybrid,fsdp")
    hybrid, fsdp = found.rows
    assert (hybrid.strategy.replicas, hybrid.job.nodes) == (4, 4)
    assert any("fsdp_hybrid is planned in 4 groups" in note for note in found.notes)
    parameters = [row.memory.by_category()["parameters"].high for row in (hybrid, fsdp)]
    assert parameters[0] == pytest.approx(4 * parameters[1], rel=0.01)
    with pytest.raises(UsageError, match="4 groups of at least 2 processes"):
        plan("7b", gpu="H100", gpus=4, nodes=4, strategies="fsdp_hybrid")


def test_without_known_ram_adapters_come_before_offload():
    assumed = recommend("7b", gpu="L4", gpus=2)
    assert assumed.choice.job.method == "lora"
    known = recommend("7b", gpu="L4", gpus=2, host_gib=1000)
    assert known.choice.job.strategy.offloads
    assert known.choice.job.method == "full"


def test_close_calls_go_to_the_simpler_strategy_and_ddp_is_never_passed_over_in_silence(answers):
    for asked, found in answers.items():
        if found.choice is None or asked[2] == 1:
            continue
        job = found.choice.job
        for other in found.runners_up:
            assert other.tokens_per_second * SAME_SPEED <= found.choice.tokens_per_second or (
                job.strategy.name in WHOLE or not other.is_roomy
            )
        if job.strategy.name != "ddp":
            assert any(reason.startswith("ddp ") for reason in found.reasons), asked


def test_every_optimizer_has_a_flag():
    from typing import get_args

    from transformers.training_args import OptimizerNames

    from toolkit.jobs.options import OPTIM_FLAGS, Optimizer

    assert set(get_args(Optimizer)) == set(OPTIM_FLAGS)
    assert set(OPTIM_FLAGS.values()) <= {one.value for one in OptimizerNames}


def test_a_strategy_under_which_the_optimizer_cannot_step_is_left_out_and_it_is_said():
    found = recommend("0.5b", gpu="L4", gpus=2, optimizer="adafactor")
    names = {one.job.strategy.name for one in (found.choice, *found.runners_up)}
    assert "fsdp" not in names
    assert any(
        "adafactor cannot step under" in reason and "fsdp" in reason for reason in found.reasons
    )


def test_a_recommendation_is_plain_data_and_escaped_html(answers):
    for found in answers.values():
        data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
        assert data["schema"] == 1
        assert (data["choice"] is None) != (data["closest"] is None)
        assert repr(found) == "\n".join(recommendation_lines(found))
        html = found._repr_html_()
        assert "<script" not in html
        for option in found.options:
            assert f"<pre>{escape(paste_line(option))}</pre>" in html
            assert escape("; ".join(option.gives_up)) in html


# The order of what fits


def candidate(name, rate, *, checkpointing="none", sync=False, margin=0, low=0, high=0, roomy=True):
    """Return what `rank` looks at."""
    return SimpleNamespace(
        job=SimpleNamespace(
            strategy=STRATEGIES[name], checkpointing=checkpointing, sync_each_batch=sync
        ),
        whole_and_plain=name in WHOLE and checkpointing == "none",
        is_roomy=roomy,
        tokens_per_second=rate,
        verdict=SimpleNamespace(worst_margin_bytes=margin, needed=Interval(low, high)),
    )


def names(candidates, goal="speed"):
    return [ranked.job.strategy.name for ranked in rank(candidates, goal)]


def test_what_is_as_fast_as_the_estimate_can_tell_goes_to_the_simpler():
    fastest, close, apart = (
        candidate("zero3", 1000),
        candidate("fsdp", 851),
        candidate("zero2", 849),
    )
    assert names([fastest, close, apart]) == ["fsdp", "zero3", "zero2"]
    assert names([fastest, apart]) == ["zero3", "zero2"]


def test_of_what_is_as_fast_the_one_that_leaves_room_comes_first():
    full, roomy = candidate("zero2", 1000, roomy=False), candidate("fsdp", 900)
    assert names([full, roomy]) == ["fsdp", "zero2"]
    assert names([full, candidate("fsdp", 800)]) == ["zero2", "fsdp"]


def test_of_what_is_slower_the_faster_comes_first_however_simple():
    slow = [candidate("zero1", 300), candidate("zero2", 400), candidate("fsdp_hybrid", 500)]
    assert names([candidate("zero3", 1000), *slow]) == ["zero3", "fsdp_hybrid", "zero2", "zero1"]


def test_whole_and_without_checkpointing_comes_before_whatever_is_faster():
    assert names([candidate("zero3", 1000), candidate("ddp", 100)]) == ["ddp", "zero3"]
    again = candidate("ddp", 100, checkpointing="full")
    assert names([candidate("zero3", 1000), again]) == ["zero3", "ddp"]


def test_of_a_strategy_the_fastest_stands_and_of_equals_the_one_with_most_room():
    some, most = candidate("fsdp", 500, margin=1), candidate("fsdp", 500, margin=2)
    (best,) = rank([candidate("fsdp", 499, margin=9), some, most], "speed")
    assert best is most


def test_of_equals_the_one_with_less_traffic_stands_whatever_its_room():
    synced = candidate("fsdp", 500, sync=True, margin=2)
    assert rank([synced, candidate("fsdp", 500, margin=1)], "speed")[0] is not synced
    assert rank([synced, candidate("fsdp", 499)], "speed")[0] is synced


def test_gradients_are_synchronised_each_time_where_that_leaves_room(tmp_path):
    asked = {"gpu": "H100", "gpus": 8, "sequence": 32768}
    found = recommend("meta-llama/Llama-3.1-8B", global_batch=24, **asked)
    job = found.choice.job
    assert (job.strategy.name, job.accumulation, job.sync_each_batch) == ("fsdp", 3, True)
    assert found.choice.verdict.answer == "fits"
    (sentence,) = (reason for reason in found.reasons if "--sync_each_batch" in reason)
    assert "3 times a step, not once: each GPU sends" in sentence
    words = write_recommendation(found, tmp_path)
    assert words[words.index("--sync_each_batch") + 1] == "True"
    own = own_arguments(words[words.index("toolkit.train") + 1 :])
    assert own.speed.sync_each_batch
    # With one row a GPU, there is nothing to synchronise.
    at_once = recommend("meta-llama/Llama-3.1-8B", global_batch=8, **asked)
    assert not at_once.choice.job.sync_each_batch
    assert "--sync_each_batch" not in write_recommendation(at_once, tmp_path / "other")


def test_the_goal_of_memory_ranks_by_the_upper_end():
    wide = candidate("zero3", 900, low=1, high=30)
    narrow = candidate("fsdp", 100, low=20, high=29)
    assert names([wide, narrow], "memory") == ["fsdp", "zero3"]


def test_a_rate_is_the_geometric_mean_of_its_ends(answers):
    choice = answers["7b", "A100-80", 8].choice
    rate = choice.speed.tokens_per_second
    assert rate.low < rate.high
    assert choice.tokens_per_second == pytest.approx((rate.low * rate.high) ** 0.5)


def test_what_needs_ram_that_is_not_known_is_chosen_only_where_nothing_else_fits(answers):
    conditional = 0
    for found in answers.values():
        if found.choice is None or found.choice.verdict.answer == "fits":
            continue
        conditional += 1
        assert found.choice.job.strategy.offloads
        for method in ("full", "lora", "qlora"):
            model, gpu, gpus = found.model, found.gpu, found.choice.job.gpus
            lean = plan(
                model,
                gpu=gpu,
                gpus=gpus,
                method=method,
                checkpointing=True,
                strategies="single" if gpus == 1 else USUAL_STRATEGIES,
            )
            assert all(row.verdict.answer != "fits" for row in lean.rows)
    assert conditional


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "options"),
    [
        ("8b", "A100-80", 8, {}),
        ("7b", "H100", 2, {"host_gib": 300}),
        ("1b", "L4", 4, {"optimizer": "paged_adamw"}),
        ("13b", "H100", 16, {"nodes": 4, "internode_gbps": 10, "global_batch": 64}),
        ("meta-llama/Llama-3.1-8B", "H100", 8, {"method": "full", "sequence": 8192}),
    ],
)
def test_candidates_left_out_as_too_slow_would_change_no_answer(
    model, gpu, gpus, options, monkeypatch
):
    looked_at = []
    look = Search._under

    def under(search, *rest):
        found = look(search, *rest)
        assert not (found and found[0].fits) or all(candidate.fits for candidate in found)
        looked_at.append(len(found))
        return found

    monkeypatch.setattr(Search, "_under", under)
    answer = recommend(model, gpu=gpu, gpus=gpus, **options).to_dict()
    few = sum(looked_at)
    looked_at.clear()
    monkeypatch.setattr(Search, "_rate_to_beat", lambda *_: 0.0)
    assert recommend(model, gpu=gpu, gpus=gpus, **options).to_dict() == answer
    assert few < sum(looked_at)


@pytest.mark.parametrize(
    ("model", "gpu", "gpus"), [("8b", "A100-80", 8), ("1b", "L4", 4), ("13b", "H100", 16)]
)
def test_no_micro_batch_is_faster_than_the_rate_by_which_a_rung_is_left_out(model, gpu, gpus):
    base = recommend(model, gpu=gpu, gpus=gpus).choice
    search = Search(base=replace(base, job=replace(base.job, method="full")), global_rows=gpus * 6)
    free, selective, full = RUNGS
    for name in (*USUAL_STRATEGIES, *SPLIT):
        for strategy in filter(search.has_place, search.in_sizes(STRATEGIES[name])):
            rows = search._rows(strategy)
            for ladder in ((), free, free + selective, free + full):
                ways = [
                    search._candidate(FULL, ladder, search._job(strategy, batch))
                    for batch in range(1, rows + 1)
                    if rows % batch == 0
                ]
                bound = search._fastest_rate(ways[-1], ladder)
                ways += [search._synced_once(way, ladder) for way in ways]
                assert max(way.tokens_per_second for way in ways) <= bound * (1 + 1e-9), name


def test_whatever_would_fit_is_named_with_its_strategy_once():
    reasons = recommend("meta-llama/Llama-3.1-8B", gpu="L4", gpus=2).reasons
    (said,) = (reason for reason in reasons if reason.startswith("A full fine-tune fits with"))
    for way in said.removeprefix("A full fine-tune fits with ").split(", or "):
        named = re.findall(r"[a-z0-9_]+", way)
        assert sum(word in STRATEGIES for word in named) == 1, way


def test_replicas_in_one_node_are_not_looked_at(monkeypatch):
    seen = []
    look = Search._under

    def under(search, strategy, *rest):
        seen.append(strategy.name)
        return look(search, strategy, *rest)

    monkeypatch.setattr(Search, "_under", under)
    recommend("13b", gpu="A100-80", gpus=8, global_batch=32)
    assert "fsdp" in seen
    assert "fsdp_hybrid" not in seen
    seen.clear()
    recommend("13b", gpu="A100-80", gpus=16, nodes=2, global_batch=32)
    assert "fsdp_hybrid" in seen


@pytest.mark.parametrize("json_flag", [[], ["--json"]], ids=["text", "json"])
def test_where_nothing_fits_the_answer_is_printed_nothing_written_and_the_exit_code_is_1(
    json_flag, tmp_path
):
    words = [
        "recommend",
        "405b",
        "--gpu",
        "T4",
        "--host-gib",
        "64",
        "--write",
        str(tmp_path / "files"),
        *json_flag,
    ]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 1
    assert "nothing was written" in result.stderr
    assert list(tmp_path.iterdir()) == []
    if not json_flag:
        assert "misses the least" in result.stdout
        return
    answer = json.loads(result.stdout)
    assert answer["choice"] is answer["command"] is None
    assert answer["closest"]["verdict"]["answer"] != "fits"


@pytest.mark.parametrize(
    ("model", "tokens", "fits"),
    [
        ("Qwen/Qwen3-8B", 524_288, True),
        ("meta-llama/Llama-3.1-8B", 600_000, True),
        ("meta-llama/Llama-3.1-8B", 1_048_576, False),
        ("meta-llama/Llama-3.1-70B", 262_144, False),
    ],
)
def test_rows_too_long_for_a_full_fine_tune_are_answered_with_the_longest_that_fit(
    model, tokens, fits
):
    words = ["recommend", model, "--gpu", "H100", "--gpus", "8", "--seq", str(tokens)]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0 if fits else 1, "")
    assert ("nothing fits for sure" in result.stdout) is not fits
    longest = re.search(r"The longest row that fits .* here is ([\d,]+) tokens", result.stdout)
    assert tokens / 8 < int(longest[1].replace(",", "")) < tokens


def test_a_strategy_that_cannot_take_the_job_is_passed_over():
    found = recommend("125m", gpu="L4", gpus=4, sequence=524_288, attention="eager")
    assert found.choice is None
    assert not found.closest.job.backend.splits_rows  # which have no mask for eager attention


def test_a_recommendation_for_many_gpus_names_nodes_and_network_that_it_assumes():
    answer = recommend("7b", gpu="H100", gpus=16, global_batch=32)
    assert answer.choice.job.nodes == 2
    reasons = " ".join(answer.reasons)
    assert "2 nodes of 8" in reasons
    assert "3,200 Gb/s" in reasons


def shown(found):
    return "\n".join(recommendation_lines(found))


def test_short_texts_are_said_to_need_packing_for_the_planned_rows():
    reasons = recommend("7b", gpu="H100", gpus=8, sequence=1536).reasons
    (reason,) = [reason for reason in reasons if "--packing" in reason]
    assert "rows of 1,536 tokens" in reason
    assert f"--packing {DataArguments(packing='best_fit').packing} " in reason


def test_hours_and_price_stand_beside_every_option_and_the_command_trains_so_many_steps(tmp_path):
    asked = {"gpu": "L4", "gpus": 2, "tokens": 10_000_000}
    found = recommend("7b", **asked, dollars_per_hour=0.7)
    cheaper = recommend("7b", **asked, dollars_per_hour=0.35)
    assert len(found.options) > 1
    for option, half in zip(found.options, cheaper.options, strict=True):
        assert option.cost.hours.low > 0
        assert option.cost.dollars.high == pytest.approx(2 * half.cost.dollars.high)
        assert option.cost.dollars.high == pytest.approx(option.cost.hours.high * 2 * 0.7)
        assert f"--max_steps {option.cost.steps}" in paste_line(option)
        assert option.cost.steps == -(-10_000_000 // (32 * 2048))
    assert f"--max_steps {found.options[0].cost.steps}" in shlex.join(
        write_recommendation(found, tmp_path)
    )
    assert "dollars" in shown(found)
    assert "name a price" in shown(recommend("7b", **asked))
    assert "hours for" not in shown(recommend("7b", gpu="L4", gpus=2))


def test_bounds_on_hours_and_dollars_pass_over_what_takes_too_long():
    asked = {"gpu": "A100-80", "gpus": 8, "dollars_per_hour": 0.7}
    free = recommend("7b", **asked)
    assert free.most_hours is None
    enough = recommend("7b", **asked, dollars=56, hours=48)
    assert enough.most_hours == pytest.approx(10)
    assert enough.choice.job == free.choice.job
    rate = free.choice.speed.tokens_per_second.low
    said = reason_about(enough, "10 hours are enough for")
    assert f"{rate * 36e3 / 1e6:,.3g} to" in said
    tokens = round(rate * 36e3)  # what the choice trains in ten hours at its slowest
    assert recommend("7b", **asked, hours=10.1, tokens=tokens).choice.job == free.choice.job
    quick = recommend("7b", **asked, hours=8, tokens=tokens)
    assert quick.choice.training.name == "a full fine-tune with 8-bit AdamW"
    assert quick.keeps_bounds
    assert reason_about(quick, "A full fine-tune fits, and takes longer")
    short = recommend("7b", **asked, hours=1, tokens=tokens)
    assert short.choice.job == free.choice.job
    assert not short.keeps_bounds
    with pytest.raises(UsageError, match="dollars needs the price of a GPU"):
        recommend("7b", gpu="A100-80", gpus=8, dollars=20)
    with pytest.raises(UsageError, match="hours is 0"):
        recommend("7b", gpu="A100-80", gpus=8, hours=0)
    words = [
        "recommend",
        "7b",
        "--gpu",
        "A100-80",
        "--gpus",
        "8",
        "--hours",
        "1",
        "--tokens",
        str(tokens),
        "--json",
    ]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["keeps_bounds"] is False


@pytest.mark.parametrize("day", ["2026-11-01", '"2026-11-01"'])
def test_prices_of_a_file_name_their_day_unless_another_price_is_given(day, tmp_path):
    file = tmp_path / "gpus.yaml"
    file.write_text(
        f"name: Mine\nmemory_mib: 22528\ncompute_capability: '8.9'\nbf16_tflops: 120\n"
        f"fp16_tflops: 120\nfp32_tflops: 30\nmemory_gb_per_second: 300\npcie: 4.0 x16\n"
        f"dollars_per_hour: 0.7\ndollars_date: {day}\n"
    )
    asked = {"gpu": "Mine", "gpu_file": file, "tokens": 1e7}
    assert "at the price of 2026-11-01" in shown(recommend("1b", **asked))
    assert "at the price of" not in shown(recommend("1b", **asked, dollars_per_hour=1.0))


def test_a_rate_is_that_of_the_method_that_was_named_or_of_a_full_fine_tune():
    def rates(**options):
        found = recommend("7b", gpu="L4", gpus=2, **options)
        return {o.candidate.job.method: o.learning_rate.base for o in found.options}

    assert rates() == {"lora": 2e-4, "full": 2e-5}
    assert rates(learning_rate=3e-5) == {"lora": pytest.approx(3e-4), "full": 3e-5}
    assert rates(learning_rate=3e-5, method="lora") == {"lora": 3e-5}


def test_without_a_global_batch_every_gpu_has_a_row():
    assert recommend("125m", gpu="H100", gpus=2).choice.job.step_tokens == 32 * 2048
    many = recommend("125m", gpu="H100", gpus=48)
    assert many.choice.job.batch * many.choice.job.accumulation * 48 == 48
    odd = recommend("125m", gpu="H100", gpus=3)
    assert odd.choice.job.batch * odd.choice.job.accumulation * 3 == 33


def test_an_offload_that_no_node_has_the_ram_for_is_not_offered():
    found = recommend("meta-llama/Llama-3.1-405B", gpu="H100", gpus=8, method="full")
    assert found.choice is None
    assert not found.closest.job.strategy.offloads
    rich = recommend(
        "meta-llama/Llama-3.1-405B", gpu="H100", gpus=8, method="full", host_gib=20_000
    )
    assert rich.choice.job.strategy.offloads


def test_one_gpu_pages_its_states_where_ram_is_known():
    found = recommend("3b", gpu="A100-40", gpus=1, method="full", host_gib=200)
    assert found.choice.job.optimizer == "paged_adamw"
    assert found.choice.job.strategy.name == "single"


def test_brackets_in_the_name_of_a_model_are_printed():
    found = recommend("125m", gpu="L4", gpus=2)
    named = replace(found, model=replace(found.model, name="[red]mine[/red]"))
    assert "[red]mine[/red]" in shown(named)


def test_what_an_option_gives_up_is_said_once_and_of_the_levers_that_it_has(answers):
    options = [option for found in answers.values() for option in found.options]
    assert len(options) > len(answers) / 2
    for option in options:
        in_full = option.candidate.job.checkpointing == "full"
        assert (CHECKPOINTING.price in option.gives_up) is in_full
        assert not (in_full and SELECTIVE.price in option.gives_up)


def test_a_way_out_names_its_strategy_once():
    (sentence,) = (s for s in recommend("3b", gpu="L4", gpus=1).reasons if "fine-tune fits" in s)
    assert "zero2_offload (" in sentence
    assert sentence.count("zero2_offload") == 1


def reason_about(found, words):
    (sentence,) = [reason for reason in found.reasons if words in reason]
    return sentence


def test_a_global_batch_below_the_gpus_is_split_over_groups_of_them():
    found = recommend("7b", gpu="H100", gpus=8, global_batch=4)
    job = found.choice.job
    assert job.backend.splits_model
    assert job.batch * job.accumulation * job.readers == 4
    assert "A multiple of 8 opens the others." in reason_about(found, "can't be dealt out")
    assert "groups of 2 GPUs x 1 accumulated keeps the global batch of 4" in " ".join(found.reasons)
    one = recommend("7b", gpu="H100", gpus=8, global_batch=1).choice.job
    assert one.readers == 1


def test_a_layer_too_large_for_one_gpu_is_split_by_the_strategies_that_can():
    # FSDP gathers two whole layers and has the gradients of one; a tensor group shares them.
    found = recommend("13b", gpu="A100-40", gpus=8, sequence=2048, global_batch=8)
    assert found.choice.job.method == "full"
    assert found.choice.job.strategy.name == "tensor"
    said = " ".join(found.reasons)
    for name in ("ddp", "fsdp", "zero3"):
        assert re.search(rf"\b{name} (does|may) not fit", said), name
    assert found.choice.verdict.fits
    assert f"tensor {found.choice.job.strategy.tensor})" in shown(found)
    assert "activations cross the wire in every layer" in shown(found)


def test_all_dimensions_at_once_are_chosen_where_no_single_one_is_as_good():
    # Over two nodes, tensor groups would shard across the network; stages hand on a little.
    found = recommend("13b", gpu="A100-40", gpus=16, sequence=2048, global_batch=2)
    assert found.choice.job.strategy.name == "three_d"
    assert found.choice.verdict.fits
    said = " ".join(found.reasons)
    assert "A multiple of 16 opens the others." in said
    assert re.search(r"\btensor_ddp (does|may) not fit", said)
    for name in ("tensor", "pipeline"):
        assert re.search(rf"\b{name} fits, at about \d+% of the choice's rate", said), name
    given_up = "; ".join(found.options[0].gives_up)
    assert "of the time, by slots" in given_up
    assert "activations cross the wire in every layer" in given_up


def test_why_the_model_is_not_split_is_one_sentence():
    found = recommend("1b", gpu="A100-80", gpus=4)
    sentence = reason_about(found, "Of the strategies that split the model")
    for name in ("tensor", "tensor_ddp", "pipeline", "three_d"):
        assert f"{name} (" in sentence
    assert "layer_split lets one GPU work at a time" in sentence
    assert not any(
        "split the model" in reason for reason in recommend("1b", gpu="L4", gpus=1).reasons
    )
    heads = reason_about(recommend("openai-community/gpt2", gpu="L4", gpus=2), "split the model")
    assert "does not know how tensor parallelism splits GPT2LMHeadModel" in heads
    adapters = recommend("34b", gpu="L4", gpus=2, method="qlora")
    assert "tensor, tensor_ddp, pipeline, three_d can train whole models only" in reason_about(
        adapters, "split the model"
    )
    no_loss_scale = recommend("1b", gpu="T4", gpus=2)
    assert "pipeline has no fp16" in reason_about(no_loss_scale, "split the model")


def test_tensor_groups_stay_inside_a_node_and_pipelines_span_nodes():
    base = recommend("7b", gpu="A100-80", gpus=16, nodes=4).choice
    search = Search(base=base, global_rows=32)
    sizes = {each.tensor for each in search.in_sizes(STRATEGIES["tensor"])}
    assert sizes == {2, 4}
    across = plan("7b", gpu="A100-80", gpus=16, nodes=4, strategies="tensor", tensor_size=8)
    assert any("don't lie inside nodes of 4" in note for note in across.all_notes)
    inside = plan("7b", gpu="A100-80", gpus=16, nodes=4, strategies="tensor", tensor_size=4)
    assert not any("don't lie inside" in note for note in inside.all_notes)
    wide, narrow = (each.rows[0].speed.tokens_per_second.high for each in (across, inside))
    assert wide < narrow
    assert search.has_place(STRATEGIES["pipeline"])


def test_the_command_of_a_split_has_its_engine_and_the_size_of_its_groups(tmp_path):
    found = recommend("13b", gpu="A100-40", gpus=8, sequence=2048, global_batch=8)
    size = found.choice.job.strategy.tensor
    line = paste_line(found.options[0])
    assert line.count("--engine loop") == 1
    wanted = "" if size == 2 else f" --tensor_size {size}"
    assert f'"$(toolkit configs path tensor{wanted})" --num_processes 8' in line
    write_recommendation(found, tmp_path)
    assert f"parallelism_config_tp_size: {size}" in (tmp_path / "tensor.yaml").read_text()
