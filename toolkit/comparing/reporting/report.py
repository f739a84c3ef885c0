"""The report: one table, one sentence above it, and everything it rests on below.

Made from `results.json` alone, so it can be made again on another machine, or by a newer
toolkit. Whatever a run or a user wrote is escaped before it becomes part of a page.
"""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from toolkit.comparing.parity import GATED_STEPS, GATES, broken_sentence
from toolkit.comparing.predicted import MOVED
from toolkit.comparing.presentable import presentable
from toolkit.errors import UsageError
from toolkit.results import (
    RESULTS_FILE,
    Control,
    Memory,
    Prediction,
    Results,
    Row,
    read_results,
    write_text,
)

if TYPE_CHECKING:
    from rich.console import Console

REPORT_FILE: Final = "report.md"

COLUMNS: Final = (
    "strategy",
    "engine",
    "status",
    "tokens/s",
    "step time",
    "peak memory",
    "final loss",
    "gap",
)

GATE_NAMES: Final = ("loss", "grad_norm", "weights", "data")

CATEGORIES: Final = (
    "parameters_bytes",
    "master_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "peak_bytes",
    "host_peak_bytes",
)

NOT_AVAILABLE: Final = "n/a"
BROKEN: Final = "broken"

LATER_FIELDS: Final = {
    name for name, kind in Row.__annotations__.items() if "NotRequired" in str(kind)
}
"""Of a row, what the first toolkits did not write."""

SAME_SPEED: Final = 0.05
"""Runs of one start each that are nearer than this are not told apart."""

REHEARSAL: Final = (
    "This was a rehearsal on the CPU: its speed says nothing about GPUs. "
    "What each rank holds in memory, what it sends to the others, and the losses carry over."
)


class Section(NamedTuple):
    """A part of the report as plain text, before a page is made of it."""

    text: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()


def load_results(folder: Path) -> Results:
    """Read the comparison in `folder`.

    Raises:
        UsageError: there is none, a newer toolkit wrote it, or its rows lack fields.
    """
    results = read_results(folder)
    needed = Row.__annotations__.keys() - LATER_FIELDS
    for row in cast("list[Any]", results["runs"]):
        lacking = needed - cast("dict[str, Any]", row).keys() if isinstance(row, dict) else needed
        if lacking:
            listed = ", ".join(sorted(lacking))
            raise UsageError(f"{folder / RESULTS_FILE} is not complete: a run lacks {listed}.")
    return results


def write_report(folder: Path) -> Path:
    """Render `report.md` from the `results.json` beside it, and return its path."""
    path = folder / REPORT_FILE
    write_text(path, render_markdown(presentable(load_results(folder))))
    return path


