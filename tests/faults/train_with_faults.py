"""Train one small model many times in one process group: as it should be, then with faults.

    accelerate launch --config_file ddp.yaml tests/faults/train_with_faults.py \
        [--few] [--evidence] MODEL OUTPUT NAME ...

Each NAME, `clean` or a key of FAULTS, leaves OUTPUT/NAME/record.json and OUTPUT/NAME/final/. The
training is the product's own: its data, collator, loop, recorder and save. A fault is put where
such bugs live, in what the loop calls, and is gone again before the next run. A NAME such as
`bf16/clean` trains under that precision, `fast/clean` at a high learning rate, and
`reversed/clean` reads the rows of each step in reverse; `fast+reversed/clean` does both. 20 steps
are trained, with --few 6.

With --evidence, OUTPUT/NAME/evidence/ is left too, and without --few two steps are trained then,
after which only the NAMES in SAVED leave final weights. Of a NAME such as `late/not_clipped` it is
that of step 6, with which the fault begins; two ranks begin it with the weights of
OUTPUT/../single/late/clean.
"""

from __future__ import annotations

import os

# A control of one process would take the only GPU of a machine, and the others its CPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accelerate.accelerator
import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from transformers import AutoModelForCausalLM, TrainingArguments

from toolkit import environment
from toolkit.data.arguments import DataArguments
from toolkit.data.dataset import TokenDataset, prepare_data
from toolkit.data.sampling_order import Collator, training_rows
from toolkit.data.tokens import load_tokenizer
from toolkit.engines.wrapped import Wrapped
from toolkit.measuring import gradients
from toolkit.measuring.attestation import Requested
from toolkit.measuring.evidence import EvidenceKeeper
from toolkit.measuring.recorder import Recorder
from toolkit.records.json_files import SCHEMA, write_json
from toolkit.rehearse import die_with_launcher, rehearse_if_needed
from toolkit.strategies import get_strategy
from toolkit.training import loop, saving
from toolkit.training.arguments import own_arguments, training_arguments, training_values
from toolkit.training.observers import Observer
from toolkit.training.saving import save_model

sys.path.append(str(Path(__file__).parents[1] / "helpers"))  # a rank's path is a safe one
from example_record import TRAINING

FLAGS = [word for word in sys.argv[1:3] if word.startswith("--")]
FEW, EVIDENCE = "--few" in FLAGS, "--evidence" in FLAGS
STEPS = 6 if FEW else 2 if EVIDENCE else 20
LATE = 6
"""The step with which a late fault begins, of SCHEDULED steps; the run ends after the next."""

SCHEDULED = 8
SAVED = {"clean", "saved_in_bf16"}
ROWS = 16
MICRO_BATCHES = 4
"""Of one optimizer step, over all ranks: each of two ranks accumulates over two."""

MAX_LENGTH = 64
FAST = 3e-2
MAX_GRAD_NORM = 0.2
SEED = 42

# A run refuses some of these faults by itself (tests/measuring/test_gradients.py). Here the gates
# and the bisection have to find them.
gradients.clipping_mismatches = lambda of_ranks: []

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))


def main() -> None:
    """Train once for each name on the command line."""
    die_with_launcher()
    model, folder_name, *names = sys.argv[1 + len(FLAGS) :]
    output = Path(folder_name)
    rehearse_if_needed()
    data = prepare_data(DataArguments(max_length=MAX_LENGTH), model)
    for name in names:
        folder = output / name
        if RANK == 0:
            folder.mkdir(parents=True)
        kind, _, fault = name.rpartition("/")
        kinds = {*kind.split("+")}
        late = "late" in kinds
        precision = next(iter(kinds & {"bf16", "fp16"}), "no")
        run = Run(
            model_folder=model,
            data=data,
            args=arguments(
                model,
                folder,
                precision,
                LATE + 1 if late else STEPS,
                FAST if "fast" in kinds else 1e-3,
            ),
            reverse="reversed" in kinds,
            precision=precision,
            steps=SCHEDULED if late else STEPS,
            kept=LATE if late else None,
            begins=LATE if late else 1,
            reference=output.parent / "single" / name.replace(fault, "clean") / "evidence",
            saves=FEW or not EVIDENCE or name in SAVED,
        )
        with nullcontext() if fault == "clean" else FAULTS[fault](run):
            run.go(folder)
        # Accelerate keeps one state a process, and a new Accelerator would go on with it.
        GradientState._reset_state()
        AcceleratorState._reset_state()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as toolkit.train leaves: a rank that is done sometimes aborts in its exit


