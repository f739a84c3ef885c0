"""Failures in a log: exceptions, fatal lines and the launcher's report, rank by rank.

The log is read once, line by line, and only the lines of failures are kept: it may have any size.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal

from toolkit.causes.lines import BAR, TRACEBACK, Line
from toolkit.causes.table import line_counts
from toolkit.launching.outcome import ELASTIC_FIRST, ELASTIC_LINE, SIMPLE_EXIT

MOST_FAILURES: Final = 200
MOST_LINES: Final = 200
"""Most lines of one exception's message that are kept: a compiler may print thousands."""

STEPS_OF_A_RUN_THAT_GOES_ON: Final = 3

EXCEPTION: Final = re.compile(r" {0,2}((?:\w+\.)*[A-Z]\w*)(?:\(\w+\))?(?::(?: |$)|$)")
NAMED: Final = re.compile(
    r" {0,2}(?:(?:\w+\.)+[A-Z]\w*: |(?:\w+\.)*\w*(?:Error|Exception)(?::|\(|$))"
)
ERRORS: Final = (
    "rror",
    "ERROR",
    "Exception",
    "[E",
    "[F",
    "FATAL",
    "CRITICAL",
    "NCCL WARN",
    "ssert",
)
BARE: Final = re.compile(
    r"\w(?:Error|Exception)(?:\(\w+\))?(?:: |assert |\s*$)"
    r"|\b(?:ERROR|FATAL|CRITICAL|NCCL WARN|[Ee]rror|Assertion)\b"
    r"|\[[EF](?:\d{3,4} | \w+\.cpp)"
)
QUIET: Final = re.compile(
    r"warning\b|\b(?:INFO|DEBUG|skip|ignor|retr[iy]|fall\w* ?back|disable|without error)", re.I
)
"""A line that tells of an error which did not count."""

CHAINED: Final = re.compile(r"\s*(During handling of the above exception|The above exception was)")
LAUNCHERS_OWN: Final = re.compile(r"(?:torch\.distributed\.elastic\S*)?ChildFailedError\b")
FRAME: Final = re.compile(r'[ >]*File ".*", line \d+|\s*assert ')
FRAME_ELSEWHERE: Final = re.compile(r"[│ ]*(?:File )?(\S+\.py):(\d+),? in (?:\w+\.)*([\w<>]+)")
FRAME_WITHOUT_HEAD: Final = re.compile(r'(.*?) {0,2}(File "[^"]+", line \d+, in .*)')
MOST_BETWEEN_FRAMES: Final = 4

NATIVE: Final = re.compile(r"\s*what\(\):\s+(.*)")
"""The message of an exception that ends a process in C++, as the standard library prints it."""

TORCH_LOG: Final = re.compile(r"\[[EFIW](?:\d{3,4}| \w+\.cpp)")
"""Begin of a line in the log of torch's C++ code."""

RANK_IN_TEXT: Final = re.compile(r"\[Rank (\d+)\]")
"""The rank in messages of torch's process groups."""

STEP: Final = re.compile(
    r"\b[1-9]\d*/\d+ \[\d+:\d+|['\"](?:train_)?loss['\"]: |\b(?:step|iteration|iter)\b\W{1,3}\d+",
    re.IGNORECASE,
)
TRAINED: Final = re.compile(r"['\"]train_runtime['\"]: ")
METRIC: Final = re.compile(
    r"\b((?:train_|eval_)?loss|grad[_ ]norm)['\"]?"
    # The second form is that of toolkit.train.
    r"(?:\s*[:=]\s*['\"]?(?:tensor\()?|\s(?=\S+, learning rate ))"
    r"(nan|[+-]?inf|[-+.\d]+(?:e[-+]?\d+)?)",
    re.IGNORECASE,
)
BORDER: Final = re.compile(r"\s*[|│┃\t]\s*|\s{2,}")
COLUMNS: Final = {"training loss": "loss", "loss": "loss", "validation loss": "eval_loss"}
"""Columns with losses in the table of a notebook."""

LONG_LINE: Final = 2**14
"""Characters of a line from which an error counts without a traceback around it."""

ERROR_INSIDE: Final = re.compile(r"(?:Error|Exception): [^\r\n]{1,300}")
BEFORE_ERROR: Final = re.compile(r"[\w.]{0,80}$")

BREAKDOWN: Final = "time (ms) |"
"""Begin of DeepSpeed's times of a step (deepspeed/utils/timer.py)."""

