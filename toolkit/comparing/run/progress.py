"""Progress of a comparison: what it is about to do; a live table on a terminal, lines elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from toolkit.comparing.report.runs_table import MEASURED, cells
from toolkit.comparing.run.options import CompareOptions, flag_names
from toolkit.comparing.run.plan import ComparisonPlan, Run
from toolkit.environment import cache_root
from toolkit.escaping import plain
from toolkit.launching.forking import COLD
from toolkit.launching.step_lines import bar
from toolkit.records.results import Control, Row
from toolkit.tables.terminal import SHORT, print_line

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

STATUS_STYLES: Final = {"ok": "green", "skipped": "yellow", "waiting": "dim"}

ANNOUNCEMENT: Final = re.compile(r"toolkit[.\w]*: ")
"""Prefix of a run's output lines for the user, such as the notice of a build of a minute."""

SPEED: Final = ("tokens/s", "step time")
"""Columns that are hidden in a rehearsal, where they do not predict the speed of GPUs."""

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
    """Shows a comparison in lines: one when a run starts, one when it ends, and a few between."""

    def __init__(
        self, console: Console, *, shown_name: Callable[[Run], str] = lambda run: run.name
    ) -> None:
        self.console = console
        self.shown_name = shown_name
        self.label = ""
        self.left = TimeLeft()
        self.printed_at = 0.0
        self.printed: set[str] = set()
        """Announcements of the current run that were printed."""

    def say(self, text: str) -> None:
        """Print a line about the whole comparison."""
        print_line(text, console=self.console)

    def start(self, run: Run, position: int, total: int, repeat: str = "") -> None:
        """Show that a run begins, the `position`-th of `total`, with the number of its repeat."""
        which = f", {repeat}" if repeat else ""
        processes = "1 process" if run.num_processes == 1 else f"{run.num_processes} processes"
        self.label = f"[{position}/{total}] {self.shown_name(run)}{which}"
        self.left.start(position, total)
        self.printed_at = time.monotonic()
        self.printed.clear()
        self.say(f"{self.label}: {processes}, started")

    def also(self, run: Run, text: str) -> None:
        """Say why a run without a row begins."""
        self.label = self.shown_name(run)
        self.say(text)

    def line(self, text: str) -> None:
        """Take one line of the run's output."""
        # Every rank may print the same announcement.
        if ANNOUNCEMENT.match(text) and text not in self.printed:
            self.printed.add(text)
            self.say(f"{self.label}: {text}")

    def step(self, step: int) -> None:
        """Take the number of steps that every rank has finished."""
        if time.monotonic() - self.printed_at >= QUIET_SECONDS:
            self.printed_at = time.monotonic()
            self.say(f"{self.label}: step {step}")

    def finish(self, run: Run, row: Row, control: Control | None) -> None:
        self.left.finish()
        words = "; ".join(filter(None, (_ending(row, control), self.left.words())))
        self.say(f"{self.label}: {words}")


class LiveTable(ProgressLines):
    """Shows the report's table on a terminal, filled while the runs go on."""

    def __init__(self, console: Console, plan: ComparisonPlan, options: CompareOptions) -> None:
        super().__init__(console, shown_name=plan.shown_name)
        self.rehearsal = plan.rehearsal
        speed = options.show_speed or not plan.rehearsal
        self.measured = (*SPEED, *MEASURED) if speed else MEASURED
        self.wanted_steps = options.max_steps + options.throughput_steps
        self.states: dict[str, tuple[Run, str, Row | None]] = {
            run.name: (run, "waiting", None) for run in plan.runs
        }
        """Each run by its name, with its status and, once it has ended, its row."""

        self.control: Control | None = None
        self.current: Run | None = None
        self.last_line = ""
        self.repeat = ""
        self.started = 0.0
        self.steps = 0

    def start(self, run: Run, position: int, total: int, repeat: str = "") -> None:
        self.current, self.last_line, self.steps = run, "", 0
        self.left.start(position, total)
        self.repeat = f"{repeat}, " if repeat else ""
        self.started = time.monotonic()
        # Keep the cells of an earlier repeat on the screen.
        _, _, row = self.states.get(run.name, (run, "", None))
        self.states[run.name] = (run, "running", row)

    def line(self, text: str) -> None:
        if text.startswith(f"toolkit: {COLD}") and text not in self.printed:
            self.printed.add(text)
            self.say(text)
        if text.strip():
            self.last_line = plain(text.strip())

    def step(self, step: int) -> None:
        self.steps = step

    def finish(self, run: Run, row: Row, control: Control | None) -> None:
        self.current = None
        self.left.finish()
        self.control = control
        self.states[run.name] = (run, row["status"], row)

    def render(self) -> Group:
        from rich.console import Group

        left = self.left
        of_current = 0.0 if self.current is None else min(self.steps / self.wanted_steps, 1.0)
        ended = left.position - (self.current is not None)
        words = ", ".join(filter(None, (f"run {left.position} of {left.total}", left.words())))
        share = (ended + of_current) / max(left.total, 1)
        return Group(self._table(), bar(words, share=share, width=self.console.width))

    def _table(self) -> Table:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        caption = Text(self.last_line[: self.console.width - 2], style="dim")
        table = Table(box=SIMPLE_HEAD, pad_edge=False, caption=caption)
        for column in ("run", "status", *(SHORT.get(name, name) for name in self.measured)):
            table.add_column(column, no_wrap=True)
        for run, state, row in self.states.values():
            values = ["-"] * len(self.measured)
            if row is not None:
                counted = self.rehearsal and bool(row["peak"])
                shown = cells(row, self.control, counted=counted)
                values = [shown[name] for name in self.measured]
            status = Text(state, style=STATUS_STYLES.get(state, "red"))
            if run is self.current:
                seconds = time.monotonic() - self.started
                status = Text(f"{self.repeat}step {self.steps}, {seconds:.0f} s", style="cyan")
            table.add_row(self.shown_name(run), status, *map(Text, values))
        return table


@contextmanager
def show_progress(
    console: Console, plan: ComparisonPlan, options: CompareOptions
) -> Generator[ProgressLines]:
    """Show a live table on a terminal while the context lasts, lines on anything else."""
    if not console.is_terminal:
        yield ProgressLines(console, shown_name=plan.shown_name)
        return
    from rich.live import Live

    table = LiveTable(console, plan, options)
    with Live(console=console, refresh_per_second=4, get_renderable=table.render, transient=True):
        yield table


def _ending(row: Row, control: Control | None) -> str:
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    shown = cells(row, control)
    repeats = row["repeats"]
    last = repeats[-1]["seconds"] if repeats else row["seconds"]
    seconds = "" if last is None else f" in {last:.0f} s"
    return f"ok{seconds}, final loss {shown['final loss']}, gap {shown['gap']}"
