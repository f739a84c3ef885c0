import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from places import HELPERS
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    PreTrainedTokenizerFast,
    dynamic_module_utils,
)

from toolkit.data.dataset import TokenDataset
from toolkit.data.sources import standard_library_hash, standard_library_texts
from toolkit.data.tokens import load_tokenizer
from toolkit.errors import UsageError
from toolkit.training.arguments import ModelArguments
from toolkit.training.model import (
    build_model,
    check_length,
    check_vocabulary,
    load_model,
    model_facts,
    resolve_model,
    resolve_tokenizer,
)
from toolkit.training.preflight_process import main


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture
def tied_model(tmp_path):
    """A small GPT-2, whose output layer is its embedding, saved in bf16."""
    config = GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def save_tokenizer(folder, **special):
    inner = Tokenizer(models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
    return folder


# The built-in model


BUILD = """
from transformers import AutoTokenizer, LlamaForCausalLM
from forked_ranks import become_a_rank
from toolkit.training.model import build_model
become_a_rank(2)
print(f"{build_model()}\\n", end="", flush=True)
"""


@pytest.fixture(scope="module")
def built_at_once(tmp_path_factory):
    """A cache that two processes built at the same time, and what each of them returned."""
    cache = tmp_path_factory.mktemp("cache-of-two")
    environment = os.environ | {"TOOLKIT_CACHE": str(cache), "PYTHONPATH": str(HELPERS)}
    command = [sys.executable, "-c", BUILD]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=120
    )
    # DeepSpeed writes lines of its own to stdout while it is imported.
    return cache, [line for line in done.stdout.splitlines() if line.startswith(str(cache))]


def test_two_builders_at_once_and_a_third_give_the_same_model(cache, built_at_once):
    other_cache, printed = built_at_once
    ours = build_model()
    (theirs,) = other_cache.glob("small-llama-*/")
    assert printed == [str(theirs)] * 2
    assert theirs.name == ours.name
    assert digests(theirs) == digests(ours)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= digests(ours).keys()
    assert not list(other_cache.glob(".building-*"))


def test_the_built_in_data_are_the_same_in_another_process(cache, built_at_once, monkeypatch):
    first = standard_library_hash()
    monkeypatch.setenv("TOOLKIT_CACHE", str(built_at_once[0]))
    assert standard_library_hash() == first