# The end of torchelastic's and DeepSpeed's launchers.
RANK_IN_REPORT: Final = re.compile(r"\s*rank\s+: (\d+) \(local_rank: \d+\)")
CODE_IN_REPORT: Final = re.compile(r"\s*exitcode\s+: (-?\d+) \(pid: (\d+)\)")
ROOT_IN_REPORT: Final = "Root Cause (first observed failure):"
REPORT_LINE: Final = re.compile(
    r"[=-]{20}|Failures:$|\[\d+\]:|\s*(?:<|\w+ +: )|.* FAILED$|.*ChildFailedError"
)
REPORT_WORDS: Final = ("local_rank", "exit", "Root Cause")
DEEPSPEED_EXIT: Final = re.compile(r"exits with return code = (-?\d+)")


@dataclass(slots=True, kw_only=True)
class Failure:
    """One exception with those it came from, or one fatal line."""

    rank: int | None
    lines: list[Line] = field(default_factory=list[Line])
    """The messages of the exceptions, or the one line."""

    head: Line | None = None
    frames: list[str] = field(default_factory=list[str])
    is_exception: bool = True
    later_steps: int = 0
    """Number of training steps that the log shows after it."""

    @property
    def text(self) -> str:
        """The lines without their ranks and numbers."""
        return "\n".join(line.text for line in self.lines)

    @property
    def is_bare(self) -> bool:
        """Whether nothing but its words shows that it ended a rank."""
        return not self.is_exception and not line_counts(self.lines[0].text)

    @property
    def was_survived(self) -> bool:
        """Whether the run went on after it."""
        return self.later_steps >= STEPS_OF_A_RUN_THAT_GOES_ON


@dataclass(slots=True, kw_only=True)
class Exit:
    """The process that ended first, as the launcher reports it."""

    code: int
    line: Line
    rank: int | None = None


@dataclass(slots=True, kw_only=True)
class Metric:
    """The values of a loss or a norm that a log shows, in their order."""

    first: str
    last: Line
    """The line of the last value."""

    last_value: str
    count: int = 1
    same: int = 1  # values at the end that are the same
    numbers: int = 0
    lost: int = 0  # values behind a number that are none

    def add(self, value: str, line: Line) -> None:
        self.numbers += self.is_finite
        self.lost += self.numbers > 0 and not self.is_finite
        self.count += 1
        self.same = self.same + 1 if value == self.last_value else 1
        self.last, self.last_value = line, value

    @property
    def is_constant(self) -> bool:
        """Whether all values are the same."""
        return self.same == self.count

    @property
    def is_finite(self) -> bool:
        """Whether the last value is a number."""
        return math.isfinite(float(self.last_value))

    @property
    def is_zero(self) -> bool:
        """Whether the last value is 0."""
        return float(self.last_value) == 0


@dataclass(slots=True, kw_only=True)
class Log:
    """A log, as far as it tells how a run ended."""

    failures: list[Failure] = field(default_factory=list[Failure])
    exit: Exit | None = None
    signalled: Exit | None = None
    """The first rank in the launcher's report that a signal ended, but for the one it sends itself;
    another rank may be the report's root."""

    ranks: set[int] = field(default_factory=set[int])
    lines: int = 0
    metrics: dict[str, Metric] = field(default_factory=dict[str, Metric])
    """By name: loss, grad_norm, eval_loss, train_loss."""

    milliseconds: dict[str, float] = field(default_factory=dict[str, float])
    """Sums over the steps for which DeepSpeed's wall_clock_breakdown was on."""

    last: Line | None = None
    """The last line of the ranks that belongs to no exception."""


@dataclass(slots=True)
class _Stream:
    """The output of one rank, or of all that don't name themselves."""

    open: Failure | None = None
    state: Literal["frames", "message", "ended", "chained"] = "ended"
    """Part of an exception that the next line may belong to."""

    between: int | None = None
    """Lines since the last frame of a traceback whose head is missing."""

    indent: str = ""
    """Text before each line of the traceback, such as a time; digits may change."""


