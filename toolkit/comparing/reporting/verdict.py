"""The verdict: what came out, in a few sentences, from the data alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from toolkit.comparing.parity import broken_sentence
from toolkit.comparing.reporting.row_facts import (
    control_name,
    counted_peak,
    counts_peaks,
    evaluations,
    failed,
    host_in_peak,
    is_control,
    measured,
    peak_of,
    run_name,
    states_of,
)
from toolkit.comparing.reporting.words import share, size
from toolkit.results import Noise, Results, Row

GATE_NAMES: Final = ("loss", "grad_norm", "weights", "data")
"""Those of every comparison."""

EVALUATION: Final = "evaluation"
"""The gate of a comparison that evaluates."""

REHEARSAL: Final = (
    "This was a rehearsal on the CPU: its speed says nothing about GPUs. "
    "What each rank holds in memory, what it sends to the others, and the losses carry over."
)


def verdict(results: Results) -> str:
    """Say in a few sentences what came out."""
    rows, good, bad = results["runs"], measured(results), failed(results)
    if not good:
        text = "No run came to its end" if rows else "No run has ended yet"
        return f"{text}{_names(bad, ': {} failed')}."
    sentences: list[str] = []
    if not results.get("complete", True):
        sentences.append("Not finished: some runs are outstanding.")
    sentences += _agreement_sentences(good, results)
    spent = [row for row in bad if row["status"] == "oom"]
    sentences += _named(spent, "{} ran out of memory")
    sentences += _named([row for row in bad if row not in spent], "{} failed")
    sentences += _named([row for row in rows if row["status"] == "skipped"], "{} skipped")
    if not results.get("rehearsal", False):
        sentences += _speed_sentences(good, results.get("noise"))
    sentences += _memory_sentences(good, results)
    return " ".join(sentences) or "The control ran to its end; there is nothing to compare it with."


def gate_names(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the gates that these runs could have held."""
    return (*GATE_NAMES, EVALUATION) if any(map(evaluations, rows)) else GATE_NAMES


def broken_lines(results: Results) -> list[str]:
    """Return every gate that broke, with what helps to find out why."""
    return [
        broken_sentence(each) + (f" What helps: {row['fix']}" if row["fix"] else "")
        for row in results["runs"]
        for each in row["broken"]
    ]


def _agreement_sentences(good: Sequence[Row], results: Results) -> list[str]:
    broken = [row for row in good if row["broken"]]
    if broken:
        return [
            f"{', '.join(map(run_name, broken))} did not train as the control did: "
            f"{broken_sentence(broken[0]['broken'][0])}"
        ]
    name = control_name(results)
    if name is None:
        return ["No run could be judged: there is no control."]
    others = [row for row in good if not is_control(row, results["control"])]
    return [_agreement_sentence(others, name)] if others else []


def _agreement_sentence(others: Sequence[Row], name: str) -> str:
    """Say how near the others came, and whether that was judged."""
    unjudged = [row for row in others if not row["gates"]]
    judged = [row for row in others if row["gates"]]
    if not judged:
        return f"No run could be judged against {name}."
    gaps = [(row["loss_gap"]["max"], row) for row in judged if row["loss_gap"] is not None]
    largest = max(gaps, key=lambda gap: gap[0], default=None)
    gap = "" if largest is None else f" (largest loss gap {largest[0]:.1e}, {run_name(largest[1])})"
    names = gate_names(judged)
    missing = {gate for row in judged for gate in names if gate not in row["gates"]}
    which = "every gate held"
    if missing:
        which = (
            f"every gate that was judged held (not judged everywhere: {', '.join(sorted(missing))})"
        )
    text = f"{_count(judged)} trained as {name} did, {which}{gap}."
    return text + (f" {_names(unjudged, '{} not judged')}." if unjudged else "")


def _speed_sentences(good: Sequence[Row], noise: Noise | None) -> list[str]:
    """Name the fastest, and with it those that the noise does not tell from it."""
    speeds = sorted(
        (
            (speed, row)
            for row in good
            if (speed := row["tokens_per_second"]) and math.isfinite(speed)
        ),
        key=lambda pair: -pair[0],
    )
    if len(speeds) < 2:
        return []
    most, best = speeds[0]
    if noise is None:
        after, second = speeds[1]
        return [
            f"{run_name(best)} had the most tokens/s ({most:,.0f}), {run_name(second)} came next "
            f"({after:,.0f}); how far such a difference means anything was not measured."
        ]
    near = [(speed, row) for speed, row in speeds if most - speed <= noise["share"] * speed]
    if len(near) == 1:
        return [f"{run_name(best)} was the fastest ({most:,.0f} tokens/s)."]
    names = [run_name(row) for _, row in near]
    return [
        f"{', '.join(names[:-1])} and {names[-1]} were the fastest, too near to tell apart "
        f"({near[-1][0]:,.0f} to {most:,.0f} tokens/s; a difference under {share(noise['share'])} "
        "means nothing)."
    ]


def _memory_sentences(good: Sequence[Row], results: Results) -> list[str]:
    """Say who needed least and who most: on the device, else counted."""
    if not results.get("rehearsal", False):
        text = "{} needed the least memory ({} at its peak), {} the most ({})."
        return _extremes(good, peak_of, text)
    if counts_peaks(results):
        # With the host for a device, offload makes no peak smaller, as it would on a GPU.
        alike = [row for row in good if not host_in_peak(row)]
        return _extremes(
            alike,
            counted_peak,
            "The tensors of the fullest rank came to least in {} ({} at their peak) and most in "
            "{} ({})" + (", runs that offload left out." if len(alike) < len(good) else "."),
        )
    return _extremes(
        good,
        lambda row: states_of(row["memory"]),
        "The states of model and optimizer took least in {} ({} a rank) and most in {} ({}).",
    )


def _extremes(good: Sequence[Row], of: Callable[[Row], int | None], text: str) -> list[str]:
    held = [(count, row) for row in good if (count := of(row)) is not None]
    if len(held) < 2:
        return []
    least, row = min(held, key=lambda pair: pair[0])
    most, other = max(held, key=lambda pair: pair[0])
    if size(most) == size(least):
        return []
    return [text.format(run_name(row), size(least), run_name(other), size(most))]


def _count(rows: Sequence[Row]) -> str:
    return "1 other run" if len(rows) == 1 else f"{len(rows)} other runs"


def _names(rows: Sequence[Row], text: str) -> str:
    return text.format(", ".join(map(run_name, rows))) if rows else ""


def _named(rows: Sequence[Row], text: str) -> list[str]:
    return [f"{_names(rows, text)}."] if rows else []
