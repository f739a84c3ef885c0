"""A recommendation for eyes and programs, and the files to launch it with."""

from __future__ import annotations

import shlex
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.planning.choices import OPTIM_FLAGS
from toolkit.planning.render.as_json import (
    gpu_as_json,
    interval,
    job_as_json,
    memory_as_json,
    model_as_json,
    speed_as_json,
    verdict_as_json,
)
from toolkit.planning.render.table import gib_span, span, verdict_sentence

if TYPE_CHECKING:
    from rich.console import Console

    from toolkit.planning.job import Job
    from toolkit.planning.learning_rate import LearningRate
    from toolkit.planning.recommend import Candidate, Recommendation

PORT = 29500
"""Where nodes meet: a free port of one of them, which 0 asks for, the others would not know."""


def show_recommendation(found: Recommendation, console: Console) -> None:
    """Print the choice, the reasons and the runners-up."""
    say = partial(console.print, highlight=False, soft_wrap=True)
    if found.choice is None:
        say(f"{found.model.name}: nothing fits for sure on this {found.gpu.name}.")
    else:
        say(f"{found.model.name} on {found.gpu.name}: {_named(found.choice.job)}")
        say(verdict_sentence(found.choice.verdict))
        say(_pace(found.choice))
    say("")
    for reason in found.reasons:
        say(f"- {reason}")
    for place, one in enumerate(found.runners_up, 2):
        needed = gib_span(one.verdict.needed)
        say(f"{place}. {_named(one.job)}: {needed} GiB, {_pace(one)}")
    say(learning_rate_sentence(found.learning_rate))


def learning_rate_sentence(rate: LearningRate) -> str:
    """Say the rate for this batch, by both rules."""
    if rate.base_batch == rate.batch:
        return f"Learning rate: {rate.base:g} as it is, since the global batch stays {rate.batch}."
    return (
        f"Learning rate: {rate.base:g} at a batch of {rate.base_batch} becomes {rate.linear:.3g} "
        f"by the linear rule and {rate.square_root:.3g} by the square-root rule at {rate.batch}."
    )


def write_recommendation(found: Recommendation, folder: Path, *, force: bool = False) -> list[str]:
    """Write the files to launch the choice with, and return the command line.

    Raises:
        UsageError: nothing was chosen, or the folder holds such files already.
    """
    from toolkit.configs import ConfigOptions, write_configs
    from toolkit.errors import UsageError

    if found.choice is None:
        raise UsageError(f"Nothing fits for sure, so nothing was written. {found.reasons[1]}")
    job = found.choice.job
    files = write_configs(
        job.strategy,
        folder,
        options=ConfigOptions(num_processes=job.gpus),
        force=force,
    )
    return command(job, files.accelerate, rate=found.learning_rate.linear)


def command(job: Job, config: Path, *, rate: float) -> list[str]:
    """Return the line that starts a job."""
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
    words += ["-m", "toolkit.train", "--strategy", job.strategy.name]
    if job.method != "full":
        words += ["--method", job.method, "--lora_r", str(job.lora_rank)]
    return words + [word for key, value in flags.items() for word in (f"--{key}", str(value))]


def recommendation_as_json(found: Recommendation) -> dict[str, Any]:
    """Return a recommendation as plain data."""
    from toolkit.planning.plan import SCHEMA

    rate = found.learning_rate
    return {
        "schema": SCHEMA,
        "model": model_as_json(found.model),
        "gpu": gpu_as_json(found.gpu),
        "goal": found.goal,
        "choice": None if found.choice is None else candidate_as_json(found.choice),
        "closest": None if found.closest is None else candidate_as_json(found.closest),
        "runners_up": [candidate_as_json(one) for one in found.runners_up],
        "reasons": list(found.reasons),
        "learning_rate": {
            "base": rate.base,
            "base_batch": rate.base_batch,
            "batch": rate.batch,
            "linear": rate.linear,
            "square_root": rate.square_root,
        },
    }


def candidate_as_json(one: Candidate) -> dict[str, Any]:
    return {
        "job": job_as_json(one.job),
        "verdict": verdict_as_json(one.verdict),
        "memory": memory_as_json(one.memory),
        "speed": speed_as_json(one.speed),
        "tokens_per_second": interval(one.speed.tokens_per_second),
    }


def recommendation_as_html(found: Recommendation) -> str:
    """Return the choice and the reasons for a notebook; whatever a user named is escaped."""
    head = "nothing fits for sure" if found.choice is None else _named(found.choice.job)
    items = "".join(f"<li>{escape(reason)}</li>" for reason in found.reasons)
    others = "".join(
        f"<li>{escape(_named(one.job))}: {escape(_pace(one))}</li>" for one in found.runners_up
    )
    runners = f"<p>Next to it:</p><ol start=2>{others}</ol>" if others else ""
    title = f"{found.model.name} on {found.gpu.name}: {head}"
    rate = escape(learning_rate_sentence(found.learning_rate))
    return f"<p><b>{escape(title)}</b></p><ul>{items}</ul>{runners}<p>{rate}</p>"


def shown_command(words: list[str]) -> str:
    return shlex.join(words)


def _named(job: Job) -> str:
    said = f"{job.strategy.name} on {job.gpus} GPU{'s' if job.gpus > 1 else ''}"
    if job.method != "full":
        said += f", {'LoRA' if job.method == 'lora' else 'QLoRA'}"
    said += f", batch {job.batch} x {job.accumulation} accumulated, "
    said += "fp32" if job.precision == "no" else job.precision
    return said + (", activation checkpointing" if job.checkpointing == "full" else "")


def _pace(one: Candidate) -> str:
    return f"{span(one.speed.tokens_per_second)} tokens/s, {span(one.speed.step_seconds)} s a step"
