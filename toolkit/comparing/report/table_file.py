"""`results.csv`: one line a run, for a spreadsheet or a data frame.

Numbers are plain, with their unit in the name of the column. What was not measured is empty there,
and the last column says why.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any, Final

from toolkit.comparing.predicted import MOVED, STATES
from toolkit.comparing.report.grid import value_at
from toolkit.comparing.report.row_facts import (
    baseline,
    evaluations,
    is_control,
    ratio,
    run_name,
    states_of,
    status_of,
)
from toolkit.comparing.report.sections.failures import ran_out
from toolkit.comparing.report.sections.memory import PEAK_CATEGORIES, parts_of
from toolkit.comparing.report.sections.scaling import scaled_runs
from toolkit.comparing.report.sections.steps import PHASES
from toolkit.comparing.report.sections.traffic import OTHER, moved_by_purpose, wire_bytes
from toolkit.comparing.report.textbook_volume import difference_in_words
from toolkit.comparing.report.verdict import EVALUATION, GATE_NAMES
from toolkit.records.results import Peak, Results, Row, Sample

TABLE_FILE: Final = "results.csv"

FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%", "＝", "＋", "－", "＠")
"""With these a spreadsheet takes a cell for something to compute."""

SPEED: Final = {
    "supervised_tokens_per_second": "supervised_tokens_per_second",
    "tokens_per_second_least": "spread.least",
    "tokens_per_second_most": "spread.most",
    "tokens_per_second_spread_share": "spread.share",
    "step_median_seconds": "step_seconds.median",
    "step_p90_seconds": "step_seconds.p90",
    **{f"{phase}_median_seconds": f"phases.{phase}.median" for phase in PHASES},
    **{f"{phase}_p90_seconds": f"phases.{phase}.p90" for phase in PHASES},
    "start_seconds": "warm_up.start_seconds",
    "build_seconds": "warm_up.build_seconds",
    "cache_seconds": "warm_up.cache_seconds",
    "first_step_seconds": "warm_up.first_step_seconds",
    "compile_seconds": "warm_up.compile_seconds",
    "warm_up_steps": "warm_up.steps",
    "save_seconds": "save_seconds",
    "run_seconds": "seconds",
    "tflops_per_gpu": "compute.tflops_per_gpu",
    "mfu": "compute.mfu",
    "gpu_hours": "cost.gpu_hours",
    "dollars": "cost.dollars",
    "dollars_per_million_tokens": "cost.dollars_per_million_tokens",
}
"""Columns, and where they stand in a row."""

MEMORY: Final = {
    "device_peak_bytes": "memory.peak_bytes",
    "device_peak_reserved_bytes": "memory.peak_reserved_bytes",
    "host_peak_bytes": "memory.host_peak_bytes",
    "host_shared_bytes": "memory.host_shared_bytes",
    "nvme_bytes": "memory.nvme_bytes",
    **{name: f"memory.{name}" for name in STATES},
}

PREDICTED: Final = {
    **{f"predicted_{name}": f"predicted.memory.{name}" for name in STATES},
    "predicted_counted_peak_low_bytes": "predicted.counted_bytes.low",
    "predicted_counted_peak_high_bytes": "predicted.counted_bytes.high",
    "predicted_device_peak_low_bytes": "predicted.peak_bytes.low",
    "predicted_device_peak_high_bytes": "predicted.peak_bytes.high",
    "room_bytes": "predicted.room_bytes",
    "predicted_over_low_bytes": "predicted.over_bytes.low",
    "predicted_over_high_bytes": "predicted.over_bytes.high",
    "predicted_sent_bytes": "predicted.traffic_bytes",
}

AGREEMENT: Final = {
    "final_loss": "final_loss",
    "loss_gap_max": "loss_gap.max",
    "loss_gap_mean": "loss_gap.mean",
    "grad_norm_gap": "grad_norm_gap",
    "weight_gap": "weight_gap",
    "weight_difference": "weight_difference.value",
    "weight_difference_tensor": "weight_difference.tensor",
    "gradient_difference": "gradient_difference.value",
    "gradient_difference_tensor": "gradient_difference.tensor",
    **{f"gate_{gate}": f"gates.{gate}" for gate in (*GATE_NAMES, EVALUATION)},
}


def render_table(results: Results) -> str:
    """Return the runs as CSV with a header."""
    base = baseline(results)
    scaled = {run_name(each.row): each for each in scaled_runs(results)}
    prompts = max((len(row.get("samples") or []) for row in results["runs"]), default=0)
    lines: list[dict[str, Any]] = []
    for row in results["runs"]:
        scale = scaled.get(run_name(row))
        ratios = {
            "speed_times_baseline": ratio(row, base),
            "speed_up": None if scale is None else scale.speed_up,
            "scaling_efficiency": None if scale is None else scale.efficiency,
        }
        lines.append(_line(row, results, prompts, is_base=row is base, ratios=ratios))
    stream = io.StringIO()
    columns = list(lines[0]) if lines else ["strategy", "engine", "status"]
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in line.items()} for line in lines)
    return stream.getvalue()


def csv_cell(value: Any) -> Any:
    """Return a value as a cell: a spreadsheet computes nothing of it, and a line stays a line."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        text = " ".join(value.split())
        return f"'{text}" if text.startswith(FORMULA) else text
    return value


