"""Speed: who trains at which rate, and what each switch, attention and method changes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from kit.cells import Cell, Machine, Refused, Row, first_gpu
from kit.result import table
from kit.variants import Variant, ours, recipe_of, variants
from toolkit.jobs.shape import ModelShape
from toolkit.planning.job import PlannedJob
from toolkit.planning.speed.computing import CONVENTION, model_flops
from toolkit.strategies import STRATEGIES

TITLE = "Speed"
MODEL = "llama-1b"
SHORT, LONG = 2048, 8192
TOKENS_OF_STEP = 8192
RAGGED_ROWS, PACKED_ROWS = 8, 2
"""Of a step: about as many tokens, padding left out."""

WARM_UP, STEPS = 5, 8
"""The second step is the probe that carries the toolkit's ledgers; layers are compiled in the first
and, where rows have other lengths, once more in the third."""

SECONDS, COMPILED_SECONDS = 4.0, 16.0
GIB = 2**30

REGISTERED = ("FA3", "FA4")
KERNELS = ("flash", "efficient", "cudnn", "math")
REFUSALS = (
    "No available kernel",
    "No viable backend for scaled_dot_product_attention",
    "FlexAttention does not support",
    "FlashAttention only supports",
)
"""What attention raises as a RuntimeError for inputs or devices that it is not made for."""

TABLES: dict[str, tuple[str, str]] = {
    f"trainers {SHORT}": (
        f"Trainers, full rows of {SHORT:,} tokens",
        "`plain loop` is torch alone: autocast, AdamW, clipped gradients. `stock` is transformers' "
        "Trainer, with the same optimizer as all others, and `stock, fused` has the one it takes "
        "if nobody chooses. `tuned` has a chunked loss, lean masks and the fused optimizer, and "
        "`tuned, compiled` compiled layers too; `speed_lab.py` has all that `--tuned` switches on. "
        "The last row is the first again: the drift of the machine in between.",
    ),
    f"trainers {LONG}": (f"Trainers, full rows of {LONG:,} tokens", "As above."),
    "switches": (
        "Switches, ragged rows",
        f"Rows of up to {SHORT // 2:,} tokens, {RAGGED_ROWS} a step, of which completions are "
        f"learned; packed into rows of {SHORT:,}, {PACKED_ROWS} a step. Packed rows are others: "
        "the gap of their losses is that to `packing alone`. The warm-up is a pass over the same "
        "rows, after which the allocator knows every length. `recipe` has packing and compiled "
        "layers beside what `tuned` has. TRL adds metrics of its own to every step. DDP's bucket "
        "view and FSDP's prefetch do nothing in one process: `speed_switches.py` measures them.",
    ),
    "methods": (
        "Methods",
        "ToolkitTrainer, all switches off. There is no MFU with adapters: frozen weights have no "
        "gradients, which its convention counts.",
    ),
    "attention": (
        "Attention",
        "ToolkitTrainer, all switches off. `sdpa` leaves the choice of the kernel to torch, and "
        "the rows below it allow one each.",
    ),
}
"""Heading and text of each table."""


def cells(machine: Machine) -> list[Cell]:
    """Return the cells: Trainers first, and at the end the first of them again.

    A smoke run leaves out what runs the same code again: longer rows, the recipe less a switch,
    and compiled layers alone, which the tuned Trainer compiles.
    """
    short = _trainer_cells(SHORT, machine)
    last = _cell("stock again, 2048", machine, **short[0].settings)
    switches = _switch_cells(machine)
    if machine.smoke:
        again = ("recipe without", "compiled layers alone")
        switches = [cell for cell in switches if not cell.name.startswith(again)]
    return [
        *short,
        *switches,
        *([] if machine.smoke else _trainer_cells(LONG, machine)),
        *_method_cells(machine),
        *_attention_cells(machine),
        last,
        _liger_cell(machine),
    ]


def _trainer_cells(tokens: int, machine: Machine) -> list[Cell]:
    recipe = recipe_of("single", compiled=True)
    fitting = [name for name in recipe if name != "packing"]
    tuned = [name for name in fitting if name != "compiled layers"]
    stock = f"stock, {tokens}"
    shared = _full_rows(tokens) | {"table": f"trainers {tokens}", "bases": {"stock": stock}}

    def cell(name: str, trainer: str, switches: Sequence[str] = (), **changes: Any) -> Cell:
        named = _of(ours(name, [*switches]))
        return _cell(
            f"{name}, {tokens}", machine, **shared | named | {"trainer": trainer}, **changes
        )

    return [
        cell("stock", "stock"),
        cell("plain loop", "plain"),
        cell("ToolkitTrainer", "ours"),
        cell("loop engine", "loop"),
        cell("tuned", "ours", tuned),
        cell("tuned, compiled", "ours", fitting),
        cell("tuned loop engine", "loop", tuned),
        cell("stock, fused", "stock", ["fused optimizer"]),
        cell("trl", "trl", libraries=("trl", "datasets")),
    ]


def _switch_cells(machine: Machine) -> list[Cell]:
    shared = _ragged_rows()
    found = []
    for variant in variants("single", compiled=True):
        rows = PACKED_ROWS if variant.packed else RAGGED_ROWS
        needed = ("trl", "datasets") if variant.kind == "trl" else ()
        settings = shared | _of(variant) | {"batch": rows}
        if variant.packed:
            settings["same_rows"] = "packing alone"
        found.append(_cell(variant.name, machine, **settings, libraries=needed))
    return found


def _liger_cell(machine: Machine) -> Cell:
    """Return the cell of Liger's kernels, in its own process: they replace classes for good."""
    settings = _ragged_rows() | _of(ours("liger", [])) | {"batch": RAGGED_ROWS, "liger": True}
    cell = _cell("liger", machine, **settings, libraries=("liger_kernel",))
    return replace(cell, environment=cell.environment | {"GPU_KIT_PROCESS": "liger"})


