"""A rank of `toolkit.train` that takes the only GPU though another rank has it too.

Started by `accelerate launch` in the place of `-m toolkit.train`; see `shared.py`.
"""

from __future__ import annotations

import os
from typing import Final

import torch

from toolkit import train
from toolkit.engines.on_cpu import patch_accelerate
from toolkit.rehearse import rehearse_if_needed
from toolkit.training import request
from toolkit.training.run import SaveAtTheEnd

KEEP_SAVE: Final = "KIT_KEEP_SAVE"
"""Variable with which FSDP2 saves at the end all the same, to show the fault below."""


def share_device() -> bool:
    """Take the place of `rehearse_if_needed`, and return whether there is no GPU at all."""
    if not torch.cuda.is_available():
        return rehearse_if_needed()
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        # Accelerate, DeepSpeed and torch's device meshes take the GPU of this number.
        os.environ["LOCAL_RANK"] = "0"
        torch.cuda.set_device(0)
        patch_accelerate()  # gloo ranks that each engine takes for those of GPUs
        is_fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
        if is_fsdp and KEEP_SAVE not in os.environ:
            # DTensor gathers whole weights by ProcessGroupGloo::allgather_into_tensor_coalesced,
            # which hands gloo the GPU's addresses as host memory: SIGSEGV (torch 2.11 and 2.13,
            # https://github.com/pytorch/pytorch/issues/152645). The product has NCCL on GPUs.
            SaveAtTheEnd.step_done = lambda *_: None  # type: ignore[method-assign]
    return False


if __name__ == "__main__":
    request.rehearse_if_needed = share_device
    train.main()
