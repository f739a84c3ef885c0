"""Plans and recommendations as JSON: bytes, seconds, and every term with its formula."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from toolkit.planning.terms import Interval, Term

if TYPE_CHECKING:
    from toolkit.planning.job import Job
    from toolkit.planning.memory.estimate import MemoryEstimate
    from toolkit.planning.models.shape import ModelShape
    from toolkit.planning.plan import Plan, Row
    from toolkit.planning.remedies import Remedy
    from toolkit.planning.speed.estimate import Speed
    from toolkit.planning.speed.gpus import Gpu
    from toolkit.planning.speed.traffic import Collective
    from toolkit.planning.verdict import Verdict

NO_GPU = "no GPU was named (--gpu)"


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain data."""
    from toolkit.planning.plan import SCHEMA

    return {
        "schema": SCHEMA,
        "model": model_as_json(plan.model),
        "gpu": None if plan.gpu is None else gpu_as_json(plan.gpu),
        "dollars_per_hour": plan.dollars_per_hour,
        "rows": [row_as_json(row, plan) for row in plan.rows],
        "left_out": plan.left_out,
        "notes": list(plan.notes),
    }


def row_as_json(row: Row, plan: Plan) -> dict[str, Any]:
    """Return one strategy's part."""
    from toolkit.planning.speed.estimate import cost
    from toolkit.planning.speed.traffic import collectives

    verdict, speed = row.verdict, row.speed
    not_planned: dict[str, str] = {}
    if row.gpu is None:
        not_planned = dict.fromkeys(
            ("verdict", "speed", "largest_batch", "longest_sequence"), NO_GPU
        )
    bill = None
    if speed is None or plan.tokens is None:
        not_planned["cost"] = NO_GPU if speed is None else "no length was given (--tokens)"
    else:
        bill = cost(speed, tokens=plan.tokens, dollars_per_hour=plan.dollars_per_hour)
    return {
        "strategy": row.strategy.name,
        "job": job_as_json(row.job),
        "memory": memory_as_json(row.memory),
        "traffic": [collective_as_json(one) for one in collectives(row.job)],
        "verdict": None if verdict is None else verdict_as_json(verdict),
        "largest_batch": row.largest_batch,
        "longest_sequence": row.longest_sequence,
        "remedies": [remedy_as_json(remedy) for remedy in row.remedies],
        "together": None if row.together is None else remedy_as_json(row.together),
        "speed": None if speed is None else speed_as_json(speed),
        "cost": None if bill is None else asdict(bill),
        "not_planned": not_planned,
    }


def model_as_json(model: ModelShape) -> dict[str, Any]:
    return {
        "name": model.name,
        "architecture": model.architecture,
        "exact": model.exact,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "layers": model.layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "tied": model.tied,
    }


def gpu_as_json(gpu: Gpu) -> dict[str, Any]:
    return asdict(gpu)


def job_as_json(job: Job) -> dict[str, Any]:
    """Return what a job asks for, the model by its name."""
    from dataclasses import fields

    values: dict[str, Any] = {field.name: getattr(job, field.name) for field in fields(job)}
    return values | {"model": job.model.name, "strategy": job.strategy.name}


def memory_as_json(memory: MemoryEstimate) -> dict[str, Any]:
    return {
        "total": interval(memory.total),
        "allocated": interval(memory.allocated),
        "reserved": interval(memory.reserved),
        "host_bytes": interval(memory.host_bytes),
        "nvme_bytes": interval(memory.nvme_bytes),
        "at_rest": interval(memory.at_rest),
        "peak_phase": memory.peak_phase,
        "states": asdict(memory.states),
        "by_category": {name: interval(value) for name, value in memory.by_category().items()},
        "terms": [term_as_json(term) for term in memory.terms],
    }


def term_as_json(term: Term) -> dict[str, Any]:
    return {
        "category": term.category,
        "name": term.name,
        "bytes": interval(term.bytes),
        "place": term.place,
        "phases": list(term.phases),
        "formula": term.formula,
        "inputs": dict(term.inputs),
    }


def verdict_as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "answer": verdict.answer,
        "needed_bytes": interval(verdict.needed),
        "usable_bytes": verdict.usable_bytes,
        "margin_bytes": verdict.margin_bytes,
        "host_needed_bytes": interval(verdict.host_needed),
        "host_bytes": verdict.host_bytes,
        "host_margin_bytes": verdict.host_margin_bytes,
    }


def remedy_as_json(remedy: Remedy) -> dict[str, Any]:
    return {
        "what": remedy.what,
        "cost": remedy.cost,
        "job": job_as_json(remedy.job),
        "verdict": verdict_as_json(remedy.verdict),
    }


def collective_as_json(collective: Collective) -> dict[str, Any]:
    return asdict(collective) | {
        "payload_bytes": collective.payload_bytes,
        "wire_bytes": collective.wire_bytes,
    }


def speed_as_json(speed: Speed) -> dict[str, Any]:
    return asdict(speed)


def interval(value: Interval) -> dict[str, float]:
    return {"low": value.low, "high": value.high}
