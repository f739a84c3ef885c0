"""A recommendation in the terminal, and the files to launch it with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from toolkit import stack
from toolkit.errors import UsageError
from toolkit.planning.job import PlannedJob
from toolkit.planning.learning_rate import LearningRate
from toolkit.planning.reasons import lever_words
from toolkit.planning.recommend import Option, Recommendation
from toolkit.planning.render.commands import (
    ADDRESS,
    PORT,
    nodes_sentence,
    paste_line,
    train_command,
)
from toolkit.planning.render.plans import gib_span, span, verdict_sentence
from toolkit.planning.search import Candidate


def recommendation_lines(answer: Recommendation) -> Iterator[str]:
    """Yield the choice, the reasons, and the options with their commands, in lines of any width."""
    if answer.choice is None:
        yield f"{answer.model.name}: nothing fits for sure on this {answer.gpu.name}."
    else:
        yield f"{answer.model.name} on {answer.gpu.name}: {describe_job(answer.choice.job)}"
        yield verdict_sentence(answer.choice.verdict)
        yield pace(answer.choice)
    yield ""
    for reason in answer.reasons:
        yield f"- {reason}"
    for candidate in answer.runners_up:
        yield f"- Under another strategy: {_beside(candidate)}"
    yield learning_rate_sentence(answer.learning_rate)
    if answer.choice is not None:
        yield from silent_faults(answer.choice.job)
    for number, option in enumerate(answer.options, 1):
        yield ""
        yield from option_lines(number, option)
    if answer.options:
        yield "\nAdd --train_file or --dataset_name with your rows to a command."
        if answer.choice is not None and answer.choice.job.nodes > 1:
            yield nodes_sentence(answer.choice.job.nodes)


def silent_faults(job: PlannedJob) -> Iterator[str]:
    """Yield a line for each fault of the installed releases that a job would meet."""
    strategy, has_adapters = job.strategy, job.method != "full"
    settings = stack.settings_of(
        strategy, accumulation=job.accumulation, precision=job.precision, adapters=has_adapters
    )
    for fault in stack.met(settings):
        yield f"Before you train: {stack.sentence(fault)} {stack.advice([fault])}"


def option_lines(number: int, option: Option) -> list[str]:
    """Return an option in lines: what it is, what it gives up, what it costs, its command."""
    rate = option.learning_rate.linear
    lines = [f"{number}. {option.title}: {_beside(option.candidate)}, learning rate {rate:.3g}"]
    lines.append(f"   gives up: {'; '.join(option.gives_up)}")
    if option.cost is not None:
        price = "; name a price (--dollars-per-hour) for the cost"
        if option.cost.dollars is not None:
            price = f", {span(option.cost.dollars)} dollars"
            price += f" at the price of {option.price_date}" if option.price_date else ""
        lines.append(f"   {span(option.cost.hours)} hours for {option.cost.tokens:,} tokens{price}")
    return [*lines, f"   {paste_line(option)}"]


def _beside(candidate: Candidate) -> str:
    """Return a candidate in a line: its job, memory and pace, and a condition on RAM."""
    line = f"{describe_job(candidate.job)}: {gib_span(candidate.verdict.needed)} GiB, "
    line += pace(candidate)
    conditional = candidate.verdict.answer == "fits with RAM"
    return f"{line}, {candidate.verdict.words}" if conditional else line


def learning_rate_sentence(rate: LearningRate) -> str:
    """Return the rate for this batch, by both rules."""
    if rate.base_batch == rate.batch:
        return f"Learning rate: {rate.base:g} as it is, since the global batch stays {rate.batch}."
    return (
        f"Learning rate: {rate.base:g} at a batch of {rate.base_batch} becomes {rate.linear:.3g} "
        f"by the linear rule and {rate.square_root:.3g} by the square-root rule at {rate.batch}."
    )


def write_recommendation(answer: Recommendation, folder: Path) -> list[str]:
    """Write the files to launch the choice with, and return the command line.

    Raises:
        UsageError: nothing was chosen, or the folder holds such files already.
    """
    if answer.choice is None:
        raise UsageError(f"Nothing fits for sure, so nothing was written. {answer.reasons[1]}")
    # A recommendation that is only shown needs none of them.
    from toolkit.configs import ConfigOptions
    from toolkit.configs.files import write_configs

    job, cost = answer.choice.job, answer.options[0].cost
    size = job.strategy.tensor if job.strategy.tensor > 1 else None
    options = ConfigOptions(num_processes=job.gpus, tensor_size=size)
    if job.nodes > 1:
        options = replace(
            options, num_machines=job.nodes, main_process_ip=ADDRESS, main_process_port=PORT
        )
    files = write_configs(job.strategy, folder, options=options)
    steps = None if cost is None else cost.steps
    return train_command(job, files.accelerate, rate=answer.learning_rate.linear, steps=steps)


def describe_job(job: PlannedJob) -> str:
    """Return strategy, GPUs, method, batch, precision and levers of a job in a few words."""
    text = f"{job.strategy.name} on {job.gpus} GPU{'s' if job.gpus > 1 else ''}"
    if job.backend.splits_model:
        text += f" ({job.strategy.mesh(job.gpus)})"
    elif job.strategy.replicas > 1:
        text += f" in {job.strategy.replicas} groups"
    if job.method != "full":
        text += f", {'LoRA' if job.method == 'lora' else 'QLoRA'}"
    text += f", batch {job.batch} x {job.accumulation} accumulated, "
    text += "fp32" if job.precision == "no" else job.precision
    if job.method == "full" and job.dtype != "float32":
        text += f", weights in {job.dtype}"
    if job.optimizer != "adamw":
        text += f", {job.optimizer}"
    return text + "".join(f", {word}" for word in lever_words(job))


def pace(candidate: Candidate) -> str:
    """Return tokens and seconds of a step."""
    speed = candidate.speed
    return f"{span(speed.tokens_per_second)} tokens/s, {span(speed.step_seconds)} s a step"
