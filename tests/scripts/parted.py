"""Small trainings by an Accelerator, one after the other, each of a class of its own name.

`faults` has one in each that lets ranks part, `sound` has none, and `notes` has what may be meant.
"""

import os
import sys
import time

import accelerate
import psutil
import torch
from accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
)
from peft import LoraConfig, inject_adapter_in_model
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

policy = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    reshard_after_forward=True,
    mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
)
accelerator = Accelerator(
    fsdp_plugin=policy if sys.argv[1] == "policy" else None,
    gradient_accumulation_steps=4 if sys.argv[1] == "notes" else 1,
    # A layer that was replaced takes no part in the loss.
    kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
)
rank, main = accelerator.process_index, accelerator.is_main_process


def model_of(name):
    """A model whose class has this name, with the same weights on every rank."""
    torch.manual_seed(0)

    def init(self):
        torch.nn.Module.__init__(self)
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

    def forward(self, rows):
        return self.last(torch.tanh(self.first(rows))).square().mean()

    methods = {"__init__": init, "forward": forward, "_no_split_modules": ["Linear"]}
    return type(name, (torch.nn.Module,), methods)()


def loader():
    return DataLoader(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), batch_size=2)


def prepared(model, *, rows=True):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if not rows:
        return *accelerator.prepare(model, optimizer), loader()
    return accelerator.prepare(model, optimizer, loader())


def step(model, optimizer, rows, *, clips=False, steps=True):
    accelerator.backward(model(rows))
    if clips:
        accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    if steps:
        optimizer.step()
    optimizer.zero_grad()


def raw_model():
    model, optimizer, rows = prepared(model_of("RawModel"))
    for batch in rows:
        step(accelerator.unwrap_model(model), optimizer, batch)


def one_rank_clips():
    model, optimizer, rows = prepared(model_of("OneRankClips"))
    for batch in rows:
        step(model, optimizer, batch, clips=main)


def one_rank_steps():
    model, optimizer, rows = prepared(model_of("OneRankSteps"))
    for batch in rows:
        step(model, optimizer, batch, steps=main)


def no_sync():
    model, optimizer, rows = prepared(model_of("NoSync"))
    for number, batch in enumerate(rows):
        if number < 2 + 2 * main:  # unevenly, too
            with accelerator.no_sync(model):
                step(model, optimizer, batch)


def rank_0_leaves():
    """Rank 1 stays until the process of rank 0 is gone."""
    processes = accelerate.utils.gather_object([os.getpid()])
    while rank == 1 and psutil.pid_exists(processes[0]):
        if psutil.Process(processes[0]).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.05)


def layer_replaced():
    model, optimizer, rows = prepared(model_of("LayerReplaced"))
    accelerator.unwrap_model(model).last = torch.nn.Linear(8, 2)
    of_layer = torch.optim.SGD(accelerator.unwrap_model(model).last.parameters(), lr=0.1)
    for batch in rows:
        step(model, of_layer, batch)


def adapter_after():
    model, _, rows = prepared(model_of("AdapterAfter"))
    model.requires_grad_(False)
    adapted = LoraConfig(target_modules=["first"], init_lora_weights=False)
    inject_adapter_in_model(adapted, accelerator.unwrap_model(model))
    adapters = [p.requires_grad_() for name, p in model.named_parameters() if "lora_" in name]
    optimizer = torch.optim.AdamW(adapters, lr=0.01)
    for batch in rows:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def second_bare():
    model = model_of("SecondBare")
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    for batch in accelerator.prepare(loader()):
        step(model, optimizer, batch)


def nothing_changes():
    model = model_of("NothingChanges")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    model, optimizer, rows = accelerator.prepare(model, optimizer, loader())
    for batch in rows:
        model(batch)
        optimizer.step()


def two_optimizers():
    """As in a GAN; the second model in a wrapper of the script's own."""
    one, of_one, rows = prepared(model_of("Generator"))
    other = DistributedDataParallel(model_of("Critic"))
    of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    for batch in rows:
        step(one, of_one, batch)
        step(other, of_other, batch)


def one_rank_goes_on():
    """Weights are changed on the main rank to be saved, and a layer is calibrated there."""
    model, optimizer, rows = prepared(model_of("Saved"))
    for batch in rows:
        step(model, optimizer, batch)
    calibrated, optimizer, rows = prepared(model_of("Calibrated"))
    last = accelerator.unwrap_model(calibrated).last
    for batch in rows:
        step(calibrated, optimizer, batch)
    with torch.no_grad():
        for parameter in model.parameters() if main else ():
            parameter.data.mul_(0.9)
    of_last = torch.optim.SGD(last.parameters(), lr=0.1)
    for _ in range(2 * main):
        accelerator.unwrap_model(calibrated)(torch.ones(2, 4)).backward()
        of_last.step()


def averaged_now_and_then():
    """As LocalSGD does: the ranks part, and meet again."""
    model, optimizer, rows = prepared(model_of("NowAndThen"))
    for batch in rows:
        with accelerator.no_sync(model):
            step(model, optimizer, batch)
    for parameter in model.parameters():
        parameter.data = accelerator.reduce(parameter.data, "mean")


def uneven():
    model, optimizer, rows = prepared(model_of("Uneven"))
    with accelerator.join_uneven_inputs([model]), model.join():
        for number, batch in enumerate(rows):
            if number < 3 + main:
                step(model, optimizer, batch)


def left_out():
    """A parameter that DDP is told to leave alone, as a table that each rank has a part of."""
    model = model_of("LeftOut")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["last.weight"])
    model, optimizer, rows = prepared(model)
    for batch in rows:
        step(model, optimizer, batch)


def no_gradient():
    """A rate of 0 in its only step, as at the start of a warm-up."""
    model = model_of("WarmsUp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model, optimizer, rows = accelerator.prepare(model, optimizer, loader())
    step(model, optimizer, next(iter(rows)))


def products_in_bf16():
    model, optimizer, rows = prepared(model_of("InHalf"))
    for batch in rows:
        step(model, optimizer, batch)


def equal_rows_in_evaluation_mode():
    model, optimizer, rows = prepared(model_of("EqualRows"), rows=False)
    model.module.eval()
    for batch in rows:
        step(model, optimizer, batch)


def other_start():
    model = model_of("OtherStart")
    with torch.no_grad():
        model.first.weight.add_(rank)
    model, optimizer, rows = prepared(model)
    for batch in rows:
        step(model, optimizer, batch)


def twice():
    model, optimizer, rows = prepared(DistributedDataParallel(model_of("Twice")))
    for batch in rows:
        step(model, optimizer, batch)


def schedule_of_one_process():
    model, optimizer, rows = prepared(model_of("Scheduled"))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer.optimizer, 1.0, 0.0, total_iters=4)
    schedule = accelerator.prepare(schedule)
    for batch in rows:
        step(model, optimizer, batch)
        schedule.step()


CASES = {
    "faults": (
        raw_model,
        one_rank_clips,
        one_rank_steps,
        no_sync,
        layer_replaced,
        adapter_after,
        second_bare,
        nothing_changes,
    ),
    "sound": (
        two_optimizers,
        one_rank_goes_on,
        averaged_now_and_then,
        uneven,
        left_out,
        no_gradient,
    ),
    "no_sync_and_rank_0_leaves": (no_sync, rank_0_leaves),
    "policy": (products_in_bf16,),
    "notes": (equal_rows_in_evaluation_mode, other_start, twice, schedule_of_one_process),
}
for case in CASES[sys.argv[1]] if len(sys.argv) < 3 else [globals()[sys.argv[2]]]:
    case()
