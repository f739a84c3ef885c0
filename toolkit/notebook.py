"""Runs, comparisons and reports from Python, above all from the cells of a notebook.

A kernel never initialises CUDA: training runs in processes of its own, with the files that the
command line uses. Their lines are one output of the cell, and the stop button ends them all.

A figure of a report is shown on a card in light colours, so that a dark theme can have it too.
"""

from __future__ import annotations

import contextlib
import io
import math
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal

from toolkit import environment
from toolkit.certifying.certificate import PAGE
from toolkit.certifying.certify import MANY, new_folder
from toolkit.certifying.certify import certify as certify_script
from toolkit.certifying.options import CertifyOptions
from toolkit.comparing.report.figures import draw_all, draw_one
from toolkit.comparing.report.figures.frame import Mark, ReportFigure
from toolkit.comparing.report.names import for_readers, redact_results
from toolkit.comparing.report.picture import page_colours
from toolkit.comparing.report.write import render_markdown
from toolkit.comparing.run import schedule
from toolkit.comparing.run.folders import short_path
from toolkit.comparing.run.options import CompareOptions, flag_values
from toolkit.comparing.run.preparing import run_environment
from toolkit.comparing.run.starting import visible_gpus
from toolkit.configs import ConfigOptions
from toolkit.configs.files import write_configs
from toolkit.errors import UsageError
from toolkit.jobs.options import USUAL_STRATEGIES
from toolkit.launching import forking
from toolkit.launching.launch import launch_command, run
from toolkit.launching.outcome import OutcomeStatus
from toolkit.records.record import Record, read_record
from toolkit.records.results import Results, Row, read_results
from toolkit.records.summary import last_words
from toolkit.strategies import get_strategy

SHOWN_LINES: Final = 30
"""Last lines of a run that a cell shows."""

REDRAW_SECONDS: Final = 0.25

WIDTH: Final = 96
"""Characters of a line in a cell."""

TRAIN: Final = "toolkit.train"


class CellOutput(io.TextIOBase):
    """Takes lines, and shows the last of them as one output; prints them outside of notebooks."""

    def __init__(self) -> None:
        self._lines = deque[str](maxlen=SHOWN_LINES)
        self._rest = ""
        self._shown_at = -math.inf
        self._display = _new_display()

    def write(self, text: str, /) -> int:
        """Take text, of which whole lines are shown."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self.line(line)
        if self._rest:
            self._redraw()
        return len(text)

    def line(self, line: str) -> None:
        """Take one line."""
        self._lines.append(line)
        if self._display is None:
            print(line, flush=True)  # noqa: T201
        else:
            self._redraw()

    def _redraw(self) -> None:
        if time.monotonic() - self._shown_at > REDRAW_SECONDS:
            self.show()

    def show(self, lines: Iterable[str] | None = None) -> None:
        """Show the lines that came after the last redraw, or others in place of all."""
        if self._display is not None:
            begun = [self._rest] if self._rest else []
            shown = [*self._lines, *begun] if lines is None else lines
            self._display.update({"text/plain": "\n".join(shown)}, raw=True)
            self._shown_at = time.monotonic()


def _new_display() -> Any:
    """Return the handle of a new output of the cell, or None outside of a notebook."""
    if "IPython" not in sys.modules:
        return None
    shell = import_module("IPython").get_ipython()
    if not hasattr(shell, "kernel"):  # None, or a shell in a terminal
        return None
    display = import_module("IPython.display").display
    return display({"text/plain": ""}, raw=True, display_id=True)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Launched:
    """A run that has ended, well or not; it shows itself in a notebook."""

    strategy: str
    folder: Path
    """Folder of the run: its output, and what `toolkit.train` writes."""

    status: OutcomeStatus | Literal["skipped"]
    reason: str | None
    """The first failure, with its rank, or what this machine lacks; None if the run ended well."""

    seconds: float
    record: Record | None
    """The record of `toolkit.train`; a script of the user's leaves none."""

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self._rows())

    def _repr_html_(self) -> str:
        lines = (
            f"<tr><th style='text-align:left'>{escape(name)}</th>"
            f"<td style='text-align:left'>{escape(value)}</td></tr>"
            for name, value in self._rows()
        )
        return f"<table><tbody>{''.join(lines)}</tbody></table>"

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("strategy", self.strategy), ("status", self.status)]
        if self.reason is not None:
            rows.append(("reason", self.reason))
        rows += [("folder", short_path(self.folder)), ("seconds", f"{self.seconds:.1f}")]
        if self.record is not None:
            losses = self.record["losses"]
            if losses:
                text = f"{losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps"
                rows.append(("loss", text))
            engaged = (self.record["attestation"] or {}).get("engaged", {})
            rows += [
                (name.replace("_", " "), _in_words(value))
                for name, value in engaged.items()
                if name != "sharded_fraction"  # the older name of `held_fraction`
            ]
        return rows


