"""Values in words: printed form of the results' numbers, with units; no text is empty."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from toolkit.escaping import one_line
from toolkit.records.fields import Unit
from toolkit.tables.grid import NOT_AVAILABLE

DROPOUT_DIFFERS: Final = (
    "with it each run draws other masks, and none could be judged. toolkit.train alone keeps it, "
    "and the saved models have their own values."
)


def size(count: int | None) -> str:
    """Return bytes in GiB (2^30), below 0.1 GiB in MiB, below 0.1 MiB in bytes."""
    if count is None:
        return NOT_AVAILABLE
    if 0 < abs(count) < 2**20 / 10:
        return f"{count:,} B"
    gib = count / 2**30
    return f"{gib:.2f} GiB" if abs(gib) >= 0.1 else f"{count / 2**20:.1f} MiB"


def size_between(low: int, high: int) -> str:
    """Return two sizes in the unit of the larger, the unit once: `31.0 to 38.2 GiB`."""
    unit, divisor = unit_of(max(abs(low), abs(high)))
    places = 1 if max(abs(low), abs(high)) / divisor >= 10 else 2
    return f"{low / divisor:.{places}f} to {high / divisor:.{places}f} {unit}"


def unit_of(largest: float) -> tuple[str, int]:
    """Return name and bytes of the unit for sizes up to `largest`."""
    return ("GiB", 2**30) if largest / 2**30 >= 0.1 else ("MiB", 2**20)


def number(value: float | None, form: str) -> str:
    if value is None:
        return NOT_AVAILABLE
    return form.format(value) if math.isfinite(value) else str(value)


def seconds(value: float | None) -> str:
    """Return a time in seconds with at most three decimals, below 0.1 s in milliseconds."""
    if value is not None and 0 < abs(value) < 0.1:
        return f"{1000 * value:.1f} ms"
    if value is None or value < 10:
        return number(value, "{:.3f} s")
    return number(value, "{:.1f} s" if value < 60 else "{:.0f} s")


def share(value: float | None) -> str:
    """Return a share in percent, with one decimal below 10%."""
    return number(value, "{:.0%}" if value is not None and abs(value) >= 0.1 else "{:.1%}")


def dollars(value: float | None) -> str:
    return number(value, "${:,.2f}" if value is None or abs(value) >= 0.1 else "${:.2g}")


def three_digits(value: float | None) -> str:
    return number(value, "{:,.0f}" if value is not None and value >= 100 else "{:.3g}")


def tokens_per_second(value: float | None) -> str:
    return number(value, "{:,.0f}")


def gap(value: float | None) -> str:
    return number(value, "{:.1e}")


_IN_UNIT: Final[dict[Unit, Callable[[Any], str]]] = {
    "bytes": size,
    "seconds": seconds,
    "tokens/s": tokens_per_second,
    "TFLOP/s": three_digits,
    "share": share,
    "hours": three_digits,
    "dollars": dollars,
    "loss": lambda value: number(value, "{:.6f}"),
    "gap": gap,
    "count": str,
    "text": str,
    "step seconds": lambda value: seconds(value["median"]),
    "difference": lambda value: f"{gap(value['value'])} ({value['tensor']})",
    "interval": lambda value: size_between(value["low"], value["high"]),
}


def in_unit(value: Any, unit: Unit) -> str:
    """Return the printed form of a value of a declared field."""
    return NOT_AVAILABLE if value is None else _IN_UNIT[unit](value)


def flat(value: Any) -> str:
    """Return a recorded value of any type in one line."""
    if isinstance(value, dict):
        items = facts(cast("dict[str, Any]", value))
        return ", ".join(f"{name} {shown}" for name, shown in items) or "none"
    if isinstance(value, list):
        return "; ".join(map(flat, cast("list[Any]", value))) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else one_line(str(value))


def facts(recorded: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values in their printed form."""
    return [
        (
            name.removesuffix("_bytes").replace("_", " "),
            size(value) if name.endswith("_bytes") and isinstance(value, int) else flat(value),
        )
        for name, value in recorded.items()
    ]


def method_in_words(training: Mapping[str, Any]) -> str:
    """Name the method and its settings from a record's `training`."""
    method = training["method"]
    if method == "full":
        return "full"
    numbers = [
        f"{name} {value:g}"
        for name, field in (
            ("rank", "lora_r"),
            ("alpha", "lora_alpha"),
            ("dropout", "lora_dropout"),
        )
        if (value := training[field]) is not None
        and not (name == "dropout" and training["dropout"] == "off")
    ]
    layers = ", ".join(training["lora_target_modules"] or ["some layers"])
    beside = " and the embeddings" if training["lora_embeddings"] else ""
    return f"{', '.join([method, *numbers])}, on {layers}{beside}"


def dropout_in_words(training: Mapping[str, Any]) -> str | None:
    """Say which dropout was set to 0, from a record's `training`; None without dropout."""
    probabilities: dict[str, float] = training["own_dropout"]
    if training["dropout"] != "off" or not probabilities:
        return None
    names = ", ".join(f"{name} {value:g}" for name, value in probabilities.items())
    return f"set to 0 in every run (own values: {names})"


def switches_in_words(trainings: Sequence[Mapping[str, Any]]) -> str:
    """Say which switches for speed were on, from the `training` of each run's record.

    Some are for one backend only, so a switch that was not on in every run says so.
    """
    switches: list[dict[str, Any]] = [training["speed"]["on"] for training in trainings]
    texts: list[str] = []
    for name in dict.fromkeys(name for on in switches for name in on):
        values = [on[name] for on in switches if name in on]
        only = "" if len(values) == len(switches) else " (where it applies)"
        texts.append(f"{name}{_set_to(values[0])}{only}")
    return ", ".join(texts) or "none"


def _set_to(value: Any) -> str:
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        value = entries.get("asked", entries.get("backend"))
    return "" if value is True or value is None else f" {value}"