def print_report(results: Results, *, console: Console) -> None:
    """Print the verdict, the table and what is missing in it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
        numeric = column in COLUMNS[3:]
        table.add_column(
            heading(column, results),
            justify="right" if numeric else "left",
            no_wrap=column in COLUMNS[:2],
            overflow="fold",
        )
    for row in results["runs"]:
        shown = cells(row, results["control"])
        style = {"ok": "green", "skipped": "yellow"}.get(row["status"], "red")
        if not all(row["gates"].values()):
            style = "red"
        table.add_row(
            *(Text(shown[column], style=style if column == "status" else "") for column in COLUMNS)
        )
    console.print(table)
    for line in (*missing_reasons(results), *broken_lines(results)):
        console.print(Text(line), highlight=False)
    console.print(Text(verdict(results), style="bold"), highlight=False)
    if results.get("rehearsal"):
        console.print(Text(REHEARSAL), highlight=False)


def render_markdown(results: Results) -> str:
    """Return the report as GitHub markdown."""
    name = results.get("name", "comparison")
    parts = [
        f"# Comparison {_escape(name)}",
        *([REHEARSAL] if results.get("rehearsal") else []),
        _escape(verdict(results)),
        _table(
            [heading(column, results) for column in COLUMNS],
            [_listed(cells(row, results["control"]), COLUMNS) for row in results["runs"]],
        ),
        _notes(results),
        "## Agreement with the control",
        _section(agreement(results)),
        "## Memory, the worst rank",
        _section(held(results)),
        "## Traffic of one optimizer step",
        _section(sent(results)),
        "## What was the same in every run",
        _facts(results.get("fixed", {})),
        "## Environment",
        _facts(results["environment"]),
        "## Commands",
        _commands(results),
        *_failures(results),
        *_missing(results),
        "## Limits",
        _bullets(limits(results)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def verdict(results: Results) -> str:
    """Say in one or two sentences what came out, from the data alone."""
    rows = results["runs"]
    good = [row for row in rows if row["status"] == "ok"]
    bad = [row for row in rows if row["status"] not in ("ok", "skipped")]
    broken = [each for row in good for each in row["broken"]]
    if not good:
        text = "No run came to its end" if rows else "No run has ended yet"
        return f"{text}{_names(bad, ': {} failed')}."

    control = results["control"]
    sentences: list[str] = []
    if not results.get("complete", True):
        sentences.append("Not finished: some runs are outstanding.")
    others = [row for row in good if not is_control(row, control)]
    if broken:
        names = dict.fromkeys(f"{each['strategy']}-{each['engine']}" for each in broken)
        sentences.append(
            f"{', '.join(names)} did not train as the control did: {broken_sentence(broken[0])}"
        )
    elif others and control is not None:
        sentences.append(_agreement_sentence(others, control))
    if bad:
        sentences.append(f"{_names(bad, '{} failed')}.")
    skipped = [row for row in rows if row["status"] == "skipped"]
    if skipped:
        sentences.append(f"{_names(skipped, '{} skipped')}.")
    sentences += _speed_sentences(good, rehearsal=results.get("rehearsal", False))
    return " ".join(sentences) or "The control ran to its end; there is nothing to compare it with."


def cells(row: Row, control: Control | None) -> dict[str, str]:
    """Return the table's cells of one run by column; none is empty."""
    step = row["step_seconds"]
    median = None if step is None else step["median"]
    gap = row["loss_gap"]
    return {
        "strategy": row["strategy"],
        "engine": row["engine"],
        "status": status_of(row),
        "tokens/s": _number(row["tokens_per_second"], "{:,.0f}"),
        "step time": _number(median, "{:.3f} s"),
        "peak memory": size(peak_of(row)),
        "final loss": _number(row["final_loss"], "{:.4f}"),
        "gap": (
            "control"
            if is_control(row, control)
            else _number(None if gap is None else gap["max"], "{:.1e}")
        ),
    }


def missing_reasons(results: Results) -> list[str]:
    """Say for every `n/a` of the table why it is one, the same reason once."""
    fields = {
        "tokens/s": "tokens_per_second",
        "step time": "step_seconds",
        "peak memory": "memory",
        "final loss": "final_loss",
        "gap": "loss_gap",
    }
    grouped: dict[str, dict[str, list[str]]] = {}
    for row in results["runs"]:
        shown = cells(row, results["control"])
        for column, field in fields.items():
            if shown[column] != NOT_AVAILABLE:
                continue
            by_run = grouped.setdefault(reason_for(row, field), {})
            by_run.setdefault(run_name(row), []).append(column)
    return [
        f"n/a: {'; '.join(f'{name} ({_columns(columns)})' for name, columns in by_run.items())}: "
        f"{reason}"
        for reason, by_run in grouped.items()
    ]


def broken_lines(results: Results) -> list[str]:
    return [broken_sentence(each) for row in results["runs"] for each in row["broken"]]


def run_name(row: Row) -> str:
    return f"{row['strategy']}-{row['engine']}"


def size(count: int | None) -> str:
    """Return bytes in GiB (2^30), or MiB where that would be nearly nothing."""
    if count is None:
        return NOT_AVAILABLE
    gib = count / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{count / 2**20:.1f} MiB"


