"""The verdict, one sentence for who decides, and the findings behind it, from the data alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from toolkit.comparing.parity.gates import gate_names
from toolkit.comparing.parity.judgement import broken_sentence
from toolkit.comparing.report.row_facts import (
    BASELINE,
    control_name,
    counted_peak,
    counts_peaks,
    failed,
    host_in_peak,
    is_control,
    listed,
    measured,
    peak_of,
    states_of,
)
from toolkit.comparing.report.words import share, size
from toolkit.records.results import Noise, Results, Row

REHEARSAL: Final = (
    "This was a rehearsal on the CPU: its speed says nothing about GPUs. "
    "What each rank holds in memory, what it sends to the others, and the losses carry over."
)


def verdict(results: Results) -> str:
    """Say in one sentence what came out."""
    rows, good, bad = results["runs"], measured(results), failed(results)
    if not good:
        text = "No run came to its end" if rows else "No run has ended yet"
        return f"{text}{_names(bad, ': {} failed')}."
    spent = [row for row in bad if row["status"] == "oom"]
    clauses = [
        _agreement_clause(good, results),
        _names(spent, "{} ran out of memory"),
        _names([row for row in bad if row not in spent], "{} failed"),
        _names([row for row in rows if row["status"] == "skipped"], "{} could not run here"),
    ]
    if not any(row["broken"] for row in good):
        if not results["rehearsal"]:
            clauses.append(_speed_clause(good, results["noise"]))
        clauses.append(_memory_clause(good, results))
    said = [clause for clause in clauses if clause]
    if not said and not results["complete"]:
        return "Not finished yet: the control ran to its end, the other runs are outstanding."
    if not said:
        return "The control ran to its end; there is nothing to compare it with."
    text = ", and ".join(filter(None, ("; ".join(said[:-1]), said[-1])))
    if not results["complete"]:
        return f"Not finished yet: {text}."
    # The name of a run keeps its letters.
    if text.startswith(("all ", "both ", "no ")):
        text = f"{text[0].upper()}{text[1:]}"
    return f"{text}."


def _agreement_clause(good: Sequence[Row], results: Results) -> str:
    """Say whether the runs trained the same model."""
    broken, control = [row for row in good if row["broken"]], control_name(results)
    if broken:
        return (
            f"{_names(broken, '{}')} did not train the model that {control or 'the control'} "
            "trained, so their numbers must not be compared"
        )
    if control is None:
        return "no run could be judged, there is no control"
    others = [row for row in good if not is_control(row, results["control"])]
    judged = [row for row in others if row["gates"]]
    if not others:
        return ""
    if not judged:
        return f"no run could be judged against {control}"
    missing = _not_judged(judged)
    sure = f" (not judged everywhere: {', '.join(missing)})" if missing else ""
    if len(judged) < len(others):
        return f"{len(judged) + 1} of {len(others) + 1} runs trained the same model{sure}"
    which = "both" if len(judged) == 1 else f"all {len(judged) + 1}"
    return f"{which} runs trained the same model{sure}"


def _not_judged(judged: Sequence[Row]) -> list[str]:
    """Return the gates that some run was not judged by."""
    names = gate_names(judged)
    return sorted({gate for row in judged for gate in names if gate not in row["gates"]})


def _speed_clause(good: Sequence[Row], noise: Noise | None) -> str:
    """Name the fastest, where the noise lets it be named."""
    speeds = _by_speed(good)
    if len(speeds) < 2:
        return ""
    most, best = speeds[0]
    if noise is None:
        return f"{best['name']} had the most tokens a second, which may be chance"
    near = [row for speed, row in speeds if most - speed <= noise["share"] * speed]
    if len(near) == 1:
        return f"{best['name']} was the fastest"
    return f"{listed(near)} were the fastest, too near to tell apart"


def _memory_clause(good: Sequence[Row], results: Results) -> str:
    """Name the run with the least memory, beside DDP, else the run with the most."""
    of, alike, what = _memory_of(good, results)
    held = [(count, row) for row in alike if (count := of(row)) is not None]
    if len(held) < 2:
        return ""
    least, row = min(held, key=lambda pair: pair[0])
    most, other = max(held, key=lambda pair: pair[0])
    most, other = next((pair for pair in held if pair[1]["strategy"] == BASELINE), (most, other))
    if size(most) == size(least):
        most, other = max(held, key=lambda pair: pair[0])
        if size(most) == size(least):
            return ""
    saved = share((most - least) / most)
    return (
        f"{row['name']} needed the least memory: {size(least)} {what}, {saved} less than "
        f"{other['name']}"
    )


def _memory_of(
    good: Sequence[Row], results: Results
) -> tuple[Callable[[Row], int | None], Sequence[Row], str]:
    """Return which bytes of a run tell its need of memory, which runs they tell it of, and what."""
    if not results["rehearsal"]:
        return peak_of, good, "a GPU at its peak"
    if counts_peaks(results):
        # With the host for a device, offload makes no peak smaller, as it would on a GPU.
        return counted_peak, [row for row in good if not host_in_peak(row)], "a process at its peak"
    return lambda row: states_of(row["memory"]), good, "of states a process"


def findings(results: Results) -> str:
    """Say in a few sentences what the verdict rests on; empty where no run came to its end."""
    good = measured(results)
    if not good:
        return ""
    sentences = _agreement_sentences(good, results)
    if not results["rehearsal"]:
        sentences += _speed_sentences(good, results["noise"])
    return " ".join([*sentences, *_memory_sentences(good, results)])


def broken_lines(results: Results) -> list[str]:
    """Return every gate that broke, with what helps to find out why."""
    return [
        broken_sentence(each) + (f" What helps: {row['fix']}" if row["fix"] else "")
        for row in results["runs"]
        for each in row["broken"]
    ]


def unjudged_lines(results: Results) -> list[str]:
    """Return the gates that runs were not judged by, one line for each reason."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in results["runs"]:
        if row["status"] != "ok" or is_control(row, results["control"]):
            continue
        for field, reason in row["not_measured"].items():
            if field.startswith("gates."):
                gates = found.setdefault(reason, {}).setdefault(row["name"], [])
                gates.append(field.removeprefix("gates."))
    return [
        "Not judged: "
        + ", ".join(f"{row} ({', '.join(gates)})" for row, gates in rows.items())
        + f": {reason}"
        for reason, rows in found.items()
    ]


