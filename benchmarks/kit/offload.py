"""CPU offload with one rank on one GPU: times, memory on both sides, and bytes over PCIe.

Each launch is that of a user, `accelerate launch --config_file ...` with the checked-in config of
the strategy and `ToolkitTrainer`. Beside it stand the planner's bytes and the bandwidth of plain
copies.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kit.cells import Cell, Machine, Refused, Row, started_anew
from kit.models import build, shape_of
from kit.result import table
from toolkit.jobs.terms import GIB, Interval
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.estimate import estimate_memory
from toolkit.planning.speed.estimate import stepping
from toolkit.planning.speed.gpus import gpu
from toolkit.strategies import STRATEGIES

TITLE: Final = "CPU offload"
ROOT: Final = Path(__file__).resolve().parents[2]
RANK: Final = Path(__file__).with_name("offload_rank.py")

MODEL: Final = "qwen-0.5b"
BATCH, SEQUENCE = 4, 1024

LAUNCHES: Final[tuple[dict[str, Any], ...]] = (
    {"strategy": "fsdp_offload"},
    {"strategy": "fsdp_offload", "pinned": False},
    {"strategy": "zero2_offload"},
    {"strategy": "zero2_offload", "pinned": False},
    {"strategy": "zero2_offload", "optimizer": "torch"},
    {"strategy": "zero3_offload"},
    {"strategy": "zero3_offload", "pinned": False},
)
"""`pinned`: memory of what is offloaded; `optimizer`: DeepSpeed's for CPUs, or torch's there."""

LAUNCH_SECONDS: Final = 30.0
BUILD_SECONDS: Final = 60.0
"""DeepSpeed compiles its optimizer for CPUs, once on a machine."""

PATIENCE: Final = 3

COPIED_BYTES: Final = (16 * 2**20, 512 * 2**20)
COPIES, WARM_UP = 10, 3


def cells(machine: Machine) -> Iterator[Cell]:
    """Yield plain copies, which need torch alone, then every launch."""
    yield Cell(name="plain copies", settings={"kind": "copies"}, seconds=10.0)
    first = True
    for changes in LAUNCHES:
        if machine.smoke and "pinned" in changes:
            continue  # without a GPU nothing can be pinned
        settings = settings_of(changes, machine)
        uses_deepspeed = settings["strategy"].startswith("zero")
        builds = uses_deepspeed and first
        first = first and not uses_deepspeed
        yield Cell(
            name=described(settings),
            settings=settings,
            seconds=LAUNCH_SECONDS + (BUILD_SECONDS if builds else 0),
            libraries=("deepspeed",) if uses_deepspeed else (),
        )


def settings_of(changes: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Return the settings of one of `LAUNCHES`."""
    return {
        "kind": "launch",
        "pinned": True,
        "optimizer": "deepspeed",
        "model": MODEL,
        "batch": BATCH,
        "sequence": SEQUENCE // 32 if machine.smoke else SEQUENCE,
    } | changes


def described(settings: dict[str, Any]) -> str:
    """Return a launch in a few words."""
    words = [settings["strategy"]]
    if not settings["pinned"]:
        words.append("pageable memory")
    if settings["optimizer"] == "torch":
        words.append("torch's AdamW")
    return ", ".join(words)


def measure(settings: dict[str, Any], machine: Machine) -> dict[str, Any]:
    if settings["kind"] == "copies":
        return _copies(machine)
    return _launched(settings, machine)


def _copies(machine: Machine) -> dict[str, Any]:
    """Time copies of some sizes between host and device, each way, pinned and pageable."""
    import torch

    from kit.device import device, quartiles, timed

    if not machine.gpus:
        raise Refused("without a GPU there is nothing to copy to")
    found = []
    for size in COPIED_BYTES:
        for pinned in (True, False):
            host = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
            there = torch.ones(size, dtype=torch.uint8, device=device())
            ways = {"to_device": (there, host), "to_host": (host, there)}
            for way, (target, source) in ways.items():
                seconds = timed(
                    lambda target=target, source=source: target.copy_(source, non_blocking=True),
                    steps=COPIES,
                    warm_up=WARM_UP,
                )
                found.append(
                    {
                        "bytes": size,
                        "pinned": pinned,
                        "way": way,
                        "seconds": quartiles(seconds)[1],
                    }
                )
    return {"copies": found, "pcie_bytes_per_second": _pcie_bandwidth()}


def _pcie_bandwidth() -> float | None:
    """Return what the planner's table says of this GPU's PCIe, one way; None where it has none."""
    import torch

    from toolkit.errors import UsageError

    try:
        return gpu(torch.cuda.get_device_name(0)).pcie_bandwidth
    except UsageError:
        return None


def job_of(settings: dict[str, Any], *, smoke: bool = False) -> PlannedJob:
    """Return the job of a launch as the planner takes it."""
    return PlannedJob(
        model=shape_of(settings["model"], smoke=smoke),
        strategy=STRATEGIES[settings["strategy"]],
        gpus=1,
        batch=settings["batch"],
        sequence=settings["sequence"],
        precision="bf16",
        optimizer="adamw",
    )


def prediction(job: PlannedJob) -> dict[str, Any]:
    """Return what the planner says of a launch: bytes, intervals as pairs."""
    estimate = estimate_memory(job)
    # The bytes of the copies are the same on every GPU.
    terms = {term.name: term for term in stepping(job, gpu("H100"), Interval(0, 0))}
    copies = terms["copies to and from the host"].inputs
    return {
        "to_device_bytes": copies["bytes from the host"],
        "to_host_bytes": copies["bytes to the host"],
        "allocated_bytes": [round(estimate.allocated.low), round(estimate.allocated.high)],
        "host_bytes": [round(estimate.host_bytes.low), round(estimate.host_bytes.high)],
    }


