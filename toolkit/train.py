"""Fine-tune a causal LM under whatever backend `accelerate launch` was told to use.

    accelerate launch --config_file accelerate_configs/zero2.yaml -m toolkit.train --max_steps 20

Runs in every rank: flags -> trainer or loop -> record. Without enough GPUs it rehearses.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import environment
from toolkit.configs.requested import (
    DEEPSPEED_FILE,
    read_deepspeed_config,
    requested_processes,
    requested_strategy,
    same_features,
)
from toolkit.errors import UsageError
from toolkit.evidence import EVIDENCE_FILE
from toolkit.launching.ranks import leave
from toolkit.launching.status import STATUS_DIR, StatusFile, guard, status_folder
from toolkit.rehearse import (
    die_with_launcher,
    quiet,
    rehearse_if_needed,
    told,
    use_deepspeed_config,
)
from toolkit.results import FILLER_ID, RECORD_FILE, SCHEMA, write_json
from toolkit.strategies import Strategy, get_strategy

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, TrainingArguments

    from toolkit.measuring.recorder import Recorder
    from toolkit.training.arguments import DataArguments, ModelArguments, RunArguments
    from toolkit.training.data import TrainingData
    from toolkit.training.model import ModelFacts

NOT_ASKED = {"None", "False", "no", "none", "0", "0.0", "[]"}
"""What a flag holds that asks for nothing."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3


def main() -> None:
    """Train in this rank, and leave with 0, 1 (failed), 2 (usage) or 3 (refused)."""
    die_with_launcher()
    quiet()
    from toolkit.measuring.attestation import Refused

    code = 0
    try:
        _main(sys.argv[1:], refused_by=Refused)
    except UsageError as error:
        code = told(EXIT_USAGE, str(error))
    except Refused as error:
        code = told(EXIT_REFUSED, f"refused: {error}")
    except Exception:
        traceback.print_exc()
        code = EXIT_FAILED
    if code == 0:
        leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a rank that failed would wait in its exit handlers for its neighbours


