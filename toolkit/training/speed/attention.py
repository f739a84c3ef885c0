"""The kernels of attention: which ones torch may take, and one that keeps packed texts apart."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from typing import Any, cast

import torch
from torch.nn import attention
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from toolkit.errors import UsageError, sentence_of

BORDERS = "text_borders"
"""Key of a batch of packed rows: where texts begin in the concatenated rows, and their end; int32.
"""

FLASH_CAPABILITY = (8, 0)
"""The least compute capability that torch's FlashAttention runs on."""

_GQA: Any = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""torch 2.11 takes fewer heads of keys without a word, later releases want this one."""

MEASURED = {"2.11": "4.0.0b18"}
"""By torch's release, the one of flash-attn-4 that was measured with it: on an H200, against fp32
(benchmarks/results/2026-11-26-speed-lab.md). torch 2.11 takes none after it (pytorch#190212)."""

FA4_CAPABILITIES = ((9, 0), (10, 0))

_TAG = " attention:"


def choose_kernels(*, cudnn: bool, flash: str | None) -> None:
    """Choose the kernels that torch may take for this process.

    Args:
        cudnn: Whether cuDNN's may be taken. On an H100, H200 or B200 torch 2.11 prefers it, and its
            gradients are NaN at times. A cause is mended in cuDNN 9.26 (pytorch#196678).
        flash: FA3 or FA4, of torch's registry; None or FA2: torch's own.

    Raises:
        UsageError: the package that has it can't be imported.
    """
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    if flash in (None, "FA2"):
        return
    try:
        attention.activate_flash_attention_impl(flash)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = f"{sentence_of(error)} Install its package, or leave it out."
        raise UsageError(f"--flash_attention {flash}: {reason}") from error


def no_flash_4(capability: tuple[int, int]) -> str | None:
    """Say why FlashAttention 4 is not chosen on a GPU; None where it was measured and is there."""
    if capability not in FA4_CAPABILITIES:
        return "it is for an H100, H200 or B200"
    release = ".".join(torch.__version__.split(".")[:2])
    if (known := MEASURED.get(release)) is None:
        return f"it was not measured with torch {release}"
    try:
        installed = version("flash-attn-4")
    except PackageNotFoundError:
        installed = "not installed"
    if installed == known:
        return None
    return (
        f"flash-attn-4 is {installed}, and {known} was measured with torch {release}: "
        f"pip install flash-attn-4=={known}"
    )


def tell_caches_of_kernels() -> None:
    """Have compiled layers be found again only where torch may take the same kernels.

    The choice is part of a compiled layer, and not of the key under which caches keep it: torch
    2.11 on an H200 ran cuDNN's attention, which was off, from the layer of an earlier run.
    """
    cuda, config = torch.backends.cuda, cast("Any", torch.compiler.config)
    allowed = {
        "cudnn": cuda.cudnn_sdp_enabled(),
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
        str(attention.current_flash_attention_impl()): True,
    }
    names = ",".join(name for name, is_allowed in allowed.items() if is_allowed)
    config.cache_key_tag = f"{config.cache_key_tag.partition(_TAG)[0]}{_TAG}{names}"


@cache
def has_flash(device: torch.device) -> bool:
    """Whether torch has FlashAttention for a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def attention_of_texts(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' sdpa does; within each text where the mask is `BORDERS`.

    FlashAttention then computes nothing between texts, while sdpa takes its slower kernels for
    a mask, which computes all of it. It takes 16 bits and no dropout: else a mask is made.

    Args:
        query: [rows, heads, tokens, width]; `key` and `value` may have fewer heads.
        attention_mask: None; a mask of sdpa's; or [1, 1, 1, texts + 1], int32.

    Returns:
        [rows, tokens, heads, width], and no weights.
    """
    rows, heads, tokens, width = query.shape
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        borders = attention_mask.view(-1)
        if value.dtype.itemsize == 2 and not dropout and width == value.shape[-1] <= 256:
            # Rotations in fp32 leave fp32 states, which autocast casts for sdpa alone.
            within: Any = [
                states.transpose(1, 2).flatten(0, 1).to(value.dtype)
                for states in (query, key, value)
            ]
            within += [borders, borders, tokens, tokens]
            attended: Any = varlen_attn(*within, scale=scaling, window_size=(-1, 0), **_GQA)
            return attended.view(rows, tokens, heads, width), None
        attention_mask = _mask_within(borders, rows, tokens)
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def text_borders(positions: torch.Tensor) -> torch.Tensor:
    """Return where texts begin in concatenated rows, and the number of all tokens; int32.

    Padding, whose positions are 0 to the end of a row, is one text: nothing is learned from it.

    Args:
        positions: [rows, tokens], which begin anew with each text.
    """
    rest_is_zero = (positions != 0).flip(1).cumsum(1).flip(1) == 0
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    begins[:, 1:] &= ~rest_is_zero[:, :-1]
    ends = torch.tensor([positions.numel()])
    return torch.cat([begins.flatten().nonzero().squeeze(1), ends]).to(torch.int32)


def _mask_within(borders: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
    """Return the mask that `borders` stand for, [rows, 1, tokens, tokens]."""
    place = torch.arange(rows * tokens, device=borders.device, dtype=torch.int32)
    text = torch.bucketize(place, borders, right=True).view(rows, tokens)
    return _within_texts(text)


def block_causal_mask(positions: torch.Tensor) -> torch.Tensor:
    """Return the mask of packed rows, [rows, 1, tokens, tokens]: a token sees itself and those
    before it in its text, which begins where the positions don't go on.
    """
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return _within_texts(begins.cumsum(1))


def _within_texts(text: torch.Tensor) -> torch.Tensor:
    """Return the causal mask within texts, of each token's text by number, [rows, tokens]."""
    place = torch.arange(text.shape[1], device=text.device)
    before = place.unsqueeze(0) <= place.unsqueeze(1)
    return ((text.unsqueeze(2) == text.unsqueeze(1)) & before).unsqueeze(1)
