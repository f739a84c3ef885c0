"""A plan in the terminal: the table, the stacked bars, and each formula with its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from toolkit.jobs.terms import CATEGORIES, GIB, Category, Interval, Phase, Term
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.estimate import MemoryEstimate
from toolkit.planning.plan import Plan, PlanRow
from toolkit.planning.speed.traffic import collectives
from toolkit.planning.verdict import Verdict
from toolkit.strategies import SHORT_DTYPES
from toolkit.tables.grid import Section
from toolkit.tables.terminal import made_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from toolkit.planning.remedies import Remedy

BAR_WIDTH = 60
WIDEST = 1000

LETTERS: dict[Category, tuple[str, str, str]] = {
    "parameters": ("P", "blue", "#4477aa"),
    "master": ("M", "cyan", "#66ccee"),
    "gradients": ("G", "green", "#228833"),
    "optimizer": ("O", "yellow", "#ccbb44"),
    "adapters": ("R", "bright_green", "#99ddaa"),
    "activations": ("A", "magenta", "#aa3377"),
    "logits": ("L", "bright_magenta", "#ee99bb"),
    "gathered": ("U", "bright_blue", "#88aadd"),
    "buckets": ("B", "bright_cyan", "#99ccdd"),
    "temporaries": ("T", "bright_yellow", "#eecc88"),
    "context": ("C", "white", "#bbbbbb"),
    "allocator": (".", "bright_black", "#dddddd"),
}
"""The letter that fills a category's part of a bar, so that it reads without colour too; its colour
in a terminal, and in a figure: of Paul Tol's bright scheme, which is safe for the colour-blind."""

PEAKS: dict[Phase, str] = {
    "loss": "when the loss is taken",
    "head": "while the head's gradient appears",
    "backward": "while gradients appear",
    "step": "while the optimizer steps",
}


def show_plan(plan: Plan, console: Console) -> None:
    """Print a plan: a table of its strategies, a bar for each, and the details of a single one."""
    section = plan_section(plan)
    console.print(section.text, highlight=False, markup=False)
    widths = [max(map(len, column)) for column in zip(section.header, *section.rows, strict=True)]
    table = made_table(section, range(len(widths)), widths=widths)
    # A terminal that is too narrow wraps lines; cut numbers would say something else.
    wide = console.options.update(max_width=WIDEST)
    console_width = console.width
    console.width = max(console_width, console.measure(table, options=wide).maximum)
    console.print(table)
    console.width = console_width
    if meanings := meanings_of(section.header):
        console.print(meanings, highlight=False, soft_wrap=True)
    for bar in bars(plan):
        console.print(bar, no_wrap=True, highlight=False)
    console.print(_legend(plan), highlight=False)
    if len(plan.rows) == 1:
        show_row(plan, plan.rows[0], console)
    for note in section.notes:
        console.print(note, highlight=False, markup=False)


def show_row(plan: Plan, row: PlanRow, console: Console) -> None:
    """Print the details of one strategy: limits, remedies, time and money."""
    write = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    if row.verdict is not None:
        write(verdict_sentence(row.verdict))
        conditional = row.verdict.answer == "fits with RAM"
        sure = "With that RAM, for sure" if conditional else "For sure"
        write(
            f"{sure} fits a batch of up to {row.largest_batch} x {row.job.sequence:,} tokens, "
            f"or of {row.job.batch} x up to {row.longest_sequence:,}."
            if row.largest_batch or row.longest_sequence
            else "For sure fits no batch at all."
        )
    for remedy in row.remedies:
        write(f"  {remedy_sentence(remedy)}")
    if row.together is not None:
        write(f"Fits with: {remedy_sentence(row.together)}")
    elif row.remedies:
        write("None of these makes it fit, alone or all together.")
    sent = sum(collective.wire_bytes for collective in collectives(row.job))
    if sent:
        sender = "The server" if row.job.backend.has_server else "Each GPU"
        write(f"{sender} sends {sent / GIB:.2f} GiB a step.")
    if row.speed is None:
        return
    write(
        f"{span(row.speed.step_seconds)} s a step, MFU {row.speed.mfu.low:.0%} to "
        f"{row.speed.mfu.high:.0%} ({row.speed.convention})."
    )
    if cost := plan.cost(row):
        price = "; name a price (--dollars-per-hour) for the cost"
        if cost.dollars is not None:
            price = f" and {span(cost.dollars)} dollars"
        write(f"{plan.tokens:,} tokens take {span(cost.hours)} hours{price}.")