def arguments(
    model: str, folder: Path, precision: str, steps: int, rate: float
) -> TrainingArguments:
    flags = {
        "model_name_or_path": model,
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": ROWS // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES // RANKS,
        "max_grad_norm": MAX_GRAD_NORM,
        "learning_rate": rate,
        "weight_decay": 0.01,
        "seed": SEED,
    } | ({} if precision == "no" else {precision: True})
    own = own_arguments([f"--{name}={value}" for name, value in flags.items()])
    return training_arguments(training_values(own))


class Kept(Observer):
    """Remembers what was trained, and lets a fault act between two steps."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def prepared(self, wrapped: Wrapped) -> None:
        self.engine = wrapped

    def step_done(self, step: int) -> None:
        self.run.done = step
        self.run.between(self.engine)


@dataclass(slots=True, kw_only=True)
class Run:
    """One training, and what a fault may change of it."""

    model_folder: str
    data: TokenDataset
    args: TrainingArguments
    precision: str
    steps: int
    """Of the schedule."""

    kept: int | None
    """The step of the evidence; None: the first."""

    begins: int
    """The step that a fault first acts in."""

    reference: Path
    saves: bool
    reverse: bool = False
    order_seed: int = SEED
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    between: Callable[[Wrapped], None] = lambda wrapped: None
    done: int = 0
    """Steps."""

    @property
    def acts(self) -> bool:
        return self.done + 1 >= self.begins

    def go(self, folder: Path) -> None:
        """Train, and leave the record and the final weights in `folder`."""
        tokenizer = load_tokenizer(self.model_folder)
        strategy = get_strategy("ddp" if RANKS > 1 else "single")
        recorder = Recorder(
            Requested(strategy=strategy, num_processes=RANKS),
            rehearsal=True,
            evidence=EvidenceKeeper(
                folder / "evidence",
                step=self.kept,
                weights=None if self.kept is None or RANKS == 1 else self.reference,
                strategy=strategy.name,
                engine="loop",
                precision=self.precision,
            )
            if EVIDENCE
            else None,
        )
        rows = training_rows(
            self.data.load(),
            steps=self.steps,
            global_batch=ROWS,
            seed=self.order_seed,
            reverse=self.reverse,
            max_length=MAX_LENGTH,
        )
        torch.manual_seed(SEED)
        model = self.load(self.model_folder, dtype=torch.float32)
        kept = Kept(self)
        loop.train_loop(
            model,
            self.args,
            rows,
            Collator(pad_token_id=tokenizer.pad_token_id),
            recorder=recorder,
            scheduled_steps=self.steps,
            observers=[kept],
        )
        accelerator, wrapped = kept.engine.accelerator, kept.engine.model
        if self.saves:
            with recorder.saving(wrapped):
                save_model(accelerator, wrapped, folder / "final", tokenizer=tokenizer)
        measured = recorder.finish()
        if RANK == 0:
            write_json(folder / "record.json", self.described(recorder) | measured)
        accelerator.free_memory()

    def described(self, recorder: Recorder) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "strategy": recorder.requested.strategy.name,
            "engine": "loop",
            "precision": self.precision,
            "status": "ok",
            "reason": None,
            "model": {
                "name": "small",
                "path": self.model_folder,
                "parameters": None,
                "trained_parameters": None,
            },
            "data": self.data.facts(),
            "training": TRAINING
            | {
                "max_steps": self.args.max_steps,
                "max_length": MAX_LENGTH,
                "per_device_train_batch_size": self.args.per_device_train_batch_size,
                "gradient_accumulation_steps": self.args.gradient_accumulation_steps,
                "max_grad_norm": MAX_GRAD_NORM,
            },
            "resumed": None,
            "random_forward": None,
            "validation": None,
            "final": "final" if self.saves else None,
            "environment": environment.snapshot(),
        }


# The faults


@contextmanager
def same_data_on_both_ranks(run: Run) -> Iterator[None]:
    original = accelerate.accelerator.prepare_data_loader

    def not_sharded(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs | {"process_index": 0})

    with patch.object(accelerate.accelerator, "prepare_data_loader", not_sharded):
        yield


@contextmanager
def other_data_order(run: Run) -> Iterator[None]:
    run.order_seed += 1
    yield


@contextmanager
def other_initial_weights(run: Run) -> Iterator[None]:
    def built_anew(folder: str, **options: Any) -> Any:
        loaded = AutoModelForCausalLM.from_pretrained(folder, **options)
        torch.manual_seed(SEED + 1)
        return type(loaded)(loaded.config)

    run.load = built_anew
    yield


@contextmanager
def gradients_not_synchronised(run: Run) -> Iterator[None]:
    original = Accelerator.accumulate

    @contextmanager
    def accumulate(self: Accelerator, *models: Any) -> Iterator[None]:
        with original(self, *models), models[0].no_sync():
            yield

    with patch.object(Accelerator, "accumulate", accumulate):
        yield


@contextmanager
def adam_for_adamw(run: Run) -> Iterator[None]:
    original = loop.Trainer.get_optimizer_cls_and_kwargs

    def adam(*args: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        return torch.optim.Adam, original(*args)[1]

    with patch.object(loop.Trainer, "get_optimizer_cls_and_kwargs", adam):
        yield


@contextmanager
def learning_rate_doubled(run: Run) -> Iterator[None]:
    run.args.learning_rate *= 2
    yield


@contextmanager
def dropout_with_a_seed_per_rank(run: Run) -> Iterator[None]:
    def with_dropout(folder: str, **options: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, attention_dropout=0.1, **options)
        torch.manual_seed(SEED + RANK)
        return model

    run.load = with_dropout
    yield


@contextmanager
def scheduler_stepped_by_every_rank(run: Run) -> Iterator[None]:
    original = loop.get_scheduler

    def prepared(*args: Any, optimizer: Any, **kwargs: Any) -> AcceleratedScheduler:
        return AcceleratedScheduler(original(*args, optimizer=optimizer, **kwargs), optimizer)

    with patch.object(loop, "get_scheduler", prepared):
        yield


@contextmanager
def not_clipped(run: Run) -> Iterator[None]:
    """The norm is measured as ever, and then not used."""
    original = Accelerator.clip_grad_norm_

    def measure_only(self: Accelerator, parameters: Any, max_norm: float, *args: Any) -> Any:
        return original(self, parameters, math.inf if run.acts else max_norm, *args)

    with patch.object(Accelerator, "clip_grad_norm_", measure_only):
        yield


@contextmanager
def clipped_by_the_norm_of_a_shard(run: Run) -> Iterator[None]:
    """Each rank takes the norm of its own shard for that of all: here the shards lie side by
    side, as FSDP cuts them, and the first rank's norm is what the loop gets to see."""

    def clip(self: Accelerator, parameters: Any, max_norm: float, *args: Any) -> torch.Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        shards = zip(*(gradient.chunk(RANKS) for gradient in gradients), strict=True)
        norms = []
        for shard in shards:
            norms.append(torch.nn.utils.get_total_norm(shard))
            for piece in shard:
                piece.mul_((max_norm / (norms[-1] + 1e-6)).clamp(max=1.0))
        return norms[0]

    with patch.object(Accelerator, "clip_grad_norm_", clip):
        yield