def status_of(row: Row) -> str:
    if row["status"] == "ok" and not all(row["gates"].values()):
        return "gate broken"
    return row["status"]


def peak_of(row: Row) -> int | None:
    memory = row["memory"]
    if memory is None:
        return None
    return memory["host_peak_bytes"] if row["rehearsal"] else memory["peak_bytes"]


def heading(column: str, results: Results) -> str:
    if column == "peak memory":
        return "peak host memory" if results.get("rehearsal") else "peak memory"
    if column == "gap":
        return "gap to the control"
    return column


def reason_for(row: Row, field: str) -> str:
    if field == "memory":
        field = next(
            (
                name
                for name in (
                    "memory.host_peak_bytes" if row["rehearsal"] else "memory.peak_bytes",
                    "memory",
                )
                if name in row["not_measured"]
            ),
            field,
        )
    if field in row["not_measured"]:
        return row["not_measured"][field]
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    return "its record gives no reason"


def _columns(columns: Sequence[str]) -> str:
    return "all" if len(columns) == len(COLUMNS) - 3 else ", ".join(columns)


def is_control(row: Row, control: Control | None) -> bool:
    return control is not None and (row["strategy"], row["engine"]) == (
        control["strategy"],
        control["engine"],
    )


def _agreement_sentence(others: Sequence[Row], control: Control) -> str:
    """Say how near the others came, and whether that was judged."""
    unjudged = [row for row in others if not row["gates"]]
    judged = [row for row in others if row["gates"]]
    name = f"{control['strategy']}-{control['engine']}"
    if not judged:
        return f"No run could be judged against {name}."
    gaps = [(row["loss_gap"]["max"], row) for row in judged if row["loss_gap"] is not None]
    largest = max(gaps, key=lambda gap: gap[0], default=None)
    measured = (
        "" if largest is None else f" (largest loss gap {largest[0]:.1e}, {run_name(largest[1])})"
    )
    missing = {gate for row in judged for gate in GATE_NAMES if gate not in row["gates"]}
    which = "every gate held"
    if missing:
        which = (
            f"every gate that was judged held (not judged everywhere: {', '.join(sorted(missing))})"
        )
    text = f"{_count(judged)} trained as {name} did, {which}{measured}."
    return text + (f" {_names(unjudged, '{} not judged')}." if unjudged else "")


def _speed_sentences(good: Sequence[Row], *, rehearsal: bool) -> list[str]:
    sentences: list[str] = []
    speeds = sorted(
        ((row["tokens_per_second"], row) for row in good if row["tokens_per_second"]),
        key=lambda pair: -(pair[0] or 0.0),
    )
    if len(speeds) > 1 and not rehearsal:
        (first, best), (second, after) = speeds[:2]
        assert first is not None
        assert second is not None
        if first <= second * (1 + SAME_SPEED):
            sentences.append(
                f"{run_name(best)} and {run_name(after)} were the fastest, too near to tell apart "
                f"from one run each ({first:,.0f} and {second:,.0f} tokens/s)."
            )
        else:
            sentences.append(f"{run_name(best)} was the fastest ({first:,.0f} tokens/s).")

    held = [(states, row) for row in good if (states := states_of(row["memory"])) is not None]
    if len(held) > 1:
        least, row = min(held, key=lambda pair: pair[0])
        most, other = max(held, key=lambda pair: pair[0])
        if most > least:
            sentences.append(
                f"The states of model and optimizer took least in {run_name(row)} "
                f"({size(least)} a rank) and most in {run_name(other)} ({size(most)})."
            )
    return sentences


