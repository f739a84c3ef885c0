"""A comparison of GPT-2 with its default dropout holds every gate, and says what became of it."""

import json

import pytest

from toolkit.records.record import read_record
from toolkit.records.results import read_results

SAID = "set to 0 in every run (own values: resid_pdrop 0.1, embd_pdrop 0.1, attn_pdrop 0.1)"


@pytest.fixture(scope="module")
def compared(toolkit, tmp_path_factory):
    from transformers import AutoModelForCausalLM, GPT2Config, set_seed

    from toolkit.data.tokens import load_tokenizer
    from toolkit.training.model import build_model

    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = load_tokenizer(build_model())
    tokenizer.save_pretrained(folder / "model")
    set_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=2, n_positions=128)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    runs = folder / "runs"
    done = toolkit(
        *("compare", "--strategies", "single,ddp", "--max_steps", 4, "--throughput_steps", 0),
        *("--output", runs, "--", "--model_name_or_path", folder / "model", "--max_length", 128),
    )
    return done, runs


def test_every_gate_holds_and_dropout_is_said_once(compared):
    done, runs = compared
    assert done.returncode == 0, done.stdout
    ddp = next(row for row in read_results(runs)["runs"] if row["strategy"] == "ddp")
    assert ddp["gates"].keys() >= {"loss", "grad_norm", "weights", "data"}
    assert all(ddp["gates"].values()), ddp["broken"]
    assert ddp["gradient_difference"]["value"] < 1e-4
    words = " ".join(done.stdout.split())
    assert words.count(f"Dropout is {SAID}") == 1, done.stdout


def test_the_report_says_it_among_the_limits(compared):
    _, runs = compared
    limits = (runs / "report.md").read_text().partition("## Limits")[2]
    assert "Dropout was set to 0 in every run" in limits


def test_what_is_saved_has_the_models_own_dropout_and_the_record_says_what_was_trained(compared):
    _, runs = compared
    config = json.loads((runs / "ddp-trainer-1" / "final" / "config.json").read_text())
    assert {config[name] for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")} == {0.1}
    record = read_record(runs / "ddp-trainer-1")
    assert record["training"]["dropout"] == "off"
    assert record["random_forward"] is None
