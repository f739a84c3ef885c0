"""Checkpoints of one process are read by their files, converted, merged, shown and verified."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from small_models import odd_gpt2, tiny_llama
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from toolkit.checkpoints.atomic_folder import check
from toolkit.checkpoints.converting import convert
from toolkit.checkpoints.judging import show, verify
from toolkit.checkpoints.reading import read_folder
from toolkit.checkpoints.stored import NotWhole
from toolkit.errors import UsageError
from toolkit.training import checkpoint_command
from toolkit.training.merging import merge

# peft 0.21 asks transformers 5.24 by a name that this one no longer likes (peft_model.py).
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@pytest.fixture(autouse=True)
def fresh_accelerate_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def trained(model, folder, **changed):
    """Train two steps with the Trainer, and return it; it saves a checkpoint."""
    rows = [{"input_ids": torch.arange(8) + n, "labels": torch.arange(8) + n} for n in range(8)]
    arguments = TrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        save_steps=2,
        logging_steps=1,
        weight_decay=0.1,
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
        **changed,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    return trainer


def states_of(model, optimizer, shorten=lambda name: name):
    return {
        f"state.{shorten(name)}.{state}": optimizer.state[parameter][state]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        for state in MOMENTS
    }


def assert_same(stored, expected):
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        read = stored[name].read()
        assert read.dtype == tensor.dtype, name
        assert torch.equal(read, tensor.detach()), name


@pytest.fixture(scope="module")
def by_trainer(tmp_path_factory):
    """A Trainer after two steps, and its checkpoint, of a model with tied embeddings."""
    folder = tmp_path_factory.mktemp("trainer")
    trainer = trained(odd_gpt2(), folder)
    AcceleratorState._reset_state(reset_partial_state=True)
    return trainer, folder / "checkpoint-2"


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    """A Trainer of an adapter after two steps, its checkpoint, and the folder of its base."""
    folder = tmp_path_factory.mktemp("lora")
    base = tiny_llama()
    base.save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    targets = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=6, target_modules=targets))
    trainer = trained(model, folder, learning_rate=0.1)
    AcceleratorState._reset_state(reset_partial_state=True)
    return trainer, folder / "checkpoint-2", folder / "base"


def test_a_trainers_checkpoint_is_read_by_the_names_of_its_parameters(by_trainer):
    trainer, folder = by_trainer
    contents = read_folder(folder)
    assert (contents.library, contents.step, contents.ranks) == ("Trainer", 2, 1)
    assert contents.missing == []
    assert_same(contents.weights, dict(trainer.model.named_parameters()))
    assert_same(contents.states, states_of(trainer.model, trainer.optimizer.optimizer))
    # GPT-2's layer norms have names with `ln_`: their kind keeps them from decay.
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    groups = trainer.optimizer.param_groups
    assert [group["names"] for group in contents.groups] == [
        [names[id(p)] for p in group["params"]] for group in groups
    ]
    assert [group["lr"] for group in contents.groups] == [group["lr"] for group in groups]
    assert contents.scheduler["last_epoch"] == 2
    assert len(contents.losses) == 2


def test_a_trainers_adapter_is_read_by_the_names_in_the_model(lora):
    trainer, folder, _ = lora
    contents = read_folder(folder)
    assert contents.is_adapter
    assert contents.missing == []

    def shorten(name):
        return name.removeprefix("base_model.model.")

    named = trainer.model.named_parameters()
    assert_same(contents.weights, {shorten(n): p for n, p in named if p.requires_grad})
    expected = states_of(trainer.model, trainer.optimizer.optimizer, shorten)
    assert_same(contents.states, expected)


@pytest.mark.parametrize("safe", [True, False])
def test_a_state_of_accelerate_is_read_with_the_models_config(tmp_path, safe):
    accelerator = Accelerator(cpu=True)
    model = odd_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.arange(8)[None]
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    without = read_folder(tmp_path / "state")
    assert without.states == {}
    (sentence,) = without.missing
    assert "optimizer.bin numbers its parameters, and its model is not known" in sentence
    model.config.save_pretrained(tmp_path / "base")
    contents = read_folder(tmp_path / "state", base=tmp_path / "base")
    assert (contents.library, contents.step) == ("Accelerate", 1)
    assert_same(contents.weights, dict(model.named_parameters()))
    assert_same(contents.states, states_of(model, optimizer.optimizer))


def test_an_optimizer_whose_parameters_are_not_certain_is_left_out(by_trainer, tmp_path):
    _, folder = by_trainer
    for file in folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    states = torch.load(tmp_path / "optimizer.pt")
    states["state"][0], states["state"][3] = states["state"][3], states["state"][0]
    torch.save(states, tmp_path / "optimizer.pt")
    contents = read_folder(tmp_path)
    assert contents.states == {}
    assert "would have another shape than it" in contents.missing[0]
    with pytest.raises(UsageError, match="no run could go on from it. Write a model"):
        convert(tmp_path, tmp_path / "output")


class Evil:
    def __reduce__(self):
        return print, ("code of a pickle ran",)


def test_a_pickle_that_names_code_is_refused_by_the_name(by_trainer, tmp_path, capsys):
    (tmp_path / "model.safetensors").write_bytes((by_trainer[1] / "model.safetensors").read_bytes())
    torch.save({"state": {}, "param_groups": [Evil()]}, tmp_path / "optimizer.pt")
    with pytest.raises(NotWhole, match=r"optimizer.pt would run code .* names print"):
        read_folder(tmp_path)
    assert capsys.readouterr().out == ""


def test_tensors_that_lie_in_any_way_come_back(tmp_path):
    whole = torch.randn(6, 4)
    tensors = {
        "turned": whole.t(),
        "part": whole[2:4],
        "column": whole[:, 1],
        "parameter": torch.nn.Parameter(whole[1]),
        "half": whole.to(torch.bfloat16),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "flags": whole > 0,
        "small": whole.to(torch.float8_e4m3fn).view(torch.uint8),
    }
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert_same(read_folder(tmp_path).weights, tensors)
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(NotWhole, match=r"1\.6 or later did not write it"):
        read_folder(tmp_path)


def test_a_file_that_was_packed_again_is_refused(tmp_path):
    torch.save({"weight": torch.zeros(64)}, tmp_path / "plain")
    with (
        zipfile.ZipFile(tmp_path / "plain") as plain,
        zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(NotWhole, match="compressed"):
        read_folder(tmp_path)


def test_a_model_in_several_files_needs_each(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2
    assert_same(read_folder(tmp_path / "model").weights, dict(model.named_parameters()))
    files[1].rename(tmp_path / "away")
    with pytest.raises(NotWhole, match=f"{files[1].name} is missing"):
        read_folder(tmp_path / "model")
    files[1].write_bytes((tmp_path / "away").read_bytes()[:-8])
    with pytest.raises(NotWhole, match=f"{files[1].name} is cut off"):
        read_folder(tmp_path / "model")


def test_what_is_no_checkpoint_is_named_by_what_it_has(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match=r"holds no checkpoint.* it has notes.txt"):
        read_folder(tmp_path)


def test_a_portable_checkpoint_goes_on_from_a_trainers(by_trainer, tmp_path):
    _, folder = by_trainer
    made = convert(folder, tmp_path)
    assert check(made)["form"] == "portable"
    first, second = read_folder(folder), read_folder(made)
    assert_same(second.weights, {n: t.read() for n, t in first.weights.items()})
    assert_same(second.states, {n: t.read() for n, t in first.states.items()})
    assert (second.groups, second.step) == (first.groups, 2)
    assert second.strategy == "Trainer: whole"
    assert verify(made, folder)["ok"]


def test_a_difference_is_named_with_its_size(by_trainer, tmp_path):
    _, folder = by_trainer
    tensors = load_file(folder / "model.safetensors")
    name = "transformer.wpe.weight"
    tensors[name][3, 2] += 0.5
    save_file(tensors, tmp_path / "model.safetensors")
    verdict = verify(folder, tmp_path)
    assert not verdict["ok"]
    assert verdict["first_difference"] == name
    assert verdict["largest_gap"] == pytest.approx(0.5)
    assert verdict["only_in_one"] == []
    tensors[name][0, 0] = float("nan")
    del tensors["transformer.wte.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert verify(tmp_path)["not_finite"] == [name]
    assert verify(folder, tmp_path)["only_in_one"] == ["transformer.wte.weight"]


def test_it_is_shown_with_the_command_that_goes_on(by_trainer, lora):
    facts = show(by_trainer[1])
    assert (facts["library"], facts["holds"], facts["step"]) == ("Trainer", "full model", 2)
    assert facts["parameters"] == by_trainer[0].model.num_parameters()
    assert facts["optimizer_states"] == dict.fromkeys(("step", *MOMENTS[:2]), 28)
    assert facts["next"].startswith("toolkit checkpoint convert ")
    assert show(lora[1])["holds"] == "adapter"


def test_an_adapter_merged_is_what_peft_merges(lora, tmp_path):
    _, folder, base = lora
    merge(folder, tmp_path / "merged", merge_adapter=True)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    theirs = adapted.merge_and_unload()
    for (name, ours_one), their_one in zip(
        ours.named_parameters(), theirs.parameters(), strict=True
    ):
        torch.testing.assert_close(ours_one, their_one, msg=name)
    changed = ours.model.layers[0].self_attn.q_proj.weight
    assert not torch.equal(changed, tiny_llama().model.layers[0].self_attn.q_proj.weight)


def test_an_adapter_is_written_as_peft_loads_it(lora, tmp_path):
    _, folder, base = lora
    made = merge(convert(folder, tmp_path), tmp_path / "adapter", base=folder)
    assert load_file(made / "adapter_model.safetensors").keys() == (
        load_file(folder / "adapter_model.safetensors").keys()
    )
    assert verify(made, folder)["ok"]
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(made))
    assert loaded.peft_config["default"].lora_alpha == 6


def test_a_model_of_another_config_is_refused(by_trainer, tmp_path):
    tiny_llama().config.save_pretrained(tmp_path / "base")
    with pytest.raises(UsageError, match="is no weight of LlamaForCausalLM"):
        merge(by_trainer[1], tmp_path / "model", base=tmp_path / "base")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("write", [convert, merge])
def test_room_on_the_disk_is_looked_for_before_anything_is_written(tmp_path, write):
    """A file with a hole, which takes no room itself, holds more than the disk has."""
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    elements = shutil.disk_usage(tmp_path).free // 4 + (1 << 20)
    facts = {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}
    header = json.dumps({"weight": facts}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * elements)
    states = {"weight": {"step": torch.tensor(3.0)}}
    groups = [{"params": ["weight"], "lr": 0.1}]
    torch.save({"state": states, "param_groups": groups}, folder / "optimizer.bin")
    with pytest.raises(OSError, match="no space left on the disk of .*: the save takes "):
        write(folder, tmp_path / "output")
    assert not (tmp_path / "output").exists()


CONVERT = """
import sys, time
from pathlib import Path
from toolkit.checkpoints import converting, stored
pieces = stored.Stored.pieces
def slowly(self):
    time.sleep(0.2)
    yield from pieces(self)
