"""Cross-entropy straight from hidden states: the logits of a few tokens at a time.

The loss and its gradients equal those of the whole logits. If gradients are needed, they are
computed with the loss, from the same logits of each chunk. So the head is needed only in forward,
and no product is computed twice.

torch's `linear_cross_entropy`, in chunks from 2.13 on, was measured beside this one
(benchmarks/results/2026-11-23-chunked-loss.md) and does not take its place: its loss has the dtype
of the hidden states, 8e-3 off in bf16 where this one is 1e-6 off; its fp16 gradients are multiplied
in fp16, which can't hold the factor of loss scaling; and it has no soft-capping.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from toolkit.engines.tensors import is_spread
from toolkit.errors import UsageError
from toolkit.records.evidence import IGNORED
from toolkit.training.speed.lean_batches import POSITIONS, check_proven

_LOSS_ONLY = {"labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "return_dict"}
"""Arguments that the forward of a causal LM does not pass on to its decoder."""


OfChunk = Callable[
    [torch.Tensor, torch.Tensor, "LogitsOf", bool], tuple[torch.Tensor, torch.Tensor | None]
]
"""Takes a product, its targets, the steps to the logits and whether gradients are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsOf:
    """A model family's operations from the product of hidden states and head to the logits."""

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


def checked_head(model: PreTrainedModel) -> tuple[torch.nn.Linear, LogitsOf]:
    """Return the model's head, and the steps from its product to the logits.

    Raises:
        UsageError: the chunked loss is not proven for the model, or its head is no plain matrix.
    """
    name, config, head = type(model).__name__, model.config, model.get_output_embeddings()
    # The operations between hidden states and loss differ by family (transformers 5.23).
    risk = "what it does between its hidden states and its loss might be left out"
    check_proven(model, "--loss_impl chunked", risk=risk, off="--loss_impl full")
    # Not a subclass: an adapter on the head, or a quantised one, computes more than a product.
    if type(head) is not torch.nn.Linear:
        raise UsageError(
            f"--loss_impl chunked needs a plain linear head, and that of {name} is "
            f"a {type(head).__name__}. Pass --loss_impl full."
        )
    if name in ("CohereForCausalLM", "Cohere2ForCausalLM"):
        return head, LogitsOf(scale=float(config.logit_scale))
    if name in ("GraniteForCausalLM", "GraniteMoeForCausalLM"):
        return head, LogitsOf(scale=1 / float(config.logits_scaling))
    return head, LogitsOf(softcap=getattr(config, "final_logit_softcapping", None))


def use_chunked_loss(
    model: PreTrainedModel, *, chunk_tokens: int, backend: str | None = None
) -> None:
    """Have the model return the chunked loss, and no logits, wherever it is given labels.

    Without labels it returns logits as before. With `backend`, one of torch.compile's, a chunk's
    loss and gradient are compiled: its logits are read twice and never held in fp32.

    Raises:
        UsageError: the chunked loss is not proven for the model.
    """
    head, logits_of = checked_head(model)
    of_chunk = _of_chunk if backend is None else compiled_chunk(backend)
    # Functions, not methods of this model: a copy of it has to compute with its own weights.
    original_forward, project = type(model).forward, type(head).forward
    signature = inspect.signature(original_forward)

    # The head is still called as a module, within the forward of the model, so that a sharded head
    # is gathered once and not for each chunk: by `fully_shard` with the unit that it is in, under
    # ZeRO-3 by the hooks of the head itself.
    def head_forward(self: Any, hidden: torch.Tensor, loss_for: Any = None) -> torch.Tensor:
        if loss_for is None:
            return project(self, hidden)
        targets, items = loss_for
        if is_spread(self.weight):
            raise RuntimeError("the head is still sharded in its own forward: nothing gathered it")
        return chunked_cross_entropy(
            hidden,
            self.weight,
            targets,
            bias=self.bias,
            items=items,
            chunk_tokens=chunk_tokens,
            logits_of=logits_of,
            of_chunk=of_chunk,
        )

    # By their names: transformers 5.24 renamed the cache.
    kept = {field.name for field in fields(CausalLMOutputWithPast)}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        positions = kwargs.pop(POSITIONS, None)
        inputs = dict(signature.bind_partial(self, *args, **kwargs).arguments)
        inputs |= inputs.pop("kwargs", {})
        del inputs["self"]
        labels, shifted = inputs.get("labels"), inputs.get("shift_labels")
        if labels is None and shifted is None:
            return original_forward(self, *args, **kwargs)
        outputs = self.base_model(
            **{name: value for name, value in inputs.items() if name not in _LOSS_ONLY}
        )
        hidden, targets = _rows(outputs.last_hidden_state, labels, shifted, positions)
        loss = self.get_output_embeddings()(
            hidden, loss_for=(targets, inputs.get("num_items_in_batch"))
        )
        return CausalLMOutputWithPast(
            loss=loss, **{name: outputs[name] for name in kept & {*outputs}}
        )

    # The Trainer reads the model's data columns and arguments from the signature.
    forward.__signature__ = signature  # type: ignore[attr-defined]  # of functions, undeclared
    head.forward = MethodType(head_forward, head)
    model.forward = MethodType(forward, model)  # bound: Accelerate looks for its `__func__`


