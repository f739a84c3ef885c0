"""A recommendation in the terminal, and the files and the command to launch it with."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.configs import ConfigOptions
from toolkit.configs.files import write_configs
from toolkit.errors import UsageError
from toolkit.planning.job import PlannedJob
from toolkit.planning.learning_rate import LearningRate
from toolkit.planning.options import OPTIM_FLAGS
from toolkit.planning.recommend import Candidate, Recommendation
from toolkit.planning.render.plans import gib_span, span, verdict_sentence

if TYPE_CHECKING:
    from rich.console import Console

PORT = 29500
"""Where nodes meet: a free port of one of them, which 0 asks for, the others would not know."""


def show_recommendation(answer: Recommendation, console: Console) -> None:
    """Print the choice, the reasons and the runners-up."""
    write = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    if answer.choice is None:
        write(f"{answer.model.name}: nothing fits for sure on this {answer.gpu.name}.")
    else:
        write(f"{answer.model.name} on {answer.gpu.name}: {describe_job(answer.choice.job)}")
        write(verdict_sentence(answer.choice.verdict))
        write(pace(answer.choice))
    write("")
    for reason in answer.reasons:
        write(f"- {reason}")
    for place, candidate in enumerate(answer.runners_up, 2):
        needed = gib_span(candidate.verdict.needed)
        told = f"{place}. {describe_job(candidate.job)}: {needed} GiB, {pace(candidate)}"
        conditional = candidate.verdict.answer == "fits with RAM"
        write(f"{told}, {candidate.verdict.words}" if conditional else told)
    write(learning_rate_sentence(answer.learning_rate))


def learning_rate_sentence(rate: LearningRate) -> str:
    """Return the rate for this batch, by both rules."""
    if rate.base_batch == rate.batch:
        return f"Learning rate: {rate.base:g} as it is, since the global batch stays {rate.batch}."
    return (
        f"Learning rate: {rate.base:g} at a batch of {rate.base_batch} becomes {rate.linear:.3g} "
        f"by the linear rule and {rate.square_root:.3g} by the square-root rule at {rate.batch}."
    )


def write_recommendation(answer: Recommendation, folder: Path, *, force: bool = False) -> list[str]:
    """Write the files to launch the choice with, and return the command line.

    Raises:
        UsageError: nothing was chosen, or the folder holds such files already.
    """
    if answer.choice is None:
        raise UsageError(f"Nothing fits for sure, so nothing was written. {answer.reasons[1]}")
    job = answer.choice.job
    options = ConfigOptions(num_processes=job.gpus)
    files = write_configs(job.strategy, folder, options=options, force=force)
    return command(job, files.accelerate, rate=answer.learning_rate.linear)


def command(job: PlannedJob, config: Path, *, rate: float) -> list[str]:
    """Return the words of the command that starts a job."""
    words = ["accelerate", "launch", "--config_file", str(config)]
    if job.nodes > 1:
        words += ["--num_machines", str(job.nodes), "--machine_rank", "RANK"]
        words += ["--main_process_ip", "ADDRESS", "--main_process_port", str(PORT)]
    flags: dict[str, object] = {
        "model_name_or_path": job.model.name if job.model.exact else "MODEL",
        "max_length": job.sequence,
        "per_device_train_batch_size": job.batch,
        "gradient_accumulation_steps": job.accumulation,
        "learning_rate": f"{rate:g}",
        "optim": OPTIM_FLAGS[job.optimizer],
    }
    if job.optimizer == "sgd_momentum":
        flags["optim_args"] = "momentum=0.9"
    if job.precision != "no":
        flags[job.precision] = True
    if job.checkpointing == "full":
        flags["gradient_checkpointing"] = True
    if job.sync_each_batch:
        flags["sync_each_batch"] = True
    words += ["-m", "toolkit.train", "--strategy", job.strategy.name]
    if job.method != "full":
        words += ["--method", job.method, "--lora_r", str(job.lora_rank)]
    return words + [word for key, value in flags.items() for word in (f"--{key}", str(value))]


def describe_job(job: PlannedJob) -> str:
    """Return strategy, GPUs, method, batch and precision of a job in a few words."""
    text = f"{job.strategy.name} on {job.gpus} GPU{'s' if job.gpus > 1 else ''}"
    if job.method != "full":
        text += f", {'LoRA' if job.method == 'lora' else 'QLoRA'}"
    text += f", batch {job.batch} x {job.accumulation} accumulated, "
    text += "fp32" if job.precision == "no" else job.precision
    text += ", activation checkpointing" if job.checkpointing == "full" else ""
    return text + (", gradients synchronised at every micro-batch" if job.sync_each_batch else "")


def pace(candidate: Candidate) -> str:
    """Return tokens and seconds of a step."""
    speed = candidate.speed
    return f"{span(speed.tokens_per_second)} tokens/s, {span(speed.step_seconds)} s a step"