stored.Stored.pieces = slowly
converting.convert(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.long  # it starts a Python that imports all
def test_a_convert_that_is_killed_leaves_the_old_one_whole(by_trainer, tmp_path):
    made = convert(by_trainer[1], tmp_path)
    before = check(made)
    command = [sys.executable, "-c", CONVERT, str(by_trainer[1]), str(tmp_path)]
    with subprocess.Popen(command) as process:
        end = time.monotonic() + 120
        while not any(tmp_path.glob(".checkpoint-2.draft-*/portable/weights/*")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert check(made) == before
    assert any(tmp_path.glob(".checkpoint-2.draft-*"))
    convert(by_trainer[1], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # as a disk that is full by then
from toolkit.training.checkpoint_command import main
main()
"""


@pytest.mark.long  # it starts a Python that imports all
@pytest.mark.parametrize("verb", ["convert", "merge"])
def test_a_disk_that_gets_full_is_named_and_leaves_the_old_one_whole(by_trainer, tmp_path, verb):
    write = {"convert": convert, "merge": merge}[verb]
    output = tmp_path / "output"
    made = write(by_trainer[1], output)
    before = check(made)
    words = {"verb": verb, "folder": str(by_trainer[1]), "output": str(output)}
    command = [sys.executable, "-c", FULL, json.dumps(words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert re.search(r"toolkit: .*no space left on the disk of", done.stderr)
    assert "Traceback" not in done.stderr
    assert check(made) == before
    assert [*made.parent.glob(".*")] == []


def test_the_command_says_what_is_wrong_with_which_file(by_trainer, tmp_path, command, capsys):
    assert checkpoint_command.run("verify", by_trainer[1], as_json=True, against=None) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    (tmp_path / "model.safetensors").write_bytes(b"x" * 20)
    assert checkpoint_command.run("verify", tmp_path, against=None) == 1
    assert "damage  " in capsys.readouterr().out
    done = command("checkpoint", "convert", tmp_path, "--output", tmp_path / "output")
    assert done.returncode == 2
    assert re.search(r"toolkit: .*model.safetensors is cut off or damaged", done.stderr)
