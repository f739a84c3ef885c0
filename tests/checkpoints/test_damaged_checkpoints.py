"""A checkpoint that is not whole is named, and the newest whole one is taken; or nothing is."""

import json
import os
import random

import pytest
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from toolkit.checkpoints.atomic_folder import atomic_folder
from toolkit.checkpoints.resume_request import ResumeRequest, folder_to_resume, requested_checkpoint
from toolkit.checkpoints.resuming import damages, differences, find_checkpoint
from toolkit.engines.deepspeed import reads_without_code
from toolkit.errors import UsageError
from toolkit.measuring.recorder import drop_steps_after
from toolkit.records.manifests import MANIFEST, read_manifest, write_manifest

FACTS = {"num_processes": 2, "strategy": "zero2", "per_device_train_batch_size": 4, "seed": 1}


def save(output_dir, step, **changed):
    folder = output_dir / f"checkpoint-{step}"
    described = {"kind": "checkpoint", "format": 1, "step": step, "facts": FACTS | changed}
    with atomic_folder(folder, **described) as draft:
        (draft / "global_step").mkdir()
        for name in ("rank-0.pt", "rank-1.pt", "global_step/states"):
            (draft / name).write_bytes(bytes(range(256)) * step)
    return folder


def flip(file):
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)


def rewrite(folder, **changed):
    """Write a manifest that holds with other facts in it, as an attacker or a newer version may."""
    write_manifest(folder, **read_manifest(folder) | changed)


