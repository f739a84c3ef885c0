"""A saved folder loads as the model that was trained, whatever its family."""

import json
import resource
import signal
import sys

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    HrmTextConfig,
    LlamaConfig,
    MixtralConfig,
    dynamic_module_utils,
)

from toolkit.checkpoints.atomic_folder import check
from toolkit.errors import SaveError
from toolkit.measuring.finite import require_finite
from toolkit.training import saving, weight_files
from toolkit.training.saving import save_model

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture
def tied():
    return AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, tie_word_embeddings=True))


def same(folder, model):
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ours, theirs = model.state_dict(), loaded.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def stored(folder):
    return [
        name
        for file in sorted(folder.glob("*.safetensors"))
        for name in safe_open(file, "pt").keys()  # noqa: SIM118
    ]


def test_tied_weights_are_stored_once_and_load_tied(tmp_path, accelerator, tied):
    save_model(accelerator, tied, tmp_path / "final", strategy="single", step=3)
    assert same(tmp_path / "final", tied)
    assert "lm_head.weight" not in stored(tmp_path / "final")
    manifest = check(tmp_path / "final")
    assert (manifest["strategy"], manifest["step"]) == ("single", 3)
    assert {"model.safetensors", "config.json", "generation_config.json"} <= set(manifest["files"])


def test_experts_are_stored_as_their_family_stores_them(tmp_path, accelerator):
    model = AutoModelForCausalLM.from_config(MixtralConfig(**SMALL, num_local_experts=2))
    save_model(accelerator, model, tmp_path / "final", shard_bytes=20_000)
    assert same(tmp_path / "final", model)
    assert "model.layers.0.block_sparse_moe.experts.1.w2.weight" in stored(tmp_path / "final")


def test_files_are_no_larger_than_asked_and_an_index_names_them(tmp_path, accelerator, tied):
    save_model(accelerator, tied, tmp_path / "final", shard_bytes=9_000)
    files = sorted((tmp_path / "final").glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((tmp_path / "final" / weight_files.INDEX_FILE).read_text())
    assert {file.name for file in files} == set(index["weight_map"].values())
    largest = sum(p.nbytes for p in tied.model.layers[0].parameters())
    for file in files:
        with safe_open(file, "pt") as opened:
            held = sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118
        assert held <= max(9_000, largest)
    assert same(tmp_path / "final", tied)


def test_no_more_than_one_file_is_held(tmp_path, accelerator, tied):
    alive, most = set(), 0
    for name, tensor in saving.whole_weights(accelerator, tied, tied):
        assert tensor is not None, name
        alive.add(name)
    written = []
    original = weight_files._write_shard

    def watched(model, held, file):
        nonlocal most
        most = max(most, sum(tensor.nbytes for tensor in held.values()))
        written.extend(held)
        return original(model, held, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files, "_write_shard", watched)
        save_model(accelerator, tied, tmp_path / "final", shard_bytes=9_000)
    assert most <= sum(p.nbytes for p in tied.model.layers[0].parameters())
    assert set(written) == alive


def test_16_bit_weights_come_back_in_16_bit(tmp_path, accelerator, tied):
    tied.to(torch.bfloat16)
    save_model(accelerator, tied, tmp_path / "final")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.model.embed_tokens.weight, tied.model.embed_tokens.weight)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, accelerator, tied, value):
    folder = tmp_path / "final"
    save_model(accelerator, tied, folder)
    before = check(folder)
    with torch.no_grad():
        tied.model.norm.weight[0] = value
    with pytest.raises(SaveError, match=r"not finite \(model\.norm\.weight\)"):
        save_model(accelerator, tied, folder)
    assert check(folder) == before
    with pytest.raises(SaveError, match=r"checkpoint-1 was not saved: .* \(model\.norm\.weight\)"):
        require_finite(tied, tmp_path / "checkpoint-1")