def states_of(memory: Memory | None) -> int | None:
    """Parameters, master weights, gradients and optimizer states of the worst rank together."""
    if memory is None:
        return None
    parts = (
        memory["parameters_bytes"],
        memory["master_bytes"],
        memory["gradients_bytes"],
        memory["optimizer_bytes"],
    )
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _notes(results: Results) -> str:
    lines = [_escape(line) for line in missing_reasons(results)]
    control = results["control"]
    if control is not None and control["reason"]:
        lines.insert(
            0,
            _escape(
                f"The control is {control['strategy']}-{control['engine']}: {control['reason']}"
            ),
        )
    return _bullets(lines)


def agreement(results: Results) -> Section:
    """Return the gaps of every run to the control, and whether its gates held."""
    gates = GATES.get(results.get("precision", "no"), GATES["no"])
    header = ["strategy", "engine", "largest loss gap", "mean loss gap", "grad norm gap"]
    header += ["weight gap", *(f"gate: {gate.replace('_', ' ')}" for gate in GATE_NAMES)]
    rows = [
        [
            row["strategy"],
            row["engine"],
            *_gaps(row, results["control"]),
            *(_gate(row, gate, results["control"]) for gate in GATE_NAMES),
        ]
        for row in results["runs"]
    ]
    text = (
        f"Gates over the first {GATED_STEPS} steps: loss within {gates.loss:g} of the control, "
        f"gradient norm before clipping within {gates.grad_norm:g} relative, final weights "
        f"within {gates.weights:g} of the control's own update, the same rows in each step and "
        "no row on two ranks. The gaps are over all steps."
    )
    reasons = [
        f"{run_name(row)}, {field.removeprefix('gates.')}: {reason}"
        for row in results["runs"]
        if row["status"] == "ok" and not is_control(row, results["control"])
        for field, reason in row["not_measured"].items()
        if field.startswith("gates.") or field.endswith("_gap")
    ]
    notes = [f"{run_name(row)}: {note}" for row in results["runs"] for note in row["notes"]]
    return Section(text, header, rows, [*broken_lines(results), *reasons, *notes])


def _gaps(row: Row, control: Control | None) -> list[str]:
    if is_control(row, control):
        return ["control"] * 4
    gap = row["loss_gap"]
    values = (
        None if gap is None else gap["max"],
        None if gap is None else gap["mean"],
        row["grad_norm_gap"],
        row["weight_gap"],
    )
    return [_number(value, "{:.1e}") for value in values]


def _gate(row: Row, gate: str, control: Control | None) -> str:
    if gate in row["gates"]:
        return "held" if row["gates"][gate] else BROKEN
    return "control" if is_control(row, control) else "not judged"


def held(results: Results) -> Section:
    """Return the bytes of every category that the fullest rank holds, beside the planner's."""
    header = ["strategy", "engine", *(name.removesuffix("_bytes") for name in CATEGORIES)]
    rows = [
        cells
        for row in results["runs"]
        if row["status"] == "ok"
        for cells in (
            [row["strategy"], row["engine"], *_sizes(row["memory"])],
            [row["strategy"], "predicted", *_predicted_sizes(row.get("predicted"))],
        )
    ]
    if not rows:
        return Section("No run was measured.")
    reasons = dict.fromkeys(
        f"{name.removeprefix('memory.').removesuffix('_bytes')}: {reason}"
        for row in results["runs"]
        for name, reason in row["not_measured"].items()
        if row["status"] == "ok" and name.startswith("memory")
    )
    text = (
        "Counted from the tensors that a rank holds: gradients at their peak before the step, the "
        "others after it; `master` is an fp32 copy that DeepSpeed keeps. Below each run stands "
        "what `toolkit plan` predicts, with its error where it has one."
    )
    notes = [*reasons, *_not_predicted(results)]
    notes.append("predicted host peak: the planner has no figure for it")
    return Section(text, [name.replace("_", " ") for name in header], rows, notes)


