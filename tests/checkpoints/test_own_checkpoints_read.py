"""The toolkit's own checkpoints, of every form, hold what the model of the same step has."""

import shutil

import pytest
import torch

from toolkit.checkpoints.atomic_folder import check
from toolkit.checkpoints.converting import convert
from toolkit.checkpoints.judging import verify
from toolkit.checkpoints.reading import read_folder
from toolkit.checkpoints.stored import NotWhole
from toolkit.training.merging import merge

CASES = {
    "ddp": ("ddp", "loop"),
    "zero3": ("zero3", "loop"),
    "fsdp": ("fsdp", "loop"),
    "ddp-lora": ("ddp", "loop", "--method", "lora"),
    "zero2-lora": ("zero2", "loop", "--method", "lora"),
    "zero3_nvme": ("zero3_nvme", "loop"),
    "pipeline": ("pipeline", "loop", "--strategy", "pipeline"),
    "three_d": ("three_d", "loop", "--strategy", "three_d"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_equals_the_model_of_its_step(
    run_of, dropout_model, llama_of_fours, tmp_path, case
):
    strategy, engine, *flags = CASES[case]
    model = llama_of_fours if "--strategy" in flags else dropout_model
    run = run_of(
        *(strategy, engine, "--max_steps", 2, "--save_steps", 2, "--max_length", 32),
        *("--max_train_samples", 40, "--model_name_or_path", model, *flags),
    )
    run.go()
    saved, final = run.output / "checkpoint-2", run.output / "final"
    contents = read_folder(saved)
    assert (contents.library, contents.strategy, contents.step) == ("toolkit", strategy, 2)
    assert (contents.ranks, len(contents.losses), contents.missing) == (run.ranks, 2, [])
    named = {name for group in contents.groups for name in group["names"]}
    assert named == contents.weights.keys()
    assert {key.rpartition(".")[2] for key in contents.states} == {"exp_avg", "exp_avg_sq", "step"}
    assert len(contents.states) == 3 * len(named)
    assert all(float(t.read()) == 2 for key, t in contents.states.items() if key.endswith(".step"))
    assert verify(saved, final)["ok"]

    made = convert(saved, tmp_path / "portable")
    assert verify(made, saved)["ok"]
    manifest, before = check(made), check(saved)
    assert (manifest["form"], manifest["facts"]) == ("portable", before["facts"])
    kept = {"losses.json", *(f"rank-{rank}.pt" for rank in range(run.ranks))}
    assert {name: manifest["files"][name] for name in kept} == {
        name: before["files"][name] for name in kept
    }
    assert read_folder(made).groups == contents.groups

    merge(saved, tmp_path / "merged")
    merged = read_folder(tmp_path / "merged")
    for name, tensor in read_folder(final).weights.items():
        assert torch.equal(merged.weights[name].read(), tensor.read()), name

    shutil.copytree(saved, tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "rank-1.pt").unlink()
    with pytest.raises(NotWhole, match=r"rank-1.pt is missing"):
        convert(tmp_path / "checkpoint-2", tmp_path / "output")
    assert not (tmp_path / "output").exists()
