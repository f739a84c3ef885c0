"""A run, from a checked job to its record: the model is loaded, trained under an engine, saved.

Also its recorder, and the facts of its record that are known before the first step.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PrinterCallback, ProgressCallback, TrainingArguments

from toolkit import environment, stack
from toolkit.backends import backend_of
from toolkit.checkpoints.preemption import Preempted, Preemption
from toolkit.checkpoints.saver import CheckpointSaver, losses_before, steps_between
from toolkit.configs.requested import (
    read_deepspeed_config,
    requested_accumulation_dtype,
    requested_processes,
    requests_checkpointing,
)
from toolkit.data.cache import check_seconds
from toolkit.data.flags import plain_value, typed_flags
from toolkit.data.sampling_order import Collator, count_trained
from toolkit.engines.backend import mark_requested
from toolkit.engines.masters import MasterAdamW
from toolkit.engines.pipeline import ask_for
from toolkit.engines.tensor_parallel import claim_mesh
from toolkit.engines.wrapped import Wrapped
from toolkit.launching.processes import age_seconds
from toolkit.launching.ranks import rank, say
from toolkit.launching.status import REQUEST_FILE, STATUS_DIR, StatusFile
from toolkit.launching.step_lines import Display, StepLines
from toolkit.measuring import memory
from toolkit.measuring.attestation import Refused, Requested
from toolkit.measuring.evidence import EvidenceKeeper
from toolkit.measuring.heartbeat import heartbeat_for
from toolkit.measuring.recorder import Recorder
from toolkit.records.json_files import SCHEMA, write_json
from toolkit.records.record import RECORD_FILE, STARTING_ADAPTER, STEPS_FILE
from toolkit.records.summary import Summary, last_words
from toolkit.strategies import Strategy
from toolkit.training.adapters import load_for
from toolkit.training.arguments import syncs_each_batch
from toolkit.training.card import card_of_run
from toolkit.training.dropout import RandomForwards, turn_off
from toolkit.training.evaluation import BeforeAndAfter
from toolkit.training.fingerprint import facts_of_job, facts_of_run
from toolkit.training.job import Job, check_fillers
from toolkit.training.loop import train_loop
from toolkit.training.observers import Observer
from toolkit.training.rows_without_labels import check_rows_without_labels
from toolkit.training.saving import save_model
from toolkit.training.speed import Speed
from toolkit.training.speed.attention import choose_kernels
from toolkit.training.speed_arguments import ADAMW, checkpoints_by_flag
from toolkit.training.split_requests import pipeline_request
from toolkit.training.tracking import keep_local
from toolkit.training.trainer import ToolkitTrainer

Collate = Callable[[list[Any]], dict[str, torch.Tensor]]

_kept_until_exit: Final[list[object]] = []
"""Holders of the process group when training is over, kept until the process leaves. Otherwise
DDP's reducer ends gloo's threads while it holds the lock of Python's interpreter. If one of them
waits for that lock, both wait for ever (torch 2.13, `~ProcessGroupGloo`)."""


def train(job: Job, status: StatusFile) -> None:
    """Load the model, train it, save it, and write the record; nothing of a finished run.

    Raises:
        Refused: the actual settings are not the requested ones.
    """
    # `toolkit.train` turns it off while everything is imported.
    gc.enable()
    own, output_dir = job.own, job.output_dir
    if job.finished:
        status.running(job.last_step)
        if rank() == 0:
            say(f"finished at step {job.last_step}: {output_dir} holds this run, all is done")
        _leave_process_group()
        return
    if rank() == 0:
        environment.commit()  # kept for the record: the code may change while the run goes on
    for line in keep_local(list(job.args.report_to or ()), output_dir):
        if rank() == 0:
            say(line)
    settings = stack.settings_of(
        job.strategy,
        accumulation=job.args.gradient_accumulation_steps,
        precision=job.args.mixed_precision,
        adapters=job.request.method.arguments.method != "full",
        engine=own.run.engine,
    )
    for fault in stack.met(settings) if rank() == 0 else ():
        say(f"{stack.sentence(fault)} {stack.advice([fault])}")
    rehearsal = job.request.launch.rehearsal
    status.peak = memory.host_peak_bytes if rehearsal else memory.device_peak_bytes
    if job.args.tf32 is None and job.args.mixed_precision == "no":
        torch.backends.cuda.matmul.fp32_precision = "ieee"  # parity in fp32 means fp32
    choose_kernels(
        cudnn=own.model.cudnn_attention, flash=None if rehearsal else own.model.flash_attention
    )
    torch.manual_seed(job.args.seed)
    model = load_for(
        job.request.method,
        own.model,
        job.request.model.path,
        seed=job.args.seed,
        start=output_dir / STARTING_ADAPTER if rank() == 0 else None,
        split=claim_mesh(
            job.strategy, job.request.launch.num_processes or 1, precision=job.args.mixed_precision
        ),
    )
    if own.run.dropout == "off":
        turn_off(model)
    speed = Speed(
        own.speed.under(job.strategy), job.args, strategy=job.strategy, left_out=job.left_out
    )
    speed.apply(model, loop=job.args if own.run.engine == "loop" else None)
    for reason in speed.left_out.values() if rank() == 0 else ():
        say(f"left out of --tuned: {reason}")
    if rank() == 0:
        write_json(status.path.parent / REQUEST_FILE, request_facts(job, speed))
    check_rows_without_labels(job, model)
    if (pipeline := pipeline_request(job.strategy, own)) is not None:
        ask_for(model, pipeline)
    mark_requested(model, job.strategy)
    collate = speed.collating(
        Collator(
            pad_token_id=job.pad_token_id, multiple=job.strategy.row_multiple(job.args.world_size)
        )
    )
    recorder = recorder_of(job, status, speed)
    saver = _saver_of(job, recorder)
    try:
        results = BeforeAndAfter(
            job.evaluation,
            collate,
            tokenizer=job.tokenizer,
            recorder=recorder,
            checkpoint=None if job.resumed is None else job.resumed.folder,
        )
        saver.write_beside = results.write_so_far
        forwards = [RandomForwards(recorder)] if own.run.dropout == "off" else []
        saving = SaveAtTheEnd(job, recorder, speed, results)
        observers: list[Observer] = [speed, *forwards, results, saving]
        with _preemptible(saver, status), _steps_shown(job, recorder, status):
            _train_under_engine(job, model, collate, recorder, observers, saver)
        # A run that keeps evidence of a later step ends before its packed rows.
        packed = own.run.throughput_steps if own.run.evidence_step is None else 0
        measured = results.with_results(recorder.finish(throughput_steps=packed))
        measured["random_forward"] = forwards[0].difference if forwards else None
        if measured["warm_up"] is not None:
            measured["warm_up"]["cache_seconds"] = check_seconds()
    except Refused as error:
        if rank() == 0 and job.resumed is None:  # a record would mark the checkpoints as done
            refused = described(job, speed) | {"final": None} | recorder.refused(error)
            write_json(output_dir / RECORD_FILE, refused)
        raise
    finally:
        recorder.close()
    if rank() == 0:
        summary = saving.summary
        record: dict[str, Any] = described(job, speed) | measured | {"summary": summary}
        write_json(output_dir / RECORD_FILE, record)
        if (template := job.request.data.brought_template) is not None:
            say(f"final/ has the chat template {template} of the toolkit: the model had none")
        if summary is not None and STATUS_DIR not in os.environ:  # else its launcher says it
            print("\n".join(["", *last_words(record, output_dir, typed_flags(sys.argv[1:]))]))  # noqa: T201
    _leave_process_group()
    _kept_until_exit.extend((model, speed, recorder, saver, observers))


def _leave_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@dataclass(eq=False)
class SaveAtTheEnd(Observer):
    """Saves the model after the last step, and with --merge the merged one."""

    job: Job
    recorder: Recorder
    speed: Speed
    results: BeforeAndAfter
    summary: Summary | None = None
    """The summary of the training, once the model is saved."""

    def prepared(self, wrapped: Wrapped) -> None:
        self._engine = wrapped
        resumed, last_step = self.job.resumed, self.job.last_step
        if resumed is not None and resumed.step == last_step:
            self.step_done(last_step)  # the earlier run ended during this save, or after it

    def step_done(self, step: int) -> None:
        job, engine = self.job, self._engine
        if step != job.last_step:
            return
        ranks = engine.accelerator.num_processes
        facts = described(job, self.speed)
        self.summary = summary = self._summarised(step)
        with self.recorder.saving(engine.model):
            card = card_of_run(
                facts,
                num_processes=ranks,
                evaluation=self.results.evaluations,
                summary=summary,
                dataset_name=job.own.data.dataset_name,
            )
            names = ["final", "merged"] if job.own.method.merge else ["final"]
            for name in names:
                save_model(
                    engine.accelerator,
                    engine.model,
                    job.output_dir / name,
                    merge=name == "merged",
                    tokenizer=job.tokenizer,
                    card=card,
                    strategy=job.strategy.name,
                    num_processes=ranks,
                    step=step,
                )

    def _summarised(self, step: int) -> Summary | None:
        """Return the summary, None where no loss is known; a collective, whole on rank 0 alone."""
        job, recorder = self.job, self.recorder
        of_all, of_this = recorder.all_losses(), recorder.outer_losses()
        last = (of_all or [None])[-1] if of_this is None else of_this[1]
        if last is None:
            return None
        rows, tokens = 0, 0
        if rank() == 0:
            rows, tokens = count_trained(job.rows, step * job.global_batch_size)
        evaluated = [result for result in self.results.evaluations if result["step"] == step]
        return Summary(
            steps=step,
            epochs=rows / job.request.data.rows,
            rows=rows,
            tokens=tokens,
            first_loss=of_all[0] if of_all else None,
            last_loss=last,
            perplexity=evaluated[-1]["perplexity"] if evaluated else None,
            left_out=job.request.data.left_out(),
            strategy=job.strategy.name,
            num_processes=job.args.world_size,
            rehearsal=job.request.launch.rehearsal,
            seconds=age_seconds(),
        )


@contextmanager
def _steps_shown(job: Job, recorder: Recorder, status: StatusFile) -> Generator[None]:
    """Show on rank 0 how far the training is: a bar on a terminal, elsewhere lines."""
    if rank() != 0:
        yield
        return
    from rich.console import Console

    data = job.request.data
    lines = StepLines(
        job.last_step,
        tokens_per_step=(data.tokens or 0) / data.rows * job.global_batch_size or None,
        peak=status.peak or (lambda: None),
    )
    # What follows the launch shows the steps itself, and its log has all of them.
    followed = STATUS_DIR in os.environ
    has_bar = not (followed or job.args.disable_tqdm)
    console = Console(file=sys.stderr if has_bar else sys.stdout)
    display = Display(console, bar=has_bar, every_line=followed)

    def show(step: int, values: Mapping[str, Any]) -> None:
        display.line(lines.of(step, values))

    recorder.on_log = show
    with display.shown():
        yield


def _train_under_engine(
    job: Job,
    model: Any,
    collate: Collate,
    recorder: Recorder,
    observers: Sequence[Observer],
    saver: CheckpointSaver,
) -> None:
    bucket_view = job.own.speed.gradients_in_buckets
    if job.own.run.engine == "loop":
        train_loop(
            model,
            job.args,
            job.rows,
            collate,
            recorder=recorder,
            scheduled_steps=job.steps,
            steps_per_epoch=job.steps_per_epoch,
            observers=[*observers, saver],
            resumed=job.resumed,
            ddp_bucket_view=bucket_view,
        )
        return
    trainer = ToolkitTrainer(
        model=model,
        args=job.args,
        train_dataset=job.rows,
        data_collator=collate,
        processing_class=job.tokenizer,
        recorder=recorder,
        saver=saver,
        observers=observers,
        scheduled_steps=job.steps,
        steps_per_epoch=job.steps_per_epoch,
        ddp_bucket_view=bucket_view,
    )
    for shown in (PrinterCallback, ProgressCallback):  # instead of `_steps_shown`
        trainer.remove_callback(shown)
    if not trainer.model_accepts_loss_kwargs:
        check_fillers(job.rows, job.global_batch_size, of="the loss of this model")
    trainer.train_from(job.resumed)


def _saver_of(job: Job, recorder: Recorder) -> CheckpointSaver:
    """Return the saver of a job's checkpoints, and tell the recorder where the run begins."""
    heartbeat = recorder.heartbeat
    # A run that died before its first checkpoint begins again, and its steps don't count.
    if job.resumed is None:
        recorder.resumed_after(0, [])
    else:
        recorder.resumed_after(job.resumed.step, losses_before(job.resumed.folder))
    saver = CheckpointSaver(
        output_dir=job.output_dir,
        facts=facts_of_job(job),
        recorder=recorder,
        form=job.own.run.checkpoint_form,
        limit=job.args.save_total_limit,
        every=steps_between(
            job.args,
            steps=job.steps,
            rows=job.request.data.rows,
            global_batch=job.global_batch_size,
        ),
        last_step=job.last_step,
        preemption=None if heartbeat is None else Preemption(heartbeat.ask_to_stop),
        newest=None if job.resumed is None else job.resumed.folder,
    )
    if heartbeat is not None:  # a guard's message must not name a checkpoint that was skipped
        heartbeat.guards.last_checkpoint = lambda: saver.newest
    return saver


