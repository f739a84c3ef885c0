"""The peaks of real engines as the ledger counts them, beside what torch's CPU allocator gave out.

One process is the first of two ranks whose collectives only pretend: gloo copies what it moves into
buffers of its own, which no GPU has, and the allocator would count them.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"}
os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

import deepspeed
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from toolkit import environment
from toolkit.engines.on_cpu import patch_deepspeed
from toolkit.measuring import memory
from toolkit.measuring.peak import PeakLedger
from toolkit.strategies import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(sys.argv[1])
MICRO_BATCHES = 2
CONFIG = LlamaConfig(
    vocab_size=67,  # odd, so that rows are padded
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    tie_word_embeddings=False,
    use_cache=False,
)


def new_model(**checkpointing):
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    if checkpointing:
        # The state of the random generator is no tensor that an operation makes.
        model.gradient_checkpointing_enable(checkpointing | {"preserve_rng_state": False})
    return model.train()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def sharded(offload=False, checkpointing=None, **options):
    model = new_model(**(checkpointing or {}))
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for layer in (*model.model.layers, model):
        fully_shard(layer, **options)
    return model, adamw(model)


def zero_config(name):
    """A bundled DeepSpeed file, all of it sharded however small."""
    config = json.loads((ROOT / "deepspeed_configs" / f"{name}.json").read_text())
    config |= {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5}
    config["gradient_accumulation_steps"] = MICRO_BATCHES
    config.pop("train_batch_size", None)
    for precision in ("bf16", "fp16"):
        config.pop(precision, None)
    section = config["zero_optimization"]
    section["reduce_bucket_size"] = 10_000
    for part in ("offload_optimizer", "offload_param"):
        if section.get(part, {}).get("device") == "nvme":
            section[part]["nvme_path"] = str(FOLDER / "nvme")
    if name.startswith("zero3"):
        section |= {"stage3_param_persistence_threshold": 40, "stage3_prefetch_bucket_size": 1000}
    return config


def zero(name, model):
    config = zero_config(name)
    optimizer = adamw(model)
    if "offload_optimizer" in config["zero_optimization"]:
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-3)
    wrapped, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return wrapped, optimizer


def step(model, optimizer):
    for micro_batch in range(MICRO_BATCHES):
        rows = torch.randint(0, 67, (2, 8))
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(micro_batch + 1 == MICRO_BATCHES)
        loss = model(input_ids=rows, labels=rows).loss
        if isinstance(model, deepspeed.DeepSpeedEngine):
            model.backward(loss)
            model.step()
        else:
            loss.backward()
    if not isinstance(model, deepspeed.DeepSpeedEngine):
        optimizer.step()
        optimizer.zero_grad()


def measured(model, optimizer):
    for _ in range(2):
        step(model, optimizer)
    ledger = PeakLedger()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        ledger.start(model, optimizer, device="cpu")
        at_start = ledger._storages.total_bytes
        step(model, optimizer)
        ledger.stop()
    most = max(size for _, size in sizes(profiler))
    return {
        "peak": ledger.counted(3),
        "at_start": at_start,
        "allocated": most,
        "states": memory.state_bytes(model, optimizer),
        "nvme": memory.nvme_bytes(model),
        "left": left_behind(model),
        "modes": torch._C._len_torch_dispatch_stack(),
    }


def sizes(profiler):
    """Yield when the allocator gave out or got back, and the bytes that it had given out then."""
    events = [
        each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"
    ]
    now = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        now += event.nbytes()
        yield event.start_ns(), now


def loaded():
    """ZeRO-3 as a run has it: rank 0 reads the weights. All of its life is under the profiler.

    Over gloo such a sum means nothing: gloo frees in threads of its own, where no profiler looks.
    """
    new_model().save_pretrained(FOLDER / "model")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        sharding = HfDeepSpeedConfig(zero_config("zero3"))  # while it lives, models load sharded
        model, optimizer = zero("zero3", LlamaForCausalLM.from_pretrained(FOLDER / "model").train())
        for _ in range(2):
            step(model, optimizer)
        ledger = PeakLedger()
        ledger.start(model, optimizer, device="cpu")
        at_start, begun = ledger._storages.total_bytes, time.time_ns()
        step(model, optimizer)
        ledger.stop()
    del sharding
    found = list(sizes(profiler))
    return {
        "peak": ledger.counted(3)["total_bytes"],
        "at_start": at_start,
        "allocated_before": [size for when, size in found if when < begun][-1],
        "allocated": max(size for when, size in found if when >= begun),
    }


def left_behind(model):
    """What the ledger had put on tensors and storages."""
    hooked = [name for name, p in model.named_parameters() if p._backward_hooks is not None]
    return hooked + [name for name in ("resize_",) if name in vars(torch.UntypedStorage)]


def plain(**checkpointing):
    model = new_model(**checkpointing)
    return model, adamw(model)


def swapped():
    """What of a layer lies in files: DeepSpeed leaves what is small in memory."""
    model, optimizer = zero("zero3_nvme", torch.nn.Linear(1024, 1024, bias=False))
    found = []
    for _ in range(2 * MICRO_BATCHES):
        found.append(memory.nvme_bytes(model))
        model.backward(model(torch.randn(2, 1024)).square().mean())
        model.step()
    files = (FOLDER / "nvme").rglob("*.swp")
    return {
        "elements": 1024 * 1024,
        "nvme": [*found, memory.nvme_bytes(model)],
        "on_disk": sum(file.stat().st_size for file in files),
    }


torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
patch_deepspeed()
outcomes = {
    "single": measured(*plain()),
    "single_checkpointed": measured(*plain(use_reentrant=False)),
    "fsdp": measured(*sharded()),
    "fsdp_grad_op": measured(*sharded(reshard_after_forward=False)),
    "fsdp_checkpointed": measured(*sharded(checkpointing={"use_reentrant": False})),
    "fsdp_offload": measured(*sharded(offload=True)),
}
for name, strategy in STRATEGIES.items():
    is_here = environment.missing_for(strategy) is None
    if strategy.backend == "deepspeed" and not strategy.splits_rows and is_here:
        outcomes[name] = measured(*zero(name, new_model()))
if "zero3_nvme" in outcomes:
    outcomes["swapped"] = swapped()
outcomes["loaded"] = loaded()
(FOLDER / "outcomes.json").write_text(json.dumps(outcomes))
os._exit(0)