def verdict_sentence(verdict: Verdict) -> str:
    """Return whether it fits, and by how much."""
    expected, worst = (_short(end / GIB) for end in (verdict.needed.low, verdict.needed.high))
    sentence = (
        f"{verdict.words}: a GPU is expected to need {expected} GiB, and {worst} at worst, of "
        f"{verdict.usable_bytes / GIB:.2f} usable: {_spare(verdict.margin_bytes)} at worst."
    )
    if verdict.host_needed.high > 0:
        sentence += f" Each node needs {gib_span(verdict.host_needed)} GiB of RAM"
        if verdict.host_bytes is not None and verdict.host_margin_bytes is not None:
            sentence += f" of {verdict.host_bytes / GIB:.0f}, {_spare(verdict.host_margin_bytes)}"
        sentence += "."
    return sentence


def _spare(margin: float) -> str:
    return f"{abs(margin) / GIB:.2f} GiB {'to spare' if margin >= 0 else 'short'}"


def remedy_sentence(remedy: Remedy) -> str:
    needed = gib_span(remedy.verdict.needed)
    return f"{remedy.name}: {remedy.verdict.words}, {needed} GiB. Costs: {remedy.cost}."


def explain(plan: Plan, console: Console) -> None:
    """Print every term of every strategy: its formula, its inputs and its value."""
    for row in plan.rows:
        console.rule(row.strategy.name)
        console.print(f"peak: {PEAKS[row.memory.peak_phase]}", highlight=False)
        write = partial(console.print, highlight=False, soft_wrap=True, markup=False)
        for term in row.memory.terms:
            write(_explained(term, row.memory.peak_phase))
        for line in _beside_the_course(row.job):
            write(line)
        for collective in collectives(row.job):
            payload, wire = collective.payload_bytes / GIB, collective.wire_bytes / GIB
            name = f"{collective.kind} of {collective.purpose}"
            formula = collective.formula + _inputs(collective.inputs)
            write(f"{name}: {payload:.3f} GiB a step, {wire:.3f} sent = {formula}")
        if row.speed is not None:
            for summand in row.speed.terms:
                result = f"{summand.name}: {span(summand.seconds)} s = {summand.formula}"
                write(result + _inputs(summand.inputs))


def _beside_the_course(job: PlannedJob) -> Iterator[str]:
    """Yield the formula that courses teach, the bytes that are held, and their differences."""
    if job.method != "full" or job.optimizer not in ("adamw", "adamw_fused"):
        return  # courses teach full training with Adam
    from toolkit.planning.memory.formulas import compare_with_formula  # --explain alone needs it

    comparison = compare_with_formula(job)
    yield (
        f"model states by the course's formula: {comparison.course / GIB:.3f} GiB = "
        f"{comparison.formula}; in fact {comparison.implementation / GIB:.3f} GiB"
    )
    for name, size in comparison.differences.items():
        yield f"  {size / GIB:+.3f} GiB: {name}"


def bars(plan: Plan) -> Iterator[Text]:
    """Yield one stacked bar a strategy, all to one scale, with the GPU's limit marked."""
    from rich.text import Text

    limit = None if plan.gpu is None else plan.gpu.memory_bytes
    longest = max((row.memory.total.high for row in plan.rows), default=1.0)
    # What is far beyond the limit would press all else to nothing.
    scale = max(longest, limit or 0) if limit is None else min(max(longest, limit), 4 * limit)
    width = max(len(row.strategy.name) for row in plan.rows) if plan.rows else 0
    for row in plan.rows:
        bar = _bar(row, scale)
        if limit is not None:
            place = min(BAR_WIDTH, round(limit / scale * BAR_WIDTH))
            bar = bar[:place] + Text("|", style="bold red") + bar[place:]
        yield Text(f"{row.strategy.name:<{width}} ") + bar


