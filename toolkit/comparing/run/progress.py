"""What the user sees while a comparison works: a live table, or lines where nobody looks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

from toolkit.comparing.report.runs_table import MEASURED, cells
from toolkit.comparing.report.table import SHORT
from toolkit.comparing.report.terminal import plain, print_line
from toolkit.comparing.run.expected import TimeLeft, bar
from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.plan import ComparisonPlan, Run
from toolkit.launching.forking import COLD
from toolkit.records.results import Control, Row

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

STATUS_STYLES: Final = {"ok": "green", "skipped": "yellow", "waiting": "dim"}

ANNOUNCEMENT: Final = re.compile(r"toolkit[.\w]*: ")
"""Lines of a run that are meant for the user, such as a build that takes a minute."""

SPEED: Final = ("tokens/s", "step time")

QUIET_SECONDS: Final = 15.0


class Progress(Protocol):
    """Told what happens, in order."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def say(self, text: str) -> None:
        """Tell something about the whole."""
        ...

    def start(
        self, run: Run, position: int, total: int, *, repeat: int = 1, repeats: int = 1
    ) -> None:
        """Take the run that begins now, and which of its repeats it is."""
        ...

    def line(self, text: str) -> None:
        """Take one line of the run's output."""
        ...

    def step(self, step: int) -> None: ...

    def finish(self, run: Run, row: Row, control: Control | None) -> None: ...


def build_progress(console: Console, plan: ComparisonPlan, options: CompareOptions) -> Progress:
    """Return a live table for a terminal, lines for anything else."""
    if not console.is_terminal:
        return Lines(console, shown_name=plan.shown_name)
    return LiveTable(console, plan, options)


class Lines:
    """One line when a run starts, one when it ends, and a few between."""

    def __init__(
        self, console: Console, *, shown_name: Callable[[Run], str] = lambda run: run.name
    ) -> None:
        self.console = console
        self.shown_name = shown_name
        self.label = ""
        self.left = TimeLeft()
        self.spoken = 0.0
        self.heard: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def say(self, text: str) -> None:
        print_line(text, console=self.console)

    def start(
        self, run: Run, position: int, total: int, *, repeat: int = 1, repeats: int = 1
    ) -> None:
        which = f", repeat {repeat} of {repeats}" if repeats > 1 else ""
        self.label = f"[{position}/{total}] {self.shown_name(run)}{which}"
        self.left.start(position, total)
        self.spoken = time.monotonic()
        self.heard.clear()
        self.say(f"{self.label}: {_processes(run)}, started")

    def line(self, text: str) -> None:
        # Every rank may say the same thing.
        if ANNOUNCEMENT.match(text) and text not in self.heard:
            self.heard.add(text)
            self.say(f"{self.label}: {text}")

    def step(self, step: int) -> None:
        if time.monotonic() - self.spoken >= QUIET_SECONDS:
            self.spoken = time.monotonic()
            self.say(f"{self.label}: step {step}")

    def finish(self, run: Run, row: Row, control: Control | None) -> None:
        self.left.finish()
        words = "; ".join(filter(None, (_ending(row, control), self.left.words())))
        self.say(f"{self.label}: {words}")


class LiveTable:
    """The report's table, filled while the runs go on."""

    def __init__(self, console: Console, plan: ComparisonPlan, options: CompareOptions) -> None:
        from rich.live import Live

        self.console = console
        self.rehearsal = plan.rehearsal
        self.shown_name = plan.shown_name
        speed = options.show_speed or not plan.rehearsal
        self.measured = (*SPEED, *MEASURED) if speed else MEASURED
        self.wanted_steps = options.max_steps + options.throughput_steps
        self.states: dict[str, tuple[Run, str, Row | None]] = {
            run.name: (run, "waiting", None) for run in plan.runs
        }
        self.control: Control | None = None
        self.current: Run | None = None
        self.last_line = ""
        self.heard: set[str] = set()
        self.repeat = ""
        self.left = TimeLeft()
        self.started = 0.0
        self.steps = 0
        self.live = Live(
            console=console, refresh_per_second=4, get_renderable=self._shown, transient=True
        )

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.live.stop()

    def say(self, text: str) -> None:
        print_line(text, console=self.console)

    def start(
        self, run: Run, position: int, total: int, *, repeat: int = 1, repeats: int = 1
    ) -> None:
        self.current, self.last_line, self.steps = run, "", 0
        self.left.start(position, total)
        self.repeat = f"repeat {repeat} of {repeats}, " if repeats > 1 else ""
        self.started = time.monotonic()
        # A repeat leaves what is known of the run on the screen.
        known = self.states.get(run.name)
        self.states[run.name] = (run, "running", None if known is None else known[2])

    def line(self, text: str) -> None:
        if text.startswith(f"toolkit: {COLD}") and text not in self.heard:
            self.heard.add(text)
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

    def _shown(self) -> Group:
        from rich.console import Group

        left = self.left
        going = 0.0 if self.current is None else min(self.steps / self.wanted_steps, 1.0)
        ended = left.position - (self.current is not None)
        words = ", ".join(filter(None, (f"run {left.position} of {left.total}", left.words())))
        share = (ended + going) / max(left.total, 1)
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
                counted = self.rehearsal and bool(row.get("peak"))
                shown = cells(row, self.control, counted=counted)
                values = [shown[name] for name in self.measured]
            status = Text(state, style=STATUS_STYLES.get(state, "red"))
            if run is self.current:
                seconds = time.monotonic() - self.started
                status = Text(f"{self.repeat}step {self.steps}, {seconds:.0f} s", style="cyan")
            table.add_row(self.shown_name(run), status, *map(Text, values))
        return table


def _processes(run: Run) -> str:
    return "1 process" if run.num_processes == 1 else f"{run.num_processes} processes"


def _ending(row: Row, control: Control | None) -> str:
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    shown = cells(row, control)
    repeats = row.get("repeats")
    last = repeats[-1]["seconds"] if repeats else row["seconds"]
    seconds = "" if last is None else f" in {last:.0f} s"
    return f"ok{seconds}, final loss {shown['final loss']}, gap {shown['gap']}"
