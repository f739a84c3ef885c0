"""Model and data of a comparison, prepared once for all runs, in a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.comparing.run.plan import ComparisonPlan
from toolkit.launching.launch import launch_environment
from toolkit.launching.preflight import prepare_launch
from toolkit.tables.terminal import print_line

if TYPE_CHECKING:
    from rich.console import Console


def prepare(plan: ComparisonPlan, console: Console) -> dict[str, Any]:
    """Prepare with the flags of the first run, and return the facts of all; see `prepare_launch`.

    Raises:
        UsageError: the data are not usable, the flags are not under at least one strategy, or the
            model is not under the first.
        PrepareError: the preparation failed for another reason.
    """
    first = plan.runs[0]
    planned = [run for run in plan.runs if run.skipped is None]
    strategies = dict.fromkeys(run.strategy.name for run in planned)
    ranks = dict.fromkeys(f"{run.strategy.name}:{run.num_processes}" for run in planned)
    options = [
        # With the flags, this determines the number of rows that a run reads.
        f"--num_processes={first.num_processes}",
        f"--strategies={','.join(strategies)}",
        f"--ranks={','.join(ranks)}",
    ]
    if sizes := {run.strategy.tensor for run in planned} - {1}:
        options.append(f"--tensor_size={max(sizes)}")
    if plan.rehearsal:
        options.append("--rehearsal")
    return prepare_launch(
        options,
        first.flags,
        environment=run_environment(rehearsal=plan.rehearsal),
        say=lambda line: print_line(line, console=console),
    )


def run_environment(*, rehearsal: bool) -> dict[str, str]:
    """Return the environment variables that all runs of a comparison share."""
    return launch_environment({"CUDA_VISIBLE_DEVICES": ""} if rehearsal else {}, loopback=True)
