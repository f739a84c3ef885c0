"""The reasons of a recommendation, in sentences: what fits, what does not, and what would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from toolkit.jobs.options import Goal
from toolkit.jobs.terms import GIB
from toolkit.planning.job import PlannedJob
from toolkit.planning.levers import unpacked_share
from toolkit.planning.remedies import LARGEST_CLUSTER, Remedy
from toolkit.planning.search import LONG_ROW, ORDER, SPLIT, SPLIT_ROWS, Candidate, Search, Training
from toolkit.planning.speed.traffic import cost_of_sync
from toolkit.strategies import STRATEGIES


def why_nothing_fits(closest: Candidate) -> str:
    """Return what misses the least, and by how much."""
    job = closest.job
    return (
        f"Nothing fits for sure. {job.strategy.name}, {closest.training.name}, "
        f"batch {job.batch}{_with_levers(closest)} misses the least: "
        f"{-closest.verdict.worst_margin_bytes / GIB:.1f} GiB "
        f"{'of RAM ' if closest.verdict.host_short else ''}short at the upper end."
    )


def of_bounds(choice: Candidate, most_hours: float, tokens: int | None) -> str:
    """Return what the hours that are allowed are enough for."""
    rate = choice.speed.tokens_per_second
    few, many = (f"{end * most_hours * 3600 / 1e6:,.3g}" for end in (rate.low, rate.high))
    enough = f"{most_hours:,.3g} hours are enough for {few} to {many} million tokens"
    if tokens is None:
        return f"{enough[:1].upper()}{enough[1:]} (--tokens says how many there are)."
    hours = (f"{tokens / end / 3600:,.3g}" for end in (rate.high, rate.low))
    return f"{tokens:,} tokens take {' to '.join(hours)} hours, and {enough}."


def reasons_for(
    choice: Candidate, ranked: Sequence[Candidate], looked_at: Sequence[Candidate], goal: Goal
) -> Iterator[str]:
    """Yield why the choice was made: what was passed over, and which levers it needs."""
    passed_over = dict.fromkeys(candidate.training for candidate in looked_at)
    for training in passed_over:
        if training != choice.training:
            yield from _passed_over(training, looked_at)
    slower = {candidate.job.strategy.name: candidate for candidate in ranked[1:]}
    leanest = _leanest_by_strategy(choice.training, looked_at)
    for name in ORDER[: ORDER.index(choice.job.strategy.name)]:
        if name in SPLIT and not choice.job.backend.splits_model:
            continue  # `of_splits` has them
        if name in leanest and not leanest[name].fits:
            yield f"{name} {_short(leanest[name])}."
        elif name in slower and goal == "speed":
            how = _with_levers(slower[name])
            share = slower[name].tokens_per_second / choice.tokens_per_second
            yield f"{name} fits{how}, at about {share:.0%} of the choice's rate by the estimate."
    yield _why(choice, ranked, goal)
    gpu = choice.gpu
    if choice.job.gpus > choice.job.nodes and gpu.nvlink_bandwidth is None:
        yield (
            f"{gpu.name} is planned without NVLink: what GPUs send each other crosses PCIe "
            f"({gpu.pcie_bandwidth / 1e9:.0f} GB/s), for which ZeRO-3 and FSDP pay the most."
        )
    yield from _of_levers(choice, goal)


def of_splits(
    search: Search, choice: Candidate | None, looked_at: Sequence[Candidate]
) -> Iterator[str]:
    """Yield why no strategy that splits the model was chosen, or why no other could be."""
    gpus = search.base.job.gpus
    if search.global_rows % gpus:
        yield (
            f"A global batch of {search.global_rows} rows can't be dealt out to {gpus} GPUs, so "
            "only strategies whose GPUs share rows were looked at. A multiple of "
            f"{gpus} opens the others."
        )
    if choice is None or gpus == 1 or choice.job.backend.splits_model:
        return
    names: dict[str, list[str]] = {}  # what became of each, of several at once where it is the same
    for name in SPLIT:
        names.setdefault(_of_split(name, search, choice, looked_at), []).append(name)
    clauses = [f"{', '.join(names[clause])} {clause}" for clause in names if clause]
    yield (
        "Of the strategies that split the model over GPUs, "
        f"{'; '.join(clauses)}; layer_split lets one GPU work at a time."
    )


def _of_split(name: str, search: Search, choice: Candidate, looked_at: Sequence[Candidate]) -> str:
    """Return what became of a strategy that splits the model, as a clause; empty: no such mesh."""
    if choice.job.method != "full":
        return "can train whole models only"
    tried = [c for c in looked_at if c.job.strategy.name == name and c.training == choice.training]
    fitting = [candidate for candidate in tried if candidate.fits]
    if fitting:
        best = max(fitting, key=lambda candidate: candidate.tokens_per_second)
        share = best.tokens_per_second / choice.tokens_per_second
        mesh = best.job.strategy.mesh(best.job.gpus)
        return f"({mesh}) would train at about {share:.0%} of the choice's rate"
    if tried:
        leanest = max(tried, key=lambda candidate: candidate.verdict.worst_margin_bytes)
        return _short(leanest)
    meshes = search.in_sizes(STRATEGIES[name])
    problem = next(filter(None, map(search.problem, meshes)), "")
    return f"can't be used ({problem.rstrip('.')})" if problem else ""


def _of_levers(choice: Candidate, goal: Goal) -> Iterator[str]:
    job = choice.job
    if job.checkpointing == "full":
        yield (
            "Activation checkpointing is on: without it less fits, or too few rows at once."
            if goal == "speed"
            else "Activation checkpointing is on, which saves the most memory of all."
        )
    if job.sync_each_batch:
        yield (
            "Gradients are synchronised at every micro-batch (--sync_each_batch), so that no GPU "
            f"holds them whole in between. The cost: {cost_of_sync(job)}."
        )
    if job.chunked_loss:
        yield "The chunked loss is on: the logits of a whole micro-batch are never held."
    readers = f"{job.gpus} GPU{'s' if job.gpus > 1 else ''}"
    if job.backend.splits_model or job.backend.splits_rows:
        groups = job.readers
        readers = f"{groups} group{'s' if groups > 1 else ''} of {job.gpus // groups} GPUs"
    yield (
        f"Batch {job.batch} x {readers} x {job.accumulation} "
        f"accumulated keeps the global batch of {job.batch * job.readers * job.accumulation}."
    )
    of_rows = f"Memory and tokens/s are those of rows of {job.sequence:,} tokens."
    if not job.backend.splits_rows:  # nothing would keep the texts of a row apart
        of_rows += " Where your texts are shorter, --packing best_fit fills the rows with them."
    yield of_rows
    if job.method == "full":
        return
    yield (
        "Adapters are another training than the whole model: compare their quality too. They "
        "take a higher learning rate, about ten times (LoRA Without Regret, 2025)."
    )
    place = "but the head" if job.lora_targets == "all-linear" else "of attention"
    experts = unpacked_share(job.model)
    without = f" Its fused experts, {experts:.0%} of the weights beside embeddings and head, are "
    without += "no linear layers and get none."
    yield (
        f"toolkit.train --method {job.method} --lora_r {job.lora_rank} trains them, on every "
        f"linear layer {place}.{without if experts else ''}"
    )


def on_one_gpu(base: Candidate) -> str:
    """Return whether the plain job fits on one GPU, a row at a time."""
    job = base.job.with_(strategy=STRATEGIES["single"], gpus=1, nodes=1, batch=1)
    alone = replace(base, job=job)
    needed = alone.verdict.needed.high / GIB
    usable = alone.room.gpu_bytes / GIB
    answer = "fits" if alone.fits else "does not fit"
    return (
        f"One row at a time, a full fine-tune {answer} on one {alone.gpu.name} as it is: "
        f"up to {needed:.1f} GiB of {usable:.1f}."
    )


def what_it_takes(leanest: Candidate, ways: Sequence[Remedy]) -> Iterator[str]:
    """Yield what would make a training fit that does not, as sentences."""
    name = leanest.training.name
    others = [way for way in ways if way.job.sequence == leanest.job.sequence]
    if others:
        listed = ", or ".join(f"{way.name} ({_condition(way)})" for way in others)
        yield f"{name[:1].upper()}{name[1:]} fits with {listed}."
    elif ways:
        yield (
            f"{name[:1].upper()}{name[1:]} with such rows fits on no GPU of the table, and on no "
            f"number of these up to {LARGEST_CLUSTER:,}."
        )
    for way in ways:
        if way.job.sequence == leanest.job.sequence:
            continue
        yield (
            f"The longest row that fits {name} here is {way.job.sequence:,} tokens, under "
            f"{way.job.strategy.name}{_with_levers(leanest)}."
        )
        job = leanest.job
        if job.sequence >= LONG_ROW and not job.backend.splits_rows:
            yield _why_not_split(job)


def _why_not_split(job: PlannedJob) -> str:
    """Return why GPUs don't share the long rows of a job, or the strategy with which they can."""
    who = "Several GPUs" if job.gpus == 1 else "The GPUs"
    return (
        f"{job.sequence:,} tokens of one row lie on one GPU. {who} can share each row, under "
        f"{' or '.join(SPLIT_ROWS)}."
    )


