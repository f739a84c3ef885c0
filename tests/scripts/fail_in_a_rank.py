"""Two ranks, of which the second fails in the way that the first word names."""

import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def save_states_in_8_bits():
    """Save what FSDP1 cannot: states that are no tensors of the parameter's size."""
    import bitsandbytes
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = torch.nn.Linear(64, 64, bias=HOW == "save-uneven")
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), min_8bit_size=0)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    FullyShardedDataParallel.optim_state_dict(model, optimizer)


HOW = sys.argv[1]
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
ROWS = torch.ones(3)
dist.all_reduce(ROWS)
if dist.get_rank() == 1:
    if HOW == "raise":
        raise ArithmeticError("the third step went wrong")
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "leave":
        os._exit(0)
    if HOW == "skip":
        signal.pause()
if HOW == "params":
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 5, bias=dist.get_rank() == 1))
if HOW.startswith("save"):
    save_states_in_8_bits()
if HOW == "stop":
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
dist.all_reduce(ROWS if HOW != "shapes" or dist.get_rank() else torch.ones(5))
