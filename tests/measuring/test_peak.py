"""The fullest moment of a step, tensor by tensor, against formulas and torch's allocator."""

import gc
import json
import sys
import time
import weakref
from types import SimpleNamespace

import launches
import pytest
import torch
from places import SCRIPTS
from torch.utils.checkpoint import checkpoint

from toolkit import environment
from toolkit.engines.base import Backend
from toolkit.engines.tensors import compiled
from toolkit.measuring import peak
from toolkit.measuring.peak import CATEGORIES, UNDECIDED, PeakLedger, Storages
from toolkit.strategies import STRATEGIES

BATCH, WIDE, HIDDEN, OUT = 64, 16, 256, 8
DEEPSPEED = [
    name
    for name, each in STRATEGIES.items()
    if each.backend == "deepspeed" and not each.splits_rows
]
OTHERS = ["single", "single_checkpointed", "fsdp", "fsdp_grad_op", "fsdp_checkpointed"]


@pytest.fixture(scope="module")
def outcomes(launch_environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("peaks")
    done = launches.run(
        [sys.executable, SCRIPTS / "peaks.py", folder],
        environment=launch_environment,
        timeout=1800,  # DeepSpeed compiles for minutes, once
    )
    assert done.returncode == 0, done.stdout
    return json.loads((folder / "outcomes.json").read_text())


def of(outcomes, name):
    if name not in outcomes:
        assert environment.missing_for(STRATEGIES[name]) is not None
        pytest.skip(environment.missing_for(STRATEGIES[name]))
    return outcomes[name]


@pytest.mark.parametrize("name", [*OTHERS, "fsdp_offload", *DEEPSPEED])
def test_every_engine_s_peak_is_what_the_allocator_gave_out_to_the_byte(outcomes, name):
    found = of(outcomes, name)
    assert found["peak"]["total_bytes"] - found["at_start"] == found["allocated"]
    assert found["peak"]["step"] == 3


@pytest.mark.parametrize("name", [*OTHERS, "fsdp_offload", *DEEPSPEED])
def test_categories_add_up_and_hold_the_states_and_what_is_gathered(outcomes, name):
    found = of(outcomes, name)
    categories, states = found["peak"]["categories"], found["states"]
    assert tuple(categories) == CATEGORIES
    assert sum(categories.values()) == found["peak"]["total_bytes"]
    assert categories["optimizer"] == states["optimizer_bytes"]
    assert categories["master"] == states["master_bytes"]
    # The head at least is gathered when backward begins.
    gathered = categories["parameters"] - states["parameters_bytes"]
    assert (
        gathered == 0 if name.startswith(("single", "zero1", "zero2")) else gathered >= 4 * 67 * 32
    )
    assert categories["gradients"] >= states["parameters_bytes"] / 2  # of the micro-batch before
    assert categories["activations"] > categories["other"]


def test_recomputed_layers_keep_less_and_their_activations_are_called_so(outcomes):
    for name in ("single", "fsdp"):
        kept, again = (outcomes[name + how]["peak"]["categories"] for how in ("", "_checkpointed"))
        assert 0 < again["activations"] < 0.6 * kept["activations"]
        assert again["other"] < again["activations"]


@pytest.mark.parametrize("name", [*OTHERS, "fsdp_offload", *DEEPSPEED])
def test_nothing_stays_on_the_engine(outcomes, name):
    found = of(outcomes, name)
    assert found["modes"] == 0
    assert found["left"] == []


def test_rank_0_keeps_nothing_of_what_it_read_and_nothing_is_left_out_under_zero3(outcomes):
    found = outcomes["loaded"]
    # But for scalars of DeepSpeed's and the loop's, which no step takes.
    assert 0 <= found["allocated_before"] - found["at_start"] < 64
    assert 0 <= found["allocated"] - found["peak"] < 64


def test_what_deepspeed_swaps_is_counted_in_its_files(outcomes):
    of(outcomes, "zero3_nvme")
    swapped = outcomes["swapped"]
    # Masters and two moments of this rank's half; all written by the first of two steps.
    states = 3 * 4 * swapped["elements"] // 2
    assert swapped["nvme"][-1] >= states
    assert swapped["nvme"][-1] == swapped["on_disk"]


# One model, one process.


def network():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDE, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, OUT)
    )
    return model, torch.optim.AdamW(model.parameters(), foreach=True)


