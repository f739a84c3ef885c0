"""Ranks of a stranger's script that part are refused, and what is unusual is said."""

import sys

import launches
import pytest
from places import SCRIPTS

PARTED = {
    "RawModel": "forwards called the model inside past its wrapper",
    "OneRankClips": "look for no_sync around a whole step, and for clipping",
    "OneRankSteps": "look for no_sync around a whole step, and for clipping",
    "NoSync": "look for no_sync around a whole step, and for clipping",
    "LayerReplaced": "last.weight was added after the model was wrapped",
    "AdapterAfter": "first.lora_A.default.weight was added after the model was wrapped",
}


@pytest.fixture(scope="module")
def parted(launch):
    def run(strategy, *words):
        return launch(strategy, "-m", "toolkit.rehearse", SCRIPTS / "parted.py", *words)

    return run


def test_ranks_that_part_are_refused_and_each_model_is_named_with_its_cause(parted):
    done = parted("ddp", "faults")
    assert done.returncode != 0
    assert "(exitcode: 3)" in done.stdout or "exitcode  : 3" in done.stdout, done.stdout
    assert "attested" not in done.stdout
    [line] = [line for line in done.stdout.splitlines() if "toolkit: refused:" in line]
    sentences = line.split("Rank 1 parted from the others: ")
    assert len(sentences) == 1 + len(PARTED), line
    for sentence, (name, cause) in zip(sentences[1:], PARTED.items(), strict=True):
        assert f"trained parameters of {name} that should be equal differ" in sentence
        assert cause in sentence
    assert sentences[0].count("RMSprop made 4 steps on 4 parameters that no prepared") == 1
    assert "Adagrad made 4 steps at learning rates of up to 0.01, and none of its" in line


def test_a_sound_script_is_not_refused_whatever_else_it_does(parted):
    done = parted("ddp", "sound")
    assert done.returncode == 0, done.stdout
    assert "attested ddp: " in done.stdout


def test_what_may_be_meant_is_a_note_and_the_run_goes_on(parted):
    done = parted("ddp", "notes")
    assert done.returncode == 0, done.stdout
    for note in (
        "8 of 8 optimizer steps were made while EqualRows was in evaluation mode",
        "all ranks read equal rows, in each of 8 forwards of EqualRows",
        "Rank 1 began with other weights than the others: 1 of 4 parameters of OtherStart",
        "DDP is wrapped around Twice twice",
        "Accelerator(gradient_accumulation_steps=4) was asked, and every optimizer step",
        "LinearLR went 8 steps in 4 optimizer steps, one for each process, and the learning rate "
        "was 0 in the last 2",
    ):
        assert done.stdout.count(note) == 1, (note, done.stdout)
    assert done.stdout.count("equal rows") == 1


def test_products_are_told_by_the_dtype_that_fsdp_s_own_policy_computes_in(parted):
    done = parted("fsdp", "policy")
    assert done.returncode == 0, done.stdout
    assert "parameter_dtypes ['float32'], products bfloat16 100%" in done.stdout


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_adapters_attached_after_a_wrapper_that_shards_are_refused(parted, strategy):
    done = parted(strategy, "faults", "adapter_after")
    assert "Rank 1 parted from the others: 2 of 2 trained parameters of" in done.stdout, done.stdout
    assert "first.lora_A.default.weight was added after the model was wrapped" in done.stdout
    assert "Optimizer steps that were not prepared" not in done.stdout


def test_a_rank_that_leaves_first_is_compared_by_the_last(parted):
    done = parted("ddp", "no_sync_and_rank_0_leaves")
    assert "rank 0 left before the others" in done.stdout, done.stdout
    assert "parameters of NoSync that should be equal differ" in done.stdout
    assert done.returncode != 0


def test_a_model_that_the_script_splits_itself_under_ddp_is_refused_by_what_engaged(
    launch, launch_environment, tmp_path
):
    script = tmp_path / "split.py"
    script.write_text(SPLIT)
    done = launch("ddp", "-m", "toolkit.rehearse", script, tmp_path)
    assert "model_split_by: asked none, engaged tensor 2 (rank 0)" in done.stdout, done.stdout
    assert done.returncode != 0
    words = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
    words += ("-m", "toolkit.rehearse", script, tmp_path)
    by_itself = launches.run((sys.executable, *words), environment=launch_environment)
    assert by_itself.returncode == 0, by_itself.stdout
    assert "the script splits its model by itself, and no config says how" in by_itself.stdout


SPLIT = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig
from pathlib import Path
import os
import torch.distributed as dist

size = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2)
folder = Path(sys.argv[1], "model-" + os.environ["RANK"])
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(**size)).save_pretrained(folder)
model = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (16, 8))]
args = TrainingArguments(sys.argv[1], max_steps=2, report_to="none", save_strategy="no")
Trainer(model=model, args=args, train_dataset=rows).train()
"""
