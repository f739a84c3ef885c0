"""Two real processes train adapters on chats: saved, merged, loaded again, with equal losses."""

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
from places import ROOT
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from toolkit.comparing.predicted import STATES
from toolkit.records.record import STARTING_ADAPTER, read_record
from toolkit.records.results import read_results

pytestmark = pytest.mark.filterwarnings(
    # peft 0.21 asks transformers 5.23 by the old name (peft/peft_model.py, PeftModel.__init__).
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

STRATEGIES = ("ddp", "zero2", "zero3", "fsdp")
ENGINES = {"lora": "trainer", "qlora": "loop"}
PRECISION = {"lora": "bf16", "qlora": "no"}
BESIDE = {"lora": (), "qlora": ("--lora_embeddings",)}
WHOLE = {"base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"}
ROWS = 200
STEPS = 13
"""Of 16 rows: all of them, and 8 fillers."""

WORDS = ("river", "stone", "lamp", "green", "cloud", "seven", "paper", "north", "garden", "wheel")
QUESTION = [{"role": "user", "content": "Put river before stone."}]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Rows as OpenAI has them: what is asked names the words of the answer."""
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with file.open("w") as opened:
        for number in range(ROWS):
            one, other = WORDS[number % 10], WORDS[number // 10 % 10]
            asked = {"role": "user", "content": f"Put {one} before {other}."}
            said = {"role": "assistant", "content": f"{one} {other}, and that is {number} of 200."}
            opened.write(json.dumps({"messages": [asked, said]}) + "\n")
    return file


@pytest.fixture(scope="module", params=list(ENGINES))
def comparison(request, toolkit, small_training, chats, tmp_path_factory):
    """One method under every strategy, and the control that the comparison adds."""
    method = request.param
    folder = tmp_path_factory.mktemp(method) / "runs"
    done = toolkit(
        *("compare", "--strategies", ",".join(STRATEGIES), "--engine", ENGINES[method]),
        *("--precision", PRECISION[method]),
        *("--output", folder, "--max_steps", STEPS, "--throughput_steps", 0, "--"),
        *("--method", method, "--merge", "--max_length", 64, *BESIDE[method]),
        *("--train_file", chats, *small_training),
    )
    return method, done, folder, read_results(folder)


def rows_of(comparison):
    return {row["strategy"]: row for row in comparison[3]["runs"]}


def record_of(comparison, strategy):
    method, _, folder, _ = comparison
    return read_record(folder / f"{strategy}-{ENGINES[method]}-1")


def test_every_strategy_trains_adapters_and_every_gate_holds(comparison):
    method, done, _, _ = comparison
    assert done.returncode == 0, done.stdout
    found = rows_of(comparison)
    assert set(found) == {*STRATEGIES, "single"}
    for strategy, row in found.items():
        assert row["status"] == "ok", (strategy, row["reason"], row["tail"])
        assert all(row["gates"].values()), (strategy, row["broken"])
        assert row["attestation"]["held"] is True
        record = record_of(comparison, strategy)
        assert record["training"]["method"] == method
        assert record["training"]["lora_r"] == 16
        assert record["losses"][-1] < record["losses"][0] - 0.5, record["losses"]
    for strategy in STRATEGIES:
        assert found[strategy]["gates"].keys() >= {"loss", "grad_norm", "weights", "data"}


def test_only_adapters_are_trained_and_the_rest_is_sharded_all_the_same(comparison):
    method = comparison[0]
    for strategy in STRATEGIES:
        record = record_of(comparison, strategy)
        model, memory = record["model"], record["memory"]
        adapter = load_file(final_of(comparison, strategy) / "adapter_model.safetensors")
        trained = sum(tensor.numel() for tensor in adapter.values())
        whole = sum(adapter[name].numel() for name in WHOLE & adapter.keys())
        assert (whole > 0) == (method == "qlora")
        assert model["trained_parameters"] == trained
        assert trained - whole < model["parameters"] / 8
        assert memory["optimizer_bytes"] < 9 * trained
        if strategy == "ddp":
            assert memory["gradients_bytes"] == 4 * trained
        shards = 2 if strategy in ("zero3", "fsdp") else 1
        assert record["attestation"]["engaged"]["sharded_fraction"] == pytest.approx(
            1 / shards, abs=0.01
        )
        assert record["training"]["quant_storage"] == (None if method == "lora" else "float32")


def test_the_planner_predicts_bytes_and_traffic_of_adapters_too(comparison):
    for strategy, row in rows_of(comparison).items():
        assert row["predicted"]["reason"] is None, strategy
        errors = dict(row["predicted"]["errors"])
        # A CPU without bf16 instructions adds up each product in fp32 buffers.
        counted = errors.pop("counted_bytes")
        assert abs(counted) <= (0 if comparison[0] == "qlora" else 0.06), strategy
        assert errors == dict.fromkeys((*STATES, "traffic_bytes"), 0), strategy


def test_every_adapter_is_whole_loads_and_generates(comparison):
    method = comparison[0]
    answers = set()
    for strategy in (*STRATEGIES, "single"):
        final = final_of(comparison, strategy)
        record = record_of(comparison, strategy)
        config = PeftConfig.from_pretrained(str(final))
        assert config.base_model_name_or_path == record["model"]["path"]
        saved = load_file(final / "adapter_model.safetensors")
        assert len(saved.keys() - WHOLE) == 2 * 7 * 2
        assert (saved.keys() >= WHOLE) == (method == "qlora")
        assert all(tensor.any() for tensor in saved.values()), strategy
        assert saved.keys() == load_file(final.parent / STARTING_ADAPTER).keys()
        model = AutoPeftModelForCausalLM.from_pretrained(final)
        tokenizer = AutoTokenizer.from_pretrained(final)
        answers.add(answer(model, tokenizer))
        assert not list(final.glob("model*.safetensors"))
    assert len(answers) == 1, (method, answers)


def test_merged_models_are_ordinary_ones_and_equal_to_base_and_adapter(comparison):
    method = comparison[0]
    for strategy in STRATEGIES:
        final = final_of(comparison, strategy)
        merged, report = AutoModelForCausalLM.from_pretrained(
            final.parent / "merged", dtype="auto", output_loading_info=True
        )
        assert not any(report[keys] for keys in ("missing_keys", "unexpected_keys"))
        assert not hasattr(merged, "hf_quantizer")
        tokenizer = AutoTokenizer.from_pretrained(final.parent / "merged")
        assert answer(merged, tokenizer)
        base = AutoModelForCausalLM.from_pretrained(
            record_of(comparison, strategy)["model"]["path"]
        )
        adapted = PeftModel.from_pretrained(base, final).merge_and_unload().state_dict()
        ours = merged.state_dict()
        assert ours.keys() == adapted.keys()
        away = max(float((ours[name] - adapted[name]).abs().max()) for name in ours)
        # NF4's values are 0.3 of the largest of a block apart at most, and half of that is lost.
        # A rounding to bf16 loses up to 2^-8 of a value: the base is rounded, then the sum.
        low, high = (
            (0, 2**-7 * largest(merged)) if method == "lora" else (1e-3, 0.16 * largest(base))
        )
        assert low <= away < high, strategy
        head = adapted["lm_head.weight"]
        assert torch.equal(ours["lm_head.weight"], head.to(merged.dtype))


def largest(model):
    matrices = [weight for weight in model.state_dict().values() if weight.dim() == 2]
    return max(float(weight.abs().max()) for weight in matrices)


def final_of(comparison, strategy):
    method, _, folder, _ = comparison
    return folder / f"{strategy}-{ENGINES[method]}-1" / "final"


def answer(model, tokenizer):
    asked = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**asked, max_new_tokens=8, do_sample=False)
    return tuple(said[0, asked["input_ids"].shape[1] :].tolist())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--method", "lora", "--lora_target_modules", "q_prj"), "near: q_proj"),
        (("--merge",), "there are no adapters with --method full"),
    ],
)
def test_what_cannot_work_is_refused_before_a_launch(toolkit, tmp_path, flags, said):
    done = toolkit(
        *("compare", "--strategies", "ddp", "--output", tmp_path / "runs", "--max_steps", 2),
        *("--", *flags),
    )
    assert done.returncode == 2, done.stdout
    assert said in " ".join(done.stdout.split())
    assert not list(tmp_path.rglob("record.json"))


def test_somebodys_peft_model_is_whole_where_the_stock_trainer_leaves_nothing(launch, tmp_path):
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=128, num_attention_heads=4, num_key_value_heads=2, **shape)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    checked_in = (ROOT / "accelerate_configs" / "fsdp.yaml").read_text()
    assert "FULL_STATE_DICT" in checked_in
    sharded = tmp_path / "sharded.yaml"
    sharded.write_text(checked_in.replace("FULL_STATE_DICT", "SHARDED_STATE_DICT"))
    script = ROOT / "tests" / "scripts" / "train_peft.py"
    done = launch(*(sharded, "-m", "toolkit.rehearse", script, tmp_path / "base", tmp_path / "own"))
    assert done.returncode == 0, done.stdout
    saved = load_file(tmp_path / "own" / "final" / "adapter_model.safetensors")
    assert len(saved) == 2 * 7 * 2
    assert all(tensor.any() for tensor in saved.values())
    assert AutoPeftModelForCausalLM.from_pretrained(tmp_path / "own" / "final")
    record = json.loads((tmp_path / "own" / "record.json").read_text())
    assert record["attestation"]["engaged"]["sharded_fraction"] == pytest.approx(0.5, abs=0.01)
