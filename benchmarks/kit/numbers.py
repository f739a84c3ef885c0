"""Numbers: half precision against fp32, skipped steps, resuming, SIGTERM, too little memory."""

from __future__ import annotations

import math
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from kit.cells import Cell, Machine, Refused, Row, first_gpu, started_anew
from kit.result import table

TITLE = "Numbers"

HALF: Final = ("bf16", "fp16")
LOSS_SCALE: Final = 4096.0
"""Keeps small gradients of fp16 above its smallest number; powers of two are exact."""

STEPS = 8
SAVED = 4
OVERFLOWING: Final = 2.0**32
"""A first loss scale that no gradient in fp16 takes."""

SPOILED: Final = ((4, 512), (8, 512), (8, 1024), (2, 4096), (3, 704))
"""Rows and tokens of them: the shapes of the rows in which NaN were seen, and others."""

LACKING: Final = 1.5
"""How many times the GPU's memory the planner's lower estimate of a job that must fail is."""


def cells(machine: Machine) -> list[Cell]:
    """Return the cells; all of them train on one GPU, or in one process of a smoke run."""
    if machine.smoke:  # cuBLAS has no part in it
        return [cell for cell in _cells() if not cell.environment]
    shown = first_gpu(machine)
    return [replace(cell, environment=cell.environment | shown) for cell in _cells()]


def _cells() -> list[Cell]:
    planned = [
        Cell(
            name=f"{what}, {precision}",
            settings={"kind": kind, "precision": precision},
            seconds=8,
        )
        for what, kind in (("chunked loss", "chunked"), ("packing", "packing"))
        for precision in HALF
    ]
    planned.append(Cell(name="fused optimizer", settings={"kind": "fused"}, seconds=6))
    planned.append(Cell(name="NaN in free memory", settings={"kind": "spoiled"}, seconds=20))
    planned += [
        Cell(name="fp16 against fp32", settings={"kind": "fp16"}, seconds=20),
        Cell(name="steps that fp16 skips", settings={"kind": "skipped"}, seconds=20),
    ]
    planned += [
        Cell(
            name=f"resumed, {precision}, {'deterministic' if exact else 'default'} kernels",
            settings={"kind": "resumed", "precision": precision, "deterministic": exact},
            seconds=40,
            # cuBLAS computes alike with a workspace of a fixed size alone.
            environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if exact else {},
        )
        for exact in (True, False)
        for precision in ("no", "bf16")
    ]
    return [
        *planned,
        Cell(
            name="SIGTERM in a step",
            settings={"kind": "preempted"},
            seconds=60,
            libraries=("datasets",),
        ),
        Cell(
            name="more than the memory",
            settings={"kind": "memory"},
            seconds=60,
            libraries=("datasets", "typer", "rich", "jinja2"),
        ),
    ]


def measure(settings: dict[str, Any], machine: Machine) -> dict[str, Any]:
    match settings["kind"]:
        case "chunked":
            return chunked_loss(settings["precision"], machine)
        case "packing":
            return packing(settings["precision"], machine)
        case "fused":
            return fused_optimizer(machine)
        case "spoiled":
            return nan_in_free_memory(machine)
        case "fp16":
            return fp16_against_fp32(machine)
        case "skipped":
            return skipped_steps(machine)
        case "resumed":
            return resumed(settings["precision"], settings["deterministic"], machine)
        case "preempted":
            return preempted(machine)
        case _:
            return more_than_the_memory(machine)


def chunked_loss(precision: str, machine: Machine) -> dict[str, Any]:
    """Compare loss and gradients of the chunked loss with those of fp32, beside the plain loss."""
    from kit.data import ragged_rows
    from kit.models import build
    from toolkit.training.speed import Speed
    from toolkit.training.speed_arguments import SpeedArguments

    rows = ragged_rows(2, 64 if machine.smoke else 1024)
    model = build("qwen-0.5b", smoke=machine.smoke, layers=8)
    reference = loss_and_gradients(model, [rows], "no")
    plain = loss_and_gradients(model, [rows], precision)
    speed = Speed(SpeedArguments(loss_impl="chunked"))
    speed.apply(model)
    chunked = loss_and_gradients(model, [rows], precision, speed=speed)
    return {"plain": error(plain, reference), "chunked": error(chunked, reference)}


