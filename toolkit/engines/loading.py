"""Models that are loaded or saved on one rank while an engine is configured for all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from toolkit.engines.tensors import is_partitioned


def loads_on_rank_0(model: Any) -> bool:
    """Whether ranks other than 0 have no weights of their own yet, or only a part of rank 0's.

    ZeRO-3 hands out rank 0's while it loads, and FSDP's RAM-efficient loading leaves the others on
    the meta device or uninitialised until the model is wrapped.
    """
    # As `from_pretrained` of transformers 5.23 decides which ranks it leaves on the meta device.
    from transformers.integrations.fsdp import is_fsdp_enabled

    return any(map(is_partitioned, model.parameters())) or bool(is_fsdp_enabled())


@contextmanager
def outside_of_engines() -> Iterator[None]:
    """Keep `from_pretrained` and `save_pretrained` on one rank from using an engine.

    Transformers 5.23 partitions the weights while DeepSpeed's config is registered, and loads
    on one rank only while `ACCELERATE_USE_FSDP` is set: right at the start, wrong on one rank.
    """
    from transformers.integrations import deepspeed

    registered = deepspeed._hf_deepspeed_config_weak_ref
    fsdp = os.environ.pop("ACCELERATE_USE_FSDP", None)
    deepspeed.unset_hf_deepspeed_config()
    with ExitStack() as undo:
        undo.callback(setattr, deepspeed, "_hf_deepspeed_config_weak_ref", registered)
        if fsdp is not None:
            undo.callback(os.environ.__setitem__, "ACCELERATE_USE_FSDP", fsdp)
        yield
