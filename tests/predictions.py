"""What the planner says of a run that a record describes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from toolkit.planning.architectures import shape_from_config
from toolkit.planning.job import Job
from toolkit.planning.states import state_bytes
from toolkit.strategies import STRATEGIES

STATES = ("parameters_bytes", "master_bytes", "gradients_bytes", "optimizer_bytes")


def job_of(record):
    """The job that a record of `toolkit.train` was made by, as far as its states go."""
    config = json.loads((Path(record["model"]["path"]) / "config.json").read_text())
    job = Job(
        model=shape_from_config(config, name=record["model"]["name"]),
        strategy=STRATEGIES[record["strategy"]],
        gpus=record["num_processes"],
        precision=record["precision"],
    )
    if record["training"]["optimizer"] == "adamw_torch_fused":
        job = replace(job, optimizer="adamw_fused")
    return job


def predicted(record):
    """State bytes of every rank, in the order of `per_rank`."""
    job = job_of(record)
    return [state_bytes(job, rank["rank"]).counted() for rank in record["per_rank"]]


def counted(record):
    """What the run counted, likewise."""
    return [{name: rank["memory"][name] for name in STATES} for rank in record["per_rank"]]
