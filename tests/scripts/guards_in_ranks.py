"""Short trainings in one process group, with the guards on and off, and with faults in them.

    accelerate launch --config_file ddp.yaml tests/scripts/guards_in_ranks.py OUTPUT NAME ...

Each NAME is a key of RUNS; what a rank saw is left in OUTPUT/NAME/rank-<rank>.json.
"""

import contextlib
import io
import json
import math
import os
import sys
import time
import traceback
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from toolkit import ToolkitTrainer
from toolkit.checkpoints.keeping import Keeper
from toolkit.configs.requested import requested_strategy
from toolkit.engines.tensors import local
from toolkit.errors import GuardError
from toolkit.measuring import guards as bounds
from toolkit.measuring.attestation import Requested
from toolkit.measuring.heartbeat import heartbeat_for
from toolkit.measuring.recorder import Recorder
from toolkit.rehearse import die_with_launcher, rehearse_if_needed
from toolkit.training.loop import train_loop
from toolkit.training.observers import Observer
from toolkit.training.saving import save_model

RANK = int(os.environ["RANK"])
STEPS = 16
BAD_STEP = 12
"""The step in which rank 1 goes wrong: late enough for a gradient norm to have a median."""

SLEEP_SECONDS = 3.0
bounds.STALL_SECONDS = 1.5  # whatever else runs beside the tests holds up no rank for so long


LOCAL_ONLY = {"wait_tensor", "_wrap_tensor_autograd"}


class Collectives(TorchDispatchMode):
    """Lists what the ranks are asked to do together, by a look at the dispatcher alone."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it is made of comes here again, its collectives too
        if func.namespace in ("c10d", "_c10d_functional") and not LOCAL_ONLY & set(
            str(func).split(".")
        ):
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if is_tensor(leaf)]
            self.calls.append(
                [str(func), [[str(t.dtype), t.numel() * t.element_size()] for t in tensors]]
            )
        return func(*args, **kwargs or {})


def is_tensor(value):
    return isinstance(value, torch.Tensor)


class Listed(TrainerCallback):
    """Cuts the list of collectives into steps: what is asked for up to the end of each."""

    def __init__(self, mode):
        self.mode, self.steps = mode, []

    def on_step_end(self, *_, **__):
        self.steps.append(self.mode.calls)
        self.mode.calls = []


def build(seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def rows_for(order=0):
    chosen = torch.randint(0, 128, (256, 16), generator=torch.Generator().manual_seed(0))
    ids = torch.randperm(256, generator=torch.Generator().manual_seed(order)).tolist()
    return Dataset.from_dict(
        {
            "input_ids": [chosen[i].tolist() for i in ids],
            "labels": [chosen[i].tolist() for i in ids],
            "sample_id": ids,
        }
    )


def collate(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def arguments(folder, **changes):
    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "learning_rate": 1e-3,
            "ddp_find_unused_parameters": False,
            "remove_unused_columns": False,
            "disable_tqdm": True,
        }
        | changes
    )


class Sequential(ToolkitTrainer):
    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


def at_bad_step(model, change):
    """Have rank 1's model change its output in the first micro-batch of the step that is bad."""
    calls, forward = [0], model.forward

    def faulty(*args, **kwargs):
        output = forward(*args, **kwargs)
        calls[0] += 1
        if RANK == 1 and calls[0] == 2 * (BAD_STEP - 1) + 1:
            change(output)
        return output

    model.forward = faulty
    return model


def not_a_number(output):
    output.loss = output.loss * math.nan


def a_million_times(output):
    output.loss = output.loss * 1e6


def infinite_gradients(output):
    # It adds 0, the gradient of which is infinite.
    zero = output.logits.sum() - output.logits.detach().sum()
    output.loss = output.loss + zero.sqrt()


