"""The model card: facts and nothing else, and never in the place of a user's own."""

import shlex
from dataclasses import fields

import pytest
import torch
import yaml
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from small_models import tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from toolkit import ToolkitTrainer
from toolkit.checkpoints.atomic_folder import check
from toolkit.data.arguments import DataArguments
from toolkit.data.sources import BUILT_IN_DATA
from toolkit.training.arguments import ModelArguments, own_arguments, training_values
from toolkit.training.card import (
    CARD_FILE,
    MARKER,
    Card,
    card_of_run,
    hub_name_of,
    shown_name,
)
from toolkit.training.method_arguments import MethodArguments
from toolkit.training.model import BUILT_IN_MODEL, build_model
from toolkit.training.saving import save_model
from toolkit.training.speed_arguments import SpeedArguments

EVALUATION = [
    {"step": 0, "loss": 2.0, "perplexity": 7.389, "tokens": 50, "rows": 6, "seconds": 1.0},
    {"step": 4, "loss": 1.5, "perplexity": 4.4817, "tokens": 50, "rows": 6, "seconds": 1.0},
]


SUMMARY = {
    "steps": 100,
    "epochs": 1600 / 12345,
    "rows": 1600,
    "tokens": 98765,
    "first_loss": 3.25,
    "last_loss": 1.75,
    "perplexity": 4.4817,
    "left_out": ["3 of 12,345 texts are cut to --max_length"],
    "strategy": "zero2",
    "num_processes": 2,
    "rehearsal": False,
    "seconds": 75.4,
}


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


def described(**changes):
    usual = {
        "strategy": "zero2",
        "engine": "trainer",
        "precision": "bf16",
        "model": {"name": "org/base", "path": "/home/somebody/cache/snapshots/abc"},
        "data": {"name": "org/rows", "rows": 12345, "asked": {"dataset_name": "org/rows"}},
        "training": {
            **MethodArguments().facts(),
            "dtype": "float32",
            "quant_storage": None,
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
            "tf32": False,
            "cudnn_attention": False,
            "activation_checkpointing": False,
            "speed": {"tuned": False, "on": {}, "left_out": {}},
        },
        "environment": {"versions": {"torch": "2.13.0", "python": "3.11.7"}},
    }
    return usual | changes