def _bar(row: PlanRow, scale: float) -> Text:
    from rich.text import Text

    filled = Text()
    drawn, upto = 0, 0.0
    parts = row.memory.by_category()
    for category in CATEGORIES:
        value = parts.get(category)
        if value is None:
            continue
        upto += value.high
        cells = min(BAR_WIDTH, round(upto / scale * BAR_WIDTH)) - drawn
        letter, style, _ = LETTERS[category]
        filled.append(letter * cells, style=style)
        drawn += cells
    if upto > scale * (1 + 1e-9):
        filled.right_crop(1)
        filled.append(">")
    return filled + Text(" " * (BAR_WIDTH - len(filled)))


def _legend(plan: Plan) -> Text:
    from rich.text import Text

    used = {name for row in plan.rows for name, v in row.memory.by_category().items() if v.high}
    legend = Text()
    for category in CATEGORIES:
        if category in used:
            letter, style, _ = LETTERS[category]
            legend.append(f"{letter} ", style=style)
            legend.append(f"{category}  ")
    if plan.gpu is not None:
        legend.append("| ", style="bold red")
        legend.append(f"{plan.gpu.name}, {plan.gpu.memory_bytes / GIB:.2f} GiB usable")
    return legend


def heading(plan: Plan) -> str:
    """Return the model and the options that all rows share."""
    model, job = plan.model, plan.rows[0].job if plan.rows else None
    heading = f"{model.name}: {model.parameters:,} parameters"
    if model.active_parameters != model.parameters:
        heading += f", {model.active_parameters:,} active"
    if job is not None:
        where = f" on {plan.gpu.name}" if plan.gpu is not None else ""
        pure = "pure " if job.precision == "no" and job.compute_size == 2 else ""
        heading += (
            f"; {job.method}, {pure}{SHORT_DTYPES[job.computes_in]}, "
            f"{job.optimizer}, batch {job.batch} x {job.sequence:,} tokens"
            f"{f' x {job.accumulation} accumulated' if job.accumulation > 1 else ''}"
            f"{checkpointing_words(job)}{where}"
        )
    return heading


def checkpointing_words(job: PlannedJob) -> str:
    """Return the job's checkpointing as a clause, empty without any."""
    if job.checkpointing == "none":
        return ""
    kind = "" if job.checkpointing == "full" else f"{job.checkpointing.replace('_', ' ')} "
    return f", {kind}checkpointing"


def plan_section(plan: Plan) -> Section:
    """Return the table of a plan, with what its strategies share above it and notes below."""
    rows = [_cells(plan, row) for row in plan.rows]
    # A column that says nothing of any row takes the room of those that do.
    header = [name for name in _HEADERS if any(name in cells for cells in rows)]
    notes = [f"{name} is left out: {reason}" for name, reason in plan.left_out.items()]
    notes += [f"note: {note}" for note in plan.all_notes]
    if plan.gpu is None:
        notes.append("Name a GPU (--gpu L4) for verdict, speed and cost.")
    lines = [[cells.get(name, "none") for name in header] for cells in rows]
    words = ("mesh", "verdict")
    return Section(heading(plan), header, lines, notes, title=plan.model.name, words=words)


def meanings_of(header: Sequence[str]) -> str:
    """Explain the columns whose headings are too short; empty where there are none."""
    return "; ".join(f"{name}: {text}" for name, text in _MEANINGS.items() if name in header)


