"""Progress of a comparison: what it will do; a line for each run, and a bar on a terminal."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from toolkit.comparing.report.runs_table import cells
from toolkit.comparing.run.options import CompareOptions, flag_names
from toolkit.comparing.run.plan import ComparisonPlan, Run
from toolkit.environment import cache_root
from toolkit.launching.step_lines import bar
from toolkit.records.results import Control, Row
from toolkit.tables.terminal import print_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

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

INSTANT: Final = 0.5
"""Seconds below which a run counts as not started: it is skipped, or was finished before."""


def about(seconds: float) -> str:
    """Return a rough time: `about 20 s`, `about 2 minutes`."""
    if seconds < 55:
        return f"about {max(5, 5 * round(seconds / 5))} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return "about a minute" if minutes <= 1 else f"about {minutes} minutes"
    return f"about {minutes / 60:.1f} hours"


def first_words(options: CompareOptions, *, starts: int) -> str:
    """Describe the steps of a comparison with `starts` runs to start, repeats counted, in order."""
    built_in = OTHER_INPUTS.isdisjoint(flag_names(options.train_flags))
    first = "Importing libraries, preparing model and data"
    if built_in and not all(any(cache_root().glob(f"{name}-*/")) for name in BUILT_IN):
        making = f"making the built-in model and data once, in {cache_root()}"
        first = f"The first time here: importing libraries, {making}"
    runs = f"{starts} {'run' if starts == 1 else 'runs'}"
    steps = options.max_steps + options.throughput_steps
    return f"{first}. Then {runs} of {steps} steps; the first will tell how long they take."


@dataclass(slots=True)
class TimeLeft:
    """Estimates how long the runs still take, from those that have ended."""

    clock: Callable[[], float] = time.monotonic
    seconds_of_runs: list[float] = field(default_factory=list[float])
    """Durations of the runs that were started so far."""

    position: int = 0
    total: int = 0
    started: float = 0.0

    def start(self, position: int, total: int) -> None:
        self.position, self.total, self.started = position, total, self.clock()

    def finish(self) -> None:
        seconds = self.clock() - self.started
        # Runs that were not started would lower the mean.
        if seconds >= INSTANT:
            self.seconds_of_runs.append(seconds)

    def words(self) -> str | None:
        """Return the time left after the last run that ended; None where it is not known."""
        left = self.total - self.position
        if not left or not self.seconds_of_runs:
            return None
        return f"{about(left * sum(self.seconds_of_runs) / len(self.seconds_of_runs))} left"


@contextmanager
def waiting(text: str, *, console: Console) -> Generator[None]:
    """Show a moving bar with the seconds that passed on a terminal while the context lasts."""
    if not console.is_terminal:
        yield
        return
    from rich.live import Live

    started = time.monotonic()

    def render() -> Table:
        words = f"{text}: {time.monotonic() - started:.0f} s"
        return bar(words, share=None, width=console.width)

    with Live(console=console, refresh_per_second=4, get_renderable=render, transient=True):
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

        self.left = TimeLeft()
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
        self.left.start(position, total)
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
        self.left.finish()
        words = "; ".join(filter(None, (_ending(row, control), self.left.words())))
        self.add(words)
        self.close()


class LiveLines(ProgressLines):
    """Shows the same lines on a terminal, each whole, and below them a bar that fills."""

    def __init__(self, console: Console, *, steps: int, shown_name: Callable[[Run], str]) -> None:
        super().__init__(console, shown_name=shown_name)
        self.wanted_steps = steps
        self.steps = 0
        self.parts: list[str] = []
        """The line of the current run, which is printed when it ends."""

    def close(self) -> None:
        if self.parts:
            print_line(f"{self.label}: {', '.join(self.parts)}", console=self.console)
        self.parts.clear()

    def add(self, text: str) -> None:
        self.parts.append(text)

    def start(self, run: Run, position: int, total: int, repeat: str = "") -> None:
        super().start(run, position, total, repeat)
        self.steps = 0

    def step(self, step: int) -> None:
        self.steps = step

    def finish(self, run: Run, row: Row, control: Control | None) -> None:
        super().finish(run, row, control)
        self.steps = self.wanted_steps

    def render(self) -> Table | str:
        left = self.left
        if not left.position:
            return ""
        seconds = f"{left.clock() - left.started:.0f} s"
        words = ", ".join(filter(None, (self.label, f"step {self.steps}", seconds, left.words())))
        of_current = min(self.steps / self.wanted_steps, 1.0)
        share = (left.position - 1 + of_current) / left.total
        return bar(words, share=share, width=self.console.width)


@contextmanager
def show_progress(
    console: Console, plan: ComparisonPlan, options: CompareOptions
) -> Generator[ProgressLines]:
    """Show the lines of the runs while the context lasts, on a terminal with a bar below them."""
    lines, bar_below = ProgressLines(console, shown_name=plan.shown_name), nullcontext()
    if console.is_terminal:
        from rich.live import Live

        steps = options.max_steps + options.throughput_steps
        lines = live = LiveLines(console, steps=steps, shown_name=plan.shown_name)
        bar_below = Live(console=console, get_renderable=live.render, transient=True)
    try:
        with bar_below:
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
