"""A backend that the toolkit does not have is refused by its name, before anything is written."""

from typing import Any, cast

import pytest

from toolkit.errors import UsageError
from toolkit.strategies import STRATEGIES, Backend, Strategy

TENSOR = Strategy(
    name="tensor", backend=cast("Backend", "tensor"), summary="every weight split over the ranks"
)
REFUSED = "does not know the backend 'tensor' of strategy 'tensor'"


@pytest.fixture(autouse=True)
def _a_strategy_of_a_made_up_backend(monkeypatch):
    monkeypatch.setitem(cast("dict[str, Any]", STRATEGIES), "tensor", TENSOR)


@pytest.mark.parametrize(
    "claim",
    [
        lambda strategy: strategy.is_distributed,
        lambda strategy: strategy.shards_optimizer,
        lambda strategy: strategy.shards_gradients,
        lambda strategy: strategy.shards_parameters,
        lambda strategy: strategy.data_parallel_size(4),
    ],
)
def test_no_claim_is_made_about_a_made_up_backend(claim):
    with pytest.raises(UsageError, match=REFUSED):
        claim(TENSOR)
    for strategy in STRATEGIES.values():
        if strategy is not TENSOR:
            claim(strategy)


def test_the_refusal_names_the_strategies_that_are_known():
    with pytest.raises(UsageError, match=r"Choose from: single, ddp, .*fsdp_hybrid\.$"):
        TENSOR.data_parallel_size(2)