_HEADERS = (
    *("strategy", "GPUs", "mesh", "bubble", "allocated", "expected", "worst", "verdict", "margin"),
    *("rows", "tokens/s", "RAM GiB", "NVMe GiB", "hours", "dollars"),
)

_MEANINGS = {
    "mesh": "the ranks that share one model, and the groups beside them",
    "bubble": "share of slots in which a pipeline's ranks wait",
    "allocated": "GiB of tensors on the fullest GPU",
    "expected": "with the allocator's gaps, CUDA and NCCL, at least",
    "worst": "the same, at most",
    "margin": "GiB left in the worst case, of the GPU or of RAM, the smaller",
    "rows": "the largest micro-batch that fits for sure",
    "RAM GiB": "needed on each node",
    "NVMe GiB": "needed on each node",
}
"""Explanations of columns whose headings are too short, printed below a table that has them."""


def _cells(plan: Plan, row: PlanRow) -> dict[str, str]:
    memory, verdict, speed = row.memory, row.verdict, row.speed
    cells = {"strategy": row.strategy.name, "GPUs": str(row.job.gpus)}
    if any(other.job.backend.splits_model for other in plan.rows):
        cells["mesh"] = row.strategy.mesh(row.job.gpus)
    if (share := row.job.backend.waiting_share(row.job)) is not None:
        cells["bubble"] = f"{share:.0%}"
    figures = (_short(size / GIB) for size in figures_of(memory))
    cells |= dict(zip(("allocated", "expected", "worst"), figures, strict=True))
    if memory.host_bytes.high:
        cells["RAM GiB"] = gib_span(memory.host_bytes)
    if memory.nvme_bytes.high:
        cells["NVMe GiB"] = gib_span(memory.nvme_bytes)
    if verdict is not None:
        cells["verdict"] = verdict.answer
        cells["margin"] = _short(verdict.worst_margin_bytes / GIB, signed=True)
        cells["rows"] = str(row.largest_batch)
    if speed is not None:
        cells["tokens/s"] = span(speed.tokens_per_second)
    if cost := plan.cost(row):
        cells["hours"] = span(cost.hours)
        if cost.dollars is not None:
            cells["dollars"] = span(cost.dollars)
    return cells


def _explained(term: Term, peak: str) -> str:
    where = "" if term.place == "gpu" else f" [{term.place}]"
    when = "" if peak in term.phases else f" (not at the peak: {', '.join(term.phases)})"
    size = gib_span(term.bytes, digits=3)
    formula = f"{term.formula}{_inputs(term.inputs)}{when}"
    return f"{term.category}: {term.name}{where}: {size} GiB = {formula}"


def _inputs(inputs: Mapping[str, float | str | Interval]) -> str:
    if not inputs:
        return ""
    return "  with " + ", ".join(f"{key} = {_number(value)}" for key, value in inputs.items())


def _number(value: object) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def figures_of(memory: MemoryEstimate) -> tuple[float, float, float]:
    """Return the three figures of an estimate in bytes: allocated, expected, worst."""
    return memory.allocated.middle, memory.expected, memory.worst


def gib_span(value: Interval, *, digits: int | None = None) -> str:
    """Return GiB, from the least to the most; one number where they are the same."""
    return span(value.times(1 / GIB), digits=digits)


def span(value: Interval, *, digits: int | None = None) -> str:
    """Return both ends, with so many digits after the point, or as many as an estimate has."""
    if digits is None:
        low, high = _short(value.low), _short(value.high)
    else:
        low, high = f"{value.low:,.{digits}f}", f"{value.high:,.{digits}f}"
    return low if low == high else f"{low}-{high}"


def _short(value: float, *, signed: bool = False) -> str:
    """Return a number with two or three figures: an estimate has no more."""
    size = abs(value)
    sign = "+" if signed else ""
    if size >= 10_000:
        return f"{value / 1000:{sign},.0f}k"
    if size >= 10:
        return f"{value:{sign},.0f}"
    return f"{value:{sign}.1f}" if size >= 1 or not size else f"{value:{sign}.2g}"
