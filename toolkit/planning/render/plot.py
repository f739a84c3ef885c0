"""A plan as a figure: memory by strategy with the GPU's limit, and memory by number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from toolkit.configs.accelerate import num_processes_problem, with_groups
from toolkit.errors import UsageError
from toolkit.jobs.terms import CATEGORIES, GIB
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.estimate import estimate_memory
from toolkit.planning.plan import Plan, PlanRow
from toolkit.planning.render.plans import LETTERS, heading
from toolkit.strategies import STRATEGIES

FORMATS = (".svg", ".png")
GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64)


def plot_plan(plan: Plan, file: Path) -> None:
    """Write the figure.

    Raises:
        UsageError: the file's name ends in neither .svg nor .png, or it can't be written.
    """
    if file.suffix.lower() not in FORMATS:
        raise UsageError(f"{file}: a plot is an .svg or a .png. Choose such a name.")
    import matplotlib as untyped
    from matplotlib.figure import Figure

    mpl, figure = cast("Any", untyped), cast("Any", Figure(figsize=(11, 4.8), layout="constrained"))
    # Text stays text, and the same plan gives the same bytes.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "toolkit"}):
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _by_strategy(left, plan)
        _by_gpus(right, plan)
        figure.suptitle(heading(plan), fontsize=10, wrap=True)
        try:
            figure.savefig(
                file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None
            )
        except OSError as error:
            raise UsageError(f"{file} can't be written: {error.strerror}.") from None


def _by_strategy(axes: Any, plan: Plan) -> None:
    names = [row.strategy.name for row in plan.rows]
    parts = [row.memory.by_category() for row in plan.rows]
    bottoms = [0.0] * len(names)
    for category in CATEGORIES:
        heights = [part[category].high / GIB if category in part else 0.0 for part in parts]
        if not any(heights):
            continue
        axes.bar(names, heights, bottom=bottoms, color=LETTERS[category][2], label=category)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    totals = [row.memory.total.times(1 / GIB) for row in plan.rows]
    highs, below = [t.high for t in totals], [t.high - t.low for t in totals]
    # The whisker reaches from the upper end, where the bar ends, down to the lower one.
    whiskers = {"yerr": [below, [0.0] * len(names)], "ecolor": "#333333", "capsize": 4}
    axes.errorbar(names, highs, fmt="none", **whiskers)
    _limit(axes, plan)
    axes.set_ylabel("GiB on the fullest GPU")
    axes.set_title("by strategy", fontsize=10)
    axes.tick_params(axis="x", rotation=30 if len(names) > 4 else 0)
    axes.legend(fontsize=7, ncols=2)


def _by_gpus(axes: Any, plan: Plan) -> None:
    for row in plan.rows:
        jobs = list(_jobs_by_gpus(row))
        if len(jobs) < 2:
            continue
        counts = [job.gpus for job in jobs]
        totals = [estimate_memory(job).total.times(1 / GIB) for job in jobs]
        lows, highs = [total.low for total in totals], [total.high for total in totals]
        (line,) = axes.plot(counts, highs, marker="o", markersize=3, label=row.strategy.name)
        axes.fill_between(counts, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)
    _limit(axes, plan)
    axes.set_xscale("log", base=2)
    axes.set_xticks(GPU_COUNTS, [str(count) for count in GPU_COUNTS])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs")
    axes.set_title("by number of GPUs, the same batch on each", fontsize=10)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


def _jobs_by_gpus(row: PlanRow) -> Iterator[PlannedJob]:
    """Yield the job of a row on each number of GPUs on which its strategy runs."""
    per_node = max(8, row.job.gpus // row.job.nodes)
    for count in GPU_COUNTS:
        nodes = max(1, count // per_node)
        strategy = with_groups(STRATEGIES[row.strategy.name], machines=nodes)
        if num_processes_problem(strategy, count):
            continue
        job = row.job.with_(strategy=strategy, gpus=count, nodes=nodes)
        try:
            job.backend.part(job)
        except UsageError:  # a pipeline with more stages than layers
            continue
        yield job


def _limit(axes: Any, plan: Plan) -> None:
    if plan.gpu is None:
        return
    limit = plan.gpu.memory_bytes / GIB
    axes.axhline(limit, color="#cc3311", linestyle="--", linewidth=1)
    axes.annotate(
        f"{plan.gpu.name}: {limit:.1f} GiB",
        (0.01, limit),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2),
        textcoords="offset points",
        color="#cc3311",
        fontsize=8,
        bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1},
    )
