"""The known ways in which a backend silently turns into another one, one after the other.

Runs as 2 ranks with the trainer that a user would import; says what became of each case.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu"}

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from toolkit.measuring.attestation import Refused
from toolkit.rehearse import _patch_accelerate, _patch_deepspeed
from toolkit.training.trainer import ToolkitTrainer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(sys.argv[1])
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


def zero(name):
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(ROOT / "deepspeed_configs" / f"{name}.json"),
    }


def train(name, asked, *, rehearsed=True, **arguments):
    """Train 2 steps under what `asked` would make the launcher set, and tell how that ended."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for key in {**FSDP, **zero("zero2"), "ACCELERATE_USE_CPU": "", "ACCELERATE_TORCH_DEVICE": ""}:
        os.environ.pop(key, None)
    os.environ |= asked
    if rehearsed:
        os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
        PartialState._prepare_backend = REHEARSED
    else:
        PartialState._prepare_backend = ORIGINAL
    try:
        args = TrainingArguments(
            output_dir=str(FOLDER / f"{name}-{os.environ['RANK']}"),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=2,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **arguments,
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
            )
        )
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (32, 8))]
        trainer = ToolkitTrainer(model=model, args=args, train_dataset=rows)
        trainer.train()
        trainer.save_model(str(FOLDER / name))
        return {"ended": "trained", "engaged": trainer.record["attestation"]["engaged"]}
    except Refused as error:
        return {"ended": "refused", "text": str(error)}


torch.distributed.init_process_group("gloo")
ORIGINAL = PartialState._prepare_backend
_patch_accelerate()
_patch_deepspeed()
REHEARSED = PartialState._prepare_backend

CPU = {"ACCELERATE_USE_CPU": "true"}
outcomes = {
    # Controls: the same script, rightly set up, is not refused.
    "ddp": train("ddp", {}),
    "fsdp": train("fsdp", FSDP),
    "zero2": train("zero2", zero("zero2")),
    # With it a stock Trainer's save_model leaves nothing at all.
    "fsdp_sharded": train("fsdp_sharded", FSDP | {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}),
    # Without a GPU and without a rehearsal each rank believes that it is alone.
    "ddp_alone": train("ddp_alone", {}, rehearsed=False),
    "fsdp_alone": train("fsdp_alone", FSDP, rehearsed=False),
    # Asked for the CPU, Accelerate runs DDP whatever else was asked.
    "fsdp_on_cpu": train("fsdp_on_cpu", FSDP | CPU, rehearsed=False),
    "zero2_on_cpu": train("zero2_on_cpu", zero("zero2") | CPU, rehearsed=False),
    "fsdp_use_cpu": train("fsdp_use_cpu", FSDP, use_cpu=True),
    # A config without a wrapping policy shards the root alone: nothing is freed on the way.
    "fsdp_no_wrap": train("fsdp_no_wrap", FSDP | {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}),
}
(FOLDER / f"outcomes-{os.environ['RANK']}.json").write_text(json.dumps(outcomes))
torch.distributed.barrier()
os._exit(0)