def _rows(
    hidden: torch.Tensor,
    labels: torch.Tensor | None,
    shifted: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states that predict a target, [tokens, hidden size], and the targets.

    If the batch doesn't name their positions, all are taken, because finding them would wait for
    the GPU.
    """
    states = hidden.reshape(-1, hidden.shape[-1])
    if shifted is None:
        assert labels is not None
        shifted = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    targets = shifted.reshape(-1).to(hidden.device)
    if positions is None:
        return states, targets
    return states.index_select(0, positions), targets.index_select(0, positions)


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    items: torch.Tensor | int | None = None,
    chunk_tokens: int,
    logits_of: LogitsOf | None = None,
    of_chunk: OfChunk | None = None,
) -> torch.Tensor:
    """Return the cross-entropy of `hidden @ weight.T + bias`, a scalar in fp32.

    Args:
        hidden: [tokens, hidden size].
        weight: [vocabulary, hidden size], whole: gathered by now if it is sharded.
        targets: [tokens]; `IGNORED` targets don't count.
        bias: [vocabulary].
        items: Divides the sum of the losses; None divides by the targets that count.
        chunk_tokens: Tokens whose logits are held at once.
        logits_of: Turns the product into logits; None: the product is the logits.
        of_chunk: Returns the loss of a chunk and the gradient of its product; None: torch's
            operations one by one, in the memory of the fp32 logits.
    """
    device = hidden.device.type
    computed_in = (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    )
    with torch.autocast(device, enabled=False):
        total = _SummedLoss.apply(
            *(hidden, weight, bias, targets),
            *(chunk_tokens, logits_of or LogitsOf(), computed_in, torch.is_grad_enabled()),
            of_chunk or _of_chunk,
        )
    if items is None:
        items = (targets != IGNORED).sum()
    elif isinstance(items, torch.Tensor):
        items = items.to(total.device)
    return total / items


class _SummedLoss(torch.autograd.Function):
    """The sum of the tokens' losses.

    Gradients are kept undivided, in fp32 where chunks add up, until backward brings the factor.
    With fp16, small gradients that loss scaling protects are thus not lost before it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        chunk_tokens: int,
        logits_of: LogitsOf,
        computed_in: torch.dtype,
        differentiates: bool,
        of_chunk: OfChunk,
    ) -> torch.Tensor:
        # Autograd is off within `forward`, so its earlier state has to be passed in.
        wanted = [differentiates and needed for needed in ctx.needs_input_grad[:3]]
        for_hidden = torch.empty_like(hidden) if wanted[0] else None
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        for_bias = (
            torch.zeros_like(bias, dtype=torch.float32) if wanted[2] and bias is not None else None
        )
        matrix = weight.to(computed_in)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for begin in range(0, len(hidden), chunk_tokens):
            chunk = slice(begin, begin + chunk_tokens)
            states = hidden[chunk].to(computed_in)
            product = states @ matrix.t()
            if bias is not None:
                product += bias.to(computed_in)
            loss, gradient = of_chunk(product, targets[chunk], logits_of, any(wanted))
            del product  # or this chunk's would be alive beside the next one's
            total += loss
            if gradient is None:
                continue
            gradient = gradient.to(computed_in)
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
        # In place, to hold no second tensor of this size; autograd refuses a second backward. In
        # fp32, for fp16 can't hold the factor of loss scaling.
        gradients = [
            None if saved is None else saved.float().mul_(gradient).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *gradients, None, None, None, None, None, None


def _of_chunk(
    product: torch.Tensor, targets: torch.Tensor, logits_of: LogitsOf, differentiates: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the summed loss of some tokens, and its gradient for their product, in fp32."""
    counted = targets != IGNORED
    indices = targets.clamp(min=0).unsqueeze(1)  # IGNORED is no index in the vocabulary
    logits = logits_of(product)
    norms = logits.logsumexp(1)
    losses = norms - logits.gather(1, indices).squeeze(1)
    loss = losses.masked_fill(~counted, 0).sum()
    if not differentiates:
        return loss, None
    # The gradient is made in the memory of the logits, and tanh's own needs them once more.
    capped = logits.clone() if logits_of.softcap is not None else None
    gradient = logits.sub_(norms.unsqueeze(1)).exp_()
    gradient.scatter_add_(1, indices, torch.full_like(indices, -1, dtype=gradient.dtype))
    gradient.masked_fill_(~counted.unsqueeze(1), 0)
    return loss, logits_of.backward_(gradient, capped)


def compiled_chunk(backend: str) -> OfChunk:
    """Return `_of_chunk` as one compiled function, for chunks of any number of tokens."""
    compiled = torch.compile(_of_chunk_without_memory, backend=backend)

    def of_chunk(
        product: torch.Tensor, targets: torch.Tensor, logits_of: LogitsOf, differentiates: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        for tensor in (product, targets):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(product, targets, logits_of.scale, logits_of.softcap, differentiates)

    return of_chunk


def _of_chunk_without_memory(
    product: torch.Tensor,
    targets: torch.Tensor,
    scale: float,
    softcap: float | None,
    differentiates: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what `_of_chunk` does, by operations that the compiler fuses: none is in place.

    The gradient has the product's dtype: no fp32 tensor of its size is ever written.
    """
    logits = product.float()
    if scale != 1.0:
        logits = logits * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    counted = targets != IGNORED
    norms = logits.logsumexp(1)
    indices = targets.clamp(min=0).unsqueeze(1)
    losses = norms - logits.gather(1, indices).squeeze(1)
    loss = torch.where(counted, losses, 0).sum()
    if not differentiates:
        return loss, None
    is_target = torch.arange(logits.shape[1], device=logits.device).unsqueeze(0) == indices
    gradient = (logits - norms.unsqueeze(1)).exp() - is_target.float()
    gradient = torch.where(counted.unsqueeze(1), gradient, 0)
    if softcap is not None:
        gradient = gradient * (1 - (logits / softcap).square())
    if scale != 1.0:
        gradient = gradient * scale
    return loss, gradient.to(product.dtype)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a matrix product to an fp32 total.

    A product that is rounded to 16 bits before it is added would be off once for each chunk.
    """
    # `out_dtype` is there for products on CUDA only (torch 2.13).
    if total.is_cuda and left.itemsize == 2:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
