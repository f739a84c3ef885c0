"""The steps of a run as a person sees them: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from toolkit.environment import GIB

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

QUIET_SECONDS: Final = 10.0
"""Time between two printed lines."""

LATEST: Final = 20
"""Logs that the speed and the time left are taken from."""

LINE: Final = re.compile(r"step (\d+)/(\d+): (.+)")


class StepLines:
    """Makes the line of a logged step on rank 0.

    Args:
        total: The last step.
        tokens_per_step: Tokens of all ranks, padding excluded, in the mean.
        peak: Returns the most bytes held so far, None where that is not known.
    """

    def __init__(
        self, total: int, *, tokens_per_step: float | None, peak: Callable[[], int | None]
    ) -> None:
        self._total = total
        self._tokens_per_step = tokens_per_step
        self._peak = peak
        self._most = 0
        self._latest: deque[tuple[int, float]] = deque(maxlen=LATEST)

    def of(self, step: int, logged: Mapping[str, Any]) -> str:
        """Return the line of a step, from the values that are logged of it."""
        self._most = max(self._most, self._peak() or 0)
        self._latest.append((step, time.monotonic()))
        words = [f"loss {float(logged['loss']):.4f}"]
        if "learning_rate" in logged:
            words.append(f"learning rate {float(logged['learning_rate']):.3g}")
        (first, began), (_, now) = self._latest[0], self._latest[-1]
        rate = (step - first) / (now - began) if step > first and now > began else None
        if rate is not None and self._tokens_per_step is not None:
            words.append(f"{rate * self._tokens_per_step:,.0f} tokens/s")
        if self._most:
            words.append(f"peak {self._most / GIB:.2f} GiB")
        if rate is not None and step < self._total:
            words.append(f"{timedelta(seconds=round((self._total - step) / rate))} left")
        return f"step {step}/{self._total}: {', '.join(words)}"


class Display:
    """Shows the lines of steps: as a bar on a terminal, elsewhere at most one each few seconds."""

    def __init__(
        self, console: Console, *, bar: bool | None = None, every_line: bool = False
    ) -> None:
        self.console = console
        self.has_bar = console.is_terminal if bar is None else bar
        self._quiet_seconds = 0.0 if every_line else QUIET_SECONDS
        self._shown_at: float | None = None
        on_stderr = self.console.stderr
        self._bar = progress_bar(
            self.console, redirect_stdout=not on_stderr, redirect_stderr=on_stderr
        )

    def line(self, text: str) -> bool:
        """Show a line of a step, and say whether the text is one."""
        match = LINE.fullmatch(text)
        if match is None:
            return False
        step, total = int(match[1]), int(match[2])
        if self.has_bar:
            show_progress(self._bar, text, step=step, of=total)
        now = time.monotonic()
        due = self._shown_at is None or now - self._shown_at >= self._quiet_seconds
        if not self.has_bar and (due or step == total):
            self._shown_at = now
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        return True

    def shown(self) -> AbstractContextManager[object]:
        """Return the context in which the bar is on the terminal; its last state stays there."""
        return self._bar if self.has_bar else nullcontext()


def progress_bar(console: Console, *times: ProgressColumn, **options: Any) -> Progress:
    """Return a bar for a terminal with words beside it, and `times`, all on one line."""
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    on_one_line = Column(no_wrap=True, overflow="ellipsis")
    words = TextColumn("{task.description}", markup=False, table_column=on_one_line)
    return Progress(BarColumn(), words, *times, console=console, **options)


def show_progress(bar: Progress, words: str, *, step: int = 0, of: int | None = None) -> None:
    """Show words and a step of how many; None: the bar moves, since that is not known."""
    if not bar.tasks:
        bar.add_task(words)
    bar.update(bar.task_ids[0], description=words, completed=step, total=of)