@contextmanager
def _preemptible(saver: CheckpointSaver, status: StatusFile) -> Generator[None]:
    """Save and leave on SIGTERM or SIGHUP, and let the status file say so; every rank enters it.

    Without guards there is no heartbeat to agree on a step, and a signal ends the process at once.

    Raises:
        Preempted: on every rank.
    """
    if saver.preemption is None:
        yield
        return
    try:
        with saver.preemption.listening():
            yield
    except Preempted as error:
        status.preempted(str(error))
        raise


_SAME_NAME: Final = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "seed",
    "learning_rate",
    "max_grad_norm",
    "weight_decay",
)
"""Fields of a record's `training` that are named like their flags."""


def recorder_of(job: Job, status: StatusFile, speed: Speed) -> Recorder:
    """Return the recorder of a run; it refuses the run unless the job's request engages."""
    args, own = job.args, job.own
    moments = speed.on.get("bf16_weights", {}).get("moments")
    requested = Requested(
        strategy=job.strategy,
        num_processes=requested_processes(os.environ),
        precision=args.mixed_precision,
        gradient_clipping=float(args.max_grad_norm or 0),
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        sync_each_batch=syncs_each_batch(args),
        optimizer_classes=_optimizer_classes(job.strategy, plain_value(args.optim))
        if moments is None
        else (MasterAdamW.__name__,),
        accumulation_dtype=requested_accumulation_dtype(os.environ),
        activation_checkpointing=_checkpoints_all_layers(job, speed)
        or bool(speed.on.get("checkpoint_layers")),
        optimizer_settings=optimizer_settings(args),
        dtype=job.request.method.trained_dtype,
        moments=moments,
    )
    evidence = None
    if own.run.evidence is not None:
        weights = own.run.evidence_weights
        evidence = EvidenceKeeper(
            Path(own.run.evidence),
            step=own.run.evidence_step,
            weights=None if weights is None else Path(weights),
            strategy=job.strategy.name,
            engine=own.run.engine,
            precision=args.mixed_precision,
        )
    return Recorder(
        requested,
        rehearsal=job.request.launch.rehearsal,
        notes=job.deepspeed_changes,
        steps_file=job.output_dir / STEPS_FILE,
        status=status,
        evidence=evidence,
        heartbeat=heartbeat_for(
            own.guards.guards,
            grad_norm_factor=own.guards.guard_grad_norm,
            slow_rank=own.guards.guard_slow_rank,
            checkpoints=job.output_dir,
        ),
    )