def slow_at_bad_step(model):
    """Have rank 1 sleep within its first layer, as a throttled device would."""
    calls, part = [0], model.model.layers[0].mlp
    forward = part.forward

    def sleepy(*args, **kwargs):
        calls[0] += 1
        if RANK == 1 and calls[0] == 2 * (BAD_STEP - 1) + 1:
            time.sleep(SLEEP_SECONDS)
        return forward(*args, **kwargs)

    part.forward = sleepy
    return model


class SlowRows(torch.utils.data.Dataset):
    """Rows that rank 1 waits for in the step that is bad."""

    def __init__(self):
        self.rows = rows_for()
        self.read = 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        self.read += 1
        # Loaders read one batch ahead.
        if RANK == 1 and self.read == 4 * (BAD_STEP - 1) + 3:
            time.sleep(SLEEP_SECONDS)
        return self.rows[row]


PARTED = "model.layers.1.mlp.up_proj.weight"


def part(model):
    """Have the last rank change a matrix by itself, between two steps."""
    if int(os.environ["WORLD_SIZE"]) - 1 == RANK:
        with torch.no_grad():
            local(dict(model.named_parameters())[PARTED]).mul_(1.1)


class Part(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == self.step:
            part(model)


class PartAndSave(Observer):
    """Has a rank part after the last step, and saves."""

    def __init__(self, folder, recorder, parts):
        self.folder, self.recorder, self.parts = folder, recorder, parts

    def prepared(self, prepared):
        self.engine = prepared

    def step_done(self, step):
        accelerator, model = self.engine.accelerator, self.engine.model
        if step != STEPS:
            return
        if self.parts:
            part(accelerator.unwrap_model(model))
        with self.recorder.saving(model):
            save_model(accelerator, model, self.folder / "final")


# The trainings


def with_trainer(
    folder, model=None, rows=None, *, guards="stop", kind=Sequential, parted_at=None, **changes
):
    trainer = kind(
        model=build() if model is None else model,
        args=arguments(folder, **changes),
        train_dataset=rows_for() if rows is None else rows,
        data_collator=collate,
        **{} if kind is Trainer else {"guards": guards},
    )
    trainer.add_callback(Part(parted_at))
    seen = {}
    try:
        trainer.train()
        seen = {"record": kept_of(trainer.record)}
    finally:
        seen["logged"] = [e["loss"] for e in trainer.state.log_history if "loss" in e]
        seen["step"] = trainer.state.global_step
        WHAT.update(seen)


def with_loop(
    folder,
    model=None,
    rows=None,
    *,
    slow_rank="warn",
    saves=False,
    parts=False,
    save_every=None,
    **changes,
):
    strategy = requested_strategy(os.environ)
    recorder = Recorder(
        Requested(strategy=strategy, num_processes=int(os.environ["WORLD_SIZE"])),
        rehearsal=True,
        heartbeat=heartbeat_for("stop", checkpoints=folder, slow_rank=slow_rank),
    )
    observers = [PartAndSave(folder, recorder, parts)] if saves else []
    if save_every is not None:
        keeper = Keeper(
            output_dir=folder, facts={}, recorder=recorder, every=save_every, last_step=STEPS
        )
        observers.append(keeper)
    try:
        train_loop(
            build() if model is None else model,
            arguments(folder, **changes),
            rows_for() if rows is None else rows,
            collate,
            recorder=recorder,
            scheduled_steps=STEPS,
            observers=observers,
        )
        WHAT["record"] = kept_of(recorder.finish())
    finally:
        WHAT["step"] = len(recorder._steps)
        recorder.close()


def listed(folder, kind, **options):
    """Train, and list every collective of every step."""
    mode = Collectives()
    steps = Listed(mode)

    class Counting(kind):
        def train(self, *args, **kwargs):
            self.add_callback(steps)  # after the recorder's
            with mode:
                super().train(*args, **kwargs)

    trainer = Counting(
        model=build(),
        args=arguments(folder, max_steps=5),
        train_dataset=rows_for(),
        # The stock Trainer would hand the column to the model.
        data_collator=lambda rows: {k: v for k, v in collate(rows).items() if k != "sample_id"},
        **options,
    )
    trainer.train()
    WHAT["steps"] = steps.steps
    if isinstance(trainer, ToolkitTrainer):
        WHAT["record"] = kept_of(trainer.record)


def kept_of(record):
    return {name: record[name] for name in ("guards", "losses", "traffic")}


def each_rank_its_own(train, folder):
    """Have ranks begin with other weights; under FSDP without those of rank 0 being sent."""
    with patch.dict(os.environ, {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}):
        train(folder, build(seed=RANK))


RUNS = {
    "plain": lambda f: listed(f, kind=Trainer),
    "off": lambda f: listed(f, kind=ToolkitTrainer, guards="off"),
    "on": lambda f: listed(f, kind=ToolkitTrainer, guards="stop"),
    "clean": with_trainer,
    "clean_loop": with_loop,
    "nan": lambda f: with_trainer(
        f, at_bad_step(build(), not_a_number), save_strategy="steps", save_steps=5
    ),
    "nan_at_a_save": lambda f: with_trainer(
        f, at_bad_step(build(), not_a_number), save_strategy="steps", save_steps=BAD_STEP
    ),
    "nan_warned": lambda f: with_trainer(
        f, at_bad_step(build(), not_a_number), guards="warn", save_strategy="steps", save_steps=5
    ),
    "nan_loop": lambda f: with_loop(f, at_bad_step(build(), not_a_number)),
    "nan_at_a_save_loop": lambda f: with_loop(
        f, at_bad_step(build(), not_a_number), save_every=BAD_STEP
    ),
    "exploding": lambda f: with_trainer(f, at_bad_step(build(), a_million_times)),
    "exploding_loop": lambda f: with_loop(f, at_bad_step(build(), a_million_times)),
    "infinite_gradients": lambda f: with_loop(f, at_bad_step(build(), infinite_gradients)),
    "weights": lambda f: each_rank_its_own(with_trainer, f),
    "weights_loop": lambda f: each_rank_its_own(with_loop, f),
    "order": lambda f: with_trainer(f, rows=rows_for(order=RANK)),
    "order_loop": lambda f: with_loop(f, rows=rows_for(order=RANK)),
    # The Trainer's own sampler shuffles by the seed.
    "seed": lambda f: with_trainer(f, build(), kind=ToolkitTrainer, data_seed=RANK),
    "parted": lambda f: with_trainer(
        f, parted_at=STEPS, save_strategy="steps", save_steps=STEPS // 2
    ),
    "parted_warned": lambda f: with_trainer(
        f, parted_at=STEPS // 2 + 1, guards="warn", save_strategy="steps", save_steps=STEPS // 2
    ),
    "parted_loop": lambda f: with_loop(f, saves=True, parts=True),
    "saved_loop": lambda f: with_loop(f, saves=True),
    "slow": lambda f: with_trainer(f, slow_at_bad_step(build())),
    "slow_loop": lambda f: with_loop(f, slow_at_bad_step(build())),
    "slow_rows": lambda f: with_trainer(f, rows=SlowRows()),
    "slow_stopped": lambda f: with_loop(f, slow_at_bad_step(build()), slow_rank="stop"),
}

WHAT = {}


def main():
    die_with_launcher()
    output, names = Path(sys.argv[1]), sys.argv[2:]
    rehearse_if_needed()
    for name in names:
        folder = output / name
        folder.mkdir(parents=True, exist_ok=True)
        WHAT.clear()
        WHAT.update(error=None, step=None)
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                RUNS[name](folder)
        except GuardError as error:
            WHAT["error"] = str(error)
        except Exception:
            WHAT["crash"] = traceback.format_exc()
        WHAT["printed"] = printed.getvalue()
        (folder / f"rank-{RANK}.json").write_text(json.dumps(WHAT))
        torch.distributed.barrier()
        GradientState._reset_state()
        AcceleratorState._reset_state()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as toolkit.train leaves: a rank that is done sometimes aborts in its exit


main()
