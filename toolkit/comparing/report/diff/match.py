"""Two comparisons, run by run: the values that can be compared, and their differences.

Runs are matched by strategy, engine and number of processes. Losses are compared only for the same
training on the same data, speeds only for the same kind of device. Otherwise the report gives the
reason.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

from toolkit.comparing.report.names import both_engines, clean, redact_results, renamed
from toolkit.comparing.report.row_facts import (
    counted_peak,
    counts_peaks,
    peak_field,
    peak_of,
    reason_for,
    states_of,
)
from toolkit.comparing.report.words import flat, size
from toolkit.comparing.report.write import comparison_in
from toolkit.errors import UsageError
from toolkit.records.fields import Unit, fields_of, value_at
from toolkit.records.results import Results, Row

SIDES: Final = ("A", "B")

SAME_TRAINING: Final = (
    "data hash",
    "model",
    "parameters",
    "method",
    "seed",
    "rows per optimizer step",
    "precision",
    "optimizer steps",
)
"""Fixed settings that define the training: if one differs, losses are not compared."""

NOT_RECORDED: Final = "not recorded"

Verdict = Literal["faster", "slower", "near", "unknown"]

Table = Literal["speed", "memory", "losses"]
"""Tables that show each value once for each side."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two comparisons."""

    letter: str
    folder: str
    results: Results

    @property
    def rehearsal(self) -> bool:
        return self.results["rehearsal"]


class Pair(NamedTuple):
    """The same run on both sides."""

    a: Row
    b: Row

    @property
    def name(self) -> str:
        return self.a["name"]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value of a row that is shown for both sides."""

    name: str
    unit: Unit
    read: Callable[[Row], Any]
    field: Callable[[Row], str]
    """Returns the key under which a row's `not_measured` has the reason."""


class LossDifference(NamedTuple):
    """The largest difference between two runs' losses in one step."""

    value: float
    step: int
    """Number of the step, from 1."""


class Refusal(NamedTuple):
    """Reason why values are not compared."""

    short: str
    """Short text for a table cell."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Diff:
    """Two comparisons, matched."""

    a: Side
    b: Side
    pairs: tuple[Pair, ...]
    only: tuple[tuple[Row, ...], tuple[Row, ...]]
    """Runs that only A has, and runs that only B has."""

    noise: float | None
    """Share of the slower run's tokens/s below which a difference may be chance."""

    noise_reason: str | None
    """Reason why `noise` is not known."""

    other_training: Refusal | None
    """Reason why losses are not compared in any run."""

    show_speed: bool = False
    """Whether speeds are shown even where both are rehearsals."""

    @property
    def speed(self) -> bool:
        """Whether speeds are shown."""
        return self.show_speed or not (self.a.rehearsal and self.b.rehearsal)

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.a, self.b

    @property
    def speeds_reason(self) -> str | None:
        """Reason why speeds and peaks are not compared in any run."""
        if self.a.rehearsal == self.b.rehearsal:
            return None
        return "one side is a rehearsal on the CPU, the other ran on GPUs"

    @property
    def counted(self) -> bool:
        """Whether the peaks are those of counted tensors."""
        return counts_peaks(self.a.results) and counts_peaks(self.b.results)

    @property
    def peak(self) -> Quantity:
        if self.counted:
            return Quantity("peak, counted", "bytes", counted_peak, _is("peak"))
        return Quantity("peak", "bytes", peak_of, peak_field)

    def quantities(self, table: Table) -> list[Quantity]:
        """Return the values of a table: the declared ones, and those computed from them."""
        declared = [
            Quantity(fact.column, fact.unit, partial(value_at, path=path), _is(path))
            for path, fact in fields_of(Row)
            if fact.diff == table
        ]
        match table:
            case "speed":
                return [*declared, MEDIAN_STEP]
            case "memory":
                return [self.peak, STATES, TRAFFIC, *declared]
            case "losses":
                return declared