def _condition(way: Remedy) -> str:
    nodes = f"{way.job.nodes} nodes, " if way.job.nodes > 1 else ""
    name = way.job.strategy.name
    strategy = "" if name in way.name else f"{name}, "
    under = f"{nodes}{strategy}{way.verdict.needed.high / GIB:.1f} GiB a GPU"
    return f"{under}, {way.verdict.words}" if way.verdict.answer == "fits with RAM" else under


def _why(choice: Candidate, ranked: Sequence[Candidate], goal: Goal) -> str:
    name = choice.job.strategy.name
    if goal == "memory":
        return f"{name} needs the least memory of what fits."
    if choice.job.backend.splits_rows:
        return (
            f"Such rows fit where GPUs share them: {name} gives each a piece of every row, and "
            "attention alone sees all."
        )
    if not choice.whole_and_plain:
        return f"{name} is the fastest of what fits, by the estimate, or as fast and simpler."
    sentence = f"The model fits whole, so {name} comes first: sharding adds traffic and waiting."
    ahead = max(ranked, key=lambda candidate: candidate.tokens_per_second)
    gain = ahead.tokens_per_second / choice.tokens_per_second - 1
    if gain > 0:
        sentence += (
            f" By the estimate {ahead.job.strategy.name} is {gain:.0%} ahead, since it steps on a "
            "share and sends 16 bits where DDP sends 32: toolkit compare tells."
        )
    return sentence


