"""The flags for faster or smaller training at an equal loss, one by one or all at once."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from toolkit.backends import backend_of
from toolkit.configs.proven_models import PROVEN_MODELS
from toolkit.data.flags import flag, plain_value
from toolkit.errors import UsageError
from toolkit.planning.levers import CHUNK_TOKENS
from toolkit.strategies import Strategy
from toolkit.training.precision import switched

ADAMW = ("adamw_torch", "adamw_torch_fused")

COMPILED_CHUNK_TOKENS = 4096
"""Of a compiled loss: the head's gradient is read and written once a chunk."""

LAYERS = r"none|all|selective|every:[1-9]\d*|[1-9]\d*"
"""The values of `--checkpoint_layers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedArguments:
    """The switches; without its own flag, a switch follows `--tuned`."""

    tuned: bool = flag(
        False,
        "The fastest training at an equal loss that this GPU, model and strategy allow: chunked "
        "loss, lean masks, gradients in DDP's buckets, FSDP2's prefetch, torch's fused AdamW but "
        "under DeepSpeed and in fp16, bf16 weights with fp32 masters, compiled layers where the "
        "run is long enough to pay for them, the largest micro-batch that fits, and a log of every "
        "tenth step, for each waits for the GPU. A flag for one of them wins.",
    )
    loss_impl: Literal["full", "chunked"] | None = flag(
        None,
        "chunked: cross-entropy straight from the hidden states, some tokens at a "
        "time and only those to be learned; never the logits of a whole batch.",
    )
    loss_chunk_tokens: int | None = flag(
        None,
        f"Tokens whose logits a chunked loss holds at once; none: {CHUNK_TOKENS}, and with "
        f"--compile_blocks, which never holds them in fp32, {COMPILED_CHUNK_TOKENS}.",
    )
    lean_masks: bool | None = flag(
        None,
        "No mask for padding on the right, which no token sees, and that of packed "
        "rows made without waiting for the GPU.",
    )
    ddp_bucket_view: bool | None = flag(
        None,
        "DDP: gradients are views of its buckets, so they are held once: 4 bytes a parameter "
        "less. While micro-batches accumulate without --sync_each_batch they lie beside them.",
    )
    fsdp_prefetch: int | None = flag(
        None, "FSDP2: layers that are gathered ahead of the one that computes."
    )
    sync_each_batch: bool = flag(
        False,
        "FSDP2 and ddp: reduce gradients in every micro-batch, not once a step. Under FSDP2 no "
        "rank then holds whole gradients between them; the traffic grows with their number.",
    )
    auto_batch: bool | None = flag(
        None,
        "On a GPU, the largest micro-batch that the planner calls safe there, with as many fewer "
        "of them in a step: the rows of a step stay the same.",
    )
    bf16_weights: bool | None = flag(
        None,
        "One process and ddp in bf16: bf16 weights, and fp32 masters of them in the optimizer.",
    )
    optimizer_state_dtype: Literal["float32", "bfloat16"] = flag(
        "float32", "With --bf16_weights: the dtype of AdamW's two moments."
    )
    compile_blocks: bool | None = flag(
        None, "torch.compile for each layer of the model by itself, and for a chunked loss."
    )
    compile_backend: str = flag(
        "inductor",
        "What torch.compile makes of a layer; aot_eager traces it and compiles "
        "nothing, for a rehearsal.",
    )
    checkpoint_layers: str = flag(
        "none",
        "Activation checkpointing: none, all, every:N (each N-th layer), N (the first "
        "N), or selective (all, and the results of matrix products are kept).",
    )

    def __post_init__(self) -> None:
        if self.loss_chunk_tokens is not None and self.loss_chunk_tokens < 1:
            raise UsageError(f"--loss_chunk_tokens {self.loss_chunk_tokens}: use 1 or more.")
        if self.fsdp_prefetch is not None and self.fsdp_prefetch < 0:
            raise UsageError(f"--fsdp_prefetch {self.fsdp_prefetch}: use 0 or more.")
        if not re.fullmatch(LAYERS, self.checkpoint_layers):
            raise UsageError(
                f"--checkpoint_layers {self.checkpoint_layers}: use none, all, every:2, a number "
                "of layers, or selective."
            )

    @property
    def chunked_loss(self) -> bool:
        return self.tuned if self.loss_impl is None else self.loss_impl == "chunked"

    @property
    def chunk_tokens(self) -> int:
        if self.loss_chunk_tokens is not None:
            return self.loss_chunk_tokens
        return COMPILED_CHUNK_TOKENS if self.compile_blocks else CHUNK_TOKENS

    @property
    def uses_bf16_weights(self) -> bool:
        return self.tuned if self.bf16_weights is None else self.bf16_weights

    def moments_under(self, values: Mapping[str, Any], strategy: Strategy) -> str | None:
        """Return the dtype of AdamW's moments beside fp32 masters; None without masters."""
        if not self.uses_bf16_weights or no_bf16_weights(values, strategy):
            return None
        return self.optimizer_state_dtype

    @property
    def uses_auto_batch(self) -> bool:
        return self.tuned if self.auto_batch is None else self.auto_batch

    @property
    def uses_lean_masks(self) -> bool:
        return self.tuned if self.lean_masks is None else self.lean_masks

    @property
    def gradients_in_buckets(self) -> bool:
        return self.tuned if self.ddp_bucket_view is None else self.ddp_bucket_view

    @property
    def prefetched_layers(self) -> int:
        return int(self.tuned) if self.fsdp_prefetch is None else self.fsdp_prefetch

    def under(self, strategy: Strategy) -> SpeedArguments:
        """Return the switches that have a place under a strategy: split rows have no masks."""
        return replace(self, lean_masks=False) if backend_of(strategy).splits_rows else self

    def with_flags(self, rest: Sequence[str], strategy: Strategy) -> list[str]:
        """Return the flags for `TrainingArguments`, with the tuned ones added.

        Args:
            rest: The passed flags for `TrainingArguments`, with the precision of the run.
            strategy: The strategy of the launcher's config.
        """
        ours = {"logging_steps": "10"}
        # DeepSpeed has its own optimizers. In fp16, torch's GradScaler (2.13) lets a fused
        # optimizer itself skip the step after an overflow. Accelerate doesn't notice, so the
        # learning rate would advance, while with other optimizers it waits.
        if not backend_of(strategy).reads_json and not switched(rest, "fp16"):
            ours["optim"] = "adamw_torch_fused"
        passed = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in rest}
        wanted = ours.keys() - passed if self.tuned else set[str]()
        return [*rest, *(f"--{name}={ours[name]}" for name in sorted(wanted))]


