"""A backend that the toolkit does not have is refused by its name, before anything is written."""

import sys
from dataclasses import replace
from typing import Any, cast

import pytest

from toolkit import cli, environment
from toolkit.comparing.run.batches import processes_for
from toolkit.configs.accelerate import num_processes_problem
from toolkit.configs.deepspeed import deepspeed_config
from toolkit.configs.optimizers import optimizer_problem
from toolkit.errors import UsageError
from toolkit.planning import recommend
from toolkit.planning.job import PlannedJob
from toolkit.planning.models.resolve import resolve_model
from toolkit.planning.plan import plan
from toolkit.planning.speed.traffic import textbook
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
        lambda strategy: strategy.shards_at_the_step,
        lambda strategy: strategy.gathers_again,
        lambda strategy: strategy.reads_deepspeed_json,
        lambda strategy: strategy.steps_on_masters,
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


@pytest.mark.parametrize(
    "words",
    [
        "plan 7b --strategy tensor",
        "plan 7b --strategy tensor --gpu L4 --gpus 1 --json",
        "plan 7b --strategy tensor --gpu L4 --plot plan.svg",
        "recommend 7b --gpu L4 --write files",
        "configs show tensor",
        "configs path tensor",
        "configs write tensor --to files",
        "configs write tensor --to files --layer LlamaDecoderLayer",
        "compare --strategies single,tensor --output run",
        "compare --strategies tensor --scale 1,2 --output run",
        "compare --bisect single tensor --output run",
    ],
)
def test_every_verb_that_takes_a_strategy_refuses_it(words, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # `recommend` takes no strategy: it looks at those of a list.
    monkeypatch.setattr(recommend, "SHARDED", (*recommend.SHARDED, "tensor"))
    monkeypatch.setattr(sys, "argv", ["toolkit", *words.split()])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert REFUSED in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_all_strategies_says_why_it_has_no_row():
    everything = plan("7b", strategies="all")
    assert [row.strategy.name for row in everything.rows] == [*STRATEGIES][:-2]
    assert REFUSED in everything.left_out["tensor"]


def test_every_other_part_that_decides_by_strategy_refuses_it():
    ddp = PlannedJob(model=resolve_model("7b"), strategy=STRATEGIES["ddp"])
    with pytest.raises(UsageError, match=REFUSED):
        replace(ddp, strategy=TENSOR)
    for decides in (
        lambda: optimizer_problem("adamw_torch", TENSOR),
        lambda: num_processes_problem(TENSOR, 2),
        lambda: deepspeed_config(TENSOR),
        lambda: environment.missing_for(TENSOR),
        lambda: textbook(TENSOR, trained=1, everything=1, ranks=2),
        lambda: processes_for(TENSOR, 2),
    ):
        with pytest.raises(UsageError, match=REFUSED):
            decides()
