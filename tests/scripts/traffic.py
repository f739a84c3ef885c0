"""The collectives of real engines, counted in one process group, one engine after the other.

Each trains three steps twice: as a recorder lets it, with a ledger around the second, and without.
"""

import base64
import json
import os
import sys
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu"}

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.configs.requested import requested_strategy
from toolkit.engines.deepspeed import is_engine
from toolkit.engines.on_cpu import patch_accelerate, patch_deepspeed
from toolkit.measuring.attestation import Requested
from toolkit.measuring.recorder import Recorder
from toolkit.measuring.traffic import Ledger

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(sys.argv[1])
STEPS, MICRO_BATCHES = 3, 2
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
CONFIG = LlamaConfig(
    vocab_size=67,  # odd, so that rows are padded
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    tie_word_embeddings=False,
)


def zero(name, **changes):
    """A bundled DeepSpeed file, all of it sharded however small."""
    config = json.loads((ROOT / "deepspeed_configs" / f"{name}.json").read_text()) | changes
    config["gradient_accumulation_steps"] = MICRO_BATCHES
    config["gradient_clipping"] = 0.5
    config["zero_optimization"] |= {"reduce_bucket_size": 10_000}
    if name == "zero3":
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 40}
    text = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    return config, {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": text,
    }


def train(asked, *, counting, precision="no", deepspeed=None, fails_in=0):
    """Train, and return the losses, a sum of the final weights, and what the recorder counted."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for key in set(os.environ) - UNTOUCHED:
        del os.environ[key]
    os.environ |= asked
    os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
    strategy = requested_strategy(os.environ)
    recorder = Recorder(Requested(strategy=strategy, num_processes=2), rehearsal=True)
    accelerator = Accelerator(
        gradient_accumulation_steps=MICRO_BATCHES,
        mixed_precision=None if deepspeed else precision,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.randint(0, 67, (4 * STEPS * MICRO_BATCHES, 8))
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    bare = attached(model)
    recorder.prepared(accelerator, model, optimizer)
    if not counting:
        recorder.peaks()  # what was asked for later than this gets no ledger
    losses, modes, hooks = [], [], []
    try:
        for number, batch in enumerate(loader):
            modes.append(torch._C._len_torch_dispatch_stack())
            hooks.append(attached(model))
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                if number + 1 == fails_in:
                    raise KeyboardInterrupt
                accelerator.backward(loss)
                recorder.micro_batch(loss, tokens=batch.numel())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item().hex())
            if accelerator.sync_gradients:
                recorder.step_done(learning_rate=1e-2)
                accelerator.gather(loss.detach())
    except KeyboardInterrupt:
        recorder.close()
        return {"modes": torch._C._len_torch_dispatch_stack(), "hooks": [bare, attached(model)]}
    record = recorder.finish()
    return {
        "losses": losses,
        "norms": [None if norm is None else norm.hex() for norm in record["grad_norms"]],
        "weights": weights(model),
        "modes": modes,
        "hooks": hooks,
        "traffic": record["traffic"],
        "memory": record["memory"],
        "peak": record["peak"],
        "peaks": [rank["peak"] for rank in record["per_rank"]],
        "why_not": record["not_measured"].get("traffic"),
    }


def attached(model):
    """Hooks, and the methods that something has put in the place of DeepSpeed's own."""
    hooks = sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()
    )
    replaced = [name for name in ("backward", "step") if name in model.__dict__]
    return [hooks, *replaced] if is_engine(model) else hooks


def weights(model):
    held = [getattr(p, "ds_tensor", p).detach() for p in model.parameters()]
    held = [each.to_local() if isinstance(each, DTensor) else each for each in held]
    return [each.double().sum().item().hex() for each in held]


def both(asked, **options):
    return {
        "with": train(asked, counting=True, **options),
        "without": train(asked, counting=False, **options),
        "deepspeed": options.get("deepspeed"),
        "precision": options.get("precision", "no"),
    }


def bare(wrap, **options):
    """Two steps of a model without Accelerate, the second counted, its clipping too."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    model.register_buffer("seen", torch.zeros(11))
    model = wrap(model, **options)
    ledger = Ledger()
    for step in range(2):
        if step:
            ledger.start(model)
        model(torch.randn(4, 7)).square().mean().backward()
        with ledger.within("clipping"):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        model.zero_grad()
    torch.distributed.all_reduce(torch.zeros(()))
    torch.distributed.broadcast(torch.zeros(9), src=0)
    ledger.stop()
    return ledger.counted()


def shard(model, **options):
    for layer in (model[0], model):
        fully_shard(layer, **options)
    return model


torch.distributed.init_process_group("gloo")
UNTOUCHED = set(os.environ)
patch_accelerate()
patch_deepspeed()

BF16 = {"bf16": {"enabled": True}}
zero2, zero2_asked = zero("zero2")
zero3, zero3_asked = zero("zero3")
zero3_bf16, zero3_bf16_asked = zero("zero3", **BF16)
mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
outcomes = {
    "config": CONFIG.to_dict(),
    "bare": {
        "ddp": bare(DistributedDataParallel),
        "fsdp": bare(shard),
        "fsdp_mixed": bare(shard, mp_policy=mixed),
    },
    "ddp": both({}),
    "ddp_bf16": both({}, precision="bf16"),
    "fsdp": both(FSDP),
    "fsdp_bf16": both(FSDP, precision="bf16"),
    "zero2": both(zero2_asked, deepspeed=zero2),
    "zero3": both(zero3_asked, deepspeed=zero3),
    "zero3_bf16": both(zero3_bf16_asked, deepspeed=zero3_bf16, precision="bf16"),
    "interrupted": {
        "ddp": train({}, counting=True, fails_in=3),
        "zero2": train(zero2_asked, counting=True, deepspeed=zero2, fails_in=3),
    },
}
(FOLDER / f"outcomes-{os.environ['RANK']}.json").write_text(json.dumps(outcomes, default=str))
torch.distributed.barrier()
os._exit(0)
