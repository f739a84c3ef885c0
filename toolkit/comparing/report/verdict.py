"""The verdict in one sentence, from the data alone, and the gates that broke or were not judged."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    "This was a rehearsal on the CPU. What each rank holds in memory, what it sends to the others, "
    "and the losses carry over to GPUs. Its speed says nothing about GPUs and is left out; toolkit "
    "report FOLDER --show-speed shows it."
)


def verdict(results: Results) -> str:
    """Summarise the result in one sentence."""
    rows, good, bad = results["runs"], measured(results), failed(results)
    if not good:
        text = "No run came to its end" if rows else "No run has ended yet"
        return f"{text}{_names(bad, ': {} failed')}."
    spent = [row for row in bad if row["status"] == "oom"]
    clauses = [
        _agreement(good, results),
        _names(spent, "{} ran out of memory"),
        _names([row for row in bad if row not in spent], "{} failed"),
        _names([row for row in rows if row["status"] == "skipped"], "{} could not run here"),
    ]
    if not any(row["broken"] for row in good):
        if not results["rehearsal"]:
            clauses.append(_speed(good, results["noise"]))
        clauses.append(_memory(good, results))
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


def _agreement(good: Sequence[Row], results: Results) -> str:
    """Say whether the runs trained the same model; empty without a run beside the control."""
    broken, control = [row for row in good if row["broken"]], control_name(results)
    if broken:
        return _names(
            broken,
            f"{{}} did not train the model that {control or 'the control'} trained, so their "
            "numbers must not be compared",
        )
    if control is None:
        return "no run could be judged, there is no control"
    others = [row for row in good if not is_control(row, results["control"])]
    judged = [row for row in others if row["gates"]]
    if not judged:
        return f"no run could be judged against {control}" if others else ""
    names, runs = gate_names(judged), len(judged) + 1
    missing = sorted({gate for row in judged for gate in names if gate not in row["gates"]})
    last = min((step for row in judged if (step := row.get("judged_steps"))), default=None)
    missing += [] if last is None else [f"steps after {last}"]
    except_for = f" (not judged everywhere: {', '.join(missing)})" if missing else ""
    if len(judged) < len(others):
        count = f"{runs} of {len(others) + 1}"
    else:
        count = "both" if runs == 2 else f"all {runs}"
    return f"{count} runs trained the same model{except_for}"


def _speed(good: Sequence[Row], noise: Noise | None) -> str:
    """Name the fastest run, and the runs that differ from it by no more than the noise."""
    speeds = [
        (speed, row) for row in good if (speed := row["tokens_per_second"]) and math.isfinite(speed)
    ]
    if len(speeds) < 2:
        return ""
    speeds.sort(key=lambda pair: -pair[0])
    most, best = speeds[0]
    if noise is None:
        return f"{best['name']} had the most tokens a second, which may be chance"
    near = [row for speed, row in speeds if most - speed <= noise["share"] * speed]
    if len(near) == 1:
        return f"{best['name']} was the fastest"
    return f"{listed(near)} were the fastest, too near to tell apart"


def _memory(good: Sequence[Row], results: Results) -> str:
    """Name the run with the least memory, compared with DDP or the run with the most."""
    compared, read, unit = good, peak_of, "a GPU at its peak"
    if counts_peaks(results):
        # With the host as device, offload does not lower the peak, as it would on a GPU.
        compared = [row for row in good if not host_in_peak(row)]
        read, unit = counted_peak, "a process at its peak"
    elif results["rehearsal"]:
        read, unit = states_of, "of states a process"
    sizes = [(count, row) for row in compared if (count := read(row)) is not None]
    if len(sizes) < 2:
        return ""
    least, row = min(sizes, key=lambda pair: pair[0])
    most, largest = max(sizes, key=lambda pair: pair[0])
    if size(most) == size(least):
        return ""
    base = next((pair for pair in sizes if pair[1]["strategy"] == BASELINE), (most, largest))
    if size(base[0]) != size(least):
        most, largest = base
    saved = share((most - least) / most)
    held = [(states, other) for _, other in sizes if (states := states_of(other)) is not None]
    fewest, other = min(held, key=lambda pair: pair[0], default=(least, row))
    if read is not states_of and size(fewest) != size(states_of(row)):
        of_each = unit.partition(" at")[0]
        return (
            f"{other['name']} held the smallest states ({size(fewest)} {of_each}), while "
            f"{row['name']} had the lowest peak ({size(least)}, {saved} less than "
            f"{largest['name']})"
        )
    return (
        f"{row['name']} needed the least memory: {size(least)} {unit}, {saved} less than "
        f"{largest['name']}"
    )


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
