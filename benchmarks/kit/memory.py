"""The planner against torch's allocator: 24 jobs, each with and without expandable segments.

Every job is trained by `ToolkitTrainer` for a few steps on full rows. What the planner calls
`allocated` is the most over all steps, as `torch.cuda.max_memory_allocated` shows it to a user; the
peaks of the first steps, which make the optimizer's states, and of those after them stand beside
it in the JSON. The recorder's ledgers stay off on a GPU: while they count, autograd adds two
gradients of one weight up in memory of its own. `gpu_kit_fit.py` fits the planner's constants for
the allocator from these rows.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from kit.cells import Cell, Machine, Refused, Row, first_gpu
from kit.models import build, shape_of
from kit.result import table
from toolkit import environment
from toolkit.jobs.terms import GIB, Interval
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.estimate import WORKSPACES, estimate_memory
from toolkit.strategies import STRATEGIES

TITLE: Final = "The planner against the allocator"

ALLOCATORS: Final = {"default": "False", "expandable": "True"}
"""By what a result calls them: `expandable_segments`."""

LIBRARIES: Final = {
    "lora": ("peft",),
    "qlora": ("peft", "bitsandbytes"),
    "adamw_8bit": ("bitsandbytes",),
}

PLAIN: Final = {
    "model": "llama-1b",
    "batch": 4,
    "sequence": 2048,
    "accumulation": 1,
    "checkpointing": "none",
    "optimizer": "adamw",
    "method": "full",
    "precision": "bf16",
    "weights": "float32",
    "loss_chunk_tokens": None,
}
"""What a job is where it says nothing else; a number for the last one chunks the loss."""

SHAPE: Final = ("model", "batch", "sequence")

CHUNKED: Final = {"loss_chunk_tokens": 1024}
FULL: Final = {"checkpointing": "full"}
IN_BF16: Final = {"weights": "bfloat16"}

JOBS: Final[tuple[dict[str, Any], ...]] = (
    {"batch": 1, "sequence": 512},
    {},
    {"batch": 8},
    {"batch": 1, "sequence": 8192},
    {"batch": 1, "sequence": 8192, **CHUNKED},
    {**FULL},
    {"checkpointing": "selective"},
    {**CHUNKED},
    {"batch": 8, **FULL, **CHUNKED},
    {"optimizer": "adamw_fused"},
    {"optimizer": "sgd"},
    {"optimizer": "adafactor", **FULL},
    {"batch": 2, "precision": "no"},
    {"batch": 2, "precision": "fp16"},
    {**IN_BF16},
    {"method": "lora"},
    {"method": "qlora", **FULL},
    {"model": "llama-3b", "batch": 1, "sequence": 1024, "optimizer": "adamw_fused", **CHUNKED},
    {"model": "llama-3b", "batch": 2, "sequence": 4096, **FULL, **CHUNKED, **IN_BF16},
    {"model": "llama-3b", "method": "lora", **FULL},
    {"model": "qwen-0.5b", "batch": 8, "sequence": 1024},
    {"model": "qwen-0.5b", "batch": 2, "sequence": 4096, "accumulation": 2, **CHUNKED},
    {"model": "qwen-0.5b", "batch": 8, "sequence": 512, "optimizer": "sgd", **FULL},
    # No other job comes after it: bitsandbytes keeps the embedding for good (transformers' Trainer
    # calls `GlobalOptimManager.register_module_override`).
    {"batch": 2, "optimizer": "adamw_8bit"},
)

OPTIMIZERS: Final = {
    "adamw": "adamw_torch",
    "adamw_fused": "adamw_torch_fused",
    "adamw_8bit": "adamw_bnb_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
"""From the planner's names to those of `TrainingArguments`."""

FIRST_STEPS = 2
"""The optimizer makes its states in them; without a GPU the recorder counts in the second."""

STEPS = 5
HOPELESS = 1.25
"""Times a GPU's memory: a job that needs more by the planner's least estimate is not tried."""

SECONDS = 4.0
LORA_RANK = 16


def cells(machine: Machine) -> Iterator[Cell]:
    """Yield every job under one setting of the allocator, then under the other.

    A smoke run has no allocator to set, so it runs each job once, and of those that differ in their
    shapes alone the first.
    """
    kinds: list[dict[str, Any]] = []
    for allocator, expandable in ALLOCATORS.items():
        for changes in JOBS:
            kind = {name: value for name, value in changes.items() if name not in SHAPE}
            if machine.smoke and kind in kinds:
                continue
            kinds.append(kind)
            settings = PLAIN | changes
            libraries = LIBRARIES.get(settings["method"], ())
            yield Cell(
                name=f"{described(settings)}, {allocator}",
                settings={"allocator": allocator}
                | (_small(settings) if machine.smoke else settings),
                seconds=SECONDS,
                libraries=libraries or LIBRARIES.get(settings["optimizer"], ()),
                environment={"PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}"}
                | first_gpu(machine),
            )
        if machine.smoke:
            return


