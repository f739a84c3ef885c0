"""How many processes a run has, and how many rows of the global batch each of them reads.

The global batch is the same for every run. Without a scale, each strategy splits it over its own
processes and `single` reads the micro-batches of the ranks one after the other. Under a scale the
micro-batch is that of the largest count for all, and fewer processes accumulate more of them: the
kernels and the activations of a rank stay the same, and only the number of ranks is compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from toolkit.errors import UsageError
from toolkit.strategies import Strategy


def processes_for(strategy: Strategy, usual: int) -> int:
    """Return the number of processes of a strategy where `usual` is that of the others.

    Raises:
        UsageError: they do not make the strategy's groups.
    """
    if not strategy.is_distributed:
        return 1
    if strategy.replicas == 1:
        return usual
    # Each group needs two ranks at least, or it would shard nothing.
    processes = max(usual, strategy.num_processes)
    if processes % strategy.replicas:
        raise UsageError(
            f"{strategy.name} has {strategy.replicas} groups of equal size, which "
            f"{processes} processes do not make. Choose --num_processes "
            f"{processes + strategy.replicas - processes % strategy.replicas}, or leave it out."
        )
    return processes


def cannot_have(strategy: Strategy, processes: int) -> str | None:
    """Return why a strategy cannot run as so many processes, or None."""
    if strategy.replicas == 1:
        return None
    if processes % strategy.replicas == 0 and processes >= strategy.num_processes:
        return None
    return (
        f"it has {strategy.replicas} groups of equal size and needs {strategy.num_processes} "
        f"processes or more, which {processes} do not make"
    )


def check_batch(batch: int, accumulation: int, counts: Sequence[int]) -> None:
    """Raise UsageError unless the batch divides by each of `counts`, sorted, and says what would.

    Every run has `accumulation` micro-batches.
    """
    shares = [processes * accumulation for processes in counts]
    if all(batch % share == 0 for share in shares):
        return
    # The advice: all numbers of accumulation steps that fit this batch.
    steps = [
        count
        for count in range(1, batch + 1)
        if all(batch % (processes * count) == 0 for processes in counts)
    ]
    raise UsageError(
        f"A global batch of {batch} rows does not divide by {' and by '.join(map(str, counts))} "
        f"processes x {accumulation} accumulation steps. "
        f"{_instead(batch, math.lcm(*shares), steps)}."
    )


def check_scaled_batch(batch: int, accumulation: int, counts: Sequence[int]) -> None:
    """Raise UsageError unless each of `counts`, sorted, reads whole micro-batches of one size."""
    most = counts[-1]

    def fits(steps: int) -> bool:
        return all(most * steps % processes == 0 for processes in counts)

    if fits(accumulation) and batch % (most * accumulation) == 0:
        return
    steps = [s for s in range(1, batch // most + 1) if fits(s) and batch % (most * s) == 0]
    problem = (
        f"A global batch of {batch} rows does not make micro-batches of one size for "
        f"{', '.join(map(str, counts[:-1]))} and {most} processes, with {accumulation} "
        f"accumulation steps at {most}."
    )
    if fits(accumulation):
        raise UsageError(f"{problem} {_instead(batch, most * accumulation, steps)}.")
    if steps:
        raise UsageError(f"{problem} Use --gradient_accumulation_steps {_either(steps)}.")
    unit = math.lcm(*counts)
    raise UsageError(
        f"{problem} Use --gradient_accumulation_steps {unit // most} with a --global_batch_size "
        f"that is a multiple of {unit}, or counts of --scale that divide {most}."
    )


def _instead(batch: int, unit: int, steps: Sequence[int]) -> str:
    below = batch // unit * unit
    sizes = [size for size in (below, below + unit) if size]
    text = f"Use --global_batch_size {_either(sizes)} (a multiple of {unit})"
    return f"{text}, or --gradient_accumulation_steps {_either(steps)}" if steps else text


def _either(values: Sequence[int]) -> str:
    return " or ".join(map(str, values))