FAULTS = {
    "flipped": (lambda f: flip(f / "rank-1.pt"), "rank-1.pt has changed since it was saved"),
    "cut off": (
        lambda f: (f / "global_step/states").write_bytes(b"x"),
        "states has 1 bytes, it was saved with",
    ),
    "missing": (lambda f: (f / "rank-0.pt").unlink(), "rank-0.pt is missing"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "has no manifest that can be read"),
    "torn manifest": (
        lambda f: (f / MANIFEST).write_text('{"files": {"rank-0.pt": 1}}'),
        "has no manifest that can be read",
    ),
    "another folder": (
        lambda f: (f / MANIFEST).write_text('{"files": {}, "step": 6}'),
        "has no manifest that can be read",
    ),
    "of another kind": (lambda f: rewrite(f, kind="model"), "holds no checkpoint of this toolkit"),
    "without facts": (lambda f: rewrite(f, facts=None), "holds no checkpoint of this toolkit"),
    "a changed step": (
        lambda f: (f / MANIFEST).write_text(
            (f / MANIFEST).read_text().replace('"step": 6', '"step": 2')
        ),
        "has a manifest that has changed since it was written",
    ),
    "another step": (lambda f: rewrite(f, step=2), "checkpoint of step 2, and its name says"),
    "random bytes": (
        lambda f: (f / MANIFEST).write_bytes(random.Random(1).randbytes(500)),
        "has no manifest that can be read",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_one_is_named_and_the_newest_whole_one_is_taken(tmp_path, fault):
    damage, sentence = FAULTS[fault]
    for step in (2, 4, 6):
        save(tmp_path, step)
    damage(tmp_path / "checkpoint-6")
    found = find_checkpoint(ResumeRequest(tmp_path), FACTS)
    assert found.folder == tmp_path / "checkpoint-4"
    assert found.step == 4
    assert len(found.damaged) == 1
    assert "checkpoint-6" in found.damaged[0]
    assert sentence in found.damaged[0]
    assert found.facts()["damaged"] == list(found.damaged)


def test_every_damage_of_a_checkpoint_is_named(tmp_path):
    folder = save(tmp_path, 2)
    flip(folder / "rank-0.pt")
    (folder / "rank-1.pt").unlink()
    assert len(damages(folder)) == 2


def test_without_a_whole_one_each_is_named_and_nothing_is_started(tmp_path):
    for step in (2, 4):
        flip(save(tmp_path, step) / "rank-0.pt")
    with pytest.raises(UsageError, match=r"checkpoint-4.*checkpoint-2.*Start from the beginning"):
        find_checkpoint(ResumeRequest(tmp_path), FACTS)


def test_for_one_that_was_named_and_is_damaged_the_newest_whole_one_before_it_is_taken(tmp_path):
    save(tmp_path, 2)
    named = save(tmp_path, 4)
    save(tmp_path, 6)
    assert find_checkpoint(ResumeRequest(tmp_path, named), FACTS).step == 4
    flip(named / "rank-0.pt")
    found = find_checkpoint(ResumeRequest(tmp_path, named), FACTS)
    assert found.step == 2
    assert "rank-0.pt has changed" in found.damaged[0]


def test_another_training_is_refused_with_both_values_of_every_difference(tmp_path):
    save(tmp_path, 2)
    now = FACTS | {"num_processes": 4, "strategy": "fsdp", "per_device_train_batch_size": 2}
    with pytest.raises(UsageError) as error:
        find_checkpoint(ResumeRequest(tmp_path), now)
    for difference in (
        "world size is 2 in the checkpoint and 4 now",
        "strategy is zero2 in the checkpoint and fsdp now",
        "--per_device_train_batch_size is 4 in the checkpoint and 2 now",
    ):
        assert difference in str(error.value)
    assert "seed" not in str(error.value)


def test_a_fact_that_only_one_side_knows_is_a_difference():
    assert differences({"seed": 1}, {"seed": 1, "method": "lora"}) == [
        "method is not told in the checkpoint and lora now"
    ]
    assert differences({"seed": 1, "method": "lora"}, {"seed": 1}) == [
        "method is lora in the checkpoint and not told now"
    ]


@pytest.mark.parametrize("newer", [{"schema": 9}, {"format": 9}])
@pytest.mark.parametrize("signed", [True, False])
def test_a_checkpoint_of_a_newer_format_is_refused_by_name_and_never_passed_over(
    tmp_path, newer, signed
):
    for step in (4, 6):
        folder = save(tmp_path, step)
    manifest = json.loads((folder / MANIFEST).read_text()) | newer
    (folder / MANIFEST).write_text(json.dumps(manifest))
    if signed and "format" in newer:
        del manifest["manifest_sha256"]
        write_manifest(folder, **manifest)
    before = (folder / MANIFEST).read_bytes()
    with pytest.raises(UsageError, match=r"checkpoint-6 was written by a newer toolkit.* 9, and"):
        find_checkpoint(ResumeRequest(tmp_path), FACTS)
    # A run that goes on from an older one comes to the same step again.
    assert find_checkpoint(ResumeRequest(tmp_path, tmp_path / "checkpoint-4"), FACTS).step == 4
    with atomic_folder(folder, kind="checkpoint", format=1, step=6, facts=FACTS, shared=False):
        pass
    assert (tmp_path / "checkpoint-6.kept-1" / MANIFEST).read_bytes() == before


def test_a_damaged_one_is_in_nobodys_way_when_its_step_is_saved_again(tmp_path):
    for step in (4, 6):
        folder = save(tmp_path, step)
    (folder / MANIFEST).write_bytes(bytes([0xFF]) * 100)
    assert find_checkpoint(ResumeRequest(tmp_path), FACTS).step == 4
    described = {"kind": "checkpoint", "format": 1, "step": 6, "facts": FACTS}
    with atomic_folder(folder, shared=False, **described) as draft:
        (draft / "rank-0.pt").write_bytes(b"new")
    assert find_checkpoint(ResumeRequest(tmp_path), FACTS).step == 6
    assert (tmp_path / "checkpoint-6.kept-1" / "rank-1.pt").is_file()


def test_a_link_is_no_checkpoint(tmp_path):
    save(tmp_path / "elsewhere", 6)
    save(tmp_path, 4)
    (tmp_path / "checkpoint-6").symlink_to(tmp_path / "elsewhere" / "checkpoint-6")
    assert find_checkpoint(ResumeRequest(tmp_path), FACTS).step == 4


def test_what_was_aside_when_a_commit_died_is_found(tmp_path):
    save(tmp_path, 2).rename(tmp_path / ".checkpoint-2.aside")
    asked = requested_checkpoint({"output_dir": tmp_path, "resume_from_checkpoint": "last"})
    assert find_checkpoint(asked, FACTS).folder == tmp_path / "checkpoint-2"


def test_nothing_to_resume_is_an_error_and_never_a_fresh_start(tmp_path):
    for asked in ("last", str(tmp_path)):
        with pytest.raises(UsageError, match="holds no checkpoint to resume from"):
            requested_checkpoint({"output_dir": tmp_path, "resume_from_checkpoint": asked})
    with pytest.raises(UsageError, match="is no folder"):
        requested_checkpoint({"output_dir": tmp_path, "resume_from_checkpoint": "checkpoint-9"})


def test_a_second_start_over_an_unfinished_run_is_refused(tmp_path):
    assert requested_checkpoint({"output_dir": tmp_path, "resume_from_checkpoint": None}) is None
    save(tmp_path, 5)
    with pytest.raises(UsageError, match="a run that was not finished, the newest of step 5"):
        requested_checkpoint({"output_dir": tmp_path, "resume_from_checkpoint": None})


def test_a_checkpoint_or_its_run_says_where_to_go_on(tmp_path):
    folder = save(tmp_path, 5)
    said = {"output_dir": "elsewhere", "resume_from_checkpoint": str(folder)}
    assert requested_checkpoint(said) == ResumeRequest(tmp_path, folder)
    said["resume_from_checkpoint"] = str(tmp_path)
    assert requested_checkpoint(said) == ResumeRequest(tmp_path)
    assert folder_to_resume(str(folder), None) == str(tmp_path)
    assert folder_to_resume(str(tmp_path), None) == str(tmp_path)
    assert folder_to_resume("last", "here") == "here"
    assert folder_to_resume(None, None) is None
    with pytest.raises(UsageError, match="pass the --output_dir"):
        folder_to_resume("last", None)


def test_lines_of_steps_that_are_trained_again_go_and_a_torn_one_too(tmp_path):
    file = tmp_path / "steps.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(1, 6)]
    file.write_text("\n".join(lines) + '\n{"step": 6, "lo')
    drop_steps_after(file, 3)
    assert file.read_text() == "\n".join(lines[:3]) + "\n"
    drop_steps_after(tmp_path / "none.jsonl", 3)
    assert not (tmp_path / "none.jsonl").exists()


class Attribute:
    """Pickled as Python 3.11.2 pickles the member of an enum."""

    def __init__(self, owner, name):
        self.asked = owner, name

    def __reduce__(self):
        return getattr, self.asked


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_deepspeeds_files_are_read_and_nothing_in_them_is_run(tmp_path):
    engine = TorchCheckpointEngine()
    own = {
        "module": {"weight": torch.arange(3.0)},
        "zero_stage": ZeroStageEnum.gradients,
        "by_name": Attribute(ZeroStageEnum, "weights"),
        "loss_scaler": DynamicLossScaler(2**8, 2, 1000, 1, 1, False, dtype=torch.float16),
        "fragments": {"weight": fragment_address(numel=3, start=0)},
    }
    file = tmp_path / "mp_rank_00_model_states.pt"
    torch.save(own, file)
    with reads_without_code(engine):
        read = engine.load(str(file), map_location="cpu")
    assert torch.equal(read["module"]["weight"], own["module"]["weight"])
    assert vars(read["loss_scaler"]) == vars(own["loss_scaler"])
    assert {name: read[name] for name in ("zero_stage", "fragments")} == {
        name: own[name] for name in ("zero_stage", "fragments")
    }

    assert read["by_name"] is ZeroStageEnum.weights

    torch.save({"by_name": Attribute(torch.Size, "mro")}, file)
    with reads_without_code(engine), pytest.raises(UsageError, match="would run code"):
        engine.load(str(file), map_location="cpu")

    made = tmp_path / "made"
    torch.save(own | {"extra": Runs(made)}, file)
    said = r"model_states.pt would run code and was not loaded: it names \w+.mkdir\. Resume only"
    with reads_without_code(engine), pytest.raises(UsageError, match=said):
        engine.load(str(file), map_location="cpu")
    assert not made.exists()
    engine.load(str(file), map_location="cpu")  # as DeepSpeed reads it by itself
    assert made.exists()