def described(settings: dict[str, Any]) -> str:
    """Return a job in a few words: model, rows x tokens, and what is not `PLAIN`."""
    words = [settings["model"], f"{settings['batch']}x{settings['sequence']}"]
    if settings["accumulation"] > 1:
        words[1] += f"x{settings['accumulation']}"
    if settings["checkpointing"] != PLAIN["checkpointing"]:
        words.append(f"{settings['checkpointing']} checkpointing")
    words += [settings[key] for key in ("optimizer", "method") if settings[key] != PLAIN[key]]
    if settings["precision"] != PLAIN["precision"]:
        words.append({"no": "fp32"}.get(settings["precision"], settings["precision"]))
    if settings["weights"] != PLAIN["weights"]:
        words.append(f"{settings['weights']} weights")
    return " ".join([*words, *(["chunked loss"] if settings["loss_chunk_tokens"] else [])])


def _small(settings: dict[str, Any]) -> dict[str, Any]:
    chunk = settings["loss_chunk_tokens"]
    return settings | {
        "sequence": settings["sequence"] // 32,
        "loss_chunk_tokens": chunk and chunk // 32,
    }


def job_of(settings: dict[str, Any], *, smoke: bool = False) -> PlannedJob:
    """Return the job of a cell as the planner takes it."""
    return PlannedJob(
        model=shape_of(settings["model"], smoke=smoke),
        strategy=STRATEGIES["single"],
        gpus=1,
        lora_rank=LORA_RANK,
        chunked_loss=settings["loss_chunk_tokens"] is not None,
        dtype=settings["weights"],
        expandable_segments=settings["allocator"] == "expandable",
        **{key: settings[key] for key in PLAIN if key not in ("model", "weights")},
    )


def measure(settings: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Train the job; return peaks in bytes, and the planner's intervals beside them."""
    import torch

    predicted = prediction(job_of(settings, smoke=machine.smoke))
    if settings["precision"] == "fp16" and not machine.gpus:
        raise Refused("Accelerate computes in fp16 on GPUs only")
    if machine.gpus:
        _check_room(predicted)
        _check_allocator(settings["allocator"])
        torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated() if machine.gpus else None
    torch.backends.cuda.matmul.fp32_precision = "ieee"  # as toolkit.train computes in fp32
    return (
        {"predicted": predicted, "allocated_before_bytes": before}
        | _trained(settings, machine)
        | {"workspaces_bytes": _workspaces() if machine.gpus else None}
    )


def prediction(job: PlannedJob) -> dict[str, Any]:
    """Return what the planner says of a job, as JSON holds it: intervals are pairs of bytes."""
    estimate = estimate_memory(job)
    intervals = {name: getattr(estimate, name) for name in ("allocated", "reserved", "total")}
    return {f"{name}_bytes": _ends(interval) for name, interval in intervals.items()} | {
        "phase": estimate.peak_phase,
        "categories_bytes": {
            name: _ends(interval) for name, interval in estimate.by_category().items()
        },
    }


def _ends(interval: Interval) -> list[int]:
    return [round(interval.low), round(interval.high)]


def _check_room(predicted: dict[str, Any]) -> None:
    import torch

    room = torch.cuda.get_device_properties(0).total_memory
    least = predicted["total_bytes"][0]
    if least > HOPELESS * room:
        raise Refused(
            f"the planner: needs at least {least / GIB:.1f} GiB, the GPU has {room / GIB:.1f} GiB"
        )


def _check_allocator(name: str) -> None:
    """Refuse to measure under another setting of the allocator than the row will name."""
    import torch

    asked = ALLOCATORS[name] == "True"
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    found = settings.get("expandable_segments")
    if found is not None and bool(found) != asked:
        raise Refused(f"expandable_segments was asked to be {asked}, and the allocator has {found}")


def _workspaces() -> int:
    """Return the bytes of cuBLAS's workspaces, and free them."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def _trained(settings: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Train a job as a user of `ToolkitTrainer` does, and return what was measured of it."""
    from transformers import TrainingArguments

    from kit.data import full_rows
    from toolkit.data.sampling_order import Collator
    from toolkit.training.speed import Speed
    from toolkit.training.speed_arguments import SpeedArguments
    from toolkit.training.trainer import ToolkitTrainer

    chunk = settings["loss_chunk_tokens"]
    asked = {} if chunk is None else {"loss_impl": "chunked", "loss_chunk_tokens": chunk}
    speed = Speed(SpeedArguments(**asked))
    with tempfile.TemporaryDirectory() as folder:
        model = _loaded(settings, folder, smoke=machine.smoke)
        speed.apply(model)
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=not machine.gpus,
            max_steps=STEPS,
            per_device_train_batch_size=settings["batch"],
            gradient_accumulation_steps=settings["accumulation"],
            optim=OPTIMIZERS[settings["optimizer"]],
            bf16=settings["precision"] == "bf16",
            fp16=settings["precision"] == "fp16",
            learning_rate=1e-5,
            logging_steps=STEPS,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        rows = STEPS * settings["batch"] * settings["accumulation"]
        trainer = ToolkitTrainer(
            model=model,
            args=args,
            train_dataset=full_rows(rows, settings["sequence"]),
            data_collator=speed.collating(Collator(pad_token_id=0)),
            observers=[speed],
        )
        found: dict[str, Any] = {}
        trainer.add_callback(_watching(found, trainer.recorder))
        trainer.train()
    record: Any = trainer.record
    memory = record["memory"]
    return found | {
        "counted": record["peak"],
        "states_bytes": {
            name: memory[f"{name}_bytes"] for name in ("parameters", "gradients", "optimizer")
        },
        "skipped_steps": record["skipped_steps"],
    }


def _watching(found: dict[str, Any], recorder: Any) -> Any:
    """Return a callback that takes the peaks of the first steps, and of those after them."""
    import torch
    from transformers import TrainerCallback

    from kit.device import peaks, reset_peaks, synchronize

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                recorder.peaks()  # no step after it carries its ledgers
                reset_peaks()

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == FIRST_STEPS:
                synchronize()
                found["first"] = peaks()
                reset_peaks()
            elif state.global_step == STEPS:
                synchronize()
                found["steady"] = peaks()
                found["whole"] = {
                    name: None if value is None else max(value, found["first"][name])
                    for name, value in found["steady"].items()
                }
                found.update(_device())

    return Watch()


def _device() -> dict[str, Any]:
    """Return what the device says of itself: bytes in use, and those of them that no tensor has.

    The latter are this process's alone where NVML knows its processes, and else everyone's.
    """
    import torch

    if not torch.cuda.is_available():
        return dict.fromkeys(("device_used_bytes", "outside_bytes", "allocator_retries"))
    free, total = torch.cuda.mem_get_info()
    used = total - free
    own = _used_by_this_process()
    return {
        "device_used_bytes": used,
        "outside_bytes": (used if own is None else own) - torch.cuda.memory_reserved(),
        "allocator_retries": int(torch.cuda.memory_stats()["num_alloc_retries"]),
    }


def _used_by_this_process() -> int | None:
    """Return the bytes that NVML says this process uses; in most containers it says nothing."""
    with environment.open_driver() as (nvml, handles):
        if not handles:
            return None
        with suppress(nvml.NVMLError):
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handles[0])
            return next((one.usedGpuMemory for one in processes if one.pid == os.getpid()), None)
    return None


