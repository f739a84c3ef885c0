"""Collectives at their calls: what they name, in real process groups of two and a pretended one."""

import json
import threading
import types
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from places import SCRIPTS
from torch.distributed._functional_collectives import wait_tensor as wait
from torch.testing._internal.distributed.fake_pg import FakeStore

from toolkit.measuring import peak, traffic
from toolkit.measuring.attestation import Requested
from toolkit.measuring.recorder import Recorder
from toolkit.measuring.traffic import Ledger, merged
from toolkit.planning.job import PlannedJob
from toolkit.planning.models.architectures import shape_from_config
from toolkit.planning.speed.traffic import collectives
from toolkit.strategies import STRATEGIES

PART, WHOLE = 5, 20
ALL = [0, 1, 2, 3]
ENGINES = ("ddp", "ddp_bf16", "fsdp", "fsdp_bf16", "zero2", "zero3", "zero3_bf16")


@pytest.fixture(scope="module")
def outcomes(launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("traffic")
    done = launch("ddp", SCRIPTS / "traffic.py", folder, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stdout
    return [json.loads((folder / f"outcomes-{rank}.json").read_text()) for rank in (0, 1)]


def payload(counted, *purposes):
    """Bytes by kind and purpose."""
    found = Counter()
    for row in counted:
        if row["purpose"] in purposes:
            found[row["kind"], row["purpose"]] += row["payload_bytes"]
    return dict(found)


@pytest.mark.parametrize("name", ENGINES)
def test_parameters_and_gradients_are_those_of_the_planner_to_the_byte(outcomes, name):
    for rank in outcomes:
        case = rank[name]
        job = PlannedJob(
            model=shape_from_config(rank["config"], name="test"),
            strategy=STRATEGIES[name.removesuffix("_bf16")],
            accumulation=2,
            precision=case["precision"],
            deepspeed=case["deepspeed"],
        )
        wanted = Counter()
        for each in collectives(job):
            wanted[each.kind, each.purpose] += each.payload_bytes
        del wanted["all_reduce", "norm"]
        counted = case["with"]["traffic"]["collectives"]
        assert payload(counted, "parameters", "gradients") == dict(wanted)


@pytest.mark.parametrize("name", ENGINES)
def test_a_run_is_the_same_to_the_last_bit_with_its_traffic_counted_and_without(outcomes, name):
    for rank in outcomes:
        counted, left_alone = rank[name]["with"], rank[name]["without"]
        for what in ("losses", "norms", "weights"):
            assert counted[what] == left_alone[what]
        assert left_alone["traffic"] is None


@pytest.mark.parametrize("name", ENGINES)
def test_only_the_second_step_is_counted_and_nothing_stays_behind(outcomes, name):
    for rank in outcomes:
        counted, left_alone = rank[name]["with"], rank[name]["without"]
        # Two micro-batches a step.
        assert counted["modes"] == [0, 0, 2, 2, 0, 0]  # of collectives, and of storages
        assert left_alone["modes"] == [0] * 6
        assert counted["hooks"][4:] == left_alone["hooks"][4:]
        assert counted["hooks"][2:4] != left_alone["hooks"][2:4]
        assert (counted["traffic"]["step"], counted["traffic"]["micro_batches"]) == (2, 2)
        assert counted["traffic"]["transport"] == "gloo"


@pytest.mark.parametrize("name", ["ddp", "zero2"])
def test_an_interrupted_step_leaves_neither_mode_nor_hook(outcomes, name):
    for rank in outcomes:
        left = rank["interrupted"][name]
        assert left["modes"] == 0
        assert left["hooks"][0] == left["hooks"][1]


@pytest.mark.parametrize("name", ENGINES)
def test_ranks_count_the_same(outcomes, name):
    first, second = (rank[name]["with"]["traffic"] for rank in outcomes)
    assert first == second
    assert first["disagreements"] == []


@pytest.mark.parametrize("name", ENGINES)
def test_the_peak_of_the_fullest_rank_holds_the_states_that_were_counted(outcomes, name):
    for rank in outcomes:
        case = rank[name]["with"]
        fullest, states = case["peak"], case["memory"]
        categories = fullest["categories"]
        assert fullest in case["peaks"]
        assert fullest["total_bytes"] == max(each["total_bytes"] for each in case["peaks"])
        assert fullest["total_bytes"] == sum(categories.values())
        assert fullest["step"] == 2
        for category in ("master", "optimizer"):
            assert categories[category] == states[f"{category}_bytes"]
        whole = name.startswith(("ddp", "zero2"))
        gathered = categories["parameters"] - states["parameters_bytes"]
        assert gathered == 0 if whole else gathered > 0
        # DDP copies gradients into its buckets.
        copies = 2 if name.startswith("ddp") else 1
        if name != "zero2":  # which holds a part of one micro-batch's
            assert categories["gradients"] >= copies * states["gradients_bytes"]
        assert rank[name]["without"]["peak"] is None
        assert rank[name]["without"]["peaks"] == [None, None]


def test_what_is_neither_parameter_nor_gradient_is_listed_apart(outcomes):
    found = {
        name: {
            (row["kind"], row["purpose"]): row["elements"]
            for row in outcomes[0][name]["with"]["traffic"]["collectives"]
            if row["purpose"] not in ("parameters", "gradients")
        }
        for name in ENGINES
    }
    loss = {("all_gather", "metrics"): 2}
    tensors = 2 * 9 + 3
    # The rotary frequencies, 8 of them in each of two buffers, and find_unused_parameters.
    ddp = {("broadcast", "buffers"): 2 * 8, ("all_reduce", "bitmap"): tensors}
    assert found["ddp"] == found["ddp_bf16"] == loss | ddp
    # torch adds up a norm for each tensor.
    assert found["fsdp"] == found["fsdp_bf16"] == loss | {("all_reduce", "norm"): tensors}
    # DeepSpeed adds up one for each group of the optimizer.
    for name in ("zero2", "zero3", "zero3_bf16"):
        assert found[name] == loss | {("all_reduce", "norm"): 1}


def test_without_accelerate_the_bytes_are_those_of_the_model(outcomes):
    (rank, _) = outcomes
    weights, biases = (5 * 7, 3 * 5), (5, 3)
    ours = {("all_reduce", "metrics"): 4, ("broadcast", "other"): 4 * 9}
    norm = {("all_reduce", "norm"): 4 * 4}
    # The first layer is a unit, gathered twice; the root is not resharded. Rows come in twos.
    first, root = 6 * 7 + 6, 4 * 5 + 4
    parameters, gradients = 2 * first + root, first + root
    everything = ("parameters", "gradients", "norm", "buffers", "buckets", "metrics", "other")
    for name, size in (("fsdp", 4), ("fsdp_mixed", 2)):
        assert payload(rank["bare"][name], *everything) == ours | norm | {
            ("all_gather", "parameters"): parameters * size,
            ("reduce_scatter", "gradients"): gradients * 4,
        }
    # DDP tells the order of 4 gradients, the number of its buckets, and the size of the one.
    assert payload(rank["bare"]["ddp"], *everything) == ours | {
        ("all_reduce", "gradients"): 4 * sum(weights + biases),
        ("broadcast", "buffers"): 4 * 11,
        ("broadcast", "buckets"): 4 * (4 + 1 + 1),
    }


# A group of four that pretends: what is passed is counted as in a real one.


@pytest.fixture
def four_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def counted_in(*calls, model=None):
    ledger = Ledger()
    ledger.start(torch.nn.Linear(1, 1) if model is None else model)
    try:
        for call in calls:
            call()
    finally:
        ledger.stop()
    return ledger.counted()


def part():
    return torch.zeros(PART)


def whole():
    return torch.zeros(WHOLE)


def parts():
    return [part() for _ in range(4)]


def coalesced():
    with dist._coalescing_manager():
        for _ in range(3):
            dist.all_gather_into_tensor(whole(), part())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has other names, 2.11 has not
@pytest.mark.parametrize(
    ("call", "kind", "elements"),
    [
        (lambda: dist.all_reduce(whole()), "all_reduce", WHOLE),
        (lambda: wait(functional.all_reduce(whole(), "sum", ALL)), "all_reduce", WHOLE),
        (lambda: dist.all_reduce_coalesced([whole(), part()]), "all_reduce", WHOLE + PART),
        (lambda: dist.all_gather(parts(), part()), "all_gather", WHOLE),
        (lambda: dist.all_gather_into_tensor(whole(), part()), "all_gather", WHOLE),
        (lambda: wait(functional.all_gather_tensor(part(), 0, ALL)), "all_gather", WHOLE),
        (coalesced, "all_gather", 3 * WHOLE),
        (lambda: dist.reduce_scatter(part(), parts()), "reduce_scatter", WHOLE),
        (lambda: dist.reduce_scatter_tensor(part(), whole()), "reduce_scatter", WHOLE),
        (
            lambda: wait(functional.reduce_scatter_tensor(whole(), "sum", 0, ALL)),
            "reduce_scatter",
            WHOLE,
        ),
        (lambda: dist.all_to_all(parts(), parts()), "all_to_all", WHOLE),
        (lambda: dist.all_to_all_single(whole(), whole()), "all_to_all", WHOLE),
        (lambda: dist.broadcast(whole(), src=0), "broadcast", WHOLE),
        (lambda: dist.reduce(whole(), dst=0), "reduce", WHOLE),
        (lambda: dist.gather(part(), parts(), dst=0), "gather", WHOLE),
        (lambda: dist.scatter(part(), parts(), src=0), "scatter", WHOLE),
        (lambda: dist.send(whole(), dst=1), "send", WHOLE),
        (lambda: dist.recv(whole(), src=1), "receive", WHOLE),
        (dist.barrier, "barrier", 0),
    ],
)
def test_a_call_counts_the_whole_buffer_once(four_ranks, call, kind, elements):
    (row,) = counted_in(call)
    assert (row["kind"], row["ranks"], row["calls"]) == (kind, 4, 1)
    assert row["elements"] == elements
    share = {"all_reduce": 1.5, "send": 1, "receive": 0}.get(kind, 0.75)
    assert row["wire_bytes"] == 4 * elements * share


def test_groups_and_dtypes_are_rows_of_their_own(four_ranks):
    pair = dist.new_group([0, 1])
    rows = counted_in(
        lambda: dist.all_reduce(whole()),
        lambda: dist.all_reduce(whole(), group=pair),
        lambda: dist.all_reduce(whole().bfloat16()),
    )
    found = {(row["dtype"], row["ranks"]): row["payload_bytes"] for row in rows}
    assert found == {("float32", 4): 80, ("float32", 2): 80, ("bfloat16", 4): 40}


def test_autograd_takes_the_mode_into_a_thread_of_its_own(four_ranks):
    """As backward on a GPU does. On a CPU it changes threads 60 backwards inside each other."""
    threads = []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor, depth):
            ctx.depth = depth
            return tensor.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.depth:
                with torch.enable_grad():
                    nested(ctx.depth - 1)
            else:
                threads.append(threading.get_ident())
                dist.all_reduce(whole())
            return grad, None

    def nested(depth):
        Nested.apply(torch.ones((), requires_grad=True), depth).backward()

    (row,) = counted_in(lambda: nested(80))
    assert threads != [threading.get_ident()]
    assert (row["purpose"], row["elements"]) == ("gradients", WHOLE)


def test_a_graph_that_was_compiled_runs_compiled_while_traffic_is_counted():
    ran = []

    def backend(graph, _):
        return lambda *inputs: ran.append(1) or graph(*inputs)

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    compiled = torch.compile(model, backend=backend)
    before = compiled(torch.ones(3))
    counted_in(lambda: compiled(torch.ones(3)), model=compiled)
    assert len(ran) == 2
    assert torch.equal(before, compiled(torch.ones(3)))


# Which step a recorder counts.


@pytest.fixture(autouse=True)
def fresh_accelerate_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def recorded(*, skipped, before=None, compiled=False):
    """Train a step for each of `skipped`, which says whether fp16 left its update out."""
    recorder = Recorder(Requested(strategy=STRATEGIES["single"], num_processes=1), rehearsal=True)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    if compiled:
        model = torch.compile(model, backend="eager")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    recorder.prepared(accelerator, model, optimizer)
    counting = []
    for step, skips in enumerate(skipped, 1):
        if step == before:
            recorder.peaks()
        counting.append(torch._C._len_torch_dispatch_stack())
        loss = model(torch.ones(3, 4)).square().mean()
        accelerator.backward(loss)
        if not skips:
            optimizer.step()
        optimizer.zero_grad()
        recorder.micro_batch(loss, tokens=1)
        recorder.step_done(learning_rate=0.1, skipped=skips)
    record = recorder.finish()
    assert torch._C._len_torch_dispatch_stack() == 0
    return types.SimpleNamespace(counting=counting, recorder=recorder, **record)


def test_the_step_after_the_first_is_counted_and_no_other():
    run = recorded(skipped=[False] * 4)
    assert run.counting == [0, 2, 0, 0]
    assert run.traffic == {
        "step": 2,
        "micro_batches": 1,
        "tokens": 1,
        "transport": None,
        "collectives": [],
        "sent_elements": 0,
        "textbook_elements": 0,
        "trained_elements": 5,
        "all_elements": 5,
        "disagreements": [],
    }
    assert "traffic" not in run.not_measured


def test_a_step_whose_update_was_skipped_is_not_counted_but_the_next_and_neither_is_timed():
    run = recorded(skipped=[True, False, True, False, False])
    assert run.counting == [0, 0, 2, 2, 0]
    assert run.traffic["step"] == run.peak["step"] == 4
    (seconds,) = run.timed_seconds
    assert seconds == sum(run.recorder._clock.seconds()[4].values())
    assert run.step_seconds == {"median": seconds, "p90": seconds}


def test_a_run_of_one_step_says_why_nothing_was_counted():
    run = recorded(skipped=[False])
    assert run.traffic is None
    assert run.not_measured["traffic"] == traffic.NOT_COUNTED
    assert run.peak is None
    assert run.not_measured["peak"] == traffic.NOT_COUNTED


def test_a_compiled_model_has_its_traffic_counted_and_says_why_it_has_no_peak():
    run = recorded(skipped=[False] * 3, compiled=True)
    assert run.counting == [0, 1, 0]
    assert run.traffic["step"] == 2
    assert run.peak is None
    assert run.not_measured["peak"] == peak.COMPILED


def test_packed_steps_after_the_save_are_not_counted():
    run = recorded(skipped=[False] * 3, before=2)
    assert run.counting == [0, 0, 0]
    assert run.traffic is None


def counted_by(rank_elements):
    row = {"kind": "all_gather", "purpose": "parameters", "dtype": "float32", "ranks": 2}
    return {"step": 2, "collectives": [row | {"calls": 1, "elements": rank_elements}]}


def test_ranks_that_differ_are_named_and_the_most_stands_for_all():
    found = merged([counted_by(10), counted_by(12)])
    assert [row["elements"] for row in found["collectives"]] == [12]
    assert found["disagreements"] == [
        "all_gather of parameters in float32 over 2 ranks, elements: rank 0 10, rank 1 12"
    ]
    alone = merged([counted_by(10), {"step": 2, "collectives": []}])
    assert "rank 0 10, rank 1 none" in alone["disagreements"][0]


def test_a_rank_that_counted_nothing_leaves_no_traffic():
    assert merged([counted_by(10), None]) is None
