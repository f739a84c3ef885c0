"""One rank's training, after all checks that are possible before it starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers.trainer_utils import IntervalStrategy

from toolkit.backends import backend_of
from toolkit.checkpoints.resuming import Resumed, differences, find_checkpoint
from toolkit.data.sampling_order import count_steps, training_rows
from toolkit.data.tokens import load_tokenizer
from toolkit.engines.backend import spec_of
from toolkit.engines.deepspeed_config import checked_deepspeed_config, use_deepspeed_config
from toolkit.errors import UsageError
from toolkit.launching.ranks import rank, say
from toolkit.measuring.attestation import gather_objects
from toolkit.planning.learning_rate import LearningRate
from toolkit.records.record import FILLER_ID
from toolkit.strategies import Strategy
from toolkit.training import evaluation_plan
from toolkit.training.arguments import (
    OwnArguments,
    RunArguments,
    output_dir_of,
    sync_each_batch,
    training_arguments,
)
from toolkit.training.fingerprint import check_machines_agree, facts_of_job, facts_of_run
from toolkit.training.model import resolve_tokenizer
from toolkit.training.request import (
    Request,
    check_output_folder,
    check_request,
    finished_facts,
    this_launch,
)
from toolkit.training.run_folder import lock_run_folder
from toolkit.training.tuning import Tuning

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, TrainingArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that a rank is ready to train."""

    request: Request
    args: TrainingArguments
    """Arguments of the Trainer, which both engines obey."""

    rows: Dataset
    """Rows in training order: the ragged rows of `steps`, then the packed rows."""

    steps: int
    """Optimizer steps on ragged rows; the learning rate has decayed after them."""

    global_batch_size: int
    """Rows of an optimizer step, over all ranks."""

    tokenizer: PreTrainedTokenizerBase
    evaluation: evaluation_plan.EvaluationPlan
    deepspeed_changes: list[str]
    """How the launcher's DeepSpeed config was fitted to the model, for the record."""

    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """Switches that `--tuned` leaves out on this machine or for this run, each with the reason."""

    resumed: Resumed | None = None
    finished: bool = False
    """Whether an earlier start of the same command has done it all."""

    @property
    def own(self) -> OwnArguments:
        return self.request.own

    @property
    def strategy(self) -> Strategy:
        return self.request.launch.strategies[0]

    @property
    def output_dir(self) -> Path:
        return output_dir_of(self.args)

    @property
    def pad_token_id(self) -> int:
        return cast("int", self.tokenizer.pad_token_id)  # `load_tokenizer` sees to it

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.request.data.rows // self.global_batch_size)

    @property
    def last_step(self) -> int:
        """The step that training ends with, packed rows aside: it may end before `steps`."""
        return min(self.steps, self.args.max_steps)


def checked_job(own: OwnArguments) -> Job:
    """Return the training that the flags and the launcher ask for. A rehearsal begins here.

    The output folder is this run's alone afterwards, until the process of rank 0 ends.

    Raises:
        UsageError: the flags, the config, the model, the data or the output folder don't fit;
            nothing was written.
    """
    launch = this_launch(own.run)
    request = check_request(own, launch)
    (strategy,) = launch.strategies
    tuning = Tuning(request=request, strategy=strategy, values=request.values[strategy.name])
    values, untuned = tuning.with_micro_batch()
    tokenizer = load_tokenizer(
        resolve_tokenizer(own.model),
        trust_remote_code=own.model.trust_remote_code,
        chat_template=request.data.chat_template(),
    )
    deepspeed_changes = _fit_deepspeed(request, values) if backend_of(strategy).reads_json else []
    micro_batches = values["gradient_accumulation_steps"]
    ranks = launch.data_parallel_size or 1
    global_batch = values["per_device_train_batch_size"] * micro_batches * ranks
    steps = count_steps(
        request.data.rows,
        global_batch=global_batch,
        max_steps=values["max_steps"],
        num_train_epochs=values["num_train_epochs"],
    )
    # Only now: whether compiling pays for itself depends on the number of steps.
    request, without_kernels = replace(tuning, values=values).with_kernels(steps)
    own = request.own
    if own.run.evidence_step is not None and own.run.evidence_step > steps:
        raise UsageError(
            f"--evidence_step {own.run.evidence_step} lies beyond the {steps} steps of the "
            "training. Pass a step of the training, or more --max_steps."
        )
    rows = training_rows(
        request.data.load(),
        steps=steps,
        global_batch=global_batch,
        seed=values["seed"],
        reverse=own.run.reverse_rows,
        throughput_steps=own.run.throughput_steps,
        max_length=own.data.length,
        pad_token_id=cast("int", tokenizer.pad_token_id),
    )
    rate, of_rate = _learning_rate(float(values["learning_rate"]), own.run, global_batch)
    batch = (
        f"effective batch: {values['per_device_train_batch_size']} rows x {ranks} processes x "
        f"{micro_batches} micro-batches = {global_batch} rows; {of_rate}"
    )
    samples, left_out = own.run.sample_prompts, None
    if own.run.evidence is not None:  # a run with evidence has no validation rows either
        left_out = evaluation_plan.left_out_with_evidence(own.data, samples=samples)
        samples = 0
    evaluation = evaluation_plan.planned_evaluation(
        values,
        samples=samples,
        training=request.data,
        validation=request.validation,
        steps=steps,
        global_batch=global_batch,
    )
    if rank() == 0:
        for line in filter(None, [*request.notes, batch, left_out]):
            say(line)
    if values["label_smoothing_factor"]:
        check_fillers(rows, global_batch, of="--label_smoothing_factor")
    args = training_arguments(values | {"learning_rate": rate})
    if own.speed.sync_each_batch:
        sync_each_batch(args)
    args.max_steps = steps + own.run.throughput_steps
    # The schedule stays that of all steps; the step after the evidence shows its effect.
    if own.run.evidence_step is not None:
        args.max_steps = min(steps, own.run.evidence_step + 1)
    args.eval_strategy = IntervalStrategy.NO  # the plan's observer evaluates, in either engine
    # The platform asks for Kubeflow, not the user: transformers adds it to any request.
    trackers = request.trackers
    args.report_to = [*trackers, *({"kubeflow"} & set(args.report_to or ()) - set(trackers))]
    job = Job(
        request=request,
        args=args,
        rows=rows,
        steps=steps,
        global_batch_size=global_batch,
        tokenizer=tokenizer,
        evaluation=evaluation,
        deepspeed_changes=deepspeed_changes,
        left_out=untuned | without_kernels,
    )
    _ = args.device  # starts the process group: ranks can communicate from here on
    check_machines_agree(job)
    folder = Path(values["output_dir"])
    # Looking for a checkpoint tidies the folder: no other run may be working in it.
    with lock_run_folder(folder, partial(check_output_folder, folder, own.method, trackers)):
        return replace(job, finished=True) if _is_finished(job) else _resumed(job)


