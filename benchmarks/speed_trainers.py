"""One rank of `speed_switches.py`: trains every variant in turn, and measures all of them alike."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any

import torch
from kit.device import clear
from kit.trainers import Watch, trainer_of, training_values
from kit.variants import Variant, variants
from speed_switches import arguments
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from transformers.utils import logging

from toolkit.data.arguments import DataArguments
from toolkit.data.dataset import prepare_data
from toolkit.data.tokens import load_tokenizer
from toolkit.engines.tensors import compiled
from toolkit.measuring.peak import PeakLedger
from toolkit.training.model import build_model


def main() -> None:
    """Train each round of each variant, in a new order each round; the first rank tells."""
    logging.set_verbosity_error()
    args = arguments().parse_args()
    data = Data(args)
    asked = variants(args.strategies[0], compiled=args.compile)
    if args.variants:
        asked = [each for each in asked if each.name in args.variants]
    runs: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for variant in asked[number % len(asked) :] + asked[: number % len(asked)]:
            runs.append({"variant": variant.name, "round": number} | trained(variant, data, args))
    if int(os.environ.get("RANK", "0")) == 0:
        order = [each.name for each in asked]
        runs.sort(key=lambda run: order.index(run["variant"]))
        what = (
            f"Llama of {args.layers} layers, hidden size {args.hidden}, {args.vocabulary} ids, "
            f"{args.rows} rows of up to {args.max_length} tokens, "
            f"{'bf16' if args.bf16 else 'fp32'}, {args.rounds} rounds of {args.steps} steps"
        )
        told = {
            "runs": runs,
            "ranks": int(os.environ.get("WORLD_SIZE", "1")),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "what": what,
        }
        args.told.write_text(json.dumps(told))


class Data:
    """The same texts, a row each and packed, again and again as far as the steps go."""

    def __init__(self, args: argparse.Namespace) -> None:
        folder = build_model()
        self.tokenizer = load_tokenizer(folder)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.needed = ranks * args.rows * (args.warm_up + args.steps)
        self.once = {
            packing: prepare_data(
                DataArguments(
                    max_length=args.max_length, packing=packing, max_train_samples=self.needed
                ),
                folder,
            ).load()
            for packing in ("none", "best_fit")
        }

    def of(self, variant: Variant) -> Any:
        """Return the rows of each text once."""
        packed = variant.packed and variant.kind != "trl"  # that packs by itself
        return self.once["best_fit" if packed else "none"]

    def repeated(self, rows: Any) -> Any:
        return rows.select([number % len(rows) for number in range(self.needed)])


def trained(variant: Variant, data: Data, args: argparse.Namespace) -> dict[str, Any]:
    """Train one variant from the first weights, and return what was measured."""
    torch._dynamo.reset()
    clear()
    steps = args.warm_up + args.steps
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(
            variant,
            fresh_model(args),
            data.of(variant),
            training_values(folder, rows=args.rows, steps=steps, bf16=args.bf16),
            tokenizer=data.tokenizer,
            max_length=args.max_length,
        )
        at_start = mean_loss(trainer)
        trainer.train_dataset = data.repeated(trainer.train_dataset)
        watch = WatchInRanks(trainer, args)
        trainer.train()
    tokens, losses = summed(torch.tensor(watch.learned)), summed(torch.tensor(watch.losses))
    return {
        "seconds": sum(watch.seconds()),
        "steps": args.steps,
        "tokens": int(tokens.sum()),
        "losses": (losses / trainer.accelerator.num_processes).tolist(),
        "peak_bytes": watch.peak_bytes,
        "packed": variant.packed,
        "mean_at_start": at_start,
    }


def summed(values: Any) -> Any:
    """Add up what each rank has."""
    if torch.distributed.is_initialized():
        values = values.to("cuda" if torch.cuda.is_available() else "cpu")
        torch.distributed.all_reduce(values)
    return values.cpu()


def fresh_model(args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3 // 8 * 8,
        num_hidden_layers=args.layers,
        num_attention_heads=max(2, args.hidden // 64),
        max_position_embeddings=args.max_length,
        use_cache=False,
        pad_token_id=0,
    )
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


def mean_loss(trainer: Any) -> float:
    """The loss of a token, over each text once, before anything is trained."""
    rows, device = trainer.train_dataset.to_list(), trainer.args.device
    size = trainer.args.per_device_train_batch_size
    batches = [
        trainer.data_collator(rows[begin : begin + size]) for begin in range(0, len(rows), size)
    ]
    items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    model = trainer.model.to(device)
    total = 0.0
    with torch.no_grad():
        for batch in batches:
            batch.pop("sample_id", None)
            inputs = {
                name: value.to(device) if isinstance(value, torch.Tensor) else value
                for name, value in batch.items()
            }
            loss = trainer.compute_loss(
                model, inputs, num_items_in_batch=torch.tensor(items, device=device)
            )
            total += float(loss) / trainer.accelerator.num_processes
    return total


class WatchInRanks(Watch):
    """Watches one rank; on a CPU, where no allocator counts, a ledger does, in the last step of
    the warm-up.

    Args:
        trainer: Watched from now on.
        args: The steps of the benchmark.
    """

    def __init__(self, trainer: Any, args: argparse.Namespace) -> None:
        # A CPU is shared with other ranks: what counts is the time that it gave to this one.
        super().__init__(warm_up=args.warm_up, steps=args.steps, clock=time.process_time)
        self.peak_bytes: int | None = None
        self.follow(trainer)
        trainer.add_callback(_Ledger(self, trainer))


class _Ledger(TrainerCallback):
    def __init__(self, watch: WatchInRanks, trainer: Any) -> None:
        self._watch, self._trainer = watch, trainer
        self._ledger = PeakLedger()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if hasattr(self._trainer, "recorder"):
            self._trainer.recorder.peaks()  # no step after it carries the recorder's own ledgers

    def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        counted = not torch.cuda.is_available() and not compiled(self._trainer.model_wrapped)
        if counted and state.global_step == self._watch.warm_up - 1:
            engine, optimizer = self._trainer.model_wrapped, self._trainer.optimizer
            self._ledger.start(engine, optimizer, device="cpu")

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step == self._watch.warm_up:
            self._ledger.stop()
        elif state.global_step == self._watch.warm_up + self._watch.steps:
            found = self._ledger.counted(self._watch.warm_up)
            self._watch.peak_bytes = (
                found["total_bytes"] if found else self._watch.peaks["allocated_bytes"]
            )


if __name__ == "__main__":
    main()
