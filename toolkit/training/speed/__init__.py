"""Speed: switches that make a recipe faster, or smaller, at an equal loss.

`Speed` switches them on, in the order in which they go together, and records which took hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations.liger import apply_liger_kernel
from transformers.trainer_utils import unwrap_peft_model

from toolkit.engines.backend import backend_of
from toolkit.engines.masters import cast_to_bf16
from toolkit.engines.wrapped import Wrapped
from toolkit.errors import UsageError
from toolkit.measuring.clock import Compilation
from toolkit.strategies import STRATEGIES, Strategy
from toolkit.training.observers import Observer
from toolkit.training.speed.chunked_loss import checked_head, use_chunked_loss
from toolkit.training.speed.layers import (
    as_the_trainer_does,
    checkpoint_layers,
    checkpointable,
    compile_blocks,
)
from toolkit.training.speed.lean_batches import (
    Collate,
    LeanCollator,
    check_lean_masks,
    spare_the_device,
    takes_masks_as_given,
)
from toolkit.training.speed_arguments import SpeedArguments, no_bf16_weights, no_chunked_loss

TRAINER_SWITCHES = ("use_liger_kernel", "torch_compile", "ddp_bucket_cap_mb", "ddp_static_graph")
"""Switches of `TrainingArguments`, for both engines but for `torch_compile`."""


UNMASKED = "no mask asked for"
"""Value of the switch `lean_masks` where no layer needs a mask."""


class Speed(Observer):
    """Turns on the requested switches: in the model, in its batches, and in its wrapper.

    The Trainer's arguments for the loss take precedence over `--tuned`.
    """

    def __init__(
        self,
        arguments: SpeedArguments,
        args: TrainingArguments | None = None,
        *,
        strategy: Strategy = STRATEGIES["single"],
        left_out: Mapping[str, str] | None = None,
    ) -> None:
        self.arguments = arguments
        values = {} if args is None else vars(args)
        self._against_chunked_loss = no_chunked_loss(values)
        """Reasons why other flags exclude the chunked loss."""

        self._against_bf16_weights = no_bf16_weights(values, strategy)
        self._compilation: Compilation | None = None

        self.checkpoints_all = False
        """Whether every layer is computed again in backward, from its inputs alone."""

        self.on: dict[str, Any] = {}
        """Every active switch, and its extent."""

        self.left_out = dict(left_out or {})
        """Inactive switches of `--tuned`, each with the reason."""

    def apply(self, model: Any, *, loop: TrainingArguments | None = None) -> None:
        """Turn on the switches of the model, before it is wrapped.

        Args:
            model: As loaded, with its adapters if it has some.
            loop: The Trainer's arguments in the loop, where no Trainer obeys them.

        Raises:
            UsageError: the model can't support a switch that was requested by its own flag.
        """
        arguments, inner = self.arguments, unwrap_peft_model(model)
        if loop is not None and loop.use_liger_kernel:
            apply_liger_kernel(inner, loop.liger_kernel_config)
        if loop is not None:
            as_the_trainer_does(inner, loop)
        if numbers := checkpoint_layers(inner, arguments.checkpoint_layers):
            self.on["checkpoint_layers"] = {"asked": arguments.checkpoint_layers, "layers": numbers}
            every = len(numbers) == len(checkpointable(inner))
            self.checkpoints_all = every and arguments.checkpoint_layers != "selective"
        if arguments.chunked_loss and self._can("loss_impl", self._check_loss, inner):
            use_chunked_loss(
                inner,
                chunk_tokens=arguments.chunk_tokens,
                backend=arguments.compile_backend if arguments.compile_blocks else None,
            )
            self.on["loss_impl"] = "chunked"
            self.on["loss_chunk_tokens"] = arguments.chunk_tokens
        if arguments.uses_lean_masks and self._can("lean_masks", check_lean_masks, inner):
            if unasked := takes_masks_as_given(inner):
                spare_the_device(inner)
            # Windows and eager attention need masks, which transformers makes on request.
            self.on["lean_masks"] = UNMASKED if unasked else "padding is not masked"
        if arguments.uses_bf16_weights and self._can("bf16_weights", self._check_masters, inner):
            moments = getattr(torch, arguments.optimizer_state_dtype)
            cast = cast_to_bf16(inner, state_dtype=moments)
            self.on["bf16_weights"] = {"cast": cast, "moments": arguments.optimizer_state_dtype}
        if (flash := torch.nn.attention.current_flash_attention_impl()) is not None:
            self.on["flash_attention"] = flash
        # Last, because torch.compile traces the layers with all other switches on.
        if arguments.compile_blocks:
            self._compilation = Compilation()
            compiled = compile_blocks(inner, backend=arguments.compile_backend)
            self.on["compile_blocks"] = {"layers": compiled, "backend": arguments.compile_backend}

    def collating(self, collate: Collate) -> Collate:
        """Return the collator of batches for the model as it is now."""
        chunked, lean = "loss_impl" in self.on, "lean_masks" in self.on
        if not chunked and not lean:
            return collate
        return LeanCollator(
            collate=collate,
            names_positions=chunked,
            drops_masks=lean,
            names_borders=self.on.get("lean_masks") == UNMASKED,
        )

    def prepared(self, wrapped: Wrapped) -> None:
        backend = backend_of(wrapped.model)
        if backend.gradients_in_buckets():
            self.on["ddp_bucket_view"] = True
        accumulation = wrapped.accelerator.gradient_state.plugin_kwargs
        if accumulation.get("sync_each_batch") and backend.has_reduced() is not None:
            self.on["sync_each_batch"] = True
        ahead = self.arguments.prefetched_layers
        if ahead and backend.prefetch(ahead=ahead):
            self.on["fsdp_prefetch"] = ahead

    def facts(self, args: TrainingArguments) -> dict[str, Any]:
        """Return the record's `speed`.

        It has every active switch, including the Trainer's own, and the switches that `--tuned`
        left out, with the reason.
        """
        if self._compilation is not None:
            self.on["compile_blocks"] |= self._compilation.facts()
        of_trainer = {name: getattr(args, name) for name in TRAINER_SWITCHES if getattr(args, name)}
        on = self.on | of_trainer
        return {"tuned": self.arguments.tuned, "on": on, "left_out": self.left_out}

    def _check_masters(self, model: PreTrainedModel) -> None:
        reasons = self._against_bf16_weights
        if getattr(model, "peft_config", None):
            reasons = [*reasons, "--bf16_weights is for whole models, and adapters are small"]
        elif not reasons and not any(
            p.requires_grad and p.dtype == torch.float32 for p in model.parameters()
        ):
            reasons = [*reasons, "--bf16_weights keeps masters of fp32 weights, and loads none"]
        if reasons:
            raise UsageError(f"{'; '.join(reasons)}.")

    def _check_loss(self, model: Any) -> None:
        if self._against_chunked_loss:
            raise UsageError(f"{'; '.join(self._against_chunked_loss)}.")
        checked_head(model)

    def _can(self, switch: str, check: Callable[[PreTrainedModel], object], model: Any) -> bool:
        """Whether the model passes the check of a switch.

        Raises:
            UsageError: it does not, and the switch was requested by its own flag.
        """
        try:
            check(model)
        except UsageError as error:
            if getattr(self.arguments, switch) is not None:
                raise
            self.left_out[switch] = str(error)
            return False
        return True
