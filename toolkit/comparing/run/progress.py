"""Progress of a comparison: what it will do; a line for each run, and a bar on a terminal."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

from toolkit.comparing.report.runs_table import cells
from toolkit.comparing.run.options import CompareOptions, flag_values
from toolkit.comparing.run.plan import ComparisonPlan, Run
from toolkit.environment import cache_root
from toolkit.launching.step_lines import progress_bar, show_progress
from toolkit.records.results import Control, Row
from toolkit.tables.terminal import print_line

if TYPE_CHECKING:
    from rich.console import Console

ANNOUNCEMENT: Final = re.compile(r"toolkit[.\w]*: ")
"""Prefix of a run's output lines for the user, such as the notice of a build of a minute."""

SETTINGS: Final = ("rehearsal of ", "effective batch: ", "deepspeed: ")
"""Beginnings of announcements that are not printed: they stand in the log and the report."""

QUIET_SECONDS: Final = 15.0
"""Time between two printed lines on the step of a run."""

BUILT_IN: Final = ("small-llama", "standard-library")
"""Prefixes of the names of the cache folders of the built-in model and data."""

OTHER_INPUTS: Final = frozenset({"model_name_or_path", "train_file", "dataset_name"})
"""Flags of `toolkit.train` that name another model or other data than the built-in ones."""


NEXT: Final = (
    "Your own model: toolkit recommend NAME --gpu L4 --gpus 2 says what fits, and toolkit train "
    "--model_name_or_path NAME --train_file FILE trains it"
)


def is_built_in(options: CompareOptions) -> bool:
    """Return whether the built-in model is compared on the built-in data."""
    return OTHER_INPUTS.isdisjoint(flag_values(options.train_flags))


def first_words(options: CompareOptions, *, starts: int) -> str:
    """Describe the steps of a comparison with `starts` runs to start, repeats counted, in order."""
    first = "Importing libraries, preparing model and data"
    if is_built_in(options) and not all(any(cache_root().glob(f"{name}-*/")) for name in BUILT_IN):
        making = f"making the built-in model and data once, in {cache_root()}"
        first = f"The first time here: importing libraries, {making}"
    runs = f"{starts} {'run' if starts == 1 else 'runs'}"
    timed = f" and {options.throughput_steps} to time" if options.throughput_steps else ""
    return f"{first}. Then {runs} of {options.max_steps} steps to judge{timed}."


@contextmanager
def waiting(text: str, *, console: Console) -> Generator[None]:
    """Show a moving bar with the time that passed on a terminal while the context lasts."""
    from rich.progress import TimeElapsedColumn

    terminal_only = {"transient": True, "disable": not console.is_terminal}
    with progress_bar(console, TimeElapsedColumn(), **terminal_only) as bar:
        show_progress(bar, text)
        yield


class ProgressLines:
    """Shows a comparison in lines: one for each run, which fills while it lasts."""

    def __init__(
        self, console: Console, *, shown_name: Callable[[Run], str] = lambda run: run.name
    ) -> None:
        self.console = console
        self.shown_name = shown_name
        self.label = ""
        self.is_open = False
        """Whether the line of a run has no end yet."""

        self.printed_at = 0.0
        self.printed: set[str] = set()
        """Announcements of the current run that were printed."""

    def say(self, text: str) -> None:
        """Print a line; that of a run goes on below it."""
        self.close()
        print_line(text, console=self.console)

    def close(self) -> None:
        """End the line of a run."""
        if self.is_open:
            print_line("", console=self.console)
        self.is_open = False

    def add(self, text: str) -> None:
        """Print more on the line of the current run."""
        begun = f"{self.label}: " if not self.is_open else ", "
        print_line(f"{begun}{text}", console=self.console, end="")
        self.is_open = True

    def start(self, run: Run, position: int, total: int, repeat: str = "") -> None:
        """Show that a run begins, the `position`-th of `total`, with the number of its repeat."""
        which = f", {repeat}" if repeat else ""
        processes = "1 process" if run.num_processes == 1 else f"{run.num_processes} processes"
        self.label = f"[{position}/{total}] {self.shown_name(run)}{which}"
        self.printed_at = time.monotonic()
        self.printed.clear()
        self.close()
        self.add(processes)

    def also(self, run: Run, text: str) -> None:
        """Say why a run without a row begins."""
        self.label = self.shown_name(run)
        self.say(text)

    def line(self, text: str) -> None:
        """Take one line of the run's output."""
        # Every rank may print the same announcement.
        found = ANNOUNCEMENT.match(text)
        if found and text not in self.printed and not text.startswith(SETTINGS, found.end()):
            self.printed.add(text)
            self.say(f"{self.label}: {text}")

    def step(self, step: int) -> None:
        """Take the number of steps that every rank has finished."""
        if time.monotonic() - self.printed_at >= QUIET_SECONDS:
            self.printed_at = time.monotonic()
            self.add(f"step {step}")

    def finish(self, run: Run, row: Row, control: Control | None) -> None:
        self.add(_ending(row, control))
        self.close()


class LinesAndBar(ProgressLines):
    """Shows the same lines on a terminal, each whole, and a bar below them.

    The bar counts the steps of all runs, and tells how long they still take.
    """

    def __init__(self, console: Console, *, steps: int, shown_name: Callable[[Run], str]) -> None:
        from rich.progress import TimeElapsedColumn, TimeRemainingColumn

        super().__init__(console, shown_name=shown_name)
        self.steps_of_a_run = steps
        self.parts: list[str] = []
        """The line of the current run, which is printed when it ends."""

        times = TimeElapsedColumn(), TimeRemainingColumn()
        # Starts and steps take turns: only the mean over all of them tells what is left.
        self.bar = progress_bar(console, *times, transient=True, speed_estimate_period=math.inf)

    def close(self) -> None:
        if self.parts:
            print_line(f"{self.label}: {', '.join(self.parts)}", console=self.console)
        self.parts.clear()

    def add(self, text: str) -> None:
        self.parts.append(text)

    def start(self, run: Run, position: int, total: int, repeat: str = "") -> None:
        super().start(run, position, total, repeat)
        self.before = (position - 1) * self.steps_of_a_run
        self.of = total * self.steps_of_a_run
        self.step(0)

    def step(self, step: int) -> None:
        words = f"{self.label}, step {step}"
        done = self.before + min(step, self.steps_of_a_run)
        show_progress(self.bar, words, step=done, of=self.of)


@contextmanager
def shown_progress(
    console: Console, plan: ComparisonPlan, options: CompareOptions
) -> Generator[ProgressLines]:
    """Show the lines of the runs while the context lasts, on a terminal with a bar below them."""
    lines, bar = ProgressLines(console, shown_name=plan.shown_name), nullcontext()
    if console.is_terminal:
        steps = options.max_steps + options.throughput_steps
        lines = live = LinesAndBar(console, steps=steps, shown_name=plan.shown_name)
        bar = live.bar
    try:
        with bar:
            yield lines
    finally:
        lines.close()


def _ending(row: Row, control: Control | None) -> str:
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    shown = cells(row, control)
    repeats = row["repeats"]
    last = repeats[-1]["seconds"] if repeats else row["seconds"]
    seconds = "" if last is None else f" in {last:.0f} s"
    return f"ok{seconds}, final loss {shown['final loss']}, gap {shown['gap']}"