def check_fillers(rows: Dataset, global_batch: int, *, of: str) -> None:
    """Refuse a mean over the tokens of each micro-batch where one may hold none to learn.

    `of` names the option that takes such a mean, as the subject of a sentence.

    Raises:
        UsageError: the rows don't fill whole steps, so fillers stand among them.
    """
    if has_fillers(rows):
        raise UsageError(
            f"The rows don't fill whole steps of {global_batch}, and {of} divides by the tokens of "
            "each micro-batch, of which the last ones have none. Pass --max_train_samples with a "
            f"multiple of {global_batch}, or --max_steps that end before."
        )


def has_fillers(rows: Dataset) -> bool:
    return FILLER_ID in rows["sample_id"][:]


def _is_finished(job: Job) -> bool:
    """Whether the output folder holds the record of this same run; a collective.

    Raises:
        UsageError: on every rank, when its record is of another run.
    """
    changes = None
    if rank() == 0 and (facts := finished_facts(job.output_dir)) is not None:
        changes = differences(facts, facts_of_run(job), source="record")
    changes = gather_objects(changes)[0]
    if changes:
        raise UsageError(
            f"{job.output_dir} holds the record of another run: {'; '.join(changes)}. Choose "
            "another --output_dir."
        )
    return changes is not None


def _resumed(job: Job) -> Job:
    """Return a job with the checkpoint that it goes on from; a collective where one is asked for.

    Raises:
        UsageError: on every rank, when there is none that is whole and of this training.
    """
    if job.request.resume is None:
        return job
    ranks = job.request.launch.num_processes or 1
    resumed = find_checkpoint(
        job.request.resume,
        facts_of_job(job),
        any_ranks=spec_of(job.strategy, ranks).reads_from_any_ranks,
    )
    if rank() == 0:
        for damage in resumed.damaged:
            say(f"damaged: {damage}")
        say(f"resuming from {resumed.folder}, step {resumed.step}")
        if resumed.moved is not None:
            say(resumed.moved)
    return replace(job, resumed=resumed)


def _learning_rate(rate: float, run: RunArguments, global_batch: int) -> tuple[float, str]:
    """Return the learning rate for the effective batch, and a description of it."""
    if run.scale_lr == "none" or run.base_batch_size is None:
        return rate, f"learning rate {rate:g}"
    scaling = LearningRate(base=rate, base_batch=run.base_batch_size, batch=global_batch)
    rate = scaling.by(run.scale_lr)
    return rate, (
        f"learning rate {rate:g}, by the {run.scale_lr} rule from {scaling.base:g} at "
        f"{scaling.base_batch} rows"
    )


def _fit_deepspeed(request: Request, values: dict[str, Any]) -> list[str]:
    """Fit the launcher's DeepSpeed config to the run, and return the changes as sentences.

    Raises:
        UsageError: it contradicts the flags.
    """
    config = checked_deepspeed_config()
    of_config = {
        "gradient_accumulation_steps": config.get("gradient_accumulation_steps"),
        "per_device_train_batch_size": config.get("train_micro_batch_size_per_gpu"),
        "max_grad_norm": config.get("gradient_clipping"),
        "bf16": config.get("bf16", {}).get("enabled"),
        "fp16": config.get("fp16", {}).get("enabled"),
    }
    contradictions = [
        f"--{flag} is {values[flag]!r} and the launcher's config says {value!r} for it"
        for flag, value in of_config.items()
        if value not in (None, "auto") and not _same(value, values[flag])
    ]
    if contradictions:
        raise UsageError(
            f'{"; ".join(contradictions)}. Write "auto" there, or pass the same value.'
        )
    return use_deepspeed_config(
        config,
        parameters=request.model.parameters,
        hidden_size=request.model.hidden_size,
        adapters=not request.own.method.is_full,
        gradient_clipping=float(values["max_grad_norm"] or 0),
        rehearsal=request.launch.rehearsal,
    )


def _same(of_config: Any, of_flag: Any) -> bool:
    try:
        return float(of_config) == float(of_flag)
    except (TypeError, ValueError):
        return bool(of_config == of_flag)