def train(model, optimizer, *, batch=BATCH, forward=None):
    loss = (forward or model)(torch.randn(batch, WIDE)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item().hex()


def counted(model, optimizer, step):
    ledger = PeakLedger()
    ledger.start(model, optimizer, device="cpu")
    try:
        step()
    finally:
        ledger.stop()
    return ledger.counted(2)


def test_the_categories_of_a_network_are_its_formula_to_the_byte():
    model, optimizer = network()
    rows, weights = 1024, WIDE * HIDDEN + HIDDEN + HIDDEN * OUT + OUT
    train(model, optimizer, batch=rows)
    found = counted(model, optimizer, lambda: train(model, optimizer, batch=rows))
    elements = {
        "parameters": weights,
        "master": 0,
        "gradients": HIDDEN * OUT + OUT,  # of the last layer
        "optimizer": 2 * weights + 4,
        "activations": 2 * rows * HIDDEN + 2,  # before and after GELU; the loss and its gradient
        "other": rows * WIDE + rows * OUT + rows * HIDDEN,  # the batch, and gradients on their way
    }
    categories = {name: 4 * count for name, count in elements.items()}
    total = sum(categories.values())
    assert found == {
        "step": 2,
        "phase": "backward",
        "total_bytes": total,
        "categories": categories,
        "micro_batches": [],
    }


def test_a_step_of_few_rows_is_fullest_in_the_optimizer():
    model, optimizer = network()
    train(model, optimizer, batch=1)
    found = counted(model, optimizer, lambda: train(model, optimizer, batch=1))
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert found["phase"] == "optimizer"
    assert found["categories"]["gradients"] == 4 * weights
    # AdamW over lists of tensors: one copy of the second moments, and their roots' scalars.
    assert 4 * weights <= found["categories"]["other"] < 4 * weights + 2048


def test_what_forward_throws_away_is_no_activation_though_the_peak_was_before_it_went():
    model, optimizer = network()

    class Wasteful(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, rows):
            with torch.no_grad():
                one = torch.ones(4_000_000).sum().clamp(max=1)
            return self.inner(rows) * one

    wasteful = Wasteful()
    train(wasteful, optimizer)
    found = counted(wasteful, optimizer, lambda: train(wasteful, optimizer))
    assert found["phase"] == "forward"
    # With their sum, and the batch.
    assert found["categories"]["other"] == 4 * (4_000_000 + 1 + BATCH * WIDE)
    assert found["categories"]["activations"] == 0


def test_only_phases_of_the_step_can_be_its_peak():
    model, optimizer = network()
    train(model, optimizer)
    alone = counted(model, optimizer, lambda: train(model, optimizer))

    def with_an_evaluation():
        model.eval()
        with torch.no_grad():
            model(torch.randn(100_000, WIDE))
        model.train()
        train(model, optimizer)
        torch.zeros(10_000_000)

    assert counted(model, optimizer, with_an_evaluation) == alone


def test_losses_are_the_same_to_the_last_bit_and_nothing_stays_behind():
    def losses(count_second):
        model, optimizer = network()
        found = [train(model, optimizer)]
        if count_second:
            counted(model, optimizer, lambda: found.append(train(model, optimizer)))
        else:
            found.append(train(model, optimizer))
        found.append(train(model, optimizer))
        hooks = [*model._forward_pre_hooks, *model._forward_hooks]
        hooks += [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
        assert hooks == []
        assert all(parameter._backward_hooks is None for parameter in model.parameters())
        return found

    assert losses(count_second=True) == losses(count_second=False)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert "resize_" not in vars(torch.UntypedStorage)


def test_a_ledger_keeps_neither_model_nor_tensor_alive():
    model, optimizer = network()
    ledger = PeakLedger()
    ledger.start(model, optimizer, device="cpu")
    large = torch.zeros(1_000_000)
    seen = weakref.ref(large.untyped_storage())
    del large
    assert seen() is None
    ledger.stop()
    ledger.stop()
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


def test_hooks_that_others_put_on_a_parameter_stay():
    model, optimizer = network()
    seen = []
    handle = model[0].weight.register_hook(lambda gradient: seen.append(gradient.shape))
    counted(model, optimizer, lambda: train(model, optimizer))
    train(model, optimizer)
    assert len(seen) == 2
    handle.remove()


def test_recomputation_inside_of_backward_counts_as_forward():
    model, optimizer = network()

    def again(rows):
        return checkpoint(model, rows, use_reentrant=False, preserve_rng_state=False)

    train(model, optimizer, batch=1024)
    hidden = 4 * 1024 * HIDDEN
    found = counted(model, optimizer, lambda: train(model, optimizer, batch=1024, forward=again))
    assert found["phase"] == "backward"
    assert 2 * hidden <= found["categories"]["activations"] < 2.1 * hidden


def test_what_is_on_another_device_than_the_rank_s_is_not_counted():
    model, optimizer = network()
    ledger = PeakLedger()
    ledger.start(model, optimizer, device="cuda")
    train(model, optimizer)
    ledger.stop()
    assert ledger.counted(2)["total_bytes"] == 0


def test_a_compiled_model_is_told_from_a_plain_one():
    model, _ = network()
    assert not compiled(model)
    assert compiled(torch.compile(model, backend="eager"))
    model[0].compile(backend="eager")
    assert compiled(model)


# Storages by themselves.


def test_a_storage_counts_once_and_is_taken_off_when_nothing_holds_it():
    storages = Storages("cpu")
    tensor = torch.zeros(100)
    storages.meet([tensor, tensor[:10], tensor.view(10, 10)], "parameters")
    assert storages.total_bytes == 400
    del tensor
    storages.make([], "other", taken=[])
    assert storages.total_bytes == 0


def test_a_resized_storage_counts_by_its_size_now_and_the_peak_by_the_size_then():
    storages = Storages("cpu")
    tensor = torch.zeros(100)
    storages.meet([tensor], "parameters")
    storages.look("forward")
    tensor.untyped_storage().resize_(0)
    storages.resized(tensor.untyped_storage())
    assert storages.total_bytes == 0
    assert storages.fullest.bytes["parameters"] == 400


def test_what_is_learned_after_the_peak_holds_for_it_only_if_it_was_there():
    storages = Storages("cpu")
    first, second = torch.zeros(10), torch.zeros(5)
    storages.make([first], UNDECIDED, taken=[])
    storages.look("backward")
    storages.make([second], UNDECIDED, taken=[])
    storages.learn([first, second], "gradients")
    assert storages.fullest.bytes["gradients"] == 40
    storages.learn([first], "activations")  # by use already
    storages.look("backward")
    assert storages.fullest.bytes["gradients"] == storages.total_bytes == 60


def test_a_view_of_what_is_not_counted_is_not_counted():
    storages = Storages("cpu")
    unseen = torch.zeros(10)
    storages.make([unseen[:5]], "other", taken=[unseen])
    assert storages.total_bytes == 0


@pytest.mark.parametrize("lets_go", [True, False])
def test_the_input_of_a_collective_that_has_ended_is_waited_for(lets_go, one_rank, monkeypatch):
    now = [0.0]
    part = torch.ones(1000)
    held = [part * torch.ones(1000, requires_grad=True)]  # holds it in C++, as gloo's thread does

    def sleep(_):
        now[0] += 0.3
        if lets_go:
            held.clear()
            while part._use_count() > 1:  # gloo's thread itself may not have let go yet
                time.sleep(0)

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(peak, "time", clock)
    gather(part)
    slept = round(now[0] / 0.3)
    assert slept == 1 if lets_go else slept > 1
    assert now[0] < peak.LET_GO_SECONDS + 0.3


@pytest.mark.parametrize("sharing", [(), ("0",)])
def test_what_ranks_of_one_copy_of_the_model_gather_is_no_parameter(sharing, one_rank, monkeypatch):
    monkeypatch.setattr(Backend, "model_parallel_groups", lambda _: sharing)
    part = torch.ones(1000)
    found = gather(part)["categories"]
    weights = 4 * (WIDE * HIDDEN + HIDDEN + HIDDEN * OUT + OUT)
    # Else the part and the whole are the weights of a sharded layer.
    assert found["parameters"] == weights + (0 if sharing else 2 * 4 * 1000)
    assert found["activations"] == (4 * 1000 if sharing else 0)


def gather(part):
    """Gather over the one rank, in backward, while a ledger counts; return what it counted."""
    functional = torch.ops._c10d_functional
    ledger = PeakLedger()
    ledger.start(*network(), device="cpu")
    try:
        with ledger.within("backward"):
            whole = functional.all_gather_into_tensor(part, 1, "0")
            assert functional.wait_tensor(whole).tolist() == part.tolist()
    finally:
        ledger.stop()
    return ledger.counted(2)
