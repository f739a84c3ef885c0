"""How long a comparison takes: before its first run by a table, then by its own runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from toolkit.comparing.run.options import CompareOptions, flag_names
from toolkit.environment import cache_root

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

IMPORT_SECONDS: Final = 6.0
"""Time to import the ranks' modules once; measured on 2 CPU cores, like all of these."""

MAKE_SECONDS: Final = 4.0
"""Time to make the built-in model and its data, on a machine that has not done so before."""

START_SECONDS: Final = 2.0
"""Time of a run outside its steps: its ranks begin, and its model is saved."""

STEP_SECONDS: Final = 0.3
"""Mean time of an optimizer step of the built-in model in a rehearsal, over all strategies."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Expected times of the parts of a comparison, as far as they are known."""

    runs: str
    """The outstanding runs in words."""

    cold: bool
    """Whether the built-in model and data have to be made first."""

    preparing_seconds: float | None
    """Seconds until the first run; None where they are not known."""

    total_seconds: float | None
    """Seconds until the last run has ended; None where they are not known."""

    def sentence(self) -> str:
        """Describe the steps of the comparison in order, and about how long they take."""
        first = "Importing libraries, preparing model and data"
        if self.cold:
            first = (
                "The first time here: importing libraries, making the built-in model and data "
                f"once, in {cache_root()}"
            )
        if self.preparing_seconds is not None:
            first += f" ({about(self.preparing_seconds)})"
        if self.total_seconds is None:
            return f"{first}. Then {self.runs}; the first one will tell how long they take."
        return f"{first}. Then {self.runs}: {about(self.total_seconds)} in all."


def expected(options: CompareOptions, *, starts: int, rehearsal: bool) -> Expected:
    """Return the expected time of a comparison with `starts` runs to start, repeats counted."""
    usual = CompareOptions()
    built_in = OTHER_INPUTS.isdisjoint(flag_names(options.train_flags))
    cached = all(any(cache_root().glob(f"{name}-*/")) for name in BUILT_IN)
    cold = built_in and not cached
    preparing = IMPORT_SECONDS + (MAKE_SECONDS if cold else 0.0)
    steps = options.max_steps + options.throughput_steps
    # The table is valid only for steps of the usual size.
    timed = (
        rehearsal
        and not options.train_flags
        and options.warm
        and options.num_processes in (None, usual.processes)
        and not options.scale
        and options.global_batch_size == usual.global_batch_size
    )
    running = starts * (START_SECONDS + steps * STEP_SECONDS)
    return Expected(
        runs=f"{starts} {'run' if starts == 1 else 'runs'} of {steps} steps",
        cold=cold,
        preparing_seconds=preparing if built_in else None,
        total_seconds=preparing + running if timed else None,
    )


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
def waiting(text: str, *, seconds: float | None, console: Console) -> Generator[None]:
    """Show a progress bar on a terminal while the context lasts; it is full after `seconds`."""
    if not console.is_terminal:
        yield
        return
    from rich.live import Live

    started = time.monotonic()

    def render() -> Table:
        passed = time.monotonic() - started
        of = "" if seconds is None else f" of {about(seconds)}"
        share = None if seconds is None else passed / seconds
        return bar(f"{text}: {passed:.0f} s{of}", share=share, width=console.width)

    with Live(console=console, refresh_per_second=4, get_renderable=render, transient=True):
        yield


def bar(text: str, *, share: float | None, width: int) -> Table:
    """Return a line of `width` characters for a live display: a bar, and words beside it.

    `share` is the part of the bar that is full, 0 to 1; None where that is not known.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    length = max(10, min(40, width - len(text) - 2))
    progress = ProgressBar(
        total=1.0, completed=min(share or 0.0, 1.0), pulse=share is None, width=length
    )
    line = Table.grid(padding=(0, 1))
    line.add_row(progress, Text(text, no_wrap=True, overflow="ellipsis"))
    return line
