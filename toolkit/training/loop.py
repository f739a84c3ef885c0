"""The same training without the Trainer: a loop over an Accelerator, to read and to change.

Losses and gradient norms equal the Trainer's: the loss is weighted by tokens over the whole
optimizer step and all ranks, and the parameters decay in the same groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainingArguments, get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from toolkit.checkpoints.resuming import Resumed
from toolkit.checkpoints.saver import read_random_state, read_states
from toolkit.checkpoints.torch_files import NO_DECAY
from toolkit.data.packing import keep_texts_apart
from toolkit.engines.backend import backend_of, wrap
from toolkit.engines.masters import clip_in_fp32, moments_of, stepping_on_masters
from toolkit.engines.tensors import number
from toolkit.engines.wrapped import Wrapped
from toolkit.errors import UsageError
from toolkit.measuring.recorder import Recorder
from toolkit.records.evidence import IGNORED
from toolkit.training import tracking
from toolkit.training.arguments import syncs_each_batch
from toolkit.training.observers import Observer


def train_loop(
    model: PreTrainedModel,
    args: TrainingArguments,
    dataset: Any,
    collate: Callable[[list[Any]], dict[str, torch.Tensor]],
    *,
    recorder: Recorder,
    scheduled_steps: int,
    steps_per_epoch: int | None = None,
    observers: Sequence[Observer] = (),
    resumed: Resumed | None = None,
    ddp_bucket_view: bool = False,
) -> None:
    """Train for `args.max_steps` optimizer steps.

    Args:
        model: As loaded; the Accelerator wraps it.
        args: The Trainer's arguments; this loop obeys those that concern training.
        dataset: Rows in the order in which they are trained.
        collate: Makes a padded batch with `labels` and `sample_id`.
        scheduled_steps: Steps until the learning rate has decayed.
        steps_per_epoch: Of the data from which `dataset` was made; None: it is one epoch itself.
        observers: Called when the training is prepared and after each of its steps.
        resumed: The checkpoint to go on from.
        ddp_bucket_view: Under DDP, have gradients be views of its buckets.
    """
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        deepspeed_plugin=args.deepspeed_plugin,
        # A window's batches are all read before its first is trained. By default, the end of the
        # data, which is then known, would make each micro-batch of the last window its own step.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=args.gradient_accumulation_steps,
            sync_with_dataloader=False,
            sync_each_batch=syncs_each_batch(args),
        ),
        # A prepared scheduler would step once per process (huggingface/accelerate#1382).
        step_scheduler_with_optimizer=False,
        # From pinned memory: a copy that blocks would wait for all the work of the device.
        dataloader_config=DataLoaderConfiguration(
            even_batches=True, non_blocking=args.dataloader_pin_memory
        ),
        log_with=[*tracking.trackers(args)] or None,
        kwargs_handlers=[ddp_options(args, bucket_view=ddp_bucket_view)],
    )
    if moments_of(model) is not None:
        clip_in_fp32(accelerator)
    loader = DataLoader(
        dataset,
        batch_size=args.per_device_train_batch_size,
        collate_fn=collate,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
    )
    model.train()
    keep_texts_apart(model)
    recorder.loaded(model)
    optimizer = build_optimizer(model, args)
    wrapped_model, optimizer, loader = wrap(accelerator, model, optimizer, loader)
    scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.get_warmup_steps(scheduled_steps),
        num_training_steps=scheduled_steps,
        scheduler_specific_kwargs=cast("dict[str, Any] | None", args.lr_scheduler_kwargs),
    )
    wrapped = Wrapped(
        accelerator=accelerator,
        model=wrapped_model,
        optimizer=optimizer,
        scheduler=scheduler,
        report=lambda step, values: tracking.log(accelerator, step, values),
    )
    if resumed is not None:
        read_states(resumed.folder, wrapped, step=resumed.step)
    tracking.start(accelerator, args, model)
    recorder.prepared(accelerator, wrapped_model, optimizer)
    recorder.reads(loader)
    for observer in observers:
        observer.prepared(wrapped)

    first = 0 if resumed is None else resumed.step
    step = logged = first
    epoch, skipped_steps = divmod(first, max(1, len(loader) // args.gradient_accumulation_steps))
    unlogged = torch.zeros((), device=accelerator.device)
    while step < args.max_steps:
        if epoch and not step:
            raise UsageError(
                f"The data don't fill one optimizer step: {len(dataset)} rows for "
                f"{accelerator.num_processes} processes, batches of "
                f"{args.per_device_train_batch_size}, {args.gradient_accumulation_steps} a step."
            )
        read = skipped_steps * args.gradient_accumulation_steps
        # Rows before the step are not read: the sampler skips their batches.
        unread: Any = accelerator.skip_first_batches(loader, read) if read else loader
        unread.set_epoch(epoch)  # a method of Accelerate's loaders
        batches = iter(unread)
        skipped_steps = 0
        while step < args.max_steps and (window := take(batches, accelerator, recorder)):
            if resumed is not None and step == first:
                # Only now: the loader has drawn a number that the saved run drew at its start.
                read_random_state(resumed.folder, accelerator)
            loss, norm = _optimizer_step(
                accelerator, wrapped_model, optimizer, window, args, recorder
            )
            step += 1
            read += len(window)
            unlogged += loss
            skipped = accelerator.optimizer_step_was_skipped
            learning_rate = float(optimizer.param_groups[0]["lr"])
            if not skipped:
                scheduler.step()
            recorder.step_done(learning_rate=learning_rate, skipped=skipped)
            if step % args.logging_steps == 0 and step <= scheduled_steps:
                # Like the Trainer, the mean over all steps since the last log.
                mean = _mean_over_ranks(accelerator, unlogged / (step - logged))
                unlogged.zero_()
                logged = step
                recorder.logged(step, loss=mean, learning_rate=learning_rate)
                # A collective under FSDP2: on every rank, with trackers or without.
                norm = None if norm is None else number(norm)
                if accelerator.log_with:
                    values = {"loss": mean, "grad_norm": norm}
                    whole = epoch + read / len(loader)
                    share = whole if steps_per_epoch is None else step / steps_per_epoch
                    values |= {"learning_rate": learning_rate, "epoch": share}
                    tracking.log(accelerator, step, values)
            for observer in observers:
                observer.step_done(step)
        epoch += 1
    tracking.finish(accelerator)


def ddp_options(args: TrainingArguments, *, bucket_view: bool) -> DistributedDataParallelKwargs:
    """Return the options for DDP's wrapper, from the arguments as the Trainer reads them.

    With `bucket_view` gradients are views of the buckets in which DDP sends them.
    """
    passed: dict[str, Any] = {
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "static_graph": args.ddp_static_graph,
    }
    return DistributedDataParallelKwargs(
        find_unused_parameters=bool(args.ddp_find_unused_parameters),
        gradient_as_bucket_view=bucket_view,
        **{name: value for name, value in passed.items() if value is not None},
    )


def _optimizer_step(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    window: list[dict[str, torch.Tensor]],
    args: TrainingArguments,
    recorder: Recorder,
) -> tuple[torch.Tensor, Any]:
    """Run an optimizer step.

    Returns this rank's share of the loss, and the gradient norm before clipping.
    """
    backend = backend_of(model)
    ranks = backend.data_parallel_size()
    supervised = [(batch["labels"][:, 1:] != IGNORED).sum() for batch in window]
    items = _sum_over_ranks(accelerator, torch.stack(supervised).sum(), data_parallel_size=ranks)
    total, norm = torch.zeros((), device=accelerator.device), None
    # Accelerate 1.15 heeds sync_each_batch only with several processes; FSDP2 offloads the reduced
    # gradients of one as well. Without a model, it defers the reduction of none.
    deferred = () if syncs_each_batch(args) else (model,)
    ids = [batch.pop("sample_id", None) for batch in window]
    tokens = [batch["input_ids"].numel() for batch in window]
    losses = backend.run_together(accelerator, window, items)
    for at, batch in enumerate(window):
        with accelerator.accumulate(*deferred):
            if losses is None:
                with backend.shard_batch(accelerator, batch) as shard:
                    loss = model(**shard, num_items_in_batch=items).loss
                    # Gradients are averaged over the ranks, so the loss is multiplied by their
                    # number.
                    loss = loss * ranks
                    # Dividing by the token count already covers the accumulation steps.
                    backend.backward(accelerator, loss, micro_batches=len(window))
                loss = backend.loss_of_rows(loss.detach())
            else:
                loss = losses[at]
            recorder.micro_batch(
                loss, tokens=tokens[at], supervised=supervised[at], sample_ids=ids[at]
            )
            if accelerator.sync_gradients:
                limit = args.max_grad_norm or float("inf")
                norm = accelerator.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach()
    return total, norm


# Separate functions, so that their tensors are freed before a step whose memory is counted.


def _sum_over_ranks(
    accelerator: Accelerator, count: torch.Tensor, *, data_parallel_size: int
) -> torch.Tensor:
    """Sum a count of each rank's batch over the ranks that read rows of their own."""
    of_all: Any = accelerator.reduce(count.to(accelerator.device), "sum")
    # All ranks that share one batch have counted it. Without sharing, no division is needed.
    copies = accelerator.num_processes // data_parallel_size
    return of_all if copies == 1 else of_all // copies


def _mean_over_ranks(accelerator: Accelerator, value: torch.Tensor) -> float:
    mean: Any = accelerator.reduce(value, "mean")
    return mean.item()


def take(
    batches: Any, accelerator: Accelerator, recorder: Recorder
) -> list[dict[str, torch.Tensor]]:
    """Return the micro-batches of one optimizer step; empty if the data end within the step."""
    steps = accelerator.gradient_accumulation_steps
    with recorder.waiting_for_data():
        window = list(itertools.islice(batches, steps))
    return window if len(window) == steps else []


def build_optimizer(model: PreTrainedModel, args: TrainingArguments) -> torch.optim.Optimizer:
    """Return the optimizer that the Trainer would make: same class, options and decay groups."""
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], NO_DECAY))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    kind, options = stepping_on_masters(model, *Trainer.get_optimizer_cls_and_kwargs(args, model))
    with_decay = [p for n, p in trained.items() if n in decayed]
    without = [p for n, p in trained.items() if n not in decayed]
    groups = [
        {"params": with_decay, "weight_decay": args.weight_decay},
        {"params": without, "weight_decay": 0.0},
    ]
    return kind(groups, **options)
