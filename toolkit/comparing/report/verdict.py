"""The verdict in one sentence, and the findings behind it, from the data alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

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
    "This was a rehearsal on the CPU. What each rank holds in memory, what it sends to the others, "
    "and the losses carry over to GPUs. Its speed says nothing about GPUs and is left out; toolkit "
    "report FOLDER --show-speed shows it."
)


class Conclusion(NamedTuple):
    """A short and a long answer from the runs to one question; both empty where there is none."""

    clause: str
    """Part of the verdict."""

    sentence: str
    """Sentence with the numbers."""


NOTHING: Final = Conclusion("", "")


def verdict(results: Results) -> str:
    """Summarise the result in one sentence."""
    rows, good, bad = results["runs"], measured(results), failed(results)
    if not good:
        text = "No run came to its end" if rows else "No run has ended yet"
        return f"{text}{_names(bad, ': {} failed')}."
    spent = [row for row in bad if row["status"] == "oom"]
    clauses = [
        _agreement(good, results).clause,
        _names(spent, "{} ran out of memory"),
        _names([row for row in bad if row not in spent], "{} failed"),
        _names([row for row in rows if row["status"] == "skipped"], "{} could not run here"),
    ]
    if not any(row["broken"] for row in good):
        if not results["rehearsal"]:
            clauses.append(_speed(good, results["noise"]).clause)
        clauses.append(_memory(good, results).clause)
    clauses = [clause for clause in clauses if clause]
    *before, last = clauses or [""]
    if not last and not results["complete"]:
        return "Not finished yet: the control ran to its end, the other runs are outstanding."
    if not last:
        return "The control ran to its end; there is nothing to compare it with."
    text = ", and ".join(filter(None, ("; ".join(before), last)))
    if not results["complete"]:
        return f"Not finished yet: {text}."
    # The name of a run keeps its capitalisation.
    if text.startswith(("all ", "both ", "no ")):
        text = f"{text[0].upper()}{text[1:]}"
    return f"{text}."


def _agreement(good: Sequence[Row], results: Results) -> Conclusion:
    """Say whether the runs trained the same model, and how near they came to the control."""
    broken, control = [row for row in good if row["broken"]], control_name(results)
    if broken:
        names = _names(broken, "{}")
        return Conclusion(
            f"{names} did not train the model that {control or 'the control'} trained, so their "
            "numbers must not be compared",
            f"{names} did not train as the control did: {broken_sentence(broken[0]['broken'][0])}",
        )
    if control is None:
        reason = "there is no control"
        return Conclusion(f"no run could be judged, {reason}", f"No run could be judged: {reason}.")
    others = [row for row in good if not is_control(row, results["control"])]
    if not others:
        return NOTHING
    judged = [row for row in others if row["gates"]]
    if not judged:
        text = f"run could be judged against {control}"
        return Conclusion(f"no {text}", f"No {text}.")
    return _judged(judged, [row for row in others if not row["gates"]], control)


def _judged(judged: Sequence[Row], unjudged: Sequence[Row], control: str) -> Conclusion:
    """Name the judged runs whose gates held, and the largest gap to the control."""
    names, runs = gate_names(judged), len(judged) + 1
    missing = sorted({gate for row in judged for gate in names if gate not in row["gates"]})
    last = min((step for row in judged if (step := row.get("judged_steps"))), default=None)
    missing += [] if last is None else [f"steps after {last}"]
    except_for = f" (not judged everywhere: {', '.join(missing)})" if missing else ""
    if unjudged:
        count = f"{runs} of {runs + len(unjudged)}"
    else:
        count = "both" if runs == 2 else f"all {runs}"
    gaps = [(gap["max"], row["name"]) for row in judged if (gap := row["loss_gap"]) is not None]
    largest = max(gaps, key=lambda gap: gap[0], default=None)
    gap = "" if largest is None else f" (largest loss gap {largest[0]:.1e}, {largest[1]})"
    others = "1 other run" if len(judged) == 1 else f"{len(judged)} other runs"
    which = f"every gate that was judged held{except_for}" if missing else "every gate held"
    return Conclusion(
        f"{count} runs trained the same model{except_for}",
        f"{others} trained as {control} did, {which}{gap}." + _names(unjudged, " {} not judged."),
    )


def _speed(good: Sequence[Row], noise: Noise | None) -> Conclusion:
    """Name the fastest run, and the runs that differ from it by no more than the noise."""
    speeds = sorted(
        (
            (speed, row)
            for row in good
            if (speed := row["tokens_per_second"]) and math.isfinite(speed)
        ),
        key=lambda pair: -pair[0],
    )
    if len(speeds) < 2:
        return NOTHING
    (most, best), (after, second) = speeds[:2]
    if noise is None:
        return Conclusion(
            f"{best['name']} had the most tokens a second, which may be chance",
            f"{best['name']} had the most tokens/s ({most:,.0f}), {second['name']} came next "
            f"({after:,.0f}); how far such a difference means anything was not measured.",
        )
    near = [(speed, row) for speed, row in speeds if most - speed <= noise["share"] * speed]
    if len(near) == 1:
        clause = f"{best['name']} was the fastest"
        return Conclusion(clause, f"{clause} ({most:,.0f} tokens/s).")
    clause = f"{listed([row for _, row in near])} were the fastest, too near to tell apart"
    return Conclusion(
        clause,
        f"{clause} ({near[-1][0]:,.0f} to {most:,.0f} tokens/s; a difference under "
        f"{share(noise['share'])} means nothing).",
    )


def _memory(good: Sequence[Row], results: Results) -> Conclusion:
    """Name the run with the least memory, compared with DDP or the run with the most."""
    compared, read = good, peak_of
    if not results["rehearsal"]:
        unit = "a GPU at its peak"
        text = "{} needed the least memory ({} at its peak), {} the most ({})."
    elif counts_peaks(results):
        # With the host as device, offload does not lower the peak, as it would on a GPU.
        compared, read = [row for row in good if not host_in_peak(row)], counted_peak
        unit = "a process at its peak"
        text = (
            "The tensors of the fullest rank came to least in {} ({} at their peak) and most in "
            "{} ({})" + (", runs that offload left out." if len(compared) < len(good) else ".")
        )
    else:
        read, unit = states_of, "of states a process"
        text = "The states of model and optimizer took least in {} ({} a rank) and most in {} ({})."
    sizes = [(count, row) for row in compared if (count := read(row)) is not None]
    if len(sizes) < 2:
        return NOTHING
    least, row = min(sizes, key=lambda pair: pair[0])
    most, largest = max(sizes, key=lambda pair: pair[0])
    if size(most) == size(least):
        return NOTHING
    text = text.format(row["name"], size(least), largest["name"], size(most))
    base = next((pair for pair in sizes if pair[1]["strategy"] == BASELINE), (most, largest))
    if size(base[0]) != size(least):
        most, largest = base
    saved = share((most - least) / most)
    held = [(states, other) for _, other in sizes if (states := states_of(other)) is not None]
    fewest, other = min(held, key=lambda pair: pair[0], default=(least, row))
    if read is not states_of and size(fewest) != size(states_of(row)):
        of_each = unit.partition(" at")[0]
        return Conclusion(
            f"{other['name']} held the smallest states ({size(fewest)} {of_each}), "
            f"while {row['name']} had the lowest peak ({size(least)}, {saved} less than "
            f"{largest['name']})",
            f"{text} The smallest states were those of {other['name']} ({size(fewest)}).",
        )
    return Conclusion(
        f"{row['name']} needed the least memory: {size(least)} {unit}, {saved} less than "
        f"{largest['name']}",
        text,
    )


def findings(results: Results) -> str:
    """Give the reasons for the verdict in a few sentences; empty where no run ended well."""
    good = measured(results)
    if not good:
        return ""
    facts = [_agreement(good, results)]
    if not results["rehearsal"]:
        facts.append(_speed(good, results["noise"]))
    facts.append(_memory(good, results))
    return " ".join(fact.sentence for fact in facts if fact.sentence)


def broken_lines(results: Results) -> list[str]:
    """Return every gate that broke, with advice on finding the cause."""
    return [
        broken_sentence(gate) + (f" What helps: {row['fix']}" if row["fix"] else "")
        for row in results["runs"]
        for gate in row["broken"]
    ]


def unjudged_lines(results: Results) -> list[str]:
    """Return the gates that were not judged, one line for each reason."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for row in results["runs"]:
        if row["status"] != "ok" or is_control(row, results["control"]):
            continue
        for field, reason in row["not_measured"].items():
            if field.startswith("gates."):
                gates = by_reason.setdefault(reason, {}).setdefault(row["name"], [])
                gates.append(field.removeprefix("gates."))
    return [
        "Not judged: "
        + ", ".join(f"{row} ({', '.join(gates)})" for row, gates in rows.items())
        + f": {reason}"
        for reason, rows in by_reason.items()
    ]


def _names(rows: Sequence[Row], text: str) -> str:
    return text.format(", ".join(row["name"] for row in rows)) if rows else ""
