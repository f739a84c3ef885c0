"""Cross-entropy straight from hidden states: the logits of a few tokens at a time.

The loss and its gradients are those of the whole logits. Where gradients are wanted they are made
along with the loss, as each chunk's logits are there anyway, so the head is needed in forward only
and nothing is computed twice. They are kept undivided, in fp32 where chunks add up, until backward
brings the factor: with fp16 what loss scaling saves from vanishing is not lost before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from toolkit.data.tokens import IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsOf:
    """What a family does to the product of hidden states and head before it takes the loss."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, product: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits, in the memory of an fp32 product."""
        logits = product.float()
        if self.scale != 1.0:
            logits *= self.scale
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def backward_(self, gradient: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        """Turn the gradient of the logits into that of the product, in place."""
        if self.softcap is not None:
            assert logits is not None
            gradient *= 1 - (logits / self.softcap).square_()
        if self.scale != 1.0:
            gradient *= self.scale
        return gradient


PLAIN = LogitsOf()


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    items: torch.Tensor | int | None = None,
    chunk_tokens: int,
    logits_of: LogitsOf = PLAIN,
) -> torch.Tensor:
    """Return the cross-entropy of `hidden @ weight.T + bias`, a scalar in fp32.

    Args:
        hidden: [tokens, hidden size].
        weight: [vocabulary, hidden size], whole: gathered by now if it is sharded.
        targets: [tokens]; `IGNORED` ones count for nothing.
        bias: [vocabulary].
        items: Divides the sum of the losses; None divides by the targets that count.
        chunk_tokens: Tokens whose logits are held at once.
        logits_of: From the product to the logits.
    """
    device = hidden.device.type
    computed_in = (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    )
    with torch.autocast(device, enabled=False):
        total = _SummedLoss.apply(
            *(hidden, weight, bias, targets),
            _How(
                chunk_tokens=chunk_tokens,
                logits_of=logits_of,
                computed_in=computed_in,
                differentiates=torch.is_grad_enabled(),
            ),
        )
    if items is None:
        items = (targets != IGNORED).sum()
    elif isinstance(items, torch.Tensor):
        items = items.to(total.device)
    return total / items


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    chunk_tokens: int
    logits_of: LogitsOf
    computed_in: torch.dtype
    differentiates: bool


class _SummedLoss(torch.autograd.Function):
    """The sum of the tokens' losses."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        how: _How,
    ) -> torch.Tensor:
        wanted = [how.differentiates and each for each in ctx.needs_input_grad[:3]]
        for_hidden = torch.empty_like(hidden) if wanted[0] else None
        for_weight, for_bias = (
            torch.zeros_like(each, dtype=torch.float32) if want and each is not None else None
            for want, each in zip(wanted[1:], (weight, bias), strict=True)
        )
        matrix = weight.to(how.computed_in)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for begin in range(0, len(hidden), how.chunk_tokens):
            chunk = slice(begin, begin + how.chunk_tokens)
            states = hidden[chunk].to(how.computed_in)
            product = states @ matrix.t()
            if bias is not None:
                product += bias.to(how.computed_in)
            loss, gradient = _of_chunk(product, targets[chunk], how, any(wanted))
            del product
            total += loss
            if gradient is None:
                continue
            gradient = gradient.to(how.computed_in)
            if for_hidden is not None:
                for_hidden[chunk] = gradient @ matrix
            if for_weight is not None:
                _add_product(for_weight, gradient.t(), states)
            if for_bias is not None:
                for_bias += gradient.sum(0, dtype=torch.float32)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(for_hidden, for_weight, for_bias)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # In place, for nothing else may be as large: backward twice is an error of autograd's. In
        # fp32, for fp16 can't hold the factor of loss scaling.
        found = [
            None if each is None else each.float().mul_(gradient).to(dtype)
            for each, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *found, None, None


def _of_chunk(
    product: torch.Tensor, targets: torch.Tensor, how: _How, differentiates: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the summed loss of some tokens, and its gradient for their product, in fp32."""
    counted = targets != IGNORED
    at = targets.clamp(min=0).unsqueeze(1)  # IGNORED is no place in the vocabulary
    logits = how.logits_of(product)
    norms = logits.logsumexp(1)
    losses = norms - logits.gather(1, at).squeeze(1)
    loss = losses.masked_fill(~counted, 0).sum()
    if not differentiates:
        return loss, None
    before = logits.clone() if how.logits_of.softcap is not None else None
    gradient = logits.sub_(norms.unsqueeze(1)).exp_()
    gradient.scatter_add_(1, at, torch.full_like(at, -1, dtype=gradient.dtype))
    gradient.masked_fill_(~counted.unsqueeze(1), 0)
    return loss, how.logits_of.backward_(gradient, before)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a matrix product to an fp32 total.

    A product that is rounded to 16 bits before it is added would be off once for each chunk.
    """
    if total.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
