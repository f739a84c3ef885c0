"""A script whose second rank fails between two collectives."""

import torch
from accelerate import Accelerator

accelerator = Accelerator()
accelerator.reduce(torch.ones(3))
if accelerator.process_index == 1:
    raise ValueError("this rank is broken")
for _ in range(100):
    accelerator.reduce(torch.ones(3))
