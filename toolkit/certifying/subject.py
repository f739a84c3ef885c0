"""What a certificate judges: the runs of one script, and what a check finds in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

from toolkit.comparing.bisect.finding import Bisection
from toolkit.comparing.parity.checks import Check as ParityCheck
from toolkit.configs.check.finding import Finding as RuleFinding
from toolkit.records.evidence import IGNORED, Evidence
from toolkit.records.observation import Batch, Observation, Tokens
from toolkit.records.saves import ReadBack, Saves

Answer = Literal["holds", "broken", "note", "not judged"]

ANSWERS: Final[tuple[Answer, ...]] = ("broken", "note", "not judged", "holds")
"""In the order in which a page shows them."""


def worst_first(answer: Answer) -> int:
    """Return the place of an answer in that order."""
    return ANSWERS.index(answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row that the model was given in training, without its padding."""

    rank: int
    step: int
    number: int
    """Of the row in its micro-batch, from 0."""

    tokens: list[int]
    labels: list[int]
    attended: list[int]
    """1 for each token that is attended to; padding at the two ends is left out."""

    has_labels: bool
    """Whether the script passed labels of the tokens' shape; else none is trained."""

    padding_before: int
    """Tokens of the padding in front of the row."""

    padding_trained: int
    """Tokens of the padding that have a label."""

    @property
    def place(self) -> str:
        return f"row {self.number} of rank {self.rank} in step {self.step}"

    @property
    def trained(self) -> list[bool]:
        """Whether each token is predicted with a loss; the first one never is."""
        return [at > 0 and label != IGNORED for at, label in enumerate(self.labels)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A run from a checkpoint that was cut off."""

    words: str
    """What is missing of it."""

    reason: str
    """Why the run did not end; empty where it did."""

    saves: Sequence[Saves]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The runs of one script."""

    many: list[Observation]
    """Of all ranks of the run under the config."""

    evidence: Evidence | None = None
    """Of its first step."""

    folder: Path
    """Of that run."""

    one: Sequence[Observation] = ()
    """Of one process that does the work of all ranks; empty where there is no such run."""

    bisection: Bisection | None = None
    no_bisection: str = ""
    """Why the two were not compared."""

    read: Sequence[RuleFinding] | None = None
    """What the rules of `toolkit check` find; None where no file was named."""

    refused: str = ""
    """Why the ranks have not trained one model together; empty where they have."""

    is_rehearsal: bool = False
    """Whether the ranks had fewer GPUs than there are of them."""

    notes: list[str]
    """What the run itself said."""

    saves: Sequence[Saves] = ()
    """What the ranks saved, and their states; of rank 0 first."""

    read_back: Sequence[ReadBack] | None = ()
    """What a process of its own found in what was saved; None where that process failed."""

    resumed: Sequence[Saves] = ()
    """The same of a run from a checkpoint; empty where there is none."""

    cuts: Sequence[Cut] = ()
    """Runs from copies of that checkpoint that lack a part."""

    twice: Sequence[Saves] = ()
    """Of a second run, without what a Trainer evaluates; empty where there is none."""

    no_twice: str = "there is no second run"
    no_resume: str = "nothing was resumed"
    resume_failed: str = ""
    """Why that run did not end."""

    @property
    def tokens(self) -> Tokens:
        return self.many[0]["tokens"]

    @property
    def stops(self) -> set[int]:
        return {*self.tokens["stops"]}

    @property
    def batches(self) -> Iterator[tuple[int, Batch]]:
        """The first micro-batches, each with its rank."""
        for seen in self.many:
            for batch in seen["batches"]:
                yield seen["rank"], batch

    @property
    def rows(self) -> list[Row]:
        """The rows of those micro-batches that came with labels."""
        return [row for row in self.all_rows if row.has_labels]

    @property
    def all_rows(self) -> list[Row]:
        """The rows of those micro-batches."""
        return [row for rank, batch in self.batches for row in _rows(rank, batch)]


def _rows(rank: int, batch: Batch) -> Iterator[Row]:
    labels = batch["labels"]
    has_labels = labels is not None and [*map(len, labels)] == [*map(len, batch["tokens"])]
    if labels is None or not has_labels:
        labels = [[IGNORED] * len(row) for row in batch["tokens"]]
    masks = batch["mask"] or [[1] * len(row) for row in batch["tokens"]]
    for number, (tokens, of_row, mask) in enumerate(
        zip(batch["tokens"], labels, masks, strict=True)
    ):
        held = [at for at, attended in enumerate(mask) if attended]
        begin, end = (held[0], held[-1] + 1) if held else (0, 0)
        outside = [*of_row[:begin], *of_row[end:]]
        yield Row(
            rank=rank,
            step=batch["step"],
            number=number,
            tokens=tokens[begin:end],
            labels=of_row[begin:end],
            attended=mask[begin:end],
            has_labels=has_labels,
            padding_before=begin,
            padding_trained=sum(label != IGNORED for label in outside),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check has found."""

    answer: Answer
    words: str
    """The evidence, or why there is none."""

    advice: str = ""
    """What to do about it."""

    where: str = ""
    """File and line of the script, where the finding itself knows it."""


def holds(words: str) -> Finding:
    return Finding(answer="holds", words=words)


def broken(words: str, advice: str, where: str = "") -> Finding:
    return Finding(answer="broken", words=words, advice=advice, where=where)


def note(words: str, advice: str = "") -> Finding:
    return Finding(answer="note", words=words, advice=advice)


def not_judged(words: str) -> Finding:
    return Finding(answer="not judged", words=words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(ParityCheck[Callable[[Subject], Finding]]):
    """One check of a certificate."""

    group: str
    place: str = ""
    """What in the script is looked at first, a name in `Observation.places`; else as its group."""


def of_rows(
    judge: Callable[[Subject, list[Row]], Finding], *, labelled: bool = True
) -> Callable[[Subject], Finding]:
    """Let a judge of rows, or of `labelled` ones, say by itself where there are none."""

    def judged(subject: Subject) -> Finding:
        rows = subject.rows if labelled else subject.all_rows
        if not rows:
            read = "labels" if labelled else "tokens"
            return not_judged(f"the model's forward was given no {read} (B, T) in training")
        return judge(subject, rows)

    return judged


of_any_rows = partial(of_rows, labelled=False)


def of_step(judge: Callable[[Subject, Evidence], Finding]) -> Callable[[Subject], Finding]:
    """Let a judge of the first step say by itself where none was seen."""

    def judged(subject: Subject) -> Finding:
        if subject.evidence is None:
            return not_judged("no micro-batch of an optimizer step was seen")
        return judge(subject, subject.evidence)

    return judged


def counted(places: Iterable[str], of: int) -> str:
    """Say how many there are, and name the first."""
    found = list(places)
    return f"{len(found)} of {of:,}, the first is {found[0]}"
