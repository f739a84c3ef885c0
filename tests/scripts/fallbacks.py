"""The known ways in which a backend silently turns into another one, one after the other.

Runs as 2 ranks with the trainer that a user would import, and with a loop of the user's own
that a recorder watches; says what became of each case.
"""

import base64
import json
import os
import sys
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu"}

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from toolkit.configs.optimizers import (
    EVERYWHERE,
    OF_WHOLE,
    OF_WHOLE_OR_FLAT,
    optimizer_problem,
)
from toolkit.configs.requested import LAUNCHER, requested_strategy
from toolkit.engines.on_cpu import patch_accelerate, patch_deepspeed, patch_transformers
from toolkit.errors import UsageError
from toolkit.measuring.attestation import Refused, Requested
from toolkit.measuring.recorder import Recorder
from toolkit.strategies import STRATEGIES
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


def file_of(name):
    return str(ROOT / "deepspeed_configs" / f"{name}.json")


def zero(name):
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": file_of(name),
    }


def changed(name, changes):
    """A bundled DeepSpeed file with some keys set otherwise; None takes one out."""
    config = json.loads((ROOT / "deepspeed_configs" / f"{name}.json").read_text())
    for key, value in changes.items():
        config |= {key: value}
        if value is None:
            del config[key]
    text = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    return zero(name) | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": text}


def start(asked, *, rehearsed=True):
    """Forget the case before, and set what the launcher would set."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ |= UNTOUCHED | asked
    if rehearsed:
        os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
        PartialState._prepare_backend = REHEARSED
    else:
        PartialState._prepare_backend = ORIGINAL


def small_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )


def train(name, asked, *, rehearsed=True, no_config=False, **arguments):
    """Train 2 steps under what `asked` would make the launcher set, and tell how that ended."""
    start(asked, rehearsed=rehearsed)
    if no_config:
        del os.environ[LAUNCHER]  # torchrun doesn't set it
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
        model = small_model()
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (32, 8))]
        trainer = ToolkitTrainer(model=model, args=args, train_dataset=rows)
        trainer.train()
        trainer.save_model(str(FOLDER / name))
        return {"ended": "trained", "engaged": trainer.record["attestation"]["engaged"]}
    except (Refused, UsageError) as error:
        return {"ended": "refused", "text": str(error)}


ADAMW = {"learning_rate": 1e-3, "weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}
"""What torch's AdamW does unless it is told otherwise."""


