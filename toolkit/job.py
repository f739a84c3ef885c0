"""What the flags and the launcher ask of one rank, with everything that can be wrong in it checked.

Nothing is written before all of it fits: flags, launcher's config, model and data.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.configs.optimizers import missing_package, optimizer_problem
from toolkit.configs.requested import (
    asks_for_deepspeed,
    requested_processes,
    requested_strategy,
    requests_checkpointing,
    same_features,
    shown,
)
from toolkit.errors import UsageError
from toolkit.files import check_takes_files
from toolkit.launching.ranks import rank, say
from toolkit.launching.status import STATUS_DIR
from toolkit.records.evidence import BEFORE_FILE, EVIDENCE_FILES
from toolkit.records.results import FILLER_ID, RECORD_FILE, STARTING_ADAPTER, STEPS_FILE
from toolkit.rehearse import (
    checked_deepspeed_config,
    rehearse_if_needed,
    use_deepspeed_config,
)
from toolkit.strategies import Strategy, get_strategy

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, TrainingArguments

    from toolkit.checkpoints.resuming import Resumed
    from toolkit.data.arguments import DataArguments
    from toolkit.data.prepared import PreparedData
    from toolkit.training.arguments import ModelArguments, RunArguments
    from toolkit.training.evaluation_plan import EvaluationPlan
    from toolkit.training.guard_arguments import GuardArguments
    from toolkit.training.method_arguments import MethodArguments
    from toolkit.training.methods import Method
    from toolkit.training.model import ModelFacts
    from toolkit.training.speed_arguments import SpeedArguments

NOT_ASKED = {"None", "False", "no", "none", "0", "0.0", "[]"}
"""What a flag holds that asks for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank's training, with everything that can be wrong before it checked."""

    strategy: Strategy
    rehearsal: bool
    model: ModelArguments
    run: RunArguments
    method: Method
    speed: SpeedArguments
    guards: GuardArguments
    facts: ModelFacts
    data: PreparedData
    rows: Dataset
    """In the order of training: the ragged rows of `steps`, then the packed ones."""

    steps: int
    global_batch_size: int
    max_length: int
    tokenizer: PreTrainedTokenizerBase
    evaluation: EvaluationPlan | None
    dataset_name: str | None
    args: TrainingArguments
    deepspeed_changes: list[str]
    resumed: Resumed | None = None

    @property
    def last_step(self) -> int:
        """The step that training ends with, packed rows aside: it may end before `steps`."""
        return min(self.steps, self.args.max_steps)