def _passed_over(training: Training, looked_at: Sequence[Candidate]) -> Iterator[str]:
    """Yield how much a training misses at best, on the GPUs and with RAM."""
    of_training = [candidate for candidate in looked_at if candidate.training == training]
    offloaded = [c for c in of_training if c.memory.host_bytes.high]
    on_gpus = [candidate for candidate in of_training if candidate not in offloaded]
    if any(candidate.fits for candidate in of_training):
        yield f"{training.name[:1].upper()}{training.name[1:]} fits, and takes longer than may be."
    elif on_gpus:
        best = max(on_gpus, key=lambda candidate: candidate.verdict.worst_margin_bytes)
        name = best.job.strategy.name
        yield f"Without offload, {training.name} comes nearest under {name}, and {_short(best)}."
    short = [candidate for candidate in offloaded if candidate.verdict.host_short]
    if short:
        least = min(short, key=lambda candidate: candidate.verdict.host_needed.high)
        needed, there = least.verdict.host_needed.high / GIB, least.room.host_bytes or 0
        names = " and ".join(dict.fromkeys(c.job.strategy.name for c in short))
        yield (
            f"{names} would need {needed:,.0f} GiB of RAM or more on each node for "
            f"{training.name}, and there are {there / GIB:,.0f}."
        )


def _leanest_by_strategy(
    training: Training, looked_at: Sequence[Candidate]
) -> dict[str, Candidate]:
    of_training = [candidate for candidate in looked_at if candidate.training == training]
    of_training.sort(key=lambda candidate: candidate.verdict.worst_margin_bytes)
    return {candidate.job.strategy.name: candidate for candidate in of_training}


def _short(candidate: Candidate) -> str:
    verdict = candidate.verdict
    missing = f"{-verdict.worst_margin_bytes / GIB:.1f} GiB "
    missing += "of RAM short" if verdict.host_short else "short at the upper end"
    may, spare = "does not fit", ""
    if verdict.answer == "tight":
        may = "may not fit"
        left = (verdict.usable_bytes - verdict.needed.low) / GIB
        spare = "" if verdict.host_short else f"; {left:.1f} GiB to spare as expected"
    return f"{may}: {missing}, batch {candidate.job.batch}{_with_levers(candidate)}{spare}"


def _with_levers(candidate: Candidate) -> str:
    words = lever_words(candidate.job)
    return f" with {' and '.join(words)}" if words else ""


def lever_words(job: PlannedJob) -> list[str]:
    """Return the levers of a job that leave its training as it is, in a few words."""
    used = {
        "checkpointing": job.checkpointing == "full",
        "selective checkpointing": job.checkpointing == "selective",
        "chunked loss": job.chunked_loss,
        "gradients synchronised at every micro-batch": job.sync_each_batch,
    }
    return [word for word, on in used.items() if on]
