"""Model and data of a comparison, prepared once for all runs, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from typing import TYPE_CHECKING, Any, Final, cast

from toolkit.comparing.report.terminal import plain, print_line
from toolkit.comparing.run.plan import ComparisonPlan
from toolkit.errors import UsageError
from toolkit.launching.forking import COLD, Fork, start
from toolkit.launching.launch import launch_environment
from toolkit.launching.outcome import WARM_PROCESS_ENDED
from toolkit.launching.preparing import end_by_signal
from toolkit.launching.supervised import supervised

if TYPE_CHECKING:
    from rich.console import Console

PREPARE: Final = (sys.executable, "-m", "toolkit.training.prepare")

PROGRESS_BAR: Final = re.compile(r"\d+%\|")


def prepare(plan: ComparisonPlan, console: Console) -> dict[str, Any]:
    """Run `toolkit.training.prepare` with the flags of the first run and return its facts.

    Raises:
        UsageError: the data are not usable, the flags are not under at least one strategy, or the
            model is not under the first.
        PrepareError: the preparation failed for another reason.
    """
    first = plan.runs[0]
    planned = [run for run in plan.runs if run.skipped is None]
    strategies = dict.fromkeys(run.strategy.name for run in planned)
    ranks = dict.fromkeys(f"{run.strategy.name}:{run.num_processes}" for run in planned)
    command = [
        *PREPARE,
        # With the flags, this determines the number of rows that a run reads.
        f"--num_processes={first.num_processes}",
        f"--strategies={','.join(strategies)}",
        f"--ranks={','.join(ranks)}",
    ]
    if sizes := {run.strategy.tensor for run in planned} - {1}:
        command.append(f"--tensor_size={max(sizes)}")
    if plan.rehearsal:
        command.append("--rehearsal")
    last = ""
    # Its messages are shown at once; the facts, on stdout, are read at its end.
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as answer, open(reader, errors="replace") as lines:
        try:
            process = start(
                supervised([*command, *first.flags]),
                environment=run_environment(rehearsal=plan.rehearsal),
                stdout=answer.fileno(),
                stderr=writer,
                on_cold=lambda reason: print_line(f"toolkit: {COLD}{reason}", console=console),
            )
        finally:
            os.close(writer)
        try:
            for line in lines:
                if not line.strip() or PROGRESS_BAR.search(line):
                    continue
                # Printed one line late: the very last line may be the error that is raised below.
                if last:
                    print_line(last, console=console)
                last = line.strip()
        except BaseException:
            process.terminate()
            raise
        finally:
            code = process.wait()
        answer.seek(0)
        facts = answer.read()
    if isinstance(process, Fork) and process.has_lost_parent:
        print_line(f"{WARM_PROCESS_ENDED} They are started again.", console=console)
        return prepare(plan, console)
    if code == 2:
        raise UsageError(plain(last) or "The flags of toolkit.train are not usable.")
    if last:
        print_line(last, console=console)
    if code != 0:
        end = end_by_signal(code) or f"ended with status {code}"
        raise PrepareError(f"Preparing model and data {end}.")
    return cast("dict[str, Any]", json.loads(facts))


def run_environment(*, rehearsal: bool) -> dict[str, str]:
    """Return the environment variables that all runs of a comparison share."""
    return launch_environment({"CUDA_VISIBLE_DEVICES": ""} if rehearsal else {}, loopback=True)


class PrepareError(RuntimeError):
    """Model and data could not be prepared; the reason is on the screen."""
