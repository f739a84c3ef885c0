"""One rank of the part `offload`: trains as its launcher asks, and profiles the copies of one step.

accelerate launch --config_file FILE -m toolkit.rehearse offload_rank.py SETTINGS.json TOLD.json
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

STEPS: Final = 8
"""The first two warm up, the second is counted by ledgers, and the last is profiled."""

COPIES: Final = {"Memcpy HtoD": "to_device", "Memcpy DtoH": "to_host"}


def main() -> None:
    settings_file, told_file = sys.argv[1:3]
    settings = json.loads(Path(settings_file).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        told = trained(settings, folder)
    Path(told_file).write_text(json.dumps(told), encoding="utf-8")


def trained(settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train on full rows, and return times in seconds and bytes by where they are."""
    import torch
    from transformers import TrainingArguments

    from kit.data import full_rows
    from toolkit.configs.requested import DEEPSPEED_FILE
    from toolkit.data.sampling_order import Collator
    from toolkit.engines.deepspeed_config import checked_deepspeed_config, use_deepspeed_config
    from toolkit.training.arguments import ModelArguments
    from toolkit.training.model import load_model, model_facts
    from toolkit.training.trainer import ToolkitTrainer

    on_gpu = torch.cuda.is_available()
    if on_gpu and not settings["pinned"]:
        _leave_pageable()
    facts = model_facts(settings["folder"])
    if DEEPSPEED_FILE in os.environ:
        # As toolkit.train fits the file to its model.
        use_deepspeed_config(
            checked_deepspeed_config(),
            parameters=facts.parameters,
            hidden_size=facts.hidden_size,
            rehearsal=not on_gpu,
        )
    args = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=settings["batch"],
        bf16=True,
        optim="adamw_torch",
        learning_rate=1e-5,
        logging_steps=STEPS,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = ToolkitTrainer(
        model=load_model(ModelArguments(), settings["folder"]),
        args=args,
        train_dataset=full_rows(STEPS * settings["batch"], settings["sequence"]),
        data_collator=Collator(pad_token_id=0),
    )
    found: dict[str, Any] = {"copied": None, "pinned_bytes": None}
    if on_gpu:
        trainer.add_callback(_profiling(found, folder))
    trainer.train()
    record: Any = trainer.record
    return found | {
        "step_seconds": statistics.median(record["timed_seconds"][:-1]),
        "phases_seconds": {
            name: None if spread is None else spread["median"]
            for name, spread in record["phases"].items()
        },
        "optimizer": record["attestation"]["engaged"]["optimizer_class"],
        "memory": record["memory"],
    }


def _leave_pageable() -> None:
    """Have FSDP2 offload to memory that is not pinned: no key of Accelerate 1.15 asks for that."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    original = FullyShardedDataParallelPlugin.set_cpu_offload

    def set_cpu_offload(self: Any) -> None:
        original(self)
        if isinstance(self.cpu_offload, CPUOffloadPolicy):
            self.cpu_offload = CPUOffloadPolicy(pin_memory=False)

    FullyShardedDataParallelPlugin.set_cpu_offload = set_cpu_offload


def _profiling(found: dict[str, Any], folder: str) -> Any:
    """Return a callback that profiles the last step, and asks how much host memory is pinned."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from transformers import TrainerCallback

    class Profiling(TrainerCallback):
        profiler: Any = None

        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == STEPS - 1:
                torch.cuda.synchronize()
                self.profiler = profile(activities=[ProfilerActivity.CUDA])
                self.profiler.start()

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step != STEPS:
                return
            torch.cuda.synchronize()
            self.profiler.stop()
            trace = Path(folder, "trace.json")
            self.profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
            found["copied"] = copied(events)
            found["pinned_bytes"] = torch.cuda.host_memory_stats().get("allocated_bytes.peak")

    return Profiling()


def copied(events: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Sum up the copies between host and device in a trace of torch's profiler.

    Returns:
        Bytes, seconds and number of copies in each direction, and the bytes of them whose host
        memory was pinned.
    """
    total = {
        way: {"bytes": 0, "pinned_bytes": 0, "seconds": 0.0, "copies": 0} for way in COPIES.values()
    }
    for event in events:
        way = COPIES.get(str(event.get("name"))[: len("Memcpy HtoD")])
        if event.get("cat") != "gpu_memcpy" or way is None:
            continue
        size = int(event["args"]["bytes"])
        total[way]["bytes"] += size
        total[way]["pinned_bytes"] += size if "Pinned" in event["name"] else 0
        total[way]["seconds"] += event["dur"] / 1e6
        total[way]["copies"] += 1
    return total


if __name__ == "__main__":
    main()
