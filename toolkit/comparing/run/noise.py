"""Noise: a smaller difference in speed may be chance, since equal runs differ as much.

It is measured in the comparison itself. Where runs were started several times, it is the spread of
their starts. With one start of each run, only the spread of its steps is known, which misses the
changes from one start to the next: placement, clocks, other jobs on the machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

from toolkit.records.results import Noise, Row

FEW_DEGREES: Final = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582)
"""Quantiles of Student's t at 0.975 with 1 to 5 degrees of freedom, for a confidence of 95%."""

FEWEST_STEPS: Final = 3


def noise_of(rows: Sequence[Row]) -> tuple[Noise | None, str | None]:
    """Return the noise of a comparison, or None and the reason.

    Variances of the logarithm of tokens/s are pooled over the runs. By chance alone, two equal runs
    of R starts each differ by more than `share` in one comparison of twenty.
    """
    good = [row for row in rows if row["status"] == "ok" and row["tokens_per_second"]]
    speeds = [
        [math.log(speed) for repeat in row["repeats"] if (speed := repeat["tokens_per_second"])]
        for row in good
    ]
    several = [values for values in speeds if len(values) > 1]
    if several:
        fewest = min(len(values) for values in speeds if values)
        share = _share(several, values=fewest)
        return Noise(share=share, basis="repeats", repeats=fewest), None
    steps = [
        [seconds / statistics.fmean(timed) for seconds in timed]
        for row in good
        for repeat in row["repeats"]
        if len(timed := repeat["timed_seconds"]) >= FEWEST_STEPS
    ]
    if not steps:
        return None, (
            f"no run was started twice, and none has {FEWEST_STEPS} timed steps or more: "
            "use --repeats, or more --throughput_steps"
        )
    share = _share(steps, values=min(map(len, steps)))
    return Noise(share=share, basis="steps", repeats=1), None


def _share(samples: Sequence[Sequence[float]], *, values: int) -> float:
    """Return the half-width of the difference between two means of `values` values, as a share.

    `samples` are several values of each run, relative or logarithmic.
    """
    degrees = sum(len(sample) - 1 for sample in samples)
    squares = sum((len(sample) - 1) * statistics.variance(sample) for sample in samples)
    half = student_quantile(degrees)
    return math.exp(half * math.sqrt(squares / degrees * 2 / values)) - 1


def student_quantile(degrees: int) -> float:
    """Return the quantile of Student's t at 0.975, to 0.1%.

    From six degrees on by Abramowitz and Stegun 26.7.5, an expansion around the normal quantile.
    """
    if degrees <= len(FEW_DEGREES):
        return FEW_DEGREES[degrees - 1]
    return 1.959964 + 2.372271 / degrees + 2.822499 / degrees**2 + 2.555849 / degrees**3