def _loaded(settings: dict[str, Any], folder: str, *, smoke: bool) -> Any:
    """Return the model of a job, with its adapters and its checkpointing."""
    method, in_half = settings["method"], settings["precision"] != "no"
    dtype = settings["weights"]
    if method != "full" and in_half:
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[settings["precision"]]
    model = build(settings["model"], smoke=smoke, dtype=dtype)
    if method == "qlora":
        model = _in_4_bits(model, folder, dtype)
    if method != "full":
        _adapt(model, method, dtype)
    if settings["checkpointing"] != "none":
        _checkpoint(model, settings["checkpointing"])
    return model


def _in_4_bits(model: Any, folder: str, dtype: str) -> Any:
    from toolkit.training.arguments import ModelArguments
    from toolkit.training.model import load_model
    from toolkit.training.quantized import in_4_bits, keep_packed

    model.save_pretrained(f"{folder}/model")
    del model
    packed = in_4_bits(dtype)
    model = load_model(ModelArguments(), f"{folder}/model", dtype=dtype, packed=packed)
    keep_packed(model)
    return model.train()


def _adapt(model: Any, method: str, dtype: str) -> None:
    from toolkit.training.adapters import attach_adapters
    from toolkit.training.method_arguments import MethodArguments
    from toolkit.training.methods import Method, adapted_layers

    arguments = MethodArguments(method=method, lora_r=LORA_RANK)
    layers = adapted_layers(model, arguments)
    chosen = Method(
        arguments=arguments,
        dtype=dtype,
        storage=dtype if method == "qlora" else None,
        layers=tuple(layers),
        trained_parameters=sum(layers.values()),
        embeddings=(),
        base_model="random weights",
        base_revision=None,
    )
    attach_adapters(model, chosen, seed=0)


