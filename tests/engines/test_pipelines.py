"""Two ranks, or two tensor groups, train a model cut into stages as one process trains it whole."""

import sys

import launches
import pipeline_cases
import pytest
import torch
from places import SCRIPTS

from toolkit.backends.schedules import SCHEDULES, bubble


def started(folder, environment, *, tensor):
    command = [sys.executable, SCRIPTS / "pipelines.py", folder / "store", folder, tensor]
    done = launches.run(command, environment=environment, timeout=300)
    assert done.returncode == 0, done.stdout
    return [
        torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2 * tensor)
    ]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory, launch_environment):
    return started(tmp_path_factory.mktemp("pipelines"), launch_environment, tensor=1)


@pytest.fixture(scope="module")
def of_groups(tmp_path_factory, launch_environment):
    return started(tmp_path_factory.mktemp("groups"), launch_environment, tensor=2)


@pytest.mark.parametrize("name", pipeline_cases.CASES)
def test_losses_gradients_and_weights_equal_those_of_one_process(of_ranks, name):
    assert_as_one_process(pipeline_cases.CASES[name], [outcomes[name] for outcomes in of_ranks])


@pytest.mark.parametrize("name", pipeline_cases.IN_GROUPS)
def test_so_do_those_of_stages_that_are_tensor_groups(of_groups, name):
    ranks = [outcomes[name] for outcomes in of_groups]
    assert_as_one_process(pipeline_cases.IN_GROUPS[name], ranks)


def assert_as_one_process(case, ranks):
    model = case.model()
    optimizer = pipeline_cases.optimizer_for(model)
    for step, (window, items) in enumerate(pipeline_cases.windows(case)):
        losses = [model(**batch, num_items_in_batch=items).loss for batch in window]
        sum(losses).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.limit)
        assert norm > case.limit, "clipping is not active"
        for rank in ranks:
            torch.testing.assert_close(
                rank["losses"][step], torch.stack(losses).detach(), rtol=0, atol=1e-6
            )
            torch.testing.assert_close(rank["norms"][step], norm, rtol=1e-5, atol=0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        between = pipeline_cases.loss_between_steps(case, model)
    whole = dict(model.named_parameters())
    assert {name for rank in ranks for name in rank["weights"]} == whole.keys()
    for rank in ranks:
        torch.testing.assert_close(rank["between"], between, rtol=0, atol=1e-6)
        for parameter, gradient in rank["gradients"].items():
            torch.testing.assert_close(gradient, gradients[parameter], rtol=1e-4, atol=1e-6)
        for parameter, weight in rank["weights"].items():
            torch.testing.assert_close(weight, whole[parameter].detach(), rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", pipeline_cases.CASES)
def test_slots_counted_from_the_recorded_order_show_the_bubble_of_the_formula(of_ranks, name):
    case = pipeline_cases.CASES[name]
    first, second = (outcomes[name] for outcomes in of_ranks)
    expected = bubble(SCHEDULES[case.schedule], ranks=2, micro_batches=case.micro_batches)
    assert first["slots"] == second["slots"]
    for idle, slots in first["slots"]:
        assert idle / slots == pytest.approx(expected)
    forwards = [
        work[1:] for rank in (first, second) for work in rank["work"] if work[0] == "forward"
    ]
    stages = SCHEDULES[case.schedule].stages(2)
    assert sorted(forwards) == [(s, n) for s in range(stages) for n in range(case.micro_batches)]