@contextmanager
def adam_epsilon_1e_6(run: Run) -> Iterator[None]:
    run.args.adam_epsilon = 1e-6
    yield


@contextmanager
def no_weight_decay(run: Run) -> Iterator[None]:
    run.args.weight_decay = 0.0
    yield


@contextmanager
def gradients_rounded_to_bf16(run: Run) -> Iterator[None]:
    """Only what goes over the wire; PyTorch's own hook for this refuses a CPU."""
    original = Accelerator.prepare_model

    # DDP compares annotations with classes, and here they are strings.
    def hook(state, bucket):
        bucket.set_buffer(bucket.buffer().bfloat16().float())
        return allreduce_hook(torch.distributed.group.WORLD, bucket)

    def prepare_model(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        model = original(self, *args, **kwargs)
        model.register_comm_hook(None, hook)
        return model

    with patch.object(Accelerator, "prepare_model", prepare_model):
        yield


@contextmanager
def gradients_doubled(run: Run) -> Iterator[None]:
    original = Accelerator.backward

    def backward(self: Accelerator, loss: torch.Tensor, **kwargs: Any) -> None:
        original(self, loss * 2 if run.acts else loss, **kwargs)

    with patch.object(Accelerator, "backward", backward):
        yield


def half_the_gradient_of(run: Run, name: str) -> AbstractContextManager[None]:
    original = run.load

    def with_half(folder: str, **options: Any) -> Any:
        model = original(folder, **options)
        model.get_parameter(name).register_hook(lambda gradient: gradient / 2)
        return model

    run.load = with_half
    return nullcontext()


def half_the_gradient_of_one_matrix(run: Run) -> AbstractContextManager[None]:
    return half_the_gradient_of(run, "model.layers.1.self_attn.k_proj.weight")


def half_the_gradient_of_one_norm(run: Run) -> AbstractContextManager[None]:
    return half_the_gradient_of(run, "model.layers.1.post_attention_layernorm.weight")


@contextmanager
def gradients_summed_over_the_ranks(run: Run) -> Iterator[None]:
    original = Accelerator.prepare_model

    def hook(state, bucket):
        bucket.set_buffer(bucket.buffer() * (RANKS if run.acts else 1))
        return allreduce_hook(torch.distributed.group.WORLD, bucket)

    def prepare_model(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        model = original(self, *args, **kwargs)
        model.register_comm_hook(None, hook)
        return model

    with patch.object(Accelerator, "prepare_model", prepare_model):
        yield


@contextmanager
def mean_of_means(run: Run) -> Iterator[None]:
    """Each micro-batch divides by its own tokens, and the step by the micro-batches."""
    original = run.load

    def by_itself(folder: str, **options: Any) -> Any:
        model = original(folder, **options)
        forward = model.forward

        def averaging(*args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            output.loss = output.loss / MICRO_BATCHES
            return output

        model.forward = averaging
        return model

    run.load = by_itself
    yield


@contextmanager
def divided_by_the_accumulation_twice(run: Run) -> Iterator[None]:
    original = Accelerator.backward

    def backward(self: Accelerator, loss: torch.Tensor, **kwargs: Any) -> None:
        original(self, loss / self.gradient_accumulation_steps, **kwargs)

    with patch.object(Accelerator, "backward", backward):
        yield


@contextmanager
def prompt_learned_in_one_row(run: Run) -> Iterator[None]:
    original = loop.take

    def take(*args: Any) -> list[dict[str, torch.Tensor]]:
        window = original(*args)
        if window and RANK == 0 and run.acts:
            window[0]["labels"][0, :2] = window[0]["input_ids"][0, :2]
        return window

    with patch.object(loop, "take", take):
        yield


@contextmanager
def weights_kept_in_bf16(run: Run) -> Iterator[None]:
    """The update is added to weights that can't hold it."""
    original = loop.Trainer.get_optimizer_cls_and_kwargs

    class AdamW(torch.optim.AdamW):
        def step(self, *args: Any, **kwargs: Any) -> None:
            super().step(*args, **kwargs)
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"] if run.acts else ():
                        parameter.copy_(parameter.bfloat16().float())

    def rounding(*args: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        return AdamW, original(*args)[1]

    with patch.object(loop.Trainer, "get_optimizer_cls_and_kwargs", rounding):
        yield


@contextmanager
def layer_frozen(run: Run) -> Iterator[None]:
    original = run.load

    def frozen(folder: str, **options: Any) -> Any:
        model = original(folder, **options)
        model.model.layers[1].mlp.requires_grad_(False)
        return model

    run.load = frozen
    yield


@contextmanager
def saved_in_bf16(run: Run) -> Iterator[None]:
    original = saving.whole_weights

    def rounded(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, tensor in original(*args, **kwargs):
            yield name, None if tensor is None else tensor.bfloat16().float()

    with patch.object(saving, "whole_weights", rounded):
        yield


@contextmanager
def rate_doubled(run: Run) -> Iterator[None]:
    """In every step from the one on with which it begins."""

    def doubled(wrapped: Wrapped) -> None:
        for group in wrapped.optimizer.param_groups if run.acts else ():
            group["lr"] *= 2

    run.between = doubled
    yield


@contextmanager
def rate_doubled_before(run: Run) -> Iterator[None]:
    """From three steps before, as a gate may see it late."""
    run.begins -= 3
    with rate_doubled(run):
        yield


@contextmanager
def rate_doubled_once_before(run: Run) -> Iterator[None]:
    """In the step before alone."""

    def doubled(wrapped: Wrapped) -> None:
        for group in wrapped.optimizer.param_groups if run.done + 2 == run.begins else ():
            group["lr"] *= 2

    run.between = doubled
    yield


@contextmanager
def decay_dropped(run: Run) -> Iterator[None]:
    def dropped(wrapped: Wrapped) -> None:
        for group in wrapped.optimizer.param_groups if run.acts else ():
            group["weight_decay"] = 0.0

    run.between = dropped
    yield


@contextmanager
def attention_dropped(run: Run) -> Iterator[None]:
    def dropped(wrapped: Wrapped) -> None:
        for module in wrapped.model.modules() if run.acts else ():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1

    run.between = dropped
    yield


@contextmanager
def weights_of_one_rank_moved(run: Run) -> Iterator[None]:
    def moved(wrapped: Wrapped) -> None:
        if run.done + 2 == run.begins and RANK == 1:
            with torch.no_grad():
                next(wrapped.model.parameters()).mul_(1.1)

    run.between = moved
    yield


FAULTS: dict[str, Callable[[Run], AbstractContextManager[None]]] = {
    fault.__name__: fault
    for fault in (
        same_data_on_both_ranks,
        other_data_order,
        other_initial_weights,
        gradients_not_synchronised,
        adam_for_adamw,
        learning_rate_doubled,
        dropout_with_a_seed_per_rank,
        scheduler_stepped_by_every_rank,
        not_clipped,
        clipped_by_the_norm_of_a_shard,
        adam_epsilon_1e_6,
        no_weight_decay,
        gradients_rounded_to_bf16,
        gradients_doubled,
        half_the_gradient_of_one_matrix,
        half_the_gradient_of_one_norm,
        gradients_summed_over_the_ranks,
        mean_of_means,
        divided_by_the_accumulation_twice,
        prompt_learned_in_one_row,
        weights_kept_in_bf16,
        layer_frozen,
        saved_in_bf16,
        rate_doubled,
        rate_doubled_before,
        rate_doubled_once_before,
        decay_dropped,
        attention_dropped,
        weights_of_one_rank_moved,
    )
}


if __name__ == "__main__":
    main()
