"""Weights in 4 bits: loaded so that every strategy can shard them, and unpacked again.

Only this module depends on bitsandbytes' classes (0.50), and it imports them where weights are in
4 bits alone.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any, Final

from toolkit.errors import UsageError

if TYPE_CHECKING:
    import torch

OLDEST: Final = (0, 50)
"""The oldest bitsandbytes that the toolkit was checked with; it also computes on a CPU."""


def check_bitsandbytes() -> None:
    """Check that weights can be loaded in 4 bits.

    Raises:
        UsageError: bitsandbytes isn't there, or is too old.
    """
    try:
        version = importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "--method qlora loads weights in 4 bits by bitsandbytes, which is not installed: "
            "pip install 'toolkit[qlora]', or pass --method lora."
        ) from None
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UsageError(
            f"--method qlora needs bitsandbytes {oldest} or newer, and this is {version}: "
            "pip install -U 'toolkit[qlora]'."
        )


def in_4_bits(storage: str) -> Any:
    """Return transformers' config for loading weights as NF4, with quantised scales.

    Args:
        storage: The dtype that packed weights are stored in, and computed with. It is floating,
            since FSDP2 and ZeRO-3 shard no others. It is the dtype of the computation, since both
            cast every floating tensor to it, which would destroy packed weights of another dtype.
    """
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=storage,
        bnb_4bit_quant_storage=storage,
    )


def dequantised(layer: Any, packed: torch.Tensor) -> torch.Tensor:
    """Return the packed weights of a layer, gathered whole, unpacked on the device of its scales.

    They have the shape of the checkpoint, and the dtype that they were loaded in.
    """
    from bitsandbytes.functional import dequantize_4bit
    from transformers.pytorch_utils import Conv1D

    state = layer.quant_state
    weight = dequantize_4bit(packed.to(state.absmax.device), state)
    # transformers transposes the weights of GPT-2's layers before it packs them.
    return weight.T if issubclass(getattr(layer, "source_cls", object), Conv1D) else weight


def keep_packed(model: Any) -> None:
    """Have 4-bit layers keep the packing of their weights in every forward.

    Without gradients bitsandbytes 0.50 repacks them on CPUs with AVX512-BF16, in place
    (nn/modules.py, `Linear4bit.forward`): a shard is then no part of the gathered weights.
    """
    from bitsandbytes.nn.modules import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
