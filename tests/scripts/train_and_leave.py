"""`toolkit.train`, which prints at its end whether it still has a process group."""

import atexit
import sys

import torch

from toolkit.train import main


def say() -> None:
    initialized = torch.distributed.is_initialized()
    sys.stdout.write(f"leaving {'with' if initialized else 'without'} a process group\n")


atexit.register(say)
main()