def described(job: Job, speed: Speed) -> dict[str, Any]:
    """Return the part of the record that is known before the first step."""
    args, own, request = job.args, job.own, job.request
    return {
        "schema": SCHEMA,
        "strategy": job.strategy.name,
        "engine": own.run.engine,
        "precision": args.mixed_precision,
        "status": "ok",
        "reason": None,
        "model": {
            "name": request.model_name,
            "path": request.model.path,
            "parameters": request.model.parameters,
            "trained_parameters": request.method.trained_parameters,
        },
        "data": request.data.facts(),
        "training": {name: getattr(args, name) for name in _SAME_NAME}
        | {
            "global_batch_size": job.global_batch_size,
            "max_steps": job.last_step,
            "throughput_steps": own.run.throughput_steps,
            "scale_lr": own.run.scale_lr,
            "base_batch_size": own.run.base_batch_size,
            "max_length": own.data.length,
            "optimizer": plain_value(args.optim),
            "activation_checkpointing": _checkpoints_all_layers(job, speed),
            "lr_scheduler_type": plain_value(args.lr_scheduler_type),
            "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32",
            "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
            "speed": speed.facts(args),
        }
        | request.training_facts(),
        "resumed": None if job.resumed is None else job.resumed.facts(),
        "facts": facts_of_run(job),
        "final": "final",
        "environment": environment.snapshot(),
    }


