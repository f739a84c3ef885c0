"""Fine-tune a causal LM under whatever backend `accelerate launch` was told to use.

    accelerate launch --config_file accelerate_configs/zero2.yaml -m toolkit.train --max_steps 20

Runs in every rank: flags -> trainer or loop -> record. Without enough GPUs it rehearses.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import environment
from toolkit.configs.requested import (
    read_deepspeed_config,
    requested_accumulation_dtype,
    requested_processes,
    requests_checkpointing,
)
from toolkit.errors import GuardError, UsageError
from toolkit.escaping import one_line
from toolkit.job import Job, check_fillers, checked_job, has_fillers
from toolkit.launching.python import check_package_folder
from toolkit.launching.ranks import leave, quiet, rank, say
from toolkit.launching.status import STATUS_DIR, StatusFile, guard, status_folder
from toolkit.records.results import RECORD_FILE, SCHEMA, STARTING_ADAPTER, STEPS_FILE, write_json
from toolkit.redaction import redact, redact_output, redacted_words
from toolkit.rehearse import die_with_launcher, told
from toolkit.strategies import Strategy

if TYPE_CHECKING:
    from toolkit.checkpoints.keeping import Keeper
    from toolkit.measuring.recorder import Recorder
    from toolkit.training.observers import Observer
    from toolkit.training.speed import Speed

ADAMW = ("adamw_torch", "adamw_torch_fused")

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3

_kept: list[object] = []
"""What holds the process group when training is over, kept until the process leaves. Without it
DDP's reducer ends gloo's threads while it holds the lock of Python's interpreter, and for that one
of them may be waiting: both then wait for ever (torch 2.13, `~ProcessGroupGloo`)."""


def main() -> None:
    """Train in this rank; leave with 0, 1 (failed), 2 (usage), 3 (refused) or 143 (preempted)."""
    die_with_launcher()
    gc.disable()  # until all is imported: what imports make stays, and looking at it takes a fifth
    redact_output()
    quiet()
    os.environ["PYTHONSAFEPATH"] = "1"  # workers that are spawned start as this rank did
    from toolkit.checkpoints.preemption import EXIT_PREEMPTED, Preempted
    from toolkit.measuring.attestation import Refused

    code = 0
    try:
        argv = sys.argv[1:]
        sys.argv[1:] = redacted_words(argv)  # trackers keep the command line of a run
        _main(argv, refused_by=Refused)
    except UsageError as error:
        code = told(EXIT_USAGE, str(error))
    except Refused as error:
        code = told(EXIT_REFUSED, f"refused: {error}")
    except Preempted as error:
        code = told(EXIT_PREEMPTED, str(error))
    except GuardError as error:
        code = told(EXIT_FAILED, f"stopped by a guard: {error}")
    except Exception:
        sys.stderr.write(redact(traceback.format_exc()))
        code = EXIT_FAILED
    if code == 0:
        leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a rank that failed would wait in its exit handlers for its neighbours


def _main(argv: list[str], *, refused_by: type[BaseException]) -> None:
    if STATUS_DIR in os.environ:  # a launcher that listens hears of mistakes too
        status = StatusFile(Path(os.environ[STATUS_DIR]), rank())
        with guard(status, refused_by=(refused_by,)):
            check_package_folder()
            train(checked_job(argv), status)
        return
    job = checked_job(argv)  # without one, a mistake leaves nothing behind
    status = StatusFile(status_folder(Path(job.args.output_dir)), rank())
    with guard(status, refused_by=(refused_by,)):
        train(job, status)


def train(job: Job, status: StatusFile) -> None:
    """Load the model, train it, save it, and write the record.

    Raises:
        Refused: what engaged is not what was asked.
    """
    import torch

    from toolkit.data.cache import check_seconds
    from toolkit.data.collation import Collator
    from toolkit.measuring import memory
    from toolkit.measuring.attestation import Refused
    from toolkit.training.adapters import load_for
    from toolkit.training.before_and_after import (
        before_and_after,
        with_evaluation,
        write_so_far,
    )
    from toolkit.training.dropout import turn_off
    from toolkit.training.randomness import RandomForwards
    from toolkit.training.run_checkpoints import keeper_of, preemptible
    from toolkit.training.speed import Speed
    from toolkit.training.tracking import keep_local

    gc.enable()
    if rank() == 0:
        environment.commit()  # kept for the record: the code may change while the run goes on
    for line in keep_local(job.args.report_to, Path(job.args.output_dir)):
        if rank() == 0:
            say(line)
    status.peak = memory.host_peak_bytes if job.rehearsal else memory.device_peak_bytes
    if job.args.tf32 is None and job.args.mixed_precision == "no":
        torch.backends.cuda.matmul.fp32_precision = "ieee"  # parity in fp32 means fp32
    torch.manual_seed(job.args.seed)
    model = load_for(
        job.method,
        job.model,
        job.facts.path,
        seed=job.args.seed,
        start=Path(job.args.output_dir) / STARTING_ADAPTER if rank() == 0 else None,
    )
    if job.run.dropout == "off":
        turn_off(model)
    speed = Speed(job.speed, job.args)
    speed.apply(model, loop=job.args if job.run.engine == "loop" else None)
    for why in speed.left_out.values() if rank() == 0 else ():
        say(f"left out of --tuned: {why}")
    _check_idle_loss(job, model)
    collate = speed.collating(Collator(pad_token_id=job.tokenizer.pad_token_id))
    recorder = _recorder(job, status, speed)
    keeper = keeper_of(job, recorder)
    try:
        train_with = _train_with_trainer if job.run.engine == "trainer" else _train_in_loop
        watching = before_and_after(
            job.evaluation,
            collate,
            tokenizer=job.tokenizer,
            recorder=recorder,
            checkpoint=None if job.resumed is None else job.resumed.folder,
        )
        if job.evaluation is not None:
            keeper.write_beside = partial(write_so_far, plan=job.evaluation, observers=watching)
        random = [RandomForwards(recorder)] if job.run.dropout == "off" else []
        saving = _observers(job, recorder, speed, watching)
        observers = [speed, *random, *watching, *saving]
        with preemptible(keeper, status):
            train_with(job, model, collate, recorder, observers, keeper)
        # A run whose evidence is of a later step ends before its packed rows.
        packed = job.run.throughput_steps if job.run.evidence_step is None else 0
        measured = with_evaluation(
            recorder.finish(throughput_steps=packed), job.evaluation, watching
        )
        measured["random_forward"] = next((each.found for each in random), None)
        if measured["warm_up"] is not None:
            measured["warm_up"]["cache_seconds"] = check_seconds()
    except Refused as error:
        if rank() == 0 and job.resumed is None:  # a record would close a folder of checkpoints
            refused = _described(job, speed) | {"final": None} | recorder.refused(error)
            write_json(Path(job.args.output_dir) / RECORD_FILE, refused)
        raise
    finally:
        recorder.close()
    if rank() == 0:
        write_json(Path(job.args.output_dir) / RECORD_FILE, _described(job, speed) | measured)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    _kept.extend((model, speed, recorder, keeper, observers))


def _train_with_trainer(
    job: Job,
    model: Any,
    collate: Any,
    recorder: Recorder,
    observers: list[Observer],
    keeper: Keeper,
) -> None:
    from transformers import TrainerCallback

    from toolkit.training.observers import KeeperCallback, ObserversCallback
    from toolkit.training.trainer import ToolkitTrainer

    class RunTrainer(ToolkitTrainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            # Packed rows come after the training that was asked for, and evidence may end it
            # before: the schedule is that of the whole.
            return super().create_scheduler(job.steps, optimizer)

        def finish_record(self) -> None:
            """Left to `train`, which knows how many steps were packed rows."""

    class QuietOnPackedRows(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step > job.last_step:
                control.should_log = False  # it would wait for the GPU within a timed step

    trainer = RunTrainer(
        model=model,
        args=job.args,
        train_dataset=job.rows,
        data_collator=collate,
        processing_class=job.tokenizer,
        recorder=recorder,
        keeper=keeper,
        ddp_bucket_view=job.speed.gradients_in_buckets,
    )
    trainer.add_callback(QuietOnPackedRows())
    trainer.add_callback(ObserversCallback(trainer, observers))
    trainer.add_callback(KeeperCallback(keeper))
    if not trainer.model_accepts_loss_kwargs:
        check_fillers(job.rows, job.global_batch_size, of="the loss of this model")
    trainer.train_from(job.resumed)


def _check_idle_loss(job: Job, model: Any) -> None:
    """Refuse a model that would learn from rows that train nothing, or break by them."""
    import torch

    from toolkit.training.idle_loss import idle_loss
    from toolkit.training.methods import skeleton

    if not has_fillers(job.rows):
        return
    if job.method.storage is not None:  # zeros can't stand in for packed weights
        model = skeleton(job.facts.path, trust_remote_code=job.model.trust_remote_code)
    loss = idle_loss(model, job.args.device)
    if job.args.device.type == "cuda":
        torch.cuda.empty_cache()  # no peak of the run is to hold it
    if loss != 0:
        raise UsageError(
            f"The rows don't fill whole steps of {job.global_batch_size}, and the loss of "
            f"{type(model).__name__} is {loss:g}, not 0, for a micro-batch without a token to "
            "learn, as the last ones may be. Pass --max_train_samples with a multiple of "
            f"{job.global_batch_size}, or --max_steps that end before."
        )


def _train_in_loop(
    job: Job,
    model: Any,
    collate: Any,
    recorder: Recorder,
    observers: list[Observer],
    keeper: Keeper,
) -> None:
    from toolkit.training.loop import train_loop
    from toolkit.training.observers import KeeperObserver

    train_loop(
        model,
        job.args,
        job.rows,
        collate,
        recorder=recorder,
        scheduled_steps=job.steps,
        observers=[*observers, KeeperObserver(keeper)],
        resumed=job.resumed,
        ddp_bucket_view=job.speed.gradients_in_buckets,
    )


def _observers(
    job: Job, recorder: Recorder, speed: Speed, watching: list[Observer]
) -> list[Observer]:
    """Return what goes along with the training, in the order in which it is called."""
    from toolkit.engines.prepared import Prepared
    from toolkit.training.before_and_after import evaluations_of
    from toolkit.training.card import card_of_run
    from toolkit.training.observers import Observer
    from toolkit.training.saving import save_merged, save_model

    class SaveAtTheEnd(Observer):
        def prepared(self, prepared: Prepared) -> None:
            self.engine = prepared
            if job.resumed is not None and job.resumed.step == job.last_step:
                self.step_done(job.last_step)  # it died within this save, or after it

        def step_done(self, step: int) -> None:
            if step != job.last_step:
                return
            accelerator = self.engine.accelerator
            written = [("final", save_model)]
            if job.method.arguments.merge:
                written.append(("merged", save_merged))
            described = _described(job, speed)
            with recorder.saving(self.engine.model):
                card = card_of_run(
                    described,
                    num_processes=accelerator.num_processes,
                    evaluation=evaluations_of(watching),
                    losses=recorder.outer_losses(),
                    resumed=recorder.steps_before > 0,
                    dataset_name=job.dataset_name,
                )
                for name, save in written:
                    save(
                        accelerator,
                        self.engine.model,
                        Path(job.args.output_dir) / name,
                        tokenizer=job.tokenizer,
                        card=card,
                        strategy=job.strategy.name,
                        num_processes=accelerator.num_processes,
                        step=step,
                    )

    return [SaveAtTheEnd()]


def _recorder(job: Job, status: StatusFile, speed: Speed) -> Recorder:
    from toolkit.measuring.attestation import Asked
    from toolkit.measuring.evidence import EvidenceKeeper
    from toolkit.measuring.heartbeat import heartbeat_for
    from toolkit.measuring.recorder import Recorder

    asked = Asked(
        strategy=job.strategy,
        num_processes=requested_processes(os.environ),
        precision=job.args.mixed_precision,
        gradient_clipping=float(job.args.max_grad_norm or 0),
        gradient_accumulation_steps=job.args.gradient_accumulation_steps,
        optimizer_classes=_optimizer_classes(job.strategy, str(job.args.optim.value)),
        accumulation_dtype=requested_accumulation_dtype(os.environ),
        activation_checkpointing=_checkpoints(job, speed)
        or bool(speed.on.get("checkpoint_layers")),
        optimizer_settings=_optimizer_settings(job.args),
        dtype=job.method.trained_dtype,
    )
    return Recorder(
        asked,
        rehearsal=job.rehearsal,
        notes=job.deepspeed_changes,
        steps_file=Path(job.args.output_dir) / STEPS_FILE,
        status=status,
        evidence=None
        if job.run.evidence is None
        else EvidenceKeeper(
            Path(job.run.evidence),
            step=job.run.evidence_step,
            weights=None if job.run.evidence_weights is None else Path(job.run.evidence_weights),
            strategy=job.strategy.name,
            engine=job.run.engine,
            precision=job.args.mixed_precision,
        ),
        heartbeat=heartbeat_for(
            job.guards.guards,
            grad_norm_factor=job.guards.guard_grad_norm,
            slow_rank=job.guards.guard_slow_rank,
            checkpoints=Path(job.args.output_dir),
        ),
    )


def _described(job: Job, speed: Speed) -> dict[str, Any]:
    """The part of the record that was known before the first step."""
    import torch

    from toolkit.training.dropout import dropout_facts
    from toolkit.training.model import BUILT_IN_MODEL

    args = job.args
    same_name = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "seed",
        "learning_rate",
        "max_grad_norm",
        "weight_decay",
    )
    return {
        "schema": SCHEMA,
        "strategy": job.strategy.name,
        "engine": job.run.engine,
        "precision": args.mixed_precision,
        "status": "ok",
        "reason": None,
        "model": {
            "name": one_line(job.model.model_name_or_path or BUILT_IN_MODEL),
            "path": job.facts.path,
            "parameters": job.facts.parameters,
            "trained_parameters": job.method.trained_parameters,
        },
        "data": job.data.facts(),
        "training": {name: getattr(args, name) for name in same_name}
        | {
            "global_batch_size": job.global_batch_size,
            "max_steps": job.last_step,
            "throughput_steps": job.run.throughput_steps,
            "scale_lr": job.run.scale_lr,
            "base_batch_size": job.run.base_batch_size,
            "max_length": job.max_length,
            "optimizer": str(args.optim.value),
            "activation_checkpointing": _checkpoints(job, speed),
            "lr_scheduler_type": str(args.lr_scheduler_type.value),
            "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32",
            "speed": speed.facts(args),
        }
        | job.method.facts()
        | dropout_facts(
            job.facts.path,
            off=job.run.dropout == "off",
            lora_dropout=job.method.arguments.lora_dropout,
            trust_remote_code=job.model.trust_remote_code,
        ),
        "resumed": None if job.resumed is None else job.resumed.facts(),
        "final": "final",
        "environment": environment.snapshot(),
    }


def _checkpoints(job: Job, speed: Speed) -> bool:
    """Whether every layer is computed again in backward."""
    # transformers 5.23 renames it, and keeps the old name as an alias.
    return bool(
        getattr(job.args, "activation_checkpointing", False)
        or job.args.gradient_checkpointing
        or speed.checkpoints_all
        or requests_checkpointing(os.environ)
    )


def _optimizer_classes(strategy: Strategy, optim: str) -> tuple[str, ...] | None:
    if optim not in ADAMW:
        return None
    swapped = strategy.backend == "deepspeed" and strategy.offload_optimizer != "none"
    if swapped and read_deepspeed_config(os.environ).get("zero_force_ds_cpu_optimizer", True):
        return ("DeepSpeedCPUAdam",)
    return ("AdamW",)


def _optimizer_settings(args: Any) -> dict[str, Any]:
    """Return what the optimizer's groups must hold; other rules than AdamW's have other names."""
    settings = {"weight_decay": args.weight_decay}
    # A scheduler of DeepSpeed's writes into the groups and keeps nothing of the rate before it.
    plugin = args.deepspeed_plugin
    if plugin is None or "scheduler" not in plugin.deepspeed_config:
        settings["learning_rate"] = args.learning_rate
    if str(args.optim.value) in ADAMW:
        betas = (args.adam_beta1, args.adam_beta2)
        settings |= {"betas": betas, "eps": args.adam_epsilon}
    return settings


if __name__ == "__main__":
    main()