def _main(argv: list[str], *, refused_by: type[BaseException]) -> None:
    if STATUS_DIR in os.environ:  # a launcher that listens hears of mistakes too
        status = StatusFile(Path(os.environ[STATUS_DIR]), _rank())
        with guard(status, refused_by=(refused_by,)):
            train(checked_job(argv), status)
        return
    job = checked_job(argv)  # without one, a mistake leaves nothing behind
    status = StatusFile(status_folder(Path(job.args.output_dir)), _rank())
    with guard(status, refused_by=(refused_by,)):
        train(job, status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank's training, with everything that can be wrong before it checked."""

    strategy: Strategy
    rehearsal: bool
    model: ModelArguments
    run: RunArguments
    facts: ModelFacts
    data: TrainingData
    rows: Dataset
    """In the order of training: the ragged rows of `steps`, then the packed ones."""

    steps: int
    global_batch_size: int
    max_length: int
    tokenizer: PreTrainedTokenizerBase
    args: TrainingArguments
    deepspeed_changes: list[str]


def checked_job(argv: list[str]) -> Job:
    """Return what the flags and the launcher ask for. A rehearsal begins here.

    Raises:
        UsageError: the flags, the config, the model or the data don't fit; nothing was written.
    """
    from toolkit.training.arguments import parse_own, training_arguments, training_values
    from toolkit.training.data import count_steps, rows_needed, training_rows
    from toolkit.training.model import load_tokenizer, resolve_tokenizer
    from toolkit.training.prepare import model_and_data
    from toolkit.training.tracking import asked_trackers

    model, data_arguments, run, rest = parse_own(argv)
    strategy = asked_strategy(run.strategy)
    # First of all: looking at the defaults of the arguments below already wakes CUDA.
    rehearsal = rehearse_if_needed()
    values = training_values(rest, model=model, run=run)
    _refuse_what_would_be_ignored(values, run, data_arguments)
    trackers = asked_trackers(values["report_to"], engine=run.engine)
    if (Path(values["output_dir"]) / RECORD_FILE).exists():
        raise UsageError(
            f"{values['output_dir']} holds the record of another run. Choose another --output_dir."
        )
    _check_evidence(values, run)
    facts, data = model_and_data(
        model,
        data_arguments,
        rows_needed=rows_needed(values, num_processes=requested_processes(os.environ)),
    )
    tokenizer = load_tokenizer(
        resolve_tokenizer(model),
        trust_remote_code=model.trust_remote_code,
        chat_template=data.chat_template(),
    )
    changes = _fit_deepspeed(strategy, facts, values, rehearsal=rehearsal)
    global_batch = (
        values["per_device_train_batch_size"]
        * values["gradient_accumulation_steps"]
        * requested_processes(os.environ)
    )
    steps = count_steps(
        data.rows,
        global_batch=global_batch,
        max_steps=values["max_steps"],
        num_train_epochs=values["num_train_epochs"],
    )
    rows = training_rows(
        data.load(),
        steps=steps,
        global_batch=global_batch,
        seed=values["seed"],
        throughput_steps=run.throughput_steps,
        max_length=data_arguments.max_length,
        pad_token_id=tokenizer.pad_token_id,
    )
    rate, batch = _learning_rate(values, run, global_batch)
    if rate != values["learning_rate"]:
        rest = [*rest, f"--learning_rate={rate!r}"]
    if _rank() == 0:
        print(f"toolkit: {batch}", flush=True)  # noqa: T201
    if values["label_smoothing_factor"]:
        _check_fillers(rows, global_batch, of="--label_smoothing_factor")
    args = training_arguments(rest, model=model, run=run)
    args.max_steps = steps + run.throughput_steps
    # The platform asks for Kubeflow, not the user: transformers adds it to whatever was asked.
    args.report_to = [*trackers, *({"kubeflow"} & set(args.report_to) - set(trackers))]
    return Job(
        strategy=strategy,
        rehearsal=rehearsal,
        model=model,
        run=run,
        facts=facts,
        data=data,
        rows=rows,
        steps=steps,
        global_batch_size=global_batch,
        max_length=data_arguments.max_length,
        tokenizer=tokenizer,
        args=args,
        deepspeed_changes=changes,
    )


def _learning_rate(
    values: dict[str, Any], run: RunArguments, global_batch: int
) -> tuple[float, str]:
    """Return the learning rate for the effective batch, and the sentence that says both."""
    from toolkit.planning.learning_rate import LearningRate

    sentence = (
        f"effective batch: {values['per_device_train_batch_size']} rows x "
        f"{requested_processes(os.environ)} processes x "
        f"{values['gradient_accumulation_steps']} micro-batches = {global_batch} rows"
    )
    rate = float(values["learning_rate"])
    if run.scale_lr == "none" or run.base_batch_size is None:
        return rate, f"{sentence}; learning rate {rate:g}"
    carried = LearningRate(base=rate, base_batch=run.base_batch_size, batch=global_batch)
    rate = carried.by(run.scale_lr)
    return rate, (
        f"{sentence}; learning rate {rate:g}, by the {run.scale_lr} rule from {carried.base:g} at "
        f"{carried.base_batch} rows"
    )


def asked_strategy(name: str | None) -> Strategy:
    """Return what the launcher's config asks for, held against `--strategy`.

    Raises:
        UsageError: the two differ.
    """
    requested = requested_strategy(os.environ)
    if name is None:
        return requested
    strategy = get_strategy(name)
    if not same_features(strategy, requested):
        raise UsageError(
            f"--strategy {name} was asked, but the launcher's config file is for "
            f"{requested.name} ({requested.summary}). Pass the file of {name}: "
            f"accelerate launch --config_file accelerate_configs/{name}.yaml ..."
        )
    return strategy


def train(job: Job, status: StatusFile) -> None:
    """Load the model, train it, save it, and write the record.

    Raises:
        Refused: what engaged is not what was asked.
    """
    import torch

    from toolkit.measuring import memory
    from toolkit.measuring.attestation import Refused
    from toolkit.training.data import Collator
    from toolkit.training.model import load_model
    from toolkit.training.tracking import keep_local

    if _rank() == 0:
        environment.commit()  # kept for the record: the code may change while the run goes on
    for line in keep_local(job.args.report_to, Path(job.args.output_dir)):
        if _rank() == 0:
            print(f"toolkit: {line}", flush=True)  # noqa: T201
    status.peak = memory.host_peak_bytes if job.rehearsal else memory.device_peak_bytes
    if job.args.tf32 is None and job.args.mixed_precision == "no":
        torch.backends.cuda.matmul.fp32_precision = "ieee"  # parity in fp32 means fp32
    torch.manual_seed(job.args.seed)
    model = load_model(job.model, job.facts.path)
    _check_idle_loss(job, model)
    collate = Collator(pad_token_id=job.tokenizer.pad_token_id)
    recorder = _recorder(job, status)
    try:
        if job.run.engine == "trainer":
            _train_with_trainer(job, model, collate, recorder)
        else:
            _train_in_loop(job, model, collate, recorder)
        measured = recorder.finish(throughput_steps=job.run.throughput_steps)
    except Refused as error:
        if _rank() == 0:
            refused = _described(job) | {"final": None} | recorder.refused(error)
            write_json(Path(job.args.output_dir) / RECORD_FILE, refused)
        raise
    finally:
        recorder.close()
    if _rank() == 0:
        write_json(Path(job.args.output_dir) / RECORD_FILE, _described(job) | measured)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _train_with_trainer(job: Job, model: Any, collate: Any, recorder: Recorder) -> None:
    from transformers import TrainerCallback

    from toolkit.training.trainer import ToolkitTrainer

    class RunTrainer(ToolkitTrainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            # The packed rows come after the training that was asked for.
            return super().create_scheduler(min(num_training_steps, job.steps), optimizer)

        def finish_record(self) -> None:
            """Left to `train`, which knows how many steps were packed rows."""

    class SaveAtTheEnd(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step > job.steps:
                control.should_log = False  # it would wait for the GPU within a timed step
            if state.global_step == job.steps:
                _save(job, trainer.accelerator, trainer.model_wrapped, recorder)

    trainer = RunTrainer(
        model=model,
        args=job.args,
        train_dataset=job.rows,
        data_collator=collate,
        processing_class=job.tokenizer,
        recorder=recorder,
    )
    trainer.add_callback(SaveAtTheEnd())
    if not trainer.model_accepts_loss_kwargs:
        _check_fillers(job.rows, job.global_batch_size, of="the loss of this model")
    trainer.train()


def _check_fillers(rows: Dataset, global_batch: int, *, of: str) -> None:
    """Refuse a mean over the tokens of each micro-batch where one may hold none to learn."""
    if _has_fillers(rows):
        raise UsageError(
            f"The rows don't fill whole steps of {global_batch}, and {of} divides by the tokens of "
            "each micro-batch, of which the last ones have none. Pass --max_train_samples with a "
            f"multiple of {global_batch}, or --max_steps that end before."
        )


def _check_idle_loss(job: Job, model: Any) -> None:
    """Refuse a model that would learn from rows that train nothing, or break by them."""
    import torch

    from toolkit.training.fillers import idle_loss

    if not _has_fillers(job.rows):
        return
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


def _has_fillers(rows: Dataset) -> bool:
    return FILLER_ID in rows["sample_id"][:]


def _train_in_loop(job: Job, model: Any, collate: Any, recorder: Recorder) -> None:
    from toolkit.training.loop import train_loop

    def on_step(step: int, accelerator: Any, wrapped: Any) -> None:
        if step == job.steps:
            _save(job, accelerator, wrapped, recorder)

    train_loop(
        model,
        job.args,
        job.rows,
        collate,
        recorder=recorder,
        scheduled_steps=job.steps,
        on_step=on_step,
    )


def _save(job: Job, accelerator: Any, model: Any, recorder: Recorder) -> None:
    from toolkit.training.saving import save_model

    with recorder.saving():
        save_model(
            accelerator,
            model,
            Path(job.args.output_dir) / "final",
            tokenizer=job.tokenizer,
            strategy=job.strategy.name,
            num_processes=accelerator.num_processes,
            step=job.steps,
        )


def _recorder(job: Job, status: StatusFile) -> Recorder:
    from toolkit.measuring.attestation import Asked
    from toolkit.measuring.evidence import EvidenceKeeper
    from toolkit.measuring.recorder import Recorder

    asked = Asked(
        strategy=job.strategy,
        num_processes=requested_processes(os.environ),
        precision=job.args.mixed_precision,
        gradient_clipping=float(job.args.max_grad_norm or 0),
        gradient_accumulation_steps=job.args.gradient_accumulation_steps,
        optimizer_classes=_optimizer_classes(job.strategy, str(job.args.optim.value)),
        dtype=job.model.dtype,
    )
    return Recorder(
        asked,
        rehearsal=job.rehearsal,
        notes=job.deepspeed_changes,
        steps_file=Path(job.args.output_dir) / "steps.jsonl",
        status=status,
        evidence=None
        if job.run.evidence is None
        else EvidenceKeeper(
            Path(job.run.evidence),
            strategy=job.strategy.name,
            engine=job.run.engine,
            precision=job.args.mixed_precision,
        ),
    )


def _described(job: Job) -> dict[str, Any]:
    """The part of the record that was known before the first step."""
    import torch

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
            "name": job.model.model_name_or_path or BUILT_IN_MODEL,
            "path": job.facts.path,
            "parameters": job.facts.parameters,
        },
        "data": job.data.facts(),
        "training": {name: getattr(args, name) for name in same_name}
        | {
            "global_batch_size": job.global_batch_size,
            "max_steps": job.steps,
            "throughput_steps": job.run.throughput_steps,
            "scale_lr": job.run.scale_lr,
            "base_batch_size": job.run.base_batch_size,
            "max_length": job.max_length,
            "optimizer": str(args.optim.value),
            "dtype": job.model.dtype,
            # transformers 5.23 renames it, and keeps the old name as an alias.
            "activation_checkpointing": bool(
                getattr(args, "activation_checkpointing", False) or args.gradient_checkpointing
            ),
            "lr_scheduler_type": str(args.lr_scheduler_type.value),
            "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32",
        },
        "final": "final",
        "environment": environment.snapshot(),
    }


def _refuse_what_would_be_ignored(
    values: dict[str, Any], run: RunArguments, data: DataArguments
) -> None:
    """Raise UsageError for flags that this script or its loop takes and would not obey, all."""
    if data.asked_of_validation:
        raise UsageError(
            f"{', '.join(data.asked_of_validation)}: toolkit.train does not evaluate yet. Leave it "
            "out; toolkit prepare makes the rows."
        )
    ignored = ["resume_from_checkpoint"]
    if run.engine == "loop":
        ignored += [
            "gradient_checkpointing",
            "activation_checkpointing",
            "torch_compile",
            "save_strategy",
            "eval_strategy",
            "label_smoothing_factor",
            "neftune_noise_alpha",
        ]
    found = [f"--{flag}" for flag in ignored if _plain(values.get(flag)) not in NOT_ASKED]
    if found:
        raise UsageError(
            f"{', '.join(found)}: toolkit.train with --engine {run.engine} does not do that. "
            "Leave it out, or use --engine trainer where the Trainer can."
        )


def _check_evidence(values: dict[str, Any], run: RunArguments) -> None:
    if run.evidence is None:
        return
    if _plain(values.get("torch_compile")) not in NOT_ASKED:
        raise UsageError(
            "--evidence looks into the model's forward, which --torch_compile would compile away. "
            "Leave one of them out."
        )
    if (Path(run.evidence) / EVIDENCE_FILE).exists():
        raise UsageError(f"{run.evidence} holds the evidence of another run. Name another folder.")


def _fit_deepspeed(
    strategy: Strategy, facts: ModelFacts, values: dict[str, Any], *, rehearsal: bool
) -> list[str]:
    if strategy.backend != "deepspeed":
        return []
    if DEEPSPEED_FILE not in os.environ:  # the YAML itself holds what DeepSpeed needs
        _refuse_contradictions(
            values,
            "the launcher's config",
            gradient_accumulation_steps=os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
            max_grad_norm=os.environ.get("ACCELERATE_GRADIENT_CLIPPING"),
        )
        return []
    config = read_deepspeed_config(os.environ)
    _refuse_contradictions(
        values,
        "the DeepSpeed file",
        gradient_accumulation_steps=config.get("gradient_accumulation_steps"),
        per_device_train_batch_size=config.get("train_micro_batch_size_per_gpu"),
        max_grad_norm=config.get("gradient_clipping"),
        bf16=config.get("bf16", {}).get("enabled"),
        fp16=config.get("fp16", {}).get("enabled"),
    )
    return use_deepspeed_config(
        config,
        parameters=facts.parameters,
        hidden_size=facts.hidden_size,
        gradient_clipping=float(values["max_grad_norm"] or 0),
        rehearsal=rehearsal,
    )


def _refuse_contradictions(values: dict[str, Any], where: str, **written: Any) -> None:
    """Raise UsageError for what the launcher's files say otherwise than the flags, all of it."""
    contradictions = [
        f"--{flag} is {values[flag]!r} and {where} says {value!r} for it"
        for flag, value in written.items()
        if value not in (None, "auto") and not _same(value, values[flag])
    ]
    if contradictions:
        raise UsageError(
            f'{"; ".join(contradictions)}. Write "auto" in the file, or pass the same value.'
        )


def _same(written: Any, asked: Any) -> bool:
    try:
        return float(written) == float(asked)
    except (TypeError, ValueError):
        return bool(written == asked)


def _optimizer_classes(strategy: Strategy, optim: str) -> tuple[str, ...] | None:
    if optim not in ("adamw_torch", "adamw_torch_fused"):
        return None
    swapped = strategy.backend == "deepspeed" and strategy.offload_optimizer != "none"
    if swapped and read_deepspeed_config(os.environ).get("zero_force_ds_cpu_optimizer", True):
        return ("DeepSpeedCPUAdam",)
    return ("AdamW",)


def _plain(value: Any) -> str:
    """One spelling for a flag's value, be it an enum, a list of one or plain."""
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return str(getattr(value, "value", value))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


if __name__ == "__main__":
    main()