def _in_words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def launch(
    strategy: str,
    script: str | PathLike[str] = TRAIN,
    args: Sequence[str] = (),
    num_processes: int | None = None,
    *,
    hang_timeout: float | None = None,
) -> Launched:
    """Run a script under a strategy, with the bundled files, and wait for its end.

    Without GPUs it is a rehearsal on the CPU. An interrupt ends all processes of the run first.

    Args:
        strategy: Its name, as `toolkit configs list` has it.
        script: `toolkit.train`, or a Python file of yours, which attestation watches.
        args: Arguments of the script.
        num_processes: Ranks; those of the strategy's own file if left out.
        hang_timeout: Seconds without progress after which a run is ended; 0 for never. Left out,
            it is 600, and a script on GPUs is not watched.

    Raises:
        UsageError: no such strategy or file, or not with so many ranks; nothing was written.
        KeyboardInterrupt: interrupted, after all processes have ended.
    """
    chosen = get_strategy(strategy)
    words = [str(word) for word in args]
    if str(script) != TRAIN and not Path(script).is_file():
        raise UsageError(f"{script} is no file here. Name a Python file, or {TRAIN}.")
    named = flag_values(words).get("output_dir")
    folder = Path(named or f"runs/{chosen.name}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    if (missing := environment.missing_for(chosen)) is not None:
        return Launched(
            strategy=chosen.name,
            folder=folder,
            status="skipped",
            reason=missing,
            seconds=0.0,
            record=None,
        )
    on_nvme = "nvme" in (chosen.offload_optimizer, chosen.offload_parameters)
    options = ConfigOptions(
        num_processes=num_processes, nvme_path=folder / "nvme" if on_nvme else None
    )
    files = write_configs(chosen, folder, options=options, force=True)
    watched = [] if hang_timeout is None else ["--hang_timeout", f"{hang_timeout:g}"]
    if str(script) == TRAIN:
        chosen_by = ("--strategy", chosen.name, "--output_dir", str(folder))
        target = ["-m", TRAIN, *chosen_by, *watched, *words]
    else:
        target = ["-m", "toolkit.rehearse", *watched, str(script), *words]
    single = not chosen.is_distributed
    output = CellOutput()
    try:
        outcome = run(
            launch_command(files.accelerate, target, gpu_ids="all" if single else None),
            folder=folder,
            timeout=math.inf,
            environment=visible_gpus(single=single, rehearsal=not environment.gpus()),
            loopback=True,
            on_line=output.line,
        )
    except KeyboardInterrupt:
        output.line("Interrupted: every process of the run has ended.")
        outcome = None
    finally:
        output.show()
    if outcome is None:
        raise KeyboardInterrupt  # from here: a cell shows no frame of the launch
    try:
        record = read_record(folder)
    except UsageError:
        record = None
    if outcome.status != "ok":
        output.show(outcome.tail)  # without the launcher's own traceback
    elif record is not None and record.get("summary"):
        flags = ["--strategy", chosen.name, *words]
        output.write("\n".join(["", *last_words(record, Path(short_path(folder)), flags), ""]))
        output.show()
    return Launched(
        strategy=chosen.name,
        folder=folder,
        status=outcome.status,
        reason=outcome.reason,
        seconds=outcome.seconds or 0.0,
        record=record,
    )


@contextlib.contextmanager
def warm_launches() -> Generator[None]:
    """Make the imports of a rank once, and fork all runs in this `with` block from there.

    They then start in seconds. The libraries are those of the block's start: what you install or
    edit meanwhile takes part after it. Your scripts are read anew for each run.
    """
    with forking.warm_launches(run_environment(rehearsal=not environment.gpus())):
        yield


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Compared:
    """A comparison, with its report; it shows itself in a notebook."""

    folder: Path
    results: Results
    show_speed: bool = False
    """Whether the report of a rehearsal has its speeds."""

    @property
    def rows(self) -> list[Row]:
        """One row for each run, as in `results.json`."""
        return self.results["runs"]

    @property
    def sound(self) -> bool:
        """Whether each run ended well or was skipped for a true reason, and every gate held."""
        return schedule.exit_code(self.results) == 0

    def figure(self, name: str) -> CellFigure:
        """Return one figure of `report.html`: `memory`, `losses`, `traffic`, `bubble`, ...

        Raises:
            UsageError: the report has no such figure; the message lists those that it has.
        """
        shown = for_readers(redact_results(self.results))
        figure = draw_one(shown, name)
        if figure is None:
            names = ", ".join(each.name for each in draw_all(shown, show_speed=True))
            raise UsageError(f"The report has no figure {name!r}. It has {names}.")
        return CellFigure(figure)

    def __repr__(self) -> str:
        return self._repr_markdown_()

    def _repr_markdown_(self) -> str:
        return render_markdown(redact_results(self.results), show_speed=self.show_speed)


def compare(
    strategies: str | Sequence[str] = USUAL_STRATEGIES,
    train_flags: Sequence[str] = (),
    **options: Any,
) -> Compared:
    """Fine-tune the same model under several strategies, and return the report.

    An interrupt ends the run at work and keeps the finished ones: the same call with `output` goes
    on from there.

    Args:
        strategies: Their names, in a list or with commas between.
        train_flags: Flags of `toolkit.train`, for each run.
        options: Fields of `CompareOptions`.

    Raises:
        UsageError: a mistake in the options; no file has been written.
        KeyboardInterrupt: interrupted, after all processes have ended.
    """
    names = strategies.split(",") if isinstance(strategies, str) else strategies
    folder = Path(options.pop("output", None) or Path("runs") / time.strftime("%Y%m%d-%H%M%S"))
    chosen = CompareOptions(
        strategies=[name.strip() for name in names],
        train_flags=[str(flag) for flag in train_flags],
        output=folder,
        **options,
    )
    output = CellOutput()
    try:
        code = schedule.compare(chosen, console=_console(output))
    finally:
        output.show()
    if code == schedule.INTERRUPTED:
        raise KeyboardInterrupt
    return Compared(folder=folder, results=read_results(folder), show_speed=chosen.show_speed)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Certified:
    """A certificate; it shows itself in a notebook."""

    folder: Path
    sound: bool
    """Whether nothing is broken; false too where the script could not be run to its end."""

    def __repr__(self) -> str:
        return self._repr_markdown_()

    def _repr_markdown_(self) -> str:
        page = self.folder / f"{PAGE}.md"
        if not page.is_file():
            return f"The script could not be judged. Its log: {short_path(self.folder / MANY)}"
        return page.read_text(encoding="utf-8")


def certify(script: str | PathLike[str], args: Sequence[str] = (), **options: Any) -> Certified:
    """Run a script small and short, as ranks and as one process, and return its certificate.

    Args:
        script: A Python file of yours, or `toolkit.train`.
        args: Arguments of the script.
        options: Fields of `CertifyOptions`, `strategy` or `config` among them.

    Raises:
        UsageError: a mistake in the options; nothing was started.
    """
    words = ["-m", TRAIN] if str(script) == TRAIN else [str(script)]
    folder = Path(options.pop("output", None) or new_folder())
    output = CellOutput()
    try:
        code = certify_script(
            [*words, *map(str, args)],
            CertifyOptions(output=folder, **options),
            console=_console(output),
        )
    finally:
        output.show()
    return Certified(folder=folder, sound=code == 0)


def report(folder: str | PathLike[str], *, show_speed: bool = False) -> Compared:
    """Return the comparison in a folder, finished or interrupted.

    With `show_speed` the report of a rehearsal has its speeds.

    Raises:
        UsageError: the folder holds no comparison.
    """
    results = read_results(Path(folder))
    return Compared(folder=Path(folder), results=results, show_speed=show_speed)


def _console(output: Any) -> Any:
    from rich.console import Console

    return Console(file=output, width=WIDTH, force_terminal=False, force_jupyter=False)


MARKS: Final[dict[Mark, str]] = {
    "area": "■",
    "line": "━",
    "dashed": "╍",
    "tick": "|",
    "dot": "●",
    "square": "■",
    "diamond": "◆",
}


class CellFigure:
    """A figure of a comparison; it shows itself in a notebook."""

    def __init__(self, figure: ReportFigure) -> None:
        self.figure = figure

    def __repr__(self) -> str:
        return "\n".join([self.figure.title, self.figure.caption, *self.figure.notes])

    def _repr_html_(self) -> str:
        return _html(self.figure, page_colours())


def _html(figure: ReportFigure, colours: dict[str, str]) -> str:
    from markupsafe import Markup, escape

    keys = Markup(" &ensp; ").join(
        Markup('<span style="color: {}">{}</span> {}').format(key.colour, MARKS[key.kind], key.text)
        for key in figure.keys
    )
    drawing = escape(figure.instead)
    if figure.svg is not None:
        drawing = Markup(figure.svg.replace("<svg ", '<svg style="width: 100%; height: auto" ', 1))
    small = Markup('<div style="font-size: 0.85em; color: var(--muted)">{}</div>')
    lines = [
        small.format(line) for line in (keys, figure.shows, figure.caption, *figure.notes) if line
    ]
    text = Markup(
        '<div style="background: var(--paper); color: var(--ink); padding: 0.8em; '
        'max-width: 46em; font-family: sans-serif">'
        "<div><b>{}</b></div>{}{}</div>"
    ).format(figure.title, drawing, Markup("").join(lines))
    for variable, colour in colours.items():
        text = text.replace(f"var(--{variable})", colour)
    return str(text)
