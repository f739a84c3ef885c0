"""Weights in 4 bits: how they are loaded so that every strategy can shard them, and read whole.

Everything that depends on bitsandbytes' classes stands here (0.50; in transformers 5.23 and
peft 0.21 by its own names). It is imported where weights are in 4 bits, and nowhere else.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any, Final

import torch

from toolkit.errors import UsageError

OLDEST: Final = (0, 50)
"""The first bitsandbytes that this was checked with; it also computes on a CPU."""


def check_bitsandbytes() -> None:
    """Check that weights can be loaded in 4 bits.

    Raises:
        UsageError: bitsandbytes isn't there, or is too old.
    """
    oldest = ".".join(map(str, OLDEST))
    try:
        found = importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "--method qlora loads weights in 4 bits by bitsandbytes, which is not installed: "
            "pip install 'toolkit[qlora]', or pass --method lora."
        ) from None
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise UsageError(
            f"--method qlora needs bitsandbytes {oldest} or newer, and this is {found}: "
            "pip install -U 'toolkit[qlora]'."
        )


def in_4_bits(storage: str) -> Any:
    """Return how transformers is to load the weights: NF4, and the scales quantised as well.

    Args:
        storage: The dtype that packed weights are stored in and multiplied with. A floating one,
            since FSDP2 and ZeRO-3 shard no others; that of the computing, since both cast
            whatever floats to it, and packed weights are no numbers to be cast.
    """
    from transformers import BitsAndBytesConfig

    dtype = getattr(torch, storage)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )


def dequantised(layer: Any, packed: torch.Tensor) -> torch.Tensor:
    """Return the weights that the packed ones of a layer stand for, where its scales are.

    Args:
        layer: Whose scales they are.
        packed: All of them, gathered.

    Returns:
        In the shape that the checkpoint had them in, and the dtype they were loaded in.
    """
    from bitsandbytes.functional import dequantize_4bit
    from transformers.pytorch_utils import Conv1D

    state = layer.quant_state
    weight = dequantize_4bit(packed.to(state.absmax.device), state)
    # transformers turns the weights of GPT-2's layers round before it packs them.
    return weight.T if issubclass(getattr(layer, "source_cls", object), Conv1D) else weight


def keep_packed(model: Any) -> None:
    """Have 4-bit layers leave their weights as they are packed, whatever they compute.

    Without gradients bitsandbytes 0.50 packs them otherwise on CPUs with AVX512-BF16, in place
    (nn/modules.py, `Linear4bit.forward`): a shard is then no part of what was gathered.
    """
    from bitsandbytes.nn.modules import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
