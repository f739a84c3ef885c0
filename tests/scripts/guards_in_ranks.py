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
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from toolkit import ToolkitTrainer
from toolkit.checkpoints.saver import CheckpointSaver
from toolkit.configs.requested import requested_strategy
from toolkit.engines import pipeline
from toolkit.engines.pipeline import PipelineRequest
from toolkit.engines.pipelining import running
from toolkit.engines.pipelining.running import Pipeline
from toolkit.engines.tensor_parallel import claim_mesh
from toolkit.engines.tensors import local
from toolkit.errors import GuardError, UsageError
from toolkit.measuring import guards as bounds
from toolkit.measuring import replica_checks
from toolkit.measuring.attestation import Refused, Requested
from toolkit.measuring.heartbeat import heartbeat_for
from toolkit.measuring.recorder import Recorder
from toolkit.rehearse import die_with_launcher, rehearse_if_needed
from toolkit.strategies import get_strategy
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


def split_by(strategy, folder):
    """Return a model that a strategy splits by layers or by matrices."""
    model = build()
    if strategy.schedule is not None:
        pipeline.ask_for(model, PipelineRequest(strategy=strategy, balance="flops", sequence=16))
        return model
    model.save_pretrained(folder / "model")  # on rank 0 alone
    torch.distributed.barrier()
    ranks = torch.distributed.get_world_size()
    return LlamaForCausalLM.from_pretrained(
        folder / "model", distributed_config=claim_mesh(strategy, ranks, precision="no")
    )


def with_split(folder, name, **options):
    """Train by a strategy that no launcher's config names."""
    strategy = get_strategy(name).on_ranks(PartialState().num_processes)
    with_loop(folder, split_by(strategy, folder), strategy=strategy, saves=True, steps=3, **options)


def in_any_order(folder, **options):
    """Train in tensor groups as on GPUs, whose sums need not have the same bits on every rank."""
    with patch.object(replica_checks, "adds_up_in_order", lambda device: False):
        with_split(folder, "tensor", **options)


def counted_twice(folder):
    """Count norms of each rank of a tensor group, in the norm that clips as in the record's."""

    def copies(self, name, parameter):
        return right(self, name, parameter) // (2 if parameter.ndim == 1 else 1)

    right = Pipeline.copies
    with patch.object(Pipeline, "copies", copies):
        with_split(folder, "three_d")


def one_gradient_apart(folder):
    """Have the last rank alone double its gradient of a weight that every rank has whole."""

    def keep_parts(model, ranks, **options):
        right(model, ranks, **options)
        if torch.distributed.get_world_size() - 1 == RANK:
            dict(model.named_parameters())[NORM].register_hook(lambda new: 2 * new)

    right = running.keep_parts
    with patch.object(running, "keep_parts", keep_parts):
        with_split(folder, "three_d")


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


def unused_on_rank_1(model):
    """Have rank 1 leave out a layer, as a branch on its rows would."""
    if RANK == 1:
        model.model.layers[1].mlp.forward = torch.zeros_like
    return model


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
NORM = "model.layers.1.input_layernorm.weight"
"""Of a tensor group, every rank has it whole."""

SPLITTING = ("tensor", "tensor_ddp", "three_d")


def part(model, name=PARTED, by=1.1):
    """Have the last rank change a weight by itself, between two steps."""
    if int(os.environ["WORLD_SIZE"]) - 1 == RANK:
        with torch.no_grad():
            local(dict(model.named_parameters())[name]).mul_(by)


class Part(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == self.step:
            part(model)


class PartAndSave(Observer):
    """Has a rank part after the last step, and saves."""

    def __init__(self, folder, recorder, parts, last):
        self.folder, self.recorder, self.parts, self.last = folder, recorder, parts, last

    def prepared(self, prepared):
        self.engine = prepared

    def step_done(self, step):
        accelerator, model = self.engine.accelerator, self.engine.model
        if step != self.last:
            return
        if self.parts:
            part(accelerator.unwrap_model(model), *self.parts)
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
    parts=None,
    save_every=None,
    strategy=None,
    steps=STEPS,
    **changes,
):
    strategy = strategy or requested_strategy(os.environ)
    recorder = Recorder(
        Requested(strategy=strategy, num_processes=int(os.environ["WORLD_SIZE"])),
        rehearsal=True,
        heartbeat=heartbeat_for("stop", checkpoints=folder, slow_rank=slow_rank),
    )
    observers = [PartAndSave(folder, recorder, parts, steps)] if saves else []
    if save_every is not None:
        saver = CheckpointSaver(
            output_dir=folder, facts={}, recorder=recorder, every=save_every, last_step=steps
        )
        observers.append(saver)
    try:
        train_loop(
            build() if model is None else model,
            arguments(folder, max_steps=steps, **changes),
            rows_for() if rows is None else rows,
            collate,
            recorder=recorder,
            scheduled_steps=steps,
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
    "unused": lambda f: with_trainer(f, unused_on_rank_1(build())),
    "unused_loop": lambda f: with_loop(f, unused_on_rank_1(build())),
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
    "parted_loop": lambda f: with_loop(f, saves=True, parts=[PARTED]),
    "saved_loop": lambda f: with_loop(f, saves=True),
    "slow": lambda f: with_trainer(f, slow_at_bad_step(build())),
    "slow_loop": lambda f: with_loop(f, slow_at_bad_step(build())),
    "slow_rows": lambda f: with_trainer(f, rows=SlowRows()),
    "slow_stopped": lambda f: with_loop(f, slow_at_bad_step(build()), slow_rank="stop"),
}

RUNS |= {name: partial(with_split, name=name) for name in SPLITTING}
RUNS |= {f"{name}_parted": partial(with_split, name=name, parts=[NORM]) for name in SPLITTING}
RUNS |= {
    "rounded": lambda f: in_any_order(f, parts=[NORM, 1 + 1e-5]),
    "counted_twice": counted_twice,
    "one_gradient_apart": one_gradient_apart,
    "not_rounded": lambda f: in_any_order(f, parts=[NORM, 1.02]),
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
        except (GuardError, Refused, UsageError) as error:
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