def _ragged_rows() -> dict[str, Any]:
    bases = {"stock": "stock", "all off": "all off"}
    return {"table": "switches", "bases": bases, "rows": "ragged", "tokens": SHORT}


def _method_cells(machine: Machine) -> list[Cell]:
    shared = _full_rows(SHORT) | {"table": "methods", "bases": {"full": "full"}}
    shared |= _of(ours("full", []))
    needed = {"full": (), "lora": ("peft",), "qlora": ("peft", "bitsandbytes")}
    return [
        _cell(method, machine, **shared, method=method, libraries=libraries)
        for method, libraries in needed.items()
    ]


def _attention_cells(machine: Machine) -> list[Cell]:
    shared = _full_rows(SHORT) | {"table": "attention", "bases": {"sdpa": "sdpa"}}
    # Eager attention keeps the scores of every layer: half the rows have to do.
    shared |= _of(ours("sdpa", [])) | {"batch": TOKENS_OF_STEP // SHORT // 2}
    return [
        _cell("sdpa", machine, **shared),
        *(_cell(f"sdpa {name}", machine, **shared, kernel=name) for name in KERNELS),
        _cell("eager", machine, **shared, attention="eager"),
        _cell("flex_attention", machine, **shared, attention="flex_attention"),
        _cell(
            "flash_attention_2",
            machine,
            **shared,
            attention="flash_attention_2",
            libraries=("flash_attn",),
        ),
    ]


def _full_rows(tokens: int) -> dict[str, Any]:
    return {"rows": "full", "tokens": tokens, "batch": TOKENS_OF_STEP // tokens}


def _of(variant: Variant) -> dict[str, Any]:
    return {
        "trainer": variant.kind,
        "switches": sorted(variant.switches),
        "speed": dict(variant.speed),
    }


def _cell(name: str, machine: Machine, *, libraries: tuple[str, ...] = (), **settings: Any) -> Cell:
    defaults = {"attention": "sdpa", "kernel": None, "method": "full", "liger": False}
    compiled = (
        "compiled layers" in settings["switches"] or settings.get("attention") == "flex_attention"
    )
    return Cell(
        name=name,
        settings=defaults | settings,
        seconds=COMPILED_SECONDS if compiled else SECONDS,
        libraries=libraries,
        environment=first_gpu(machine),
    )


def job_of(settings: dict[str, Any]) -> PlannedJob:
    """Return the job of a cell with full rows and all weights trained, as the planner takes it."""
    from kit.models import shape_of
    from toolkit.training.speed_arguments import SpeedArguments

    switches = settings["switches"]
    chunk = SpeedArguments(**settings["speed"]).chunk_tokens
    return PlannedJob(
        model=shape_of(MODEL, smoke=False),
        strategy=STRATEGIES["single"],
        gpus=1,
        batch=settings["batch"],
        sequence=settings["tokens"],
        precision="bf16",
        optimizer="adamw_fused" if "fused optimizer" in switches else "adamw",
        chunked_loss="chunked loss" in switches,
        loss_chunk_tokens=chunk if "chunked loss" in switches else None,
        compile="compiled layers" in switches,
    )


def measure(settings: dict[str, Any], machine: Machine) -> dict[str, Any]:
    from kit.device import quartiles
    from kit.trainers import Watch, fresh_accelerate

    if machine.smoke:
        settings = _tiny(settings)
    steps = 2 if machine.smoke else STEPS
    ragged = settings["rows"] == "ragged"
    watch = Watch(warm_up=steps if ragged else WARM_UP, steps=steps)
    rows = _rows(settings, steps if ragged else watch.warm_up + steps)
    model = _model(settings, smoke=machine.smoke)
    with tempfile.TemporaryDirectory() as folder, fresh_accelerate():
        with allowed(settings["attention"], settings["kernel"], smoke=machine.smoke):
            _train(settings, model, rows, watch, folder, smoke=machine.smoke)
        seconds = watch.seconds()
    rates = [tokens / each for tokens, each in zip(watch.tokens, seconds, strict=True)]
    learned = [tokens / each for tokens, each in zip(watch.learned, seconds, strict=True)]
    measured: dict[str, Any] = {
        "step_seconds": seconds,
        "step_tokens": watch.tokens,
        "step_learned_tokens": watch.learned,
        "tokens_per_second": quartiles(rates)[1],
        "learned_tokens_per_second": quartiles(learned)[1],
        "peak_allocated_bytes": watch.peaks["allocated_bytes"],
        "peak_reserved_bytes": watch.peaks["reserved_bytes"],
        "first_loss": watch.losses[0],
        "last_loss": watch.losses[-1],
    }
    return measured | _utilization(settings, machine, measured["tokens_per_second"])


def _tiny(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a smoke run: short rows, and layers that are traced only."""
    speed = settings["speed"]
    if "compile_blocks" in speed:
        speed = speed | {"compile_backend": "aot_eager"}
    return settings | {"tokens": settings["tokens"] // 32, "speed": speed}


def _rows(settings: dict[str, Any], steps: int) -> Any:
    """Return the rows of so many steps; ragged ones twice, since the first pass is the warm-up."""
    from kit.data import full_rows, packed_rows, ragged_rows

    needed, tokens = steps * settings["batch"], settings["tokens"]
    packed = "packing" in settings["switches"]
    if settings["rows"] == "full":
        rows = full_rows(needed, tokens)
    else:
        rows = ragged_rows(16 * needed, tokens // 2)
        if not packed or settings["trainer"] != "trl":  # TRL packs by itself
            rows = 2 * (packed_rows(rows, tokens) if packed else rows)[:needed]
    if settings["trainer"] == "trl":
        from datasets import Dataset

        return Dataset.from_list(rows)
    return rows


def _model(settings: dict[str, Any], *, smoke: bool) -> Any:
    from kit.device import clear
    from kit.models import build

    attention, method = settings["attention"], settings["method"]
    if method == "full":
        return build(MODEL, smoke=smoke, attention=attention)
    from toolkit.training.adapters import load_for
    from toolkit.training.arguments import ModelArguments
    from toolkit.training.method_arguments import MethodArguments
    from toolkit.training.methods import checked_method
    from toolkit.training.model import model_facts

    with tempfile.TemporaryDirectory() as folder:
        build(MODEL, smoke=smoke, attention=attention, dtype="bfloat16").save_pretrained(folder)
        arguments = ModelArguments(model_name_or_path=folder, attn_implementation=attention)
        checked = checked_method(
            MethodArguments(method=method), arguments, model_facts(folder), precision="bf16"
        )
        clear()
        return load_for(checked, arguments, folder, seed=0, start=None)


def _train(
    settings: dict[str, Any], model: Any, rows: Any, watch: Any, folder: str, *, smoke: bool
) -> None:
    from kit import trainers

    steps, batch = watch.warm_up + watch.steps, settings["batch"]
    variant = Variant(
        name=settings["trainer"],
        kind=settings["trainer"],
        switches=frozenset(settings["switches"]),
        speed=settings["speed"],
    )
    if variant.kind == "plain":
        trainers.train_plainly(model, rows, watch, batch=batch, bf16=True)
        return
    values = trainers.training_values(folder, rows=batch, steps=steps, bf16=True)
    values |= {"use_cpu": smoke, "use_liger_kernel": settings["liger"]}
    if variant.kind == "loop":
        trainers.train_in_loop(variant, model, rows, values, watch)
        return
    tokenizer = None
    if variant.kind == "trl":
        from toolkit.data.tokens import load_tokenizer
        from toolkit.training.model import build_model

        tokenizer = load_tokenizer(build_model())
    trainer = trainers.trainer_of(
        variant, model, rows, values, tokenizer=tokenizer, max_length=settings["tokens"]
    )
    watch.follow(trainer)
    trainer.train()


@contextmanager
def allowed(name: str, kernel: str | None, *, smoke: bool) -> Iterator[None]:
    """Allow sdpa one kernel, None: all of them. `FA3` and `FA4` take the place of torch's flash.

    Raises:
        Refused: the attention or the kernel does not take what it is given.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    with ExitStack() as stack:
        if kernel in REGISTERED:
            stack.enter_context(registered(kernel))
            kernel = "flash"
        if kernel is not None:
            stack.enter_context(sdpa_kernel(backends[kernel]))
        if smoke and name == "flex_attention":  # which is compiled for long before it refuses a CPU
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        except RuntimeError as error:
            if any(refusal in str(error) for refusal in REFUSALS):
                raise Refused(str(error)) from error
            raise


@contextmanager
def registered(name: str) -> Iterator[None]:
    """Have one of torch's registry stand in for its FlashAttention.

    Raises:
        Refused: it can't be used here.
    """
    from torch.nn import attention

    try:
        attention.activate_flash_attention_impl(name)
    except (ImportError, RuntimeError, ValueError) as error:
        raise Refused(f"{name}: {error}") from error
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


def _utilization(
    settings: dict[str, Any], machine: Machine, tokens_per_second: float
) -> dict[str, Any]:
    share, reason = utilization_of(
        MODEL,
        settings["tokens"] if settings["rows"] == "full" else None,
        machine,
        tokens_per_second,
        frozen=settings["method"] != "full",
    )
    return {"mfu": share, "no_mfu": reason}


def utilization_of(
    model: str, tokens: int | None, machine: Machine, tokens_per_second: float, *, frozen: bool
) -> tuple[float | None, str | None]:
    """Return the MFU, 0 to 1, or why there is none.

    Args:
        model: One of `kit.models.MODELS`.
        tokens: Of a row; None where rows have no length in common.
        machine: What it was trained on.
        tokens_per_second: Trained.
        frozen: Whether some weights have no gradients.
    """
    from kit.models import shape_of

    peak, reason = peak_flops(machine)
    if tokens is None:
        reason = "rows have no length in common"
    elif frozen:
        reason = "not all weights have gradients"
    if peak is None or reason is not None or tokens is None:
        return None, reason
    shape = shape_of(model, smoke=machine.smoke)
    return utilization(tokens_per_second, shape, tokens=tokens, flops=peak), None


def utilization(tokens_per_second: float, shape: ModelShape, *, tokens: int, flops: float) -> float:
    """Return the MFU by the convention of `toolkit.planning.speed.computing`, 0 to 1.

    Args:
        tokens_per_second: Trained.
        shape: Of the model, all of which is trained.
        tokens: Of a row.
        flops: What the GPU can do at most, in FLOP/s.
    """
    return tokens_per_second * model_flops(shape, tokens) / flops


def peak_flops(machine: Machine) -> tuple[float | None, str | None]:
    """Return the GPU's dense rate in bf16 in FLOP/s, or why it is not known."""
    if not machine.gpus:
        return None, "no GPU"
    import torch

    from toolkit.errors import UsageError
    from toolkit.planning.speed.gpus import gpu

    try:
        return gpu(torch.cuda.get_device_name()).flops("bf16"), None
    except UsageError as error:
        return None, str(error)


# The page


def tables(rows: Sequence[Row]) -> list[str]:
    measured = {row["cell"]: row for row in rows if row["status"] == "ok"}
    lines = [
        f"Llama 3.2 1B with random weights, computing in bf16 from weights in fp32, one process, "
        f"{TOKENS_OF_STEP:,} tokens a step of full rows; {STEPS} steps after {WARM_UP} of warm-up. "
        "Rates are medians over steps, padding not counted; steps have their quartiles. Peaks are "
        "the most of the steps that are timed; reserved is what the allocator holds by then, with "
        "what the warm-up took. Losses are those of the first step and of the last, with the gap "
        "to the first base: all train the same rows.",
        "",
        f"MFU is {CONVENTION}; the rate of the GPU is the dense one in bf16 of "
        "`toolkit/planning/speed/gpus.json`.",
    ]
    without = {row["measured"]["no_mfu"] for row in measured.values()} - {None}
    if without:
        lines += ["", f"Where there is no MFU: {'; '.join(sorted(without))}."]
    for name, (heading, text) in TABLES.items():
        shown = [row for row in measured.values() if row["settings"]["table"] == name]
        if shown:
            lines += ["", f"### {heading}", "", text, "", *_table(shown, measured)]
    return lines


def _table(shown: Sequence[Row], measured: Mapping[str, Row]) -> list[str]:
    bases = shown[0]["settings"]["bases"]
    header = ["cell", "tokens/s", "learned tokens/s", *(f"to {base}" for base in bases), "MFU"]
    header += ["step, ms", "allocated, GiB", "reserved, GiB", "first loss (gap)", "last loss (gap)"]
    return table(header, [_line(row, measured) for row in shown])


def _line(row: Row, measured: Mapping[str, Row]) -> list[str]:
    from kit.device import quartiles

    values = row["measured"]
    settings = row["settings"]
    bases = [measured.get(cell) for cell in settings["bases"].values()]
    same_rows = measured.get(settings.get("same_rows", [*settings["bases"].values()][0]))
    first, middle, third = (1000 * each for each in quartiles(values["step_seconds"]))
    return [
        row["cell"],
        f"{values['tokens_per_second']:,.0f}",
        f"{values['learned_tokens_per_second']:,.0f}",
        *(_ratio(values, base) for base in bases),
        "-" if values["mfu"] is None else f"{values['mfu']:.1%}",
        f"{middle:.1f} ({first:.1f} to {third:.1f})",
        _gib(values["peak_allocated_bytes"]),
        _gib(values["peak_reserved_bytes"]),
        *(_loss(values, same_rows, name) for name in ("first_loss", "last_loss")),
    ]


def _ratio(values: Mapping[str, Any], base: Row | None) -> str:
    if base is None:
        return "-"
    return f"{values['tokens_per_second'] / base['measured']['tokens_per_second']:.2f}"


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / GIB:.2f}"


def _loss(values: Mapping[str, Any], same_rows: Row | None, name: str) -> str:
    loss = values[name]
    if same_rows is None:
        return f"{loss:.4f}"
    return f"{loss:.4f} ({loss - same_rows['measured'][name]:+.1e})"
