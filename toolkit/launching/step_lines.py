"""The steps of a run as a person sees them: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from toolkit.environment import GIB

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

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
        self._share, self._words = 0.0, ""

    def line(self, text: str) -> bool:
        """Show a line of a step, and say whether the text is one."""
        match = LINE.fullmatch(text)
        if match is None:
            return False
        step, total = int(match[1]), int(match[2])
        self._share, self._words = step / total, text
        now = time.monotonic()
        due = self._shown_at is None or now - self._shown_at >= self._quiet_seconds
        if not self.has_bar and (due or step == total):
            self._shown_at = now
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        return True

    @contextmanager
    def shown(self) -> Generator[None]:
        """Keep the bar on the terminal while the context lasts; its last state stays there."""
        if not self.has_bar:
            yield
            return
        from rich.live import Live

        with Live(
            console=self.console,
            refresh_per_second=4,
            get_renderable=self._render,
            redirect_stdout=not self.console.stderr,
            redirect_stderr=self.console.stderr,
        ):
            yield

    def _render(self) -> Table | str:
        if not self._words:
            return ""
        return bar(self._words, share=self._share, width=self.console.width)


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