def checked_job(argv: list[str]) -> Job:
    """Return what the flags and the launcher ask for. A rehearsal begins here.

    The output folder is this run's alone afterwards, until the process of rank 0 ends.

    Raises:
        UsageError: the flags, the config, the model, the data or the output folder don't fit;
            nothing was written.
    """
    from transformers.trainer_utils import IntervalStrategy

    from toolkit.checkpoints.resume_request import asked_checkpoint
    from toolkit.data.order import count_steps, rows_needed, training_rows
    from toolkit.data.tokenizer import load_tokenizer
    from toolkit.training.arguments import own_arguments, training_arguments, training_values
    from toolkit.training.evaluation_plan import not_done_with_evidence, planned_evaluation
    from toolkit.training.methods import check_strategy, checked_method
    from toolkit.training.model import resolve_tokenizer
    from toolkit.training.precision import asked_precision, with_precision
    from toolkit.training.prepare import check_files, model_and_data
    from toolkit.training.run_checkpoints import resumed_job
    from toolkit.training.run_folder import held
    from toolkit.training.speed_arguments import check_model, check_speed
    from toolkit.training.tracking import asked_trackers

    own = own_arguments(argv)
    model, data_arguments, run = own.model, own.data, own.run
    check_files(model, data_arguments)
    # First of all: looking at the defaults of the arguments below already wakes CUDA.
    rehearsal = rehearse_if_needed()
    if asks_for_deepspeed(os.environ):
        checked_deepspeed_config()  # names all its mistakes; what follows stops at the first
    strategy = asked_strategy(run.strategy)
    if not rehearsal and rank() == 0:
        ranks = requested_processes(os.environ)
        each = "1 rank on a GPU" if ranks == 1 else f"{ranks} ranks on a GPU each"
        say(f"training under {shown(strategy)}: {each}")
    rest, from_config = with_precision(own.rest, os.environ)
    rest = own.speed.with_flags(rest, strategy)
    values = training_values(rest, model=model, run=run)
    _refuse_what_would_be_ignored(values, run, data_arguments)
    optimizer = _plain(values["optim"])
    if problem := optimizer_problem(optimizer, strategy) or missing_package(optimizer):
        raise UsageError(problem)
    trackers = asked_trackers(values["report_to"], engine=run.engine)
    output_dir = Path(values["output_dir"])
    check_output = partial(_check_output, output_dir, own.method, trackers)
    check_output()
    asked = asked_checkpoint(values)
    _check_evidence(values, run)
    check_speed(
        own.speed,
        values,
        strategy=strategy,
        evidence=run.evidence is not None,
        on_gpu=not rehearsal,
        config_checkpoints=requests_checkpointing(os.environ),
    )
    facts, data = model_and_data(
        model,
        data_arguments,
        rows_needed=rows_needed(values, num_processes=requested_processes(os.environ)),
    )
    precision = asked_precision(values)
    check_model(own.speed, facts.path)
    method = checked_method(own.method, model, facts, precision=precision)
    check_strategy(method, strategy, precision=precision)
    tokenizer = load_tokenizer(
        resolve_tokenizer(model),
        trust_remote_code=model.trust_remote_code,
        chat_template=data.chat_template(),
    )
    changes = _fit_deepspeed(
        strategy, facts, values, adapters=not method.arguments.is_full, rehearsal=rehearsal
    )
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
    if run.evidence_step is not None and run.evidence_step > steps:
        raise UsageError(
            f"--evidence_step {run.evidence_step} lies beyond the {steps} steps of the training."
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
    told, evaluation = [*from_config, batch, *method.notes()], None
    if run.evidence is not None:  # of a run that is taken apart nobody asks what it learned
        undone = not_done_with_evidence(data_arguments, samples=run.sample_prompts)
        told += [undone] if undone else []
    else:
        evaluation = planned_evaluation(
            values,
            model=model,
            data=data_arguments,
            samples=run.sample_prompts,
            facts=facts,
            training=data,
            steps=steps,
            global_batch=global_batch,
        )
    for line in told if rank() == 0 else ():
        say(line)
    if values["label_smoothing_factor"]:
        check_fillers(rows, global_batch, of="--label_smoothing_factor")
    args = training_arguments(rest, model=model, run=run)
    args.max_steps = steps + run.throughput_steps
    if run.evidence_step is not None:  # the schedule stays, and the next step shows what came of it
        args.max_steps = min(steps, run.evidence_step + 1)
    args.eval_strategy = IntervalStrategy.NO  # `evaluation` does it, in either engine
    # The platform asks for Kubeflow, not the user: transformers adds it to whatever was asked.
    args.report_to = [*trackers, *({"kubeflow"} & set(args.report_to) - set(trackers))]
    job = Job(
        strategy=strategy,
        rehearsal=rehearsal,
        model=model,
        run=run,
        method=method,
        speed=own.speed,
        guards=own.guards,
        facts=facts,
        data=data,
        rows=rows,
        steps=steps,
        global_batch_size=global_batch,
        max_length=data_arguments.max_length,
        tokenizer=tokenizer,
        evaluation=evaluation,
        dataset_name=data_arguments.dataset_name,
        args=args,
        deepspeed_changes=changes,
    )
    _ = args.device  # the ranks can talk to each other from here on
    # Looking for a checkpoint tidies the folder: no other run may be working in it.
    with held(output_dir, check_output):
        return resumed_job(job, asked)


def _check_output(folder: Path, method: MethodArguments, trackers: list[str]) -> None:
    """Raise UsageError unless the folder takes what the run writes, and nothing is lost by it."""
    from toolkit.training.run_folder import check_names
    from toolkit.training.tracking import names_of_trackers

    names = ["final/", STEPS_FILE, RECORD_FILE, *names_of_trackers(trackers)]
    if not os.environ.get(STATUS_DIR):
        names.append("status/")
    if method.merge:
        names.append("merged/")
    if not method.is_full:
        names.append(STARTING_ADAPTER)
    check_takes_files(folder, flag="--output_dir")
    check_names(folder, names, flag="--output_dir", checkpoints=True)
    if (folder / RECORD_FILE).exists():
        raise UsageError(f"{folder} holds the record of another run. Choose another --output_dir.")


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


def check_fillers(rows: Dataset, global_batch: int, *, of: str) -> None:
    """Refuse a mean over the tokens of each micro-batch where one may hold none to learn."""
    if has_fillers(rows):
        raise UsageError(
            f"The rows don't fill whole steps of {global_batch}, and {of} divides by the tokens of "
            "each micro-batch, of which the last ones have none. Pass --max_train_samples with a "
            f"multiple of {global_batch}, or --max_steps that end before."
        )


def has_fillers(rows: Dataset) -> bool:
    return FILLER_ID in rows["sample_id"][:]


def _refuse_what_would_be_ignored(
    values: dict[str, Any], run: RunArguments, data: DataArguments
) -> None:
    """Raise UsageError for flags that this script or its loop takes and would not obey, all."""
    from toolkit.data.packing import check_no_cache
    from toolkit.training.evaluation_plan import check_evaluation

    check_evaluation(values, data)
    check_no_cache(values, packing=data.packing)
    ignored = ["save_only_model", "ignore_data_skip", "enable_jit_checkpoint"]
    if run.engine == "loop":
        ignored += [
            "torch_compile",
            "label_smoothing_factor",
            "neftune_noise_alpha",
            "accelerator_config",
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
    folder = Path(run.evidence)
    check_takes_files(folder, flag="--evidence")
    if any(os.path.lexists(folder / name) for name in EVIDENCE_FILES):
        raise UsageError(f"{folder} holds the evidence of another run. Name another folder.")
    given = run.evidence_weights
    if given is not None and not (Path(given) / BEFORE_FILE).is_file():
        raise UsageError(
            f"--evidence_weights {given} holds no {BEFORE_FILE}. Name the --evidence folder of a "
            "run that kept the same step."
        )


def _fit_deepspeed(
    strategy: Strategy,
    facts: ModelFacts,
    values: dict[str, Any],
    *,
    adapters: bool,
    rehearsal: bool,
) -> list[str]:
    if strategy.backend != "deepspeed":
        return []
    config = checked_deepspeed_config()
    _refuse_contradictions(
        values,
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
        adapters=adapters,
        gradient_clipping=float(values["max_grad_norm"] or 0),
        rehearsal=rehearsal,
    )


def _refuse_contradictions(values: dict[str, Any], **written: Any) -> None:
    """Raise UsageError for what the launcher's files say otherwise than the flags, all of it."""
    contradictions = [
        f"--{flag} is {values[flag]!r} and the launcher's config says {value!r} for it"
        for flag, value in written.items()
        if value not in (None, "auto") and not _same(value, values[flag])
    ]
    if contradictions:
        raise UsageError(
            f'{"; ".join(contradictions)}. Write "auto" there, or pass the same value.'
        )


def _same(written: Any, asked: Any) -> bool:
    try:
        return float(written) == float(asked)
    except (TypeError, ValueError):
        return bool(written == asked)


def _plain(value: Any) -> str:
    """One spelling for a flag's value, be it an enum, a list of one or plain."""
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return str(getattr(value, "value", value))
