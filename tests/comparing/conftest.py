"""Records and weights as `toolkit.train` leaves them, made small and by hand."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from toolkit.results import Results, Row

STEPS = 4

MEMORY = {
    "peak_bytes": None,
    "parameters_bytes": 4_000_000,
    "master_bytes": 0,
    "gradients_bytes": 4_000_000,
    "optimizer_bytes": 8_000_000,
    "host_peak_bytes": 700_000_000,
}


@pytest.fixture
def make_record():
    """Build a record; two ranks read rows 0..7 of every step unless told otherwise."""

    def make(*, strategy="ddp", steps=STEPS, ranks=2, start=None, **changes):
        per_rank = 8 // ranks
        ids = [
            [list(range(rank * per_rank, (rank + 1) * per_rank)) for rank in range(ranks)]
            for _ in range(steps)
        ]
        record = {
            "schema": 1,
            "strategy": strategy,
            "engine": "trainer",
            "precision": "no",
            "status": "ok",
            "reason": None,
            "num_processes": ranks,
            "rehearsal": True,
            "model": {"name": "tiny", "path": start and str(start), "parameters": 6},
            "data": {"name": "stdlib", "hash": "abc", "rows": 100},
            "training": {"max_steps": steps, "seed": 42, "learning_rate": 1e-3},
            "losses": [5.0 - step / 10 for step in range(steps)],
            "grad_norms": [2.0] * steps,
            "learning_rates": [1e-3] * steps,
            "sample_ids": ids,
            "skipped_steps": [],
            "final_loss": 5.0 - (steps - 1) / 10,
            "tokens_per_second": 1000.0,
            "step_seconds": {"median": 0.5, "p90": 0.6},
            "first_step_seconds": 1.0,
            "memory": MEMORY,
            "per_rank": [],
            "attestation": {"held": True, "mismatches": []},
            "final": "final",
            "seconds": 12.0,
            "environment": {},
            "not_measured": {"memory.peak_bytes": "rehearsal on a CPU: no device to ask"},
        }
        return copy.deepcopy(record | changes)

    return make


@pytest.fixture
def write_weights():
    """Write a model folder; `shards` splits it over that many files with an index."""

    def write(folder: Path, tensors: dict[str, np.ndarray], *, shards: int = 1) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
            return folder
        weight_map = {}
        for number in range(shards):
            file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            part = {name: tensors[name] for name in list(tensors)[number::shards]}
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    return write


@pytest.fixture
def make_row():
    def make(**changes) -> Row:
        row = {
            "strategy": "ddp",
            "engine": "trainer",
            "status": "ok",
            "reason": None,
            "losses": [5.0, 4.9],
            "grad_norms": [2.0, 2.0],
            "final_loss": 4.9,
            "loss_gap": {"max": 1.2e-6, "mean": 1e-8},
            "grad_norm_gap": 3e-5,
            "weight_gap": 5e-5,
            "gates": {"loss": True, "grad_norm": True, "weights": True, "data": True},
            "tokens_per_second": 1000.0,
            "step_seconds": {"median": 0.5, "p90": 0.6},
            "memory": dict(MEMORY),
            "per_rank": [],
            "attestation": {"held": True, "mismatches": []},
            "seconds": 12.0,
            "not_measured": {"memory.peak_bytes": "rehearsal on a CPU"},
            "folder": "ddp-trainer-1",
            "command": "accelerate launch --config_file ddp.yaml -m toolkit.train",
            "num_processes": 2,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "rehearsal": True,
            "broken": [],
            "notes": [],
            "tail": [],
            "fix": None,
        }
        return row | changes

    return make


@pytest.fixture
def make_results(make_row):
    def make(*rows: Row, **changes) -> Results:
        single = make_row(
            strategy="single",
            loss_gap=None,
            grad_norm_gap=None,
            weight_gap=None,
            gates={},
            num_processes=1,
        )
        return {
            "schema": 1,
            "control": {"strategy": "single", "engine": "trainer", "reason": None},
            "environment": {"cpus": 2, "memory_bytes": 2**33, "versions": {"torch": "2.11"}},
            "runs": [single, *rows],
            "name": "20260101-120000",
            "complete": True,
            "rehearsal": True,
            "precision": "no",
            "fixed": {"rows per optimizer step": 16, "optimizer steps": 20},
        } | changes

    return make


def collective(kind, purpose, payload):
    return {
        "kind": kind,
        "purpose": purpose,
        "dtype": "float32",
        "ranks": 2,
        "calls": 1,
        "elements": payload // 4,
        "payload_bytes": payload,
        "wire_bytes": float(payload),
    }


@pytest.fixture
def full_results(make_results, make_row):
    """A comparison with everything in it: measured, predicted, failed, skipped."""

    def make(*, rehearsal=True) -> Results:
        def memory(parameters):
            states = {"parameters_bytes": parameters, "optimizer_bytes": 2 * parameters}
            peak = None if rehearsal else 5 * parameters
            return MEMORY | states | {"gradients_bytes": parameters, "peak_bytes": peak}

        def measured(parameters, *, sent, **changes):
            held = memory(parameters)
            moved = [collective("all_reduce", "gradients", sent)] if sent else []
            predicted = {
                "memory": {name: held[name] for name in list(MEMORY)[1:5]},
                "peak_bytes": {"low": 4 * parameters, "high": 6 * parameters},
                "traffic_bytes": sent,
                "errors": {},
                "reason": None,
            }
            traffic = {
                "step": 2,
                "micro_batches": 2,
                "transport": "gloo",
                "collectives": [*moved, collective("all_reduce", "metrics", 16)],
                "sent_elements": 2 * sent // 4,
                "textbook_elements": 2 * sent // 4,
                "disagreements": [],
            }
            ranks = [{"rank": rank, "memory": held, "device": "cpu"} for rank in range(2)]
            return {
                "memory": held,
                "per_rank": ranks,
                "predicted": predicted,
                "traffic": traffic,
                "losses": [5.0, 4.5, 4.25, 4.0],
                "rehearsal": rehearsal,
                "not_measured": {"memory.peak_bytes": "a CPU"} if rehearsal else {},
            } | changes

        failed = {
            "status": "oom",
            "reason": "rank 1 failed at step 2: OutOfMemoryError",
            "losses": None,
            "final_loss": None,
            "loss_gap": None,
            "grad_norm_gap": None,
            "weight_gap": None,
            "gates": {},
            "tokens_per_second": None,
            "step_seconds": None,
            "memory": None,
            "per_rank": None,
            "attestation": None,
            "tail": ["Traceback", "torch.OutOfMemoryError: CUDA out of memory"],
            "fix": "Use a smaller batch.",
            "not_measured": dict.fromkeys(
                ["tokens_per_second", "step_seconds", "memory", "losses", "loss_gap", "traffic"],
                "oom: rank 1 failed at step 2: OutOfMemoryError",
            ),
            "rehearsal": rehearsal,
        }
        results = make_results(
            make_row(**measured(2**28, sent=2**28, losses=[5.0, 4.5000001, 4.25, 4.00001])),
            make_row(**measured(2**27, sent=2**29), strategy="fsdp", tokens_per_second=700.0),
            make_row(**measured(2**28, sent=2**28), engine="loop"),
            make_row(strategy="zero3", **failed),
            rehearsal=rehearsal,
        )
        results["runs"][0] |= measured(2**28, sent=0)
        return results

    return make
