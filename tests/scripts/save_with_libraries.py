"""Two ranks that save checkpoints with Accelerate, FSDP2 and DeepSpeed alone, and what they hold.

python save_with_libraries.py OUTPUT

Each KIND is a folder OUTPUT/KIND; OUTPUT/KIND.pt has its weights and states, gathered by the
libraries themselves, by the keys of a portable checkpoint.
"""

import os
import sys
from argparse import Namespace
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu", "LOCAL_RANK": "0"}
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import deepspeed
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from forked_ranks import become_a_rank
from small_models import odd_gpt2
from torch.distributed.tensor import DTensor

from toolkit.engines.on_cpu import patch_accelerate, patch_deepspeed

RANKS, STEPS = 2, 2
LAYER = "GPT2Block"
MOMENTS = ("exp_avg", "exp_avg_sq")


def groups_of(model):
    """The Trainer's: with decay, and without."""
    named = [*model.named_parameters()]
    return [
        {"params": [p for n, p in named if p.dim() > 1], "lr": 0.01, "weight_decay": 0.1},
        {"params": [p for n, p in named if p.dim() == 1], "lr": 0.01, "weight_decay": 0.0},
    ]


def rows(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 61, (2, 16), generator=generator)


def save_fsdp(kind, output, rank):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LAYER],
        state_dict_type=f"{kind.removeprefix('fsdp_').upper()}_STATE_DICT",
        reshard_after_forward=True,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = odd_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for step in range(STEPS):
        accelerator.backward(model(input_ids=rows(step, rank), labels=rows(step, rank)).loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.save_state(str(output / kind))
    held = {}
    for name, parameter in model.named_parameters():
        states = optimizer.optimizer.state[parameter]
        held[name] = parameter.detach().full_tensor()
        for state, value in states.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            held[f"state.{name}.{state}"] = whole.clone()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return held


def save_zero(kind, output, rank):
    model = odd_gpt2()
    if kind == "zero3_frozen":
        model.transformer.h[0].requires_grad_(False)
    trained = [
        group | {"params": [p for p in group["params"] if p.requires_grad]}
        for group in groups_of(model)
    ]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": int(kind[4])},
        "zero_allow_untested_optimizer": True,
    }
    if kind == "zero1_bf16":
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(trained), config=config
    )
    for step in range(STEPS):
        engine.backward(engine(input_ids=rows(step, rank), labels=rows(step, rank)).loss)
        engine.step()
    engine.save_checkpoint(str(output / kind))
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # deepspeed 0.19 links the states of all groups when it has stepped the first.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    held = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter]):
                held[name] = parameter.detach().clone()
            continue
        held[name] = safe_get_full_fp32_param(parameter).clone()
        for state in MOMENTS:
            held[f"state.{name}.{state}"] = safe_get_full_optimizer_state(parameter, state).clone()
        held[f"state.{name}.step"] = torch.tensor(float(STEPS))
    return held


KINDS = {
    **dict.fromkeys(("fsdp_sharded", "fsdp_full"), save_fsdp),
    **dict.fromkeys(("zero1", "zero1_bf16", "zero2", "zero3", "zero3_frozen"), save_zero),
}


def main(output, *, hold=True):
    os.environ |= {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    rank = become_a_rank(RANKS)
    os.environ["RANK"] = str(rank)
    for patch in (patch_accelerate, patch_deepspeed):  # to find no GPU is no error
        patch()
    store = torch.distributed.FileStore(str(output / "store"), RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    for kind, save in KINDS.items():
        held = save(kind, output, rank)
        if rank == 0 and hold:
            torch.save(held, output / f"{kind}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if rank == 0 and hold:
        for kind in ("zero2", "zero3"):
            make_universal(output / kind / f"global_step{STEPS}", output / f"universal_{kind}")
            (output / f"universal_{kind}.pt").symlink_to(output / f"{kind}.pt")


def make_universal(folder, output):
    ds_to_universal.main(
        Namespace(
            input_folder=str(folder),
            output_folder=str(output),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