def request_facts(job: Job, speed: Speed) -> dict[str, Any]:
    """Return the facts from which the planner tells the memory of a run, also of a failed one."""
    facts = described(job, speed)
    kept = {name: facts[name] for name in ("strategy", "precision", "model", "training")}
    return kept | {"num_processes": job.request.launch.num_processes or 1}


def optimizer_settings(args: TrainingArguments) -> dict[str, Any]:
    """Return the settings that the optimizer's groups must have at the first step.

    Only AdamW's settings are named: other optimizers name theirs differently.
    """
    settings: dict[str, Any] = {"weight_decay": args.weight_decay}
    # A DeepSpeed scheduler writes into the groups and does not keep the earlier rate.
    plugin = args.deepspeed_plugin
    if plugin is None or "scheduler" not in plugin.deepspeed_config:
        settings["learning_rate"] = args.learning_rate
    if plain_value(args.optim) in ADAMW:
        betas = (args.adam_beta1, args.adam_beta2)
        settings |= {"betas": betas, "eps": args.adam_epsilon}
    return settings


def _checkpoints_all_layers(job: Job, speed: Speed) -> bool:
    """Whether every layer is computed again in backward."""
    return bool(
        checkpoints_by_flag(vars(job.args))
        or speed.checkpoints_all
        or requests_checkpointing(os.environ)
    )


def _optimizer_classes(strategy: Strategy, optim: str) -> tuple[str, ...] | None:
    """Return the classes that an optimizer may have; None: not known for this optimizer."""
    if optim not in ADAMW:
        return None
    backend = backend_of(strategy)
    swapped = backend.reads_json and backend.steps_on_cpu
    if swapped and read_deepspeed_config(os.environ).get("zero_force_ds_cpu_optimizer", True):
        return ("DeepSpeedCPUAdam",)
    return ("AdamW",)