def _line(
    row: Row,
    results: Results,
    prompts: int,
    *,
    is_base: bool,
    ratios: dict[str, float | None],
) -> dict[str, Any]:
    repeats = row.get("repeats")
    return {
        "strategy": row["strategy"],
        "engine": row["engine"],
        "status": status_of(row),
        "run": run_name(row),
        "control": is_control(row, results["control"]),
        "baseline": is_base,
        "rehearsal": row["rehearsal"],
        "num_processes": row["num_processes"],
        "per_device_train_batch_size": row["per_device_train_batch_size"],
        "gradient_accumulation_steps": row["gradient_accumulation_steps"],
        "starts": None if repeats is None else len(repeats),
        "tokens_per_second": row["tokens_per_second"],
        **ratios,
        "noise_share": (results.get("noise") or {}).get("share"),
        **_at(row, SPEED),
        **_at(row, MEMORY),
        "states_bytes": states_of(row["memory"]),
        **_over_ranks(row),
        **_fullest(row),
        **_at(row, PREDICTED),
        **_sent(row),
        **_at(row, AGREEMENT),
        **_evaluated(row, prompts),
        "ranks_out_of_memory": " ".join(
            str(end["rank"]) for end in row.get("ends") or [] if ran_out(end)
        ),
        "reason": row["reason"],
        "fix": row["fix"],
        "not_measured": "; ".join(
            f"{field}: {reason}" for field, reason in row["not_measured"].items()
        ),
    }


def _at(row: Row, columns: dict[str, str]) -> dict[str, Any]:
    return {column: value_at(row, path) for column, path in columns.items()}


def _over_ranks(row: Row) -> dict[str, int | None]:
    """Least and most of any rank: of a run that failed, what the ranks told before they ended."""
    ranks = row["per_rank"] or []
    ends = [end["peak_bytes"] for end in row.get("ends") or []]
    found = {
        "states": [states_of(rank["memory"]) for rank in ranks],
        "device_peak": [rank["memory"]["peak_bytes"] for rank in ranks],
        "ended_peak": ends,
    }
    choices: tuple[tuple[str, Callable[[list[int]], int]], ...] = (("least", min), ("most", max))
    line: dict[str, int | None] = {}
    for name, counts in found.items():
        known = [count for count in counts if count is not None]
        for word, choose in choices:
            line[f"{name}_{word}_bytes"] = choose(known) if known else None
    return line


def _evaluated(row: Row, prompts: int) -> dict[str, Any]:
    found = evaluations(row)
    first, last = (found[0], found[-1]) if found else (None, None)
    line: dict[str, Any] = {"eval_loss_gap": row.get("eval_loss_gap")}
    for name, found in (("before", first), ("after", last)):
        line[f"eval_loss_{name}"] = None if found is None else found["loss"]
        line[f"eval_perplexity_{name}"] = None if found is None else found["perplexity"]
    for part in ("rows", "tokens"):
        line[f"eval_{part}"] = None if last is None else last[part]
    samples: list[Sample] = row.get("samples") or []
    for number in range(prompts):
        each = samples[number] if number < len(samples) else None
        for part in ("prompt", "before", "after"):
            line[f"sample_{number + 1}_{part}"] = None if each is None else each[part]
    return line


def _fullest(row: Row) -> dict[str, Any]:
    peak: Peak | None = row.get("peak")
    parts = [None] * len(PEAK_CATEGORIES) if peak is None else parts_of(peak)
    return {
        "counted_peak_bytes": None if peak is None else peak["total_bytes"],
        "counted_peak_phase": None if peak is None else peak["phase"],
        **{
            f"counted_peak_{name}_bytes": part
            for name, part in zip(PEAK_CATEGORIES, parts, strict=True)
        },
    }


def _sent(row: Row) -> dict[str, Any]:
    traffic = row.get("traffic")
    moved = None if traffic is None else moved_by_purpose(traffic)
    return {
        **{
            f"sent_{purpose}_bytes": None if moved is None else moved[purpose]
            for purpose in (*MOVED, OTHER)
        },
        "sent_wire_bytes": None if traffic is None else wire_bytes(traffic),
        "beside_the_papers": None if traffic is None else difference_in_words(row),
    }
