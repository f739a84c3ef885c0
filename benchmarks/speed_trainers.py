"""One rank of `speed_switches.py`: trains every variant in turn, and measures all of them alike."""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from typing import Any

from speed_switches import Variant, arguments, variants


def main() -> None:
    """Train each round of each variant, in a new order each round; the first rank tells."""
    import torch
    from transformers.utils import logging

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
        from toolkit.training.data import prepare_data
        from toolkit.training.data_arguments import DataArguments
        from toolkit.training.model import build_model, load_tokenizer

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
        if variant.kind == "trl":  # it packs by itself
            return self.once["none"].remove_columns("sample_id")
        return self.once["best_fit" if variant.packed else "none"]

    def repeated(self, rows: Any) -> Any:
        return rows.select([number % len(rows) for number in range(self.needed)])


def trained(variant: Variant, data: Data, args: argparse.Namespace) -> dict[str, Any]:
    """Train one variant from the first weights, and return what was measured."""
    import torch

    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(variant, fresh_model(args), data, args, folder)
        at_start = mean_loss(trainer)
        trainer.train_dataset = data.repeated(trainer.train_dataset)
        watch = watching(trainer, args)
        trainer.add_callback(watch)
        trainer.train()
    window = slice(args.warm_up, args.warm_up + args.steps)
    tokens, losses = (
        summed(torch.tensor(watch.supervised[window])),
        summed(torch.stack(watch.losses)),
    )
    return {
        "seconds": watch.seconds,
        "steps": args.steps,
        "tokens": int(tokens.sum()),
        "losses": (losses / trainer.accelerator.num_processes).tolist(),
        "peak_bytes": watch.peak_bytes,
        "packed": variant.packed,
        "mean_at_start": at_start,
    }


def summed(values: Any) -> Any:
    """Add up what each rank has."""
    import torch

    if torch.distributed.is_initialized():
        values = values.to("cuda" if torch.cuda.is_available() else "cpu")
        torch.distributed.all_reduce(values)
    return values.cpu()


def fresh_model(args: argparse.Namespace) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

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


def trainer_of(
    variant: Variant, model: Any, data: Data, args: argparse.Namespace, folder: str
) -> Any:
    """Return the trainer of a variant, with the rows of each text once."""
    from transformers import Trainer, TrainingArguments

    from toolkit.training.arguments import OUR_DEFAULTS
    from toolkit.training.batches import Collator
    from toolkit.training.companions import CompanionsCallback
    from toolkit.training.speed import Speed
    from toolkit.training.speed_arguments import SpeedArguments
    from toolkit.training.trainer import ToolkitTrainer

    total = args.warm_up + args.steps
    given: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": total,
        "per_device_train_batch_size": args.rows,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "logging_steps": 10 * total,  # a line waits for the device
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": args.bf16,
        "train_sampling_strategy": "sequential",
        "optim": "adamw_torch",
    }
    rows = data.of(variant)
    if variant.kind == "trl":
        from trl import SFTConfig, SFTTrainer

        # Its own defaults are bf16 and checkpointing: here it does what the others do.
        config = SFTConfig(
            **given,
            max_length=args.max_length,
            packing=variant.packed,
            activation_checkpointing=False,
            shuffle_dataset=False,
        )
        return SFTTrainer(
            model=model, args=config, train_dataset=rows, processing_class=data.tokenizer
        )
    given["remove_unused_columns"] = False
    if variant.kind == "stock":
        return Trainer(
            model=model,
            args=TrainingArguments(**given),
            train_dataset=rows.remove_columns("sample_id"),
            data_collator=Padding(),
        )

    class Unrecorded(ToolkitTrainer):
        def finish_record(self) -> None:
            """Nothing: times and peaks are taken of all variants alike."""

    speed = Speed(SpeedArguments(**variant.speed))
    speed.apply(model)
    given["ddp_find_unused_parameters"] = OUR_DEFAULTS["ddp_find_unused_parameters"]
    if "fused optimizer" in variant.switches:
        given["optim"] = "adamw_torch_fused"
    trainer = Unrecorded(
        model=model,
        args=TrainingArguments(**given),
        train_dataset=rows,
        data_collator=speed.collating(Collator(pad_token_id=0)),
        ddp_bucket_view=speed.arguments.gradients_in_buckets,
    )
    trainer.add_callback(CompanionsCallback(trainer, [speed]))
    return trainer


class Padding:
    """Pads as anyone's collator does."""

    def __call__(self, rows: Any) -> dict[str, Any]:
        from toolkit.training.batches import Collator

        batch = Collator(pad_token_id=0)([row | {"sample_id": 0} for row in rows])
        del batch["sample_id"]
        return batch


def mean_loss(trainer: Any) -> float:
    """The loss of a token, over each text once, before anything is trained."""
    import torch

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


def watching(trainer: Any, args: argparse.Namespace) -> Any:
    """Return a callback that times a window, keeps losses and token counts, and takes the peak.

    On a CPU the peak is that of the last step before the window, counted by the ledger.
    """
    import torch
    from transformers import TrainerCallback

    from toolkit.measuring.engine import compiled
    from toolkit.measuring.peak import PeakLedger

    on_gpu = torch.cuda.is_available()
    clock = time.perf_counter if on_gpu else time.process_time
    collate, train = trainer.data_collator, trainer.training_step

    class Watch(TrainerCallback):
        def __init__(self) -> None:
            self.supervised: list[int] = []
            self.losses: list[Any] = []
            self.seconds, self.peak_bytes = 0.0, None
            self._begun, self._ledger = 0.0, PeakLedger()

        def collate(self, rows: Any) -> Any:
            batch = collate(rows)
            self.supervised.append(int((batch["labels"][:, 1:] != -100).sum()))
            return batch

        def training_step(self, *given: Any, **named: Any) -> Any:
            loss = train(*given, **named)
            self.losses.append(loss.detach().float())
            return loss

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if hasattr(trainer, "recorder"):
                trainer.recorder.peaks()  # no step after it carries the recorder's own ledgers

        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            counted = not on_gpu and not compiled(trainer.model_wrapped)
            if counted and state.global_step == args.warm_up - 1:
                self._ledger.start(trainer.model_wrapped, trainer.optimizer, device="cpu")

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step == args.warm_up:
                self._ledger.stop()
                self._begun = self._now()
            elif state.global_step == args.warm_up + args.steps:
                self.seconds = self._now() - self._begun
                found = self._ledger.found(args.warm_up)
                self.peak_bytes = found["total_bytes"] if found else None
                if on_gpu:
                    self.peak_bytes = torch.cuda.max_memory_allocated()

        def _now(self) -> float:
            if on_gpu:
                torch.cuda.synchronize()
            return clock()

    watch = Watch()
    trainer.data_collator, trainer.training_step = watch.collate, watch.training_step
    return watch


if __name__ == "__main__":
    main()