def test_a_model_that_the_disk_has_no_room_for_is_not_begun(tmp_path, accelerator, tied):
    # A petabyte that takes four bytes of memory.
    tied.huge = torch.nn.Parameter(torch.zeros(1).expand(2**48))
    with pytest.raises(SaveError, match=r"no space left .* takes 1048576\.\d+ GiB or more, and"):
        save_model(accelerator, tied, tmp_path / "final")
    assert not list(tmp_path.iterdir())


def test_weights_that_come_back_different_leave_the_old_folder(tmp_path, accelerator, tied):
    folder = tmp_path / "final"
    save_model(accelerator, tied, folder)
    before = check(folder)
    original = safetensors.torch.save_file

    def one_bit_flips(tensors, file, metadata):
        original(tensors, file, metadata)
        with open(file, "r+b") as opened:
            opened.seek(-1, 2)
            last = opened.read(1)[0]
            opened.seek(-1, 2)
            opened.write(bytes([last ^ 1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", one_bit_flips)
        with pytest.raises(SaveError, match="came back with other values"):
            save_model(accelerator, tied, folder)
    assert check(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_weight_that_is_lost_on_the_way_is_named(tmp_path, accelerator, tied):
    original = saving.whole_weights

    def without_one(*arguments, **options):
        for name, tensor in original(*arguments, **options):
            if name != "model.layers.1.mlp.up_proj.weight":
                yield name, tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "whole_weights", without_one)
        with pytest.raises(SaveError, match=r"missing_keys.*layers\.1\.mlp\.up_proj"):
            save_model(accelerator, tied, tmp_path / "final")
    assert not (tmp_path / "final").exists()


def test_a_weight_that_was_gathered_empty_is_named(tmp_path, accelerator, tied):
    tied.model.norm.weight.data = torch.empty(0)
    with pytest.raises(SaveError, match=r"model\.norm\.weight was gathered empty"):
        save_model(accelerator, tied, tmp_path / "final")
    assert not (tmp_path / "final").exists()


def test_a_disk_that_is_full_is_an_error_that_every_rank_hears_of(tmp_path, accelerator, tied):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        with pytest.raises(SaveError, match="no space left on the disk of .*final, or a limit"):
            save_model(accelerator, tied, tmp_path / "final")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not list(tmp_path.iterdir())


def test_weights_that_files_hold_as_one_stay_in_one_file(tmp_path, accelerator):
    config = HrmTextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    save_model(accelerator, model, tmp_path / "final", shard_bytes=9_000)
    assert len(list((tmp_path / "final").glob("*.safetensors"))) > 2
    assert same(tmp_path / "final", model)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_of_its_own_code_is_saved_with_its_code(
    tmp_path, accelerator, monkeypatch, one_rank, sharded
):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path / "modules")])
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "modeling_own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    auto = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    described = LlamaConfig(**SMALL).to_dict() | {"auto_map": auto, "model_type": "own"}
    (tmp_path / "own" / "config.json").write_text(json.dumps(described))
    config = AutoConfig.from_pretrained(tmp_path / "own", trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    norm = model.model.norm.weight.detach().clone()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    save_model(accelerator, model, tmp_path / "final")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final", trust_remote_code=True)
    assert torch.equal(loaded.model.norm.weight, norm)
    assert [file.name for file in (tmp_path / "final").glob("*.py")] == ["modeling_own.py"]


def test_names_that_a_class_gives_its_weights_are_kept_where_a_wrapper_renames_it(
    tmp_path, accelerator, one_rank
):
    model = AutoModelForCausalLM.from_config(GPTNeoXConfig(**SMALL))
    save_model(accelerator, model, tmp_path / "whole")
    wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    save_model(accelerator, wrapped, tmp_path / "sharded")
    assert stored(tmp_path / "sharded") == stored(tmp_path / "whole")
    assert isinstance(wrapped, FSDPModule)


def test_another_task_than_language_modelling_is_saved_too(tmp_path, accelerator):
    config = LlamaConfig(**SMALL, num_labels=3, pad_token_id=0)
    model = AutoModelForSequenceClassification.from_config(config)
    save_model(accelerator, model, tmp_path / "final")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final")
    assert torch.equal(loaded.score.weight, model.score.weight)
