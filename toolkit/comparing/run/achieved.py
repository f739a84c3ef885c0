"""Use of the GPUs by a run: arithmetic achieved, hours used, money spent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from toolkit.errors import UsageError
from toolkit.planning.of_run import job_of
from toolkit.planning.speed.computing import CONVENTION, model_flops
from toolkit.planning.speed.gpus import gpu
from toolkit.records.record import Record
from toolkit.records.results import Compute, Cost, Row
from toolkit.strategies import SHORT_DTYPES

NO_CONVENTION: Final = (
    "by the convention every weight has a gradient, and this run made those of adapters alone"
)
NO_PRICE: Final = "no price was given: --dollars-per-hour"


def compute_of(
    record: Record, tokens_per_second: float | None
) -> tuple[Compute | None, dict[str, str]]:
    """Return the arithmetic of a run, and the reason for each missing value.

    FLOPs follow the convention and are not the executed ones: recomputation by checkpointing does
    not count. The peak is the dense one of the compute precision. `tokens_per_second` is the sum
    over all GPUs, on packed rows of `max_length` tokens.
    """
    if record["rehearsal"]:
        return None, {"compute": "a rehearsal: a CPU has no rated peak here"}
    if tokens_per_second is None:
        why = record["not_measured"].get("tokens_per_second", "tokens/s were not measured")
        return None, {"compute": why}
    names = {name for name, _ in gpus_of(record["environment"], record["num_processes"])}
    if len(names) != 1:
        kinds = ", ".join(sorted(names))
        return None, {"compute": f"GPUs of several kinds: {kinds}" if kinds else "no GPU was seen"}
    try:
        job = job_of(record)
    except UsageError as error:
        return None, {"compute": str(error)}
    if job.method != "full":
        return None, {"compute": NO_CONVENTION}
    per_gpu = tokens_per_second * model_flops(job.model, job.sequence) / record["num_processes"]
    name = names.pop()
    missing: dict[str, str] = {}
    mfu = None
    try:
        mfu = per_gpu / _peak_flops(name, record)
    except UsageError as error:
        missing["compute.mfu"] = str(error)
    return Compute(tflops_per_gpu=per_gpu / 1e12, mfu=mfu, convention=CONVENTION, gpu=name), missing


def cost_of(row: Row, dollars_per_hour: float | None) -> tuple[Cost | None, dict[str, str]]:
    """Return the cost of one start of a run, and the reason for each missing value."""
    num_processes, seconds = row["num_processes"], row["seconds"]
    if row["rehearsal"]:
        return None, {"cost": "a rehearsal used no GPU"}
    if seconds is None:
        return None, {"cost": "how long it took was not measured"}
    hours = num_processes * seconds / 3600
    if dollars_per_hour is None:
        cost = Cost(gpu_hours=hours, dollars=None, dollars_per_million_tokens=None)
        return cost, {"cost.dollars": NO_PRICE, "cost.dollars_per_million_tokens": NO_PRICE}
    per_million = None
    missing = {"cost.dollars_per_million_tokens": "tokens/s were not measured"}
    if speed := row["tokens_per_second"]:
        per_million, missing = num_processes * dollars_per_hour / 3600 / speed * 1e6, {}
    cost = Cost(
        gpu_hours=hours, dollars=hours * dollars_per_hour, dollars_per_million_tokens=per_million
    )
    return cost, missing


def gpus_of(environment: dict[str, Any], count: int) -> list[tuple[str, int]]:
    """Return name and memory in bytes of the first `count` GPUs of a snapshot."""
    listed = cast("Sequence[dict[str, Any]]", environment.get("gpus") or ())
    return [(str(device["name"]), int(device["memory_bytes"])) for device in listed[:count]]


def room_of(environment: dict[str, Any], count: int) -> int | None:
    """Return the memory of the smallest of the first `count` GPUs; None without a GPU."""
    return min((memory for _, memory in gpus_of(environment, count)), default=None)


def _peak_flops(name: str, record: Record) -> float:
    """Return the dense peak of the GPU that NVML calls `name`, in FLOP/s.

    Raises:
        UsageError: the GPU is not in the planner's table, or has no such rate.
    """
    device = gpu(name)
    training, precision = record["training"], record["precision"]
    dtype = precision if precision != "no" else SHORT_DTYPES.get(training["dtype"])
    if dtype is None:
        raise UsageError(f"the rate of {device.name} in {training['dtype']} is not known")
    if dtype != "fp32" or not training["tf32"]:
        return device.flops(dtype)
    if device.tf32_flops is None:
        raise UsageError(f"the rate of {device.name} in TF32 is not known")
    return device.tf32_flops