def _is(field: str) -> Callable[[Row], str]:
    return lambda _: field


def payload(row: Row) -> int | None:
    """Return the payload of all collectives of one optimizer step, in bytes."""
    calls = row["traffic"] and row["traffic"]["collectives"]
    return None if calls is None else sum(call["payload_bytes"] for call in calls)


MEDIAN_STEP: Final = Quantity(
    "median step",
    "seconds",
    partial(value_at, path="step_seconds.median"),
    _is("step_seconds"),
)
STATES: Final = Quantity("states", "bytes", states_of, _is("memory"))
TRAFFIC: Final = Quantity("traffic", "bytes", payload, _is("traffic"))


def match(before: Path, after: Path, *, show_speed: bool = False) -> Diff:
    """Read two comparisons and match their runs.

    Raises:
        UsageError: a folder holds no comparison, or both are the same.
    """
    read = [redact_results(comparison_in(folder)) for folder in (before, after)]
    if before.resolve() == after.resolve():
        raise UsageError(f"{before} and {after} are the same comparison. Name another for one.")
    a, b = (
        Side(letter, clean(str(folder)), results)
        for letter, folder, results in zip(SIDES, (before, after), read, strict=True)
    )
    rows = [
        {
            (row["strategy"], row["engine"], row["num_processes"]): row
            for row in side.results["runs"]
        }
        for side in (a, b)
    ]
    noise, noise_reason = combined_noise(a, b)
    return Diff(
        a=a,
        b=b,
        pairs=tuple(Pair(row, rows[1][key]) for key, row in rows[0].items() if key in rows[1]),
        only=(
            tuple(row for key, row in rows[0].items() if key not in rows[1]),
            tuple(row for key, row in rows[1].items() if key not in rows[0]),
        ),
        noise=noise,
        noise_reason=noise_reason,
        other_training=other_training(a, b),
        show_speed=show_speed,
    )


def for_readers(diff: Diff) -> Diff:
    """Return the two comparisons with the names that readers see."""
    rows = [*(row for pair in diff.pairs for row in pair), *diff.only[0], *diff.only[1]]
    if both_engines(row["engine"] for row in rows):
        return diff
    only_a, only_b = (tuple(map(renamed, rows)) for rows in diff.only)
    pairs = tuple(Pair(renamed(pair.a), renamed(pair.b)) for pair in diff.pairs)
    return replace(diff, pairs=pairs, only=(only_a, only_b))


def combined_noise(a: Side, b: Side) -> tuple[float | None, str | None]:
    """Return the share below which a difference in speed may be chance, or None and the reason.

    The share of each side is for two runs of that side. A run of A and a run of B each contribute
    half of their side's variance, on the logarithmic scale of the measurement.
    """
    shares = [noise["share"] for side in (a, b) if (noise := side.results["noise"])]
    if len(shares) < len(SIDES):
        reasons = [
            f"{side.letter}: {side.results['not_measured']['noise']}"
            for side in (a, b)
            if side.results["noise"] is None
        ]
        return None, "; ".join(reasons)
    squares = [math.log1p(share) ** 2 for share in shares]
    return math.expm1(math.sqrt(sum(squares) / len(squares))), None


def other_training(a: Side, b: Side) -> Refusal | None:
    """Return why losses of the two sides must not be compared; None where they may be."""
    fixed = [side.results["fixed"] for side in (a, b)]
    unknown = [name for name in SAME_TRAINING if not all(name in facts for facts in fixed)]
    differing = [
        name for name in SAME_TRAINING if name not in unknown and fixed[0][name] != fixed[1][name]
    ]
    names = ", ".join(differing or unknown)
    values = "; ".join(
        f"{name} is {recorded(fixed[0], name)} in A, {recorded(fixed[1], name)} in B"
        for name in differing or unknown
    )
    if differing:
        return Refusal(f"other {names}", f"not the same training: {values}")
    if unknown:
        return Refusal(f"{names} {NOT_RECORDED}", f"not known to be the same training: {values}")
    return None


