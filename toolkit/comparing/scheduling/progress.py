"""What the user sees while a comparison works: a live table, or lines where nobody looks."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

from toolkit.comparing.reporting.report import cells
from toolkit.comparing.reporting.terminal import plain, print_line
from toolkit.comparing.scheduling.plan import Run
from toolkit.results import Control, Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STATUS_STYLES: Final = {"ok": "green", "skipped": "yellow", "waiting": "dim"}

ANNOUNCEMENT: Final = re.compile(r"toolkit[.\w]*: ")
"""Lines of a run that are meant for the user, such as a build that takes a minute."""

COLD: Final = "toolkit: started cold: "

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


def build_progress(console: Console, runs: Sequence[Run]) -> Progress:
    return LiveTable(console, runs) if console.is_terminal else Lines(console)


class Lines:
    """One line when a run starts, one when it ends, and a few between."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.label = ""
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
        self.label = f"[{position}/{total}] {run.name}{which}"
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
        self.say(f"{self.label}: {_ending(row, control)}")


class LiveTable:
    """The report's table, filled while the runs go on."""

    def __init__(self, console: Console, runs: Sequence[Run]) -> None:
        from rich.live import Live

        self.console = console
        self.states: dict[str, tuple[Run, str, Row | None]] = {
            run.name: (run, "waiting", None) for run in runs
        }
        self.control: Control | None = None
        self.current: Run | None = None
        self.last_line = ""
        self.heard: set[str] = set()
        self.repeat = ""
        self.started = 0.0
        self.steps = 0
        self.live = Live(
            console=console, refresh_per_second=4, get_renderable=self._table, transient=True
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
        self.repeat = f"repeat {repeat} of {repeats}, " if repeats > 1 else ""
        self.started = time.monotonic()
        # A repeat leaves what is known of the run on the screen.
        known = self.states.get(run.name)
        self.states[run.name] = (run, "running", None if known is None else known[2])

    def line(self, text: str) -> None:
        if text.startswith(COLD) and text not in self.heard:
            self.heard.add(text)
            self.say(text)
        if text.strip():
            self.last_line = plain(text.strip())

    def step(self, step: int) -> None:
        self.steps = step

    def finish(self, run: Run, row: Row, control: Control | None) -> None:
        self.current = None
        self.control = control
        self.states[run.name] = (run, row["status"], row)

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(caption=Text(self.last_line[: self.console.width - 2], style="dim"))
        for column in ("strategy", "engine", "status", "tokens/s", "step", "loss", "gap"):
            table.add_column(column, no_wrap=True)
        for run, state, row in self.states.values():
            values = ["-"] * 4
            if row is not None:
                shown = cells(row, self.control)
                values = [shown[name] for name in ("tokens/s", "step time", "final loss", "gap")]
            status = Text(state, style=STATUS_STYLES.get(state, "red"))
            if run is self.current:
                seconds = time.monotonic() - self.started
                status = Text(f"{self.repeat}step {self.steps}, {seconds:.0f} s", style="cyan")
            strategy = f"{run.strategy.name} x{run.num_processes}" if run.scaled else None
            table.add_row(strategy or run.strategy.name, run.engine, status, *map(Text, values))
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