def check_speed(
    arguments: SpeedArguments,
    values: Mapping[str, Any],
    *,
    strategy: Strategy,
    evidence: bool = False,
    on_gpu: bool = True,
    config_checkpoints: bool = False,
) -> None:
    """Refuse switches that don't go together with other requests, all of them at once.

    Args:
        values: Values of `TrainingArguments`.
        evidence: Whether the run keeps the evidence of a step.
        on_gpu: Whether the run is on GPUs, not a rehearsal.
        config_checkpoints: Whether the launcher's FSDP section asks for activation checkpointing.

    Raises:
        UsageError: names all the conflicts.
    """
    uses_liger = bool(values.get("use_liger_kernel"))
    layers, by_flag = arguments.checkpoint_layers != "none", checkpoints_by_flag(values)
    compiles = bool(arguments.compile_blocks)
    # `single`, the control of every comparison, accepts both flags without effect.
    several, backend = strategy.is_distributed, backend_of(strategy)
    messages = no_chunked_loss(values) if arguments.loss_impl == "chunked" else []
    if uses_liger and not on_gpu:
        messages.append("--use_liger_kernel needs a GPU; --loss_impl chunked runs everywhere")
    if uses_liger and on_gpu and find_spec("liger_kernel") is None:
        messages.append("--use_liger_kernel needs liger-kernel: pip install liger-kernel")
    if layers and by_flag:
        messages.append(
            "--checkpoint_layers and --activation_checkpointing both choose layers: pass one"
        )
    if config_checkpoints and (layers or by_flag):
        messages.append(
            "fsdp_activation_checkpointing: true of the Accelerate config and a flag would both "
            "checkpoint the layers: leave one of them out"
        )
    messages += no_compiled_layers(values, strategy, evidence=evidence) if compiles else []
    if backend.splits_matrices:
        by_hand = {
            "--loss_impl chunked": arguments.loss_impl == "chunked",
            "--use_liger_kernel": uses_liger,
            "--compile_blocks": compiles,
            "--fsdp_prefetch": bool(arguments.fsdp_prefetch),
        }
        messages += [
            f"{flag} computes with whole matrices, and {strategy.name} splits them: leave it out"
            for flag, passed in by_hand.items()
            if passed
        ]
    if arguments.bf16_weights:
        messages += no_bf16_weights(values, strategy)
    elif arguments.optimizer_state_dtype != "float32" and not arguments.uses_bf16_weights:
        messages.append("--optimizer_state_dtype is for the optimizer of --bf16_weights: pass both")
    if arguments.ddp_bucket_view and several and not backend.has_buckets:
        messages.append(f"--ddp_bucket_view is for ddp, and this is {strategy.name}")
    if arguments.fsdp_prefetch and several and not backend.shards_rows:
        messages.append(f"--fsdp_prefetch is for FSDP2, and this is {strategy.name}")
    if arguments.sync_each_batch and several and backend.unsynced:
        messages.append(
            f"--sync_each_batch is for FSDP2 and ddp, and this is {strategy.name}, whose "
            f"{backend.unsynced}"
        )
    if arguments.sync_each_batch and values.get("gradient_accumulation_steps") == 1:
        messages.append(
            "--sync_each_batch changes nothing with one micro-batch a step "
            "(--gradient_accumulation_steps 1)"
        )
    if messages:
        raise UsageError(f"{'; '.join(messages)}.")