def recorded(values: dict[str, Any], name: str) -> str:
    return summary(values[name]) if name in values else NOT_RECORDED


def summary(value: Any) -> str:
    """Return a recorded value in one line, with equal members of a list counted."""
    if isinstance(value, list):
        texts = [flat(item) for item in cast("list[Any]", value)]
        runs = [(text, len(list(same))) for text, same in itertools.groupby(texts)]
        return "; ".join(f"{count} x {t}" if count > 1 else t for t, count in runs) or "none"
    return flat(value)


def circumstances(side: Side) -> dict[str, Any]:
    """Return all recorded facts of a comparison except its results, in one level."""
    results = side.results
    values: dict[str, Any] = dict(results["fixed"])
    for name, value in results["environment"].items():
        if name == "versions" and isinstance(value, dict):
            versions = cast("dict[str, Any]", value)
            values |= {f"version of {package}": number for package, number in versions.items()}
        else:
            shown = size(value) if name.endswith("_bytes") and isinstance(value, int) else value
            values[name.removesuffix("_bytes").replace("_", " ")] = shown
    control = results["control"]
    values["control"] = control and f"{control['strategy']}-{control['engine']}"
    values["rehearsal"] = side.rehearsal
    values["complete"] = results["complete"]
    return values


def speed_ratio(diff: Diff, pair: Pair) -> tuple[float | None, str | None]:
    """Return B's tokens/s as a multiple of A's, or None and the reason."""
    if diff.speeds_reason:
        return None, diff.speeds_reason
    values = [row["tokens_per_second"] or None for row in pair]
    a, b = values
    if a is None or b is None:
        return None, why_missing(pair, values, _is("tokens_per_second"))
    return b / a, None


def speed_verdict(diff: Diff, ratio: float) -> Verdict:
    """Say whether a ratio of two speeds is above, below or within the noise."""
    if diff.noise is None:
        return "unknown"
    if max(ratio, 1 / ratio) - 1 <= diff.noise:
        return "near"
    return "faster" if ratio > 1 else "slower"


def loss_difference(diff: Diff, pair: Pair) -> tuple[LossDifference | None, str | None]:
    """Return the largest difference between two runs' losses in a step, or None and the reason."""
    if diff.other_training:
        return None, diff.other_training.sentence
    values = [row["losses"] or None for row in pair]
    a, b = values
    if a is None or b is None:
        return None, why_missing(pair, values, _is("losses"))
    if len(a) != len(b):
        return None, f"A has losses of {len(a)} steps, B of {len(b)}"
    batches = [_global_batch(row) for row in pair]
    if batches[0] != batches[1]:
        return None, f"{batches[0]} rows in an optimizer step in A, {batches[1]} in B"
    apart = [_apart(*losses) for losses in zip(a, b, strict=True)]
    step = max(range(len(apart)), key=apart.__getitem__)
    return LossDifference(apart[step], step + 1), None


def _global_batch(row: Row) -> int:
    rows = row["per_device_train_batch_size"] * row["gradient_accumulation_steps"]
    return rows * row["num_processes"]


def _apart(a: float, b: float) -> float:
    """Return the distance of two losses; 0 for two equal ones that are not finite."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b)
    return 0.0 if repr(a) == repr(b) else math.inf


def why_missing(pair: Pair, values: Sequence[Any], field: Callable[[Row], str]) -> str:
    """Say why a value is None, and on which side unless the reason is the same on both.

    `field` returns the key under which a row's `not_measured` has the reason.
    """
    reasons = {
        letter: reason_for(row, field(row))
        for letter, row, value in zip(SIDES, pair, values, strict=True)
        if value is None
    }
    if len(set(reasons.values())) == 1 < len(reasons):
        return next(iter(reasons.values()))
    return "; ".join(f"{letter}: {reason}" for letter, reason in reasons.items())
