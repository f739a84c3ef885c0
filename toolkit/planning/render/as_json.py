"""Plans and recommendations as JSON: bytes, seconds, and every term with its formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from toolkit.jobs.shape import ModelShape
from toolkit.jobs.terms import Interval
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.estimate import MemoryEstimate
from toolkit.planning.plan import SCHEMA, Plan, PlanRow
from toolkit.planning.speed.estimate import PlannedSpeed
from toolkit.planning.speed.traffic import collectives
from toolkit.planning.verdict import Verdict

if TYPE_CHECKING:  # a plan needs none of them, and is printed sooner
    from toolkit.planning.learning_rate import LearningRate
    from toolkit.planning.recommend import Option, Recommendation
    from toolkit.planning.remedies import Remedy
    from toolkit.planning.search import Candidate

OWN_TO_THE_ESTIMATE = ("lasting", "communicated")
"""Fields of a term that only the estimate itself reads."""

NO_GPU = "no GPU was named (--gpu)"


def as_json(answer: Plan | Recommendation) -> dict[str, Any]:
    """Return a plan or a recommendation as plain data."""
    start = {"schema": SCHEMA, "model": _model(answer.model)}
    return start | (_plan(answer) if isinstance(answer, Plan) else _recommendation(answer))


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "gpu": None if plan.gpu is None else asdict(plan.gpu),
        "dollars_per_hour": plan.dollars_per_hour,
        "rows": [_row(row, plan) for row in plan.rows],
        "left_out": plan.left_out,
        "notes": list(plan.notes),
    }


def _row(row: PlanRow, plan: Plan) -> dict[str, Any]:
    speed = row.speed
    not_planned: dict[str, str] = {}
    if row.gpu is None:
        not_planned = dict.fromkeys(
            ("verdict", "speed", "largest_batch", "longest_sequence"), NO_GPU
        )
    cost = plan.cost(row)
    if cost is None:
        not_planned["cost"] = NO_GPU if speed is None else "no length was given (--tokens)"
    return {
        "strategy": row.strategy.name,
        "mesh": row.strategy.mesh(row.job.gpus),
        "bubble": row.job.backend.waiting_share(row.job),
        "job": _job(row.job),
        "memory": _memory(row.memory),
        "traffic": [
            asdict(collective)
            | {"payload_bytes": collective.payload_bytes, "wire_bytes": collective.wire_bytes}
            for collective in collectives(row.job)
        ],
        "verdict": None if row.verdict is None else _verdict(row.verdict),
        "largest_batch": row.largest_batch,
        "longest_sequence": row.longest_sequence,
        "remedies": [_remedy(remedy) for remedy in row.remedies],
        "together": None if row.together is None else _remedy(row.together),
        "speed": None if speed is None else _speed(speed),
        "cost": None if cost is None else asdict(cost),
        "not_planned": not_planned,
    }


def _recommendation(answer: Recommendation) -> dict[str, Any]:
    rate = answer.learning_rate
    return {
        "gpu": asdict(answer.gpu),
        "goal": answer.goal,
        "choice": None if answer.choice is None else _candidate(answer.choice),
        "closest": None if answer.closest is None else _candidate(answer.closest),
        "runners_up": [_candidate(candidate) for candidate in answer.runners_up],
        "options": [_option(option) for option in answer.options],
        "nearest": [_remedy(remedy) for remedy in answer.nearest],
        "reasons": list(answer.reasons),
        "learning_rate": _learning_rate(rate),
        "most_hours": answer.most_hours,
        "keeps_bounds": answer.keeps_bounds,
    }


def _option(option: Option) -> dict[str, Any]:
    from toolkit.planning.render.commands import paste_line

    return _candidate(option.candidate) | {
        "title": option.title,
        "gives_up": list(option.gives_up),
        "learning_rate": _learning_rate(option.learning_rate),
        "cost": None if option.cost is None else asdict(option.cost),
        "price_date": option.price_date or None,
        "command": paste_line(option),
    }


def _learning_rate(rate: LearningRate) -> dict[str, Any]:
    return asdict(rate) | {"linear": rate.linear, "square_root": rate.square_root}


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "job": _job(candidate.job),
        "verdict": _verdict(candidate.verdict),
        "memory": _memory(candidate.memory),
        "speed": _speed(candidate.speed),
        "tokens_per_second": asdict(candidate.speed.tokens_per_second),
    }


def _model(model: ModelShape) -> dict[str, Any]:
    names = ("name", "architecture", "exact", "parameters", "active_parameters", "layers")
    return {name: getattr(model, name) for name in (*names, "hidden_size", "vocab_size", "tied")}


def _job(job: PlannedJob) -> dict[str, Any]:
    """Return what a job asks for, the model and the strategy by their names."""
    options = {field.name: getattr(job, field.name) for field in fields(job)}
    options |= {"model": job.model.name, "strategy": job.strategy.name}
    # Schema 1 begins with these two, and has another name for the dtype of the weights.
    names = dict.fromkeys(("model", "strategy", *options))
    return {("weights" if name == "dtype" else name): options[name] for name in names}


def _memory(memory: MemoryEstimate) -> dict[str, Any]:
    sums = ("total", "allocated", "reserved", "host_bytes", "nvme_bytes", "at_rest")
    return {name: asdict(getattr(memory, name)) for name in sums} | {
        "expected_bytes": memory.expected,
        "worst_bytes": memory.worst,
        "peak_phase": memory.peak_phase,
        "states": asdict(memory.states),
        "by_category": {name: asdict(value) for name, value in memory.by_category().items()},
        "terms": [
            {key: value for key, value in asdict(term).items() if key not in OWN_TO_THE_ESTIMATE}
            | {"phases": list(term.phases)}
            for term in memory.terms
        ],
    }


def _speed(speed: PlannedSpeed) -> dict[str, Any]:
    terms = [asdict(term) | {"inputs": _inputs(term.inputs)} for term in speed.terms]
    return asdict(speed) | {"terms": terms}


def _inputs(inputs: Mapping[str, float | str | Interval]) -> dict[str, float | str]:
    return {k: str(v) if isinstance(v, Interval) else v for k, v in inputs.items()}


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "answer": verdict.answer,
        "needed_bytes": asdict(verdict.needed),
        "usable_bytes": verdict.usable_bytes,
        "margin_bytes": verdict.margin_bytes,
        "host_needed_bytes": asdict(verdict.host_needed),
        "host_bytes": verdict.host_bytes,
        "host_margin_bytes": verdict.host_margin_bytes,
    }


def _remedy(remedy: Remedy) -> dict[str, Any]:
    return {
        "what": remedy.name,
        "cost": remedy.cost,
        "job": _job(remedy.job),
        "verdict": _verdict(remedy.verdict),
    }