def _launched(settings: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Train in one rank of a launch of its own; return what it told, and what was predicted."""
    import torch

    from kit.device import clear
    from toolkit.launching.launch import launch_command, run

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build(settings["model"], smoke=machine.smoke, dtype="bfloat16")
        model.save_pretrained(folder / "model")
        del model
        clear()
        asked, told = folder / "settings.json", folder / "told.json"
        asked.write_text(json.dumps(settings | {"folder": str(folder / "model")}))
        command = launch_command(
            _config(settings, folder),
            ["-m", "toolkit.rehearse", str(RANK), str(asked), str(told)],
            num_processes=1,
        )
        with started_anew():
            outcome = run(
                command,
                folder=folder / "run",
                timeout=PATIENCE * (LAUNCH_SECONDS + BUILD_SECONDS),
                num_processes=1,
                loopback=True,
            )
        if outcome.status == "refused":
            raise Refused(outcome.reason or "refused")
        if outcome.status == "oom":
            raise torch.OutOfMemoryError(outcome.reason or "out of memory")
        if outcome.status != "ok" or not told.exists():
            raise RuntimeError("\n".join([outcome.reason or outcome.status, *outcome.tail]))
        found = json.loads(told.read_text(encoding="utf-8"))
    return {"predicted": prediction(job_of(settings, smoke=machine.smoke))} | found


def _config(settings: dict[str, Any], folder: Path) -> Path:
    """Return the checked-in config of a strategy, or that with what the settings change in it."""
    import yaml

    file = ROOT / "accelerate_configs" / f"{settings['strategy']}.yaml"
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    section = config.get("deepspeed_config")
    if section is None:
        return file
    deepspeed = json.loads((ROOT / section["deepspeed_config_file"]).read_text(encoding="utf-8"))
    zero = deepspeed["zero_optimization"]
    for place in ("offload_optimizer", "offload_param"):
        if place in zero:
            zero[place]["pin_memory"] = settings["pinned"]
    deepspeed["zero_force_ds_cpu_optimizer"] = settings["optimizer"] == "deepspeed"
    section["deepspeed_config_file"] = str(folder / "deepspeed.json")
    (folder / "deepspeed.json").write_text(json.dumps(deepspeed), encoding="utf-8")
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder / "accelerate.yaml"


def tables(rows: Sequence[Row]) -> list[str]:
    """Return plain copies, and what each launch took, held and moved."""
    ok = [row for row in rows if row["status"] == "ok"]
    lines: list[str] = []
    for row in ok:
        if row["settings"]["kind"] == "copies":
            lines += [*_copies_table(row["measured"]), ""]
    launches = [row for row in ok if row["settings"]["kind"] == "launch"]
    if launches:
        lines += [*_launches_table(launches), "", *_moved_table(launches)]
    return lines


def _copies_table(measured: dict[str, Any]) -> list[str]:
    rate = measured["pcie_bytes_per_second"]
    listed = "is not in the planner's table" if rate is None else f"{rate / 1e9:.1f} GB/s one way"
    lines = [
        (
            copy["way"].replace("_", " "),
            "pinned" if copy["pinned"] else "pageable",
            f"{copy['bytes'] / 2**20:.0f}",
            f"{copy['bytes'] / copy['seconds'] / 1e9:.1f}",
            "-" if rate is None else f"{copy['bytes'] / copy['seconds'] / rate:.0%}",
        )
        for copy in measured["copies"]
    ]
    return [
        f"Plain copies; PCIe of this GPU: {listed}.",
        "",
        *table(("copy", "host memory", "MiB", "GB/s", "of PCIe"), lines),
    ]


def _launches_table(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        found, predicted = row["measured"], row["measured"]["predicted"]
        memory, phases = found["memory"], found["phases_seconds"]
        lines.append(
            (
                row["cell"],
                found["optimizer"],
                f"{found['step_seconds']:.3f}",
                _seconds(phases.get("optimizer")),
                _gib(memory["peak_bytes"]),
                _gib(*predicted["allocated_bytes"]),
                _gib(found["pinned_bytes"]),
                _gib(memory["host_peak_bytes"]),
                _gib(*predicted["host_bytes"]),
            )
        )
    header = ["launch", "optimizer", "step s", "optimizer s", "GPU GiB", "predicted"]
    header += ["pinned GiB", "host GiB", "predicted"]
    return [
        "One rank. Seconds are medians; GPU: the most that was allocated; pinned: the most that "
        "torch's cache of pinned memory held; host: the most that the process held resident.",
        "",
        *table(header, lines),
    ]


def _moved_table(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        found, predicted = row["measured"], row["measured"]["predicted"]
        line = [row["cell"]]
        for way in ("to_device", "to_host"):
            copied = None if found["copied"] is None else found["copied"][way]
            line += [_gib(predicted[f"{way}_bytes"])]
            if not copied or not copied["copies"]:
                line += [_gib(None if copied is None else 0), "-", "-"]
                continue
            line += [
                _gib(copied["bytes"]),
                f"{copied['pinned_bytes'] / copied['bytes']:.0%}",
                f"{copied['bytes'] / copied['seconds'] / 1e9:.1f}",
            ]
        lines.append(line)
    header = ["launch"]
    for way in ("to the GPU", "to the host"):
        header += [f"{way}, predicted GiB", "measured", "from or to pinned", "GB/s while copying"]
    return [
        "Bytes of one step over PCIe, by the planner and by the profiler:",
        "",
        *table(header, lines),
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _gib(*values: float | None) -> str:
    if any(value is None for value in values):
        return "not measured"
    return " to ".join(dict.fromkeys(f"{value / GIB:.3g}" for value in values if value is not None))
