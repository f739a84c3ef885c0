"""The chunked loss in a model of transformers: its head gives the loss, and never all logits.

The head is still called as a module, within the forward of the model. So whatever gathers a sharded
head for a module's forward and backward does it as often as it did, not once for each chunk:
`fully_shard` with the unit that the head is in, ZeRO-3 with the hooks of the head itself.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from toolkit.data.packing import PROVEN_MODELS
from toolkit.data.tokens import IGNORED
from toolkit.errors import UsageError
from toolkit.training.speed.chunked_loss import LogitsOf, chunked_cross_entropy
from toolkit.training.speed.lean_batches import POSITIONS

PROVEN_HEADS = frozenset(PROVEN_MODELS)
"""Architectures for which a test shows equal losses and gradients, full and chunked.

What comes between the hidden states and the loss is a model's own (transformers 5.23), and one that
is not looked at would be left out in silence.
"""

_LOSS_ONLY = {"labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "return_dict"}
"""What the forward of a causal LM keeps from its decoder."""


def logits_of(model: PreTrainedModel) -> LogitsOf:
    """Return what the family does to the product of hidden states and head.

    Raises:
        UsageError: that is not known of the model.
    """
    name, config = type(model).__name__, model.config
    if name not in PROVEN_HEADS or not type(model).__module__.startswith("transformers."):
        raise UsageError(
            f"--loss_impl chunked is not proven for {name}: what it does between its hidden states "
            "and its loss might be left out. Pass --loss_impl full."
        )
    if getattr(config, "output_router_logits", False):
        raise UsageError(
            f"--loss_impl chunked does not add the routers' loss that output_router_logits asks "
            f"of {name}. Pass --loss_impl full, or turn that off in the model's config.json."
        )
    if name in ("CohereForCausalLM", "Cohere2ForCausalLM"):
        return LogitsOf(scale=float(config.logit_scale))
    if name in ("GraniteForCausalLM", "GraniteMoeForCausalLM"):
        return LogitsOf(scale=1 / float(config.logits_scaling))
    return LogitsOf(softcap=getattr(config, "final_logit_softcapping", None))


def check_head(model: PreTrainedModel) -> LogitsOf:
    """Check that the model's loss can be taken from its hidden states; return what it does first.

    Raises:
        UsageError: the model is none that this is proven for, or its head is no plain matrix.
    """
    transformed, head = logits_of(model), model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        raise UsageError(
            f"--loss_impl chunked needs a plain linear head, and that of {type(model).__name__} is "
            f"a {type(head).__name__}. Pass --loss_impl full."
        )
    return transformed


def use_chunked_loss(model: PreTrainedModel, *, chunk_tokens: int) -> None:
    """Have the model return the chunked loss, and no logits, wherever it is given labels.

    Without labels it goes on as it was.

    Raises:
        UsageError: the model is none that this is proven for.
    """
    transformed, head = check_head(model), model.get_output_embeddings()
    # Functions, not what is bound to this model: a copy of it has to compute with its own weights.
    whole, project = type(model).forward, type(head).forward
    signature = inspect.signature(whole)

    def head_forward(self: Any, hidden: torch.Tensor, loss_for: Any = None) -> torch.Tensor:
        if loss_for is None:
            return project(self, hidden)
        targets, items = loss_for
        if isinstance(self.weight, DTensor):
            raise RuntimeError("the head is still sharded in its own forward: nothing gathered it")
        return chunked_cross_entropy(
            hidden,
            self.weight,
            targets,
            bias=self.bias,
            items=items,
            chunk_tokens=chunk_tokens,
            logits_of=transformed,
        )

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        positions = kwargs.pop(POSITIONS, None)
        given = dict(signature.bind_partial(self, *args, **kwargs).arguments)
        given |= given.pop("kwargs", {})
        del given["self"]
        labels, shifted = given.get("labels"), given.get("shift_labels")
        if labels is None and shifted is None:
            return whole(self, *args, **kwargs)
        outputs = self.base_model(
            **{name: value for name, value in given.items() if name not in _LOSS_ONLY}
        )
        hidden, targets = _rows(outputs.last_hidden_state, labels, shifted, positions)
        loss = self.get_output_embeddings()(
            hidden, loss_for=(targets, given.get("num_items_in_batch"))
        )
        return CausalLMOutputWithPast(
            loss=loss, logits=None, past_key_values=getattr(outputs, "past_key_values", None)
        )

    forward.__signature__ = signature  # type: ignore[attr-defined]
    head.forward = MethodType(head_forward, head)
    model.forward = MethodType(forward, model)  # bound: Accelerate looks for its `__func__`


def _rows(
    hidden: torch.Tensor,
    labels: torch.Tensor | None,
    shifted: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states that predict something, [tokens, hidden size], and what.

    Where the batch doesn't say which those are, all are taken: to ask would wait for the GPU.
    """
    states = hidden.reshape(-1, hidden.shape[-1])
    if shifted is None:
        assert labels is not None
        shifted = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    targets = shifted.reshape(-1).to(hidden.device)
    if positions is None:
        return states, targets
    return states.index_select(0, positions), targets.index_select(0, positions)