def packing(precision: str, machine: Machine) -> dict[str, Any]:
    """Compare texts that share rows with the same texts a row each, both with fp32."""
    from kit.data import packed_rows, ragged_rows
    from kit.models import build

    tokens = 128 if machine.smoke else 2048
    alone = ragged_rows(6, tokens // 2)
    together = packed_rows(alone, tokens)
    model = build("qwen-0.5b", smoke=machine.smoke, layers=8)
    reference = loss_and_gradients(model, [[row] for row in alone], "no")
    plain = loss_and_gradients(model, [[row] for row in alone], precision)
    packed = loss_and_gradients(model, [[row] for row in together], precision)
    in_fp32 = loss_and_gradients(model, [[row] for row in together], "no")
    return {
        "rows": [len(alone), len(together)],
        "plain": error(plain, reference),
        "packed": error(packed, reference),
        "packed_in_fp32": error(in_fp32, reference),
    }


def loss_and_gradients(
    model: Any, batches: Sequence[list[dict[str, Any]]], precision: str, *, speed: Any = None
) -> tuple[float, list[Any]]:
    """Return the mean loss of a learned token over all batches, and its gradients in fp32."""
    import torch

    from kit.device import device
    from kit.training import PAD
    from toolkit.data.sampling_order import Collator

    dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    torch.backends.cuda.matmul.fp32_precision = "ieee" if precision == "no" else "none"
    scale = LOSS_SCALE if precision == "fp16" else 1.0
    collate = Collator(pad_token_id=PAD)
    collate = collate if speed is None else speed.collating(collate)
    made = [collate(rows) for rows in batches]
    items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in made)
    model.zero_grad(set_to_none=True)
    total = 0.0
    for batch in made:
        inputs = {
            name: value.to(device()) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
            if name != "sample_id"
        }
        with torch.autocast(device().type, dtype=dtype, enabled=precision != "no"):
            loss = model(**inputs, num_items_in_batch=torch.tensor(items, device=device())).loss
        (loss * scale).backward()
        total += float(loss.detach())
    gradients = [parameter.grad.detach() / scale for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return total, gradients


def error(
    measured: tuple[float, list[Any]], reference: tuple[float, list[Any]]
) -> dict[str, float]:
    """Return how far loss (absolute) and gradients (relative, Euclidean) are from a reference."""
    from kit.runs import distance

    nothing = [gradient * 0 for gradient in reference[1]]
    return {
        "loss": abs(measured[0] - reference[0]),
        "gradients": distance(measured[1], reference[1]) / distance(reference[1], nothing),
    }


def fused_optimizer(machine: Machine) -> dict[str, Any]:
    """Compare weights after the same gradients under torch's three AdamWs with those in fp64."""
    import torch

    from kit.device import device
    from kit.runs import distance

    torch.manual_seed(0)
    size = 64 if machine.smoke else 2048
    start = [torch.randn(size, size, device=device()) * 0.02 for _ in range(4)]
    # Half the gradients come out of bf16 computations, as they do in training.
    gradients = [
        [(torch.randn_like(weight) * 1e-3).bfloat16().float() for weight in start]
        for _ in range(STEPS)
    ]

    def stepped(dtype: torch.dtype, **options: bool) -> list[Any]:
        weights = [weight.to(dtype, copy=True).requires_grad_() for weight in start]
        optimizer = torch.optim.AdamW(weights, lr=1e-4, **options)
        for step in gradients:
            for weight, gradient in zip(weights, step, strict=True):
                weight.grad = gradient.to(dtype)
            optimizer.step()
        return [weight.detach() for weight in weights]

    exact = stepped(torch.float64, foreach=False)
    moved = distance(exact, start)
    kinds = {"foreach": {"foreach": True}, "fused": {"fused": True}, "plain": {"foreach": False}}
    return {
        name: distance(stepped(torch.float32, **options), exact) / moved
        for name, options in kinds.items()
    }


def nan_in_free_memory(machine: Machine) -> dict[str, Any]:
    """Fill free memory with NaN before each pass: gradients of which attention kernel show it?

    On an H200 with torch 2.11, gradients of Qwen 2.5 0.5B were NaN in the first step of 8 rows, in
    a process that had trained other models, and were not in a new one.
    """
    import torch

    from kit.data import full_rows
    from kit.models import build
    from kit.speed import KERNELS, allowed

    model = build("qwen-0.5b", smoke=machine.smoke, layers=4)
    found: list[dict[str, Any]] = []
    for kernel in (None, *KERNELS):
        for batch, tokens in ((1, 32), (2, 64)) if machine.smoke else SPOILED:
            rows = full_rows(batch, tokens)
            spoil_free_memory(machine)
            try:
                with allowed("sdpa", kernel, smoke=machine.smoke):
                    _, gradients = loss_and_gradients(model, [rows], "bf16")
            except Refused:
                continue
            spoiled = sum(not bool(torch.isfinite(gradient).all()) for gradient in gradients)
            found.append(
                {"kernel": kernel or "torch's choice", "rows": [batch, tokens], "spoiled": spoiled}
            )
    chosen = sum(one["spoiled"] for one in found if one["kernel"] == "torch's choice")
    problem = f"{chosen} gradients are not finite, with the kernels that toolkit.train allows"
    return {"kernels": found, "problem": problem if chosen else None}


def spoil_free_memory(machine: Machine) -> None:
    """Leave blocks of many sizes full of NaN in the allocator's cache."""
    import torch

    from kit.device import device

    largest_power, times = (18, 1) if machine.smoke else (28, 4)
    sizes = [2**power for power in range(8, largest_power)] * times
    blocks = [torch.full((size,), math.nan, device=device()) for size in sizes]
    del blocks


def trained(
    engine: str, precision: str, machine: Machine, folder: Path, **arguments: Any
) -> dict[str, Any]:
    """Train a model of few layers and return the record."""
    from kit.training import train_with_loop, train_with_trainer

    model = small_model(machine)
    task = small_task(precision, machine, folder, **arguments)
    if engine == "trainer":
        return train_with_trainer(model, task).record
    return train_with_loop(model, task)


def small_model(machine: Machine) -> Any:
    from kit.models import build

    return build("qwen-0.5b", smoke=machine.smoke, layers=2)


def small_task(precision: str, machine: Machine, folder: Path, **arguments: Any) -> Any:
    from kit.data import full_rows
    from kit.training import Task

    batch, tokens = (2, 64) if machine.smoke else (4, 512)
    return Task(
        rows=full_rows(batch * STEPS, tokens),
        steps=STEPS,
        batch=batch,
        folder=folder,
        precision=precision,
        arguments=arguments,
    )


def fp16_against_fp32(machine: Machine) -> dict[str, Any]:
    """Train in fp16 under both engines and in fp32, and hold all against the gates of fp16."""
    from kit.device import clear
    from kit.runs import largest
    from toolkit.comparing.parity.gates import limit_of

    records: dict[str, dict[str, Any]] = {}
    for engine, precision in (("trainer", "no"), ("trainer", "fp16"), ("loop", "fp16")):
        clear()
        with tempfile.TemporaryDirectory() as folder:
            records[f"{engine} {precision}"] = trained(engine, precision, machine, Path(folder))
    of_trainer, of_loop = records["trainer fp16"], records["loop fp16"]
    return {
        "engines": largest(of_trainer["losses"], of_loop["losses"]),
        "fp32": largest(of_trainer["losses"], records["trainer no"]["losses"]),
        "gate": limit_of("loss", "fp16"),
        "skipped_steps": {name: record["skipped_steps"] for name, record in records.items()},
    }


def skipped_steps(machine: Machine) -> dict[str, Any]:
    """Begin with a loss scale that overflows: both engines skip the same steps, and go on."""
    from kit.device import clear

    records: dict[str, dict[str, Any]] = {}
    for engine in ("trainer", "loop"):
        clear()
        with overflowing_scale(), tempfile.TemporaryDirectory() as folder:
            records[engine] = trained(engine, "fp16", machine, Path(folder))
    skipped = [record["skipped_steps"] for record in records.values()]
    alike = skipped[0] == skipped[1] != []
    return {
        "skipped_steps": {name: record["skipped_steps"] for name, record in records.items()},
        "losses": {name: record["losses"] for name, record in records.items()},
        "problem": None if alike else "the engines skipped other steps, or none",
    }


@contextmanager
def overflowing_scale() -> Iterator[None]:
    """Let every loss scaler that accelerate makes begin too high, and fall fast."""
    import torch

    original = torch.amp.GradScaler

    class Overflowing(original):
        def __init__(self, device: str = "cuda", **options: Any) -> None:
            super().__init__(
                device, **options | {"init_scale": OVERFLOWING, "backoff_factor": 2.0**-6}
            )

    torch.amp.GradScaler = Overflowing
    try:
        yield
    finally:
        torch.amp.GradScaler = original


def resumed(precision: str, deterministic: bool, machine: Machine) -> dict[str, Any]:
    """Train twice, and once more from a checkpoint in the middle: are the ends equal, bit for bit?

    Two trainings that differ say that the kernels do, and not the checkpoint.
    """
    import torch

    from kit.device import clear
    from kit.runs import distance, largest
    from kit.training import train_with_trainer

    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    saving = {"save_strategy": "steps", "save_steps": SAVED, "save_total_limit": 3}
    ends: list[tuple[list[float], list[Any]]] = []
    try:
        with tempfile.TemporaryDirectory() as scratch:
            first, second = Path(scratch, "first"), Path(scratch, "second")
            for folder, checkpoint in (
                (first, None),
                (second, None),
                (second, second / f"checkpoint-{SAVED}"),
            ):
                clear()
                if checkpoint is not None:
                    (folder / "record.json").unlink()
                task = small_task(precision, machine, folder, **saving)
                trainer = train_with_trainer(small_model(machine), task, resume_from=checkpoint)
                before = trainer.record["first_step"] - 1
                weights = [parameter.detach().cpu() for parameter in trainer.model.parameters()]
                ends.append((trainer.record["losses"][SAVED - before :], weights))
    finally:
        torch.use_deterministic_algorithms(False)
    (losses, weights), again, after = ends

    def gap(other: tuple[list[float], list[Any]]) -> dict[str, float]:
        return {"loss": largest(losses, other[0]), "weights": distance(weights, other[1])}

    twice, resumed_gap = gap(again), gap(after)
    exact = not any(twice.values())
    return {
        "problem": "two trainings are equal, and the resumed one is not"
        if exact and any(resumed_gap.values())
        else None,
        "trained_twice": twice,
        "resumed": resumed_gap,
        "steps_compared": len(losses),
    }


def preempted(machine: Machine) -> dict[str, Any]:
    """Send a rank SIGTERM within a step, and go on from what it saved."""
    from toolkit.configs import ConfigOptions
    from toolkit.configs.files import write_configs
    from toolkit.launching.launch import launch_command, run
    from toolkit.launching.status import read_statuses
    from toolkit.records.record import read_record
    from toolkit.strategies import get_strategy

    sent: list[int] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        output = folder / "run"
        config = write_configs(
            get_strategy("single"), folder / "config", options=ConfigOptions(num_processes=1)
        )

        def signal_once(step: int) -> None:
            if not sent:
                (rank,) = read_statuses(output / "status")
                os.kill(rank.pid, signal.SIGTERM)
                sent.append(step)

        steps = "20" if machine.smoke else "400"
        flags = ["--output_dir", str(output), "--max_steps", steps, "--save_steps", steps]
        command = launch_command(config.accelerate, ["-m", "toolkit.train", *flags], gpu_ids="all")
        launched = partial(run, folder=output, timeout=300, num_processes=1, loopback=True)
        with started_anew():
            stopped = launched(command, on_step=signal_once)
            saved = max(int(one.name.split("-")[1]) for one in output.glob("checkpoint-*"))
            ended = launched([*command, "--resume_from_checkpoint"])
        record = read_record(output)
        states = [status.state for status in stopped.statuses]
        sound = states == ["preempted"] and ended.status == "ok"
        return {
            "problem": None if sound else f"{states}, then {ended.status}: {ended.reason}",
            "signal_after_step": sent[0],
            "states": states,
            "reason": stopped.reason,
            "saved_step": saved,
            "resumed": ended.status,
            "first_step": record["first_step"],
            "final_loss": record["final_loss"],
        }


def more_than_the_memory(machine: Machine) -> dict[str, Any]:
    """Run `toolkit compare` with a batch that cannot fit, by the planner's lower estimate.

    Without a GPU there is no memory to exceed: the batch is 1, and the run ends well.
    """
    import torch

    from kit.models import build
    from kit.runs import run_compare
    from toolkit.comparing.report.row_facts import planner_word
    from toolkit.data.tokens import load_tokenizer
    from toolkit.training.model import build_model

    batch = 1
    if torch.cuda.is_available():
        batch = too_large_a_batch(torch.cuda.get_device_properties(0).total_memory)
    tokens = 128 if machine.smoke else 2048
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        build("qwen-0.5b", smoke=machine.smoke, dtype="bfloat16").save_pretrained(folder)
        load_tokenizer(build_model()).save_pretrained(folder)
        flags = ["--strategies", "single", "--precision", "bf16", "--num_processes", "1"]
        flags += ["--max_steps", "2", "--throughput_steps", "3"]
        flags += ["--global_batch_size", str(batch), "--gradient_accumulation_steps", "1"]
        flags += ["--", "--model_name_or_path", str(folder)]
        flags += ["--packing", "best_fit", "--max_length", str(tokens)]
        told = run_compare(Path(scratch), flags)
    (only,) = told.pop("runs")
    expected = "oom" if torch.cuda.is_available() else "ok"
    problem = f"the run ended as {only['status']}, and {expected} was expected"
    kept = ("status", "reason", "predicted", "fix")
    return (
        told
        | {name: only[name] for name in kept}
        | {
            "batch": batch,
            "planner": planner_word(only),
            "problem": None if only["status"] == expected else problem,
        }
    )


def too_large_a_batch(memory_bytes: int) -> int:
    """Return a batch whose lowest estimate is more than a GPU has by far."""
    from toolkit.planning.plan import plan

    batch = 8
    while True:
        row = plan(
            "Qwen/Qwen2.5-0.5B", gpus=1, strategies="single", batch=batch, sequence=2048,
            precision="bf16",
        ).row("single")  # fmt: skip
        if row.memory.total.low > LACKING * memory_bytes:
            return batch
        batch += 8


def tables(rows: Sequence[Row]) -> list[str]:
    of_kind: dict[str, list[Row]] = {}
    for row in rows:
        if row["status"] == "ok":
            of_kind.setdefault(row["settings"]["kind"], []).append(row)
    lines: list[str] = []
    for kind, tell in TELLING.items():
        if kind in of_kind:
            lines += [*tell(of_kind[kind]), ""]
    return lines[:-1]


def tell_errors(rows: Sequence[Row]) -> list[str]:
    cells = []
    for row in rows:
        for name, gaps in row["measured"].items():
            if name != "rows":
                cells.append(
                    (row["cell"], name.replace("_", " "), *(f"{gap:.1e}" for gap in gaps.values()))
                )
    what = "Distance from the same computation in fp32: of the loss, and of the gradients, relative"
    return [f"{what}.", "", *table(("cell", "computed", "loss", "gradients"), cells)]


def tell_fused(rows: Sequence[Row]) -> list[str]:
    gaps = ", ".join(f"{name} {gap:.1e}" for name, gap in rows[0]["measured"].items())
    return [
        f"AdamW after {STEPS} steps of the same gradients, distance from fp64 relative to the "
        f"update: {gaps}."
    ]


def tell_spoiled(rows: Sequence[Row]) -> list[str]:
    cells = [
        (one["kernel"], " x ".join(map(str, one["rows"])), one["spoiled"])
        for one in rows[0]["measured"]["kernels"]
    ]
    what = "Gradients that are not finite where free memory is full of NaN, by attention kernel"
    return [f"{what}.", "", *table(("kernel", "rows x tokens", "gradients"), cells)]


def tell_fp16(rows: Sequence[Row]) -> list[str]:
    it = rows[0]["measured"]
    return [
        f"fp16, {STEPS} steps: largest loss gap between the engines {it['engines']:.1e}, to fp32 "
        f"{it['fp32']:.1e}; the gate is {it['gate']:.0e}."
    ]


def tell_skipped(rows: Sequence[Row]) -> list[str]:
    it = rows[0]["measured"]
    return [
        f"A first loss scale of {OVERFLOWING:.0e} has the Trainer skip the steps "
        f"{it['skipped_steps']['trainer']} and the loop {it['skipped_steps']['loop']}."
    ]


def tell_resumed(rows: Sequence[Row]) -> list[str]:
    cells = []
    for row in rows:
        twice, after = row["measured"]["trained_twice"], row["measured"]["resumed"]
        cells.append((row["cell"], *(f"{gap:.1e}" for gap in (*twice.values(), *after.values()))))
    header = ("cell", "trained twice: loss", "weights", "resumed: loss", "weights")
    what = (
        "Largest gaps after a checkpoint, to the training that was not interrupted; 0 is every bit"
    )
    return [f"{what}.", "", *table(header, cells)]


def tell_preempted(rows: Sequence[Row]) -> list[str]:
    it = rows[0]["measured"]
    return [
        f"SIGTERM after step {it['signal_after_step']}: {', '.join(it['states'])}, saved after "
        f"step {it['saved_step']}; resumed at step {it['first_step']}, {it['resumed']}."
    ]


def tell_memory(rows: Sequence[Row]) -> list[str]:
    it = rows[0]["measured"]
    return [
        f"A batch of {it['batch']} rows: {it['status']}, exit code {it['exit_code']}. The planner: "
        f"{it['planner']}."
    ]


TELLING: Final = {
    "chunked": tell_errors,
    "packing": tell_errors,
    "fused": tell_fused,
    "spoiled": tell_spoiled,
    "fp16": tell_fp16,
    "skipped": tell_skipped,
    "resumed": tell_resumed,
    "preempted": tell_preempted,
    "memory": tell_memory,
}