def test_the_built_in_model_is_an_ordinary_folder(cache):
    arguments = ModelArguments()
    folder = resolve_model(arguments)
    assert resolve_tokenizer(arguments) == folder
    model = load_model(arguments, folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.config.use_cache
    assert model.lm_head.weight is not model.model.embed_tokens.weight

    facts = model_facts(folder)
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert 2_000_000 <= facts.parameters <= 3_000_000
    assert (facts.hidden_size, facts.max_positions, facts.vocab_size) == (192, 512, 1024)
    assert facts.decoder_layer == "LlamaDecoderLayer"


def test_the_built_in_tokenizer_loses_nothing(cache):
    tokenizer = AutoTokenizer.from_pretrained(build_model())
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
    assert len(tokenizer) == 1024
    for row in standard_library_texts()[:50] + [{"completion": "é 你 \x00"}]:
        ids = tokenizer(row["completion"])["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == row["completion"]


def test_building_leaves_the_random_state_alone(cache, tmp_path, monkeypatch):
    from toolkit.training.model import _write_weights

    before = torch.get_rng_state()
    _write_weights(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


# Other models


def test_the_dtype_is_the_one_asked_for_and_not_the_saved_one(tied_model):
    arguments = ModelArguments(model_name_or_path=str(tied_model))
    assert resolve_model(arguments) == str(tied_model)
    assert load_model(arguments, tied_model).dtype == torch.float32
    half = ModelArguments(model_name_or_path=str(tied_model), dtype="bfloat16")
    assert load_model(half, tied_model).dtype == torch.bfloat16


def test_code_that_comes_with_a_model_runs_only_where_it_is_asked_for(tied_model, monkeypatch):
    cache = tied_model.parent / "modules"
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(cache))
    monkeypatch.setattr("sys.path", [*sys.path, str(cache)])
    ran = tied_model / "ran"
    (tied_model / "modeling_own.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "class OwnConfig(GPT2Config):\n    model_type = 'own'\n"
        "class OwnForCausalLM(GPT2LMHeadModel):\n    config_class = OwnConfig\n"
    )
    described = json.loads((tied_model / "config.json").read_text())
    auto = {"AutoConfig": "OwnConfig", "AutoModelForCausalLM": "OwnForCausalLM"}
    described["auto_map"] = {name: f"modeling_own.{own}" for name, own in auto.items()}
    (tied_model / "config.json").write_text(json.dumps(described | {"model_type": "own"}))
    with pytest.raises(UsageError, match="No causal LM can be loaded from"):
        load_model(ModelArguments(), tied_model)
    assert not ran.exists()
    asked = ModelArguments(trust_remote_code=True)
    assert type(load_model(asked, tied_model)).__name__ == "OwnForCausalLM"
    assert ran.exists()


def test_tied_weights_are_counted_once(tied_model):
    model = load_model(ModelArguments(), tied_model)
    assert model.lm_head.weight is model.transformer.wte.weight
    facts = model_facts(tied_model)
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (facts.hidden_size, facts.max_positions, facts.decoder_layer) == (8, 16, "GPT2Block")


def test_rows_that_the_model_cannot_read(tied_model, tmp_path):
    facts = model_facts(tied_model)
    check_length(facts, 16)
    with pytest.raises(UsageError, match="Pass --max_length 16 or less"):
        check_length(facts, 17)
    data = TokenDataset(
        name="rows",
        hash="",
        tokens_hash="",
        rows=1,
        dropped=0,
        largest_id=32,
        python=None,
        folder=tmp_path,
    )
    with pytest.raises(UsageError, match="id 32 .* only 32 ids. Pass --tokenizer_name"):
        check_vocabulary(facts, data)


def test_the_end_of_text_pads_where_nothing_else_does(tmp_path):
    folder = save_tokenizer(tmp_path, eos_token="<end>")
    assert load_tokenizer(folder).pad_token == "<end>"


def test_a_tokenizer_that_cannot_pad(tmp_path):
    folder = save_tokenizer(tmp_path)
    with pytest.raises(UsageError, match='no pad token.*Set "pad_token".*--tokenizer_name'):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./nowhere", "is not there: check the path"),
        ("/no/where", "is not there: check the path"),
        ("a/b/c", "is not there: check the path"),
        ("{tmp}/empty", "is a folder without config.json"),
        ("{tmp}/file.bin", "is a file: pass the folder"),
        ("no/such-model", "no folder here, and the Hub does not give it.*pass a local folder"),
        ("what is this?", "no folder here, and the Hub does not give it.*pass a local folder"),
    ],
)
def test_a_model_that_is_not_there(name, says, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").write_text("")
    arguments = ModelArguments(model_name_or_path=name.format(tmp=tmp_path))
    with pytest.raises(UsageError, match=says):
        resolve_model(arguments)


def test_a_hub_model_becomes_a_local_folder(monkeypatch, tmp_path):
    asked = []

    def snapshot_download(name, *, revision, allow_patterns, ignore_patterns):
        asked.append((name, revision, "*.safetensors" in allow_patterns))
        return str(tmp_path)

    (tmp_path / "model.safetensors").write_text("")
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    arguments = ModelArguments(
        model_name_or_path="some/model", model_revision="v2", tokenizer_name="other/tokenizer"
    )
    assert resolve_model(arguments) == str(tmp_path)
    assert resolve_tokenizer(arguments) == str(tmp_path)
    assert asked == [("some/model", "v2", True), ("other/tokenizer", "main", False)]


def test_a_folder_without_weights_is_a_mistake_of_the_user(tied_model):
    (tied_model / "model.safetensors").unlink()
    assert model_facts(tied_model).parameters is None
    with pytest.raises(UsageError, match="No causal LM can be loaded from"):
        load_model(ModelArguments(), tied_model)


# Preparing


def test_prepare_prints_one_line_of_json(cache, capfd):
    assert main(["--max_train_samples", "40", "--max_steps", "3"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["model"]["name"] == "small-llama"
    assert facts["model"]["path"] == str(build_model())
    assert facts["data"]["rows"] == 40
    assert facts["training"]["max_steps"] == 3


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max_length", "4096"], "Pass --max_length 512 or less"),
        (["--max_step", "3"], "Did you mean --max_steps"),
        (["--strategy", "zero4"], "There is no strategy 'zero4'"),
    ],
)
def test_prepare_finds_mistakes_before_a_launch(flags, says, cache, capfd):
    assert main(flags) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert says in printed.err
    assert "Traceback" not in printed.err


def test_mistakes_in_our_flags_are_found_without_torch():
    script = (
        "import sys; from toolkit.training.arguments import own_arguments; own_arguments([]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
