"""Requests to split a model or its rows: what has to be refused before a rank starts.

A pipeline cuts the layers into stages. Where ranks share rows, attention is all that has to see
more than a piece of a row, and the library replaces it where the model calls it by name. A model
that computes it elsewhere, or needs a mask of its own, would train on other attention without an
error, so its model on the meta device is asked first.

The checks pass for a strategy that splits nothing. They raise UnfitModelError for a model that
can't be split, and UsageError where flags ask for what does not go with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from toolkit.backends import backend_of
from toolkit.backends.schedules import bubble, refused_micro_batches, schedule_of
from toolkit.backends.stages import costs_of, cut
from toolkit.configs.accelerate import num_processes_problem
from toolkit.errors import UnfitModelError, UsageError
from toolkit.planning.models.resolve import shape_of_config
from toolkit.strategies import Strategy
from toolkit.training.arguments import OwnArguments, RunArguments
from toolkit.training.methods import meta_model

if TYPE_CHECKING:
    from toolkit.engines.pipeline import PipelineRequest


def with_schedule(strategy: Strategy, run: RunArguments) -> Strategy:
    """Return a strategy with the schedule that was requested; others as they are."""
    if run.pipeline_schedule is None or not backend_of(strategy).takes_schedule:
        return strategy
    return replace(strategy, schedule=run.pipeline_schedule)


def pipeline_request(strategy: Strategy, own: OwnArguments) -> PipelineRequest | None:
    """Return how a rank's model is to be cut into stages; None if it stays whole."""
    if not backend_of(strategy).in_stages:
        return None
    from toolkit.engines.pipeline import PipelineRequest

    return PipelineRequest(
        strategy=strategy, balance=own.run.pipeline_balance, sequence=own.data.length
    )


def check_pipeline(
    strategy: Strategy,
    own: OwnArguments,
    values: Mapping[str, Any],
    *,
    folder: str | Path,
    num_processes: int | None,
) -> None:
    """Check that the model in a folder can be trained by a strategy's pipeline.

    `num_processes` is the number of ranks; None: not known.
    """
    if not backend_of(strategy).in_stages:
        return
    name, strategy = strategy.name, with_schedule(strategy, own.run)
    if strategy.tensor > 1 and strategy.schedule == "zero_bubble":
        raise UsageError(
            f"{name} does not work with --pipeline_schedule zero_bubble, which takes the gradients "
            "of weights apart from those of inputs, past the hooks of a tensor group. Choose "
            "1f1b, gpipe or interleaved."
        )
    # Each of them needs the whole model, or one norm or scale that all ranks agree on.
    refused = {
        f"--method {own.method.method}": not own.method.is_full,
        "--fp16": bool(values.get("fp16")),
        "--torch_compile": bool(values.get("torch_compile")),
        "--compile_blocks": own.speed.compile_blocks,
    }
    if flags := [flag for flag, passed in refused.items() if passed]:
        raise UsageError(
            f"{name} does not work with {' and '.join(flags)}. Leave that out, or use "
            "--strategy fsdp."
        )
    if num_processes is not None and (problem := num_processes_problem(strategy, num_processes)):
        raise UsageError(problem)
    schedule = schedule_of(strategy)
    ranks = None if num_processes is None else strategy.pipeline_ranks(num_processes)
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    try:
        model = shape_of_config(config, name=str(folder))
        if ranks is None:
            return
        costs = costs_of(model, own.run.pipeline_balance, sequence=own.data.length)
        cut(costs, schedule.stages(ranks), name=str(folder))
    except UsageError as error:
        raise UnfitModelError(f"{name} can't cut the model: {error}") from error
    micro_batches = int(values["gradient_accumulation_steps"])
    if reason := refused_micro_batches(schedule, ranks=ranks, micro_batches=micro_batches):
        raise UsageError(f"{name}: {reason}. Set --gradient_accumulation_steps.")


