"""`results.csv`: one line a run, for a spreadsheet or a data frame.

Numbers are plain, with their unit in the name of the column. What was not measured is empty there,
and the last column says why.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from typing import Any, Final

from toolkit.comparing.page import baseline, ratio
from toolkit.comparing.predicted import MOVED, STATES
from toolkit.comparing.report import GATE_NAMES, is_control, states_of, status_of
from toolkit.results import Results, Row

TABLE_FILE: Final = "results.csv"

FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%")
"""With these a spreadsheet takes a cell for something to compute."""


def render_table(results: Results) -> str:
    """Return the runs as CSV with a header."""
    base = baseline(results)
    lines = [_line(row, results, base) for row in results["runs"]]
    stream = io.StringIO()
    columns = list(lines[0]) if lines else ["strategy", "engine", "status"]
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in line.items()} for line in lines)
    return stream.getvalue()


def _line(row: Row, results: Results, base: Row | None) -> dict[str, Any]:
    memory: dict[str, Any] = dict(row["memory"] or {})
    seconds: dict[str, Any] = dict(row["step_seconds"] or {})
    gap: dict[str, Any] = dict(row["loss_gap"] or {})
    predicted: dict[str, Any] = dict(row.get("predicted") or {})
    expected: dict[str, Any] = predicted.get("memory") or {}
    peak: dict[str, Any] = predicted.get("peak_bytes") or {}
    traffic = row.get("traffic")
    moved = Counter[str]()
    for one in [] if traffic is None else traffic["collectives"]:
        moved[one["purpose"] if one["purpose"] in MOVED else "other"] += one["payload_bytes"]
    return {
        "strategy": row["strategy"],
        "engine": row["engine"],
        "status": status_of(row),
        "control": is_control(row, results["control"]),
        "baseline": row is base,
        "rehearsal": row["rehearsal"],
        "num_processes": row["num_processes"],
        "per_device_train_batch_size": row["per_device_train_batch_size"],
        "gradient_accumulation_steps": row["gradient_accumulation_steps"],
        "tokens_per_second": row["tokens_per_second"],
        "speed_times_baseline": ratio(row, base),
        "step_median_seconds": seconds.get("median"),
        "step_p90_seconds": seconds.get("p90"),
        "run_seconds": row["seconds"],
        "device_peak_bytes": memory.get("peak_bytes"),
        "host_peak_bytes": memory.get("host_peak_bytes"),
        **{name: memory.get(name) for name in STATES},
        "states_bytes": states_of(row["memory"]),
        **{f"predicted_{name}": expected.get(name) for name in STATES},
        "predicted_device_peak_low_bytes": peak.get("low"),
        "predicted_device_peak_high_bytes": peak.get("high"),
        **{
            f"sent_{purpose}_bytes": None if traffic is None else moved[purpose]
            for purpose in (*MOVED, "other")
        },
        "predicted_sent_bytes": predicted.get("traffic_bytes"),
        "final_loss": row["final_loss"],
        "loss_gap_max": gap.get("max"),
        "loss_gap_mean": gap.get("mean"),
        "grad_norm_gap": row["grad_norm_gap"],
        "weight_gap": row["weight_gap"],
        **{f"gate_{gate}": row["gates"].get(gate) for gate in GATE_NAMES},
        "reason": row["reason"],
        "not_measured": "; ".join(
            f"{field}: {reason}" for field, reason in row["not_measured"].items()
        ),
    }


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        text = " ".join(value.split())
        return f"'{text}" if text.startswith(FORMULA) else text
    return value