def loop(asked, *, steps_with=None, split=None, **wanted):
    """Train 1 step in a stock loop that accumulates 2 micro-batches and never clips."""
    start(asked)
    strategy = requested_strategy(os.environ)
    recorder = Recorder(Requested(strategy=strategy, num_processes=2, **wanted), rehearsal=True)
    try:
        accelerator = Accelerator(gradient_accumulation_steps=2, parallelism_config=split)
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), **steps_with or {})
        loader = torch.utils.data.DataLoader(torch.randint(0, 64, (32, 8)), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        recorder.prepared(accelerator, model, optimizer)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                recorder.micro_batch(loss, tokens=batch.numel())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                recorder.step_done(learning_rate=1e-3)
                break
        return {"ended": "trained", **recorder.finish()["attestation"]}
    except Refused as error:
        return {"ended": "refused", "text": str(error)}


torch.distributed.init_process_group("gloo")
UNTOUCHED = dict(os.environ)
ORIGINAL = PartialState._prepare_backend
patch_accelerate()
patch_deepspeed()
patch_transformers()
REHEARSED = PartialState._prepare_backend

SUMS_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
SUMS_IN_BF16 = {"data_types": {"grad_accum_dtype": "bf16"}}
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
    # Requested for the CPU, Accelerate runs DDP whatever else was asked.
    "fsdp_on_cpu": train("fsdp_on_cpu", FSDP | CPU, rehearsed=False),
    "zero2_on_cpu": train("zero2_on_cpu", zero("zero2") | CPU, rehearsed=False),
    "fsdp_use_cpu": train("fsdp_use_cpu", FSDP, use_cpu=True),
    # A config without a wrapping policy shards the root alone: nothing is freed on the way.
    "fsdp_no_wrap": train("fsdp_no_wrap", FSDP | {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}),
    # The control of those below.
    "loop": loop(
        zero("zero2"), gradient_accumulation_steps=2, precision="no", optimizer_settings=ADAMW
    ),
    # The optimizer is made with other numbers than were asked.
    **{
        f"loop_{name}_{setting}": loop(
            backend, steps_with={setting: value}, optimizer_settings=ADAMW
        )
        for name, backend in (("ddp", {}), ("fsdp", FSDP), ("zero3", zero("zero3")))
        for setting, value in (("weight_decay", 0.011), ("betas", (0.9, 0.99)))
    },
    # Without the key DeepSpeed steps after each micro-batch, whatever the Accelerator was told.
    "loop_no_accumulation": loop(
        changed("zero2", {"gradient_accumulation_steps": None}), gradient_accumulation_steps=2
    ),
    # What the launcher exports goes before what the script says.
    "loop_exported_accumulation": loop(
        {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, gradient_accumulation_steps=2
    ),
    # "auto" is filled in by the Trainer; in a loop it means no bf16, and clipping at 1.0.
    "loop_bf16_auto": loop(zero("zero2"), precision="bf16"),
    "loop_clipping_auto": loop(zero("zero2"), gradient_clipping=0.0),
    # By the script's own words, where no config asks for it.
    "loop_context_parallel": loop(FSDP, split=ParallelismConfig(cp_size=2)),
    # Below its threshold ZeRO-3 keeps each parameter whole on every rank, here all of them.
    "loop_persistent": loop(zero("zero3")),
    # The Trainer goes by its arguments alone.
    "exported_accumulation": train(
        "exported_accumulation", FSDP | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    ),
    # Its layers are wrapped by Accelerate, and nothing of it stands in the Trainer's arguments.
    "fsdp_checkpointing": train(
        "fsdp_checkpointing", FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}
    ),
    # DeepSpeed takes it under ZeRO-3 and passes it over under the other stages.
    "zero3_sums_in_bf16": train("zero3_sums_in_bf16", changed("zero3", SUMS_IN_BF16)),
    "zero2_sums_in_bf16": train("zero2_sums_in_bf16", changed("zero2", SUMS_IN_BF16)),
    "zero1_sums_in_fp32": train(
        "zero1_sums_in_fp32",
        changed("zero1", SUMS_IN_FP32),
        bf16=True,
        weight_decay=0.25,
    ),
    # What the arguments ask by themselves, with a launcher's config beside them and without.
    "own_zero2_under_ddp": train("own_zero2_under_ddp", {}, deepspeed=file_of("zero2")),
    "own_zero2": train("own_zero2", {}, no_config=True, deepspeed=file_of("zero2")),
    "own_zero3_sums_in_bf16": train(
        "own_zero3_sums_in_bf16",
        {},
        no_config=True,
        deepspeed=json.loads((ROOT / "deepspeed_configs" / "zero3.json").read_text())
        | SUMS_IN_BF16,
    ),
    "own_fsdp": train("own_fsdp", {}, no_config=True, fsdp="full_shard auto_wrap"),
    # A file without the section: Accelerate adds it.
    "zero2_no_bf16": train("zero2_no_bf16", changed("zero2", {"bf16": None}), bf16=True),
} | {
    f"{optim}_{name}": train(f"{optim}_{name}", asked, optim=optim)
    for name, asked in {"ddp": {}, "zero3": zero("zero3"), "fsdp": FSDP}.items()
    for optim in (*EVERYWHERE, *OF_WHOLE_OR_FLAT, *OF_WHOLE)
    if optimizer_problem(optim, STRATEGIES[name]) is None
}
(FOLDER / f"outcomes-{os.environ['RANK']}.json").write_text(json.dumps(outcomes))
torch.distributed.barrier()
os._exit(0)
