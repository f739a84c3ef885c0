"""What FSDP2, Accelerate and DeepSpeed saved in two ranks is read back whole, to the bit."""

import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import ROOT, SCRIPTS
from safetensors.torch import load_file
from small_models import odd_gpt2
from transformers import AutoModelForCausalLM

from toolkit.checkpoints.converting import convert
from toolkit.checkpoints.judging import verify
from toolkit.checkpoints.reading import read_folder
from toolkit.checkpoints.stored import NotWhole
from toolkit.training.merging import merge

pytestmark = pytest.mark.long  # two ranks write for all of them

FILE = "model.safetensors"

KINDS = {
    "fsdp_sharded": ("Accelerate", "fsdp"),
    "fsdp_full": ("Accelerate", "whole"),
    "zero1": ("DeepSpeed", "zero1"),
    "zero1_bf16": ("DeepSpeed", "zero1"),
    "zero2": ("DeepSpeed", "zero2"),
    "zero3": ("DeepSpeed", "zero3"),
    "zero3_frozen": ("DeepSpeed", "zero3"),
    "universal_zero2": ("DeepSpeed", "universal"),
    "universal_zero3": ("DeepSpeed", "universal"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, cold_environment):
    output = tmp_path_factory.mktemp("saved")
    subprocess.run(
        [sys.executable, SCRIPTS / "save_with_libraries.py", output],
        env=cold_environment,
        check=True,
        timeout=900,
    )
    return output


def held(contents):
    return {name: t.read() for name, t in {**contents.weights, **contents.states}.items()}


def assert_same(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_and_state_comes_back_to_the_bit(saved, kind):
    contents = read_folder(saved / kind)
    assert (contents.library, contents.strategy) == KINDS[kind]
    assert (contents.step, contents.ranks, contents.missing) == (2, 2, [])
    assert_same(held(contents), torch.load(saved / f"{kind}.pt"))
    trained = {key.removeprefix("state.").rpartition(".")[0] for key in contents.states}
    assert {name for group in contents.groups for name in group["names"]} == trained
    rate = 0.006 if kind.startswith("fsdp") else 0.01
    assert [group["lr"] for group in contents.groups] == pytest.approx(
        [rate] * len(contents.groups)
    )


@pytest.mark.parametrize("kind", ["fsdp_sharded", "zero3", "universal_zero2"])
def test_a_portable_checkpoint_of_it_holds_the_same(saved, tmp_path, kind):
    made = convert(saved / kind, tmp_path)
    assert made == tmp_path / "checkpoint-2"
    again = read_folder(made)
    assert_same(held(again), torch.load(saved / f"{kind}.pt"))
    assert again.groups == read_folder(saved / kind).groups
    assert again.manifest["facts"] == {}
    assert verify(made, saved / kind)["ok"]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("zero3", None), ("fsdp_full", "bfloat16"), ("fsdp_sharded", None), ("zero2", "float16")],
)
@pytest.mark.parametrize("has_weights", [True, False])
def test_a_model_of_it_is_loaded_by_transformers(saved, tmp_path, kind, dtype, has_weights):
    """Copied by its bytes where the base has weights, and matched by transformers elsewhere."""
    base = odd_gpt2()
    (base if has_weights else base.config).save_pretrained(tmp_path / "base")
    merge(saved / kind, tmp_path / "model", base=tmp_path / "base", dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    wanted = getattr(torch, dtype or "float32")
    expected = torch.load(saved / f"{kind}.pt")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == wanted
        assert torch.equal(parameter, expected[name].to(wanted)), name


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def remove(file):
    file.unlink()


class Evil:
    def __reduce__(self):
        return Path.mkdir, (Path("made-by-a-pickle"),)


def infect(file):
    torch.save({"optimizer_state_dict": Evil()}, file)


def infect_list(file):
    file.write_bytes(pickle.dumps(Evil()))


PARTS = {"zero": "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt"}
FAULTS = [
    ("zero2", PARTS["zero"], remove, "is missing: 2 ranks wrote"),
    ("zero2", PARTS["zero"], cut, "is cut off or damaged"),
    ("zero2", PARTS["zero"], infect, "would run code and was not loaded: it names pathlib"),
    ("zero3", "global_step2/zero_pp_rank_1_mp_rank_00_model_states.pt", remove, "is missing"),
    ("zero3", "global_step2", shutil.rmtree, "which is missing"),
    ("universal_zero3", "zero/transformer.wte.weight/fp32.pt", remove, "fp32.pt is missing"),
    ("universal_zero2", "zero/transformer.wte.weight/fp32.pt", cut, "fp32.pt is cut off"),
    ("fsdp_sharded", "optimizer_0/__1_0.distcp", remove, "__1_0.distcp is missing"),
    ("fsdp_sharded", "pytorch_model_fsdp_0/__0_0.distcp", cut, "__0_0.distcp is cut off"),
    ("fsdp_sharded", "optimizer_0/.metadata", infect_list, "would run code"),
    ("fsdp_full", "pytorch_model_fsdp.bin", cut, "pytorch_model_fsdp.bin is cut off"),
]


@pytest.mark.parametrize(("kind", "name", "spoil", "sentence"), FAULTS)
def test_a_damaged_one_is_named_by_its_file(
    saved, tmp_path, monkeypatch, kind, name, spoil, sentence
):
    monkeypatch.chdir(tmp_path)  # where a pickle that is run makes its folder
    folder = tmp_path / kind
    shutil.copytree(saved / kind, folder)
    spoil(folder / name)
    with pytest.raises(NotWhole, match=sentence):
        convert(folder, tmp_path / "output")
    assert not (tmp_path / "output").exists()
    assert sentence.partition(":")[0] in verify(folder)["damage"]
    assert not Path("made-by-a-pickle").exists()


def test_files_of_two_checkpoints_are_not_joined(saved, tmp_path):
    folder = tmp_path / "mixed"
    shutil.copytree(saved / "zero3_frozen", folder)
    shutil.copyfile(saved / "zero3" / PARTS["zero"], folder / PARTS["zero"])
    with pytest.raises(NotWhole, match=r"rank_1.*belong. The files are of different checkpoints"):
        convert(folder, tmp_path / "output")


@pytest.fixture(scope="module")
def by_trainers(tmp_path_factory, launch):
    """Folders of the stock Trainer's runs of the same training, by how its ranks share it."""
    folder = tmp_path_factory.mktemp("trainers")
    checked_in = (ROOT / "accelerate_configs" / "fsdp.yaml").read_text()
    sharded = folder / "sharded.yaml"
    sharded.write_text(checked_in.replace("FULL_STATE_DICT", "SHARDED_STATE_DICT"))
    flags = ("--max_steps=2", "--save_strategy=steps", "--save_steps=2", "--max_grad_norm=0")
    for config in ("zero2", "zero3", "fsdp", sharded):
        script = (SCRIPTS / "plain_trainer.py", folder / Path(config).stem, *flags)
        done = launch(config, "-m", "toolkit.rehearse", *script)
        assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.parametrize(
    ("run", "model"),
    [("zero2", "zero2"), ("zero3", "zero3"), ("fsdp", "fsdp"), ("sharded", "fsdp")],
)
def test_a_stock_trainers_ranks_are_read(by_trainers, tmp_path, run, model):
    """Sharded, the Trainer saves no whole model (transformers 5.24); that of the other run has the
    same numbers."""
    folder = by_trainers / run / "checkpoint-2"
    whole = by_trainers / model / "saved"
    contents = read_folder(folder, base=whole)
    assert (contents.library, contents.step, contents.ranks) == ("Trainer", 2, 2)
    assert contents.missing == []
    assert_same({n: t.read() for n, t in contents.weights.items()}, load_file(whole / FILE))
    # The ranks of every strategy have done the same training, up to the order of sums.
    others = read_folder(by_trainers / "zero2" / "checkpoint-2", base=whole)
    assert contents.states.keys() == others.states.keys()
    for key, state in others.states.items():
        torch.testing.assert_close(contents.states[key].read(), state.read(), rtol=2e-3, atol=1e-8)
    made = convert(folder, tmp_path, base=whole)
    assert verify(made, folder)["ok"]
    merge(folder, tmp_path / "model", base=whole)
    assert_same(load_file(tmp_path / "model" / FILE), load_file(whole / FILE))
