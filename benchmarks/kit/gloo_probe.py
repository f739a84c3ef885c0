"""Two gloo ranks on one device gather a tensor in one of several ways, to see which of them dies.

    python -P benchmarks/kit/gloo_probe.py collective
    python -P benchmarks/kit/gloo_probe.py full_tensor cpu

It ends with 0 where both ranks gathered the right numbers. A rank that dies of a signal prints its
stack. `shared.py` has the training in which the fault was met.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2
SECONDS = 60


def main() -> int:
    case, device, *as_rank = sys.argv[1:] if len(sys.argv) > 2 else [*sys.argv[1:], "cuda"]
    if as_rank:
        rank, store = as_rank
        return run_rank(case, device, int(rank), store)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", __file__, case, device]
        variables = os.environ | {"TORCH_SHOW_CPP_STACKTRACES": "1"}
        ranks = [
            subprocess.Popen([*command, str(rank), str(Path(folder, "store"))], env=variables)
            for rank in range(RANKS)
        ]
        codes = [rank.wait(SECONDS) for rank in ranks]
    print(f"{case}: the ranks ended with {codes}", flush=True)
    return 0 if not any(codes) else 1


def run_rank(case: str, device: str, rank: int, store: str) -> int:
    faulthandler.enable()
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    gathered = CASES[case](device, rank)
    if device == "cuda":
        torch.cuda.synchronize()
    expected = torch.arange(RANKS * 4, dtype=torch.float32).reshape(RANKS * 2, 2)
    is_right = gathered is None or torch.equal(gathered.cpu(), expected)
    print(f"{case}, rank {rank}: {'right' if is_right else f'wrong: {gathered}'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if is_right else 1


def part(device: str, rank: int) -> torch.Tensor:
    """Return the rows of a rank, of the numbers that all ranks have together."""
    numbers = torch.arange(4, dtype=torch.float32, device=device) + 4 * rank
    return numbers.reshape(2, 2)


def collective(device: str, rank: int) -> torch.Tensor:
    """Gather as FSDP2 does before a layer computes."""
    whole = torch.empty(RANKS * 2, 2, device=device)
    dist.all_gather_into_tensor(whole, part(device, rank))
    return whole


def functional(device: str, rank: int) -> torch.Tensor:
    """Gather by the functional collective that DTensor uses."""
    from torch.distributed._functional_collectives import all_gather_tensor

    assert dist.group.WORLD is not None
    return all_gather_tensor(part(device, rank), 0, dist.group.WORLD) + 0


def full_tensor(device: str, rank: int) -> torch.Tensor:
    """Gather a DTensor, as the save of a model does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(device, (RANKS,))
    return DTensor.from_local(part(device, rank), mesh, [Shard(0)]).full_tensor()


def state_dict(device: str, rank: int) -> None:
    """Gather all weights of a sharded model, as torch's own function does it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = torch.nn.Linear(8, 8, device=device)
    fully_shard(model, mesh=init_device_mesh(device, (RANKS,)))
    model(torch.ones(1, 8, device=device)).sum().backward()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    assert (len(weights) == 2) == (rank == 0), sorted(weights)


CASES = {
    function.__name__: function for function in (collective, functional, full_tensor, state_dict)
}

if __name__ == "__main__":
    sys.exit(main())