def bubble_note(
    strategy: Strategy, own: OwnArguments, values: Mapping[str, Any], num_processes: int | None
) -> str | None:
    """Return a warning of a pipeline that is never full; None without one."""
    if num_processes is None or not backend_of(strategy).takes_schedule:
        return None
    schedule = schedule_of(with_schedule(strategy, own.run))
    micro_batches = int(values["gradient_accumulation_steps"])
    ranks = strategy.pipeline_ranks(num_processes)
    stages = schedule.stages(ranks)
    if micro_batches >= stages:
        return None
    share = bubble(schedule, ranks=ranks, micro_batches=micro_batches)
    return (
        f"{strategy.name} has {micro_batches} micro-batches in a step for {stages} stages, so that "
        f"the ranks idle {share:.0%} of the time: raise --gradient_accumulation_steps to "
        f"{stages} or more"
    )


PROBE: Final = "toolkit_probe"
"""Name of an attention that only takes notes."""

WITHOUT_MASKS: Final = ("sdpa", "flash_attention_2", "flash_attention_3")
"""Implementations of attention that see no later token where they get no mask."""


def check_rows(
    strategy: Strategy,
    own: OwnArguments,
    values: Mapping[str, Any],
    *,
    folder: str | Path,
    num_processes: int | None,
) -> None:
    """Check that ranks can share the rows of a model in a folder; see `check_pipeline`."""
    backend = backend_of(strategy)
    if not backend.splits_rows:
        return
    name, attention = strategy.name, own.model.attn_implementation
    # torch's ring takes the place of its own SDPA, and leaves each rank all heads.
    in_ring = backend.shards_rows
    takes = ("sdpa",) if in_ring else WITHOUT_MASKS
    refused = {
        "--packing best_fit, since nothing would keep the texts of a row apart": own.data.packing
        == "best_fit",
        "--method qlora": own.method.method == "qlora",
        "--fsdp_prefetch": bool(own.speed.fsdp_prefetch),
        "--lean_masks, since it needs no masks at all": bool(own.speed.lean_masks),
        "--compile_blocks": own.speed.compile_blocks,
        "--use_liger_kernel, whose loss is not proven for pieces of rows": bool(
            values.get("use_liger_kernel")
        ),
        "--evidence, which reads whole rows": own.run.evidence is not None,
        f"--attn_implementation {attention}, where {' or '.join(takes)} is due": attention
        not in (None, *takes),
    }
    if flags := [flag for flag, passed in refused.items() if passed]:
        raise UsageError(
            f"{name} splits rows over ranks, and does not go with {'; '.join(flags)}. Leave that "
            "out, or use another strategy."
        )
    model = meta_model(folder, trust_remote_code=own.model.trust_remote_code)
    size = None if num_processes is None else strategy.sequence_size(num_processes)
    problem = model_problem(
        model,
        size=None if in_ring else size,
        length=own.data.length,
        attention=attention,
        takes=takes,
    )
    if problem is None and in_ring:
        problem = _ring_problem(model, drops=own.run.dropout != "off")
    if problem is not None:
        raise UnfitModelError(
            f"{name} can't split the rows of the model in {folder}: {problem}. Use zero3 or fsdp, "
            "with shorter rows where these are too long for one GPU."
        )


