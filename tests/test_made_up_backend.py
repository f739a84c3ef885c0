"""A backend that the toolkit does not have is refused by its name, before anything is written."""

import sys
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.fsdp import FullyShardedDataParallel

from toolkit import backends, cli, engines, environment
from toolkit.backends.deepspeed_json import deepspeed_config
from toolkit.configs.accelerate import num_processes_problem
from toolkit.configs.optimizers import optimizer_problem
from toolkit.engines.backend import backend_of
from toolkit.errors import UsageError
from toolkit.measuring import memory
from toolkit.measuring.attestation import Refused, Requested, actual_before, compare, require
from toolkit.measuring.recorder import Recorder
from toolkit.measuring.traffic import Ledger, textbook_volume
from toolkit.planning import recommend
from toolkit.planning.job import PlannedJob
from toolkit.planning.models.resolve import resolve_model
from toolkit.planning.plan import plan
from toolkit.strategies import STRATEGIES, Backend, Strategy

MADE_UP = Strategy(
    name="made_up", backend=cast("Backend", "made_up"), summary="every weight split over the ranks"
)
REFUSED = "does not know the backend 'made_up' of strategy 'made_up'"


@pytest.fixture(autouse=True)
def _a_strategy_of_a_made_up_backend(monkeypatch):
    monkeypatch.setitem(cast("dict[str, Any]", STRATEGIES), "made_up", MADE_UP)


@pytest.mark.parametrize(
    "claim",
    [
        lambda strategy: strategy.is_distributed,
        lambda strategy: strategy.shards_optimizer,
        lambda strategy: strategy.shards_gradients,
        lambda strategy: strategy.shards_parameters,
        lambda strategy: strategy.reads_deepspeed_json,
        lambda strategy: strategy.data_parallel_size(4),
    ],
)
def test_no_claim_is_made_about_a_made_up_backend(claim):
    with pytest.raises(UsageError, match=REFUSED):
        claim(MADE_UP)
    for strategy in STRATEGIES.values():
        if strategy is not MADE_UP:
            claim(strategy)


def test_the_refusal_names_the_strategies_that_are_known():
    with pytest.raises(UsageError, match=r"Choose from: single, ddp, .*parameter_server\.$"):
        MADE_UP.data_parallel_size(2)


@pytest.mark.parametrize(
    "words",
    [
        "plan 7b --strategy made_up",
        "plan 7b --strategy made_up --gpu L4 --gpus 1 --json",
        "plan 7b --strategy made_up --gpu L4 --plot plan.svg",
        "recommend 7b --gpu L4 --write files",
        "configs show made_up",
        "configs path made_up",
        "configs write made_up --to files",
        "configs write made_up --to files --layer LlamaDecoderLayer",
        "compare --strategies single,made_up --output run",
        "compare --strategies made_up --scale 1,2 --output run",
        "compare --bisect single made_up --output run",
    ],
)
def test_every_verb_that_takes_a_strategy_refuses_it(words, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # `recommend` takes no strategy: it looks at those of a list.
    monkeypatch.setattr(recommend, "SHARDED", (*recommend.SHARDED, "made_up"))
    monkeypatch.setattr(sys, "argv", ["toolkit", *words.split()])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert REFUSED in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_all_strategies_says_why_it_has_no_row():
    everything = plan("7b", strategies="all")
    assert [row.strategy.name for row in everything.rows] == [
        n for n in STRATEGIES if n not in ("fsdp_hybrid", "tensor_ddp", "three_d", "made_up")
    ]
    assert REFUSED in everything.left_out["made_up"]


def test_every_other_part_that_decides_by_strategy_refuses_it():
    ddp = PlannedJob(model=resolve_model("7b"), strategy=STRATEGIES["ddp"])
    with pytest.raises(UsageError, match=REFUSED):
        replace(ddp, strategy=MADE_UP)
    for decides in (
        lambda: optimizer_problem("adamw_torch", MADE_UP),
        lambda: num_processes_problem(MADE_UP, 2),
        lambda: deepspeed_config(MADE_UP),
        lambda: environment.missing_for(MADE_UP),
        lambda: backends.backend_of(MADE_UP).textbook(trained=1, everything=1, ranks=2),
        lambda: backends.backend_of(MADE_UP).ranks_among(2),
    ):
        with pytest.raises(UsageError, match=REFUSED):
            decides()


class MadeUp(torch.nn.Module):
    """A wrapper that no backend of the toolkit has."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


@pytest.fixture
def _fresh_accelerate_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.usefixtures("_fresh_accelerate_state")
def test_a_rank_refuses_it_before_its_first_step():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(UsageError, match=f"A rank {REFUSED}"):
        Recorder(Requested(strategy=MADE_UP, num_processes=1), rehearsal=True)
    asked = Requested(strategy=STRATEGIES["single"], num_processes=1)
    recorder = Recorder(asked, rehearsal=True)
    recorder.requested = replace(asked, strategy=MADE_UP)
    with pytest.raises(UsageError, match=f"A rank {REFUSED}"):
        recorder.prepared(accelerator, model, optimizer)
    recorder.close()


def test_the_ledgers_refuse_it():
    model = torch.nn.Linear(4, 1)
    with pytest.raises(UsageError, match=REFUSED):
        textbook_volume(model, MADE_UP, ranks=2)


@pytest.mark.usefixtures("_fresh_accelerate_state")
def test_a_wrapper_that_no_backend_has_is_refused_by_its_name(monkeypatch):
    """Of one process nothing is told by it: a user's own model may look like a wrapper."""
    accelerator = Accelerator(cpu=True)
    wrapped = MadeUp(torch.nn.Linear(4, 1))
    assert backend_of(wrapped).actual_settings(accelerator)["wrapper"] == "none"
    monkeypatch.setattr(engines.ddp, "world_size", lambda: 2)
    asked = Requested(strategy=STRATEGIES["ddp"], num_processes=2).before_first_step()
    mismatches = compare(asked, actual_before(accelerator, wrapped), rank=0)
    said = "wrapper: asked DistributedDataParallel, engaged MadeUp (rank 0)"
    assert said in [str(mismatch) for mismatch in mismatches]
    with pytest.raises(Refused, match="MadeUp"):
        require(mismatches)


@pytest.mark.filterwarnings("ignore")  # torch 2.13 warns of FSDP1 on one rank
@pytest.mark.parametrize("start", [Ledger().start, memory.gradient_bytes])
def test_a_model_under_fsdp1_is_refused_by_the_ledgers(start, one_rank):
    wrapped = FullyShardedDataParallel(torch.nn.Linear(4, 1), device_id=torch.device("cpu"))
    with pytest.raises(UsageError, match=r"FullyShardedDataParallel \(FSDP1\).*fsdp_version: 2"):
        start(wrapped)