def _agreement_sentences(good: Sequence[Row], results: Results) -> list[str]:
    broken = [row for row in good if row["broken"]]
    if broken:
        return [
            f"{', '.join(row['name'] for row in broken)} did not train as the control did: "
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
    gap = "" if largest is None else f" (largest loss gap {largest[0]:.1e}, {largest[1]['name']})"
    missing = _not_judged(judged)
    which = "every gate held"
    if missing:
        which = f"every gate that was judged held (not judged everywhere: {', '.join(missing)})"
    text = f"{_count(judged)} trained as {name} did, {which}{gap}."
    return text + (f" {_names(unjudged, '{} not judged')}." if unjudged else "")


def _speed_sentences(good: Sequence[Row], noise: Noise | None) -> list[str]:
    """Name the fastest, and with it those that the noise does not tell from it."""
    speeds = _by_speed(good)
    if len(speeds) < 2:
        return []
    most, best = speeds[0]
    if noise is None:
        after, second = speeds[1]
        return [
            f"{best['name']} had the most tokens/s ({most:,.0f}), {second['name']} came next "
            f"({after:,.0f}); how far such a difference means anything was not measured."
        ]
    near = [(speed, row) for speed, row in speeds if most - speed <= noise["share"] * speed]
    if len(near) == 1:
        return [f"{best['name']} was the fastest ({most:,.0f} tokens/s)."]
    return [
        f"{listed([row for _, row in near])} were the fastest, too near to tell apart "
        f"({near[-1][0]:,.0f} to {most:,.0f} tokens/s; a difference under {share(noise['share'])} "
        "means nothing)."
    ]


def _by_speed(good: Sequence[Row]) -> list[tuple[float, Row]]:
    """Return the runs whose tokens a second are known, with these, the fastest first."""
    return sorted(
        (
            (speed, row)
            for row in good
            if (speed := row["tokens_per_second"]) and math.isfinite(speed)
        ),
        key=lambda pair: -pair[0],
    )


def _memory_sentences(good: Sequence[Row], results: Results) -> list[str]:
    """Say who needed least and who most: on the device, else counted."""
    of, alike, _ = _memory_of(good, results)
    if not results["rehearsal"]:
        text = "{} needed the least memory ({} at its peak), {} the most ({})."
    elif counts_peaks(results):
        text = (
            "The tensors of the fullest rank came to least in {} ({} at their peak) and most in "
            "{} ({})" + (", runs that offload left out." if len(alike) < len(good) else ".")
        )
    else:
        text = "The states of model and optimizer took least in {} ({} a rank) and most in {} ({})."
    return _extremes(alike, of, text)


def _extremes(good: Sequence[Row], of: Callable[[Row], int | None], text: str) -> list[str]:
    held = [(count, row) for row in good if (count := of(row)) is not None]
    if len(held) < 2:
        return []
    least, row = min(held, key=lambda pair: pair[0])
    most, other = max(held, key=lambda pair: pair[0])
    if size(most) == size(least):
        return []
    return [text.format(row["name"], size(least), other["name"], size(most))]


def _count(rows: Sequence[Row]) -> str:
    return "1 other run" if len(rows) == 1 else f"{len(rows)} other runs"


def _names(rows: Sequence[Row], text: str) -> str:
    return text.format(", ".join(row["name"] for row in rows)) if rows else ""
