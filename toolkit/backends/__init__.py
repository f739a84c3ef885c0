"""Backends before there is a rank: the plain twin of `toolkit.engines`, one module a family.

What a strategy's backend makes of a job, its files and its request is asked of `backend_of` alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from toolkit.strategies import Strategy, refuse_backend

if TYPE_CHECKING:
    from toolkit.backends.base import Backend


@lru_cache(maxsize=256)
def backend_of(strategy: Strategy) -> Backend:
    """Return the backend that trains by a strategy. Only its own family is imported.

    Raises:
        UsageError: no family here knows the strategy's backend.
    """
    match strategy.backend:
        case "single" | "ddp":
            from toolkit.backends import whole

            return (whole.Ddp if strategy.is_distributed else whole.Single)(strategy)
        case "deepspeed":
            from toolkit.backends import sequence, zero

            stage = zero.STAGES[strategy.zero_stage]
            return (sequence.Ulysses if strategy.splits_rows else stage)(strategy)
        case "fsdp":
            from toolkit.backends import fsdp, sequence

            return (sequence.Ring if strategy.splits_rows else fsdp.Fsdp2)(strategy)
        case "tensor":
            from toolkit.backends import tensor

            return tensor.Tensor(strategy)
        case "pipeline":
            from toolkit.backends import pipeline

            return pipeline.Pipeline(strategy)
        case "parameter_server":
            from toolkit.backends import server

            return server.ParameterServer(strategy)
        case _:
            refuse_backend(strategy.backend, strategy, "The toolkit")