def _not_predicted(results: Results, field: str = "memory") -> list[str]:
    """Say why runs have no prediction of that, the same reason once."""
    reasons: dict[str, list[str]] = {}
    for row in results["runs"]:
        predicted = row.get("predicted")
        if row["status"] != "ok" or (predicted and predicted.get(field) is not None):
            continue
        reason = None if predicted is None else predicted["reason"]
        reasons.setdefault(reason or "its record has no prediction", []).append(run_name(row))
    return [f"predicted, {', '.join(names)}: {reason}" for reason, names in reasons.items()]


def _sizes(memory: Memory | None) -> list[str]:
    if memory is None:
        return [NOT_AVAILABLE] * len(CATEGORIES)
    return [size(memory.get(name)) for name in CATEGORIES]


def sent(results: Results) -> Section:
    """Return what a rank asked its collectives to move, beside the planner's and the papers'."""
    rows: list[list[str]] = []
    for row in results["runs"]:
        traffic = row.get("traffic")
        if row["status"] != "ok" or traffic is None:
            continue
        predicted = row.get("predicted")
        error = None if predicted is None else predicted["errors"].get("traffic_bytes")
        moved = Counter[str]()
        for one in traffic["collectives"]:
            known = one["purpose"] in MOVED
            moved[one["purpose"] if known else "other"] += one["payload_bytes"]
        papers = traffic["textbook_elements"]
        rows.append(
            [
                row["strategy"],
                row["engine"],
                *(size(moved[purpose]) for purpose in (*MOVED, "other")),
                NOT_AVAILABLE if error is None else f"{error:+.2%}" if error else "equal",
                f"{traffic['sent_elements'] / papers:.2f}" if papers else "nothing to send",
            ]
        )
    if not rows:
        return Section("No run took a second step on ragged rows, in which it is counted.")
    header = ["strategy", "engine", *MOVED, "other", "planner's error", "times the papers'"]
    text = (
        "Payload of the collectives in the step after the first, as the calls name it: the worst "
        "rank. `other` are norms, counts, buffers and logged losses. The last column sets the "
        "elements sent against the papers' 2 psi (DDP, ZeRO-1/2) and 3 psi (ZeRO-3, FSDP) for a "
        "step of one micro-batch: DeepSpeed all-reduces where ZeRO's paper reduce-scatters, and "
        "ZeRO-2, ZeRO-3 and FSDP send again for each micro-batch."
    )
    notes = [
        f"{run_name(row)}: {reason_for(row, 'traffic')}"
        for row in results["runs"]
        if row["status"] == "ok" and row.get("traffic") is None
    ]
    return Section(text, header, rows, [*notes, *_not_predicted(results, "traffic_bytes")])


def _predicted_sizes(predicted: Prediction | None) -> list[str]:
    """The planner's word on each category; of the peak, both ends."""
    if predicted is None or predicted["memory"] is None:
        return [NOT_AVAILABLE] * len(CATEGORIES)
    cells: list[str] = []
    for name in CATEGORIES:
        error = predicted["errors"].get(name)
        if name == "peak_bytes" and predicted["peak_bytes"] is not None:
            low, high = predicted["peak_bytes"]["low"], predicted["peak_bytes"]["high"]
            shown = f"{size(low)} to {size(high)}" if error is not None else NOT_AVAILABLE
        else:
            shown = size(predicted["memory"].get(name))
        cells.append(f"{shown} ({error:+.2%})" if error else shown)
    return cells


def facts(recorded: dict[str, Any]) -> list[tuple[str, str]]:
    """Return names and values as they are shown."""
    return [
        (
            name.removesuffix("_bytes").replace("_", " "),
            size(value) if name.endswith("_bytes") and isinstance(value, int) else flat(value),
        )
        for name, value in recorded.items()
    ]


def _facts(recorded: dict[str, Any]) -> str:
    lines = [f"{_escape(name)}: {_escape(shown)}" for name, shown in facts(recorded)]
    return _bullets(lines) or "Nothing was recorded."