def no_compiled_layers(
    values: Mapping[str, Any], strategy: Strategy, *, evidence: bool = False
) -> list[str]:
    """Return what excludes compiled layers, as sentences."""
    messages: list[str] = []
    if values.get("torch_compile"):
        messages.append("--compile_blocks and --torch_compile both compile the layers: pass one")
    if evidence:
        messages.append("--evidence looks into the layers, which --compile_blocks compiles away")
    if not backend_of(strategy).compiles:
        messages.append(
            "--compile_blocks gains nothing under ZeRO-3: DeepSpeed's hooks in every module of a "
            "layer are compiled anew for each until torch gives up (recompile_limit), and runs the "
            "layers as they are"
        )
    return messages


def no_bf16_weights(values: Mapping[str, Any], strategy: Strategy) -> list[str]:
    """Return what excludes bf16 weights with fp32 masters, as sentences."""
    messages: list[str] = []
    if not backend_of(strategy).takes_bf16_weights:
        messages.append(
            f"--bf16_weights is for one process and ddp, and this is {strategy.name}, which keeps "
            "the weights in its own way"
        )
    if not values.get("bf16"):
        messages.append("--bf16_weights computes in bf16: pass --bf16 true")
    if (optimizer := plain_value(values.get("optim"))) not in ADAMW:
        messages.append(f"--bf16_weights has an AdamW of its own, and --optim is {optimizer}")
    return messages


def no_chunked_loss(values: Mapping[str, Any]) -> list[str]:
    """Return the flags of `TrainingArguments` that exclude the chunked loss, as sentences."""
    conflicts = {
        "use_liger_kernel": "and --use_liger_kernel both replace the loss: pass one",
        "label_smoothing_factor": "leaves no logits for --label_smoothing_factor to smooth",
    }
    return [f"--loss_impl chunked {why}" for name, why in conflicts.items() if values.get(name)]


def checkpoints_by_flag(values: Mapping[str, Any]) -> bool:
    """Whether `TrainingArguments` checkpoint every layer."""
    # transformers 5.23 renamed `gradient_checkpointing`, and keeps the old name as an alias.
    return bool(values.get("activation_checkpointing") or values.get("gradient_checkpointing"))


def check_model(arguments: SpeedArguments, folder: str | Path) -> None:
    """Check by its config.json that the model in `folder` takes the switches of explicit flags.

    Raises:
        UsageError: a switch is not proven for the model or for its routers' loss, or the model has
            fewer layers than chosen.
    """
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    name = next(iter(config.get("architectures") or []), "a model without a named architecture")
    switches = {
        "--loss_impl chunked": arguments.loss_impl == "chunked",
        "--lean_masks": arguments.lean_masks,
    }
    passed = " and ".join(switch for switch, is_passed in switches.items() if is_passed)
    if passed and name not in PROVEN_MODELS:
        raise UsageError(f"{passed}: not proven for {name}. Leave it out; --tuned takes what is.")
    text = config.get("text_config", config)
    if passed and text.get("output_router_logits"):
        raise UsageError(
            f"{passed}: not with the routers' loss that output_router_logits asks of "
            f"{name}. Leave it out, or turn that off in the model's config.json."
        )
    layers = text.get("num_hidden_layers", text.get("n_layer"))
    chosen = arguments.checkpoint_layers.removeprefix("every:")
    if layers is not None and chosen.isdigit() and int(chosen) > layers:
        raise UsageError(
            f"--checkpoint_layers {arguments.checkpoint_layers}: the model has only {layers} "
            "layers."
        )
