"""Batches that never wait for the GPU: their padding and positions are examined on the CPU.

transformers checks in every forward whether any token is padding, and waits for the GPU's answer.
Padding on the right needs no mask: attention only looks back, so no token sees it, and only a loss
of routers counts it (`check_lean_masks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from toolkit.configs.proven_models import PROVEN_MODELS
from toolkit.data.tokens import CACHES
from toolkit.errors import UsageError
from toolkit.records.evidence import IGNORED
from toolkit.training.speed.attention import (
    BORDERS,
    attention_of_texts,
    block_causal_mask,
    has_flash,
    text_borders,
)

POSITIONS = "supervised_positions"
"""Key of a batch: the positions in the concatenated rows whose next token is learned."""

UNASKED = "sdpa_unasked"
"""Name under which transformers runs `attention_of_texts` without making masks."""

Collate = Callable[[Sequence[Mapping[str, Any]]], dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeanCollator:
    """A collator that drops masks and names positions; for batches padded on the right."""

    collate: Collate
    names_positions: bool
    """Add `POSITIONS`, which a chunked loss projects."""

    drops_masks: bool
    """Leave the attention mask out."""

    names_borders: bool = False
    """Add `BORDERS` to packed rows, for `attention_of_texts`."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.collate(rows)
        if self.drops_masks:
            mask = batch.pop("attention_mask", None)
            if mask is not None and (mask[:, 1:] > mask[:, :-1]).any():
                raise ValueError("lean masks are for padding on the right, and this is not")
        if self.names_borders and "position_ids" in batch:
            batch[BORDERS] = text_borders(batch["position_ids"])
        if self.names_positions:
            learned = batch["labels"][:, 1:] != IGNORED
            row, column = learned.nonzero(as_tuple=True)
            batch[POSITIONS] = row * batch["labels"].shape[1] + column
        return batch


def check_lean_masks(model: PreTrainedModel) -> None:
    """Check that no part of the model's loss depends on the padding on the right.

    Raises:
        UsageError: `check_proven` refuses the model.
    """
    risk = "its tokens might see the padding after them"
    check_proven(model, "--lean_masks", risk=risk, off="--lean_masks false")


def check_proven(model: PreTrainedModel, flag: str, *, risk: str, off: str) -> None:
    """Check that a switch is proven for a model, and that the model adds no loss of its routers.

    Raises:
        UsageError: it names the flag, the `risk` in a model that is not proven, and `off`, the flag
            that leaves the switch off.
    """
    name = type(model).__name__
    # A model with code from the Hub can share its class name with a transformers model.
    if name not in PROVEN_MODELS or not type(model).__module__.startswith("transformers."):
        raise UsageError(f"{flag} is not proven for {name}: {risk}. Pass {off}.")
    # The routers' loss counts every unmasked token, and the chunked loss lacks it.
    if getattr(model.config, "output_router_logits", False):
        raise UsageError(
            f"{flag} would change the routers' loss that output_router_logits asks of {name}. "
            f"Pass {off}, or turn that off in the model's config.json."
        )


def takes_masks_as_given(model: PreTrainedModel) -> bool:
    """Whether all layers take the same mask, or none, so that it can be made beforehand."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    slides = getattr(config, "use_sliding_window", True)
    windows = slides and getattr(config, "sliding_window", None)
    return config._attn_implementation == "sdpa" and kinds == {"full_attention"} and not windows


def spare_the_device(model: PreTrainedModel) -> None:
    """Have the model take batches without a mask as they are, and keep packed texts apart itself.

    transformers 5.23 examines in each forward whether the positions begin anew anywhere
    (masking_utils.py, `find_packed_sequence_indices`), and waits for the device. It doesn't for an
    attention without a mask function, so during a forward the same attention has another name.
    """
    AttentionInterface.register(UNASKED, attention_of_texts)
    # On the decoder: a `PeftModel` calls the forward of the model around it, past its hooks.
    decoder = model.base_model
    decoder.register_forward_pre_hook(_begins, with_kwargs=True)
    decoder.register_forward_hook(_ended, always_call=True)


def _begins(decoder: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    borders = kwargs.pop(BORDERS, None)
    masked = kwargs.get("attention_mask") is not None
    if masked or any(kwargs.get(name) is not None for name in CACHES):
        return args, kwargs  # for example generation, whose rows are padded on the left
    positions = kwargs.get("position_ids")
    if positions is None:
        decoder.config._attn_implementation = UNASKED
    elif borders is not None and has_flash(positions.device):
        decoder.config._attn_implementation = UNASKED
        # transformers hands masks of four dimensions to the layers as they are.
        kwargs["attention_mask"] = borders.view(1, 1, 1, -1)
    else:
        kwargs["attention_mask"] = block_causal_mask(positions)
    return args, kwargs


def _ended(decoder: Any, *_: Any) -> None:
    if decoder.config._attn_implementation == UNASKED:
        decoder.config._attn_implementation = "sdpa"