def _checkpoint(model: Any, kind: str) -> None:
    """Checkpoint every layer: `full`, or `selective` as `toolkit.train` does."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    from toolkit.training.speed.layers import keep_products

    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_products)
    # transformers before 5.23 knows the older name alone.
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    getattr(model, new if hasattr(model, new) else old)(options)


def tables(rows: Sequence[Row]) -> list[str]:
    """Return what was predicted and what was measured, both allocators side by side."""
    ok = [row for row in rows if row["status"] == "ok"]
    if not ok:
        return []
    if all(row["measured"]["whole"]["allocated_bytes"] is None for row in ok):
        return counted_table(ok)
    jobs: dict[str, dict[str, dict[str, Any]]] = {}
    for row in ok:
        job = described(row["settings"])
        jobs.setdefault(job, {})[row["settings"]["allocator"]] = row["measured"]
    return [
        "GiB. Predicted is the planner's interval, measured the most over all steps; the error is "
        "the distance to the nearer end, as a share of what was measured: above 0 where the "
        "planner says too much, and 0 inside.",
        "",
        *_peak_table(jobs, "allocated"),
        "",
        "Reserved, and reserved for each byte that was allocated:",
        "",
        *_peak_table(jobs, "reserved"),
        "",
        "The most after the first steps, and what lies outside of the allocator "
        "(predicted: CUDA context):",
        "",
        *_rest_table(jobs),
    ]


def _peak_table(jobs: dict[str, dict[str, dict[str, Any]]], kind: str) -> list[str]:
    beside = "active" if kind == "allocated" else "ratio"
    header = ["job", "predicted"]
    for allocator in ALLOCATORS:
        header += [f"{kind}, {allocator}", beside, "error"]
    lines = []
    for job, found in jobs.items():
        one = next(iter(found.values()))
        line = [job, shown(one["predicted"][f"{kind}_bytes"])]
        for allocator in ALLOCATORS:
            line += _measured(found.get(allocator), kind)
        lines.append(line)
    return table(header, lines)


def _measured(measured: dict[str, Any] | None, kind: str) -> list[str]:
    if measured is None:
        return ["-"] * 3
    whole = measured["whole"]
    value = whole[f"{kind}_bytes"]
    beside = whole["active_bytes"] / GIB
    if kind == "reserved":
        beside = value / whole["allocated_bytes"]
    error = beyond(measured["predicted"][f"{kind}_bytes"], value) / value
    return [f"{value / GIB:.2f}", f"{beside:.2f}", f"{error:+.1%}" if error else "0"]


def _rest_table(jobs: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    header = ["job", "predicted peak in"]
    for allocator in ALLOCATORS:
        header += [f"steady allocated, {allocator}", "steady reserved", "outside", "retries"]
    lines = []
    for job, found in jobs.items():
        line = [job, next(iter(found.values()))["predicted"]["phase"]]
        for allocator in ALLOCATORS:
            measured = found.get(allocator)
            if measured is None:
                line += ["-"] * 4
                continue
            values = [measured["steady"][f"{kind}_bytes"] for kind in ("allocated", "reserved")]
            values.append(measured["outside_bytes"])
            line += [f"{value / GIB:.2f}" for value in values]
            line.append(str(measured["allocator_retries"]))
        lines.append(line)
    return table(header, lines)


def counted_table(rows: Sequence[Row]) -> list[str]:
    """Return predictions beside the bytes that the recorder counted, where nothing allocates."""
    lines = []
    for row in rows:
        measured = row["measured"]
        ends = [
            end - round(workspace)
            for end, workspace in zip(
                measured["predicted"]["allocated_bytes"],
                (WORKSPACES.low, WORKSPACES.high),
                strict=True,
            )
        ]
        peak = measured["counted"]
        line = [described(row["settings"]), shown(ends, unit=2**20), measured["predicted"]["phase"]]
        if peak is None:
            line += ["-"] * 3
        else:
            total = peak["total_bytes"]
            error = beyond(ends, total) / total
            line += [f"{total / 2**20:.2f}", f"{error:+.1%}" if error else "0", peak["phase"]]
        lines.append(line)
    return [
        "No allocator on a CPU: predicted is the planner's `allocated` less cuBLAS's workspaces, "
        "counted what the recorder's ledger saw alive in the second step. While it looks on, a "
        "tied embedding's two gradients have their sum in memory of its own. MiB.",
        "",
        *table(("job", "predicted", "peak in", "counted", "error", "peak in"), lines),
    ]


def beyond(ends: Sequence[int], measured: int) -> int:
    """Return how far a measurement is outside of an interval: what is predicted less it."""
    low, high = ends
    if measured < low:
        return low - measured
    return min(0, high - measured)


def shown(ends: Sequence[int], *, unit: int = GIB) -> str:
    """Return an interval of bytes in a unit."""
    low, high = (f"{end / unit:.2f}" for end in ends)
    return low if low == high else f"{low} to {high}"
