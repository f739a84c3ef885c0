"""The model card: facts and nothing else, and never in the place of a user's own."""

import pytest
import yaml
from accelerate import Accelerator
from small_models import tiny_llama

from toolkit import ToolkitTrainer
from toolkit.training.built_in_data import BUILT_IN_DATA
from toolkit.training.card import CARD_FILE, MARKER, Card, card_of_run, hub_name_of, shown_name
from toolkit.training.committing import check
from toolkit.training.model import BUILT_IN_MODEL
from toolkit.training.saving import save_model

EVALUATION = [
    {"step": 0, "loss": 2.0, "perplexity": 7.389, "tokens": 50, "rows": 6, "seconds": 1.0},
    {"step": 4, "loss": 1.5, "perplexity": 4.4817, "tokens": 50, "rows": 6, "seconds": 1.0},
]


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


def described(**changes):
    usual = {
        "strategy": "zero2",
        "engine": "trainer",
        "precision": "bf16",
        "model": {"name": "org/base", "path": "/home/somebody/cache/snapshots/abc"},
        "data": {"name": "org/rows", "rows": 12345},
        "training": {
            "method": "full",
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "global_batch_size": 16,
            "max_steps": 100,
            "max_length": 128,
            "learning_rate": 5e-5,
            "lr_scheduler_type": "linear",
            "optimizer": "adamw_torch",
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "seed": 42,
        },
        "environment": {"versions": {"torch": "2.13.0", "python": "3.11.7"}},
    }
    return usual | changes


def card(dataset_name="org/rows", **changes):
    return card_of_run(
        described(**changes),
        num_processes=2,
        evaluation=EVALUATION,
        losses=(3.25, 1.75),
        resumed=False,
        dataset_name=dataset_name,
    )


def header(text):
    return yaml.safe_load(text.split("---")[1])


def test_the_card_of_a_run_says_what_was_trained_how_and_what_came_of_it():
    text = card().text(date="2026-01-02")
    assert text == card().text(date="2026-01-02")
    assert header(text) == {
        "base_model": "org/base",
        "datasets": ["org/rows"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["generated-by-toolkit"],
    }
    for line in (
        MARKER,
        "| training loss | 3.2500 (first step) | 1.7500 (last step) |",
        "| evaluation loss | 2.0000 | 1.5000 |",
        "| perplexity | 7.39 | 4.48 |",
        "Evaluated on 6 rows that were not trained on: the loss is the mean over their 50 "
        "predicted tokens in nats, perplexity its exponential.",
        "| method | all weights |",
        "| strategy | zero2 |",
        "| rows of a step | 16 (4 x 2 processes x 2 micro-batches) |",
        "| learning rate | 5e-05, linear |",
        "| precision | bf16 |",
        "  --dataset_name org/rows \\",
        "  --bf16 True",
        "- torch 2.13.0",
        "Saved on 2026-01-02.",
    ):
        assert line in text.splitlines(), line
    assert "/home" not in text
    assert "FOLDER" in text


def test_a_card_names_no_place_of_the_machine_and_invents_no_hub_name(tmp_path):
    folder = tmp_path / "my model"
    folder.mkdir()
    model = {"name": str(folder), "path": str(folder)}
    data = {"name": "rows.jsonl", "rows": 3}
    text = card(None, model=model, data=data).text()
    assert str(tmp_path) not in text
    assert "base_model" not in header(text)
    assert "datasets" not in header(text)
    assert "license" not in header(text)
    assert "`my model`" in text
    assert "--train_file rows.jsonl" in text
    built_in = {"name": BUILT_IN_MODEL, "path": str(folder)}
    text = card(None, model=built_in, data={"name": BUILT_IN_DATA, "rows": 3}).text()
    assert "base_model" not in header(text)
    assert "--model_name_or_path" not in text
    assert "--train_file" not in text
    assert hub_name_of("gpt2") == "gpt2"
    assert hub_name_of("./here") is None
    assert hub_name_of("/a/b") is None
    assert shown_name("/a/b/c.jsonl") == "c.jsonl"
    assert shown_name("org/base") == "org/base"


@pytest.mark.parametrize(
    ("content", "license_"),
    [
        ("---\nlicense: apache-2.0\n---\n# It\n", "apache-2.0"),
        ("# Without a header\n", None),
        ("---\nlicense: [\n---\n", None),
    ],
)
def test_the_license_is_the_base_models_or_none(tmp_path, content, license_):
    (tmp_path / "README.md").write_text(content)
    found = card(model={"name": "org/base", "path": str(tmp_path)})
    assert header(found.text()).get("license") == license_


def test_the_card_of_adapters_loads_them_on_their_base(tmp_path):
    training = described()["training"] | {"method": "lora", "lora_r": 8, "lora_alpha": 16}
    text = card(training=training).text(is_adapter=True)
    assert header(text)["library_name"] == "peft"
    assert "lora" in header(text)["tags"]
    assert 'AutoModelForCausalLM.from_pretrained("org/base", dtype="auto")' in text
    assert "PeftModel.from_pretrained(base, FOLDER)" in text
    assert "| method | lora, rank 8, alpha 16 |" in text


def test_what_others_wrote_breaks_no_table():
    text = Card(base="org/base", training=(("a|b\nc", "<script>"),)).text()
    assert "| a\\|b c | &lt;script> |" in text


def test_a_save_writes_its_card_anew_and_leaves_a_users_own(tmp_path, accelerator):
    folder = tmp_path / "final"
    save_model(accelerator, tiny_llama(), folder, card=Card(base="org/one"))
    assert "`org/one`" in (folder / CARD_FILE).read_text()
    save_model(accelerator, tiny_llama(), folder, card=Card(base="org/two"))
    assert "`org/two`" in (folder / CARD_FILE).read_text()
    edited = (folder / CARD_FILE).read_text().replace(MARKER, "").replace("# two", "# Mine")
    (folder / CARD_FILE).write_text(edited)
    check(folder)  # to edit a card is no damage
    save_model(accelerator, tiny_llama(), folder, card=Card(base="org/three"))
    assert (folder / CARD_FILE).read_text() == edited
    check(folder)


def test_a_model_is_saved_though_its_card_can_not_be_written(
    tmp_path, accelerator, monkeypatch, caplog
):
    monkeypatch.setattr("toolkit.training.card.TEMPLATE", tmp_path / "gone.jinja")
    save_model(accelerator, tiny_llama(), tmp_path / "final", card=Card(base="org/one"))
    check(tmp_path / "final")
    assert not (tmp_path / "final" / CARD_FILE).exists()
    assert "has no model card" in caplog.text


def test_a_users_trainer_saves_a_card_with_what_it_knows(tmp_path):
    from test_evaluation import COLLATE, arguments, ragged

    trainer = ToolkitTrainer(
        model=tiny_llama(),
        args=arguments(tmp_path, eval_strategy="steps", eval_steps=2),
        train_dataset=ragged(16),
        eval_dataset=ragged(5),
        data_collator=COLLATE,
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    text = (tmp_path / "saved" / CARD_FILE).read_text()
    assert "base_model" not in header(text)
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert f"{losses[0]:.4f} (first step) | {losses[-1]:.4f} (last step)" in text
    assert "| optimizer steps | 4 |" in text
    assert "| rows of a step | 4 |" in text
    assert "| evaluation loss | " in text
    assert str(tmp_path) not in text
