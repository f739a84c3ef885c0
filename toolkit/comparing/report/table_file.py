"""`results.csv`: one line per run; the last column has the reasons of values not measured."""

from __future__ import annotations

from typing import Any, Final

from toolkit.comparing.parity.gates import gate_names
from toolkit.comparing.predicted import MOVED
from toolkit.comparing.report.row_facts import baseline, is_control, ratio, states_of, status_of
from toolkit.comparing.report.sections.failures import ran_out
from toolkit.comparing.report.sections.memory import PEAK_CATEGORIES, parts_of
from toolkit.comparing.report.sections.scaling import Scaled, scaled_runs
from toolkit.comparing.report.sections.traffic import (
    OTHER,
    difference_in_words,
    moved_by_purpose,
    wire_bytes,
)
from toolkit.records.fields import fields_of, value_at
from toolkit.records.results import Results, Row
from toolkit.tables.sheet import render_sheet

TABLE_FILE: Final = "results.csv"

IN_PARTS: Final = ("step seconds", "difference", "interval")
"""Units of values whose fields are separate columns."""


def render_table(results: Results) -> str:
    """Return the runs as CSV with a header."""
    base = baseline(results)
    scaled = {scale.row["name"]: scale for scale in scaled_runs(results)}
    prompts = max((len(row["samples"] or []) for row in results["runs"]), default=0)
    lines = [_line(row, results, prompts, base, scaled.get(row["name"])) for row in results["runs"]]
    return render_sheet(lines, empty=("strategy", "engine", "status"))


def _line(
    row: Row, results: Results, prompts: int, base: Row | None, scaled: Scaled | None
) -> dict[str, Any]:
    return {
        "strategy": row["strategy"],
        "engine": row["engine"],
        "status": status_of(row),
        "run": row["name"],
        "control": is_control(row, results["control"]),
        "baseline": row is base,
        "rehearsal": row["rehearsal"],
        "num_processes": row["num_processes"],
        "per_device_train_batch_size": row["per_device_train_batch_size"],
        "gradient_accumulation_steps": row["gradient_accumulation_steps"],
        "starts": len(row["repeats"]),
        "speed_times_baseline": ratio(row, base),
        "speed_up": scaled and scaled.speed_up,
        "scaling_efficiency": scaled and scaled.efficiency,
        "noise_share": (results["noise"] or {}).get("share"),
        **_declared(row),
        **{f"gate_{gate}": row["gates"].get(gate) for gate in gate_names(optional=True)},
        "states_bytes": states_of(row),
        **_over_ranks(row),
        **_peak_parts(row),
        **_sent(row),
        **_evaluated(row, prompts),
        "ranks_out_of_memory": " ".join(str(end["rank"]) for end in row["ends"] if ran_out(end)),
        "reason": row["reason"],
        "fix": row["fix"],
        "not_measured": "; ".join(
            f"{field}: {reason}" for field, reason in row["not_measured"].items()
        ),
    }


def _declared(row: Row) -> dict[str, Any]:
    """Return every value whose declaration names a column."""
    return {
        fact.csv: value_at(row, path)
        for path, fact in fields_of(Row)
        if fact.csv is not None and fact.unit not in IN_PARTS
    }


def _over_ranks(row: Row) -> dict[str, int | None]:
    """Return least and most of any rank; for a failed run, from the ranks' last status."""
    ranks = row["per_rank"] or []
    bytes_of = {
        "states": [states_of(rank) for rank in ranks],
        "device_peak": [rank["memory"]["peak_bytes"] for rank in ranks],
        "ended_peak": [end["peak_bytes"] for end in row["ends"]],
    }
    line: dict[str, int | None] = {}
    for name, counts in bytes_of.items():
        known = [count for count in counts if count is not None]
        line[f"{name}_least_bytes"] = min(known, default=None)
        line[f"{name}_most_bytes"] = max(known, default=None)
    return line


def _evaluated(row: Row, prompts: int) -> dict[str, Any]:
    evaluations, samples = row["evaluation"] or [], row["samples"] or []
    first, last = (evaluations[0], evaluations[-1]) if evaluations else (None, None)
    line: dict[str, Any] = {}
    for name, evaluated in (("before", first), ("after", last)):
        line[f"eval_loss_{name}"] = evaluated and evaluated["loss"]
        line[f"eval_perplexity_{name}"] = evaluated and evaluated["perplexity"]
    for part in ("rows", "tokens"):
        line[f"eval_{part}"] = last and last[part]
    for number in range(prompts):
        sample = samples[number] if number < len(samples) else None
        for part in ("prompt", "before", "after"):
            line[f"sample_{number + 1}_{part}"] = sample and sample[part]
    return line


def _peak_parts(row: Row) -> dict[str, int | None]:
    peak = row["peak"]
    parts = [None] * len(PEAK_CATEGORIES) if peak is None else parts_of(peak)
    return {
        f"counted_peak_{name}_bytes": part
        for name, part in zip(PEAK_CATEGORIES, parts, strict=True)
    }


def _sent(row: Row) -> dict[str, Any]:
    traffic = row["traffic"]
    moved = None if traffic is None else moved_by_purpose(traffic)
    return {
        **{
            f"sent_{purpose}_bytes": None if moved is None else moved[purpose]
            for purpose in (*MOVED, OTHER)
        },
        "sent_wire_bytes": traffic and wire_bytes(traffic),
        "beside_the_papers": traffic and difference_in_words(row),
    }
