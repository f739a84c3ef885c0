"""Records and weights as `toolkit.train` leaves them, made small and by hand."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from example_record import MEMORY, NOT_COUNTED, RECORD, TRAINING
from safetensors.numpy import save_file
from small_llama import CONFIG

from toolkit.comparing.predicted import MOVED, STATES, no_prediction
from toolkit.records.fields import unmeasured
from toolkit.records.json_files import write_json
from toolkit.records.results import Results, Row

STEPS = 4

UNCOUNTED = (
    *("supervised_tokens_per_second", "phases", "warm_up", "save_seconds"),
    *("compute", "cost", "peak", "traffic"),
)


@pytest.fixture(scope="session")
def make_record():
    """Build a record; two ranks read rows 0..7 of every step unless told otherwise."""

    def make(*, strategy="ddp", steps=STEPS, ranks=2, start=None, **changes):
        per_rank = 8 // ranks
        ids = [
            [list(range(rank * per_rank, (rank + 1) * per_rank)) for rank in range(ranks)]
            for _ in range(steps)
        ]
        record = RECORD | {
            "strategy": strategy,
            "num_processes": ranks,
            "model": RECORD["model"] | {"path": start and str(start)},
            "training": TRAINING | {"max_steps": steps},
            "losses": [5.0 - step / 10 for step in range(steps)],
            "grad_norms": [2.0] * steps,
            "learning_rates": [1e-3] * steps,
            "sample_ids": ids,
            "final_loss": 5.0 - (steps - 1) / 10,
        }
        return copy.deepcopy(record | changes)

    return make


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def make_row():
    def make(**changes) -> Row:
        row = {
            **unmeasured(),
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
            "weight_difference": {"value": 2e-6, "tensor": "model.layers.0.mlp.weight"},
            "gradient_difference": {"value": 3e-7, "tensor": "model.layers.0.mlp.weight"},
            "eval_loss_gap": None,
            "gates": {"loss": True, "grad_norm": True, "weights": True, "data": True},
            "tokens_per_second": 1000.0,
            "step_seconds": {"median": 0.5, "p90": 0.6},
            "repeats": [],
            "spread": None,
            "compute": None,
            "cost": None,
            "memory": dict(MEMORY),
            "per_rank": [],
            "ends": [],
            "predicted": no_prediction("no run has told what model it is"),
            "attestation": {"held": True, "mismatches": []},
            "seconds": 12.0,
            "not_measured": {
                "memory.peak_bytes": "rehearsal on a CPU",
                "memory.peak_reserved_bytes": "rehearsal on a CPU",
                **dict.fromkeys(UNCOUNTED, NOT_COUNTED),
                "spread": "the run was started once",
                **dict.fromkeys(("evaluation", "eval_loss_gap", "samples"), "nobody asked for it"),
            },
            "folder": "ddp-trainer-1",
            "command": "accelerate launch --config_file ddp.yaml -m toolkit.train",
            "num_processes": 2,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "rehearsal": True,
            "broken": [],
            "notes": [],
            "guard_warnings": [],
            "tail": [],
            "fix": None,
        } | changes
        return {"name": f"{row['strategy']}-{row['engine']}"} | row

    return make


@pytest.fixture(scope="session")
def make_results(make_row):
    def make(*rows: Row, **changes) -> Results:
        single = make_row(
            strategy="single",
            loss_gap=None,
            grad_norm_gap=None,
            weight_gap=None,
            weight_difference=None,
            gradient_difference=None,
            gates={},
            num_processes=1,
        )
        return {
            "schema": 1,
            "control": {
                "strategy": "single",
                "engine": "trainer",
                "reason": None,
                "name": "single-trainer",
            },
            "environment": {"cpus": 2, "memory_bytes": 2**33, "versions": {"torch": "2.11"}},
            "runs": [single, *rows],
            "name": "20260101-120000",
            "complete": True,
            "rehearsal": True,
            "precision": "no",
            "fixed": {"rows per optimizer step": 16, "optimizer steps": 20},
            "noise": None,
            "dollars_per_hour": None,
            "not_measured": {"noise": "there are no two runs to tell apart"},
        } | changes

    return make


def collective(kind, purpose, payload, *, dtype="float32"):
    return {
        "kind": kind,
        "purpose": purpose,
        "dtype": dtype,
        "ranks": 2,
        "calls": 1,
        "elements": payload // 4,
        "payload_bytes": payload,
        "wire_bytes": float(payload),
    }


def timed(median):
    return {"median": median, "p90": 1.25 * median}


def speed_fields(speed, *, rehearsal):
    """What a run of three starts has on its time and its speed."""
    starts = [
        {
            "folder": f"run-{number}",
            "tokens_per_second": factor * speed,
            "step_seconds": timed(0.5 / factor),
            "timed_seconds": [0.5 / factor] * 4,
            "seconds": 12.0,
        }
        for number, factor in enumerate((1.0, 0.99, 1.02), start=1)
    ]
    phases = {"data": 0.01, "forward": 0.14, "backward": 0.25, "optimizer": 0.08, "other": 0.02}
    compute = {"tflops_per_gpu": 123.4, "mfu": 0.395, "convention": "6 N a token", "gpu": "A100"}
    cost = {"gpu_hours": 0.0067, "dollars": 0.02, "dollars_per_million_tokens": 1.23}
    return {
        "tokens_per_second": speed,
        "supervised_tokens_per_second": 0.8 * speed,
        "phases": {name: timed(median) for name, median in phases.items()},
        "warm_up": {
            "start_seconds": 75.0,
            "build_seconds": None,
            "cache_seconds": 0.25,
            "first_step_seconds": 2.5,
            "compile_seconds": None,
            "steps": 3,
        },
        "save_seconds": 1.5,
        "repeats": starts,
        "spread": {"least": 0.99 * speed, "most": 1.02 * speed, "share": 0.03},
        "compute": None if rehearsal else compute,
        "cost": None if rehearsal else cost,
    }


def counted_peak(parameters):
    categories = {
        "parameters": parameters,
        "master": 0,
        "gradients": parameters,
        "optimizer": 2 * parameters,
        "activations": parameters // 2,
        "other": parameters // 4,
    }
    total = sum(categories.values())
    return {
        "step": 2,
        "phase": "backward",
        "total_bytes": total,
        "categories": categories,
        "micro_batches": [{"rows": 4, "tokens": 256}],
    }


@pytest.fixture(scope="session")
def full_results(make_results, make_row):
    """A comparison with everything in it: measured, predicted, failed, skipped."""

    def make(*, rehearsal=True) -> Results:
        def memory(parameters):
            states = {"parameters_bytes": parameters, "optimizer_bytes": 2 * parameters}
            device = {
                "peak_bytes": None if rehearsal else 5 * parameters,
                "peak_reserved_bytes": None if rehearsal else 6 * parameters,
            }
            return MEMORY | states | device | {"gradients_bytes": parameters, "nvme_bytes": 0}

        def measured(parameters, *, sent, speed=1000.0, **changes):
            held = memory(parameters)
            moved = [collective("all_reduce", "gradients", sent)] if sent else []
            besides = [
                collective("all_reduce", "metrics", 16),
                collective("all_reduce", "norm", 8, dtype="float64"),
            ]
            predicted = {
                "memory": {name: held[name] for name in STATES},
                "peak_bytes": {"low": 4 * parameters, "high": 6 * parameters},
                "counted_bytes": {"low": 4 * parameters, "high": 5 * parameters},
                "traffic_bytes": sent,
                "errors": {"traffic_bytes": 0.0} | ({} if rehearsal else {"peak_bytes": 0.0}),
                "reason": None,
                "room_bytes": None if rehearsal else 2**34,
                "over_bytes": None if rehearsal else {"low": -(2**33), "high": -(2**32)},
            }
            traffic = {
                "step": 2,
                "micro_batches": 2,
                "transport": "gloo",
                "collectives": [*moved, *besides],
                "sent_elements": 2 * sent // 4,
                "textbook_elements": 2 * sent // 4,
                "trained_elements": 2**26,
                "all_elements": 2**26,
                "disagreements": [],
            }
            ranks = [
                {
                    "rank": rank,
                    "memory": held,
                    "device": "cpu",
                    "peak": counted_peak(parameters - rank * parameters // 8),
                }
                for rank in range(2)
            ]
            unknown = {
                "memory.peak_bytes": "a CPU",
                "memory.peak_reserved_bytes": "a CPU",
                "compute": "a CPU has no rated peak",
                "cost": "a rehearsal used no GPU",
            }
            return {
                "memory": held,
                "peak": counted_peak(parameters),
                "per_rank": ranks,
                "predicted": predicted,
                "traffic": traffic,
                "losses": [5.0, 4.5, 4.25, 4.0],
                "weight_difference": {"value": 2e-6, "tensor": "model.layers.0.mlp.weight"},
                "ends": [],
                "rehearsal": rehearsal,
                "not_measured": unknown if rehearsal else {},
                **speed_fields(speed, rehearsal=rehearsal),
            } | changes

        unmeasured = (
            "losses",
            "final_loss",
            "loss_gap",
            "grad_norm_gap",
            "weight_gap",
            "weight_difference",
            "gradient_difference",
            "tokens_per_second",
            "supervised_tokens_per_second",
            "step_seconds",
            "phases",
            "warm_up",
            "save_seconds",
            "spread",
            "compute",
            "cost",
            "memory",
            "peak",
            "per_rank",
            "traffic",
            "attestation",
        )
        reason = "rank 1 failed at step 2: OutOfMemoryError"
        ended = {"state": "failed", "step": 1, "peak_bytes": 23 * 2**30}
        failed = {
            "status": "oom",
            "reason": reason,
            **dict.fromkeys(unmeasured),
            "gates": {},
            "repeats": [],
            "predicted": {
                "memory": None,
                "counted_bytes": None,
                "peak_bytes": {"low": 31 * 2**30, "high": 38 * 2**30},
                "traffic_bytes": None,
                "errors": {},
                "reason": None,
                "room_bytes": None if rehearsal else 24 * 2**30,
                "over_bytes": None if rehearsal else {"low": 9 * 2**30, "high": 17 * 2**30},
            },
            "ends": [
                {**ended, "rank": 0, "error": "RuntimeError: Connection closed by peer"},
                {**ended, "rank": 1, "error": "OutOfMemoryError: no more", "peak_bytes": 2**34},
                {**ended, "rank": 2, "error": None, "state": "running", "peak_bytes": None},
            ],
            "tail": ["Traceback", "torch.OutOfMemoryError: CUDA out of memory"],
            "fix": "Use a smaller batch.",
            "not_measured": dict.fromkeys(unmeasured, f"oom: {reason}"),
            "rehearsal": rehearsal,
        }
        results = make_results(
            make_row(**measured(2**28, sent=2**28, losses=[5.0, 4.5000001, 4.25, 4.00001])),
            make_row(
                **measured(2**27, sent=2**29, speed=700.0),
                strategy="fsdp",
                name="fsdp-trainer-x2",
            ),
            make_row(**measured(2**28, sent=2**28), engine="loop"),
            make_row(
                **measured(2**26, sent=2**29, speed=1200.0),
                strategy="fsdp",
                name="fsdp-trainer-x4",
                num_processes=4,
            ),
            make_row(strategy="zero3", **failed),
            rehearsal=rehearsal,
            noise={"share": 0.031, "basis": "repeats", "repeats": 3},
            dollars_per_hour=None if rehearsal else 3.0,
        )
        results["environment"] |= {"interconnect": ["GPU0-GPU1 NV4"], "commit": "0123abc"}
        results["runs"][0] |= measured(2**28, sent=0, speed=500.0)
        return results

    return make


FLAGS = {
    "--max_steps": STEPS,
    "--per_device_train_batch_size": 4,
    "--gradient_accumulation_steps": 2,
    "--throughput_steps": 5,
    "--tf32": False,
    "--dropout": "off",
}


@pytest.fixture
def run_folders(tmp_path, make_record, write_weights, full_results):
    """The folders of three runs as `toolkit compare` leaves them, without any results."""
    start = write_weights(tmp_path / "start", {"a": np.zeros((2, 3), np.float32)})
    (start / "config.json").write_text(json.dumps(CONFIG))
    folder = tmp_path / "comparison"
    training = TRAINING | {"max_steps": STEPS, "gradient_accumulation_steps": 2}
    training |= {"speed": {"on": {"loss_impl": "chunked"}}}
    measured = ("memory", "peak", "per_rank", "traffic", "phases", "warm_up", "save_seconds")
    row = full_results()["runs"][1]
    evaluated = {"loss": 4.5, "perplexity": 90.0, "tokens": 100, "rows": 8, "seconds": 0.5}
    for strategy, ranks in (("single", 1), ("ddp", 2), ("fsdp", 2)):
        run = folder / f"{strategy}-trainer-1"
        write_weights(run / "final", {"a": np.ones((2, 3), np.float32)})
        flags = {"--engine": "trainer", "--strategy": strategy, **FLAGS, "--seed": 7}
        if ranks == 1:
            flags["--gradient_accumulation_steps"] = 4
        spec = {
            "schema": 1,
            "strategy": strategy,
            "engine": "trainer",
            "num_processes": ranks,
            "precision": "no",
            "flags": [str(word) for flag in flags.items() for word in flag],
            "rehearsal": True,
        }
        record = make_record(
            strategy=strategy,
            ranks=ranks,
            start=start,
            training=training,
            timed_seconds=[0.5, 0.6, 0.7],
            evaluation=[{"step": step, **evaluated} for step in (0, STEPS)],
            samples=[{"prompt": "a", "before": "b", "after": "c"}],
            environment={"gpus": [{"name": "NVIDIA L4", "memory_bytes": 2**34}]},
            guards={"mode": "warn", "warnings": [{"kind": "slow", "step": 2, "text": "slow"}]},
            **{name: row[name] for name in measured},
        )
        write_json(run / "spec.json", spec)
        write_json(run / "record.json", record)
        (run / "command.txt").write_text(f"accelerate launch {strategy}.yaml\n")
    return folder


@pytest.fixture(scope="session")
def bare_results(full_results):
    """The same where nothing was counted or timed but losses, states and speed."""

    def make(*, rehearsal=True) -> Results:
        results = full_results(rehearsal=rehearsal)
        results |= {"noise": None, "not_measured": {"noise": "no run was started twice"}}
        missing = (*UNCOUNTED, "spread", "weight_difference", "gradient_difference")
        for row in results["runs"]:
            row |= dict.fromkeys(missing) | {"repeats": row["repeats"][:1]}
            row["not_measured"] |= dict.fromkeys(missing, NOT_COUNTED)
            for rank in row["per_rank"] or []:
                rank["peak"] = None
        results["runs"] = [row for row in results["runs"] if row["num_processes"] < 4]
        return results

    return make


@pytest.fixture(scope="session")
def poisoned():
    """Put a text wherever a run or a user could have put words."""

    def poison(value, text):
        if isinstance(value, dict):
            return {
                key: each
                if key in ("engine", "status", "errors", "precision")
                else poison(each, text)
                for key, each in value.items()
            }
        if isinstance(value, list):
            return [poison(each, text) for each in value]
        # These two decide which table a line is in.
        told = isinstance(value, str) and value not in MOVED
        return f"{value}{text}" if told else value

    return poison
