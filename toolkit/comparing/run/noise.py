"""Noise: a smaller difference in speed may be chance, since equal runs differ as much.

It is measured in the comparison itself. Where runs were started several times, it is the spread of
their starts. With one start of each run, only the spread of its steps is known, which misses the
changes from one start to the next: placement, clocks, other jobs on the machine.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import Final

from toolkit.records.results import Noise, Row

CONFIDENCE: Final = 0.95
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
    half = student_quantile(0.5 + CONFIDENCE / 2, degrees)
    return math.exp(half * math.sqrt(squares / degrees * 2 / values)) - 1


@functools.cache
def student_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t for a probability of 0.5 or more.

    Substituting t = sqrt(degrees) * tan(angle) leaves the smooth integrand cos(angle)^(degrees - 1)
    over a finite range, which is inverted by halving.
    """
    assert 0.5 <= probability < 1
    assert degrees >= 1
    log_gammas = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    scale = math.exp(log_gammas) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if 0.5 + scale * _integral(middle, degrees - 1) < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(high)


def _integral(angle: float, power: int, *, pieces: int = 400) -> float:
    """Integrate cos^power from 0 to `angle` by Simpson's rule.

    The integrand is negligible beyond 40 standard deviations of its peak, 1 / sqrt(power) wide.
    """
    end = min(angle, 40 / math.sqrt(power)) if power else angle
    width = end / pieces
    values = [math.cos(i * width) ** power for i in range(pieces + 1)]
    return width / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))
