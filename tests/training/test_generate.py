"""`toolkit generate`: what transformers' own greedy search writes, streamed, and nothing else."""

import io
import json
import os
import subprocess
import sys
from unittest.mock import MagicMock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from places import ROOT
from small_models import tiny_llama
from transformers import AutoTokenizer

from toolkit.data.chat import shipped_templates
from toolkit.errors import UsageError
from toolkit.training import generate as worker
from toolkit.training.model import build_model

# transformers 5.24 names a property that peft 0.21 still reads.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

PROMPT = "def add(a, b):"


SETTINGS = {"most": 12, "seed": 0, "plain": False, "temperature": 0.0, "top_p": None}


def generate(folder, prompt=PROMPT, **settings):
    worker.generate(folder, prompt, **SETTINGS | settings)


@pytest.fixture(scope="module")
def tokenizer(session_cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLKIT_CACHE", str(session_cache))
        return AutoTokenizer.from_pretrained(build_model())


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    """A small model in the `final` of a run's folder, beside its tokenizer."""
    folder = tmp_path_factory.mktemp("run") / "final"
    model = tiny_llama(vocabulary=len(tokenizer)).eval()
    model.generation_config.update(do_sample=True, temperature=3.0)  # which greedy search overrides
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def adapted(saved, tokenizer, tmp_path_factory):
    """An adapter of that model, alone in its folder, which changes what the model writes."""
    folder, base = tmp_path_factory.mktemp("adapter"), tiny_llama(vocabulary=len(tokenizer))
    config = LoraConfig(target_modules=["down_proj"], init_lora_weights=False, lora_alpha=1000)
    model = get_peft_model(base, config)
    model.peft_config["default"].base_model_name_or_path = str(saved[0])
    model.save_pretrained(folder)
    return folder, model.eval()


def greedy(model, tokenizer, ids, **options):
    ids = torch.tensor([ids])
    written = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, **options)
    return written[0, ids.shape[1] :].tolist()


def test_the_command_writes_the_greedy_answer_to_stdout_and_its_notes_to_stderr(saved, tokenizer):
    folder, model = saved
    flags = ["--max-new-tokens", "12", "--temperature", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.cli", "generate", folder.parent, PROMPT, *flags],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    tokens = greedy(model, tokenizer, tokenizer(PROMPT)["input_ids"])
    assert done.stdout == tokenizer.decode(tokens, skip_special_tokens=True) + "\n"
    where, ended = done.stderr.splitlines()
    assert where.startswith(f"toolkit: {folder} on cpu, without a chat template")
    assert ended == "toolkit: the answer was ended after 12 tokens"


def test_an_adapter_answers_on_its_base_with_the_tokenizer_of_that(
    adapted, saved, tokenizer, capsys
):
    folder, model = adapted
    generate(folder)
    ids = tokenizer(PROMPT)["input_ids"]
    tokens = greedy(model, tokenizer, ids)
    assert tokens != greedy(saved[1], tokenizer, ids)
    printed = capsys.readouterr()
    assert printed.out == tokenizer.decode(tokens, skip_special_tokens=True) + "\n"
    assert f"{saved[0]} with the adapter {folder} on cpu" in printed.err


def test_a_chat_template_is_applied_and_its_turn_ends_an_answer_unless_plain(
    tokenizer, tmp_path, capsys
):
    folder, chatty = tmp_path / "chat", AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    chatty.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    chatty.chat_template = shipped_templates()["chatml"]
    model = tiny_llama(vocabulary=len(chatty)).eval()
    turns = [{"role": "user", "content": PROMPT}]
    text = chatty.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = chatty(text, add_special_tokens=False)["input_ids"]
    end = chatty.convert_tokens_to_ids("<|im_end|>")
    third = greedy(model, chatty, ids)[2]
    with torch.no_grad():  # in place of the third token comes the end of the turn
        model.lm_head.weight[end] = 1.01 * model.lm_head.weight[third]
    model.save_pretrained(folder)
    chatty.save_pretrained(folder)
    expected = greedy(model, chatty, ids, eos_token_id=end)
    assert expected[-1] == end
    assert len(expected) < 12

    generate(folder)
    printed = capsys.readouterr()
    assert printed.out == chatty.decode(expected, skip_special_tokens=True) + "\n"
    assert "with a chat template" in printed.err
    assert "was ended" not in printed.err
    generate(folder, plain=True)
    plain = greedy(model, chatty, chatty(PROMPT)["input_ids"], eos_token_id=end)
    assert capsys.readouterr().out == chatty.decode(plain, skip_special_tokens=True) + "\n"


def test_each_line_of_stdin_is_answered_and_a_seed_repeats_what_it_sampled(
    saved, monkeypatch, capsys
):
    def sampled(seed, text):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        generate(saved[0], "-", temperature=1.5, top_p=0.95, seed=seed)
        return capsys.readouterr().out

    first, other = sampled(1, f"{PROMPT}\n"), sampled(2, PROMPT)
    assert first != other
    assert sampled(1, f"{PROMPT}\n{PROMPT}\n") == first + first


def test_a_prompt_that_leaves_no_room_is_named_and_an_answer_ends_with_the_positions(
    saved, tokenizer, capsys
):
    ids = tokenizer("a" * 2000)["input_ids"]
    fits = tokenizer.decode(ids[1:126])
    generate(saved[0], fits, most=256)
    assert "was ended after 2 tokens" in capsys.readouterr().err
    with pytest.raises(UsageError, match=f"has {len(ids):,} tokens, of 128 for it and an answer"):
        generate(saved[0], "a" * 2000)


def test_a_model_whose_files_lack_weights_is_not_answered_with_random_ones(saved, tmp_path):
    for path in saved[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(UsageError, match="are missing, and would be new and random"):
        generate(tmp_path)


def test_an_adapter_of_another_base_is_one_sentence(
    adapted, tokenizer, tmp_path, monkeypatch, capsys
):
    for path in adapted[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    wider = tmp_path / "wider"
    tiny_llama(vocabulary=len(tokenizer), hidden_size=64).save_pretrained(wider)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(wider)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate", json.dumps(SETTINGS), str(tmp_path), PROMPT])
    for module in ("logging", "signal", "warnings"):  # whose settings are for a whole process
        monkeypatch.setattr(worker, module, MagicMock())
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        worker.main()
    written = capsys.readouterr()
    assert written.out == ""
    last = written.err.splitlines()[-1]
    assert last.startswith(f"toolkit: No answer from {tmp_path}: Error(s) in loading")


@pytest.mark.parametrize(
    ("files", "words", "said"),
    [
        ({}, ["nowhere", "a"], "nowhere is no folder"),
        ({"readme": ""}, [".", "a"], "holds no model: neither it nor its final/"),
        ({"final/config.json": "{}"}, [".", "a"], "final holds a model and no tokenizer"),
        ({"adapter_config.json": "{}"}, [".", "a"], "its base model None is neither a folder"),
        ({"adapter_config.json": "[]"}, [".", "a"], "its base model None is neither a folder"),
        (
            {"adapter_config.json": '{"base_model_name_or_path": "/no/such/base"}'},
            [".", "a"],
            "its base model /no/such/base is neither a folder with a model nor to be had from the "
            "Hub. Put",
        ),
        (
            {"adapter_config.json": '{"base_model_name_or_path": "nobody/nothing"}'},
            [".", "a"],
            "its base model nobody/nothing is neither a folder",
        ),
    ],
)
def test_a_mistake_is_a_sentence_from_the_tier_without_torch(files, words, said, tmp_path, command):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = command("generate", *words, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