def model_problem(
    model: Any,
    *,
    size: int | None,
    length: int,
    attention: str | None = None,
    takes: Sequence[str] = WITHOUT_MASKS,
) -> str | None:
    """Say why ranks can't share the rows of a model; None where they can.

    Args:
        model: A causal LM on the meta device.
        size: Ranks that share the heads of a row; None: not known, or none do.
        length: Tokens of the longest row.
        attention: Its implementation; None: the model's own choice.
        takes: The implementations that can do without a mask.
    """
    config = model.config.get_text_config(decoder=True)
    implementation = attention or config._attn_implementation
    if implementation not in takes:
        return f"its attention is {implementation}, which needs a mask of whole rows"
    counts = {
        "attention heads": getattr(config, "num_attention_heads", None),
        "key-value heads": getattr(config, "num_key_value_heads", None),
    }
    for noun, count in counts.items():
        if size is not None and isinstance(count, int) and count % size:
            return f"its {count} {noun} don't divide by the {size} ranks that share a row"
    # DeepSpeed 0.19 reads both from the config (`register_with_transformers`).
    unnamed = [name for name in ("num_key_value_heads", "head_dim") if _is_unnamed(config, name)]
    if size is not None and unnamed:
        return f"its config.json does not tell {unnamed[0]}, by which DeepSpeed swaps heads"
    if getattr(config, "output_router_logits", False):
        return "the loss of its routers (output_router_logits) is one over whole rows"
    kinds = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if kinds:
        return f"{' and '.join(sorted(kinds))} of its layers would see a piece of a row alone"
    notes = _probed(model)
    if notes is None:
        return "its forward fails on the meta device, where its attention is looked at"
    if len(notes.layers) < config.num_hidden_layers:
        return "not every layer calls its attention where the library replaces it"
    if not notes.has_positions:
        return "its attention is not told the positions of its tokens"
    windows = [window for window in notes.windows if window < length]
    # flash_attention_2 and 3 keep to the window by themselves, on whole rows.
    if windows and implementation == "sdpa":
        return (
            f"its attention slides over {min(windows):,} tokens, and would see all {length:,} "
            "without a mask (huggingface/accelerate#4177)"
        )
    return None


def _is_unnamed(config: Any, name: str) -> bool:
    """Whether DeepSpeed would read no number there; it computes a size of heads that is absent."""
    return getattr(config, name, 0 if name == "head_dim" else None) is None


def _ring_problem(model: Any, *, drops: bool = True) -> str | None:
    """Say why the attention of a model does not go around torch's ring.

    Accelerate has to find its mask, to leave it out; and dropout, which `drops` says is on, would
    be drawn anew in backward (torch 2.15, `_templated_ring_attention_backward`).
    """
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ()
    if set(kinds) - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
        return "its attention has a window (sliding_window), with which Accelerate refuses a ring"
    named = sum(name.endswith("self_attn") for name, _ in model.named_modules())
    if named < config.num_hidden_layers:
        return "its layers do not call their attention self_attn, by which Accelerate finds it"
    notes = _probed(model.train())
    if drops and notes is not None and notes.dropout:
        return (
            f"its attention has a dropout of {notes.dropout:g}, which a ring draws anew in "
            "backward. Pass --dropout off"
        )
    return None


@dataclass(slots=True)
class _Notes:
    """What the layers of a model hand to their attention."""

    layers: set[int] = field(default_factory=set[int])
    windows: list[int] = field(default_factory=list[int])
    has_positions: bool = True
    dropout: float = 0.0


def _probed(model: Any) -> _Notes | None:
    """Run a model on the meta device, with an attention that takes notes; None where it fails."""
    from transformers import AttentionInterface

    notes = _Notes()

    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, *_: Any, **told: Any
    ) -> tuple[Any, None]:
        notes.layers.add(id(module))
        notes.has_positions &= told.get("position_ids") is not None
        notes.dropout = max(notes.dropout, told.get("dropout") or 0.0)
        window = told.get("sliding_window")
        if isinstance(window, int):
            notes.windows.append(window)
        return query.transpose(1, 2).contiguous(), None

    AttentionInterface.register(PROBE, attention)
    ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
    positions = torch.arange(4, device="meta").expand_as(ids)
    text = model.config.get_text_config(decoder=True)
    before = text._attn_implementation
    try:
        text._attn_implementation = PROBE
        with torch.no_grad():
            model(input_ids=ids, position_ids=positions, use_cache=False)
    except Exception:  # a model's own code, of any kind
        return None
    finally:
        text._attn_implementation = before
    return notes
