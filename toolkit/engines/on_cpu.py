"""Changes to libraries that let every backend run on the CPU, as a rehearsal does."""

from __future__ import annotations

import functools
import os
from typing import Any


def patch_accelerate() -> None:
    """Have Accelerate 1.15 treat gloo ranks as GPU ranks; each backend then takes its own path.

    A public way is missing: huggingface/accelerate#2741 (a CPU launch starts one process) and
    state.py's `not cpu` before FSDP and DeepSpeed. tests/test_rehearse.py fails when this moves.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import get_fsdp2_grad_scaler

    original = PartialState._prepare_backend

    def prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[Any, DistributedType]:
        if cpu or "LOCAL_RANK" not in os.environ:
            return original(self, cpu, sagemaker_dp, backend)
        if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
            patch_deepspeed()
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = prepare_backend

    set_cpu_offload = FullyShardedDataParallelPlugin.set_cpu_offload

    def set_cpu_offload_unpinned(self: Any) -> None:
        set_cpu_offload(self)
        # CPUOffloadPolicy pins memory by default, which needs a GPU.
        if getattr(self.cpu_offload, "pin_memory", False):
            from torch.distributed.fsdp import CPUOffloadPolicy

            self.cpu_offload = CPUOffloadPolicy(pin_memory=False)

    FullyShardedDataParallelPlugin.set_cpu_offload = set_cpu_offload_unpinned

    init = Accelerator.__init__

    @functools.wraps(init)
    def init_with_fp16(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # On a CPU Accelerate 1.15 silently computes in fp32 for fp16, though torch has a scaler.
        if self.state.mixed_precision == "fp16" and self.device.type == "cpu":
            self.native_amp = True
            self.scaler = (
                get_fsdp2_grad_scaler(device="cpu")
                if self.is_fsdp2
                else torch.amp.GradScaler("cpu")
            )

    Accelerator.__init__ = init_with_fp16


def patch_deepspeed() -> None:
    """Skip DeepSpeed's shared-memory op: a minute of compiling for inference alone.

    `deepspeed/comm/torch.py` builds it for every CPU process group and uses it in
    `inference_all_reduce` only; training's collectives stay on gloo.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def patch_transformers() -> None:
    """Let `TrainingArguments(bf16=True)` through: a CPU computes in bf16, only slower."""
    import transformers.training_args
    import transformers.utils
    import transformers.utils.import_utils

    # Each of these modules has imported the function by its name.
    modules: tuple[Any, ...] = (
        transformers.utils,
        transformers.utils.import_utils,
        transformers.training_args,
    )
    for module in modules:
        module.is_torch_bf16_gpu_available = lambda: True


def register_ring() -> None:
    """Have torch's context parallelism take SDPA's kernel for the CPU around its ring.

    torch 2.15 (`_context_parallel/_attention.py`) knows those for GPUs alone. The ring itself takes
    any kernel; tests/test_split_row_faults.py fails when this moves.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def local(values: Any) -> list[Any]:
        return [value.to_local() if isinstance(value, DTensor) else value for value in values]

    def spread(results: Any, like: Any) -> tuple[Any, ...]:
        return tuple(
            DTensor.from_local(result, like.device_mesh, like.placements) for result in results
        )

    def run(_: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        query, key, value, *options = args
        dropout, causal = (*options, 0.0, False)[:2]
        results = ring._templated_ring_attention(
            query.device_mesh.get_group(),
            2,
            kernel,
            *local((query, key, value)),
            is_causal=bool(causal),
            dropout_p=dropout,
            scale=kwargs.get("scale"),
        )
        return spread(results, query)

    def run_backward(_: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        gradient, query, key, value, out, logsumexp, dropout, causal = args[:8]
        parts = local((gradient, query, key, value, out, logsumexp))
        results = ring._templated_ring_attention_backward(
            query.device_mesh.get_group(),
            2,
            backward,
            parts[0],
            "grad_out",
            *parts[1:],
            is_causal=causal,
            dropout_p=dropout,
            scale=kwargs.get("scale"),
        )
        return spread(results, query)

    ring.custom_ops |= {kernel: run, backward: run_backward}