@dataclass(slots=True)
class Reader:
    """Reads a log line by line."""

    log: Log = field(default_factory=Log)
    _streams: dict[int | None, _Stream] = field(default_factory=dict[int | None, _Stream])
    _report_rank: int | None = None
    _in_root: bool = False
    _seen: set[str] = field(default_factory=set[str])
    _columns: list[str] = field(default_factory=list[str])

    def take(self, line: Line) -> None:
        """Take the next line."""
        self.log.lines += 1
        if line.rank is not None:
            self.log.ranks.add(line.rank)
        if self._takes_report(line):
            return
        stream = self._streams.setdefault(line.rank, _Stream())
        text = line.text
        if TRACEBACK in text:
            self._begin(stream, line)
        elif stream.open is not None and self._continue(stream, stream.open, line):
            pass
        elif 'File "' in text and (frame := FRAME_WITHOUT_HEAD.match(text)):
            self._open(stream, Failure(rank=line.rank, frames=[frame[2]]))
            stream.between, stream.indent = 0, frame[1]
        else:
            self._take_other(stream, line)
        self._note_progress(line)

    def _begin(self, stream: _Stream, line: Line) -> None:
        before = line.text[: line.text.index(TRACEBACK)]
        # A progress bar without an end, and a notebook's name of the error, stand only here.
        is_alone = BAR.search(before) or NAMED.match(before.rstrip())
        stream.indent = "" if is_alone else before.rstrip("─╭ ") if "╭" in before else before
        # A traceback inside another's frames is that of a rank that wrote at the same time.
        if stream.open is None or stream.state != "chained":
            self._open(stream, Failure(rank=line.rank, head=line))
        stream.state, stream.between = "frames", None

    def _open(self, stream: _Stream, failure: Failure) -> None:
        stream.open, stream.state = failure, "frames"
        if len(self.log.failures) < MOST_FAILURES:
            self.log.failures.append(failure)

    def _continue(self, stream: _Stream, failure: Failure, line: Line) -> bool:
        """Take a line of an exception; False where it is not one."""
        text = _without(stream.indent, line.text)
        if stream.state == "frames":
            if FRAME.match(text):
                failure.frames.append(text.strip())
                stream.between = stream.between and 0
            elif 'File "' in text and (frame := FRAME_WITHOUT_HEAD.match(text)):
                stream.indent, stream.between = frame[1], stream.between and 0
                failure.frames.append(frame[2])
            elif frame := FRAME_ELSEWHERE.match(text):
                failure.frames.append('File "{}", line {}, in {}'.format(*frame.groups()))
            elif (EXCEPTION if stream.between is None else NAMED).match(text):
                self._take_exception(stream, failure, line, text)
            elif stream.between is not None:
                stream.between += 1
                if stream.between > MOST_BETWEEN_FRAMES:
                    stream.open = None
                    return False
            return True
        if CHAINED.match(text):
            stream.state = "chained"
            return True
        if not text.strip():
            # The message of safetensors begins with an empty line.
            if stream.state == "message" and failure.lines[-1].text.rstrip()[-1:] != ":":
                stream.state = "ended"
            return True
        if stream.state != "message" or _is_other(text) or len(failure.lines) > MOST_LINES:
            stream.open = None
            return False
        failure.lines.append(Line(line.number, line.rank, text))
        self.log.last = self.log.last if failure.is_exception else line
        return True

    def _take_exception(self, stream: _Stream, failure: Failure, line: Line, text: str) -> None:
        stream.state = "message"
        if LAUNCHERS_OWN.match(text) or SIMPLE_EXIT.search(text):
            self._take_launcher(failure, line)
            stream.open = None
            return
        failure.lines.append(Line(line.number, line.rank, text.strip()))

    def _take_launcher(self, failure: Failure, line: Line) -> None:
        """Drop the launcher's own exception, after what it says."""
        if failure in self.log.failures and not failure.lines:
            self.log.failures.remove(failure)
        if match := SIMPLE_EXIT.search(line.text):
            code = int(match[1]) if match[1] else -int(match[2])
            self.log.exit = self.log.exit or Exit(code=code, line=line)

    def _take_other(self, stream: _Stream, line: Line) -> None:
        is_report = REPORT_LINE.match(line.text) or ELASTIC_LINE.match(line.text)
        if line.text.strip() and self.log.exit is None and not is_report:
            self.log.last = line
        if native := NATIVE.match(line.text):
            self._take_native(Line(line.number, line.rank, native[1]))
        elif len(line.text) > LONG_LINE:
            self._take_inside(line)
        elif line_counts(line.text):
            self._take_fatal(line)
        elif NAMED.match(line.text):
            if not LAUNCHERS_OWN.match(line.text) and (failure := self._take_fatal(line)):
                stream.open, stream.state, stream.indent = failure, "message", ""
        elif (
            any(word in line.text for word in ERRORS)
            and (found := BARE.search(line.text))
            and not QUIET.search(line.text[: found.start()])
        ):
            self._take_fatal(line)

    def _take_inside(self, line: Line) -> None:
        """Take the errors in the middle of a line that is too long to be read by a person."""
        if line_counts(line.text):
            self._take_fatal(line)
        for match in ERROR_INSIDE.finditer(line.text):
            before = BEFORE_ERROR.search(line.text[max(0, match.start() - 80) : match.start()])
            self._take_fatal(
                Line(line.number, line.rank, f"{before[0] if before else ''}{match[0]}")
            )

    def _take_native(self, line: Line) -> None:
        if len(self.log.failures) < MOST_FAILURES:
            self.log.failures.append(Failure(rank=line.rank, lines=[line]))

    def _take_fatal(self, line: Line) -> Failure | None:
        named = RANK_IN_TEXT.search(line.text)
        if named is not None:
            line = Line(line.number, int(named[1]), line.text)
        key = f"{line.rank} {re.sub(r'[0-9]+', '0', line.text)}"
        if key in self._seen:
            return None
        self._seen.add(key)
        failure = Failure(rank=line.rank, lines=[line], is_exception=False)
        if len(self.log.failures) < MOST_FAILURES:
            self.log.failures.append(failure)
        return failure

    def _takes_report(self, line: Line) -> bool:
        """Take a line of the launcher's report on the exit codes."""
        text = line.text
        if not any(word in text for word in REPORT_WORDS):
            return False
        if match := RANK_IN_REPORT.match(text):
            self._report_rank = int(match[1])
            self.log.ranks.add(int(match[1]))
        elif match := CODE_IN_REPORT.match(text):
            ended = Exit(code=int(match[1]), rank=self._report_rank, line=line)
            if self._in_root or self.log.exit is None:
                self.log.exit = ended
                self._in_root = False
            if ended.code < 0 and ended.code != -signal.SIGTERM:
                self.log.signalled = self.log.signalled or ended
        elif text.startswith(ROOT_IN_REPORT):
            self._in_root = True
        elif ELASTIC_FIRST.search(text) and (ELASTIC_LINE.match(text) or ".elastic." in text):
            code = re.search(r"exitcode: (-?\d+)\) local_rank: (\d+)", text)
            if code is not None and self.log.exit is None:
                self.log.exit = Exit(code=int(code[1]), rank=int(code[2]), line=line)
        elif match := DEEPSPEED_EXIT.search(text):
            self.log.exit = self.log.exit or Exit(code=int(match[1]), line=line)
        else:
            return False
        return True

    def _note_progress(self, line: Line) -> None:
        text = line.text
        if "oss" in text or "grad" in text:
            for name, value in METRIC.findall(text):
                self._take_metric(name.lower().replace(" ", "_"), value.rstrip("."), line)
        if self._columns or "Loss" in text:
            self._take_row([cell.strip() for cell in BORDER.split(text.strip(" |│┃\t"))], line)
        if BREAKDOWN in text:
            for name, value in re.findall(r"\| (\w+): ([\d.]+)", text):
                self.log.milliseconds[name] = self.log.milliseconds.get(name, 0) + float(value)
        if not self.log.failures or not STEP.search(text):
            return
        steps = STEPS_OF_A_RUN_THAT_GOES_ON if TRAINED.search(text) else 1
        for failure in self.log.failures:
            failure.later_steps += steps

    def _take_row(self, cells: list[str], line: Line) -> None:
        """Take a row of a table with losses, or its head."""
        if cells[0] in ("Step", "Epoch"):
            self._columns = [COLUMNS.get(cell.lower(), "") for cell in cells]
        elif len(cells) == len(self._columns):
            for name, value in zip(self._columns, cells, strict=True):
                if name:
                    self._take_metric(name, value, line)

    def _take_metric(self, name: str, value: str, line: Line) -> None:
        with suppress(ValueError):  # such as a dash
            float(value)
            if name in self.log.metrics:
                self.log.metrics[name].add(value, line)
            else:
                self.log.metrics[name] = Metric(first=value, last=line, last_value=value)


def read_failures(lines: Iterable[Line]) -> Log:
    """Read the failures of a log."""
    reader = Reader()
    for line in lines:
        reader.take(line)
    log = reader.log
    for failure in log.failures:
        if not failure.lines and failure.head is not None:  # the log was cut off there
            failure.lines, failure.is_exception = [failure.head], False
    log.failures = [failure for failure in log.failures if failure.lines]
    return log


def _is_other(text: str) -> bool:
    """Whether a line is not part of an exception's message."""
    return bool(
        ELASTIC_LINE.match(text)
        or TORCH_LOG.match(text)
        or STEP.search(text)
        or text.startswith(("====", "toolkit: "))
    )


def _without(prefix: str, text: str) -> str:
    """Return a line without the prefix of its traceback, whose digits may have changed."""
    head = text[: len(prefix)]
    same = prefix and re.sub(r"\d", "0", head) == re.sub(r"\d", "0", prefix)
    return text[len(prefix) :] if same else text
