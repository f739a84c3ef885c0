"""Speed over the starts of one run: medians, and how far the starts are apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from toolkit.comparing.run.attempts import Finished
from toolkit.records.results import Repeat, Row, Spread, StepSeconds, spread_of

ONE_START: Final = "the run was started once"
NO_SPEED: Final = "tokens/s were not measured in two starts"


def add_speed(row: Row, starts: Sequence[Finished]) -> None:
    """Put the speed over all starts of a run into its row."""
    repeats = [_repeat(start) for start in starts]
    row["repeats"] = repeats
    speeds = [each["tokens_per_second"] for each in repeats if each["tokens_per_second"]]
    row["tokens_per_second"] = _median(speeds)
    row["supervised_tokens_per_second"] = _median(
        [s for start in starts if (s := start.record.get("supervised_tokens_per_second"))]
    )
    row["step_seconds"] = step_seconds_of(repeats)
    if len(speeds) > 1:
        least, most = min(speeds), max(speeds)
        row["spread"] = Spread(
            least=least, most=most, share=(most - least) / statistics.median(speeds)
        )
    else:
        row["not_measured"]["spread"] = ONE_START if len(starts) < 2 else NO_SPEED


def _repeat(start: Finished) -> Repeat:
    record = start.record
    return Repeat(
        folder=start.folder.name,
        tokens_per_second=record["tokens_per_second"],
        step_seconds=record["step_seconds"],
        timed_seconds=record.get("timed_seconds", []),
        seconds=record["seconds"],
    )


def step_seconds_of(repeats: Sequence[Repeat]) -> StepSeconds | None:
    """Return the spread over the timed steps of all repeats.

    Records of the first toolkits do not list them: of one repeat its own spread then stands, of
    several the median of each figure.
    """
    if all(each["timed_seconds"] for each in repeats):
        return spread_of([seconds for each in repeats for seconds in each["timed_seconds"]])
    known = [each["step_seconds"] for each in repeats if each["step_seconds"]]
    if not known:
        return None
    return StepSeconds(
        median=_median([each["median"] for each in known if each["median"] is not None]),
        p90=_median([each["p90"] for each in known if each["p90"] is not None]),
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