def card(dataset_name="org/rows", **changes):
    return card_of_run(
        described(**changes),
        num_processes=2,
        evaluation=EVALUATION,
        summary=SUMMARY,
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
        "Evaluated on the 6 rows given for evaluation: the loss is the mean over their 50 "
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
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    order = ["method", "data", "rows of data", "strategy", "engine", "processes", "precision"]
    order += ["optimizer steps", "rows of a step", "longest row", "learning rate", "optimizer"]
    first = rows.index("method")
    assert rows[first : first + len(order)] == order


def test_rows_are_said_to_be_held_out_only_where_the_training_left_them_out():
    data = described()["data"]
    held_out = data | {"asked": {"validation_split_percentage": 10.0}}
    assert (
        "Evaluated on 6 rows that were held out of the training data" in card(data=held_out).text()
    )
    given = data | {"asked": {"validation_file": "/home/me/same.jsonl"}}
    text = card(data=given).text()
    assert "Evaluated on the 6 rows given for evaluation" in text
    assert "not trained on" not in text
    assert "held out" not in text
    assert "--validation_file same.jsonl" in text


@pytest.mark.parametrize(
    ("name", "asked", "row"),
    [
        ("chatml", {}, "chatml, brought by the toolkit, for the base model has none"),
        ("mine.jinja", {"chat_template": "/home/me/mine.jinja"}, "mine.jinja"),
        ("the model's own", {}, "the model's own"),
    ],
)
def test_the_template_of_chats_is_in_the_card(name, asked, row):
    chats = described()["data"] | {"template": {"name": name, "sha256": "0"}, "asked": asked}
    assert f"| chat template | {row} |" in card(data=chats).text().splitlines()
    assert "chat template" not in card().text()


def parsed(text):
    """Return the command of a card as `toolkit.train` reads it, and the words before it."""
    command = text.split("```sh\n")[1].split("```")[0].replace("\\\n", " ")
    launch, _, flags = command.partition("-m toolkit.train")
    own = own_arguments(shlex.split(flags))
    return launch, own, training_values(own)


def test_the_command_trains_it_again_with_what_the_record_has():
    commit = "0123456789abcdef0123456789abcdef01234567"
    training = described()["training"] | {
        **{"method": "lora", "lora_r": 4, "lora_alpha": 64, "lora_dropout": 0.1, "merge": True},
        **{"lora_target_modules": ["q_proj", "v_proj"], "dtype": "float32"},
        "lora_embeddings": True,
        **{"weight_decay": 0.01, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine"},
        **{"optimizer": "adamw_torch_fused", "activation_checkpointing": True, "tf32": True},
        "cudnn_attention": True,
        "speed": {
            "tuned": True,
            "left_out": {},
            "on": {
                "loss_impl": "chunked",
                "loss_chunk_tokens": 512,
                "lean_masks": "no mask asked for",
                "checkpoint_layers": {"asked": "all", "layers": [0, 1]},
                "compile_blocks": {"layers": 2, "backend": "aot_eager"},
            },
        },
    }
    asked = {
        **{"dataset_name": "org/rows", "dataset_config_name": "small", "packing": "best_fit"},
        **{"messages_column": "the chat", "loss_on": "assistant", "max_train_samples": 99},
        **{"chat_template": "/home/me/mine.jinja", "max_length": 128},
    }
    text = card(
        model={"name": "org/base", "path": f"/home/me/hub/snapshots/{commit}"},
        data=described()["data"] | {"asked": asked},
        training=training,
    ).text()
    launch, own, values = parsed(text)
    assert "/home" not in text
    assert launch.split() == [
        *("accelerate", "launch", "--config_file", "accelerate_configs/zero2.yaml"),
        *("--num_processes", "2"),
    ]
    assert own.model == ModelArguments(
        model_name_or_path="org/base",
        model_revision=commit,
        dtype="float32",
        cudnn_attention=True,
    )
    assert own.data == DataArguments(**asked | {"chat_template": "mine.jinja"})
    names = [entry.name for entry in fields(MethodArguments)]
    assert own.method == MethodArguments(**{name: training[name] for name in names})
    assert own.speed == SpeedArguments(
        loss_impl="chunked",
        loss_chunk_tokens=512,
        lean_masks=True,
        checkpoint_layers="all",
        compile_blocks=True,
        compile_backend="aot_eager",
    )
    for name in (
        *("weight_decay", "max_grad_norm", "lr_scheduler_type", "learning_rate", "seed", "tf32"),
        *("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
    ):
        assert str(getattr(values[name], "value", values[name])) == str(training[name]), name
    assert str(getattr(values["optim"], "value", values["optim"])) == "adamw_torch_fused"
    assert values["bf16"]
    assert not values["gradient_checkpointing"]  # --checkpoint_layers says it


def test_what_is_at_its_default_is_no_flag_of_the_command():
    training = described()["training"]
    text = card().text()
    _, own, _ = parsed(text)
    for flag in (
        "weight_decay",
        "lora",
        "dtype",
        "optim ",
        "speed",
        "model_revision",
        "tf32",
        "cudnn",
    ):
        assert f"--{flag}" not in text, flag
    assert own.speed == SpeedArguments()
    assert "flag that records don't have" in text
    checkpointed = training | {"activation_checkpointing": True}
    _, _, values = parsed(card(training=checkpointed).text())
    asked = (values.get("activation_checkpointing"), values["gradient_checkpointing"])
    assert "True" in map(str, asked)


def test_there_is_no_command_for_a_config_file_of_somebodys_own():
    text = card(strategy="custom").text()
    assert "How to train it again" not in text
    assert "accelerate_configs" not in text
    assert "| strategy | custom |" in text


def test_a_card_names_no_place_of_the_machine_and_invents_no_hub_name(tmp_path):
    folder = tmp_path / "my model"
    folder.mkdir()
    model = {"name": str(folder), "path": str(folder)}
    data = {"name": "rows.jsonl", "rows": 3, "asked": {"train_file": str(folder / "rows.jsonl")}}
    text = card(None, model=model, data=data).text()
    assert str(tmp_path) not in text
    assert "base_model" not in header(text)
    assert "datasets" not in header(text)
    assert "license" not in header(text)
    assert "`my model`" in text
    assert "--train_file rows.jsonl" in text
    built_in = {"name": BUILT_IN_MODEL, "path": str(folder)}
    text = card(None, model=built_in, data={"name": BUILT_IN_DATA, "rows": 3, "asked": {}}).text()
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


def test_packed_adapters_are_loaded_on_a_packed_base_with_their_way_to_generate(tmp_path):
    training = described()["training"] | {"method": "qlora", "quant_storage": "bfloat16"}
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "adapter_config.json").write_text("{}")
    found = card(training=training)
    found.write(draft, tmp_path)
    text = (draft / CARD_FILE).read_text()
    assert "BitsAndBytesConfig(" in text
    assert 'bnb_4bit_compute_dtype="bfloat16"' in text
    assert 'dtype="auto", quantization_config=packed)' in text
    assert "GenerationConfig" not in text
    (draft / "generation_config.json").write_text("{}")
    found.write(draft, tmp_path)
    assert "GenerationConfig.from_pretrained(FOLDER)" in (draft / CARD_FILE).read_text()
    plain = found.text()  # merged: a model like any other
    assert "quantization_config" not in plain


@pytest.mark.filterwarnings(
    # peft 0.21 asks transformers 5.23 by the old name (peft/peft_model.py, PeftModel.__init__).
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
def test_the_lines_of_a_card_load_adapters_on_their_base(tmp_path, cache):
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    base, final = tmp_path / "base", tmp_path / "final"
    shape = {"hidden_size": 128, "intermediate_size": 128}  # whole blocks of 64 in each row
    tiny_llama(vocabulary=2048, **shape).save_pretrained(base)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    generation = GenerationConfig(max_new_tokens=3)
    generation.save_pretrained(final)
    model.save_pretrained(final)
    AutoTokenizer.from_pretrained(build_model()).save_pretrained(final)
    for packed in (None, "float32"):
        Card(base="org/base", packed_in=packed).write(final, tmp_path)
        lines = (final / CARD_FILE).read_text().split("```python\n")[1].split("```")[0]
        places = {"FOLDER": str(final)}
        exec(lines.replace('"org/base"', repr(str(base))), places)
        assert places["model"].generation_config.max_new_tokens == 3
        prompt = torch.tensor([[1, 5, 9]])
        assert places["model"].generate(input_ids=prompt, min_new_tokens=3).shape == (1, 6)
        layer = places["model"].base_model.model.model.layers[0].mlp.up_proj
        assert (type(layer).__name__ == "Linear4bit") is (packed is not None)


def test_what_others_wrote_breaks_no_table():
    text = Card(base="org/base", training={"a|b\nc": "<script>"}).text()
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


def test_what_a_link_in_the_place_of_a_card_leads_to_is_not_taken_along(tmp_path, accelerator):
    (tmp_path / "secret").write_text("not to be shown")
    folder = tmp_path / "final"
    folder.mkdir()
    (folder / CARD_FILE).symlink_to(tmp_path / "secret")
    save_model(accelerator, tiny_llama(), folder, card=Card(base="org/one"))
    assert "`org/one`" in (folder / CARD_FILE).read_text()
    assert (folder / "kept-1" / CARD_FILE).is_symlink()
    assert (tmp_path / "secret").read_text() == "not to be shown"


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
        args=arguments(tmp_path, eval_strategy="steps", eval_steps=2, logging_steps=3),
        train_dataset=ragged(16),
        eval_dataset=ragged(5),
        data_collator=COLLATE,
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    text = (tmp_path / "saved" / CARD_FILE).read_text()
    assert "base_model" not in header(text)
    losses = trainer.record["losses"]
    logged = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert f"{logged[0]:.4f}" != f"{losses[0]:.4f}"  # it is a mean over three steps
    assert f"{losses[0]:.4f} (first step) | {losses[-1]:.4f} (last step)" in text
    assert "| optimizer steps | 4 |" in text
    assert "| rows of a step | 4 |" in text
    assert "| evaluation loss | " in text
    assert str(tmp_path) not in text
