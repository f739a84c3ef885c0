"""Changes to libraries that let every backend run on the CPU, as a rehearsal does."""

from __future__ import annotations

import functools
import importlib
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, Final
from urllib.request import getproxies

from toolkit.launching.ranks import local_rank, say

MEMORY: Final[dict[str, Callable[[], Any]]] = {
    **dict.fromkeys(("memory_allocated", "max_memory_allocated"), int),
    **dict.fromkeys(("memory_reserved", "max_memory_reserved"), int),
    **dict.fromkeys(("memory_cached", "max_memory_cached"), int),
    **dict.fromkeys(("mem_get_info", "get_memory_info"), lambda: (0, 0)),
    "memory_stats": Counter,  # 0 for any key
    "memory_summary": str,
    **dict.fromkeys(("reset_peak_memory_stats", "reset_accumulated_memory_stats"), lambda: None),
    **dict.fromkeys(("reset_max_memory_allocated", "reset_max_memory_cached"), lambda: None),
    **dict.fromkeys(("synchronize", "empty_cache", "ipc_collect"), lambda: None),
}
"""Functions of torch that read or reset a GPU's memory or wait for it, each with what it returns
where there is no GPU."""

REACH_SECONDS: Final = 5.0


def patch_torch() -> None:
    """Let a script that reads a GPU's memory go on: without a GPU torch raises, or returns 0."""
    said: list[str] = []

    def returning(name: str, nothing: Callable[[], Any]) -> Callable[..., Any]:
        def function(*_: Any, **__: Any) -> Any:
            if "memory" in name and not said:
                said.append(name)
                if local_rank() == 0:
                    say(f"{name} and its like return 0 in this rehearsal: there is no GPU")
            return nothing()

        return function

    for module in ("torch.cuda", "torch.accelerator"):
        for part in (module, f"{module}.memory"):
            holder = importlib.import_module(part)
            for name, nothing in MEMORY.items():
                if hasattr(holder, name):
                    setattr(holder, name, returning(f"{module}.{name}", nothing))


def patch_hub() -> None:
    """Read the cache alone once the Hub can't be reached: each rank would try for half a minute."""
    from huggingface_hub import constants, set_client_factory
    from huggingface_hub.utils._http import default_client_factory  # 1.0 to 2.4; not exported

    def look_first(request: Any) -> None:
        if looked or constants.is_offline_mode() or getproxies():
            return
        looked.append(request.url.host)
        try:
            port = request.url.port or (80 if request.url.scheme == "http" else 443)
            socket.create_connection((request.url.host, port), REACH_SECONDS).close()
        except OSError as error:
            os.environ["HF_HUB_OFFLINE"] = "1"
            constants.HF_HUB_OFFLINE = True  # asked again by the hook after this one
            if local_rank() == 0:
                say(
                    f"{request.url.host} can't be reached ({error}): what the Hub's cache does not "
                    "hold needs the path of a folder"
                )

    def client() -> Any:
        made = default_client_factory()
        hooks = made.event_hooks
        made.event_hooks = {**hooks, "request": [look_first, *hooks["request"]]}
        return made

    looked: list[str] = []
    set_client_factory(client)


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
    """Skip DeepSpeed's shared-memory op, also for a script that imports DeepSpeed by itself later.

    It takes a minute of compiling, for inference alone: `deepspeed/comm/torch.py` (0.19) builds it
    for every CPU process group and uses it in `inference_all_reduce` only.
    """
    if module := sys.modules.get(_ShmFinder.NAME):
        _ShmFinder.skip_in(module)
    else:
        sys.meta_path.insert(0, _ShmFinder())


class _ShmFinder(MetaPathFinder):
    NAME = "deepspeed.comm.torch"

    @staticmethod
    def skip_in(module: Any) -> None:
        module.build_shm_op = lambda: None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == self.NAME else None
        if spec is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_without(module: Any) -> None:
            execute(module)
            self.skip_in(module)

        loader.exec_module = execute_without
        return spec


def patch_transformers() -> None:
    """Let `TrainingArguments(bf16=True)` through: a CPU computes in bf16, only slower."""
    importlib.import_module("transformers.utils.import_utils")
    # Each module has imported the function by its name. That of the arguments takes seconds to
    # import, for peft and bitsandbytes, and a script without a Trainer never does.
    for name in ("utils", "utils.import_utils", "training_args"):
        module: Any = sys.modules.get(f"transformers.{name}")
        if module is not None:
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