def flat(value: Any) -> str:
    """Return a recorded value in one line, whatever it holds."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return ", ".join(f"{name} {flat(item)}" for name, item in items) or "none"
    if isinstance(value, list):
        return "; ".join(map(flat, cast("list[Any]", value))) or "none"
    return "none" if value is None else str(value)


def _commands(results: Results) -> str:
    lines = [row["command"] for row in results["runs"] if row["command"] is not None]
    return _fenced("\n".join(lines), language="sh") if lines else "No run was started."


def _failures(results: Results) -> list[str]:
    parts: list[str] = []
    for row in results["runs"]:
        if row["status"] in ("ok", "skipped"):
            continue
        text = [f"### {_escape(run_name(row))}: {row['status']}", _escape(row["reason"] or "")]
        if row["fix"]:
            text.append(f"What helps: {_escape(row['fix'])}")
        if row["status"] == "refused" and row["attestation"]:
            text.append(_section(mismatches(row["attestation"])))
        if row["tail"]:
            text.append(_fenced("\n".join(row["tail"])))
        if row["folder"]:
            text.append(f"The whole log: `{row['folder']}/stdout.log`")
        parts += filter(None, text)
    return ["## Failures", *parts] if parts else []


def mismatches(attestation: dict[str, Any]) -> Section:
    """Return what was asked beside what engaged, where they differ."""
    found = cast("list[dict[str, Any]]", attestation.get("mismatches") or [])
    header = ["what", "asked", "engaged"]
    return Section("", header, [[flat(each.get(name)) for name in header] for each in found])


def not_measured(results: Results) -> list[str]:
    """Name what the sections on agreement and memory have not named already."""
    return [
        f"{run_name(row)}, {field}: {reason}"
        for row in results["runs"]
        if row["status"] == "ok"
        for field, reason in row["not_measured"].items()
        if not field.startswith(("gates.", "memory")) and not field.endswith("_gap")
    ]


def _missing(results: Results) -> list[str]:
    lines = not_measured(results)
    return ["## Not measured", _bullets([_escape(line) for line in lines])] if lines else []


def limits(results: Results) -> list[str]:
    """Return what the numbers do not say."""
    lines = [
        f"One run each: differences in speed under {SAME_SPEED:.0%} are taken for none; "
        "that figure was chosen, not measured.",
        "Tokens/s is read from packed rows after warm-up, parity from ragged rows before them.",
    ]
    if results.get("rehearsal"):
        lines.append(
            "On a CPU the host's peak holds libraries, activations and the states together; it is "
            "not what a GPU would need."
        )
    return lines


def _count(rows: Sequence[Row]) -> str:
    return "1 other run" if len(rows) == 1 else f"{len(rows)} other runs"


def _names(rows: Sequence[Row], text: str) -> str:
    return text.format(", ".join(map(run_name, rows))) if rows else ""


def _number(value: float | None, form: str) -> str:
    if value is None:
        return NOT_AVAILABLE
    return form.format(value) if math.isfinite(value) else str(value)


def _listed(shown: dict[str, str], columns: Iterable[str]) -> list[str]:
    return [shown[column] for column in columns]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [header, ["---"] * len(header), *([_cell(each) for each in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return f"**{text}**" if text == BROKEN else _escape(text) or NOT_AVAILABLE


def _section(section: Section) -> str:
    parts = (
        section.text,
        _table(section.header, section.rows),
        _bullets([_escape(note) for note in section.notes]),
    )
    return "\n\n".join(filter(None, parts))


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


SPECIAL: Final = re.compile(r"([\\`*\[\]|~#])")


def _escape(text: str) -> str:
    """Return `text` as words on one line, whatever is in it."""
    line = " ".join(_printable(text).split())
    return SPECIAL.sub(r"\\\1", html.escape(line, quote=False))


def _printable(text: str) -> str:
    without_colour = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", without_colour)


def _fenced(text: str, *, language: str = "text") -> str:
    """Return `text` in a fence that nothing inside it can close."""
    text = _printable(text)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
