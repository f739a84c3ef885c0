"""What a comparison is told before its first run: what each strategy gets, or why one can't."""

import json

import pytest
from small_models import small_of
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.comparing.predicted import expect, facts_of
from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.plan import build_plan
from toolkit.comparing.run.rows import _run_facts
from toolkit.errors import UsageError
from toolkit.planning.of_run import job_of
from toolkit.training.model import build_model
from toolkit.training.preflight import preflight
from toolkit.training.preflight_process import main

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ROWS = ("--max_train_samples", "40")


def on(facts, strategy):
    return facts["by_strategy"][strategy]["speed"]["on"]


def with_tokenizer(folder, model):
    """Save a model beside the built-in tokenizer, and return the flags that name both."""
    model.save_pretrained(folder)
    return ("--model_name_or_path", str(folder), "--tokenizer_name", str(build_model()))


def opt(**changes):
    shape = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"word_embed_proj_dim": 32, "vocab_size": 2048}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("opt", **shape | changes))


@pytest.mark.parametrize(
    ("flags", "strategies", "said"),
    [
        (["--ddp_bucket_view", "true"], ["ddp", "fsdp"], "is for ddp, and this is fsdp"),
        (["--sync_each_batch", "true"], ["fsdp", "zero2"], "and ddp, and this is zero2"),
        (["--optim", "adafactor"], ["ddp", "fsdp"], "cannot step on parameters that FSDP2 shards"),
        (["--compile_blocks", "true"], ["ddp", "zero3"], "gains nothing under ZeRO-3"),
        (["--method", "lora", "--dtype", "bfloat16"], ["ddp", "zero2"], "zero2 computes in fp32"),
        (["--checkpoint_layers", "99"], ["ddp"], "the model has only"),
    ],
)
def test_what_one_strategy_of_a_comparison_cannot_do_is_refused_for_all(
    flags, strategies, said, cache, capfd
):
    assert main(["--strategies", ",".join(strategies), *ROWS, *flags]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert ("All strategies of a comparison" in printed.err) is (len(strategies) > 1)
    assert "Traceback" not in printed.err


@pytest.mark.parametrize("kind", ["qwen2", "gpt_neox"])
@pytest.mark.parametrize("row", [{"text": "a b"}, {"messages": CHAT}], ids=["text", "chat"])
def test_a_model_folder_without_tokenizer_files_is_refused_as_that(kind, row, cache, tmp_path):
    small_of(kind, "eager").save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    flags = ["--model_name_or_path", str(tmp_path / "model")]
    flags += ["--train_file", str(tmp_path / "rows.jsonl")]
    with pytest.raises(UsageError, match=r"has \d tokens? and the model 64 ids: .*files of it are"):
        preflight(flags, strategies=["ddp"])


WORDS = "a b c d e f g h "


def prepared_length(folder, *texts, more=()):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = ["--train_file", str(path), "--per_device_train_batch_size", "1", *more]
    return preflight([*flags, "--gradient_accumulation_steps", "1"], strategies=["single"])["data"]


def test_rows_of_the_user_are_as_long_as_the_longest_unless_flags_say_otherwise(
    cache, tmp_path, caplog
):
    caplog.set_level("INFO")
    texts = [WORDS, WORDS * 20, WORDS * 3]
    data = prepared_length(tmp_path, *texts)
    assert data["max_length"] == data["longest"] == data["longest_text"] > 128
    assert (data["truncated"], data["lost_tokens"]) == (0, 0)
    assert "are cut" not in caplog.text
    cut = prepared_length(tmp_path, *texts, more=["--max_length", "32"])
    assert (cut["max_length"], cut["longest_text"]) == (32, data["longest"])
    assert cut["lost_tokens"] == data["tokens"] - cut["tokens"] > 0
    share = cut["lost_tokens"] / data["tokens"]
    assert f"{cut['truncated']} of 3 texts are cut to --max_length" in caplog.text
    assert f"the {share:.1%} of all tokens behind are not trained on" in caplog.text
    assert f"--max_length {data['longest']} keeps all" in caplog.text
    # Packed rows are full, as long as was asked.
    packed = prepared_length(tmp_path, *texts * 20, more=["--packing", "best_fit"])
    assert packed["max_length"] == 512


def test_no_row_is_longer_than_the_positions_of_the_model(cache, tmp_path):
    model = small_of("llama", "sdpa", vocab_size=2048, max_position_embeddings=64)
    flags = with_tokenizer(tmp_path / "model", model)
    data = prepared_length(tmp_path, WORDS, WORDS * 20, more=flags)
    assert (data["max_length"], data["longest"], data["truncated"]) == (64, 64, 1)


MODELS = {
    "gemma2": ({}, {"context": "its attention is eager", "ulysses": "its attention is eager"}),
    "mistral": ({"sliding_window": 8}, {"context": "slides over 8", "ulysses": "slides over 8"}),
    "gpt_neox": ({}, {"context": "self_attn", "ulysses": "does not tell num_key_value_heads"}),
    "qwen3_moe": (
        {},
        dict.fromkeys(("context", "ulysses"), "its forward fails on the meta device"),
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_strategy_that_cannot_take_the_model_is_told_with_its_reason_and_the_others_stay(
    kind, cache, tmp_path, capfd
):
    changes, reasons = MODELS[kind]
    attention = "eager" if kind == "gemma2" else "sdpa"
    model = small_of(kind, attention, vocab_size=2048, **changes)
    if kind == "gpt_neox":  # its own config has no such field
        del model.config.num_key_value_heads
    flags = [*ROWS, "--engine", "loop", "--dropout", "off", "--max_length", "64"]
    flags += with_tokenizer(tmp_path, model)
    names = ["ddp", *reasons]
    asked = [f"--strategies={','.join(names)}", f"--ranks={','.join(f'{n}:2' for n in names)}"]
    assert main([*asked, *flags]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert [entry["strategy"] for entry in facts["unfit"]] == [*reasons]
    for entry in facts["unfit"]:
        assert entry["num_processes"] == 2
        assert reasons[entry["strategy"]] in entry["reason"]
    # Where it is the control, or is to train alone, there is nothing to go on with.
    assert main(["--strategies=context,ddp", "--ranks=context:2,ddp:2", *flags]) == 2
    assert reasons["context"] in capfd.readouterr().err


def test_each_number_of_ranks_is_told_by_itself(cache):
    flags = [*ROWS, "--engine", "loop", "--gradient_accumulation_steps", "4"]
    ranks = {"ulysses": [2, 4], "pipeline": [2, 6], "tensor": [2]}
    facts = preflight(flags, num_processes=1, strategies=["single", *ranks], ranks=ranks)
    unfit = {(one["strategy"], one["num_processes"]): one["reason"] for one in facts["unfit"]}
    assert unfit.keys() == {("ulysses", 4), ("pipeline", 6)}
    assert "2 key-value heads don't divide by the 4 ranks" in unfit["ulysses", 4]
    assert "too few for 6 stages" in unfit["pipeline", 6]


def test_every_strategy_that_cannot_is_named_at_once(cache):
    flags = ["--ddp_bucket_view", "true", *ROWS]
    with pytest.raises(UsageError, match=r"this is zero2.*this is fsdp"):
        preflight(flags, strategies=["ddp", "zero2", "fsdp"])
    assert on(preflight(flags, strategies=["ddp"]), "ddp") == {"ddp_bucket_view": True}


def test_gradients_are_synchronised_at_every_micro_batch_where_there_is_another_rank(cache):
    facts = preflight(["--sync_each_batch", "true", *ROWS], strategies=["single", "ddp", "fsdp"])
    wanted = {"sync_each_batch": True}
    assert [on(facts, name) for name in ("single", "ddp", "fsdp")] == [{}, wanted, wanted]


def test_liger_is_refused_where_the_runs_are_rehearsed(cache):
    with pytest.raises(UsageError, match="--use_liger_kernel needs a GPU"):
        preflight(["--use_liger_kernel", "true", *ROWS], strategies=["ddp"], rehearsal=True)


def test_a_loss_that_is_not_proven_for_the_model_is_refused_before_any_rank(cache, tmp_path):
    flags = [*with_tokenizer(tmp_path, opt()), *ROWS]
    with pytest.raises(UsageError, match="chunked: not proven for OPTForCausalLM"):
        preflight([*flags, "--loss_impl", "chunked"], strategies=["ddp"])
    facts = preflight([*flags, "--tuned", "true"], strategies=["ddp"])
    assert "loss_impl" not in on(facts, "ddp")
    assert "not proven for OPT" in facts["by_strategy"]["ddp"]["speed"]["left_out"]["loss_impl"]


def test_each_strategy_is_told_the_switches_that_it_will_have(cache):
    facts = preflight(
        ["--tuned", "true", "--checkpoint_layers", "all", *ROWS],
        strategies=["single", "ddp", "zero2", "fsdp"],
    )
    everywhere = {"loss_impl", "loss_chunk_tokens", "lean_masks", "checkpoint_layers"}
    assert on(facts, "single").keys() == everywhere
    assert on(facts, "ddp").keys() == everywhere | {"ddp_bucket_view"}
    assert on(facts, "zero2").keys() == everywhere
    assert on(facts, "fsdp").keys() == everywhere | {"fsdp_prefetch"}
    optimizers = {name: each["optimizer"] for name, each in facts["by_strategy"].items()}
    fused = "adamw_torch_fused"
    assert optimizers == {"single": fused, "ddp": fused, "zero2": "adamw_torch", "fsdp": fused}
    assert all(each["activation_checkpointing"] for each in facts["by_strategy"].values())
    assert facts["training"]["optimizer"] == fused  # of the first


def test_a_run_without_a_record_is_predicted_with_the_switches_that_it_had(cache):
    flags = ("--tuned", "true", "--loss_chunk_tokens", "32")  # fewer than a micro-batch has
    options = CompareOptions(strategies=["ddp", "zero2"], train_flags=flags)
    plan = build_plan(options, gpus=2, missing=lambda _: None)
    first = plan.runs[0]
    names = [each.strategy.name for each in plan.runs]

    def told(flags):
        facts = facts_of(json.loads(json.dumps(preflight([*flags, *ROWS], strategies=names))))
        return {each.strategy.name: _run_facts(each, facts) for each in plan.runs}

    tuned, plain = told(first.flags), told(first.flags[: -len(options.train_flags)])
    jobs = {name: job_of(each) for name, each in tuned.items()}
    assert all(each.chunked_loss for each in jobs.values())
    assert {name: each.optimizer for name, each in jobs.items()} == {
        "single": "adamw_fused",
        "ddp": "adamw_fused",
        "zero2": "adamw",
    }
    assert [name for name, each in jobs.items() if each.gradient_as_bucket_view] == ["ddp"]
    assert not any(job_of(each).chunked_loss for each in plain.values())
    assert expect(tuned["ddp"])["peak_bytes"]["high"] < expect(plain["ddp"])["peak_bytes"]["high"]


def test_fused_experts_are_said_before_a_launch(cache, tmp_path, caplog):
    small = small_of("qwen3_moe", "sdpa")
    small.resize_token_embeddings(2048)
    flags = with_tokenizer(tmp_path, small)
    with caplog.at_level("INFO"):
        facts = preflight([*flags, *ROWS, "--method", "lora"], strategies=["ddp"])
    assert "fused experts" in caplog.text
    assert 0 < facts["training"]["fused_experts"] < 1


def test_the_model_is_asked_only_where_a_switch_is_put_on_it(cache, monkeypatch):
    monkeypatch.setattr("toolkit.training.preflight.meta_model", None)
    assert on(preflight(list(ROWS), strategies=["ddp"]), "ddp") == {}
    with pytest.raises(TypeError):
        preflight(["--tuned", "true", *ROWS], strategies=["ddp"])


def test_what_flags_name_is_looked_for_before_anything_is_built(tmp_path, monkeypatch):
    """All that is missing is named at once, and the cache stays as it was."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.xml").write_text("<rows/>")
    flags = {
        "--train_file": "missing.jsonl",
        "--validation_file": "rows.xml",
        "--model_name_or_path": "model",
        "--tokenizer_name": "./missing",
        "--chat_template": "missing.jinja",
    }
    with pytest.raises(UsageError) as caught:
        preflight([word for pair in flags.items() for word in pair])
    for said in (
        f"--train_file missing.jsonl is not there: check the path (this is {tmp_path})",
        "--validation_file rows.xml ends in '.xml'",
        "--model_name_or_path model is a folder without config.json",
        "--tokenizer_name ./missing is not there",
        "--chat_template missing.jinja is no file that can be read",
    ):
        assert said in str(caught.value)
    with pytest.raises(UsageError, match="--dataset_name data/of/mine is not there"):
        preflight(["--dataset_name", "data/of/mine"])
    with pytest.raises(UsageError, match=r"--accelerator_config no\.json: there is no such file"):
        preflight(["--accelerator_config", "no.json"])
    assert not (tmp_path / "cache").exists()
