"""Whether each family that transformers has a plan for trains as one process trains it, when split.

A small model of each family takes one step of three micro-batches with ragged rows on four ranks,
under the strategies that split layers or matrices. Its loss, every gradient and the norm that clips
are compared with those of one process. Ranks are forked from a process that has imported all, and
train several families each; where one fails in a rank or does not answer, the rest get new ranks.
No network and no GPU are needed.

    python benchmarks/split_families.py [FAMILY ...]
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from toolkit.engines import pipeline
from toolkit.engines.backend import backend_of, wrap
from toolkit.engines.tensor_parallel import SOUND_SHARDS, claim_mesh
from toolkit.errors import UsageError
from toolkit.measuring.attestation import gather_objects
from toolkit.measuring.gradients import clipping_mismatches, gather_full
from toolkit.strategies import STRATEGIES, Strategy
from toolkit.training.model_checks import check_split

RANKS, ROWS = 4, 4
NAMES = ("tensor", "tensor_ddp", "three_d", "pipeline")
LENGTHS = (9, 5, 12)
"""Tokens of the longest row of each micro-batch."""

LIMIT = 1e-3
"""Norm to clip to, below that of every model here."""

GAPS = {"loss": 1e-5, "norm": 1e-4, "gradient": 1e-3}
"""Gaps to one process that are rounding, relative to the value of one process."""

TOGETHER = 8
"""Families that the same ranks train."""

SECONDS = 300
"""Time for one family: some compute layers that keep a state token by token on a CPU."""

LARGEST = 10_000_000
"""Parameters of the largest model that is trained."""

SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), RANKS),
    **dict.fromkeys(("num_attention_heads", "n_head", "swa_num_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "max_position_embeddings"), 64),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "rotary_dim": 4,
    # Mixtures of experts.
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts"), 1),
    "first_k_dense_replace": 1,
    # Projections of low rank.
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 8),
    "index_n_heads": 4,
    # Layers that keep a state.
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "hidden_size_per_layer_input"), 8),
    "mamba_d_ssm": 64,
    "image_size": 32,
}
"""Sizes of a small model by the names that configs have for them."""

OFTEN_NONE = {"head_dim", "num_key_value_heads", "q_lora_rank", "n_routed_experts"} | {
    name for name in SIZES if name.endswith(("_token_id", "_shared_experts", "_per_tok"))
}
"""Names that are set where a config's default is None."""


def main() -> None:
    """Print how many families ended in which way, and which."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    disable_progress_bar()
    torch.set_num_threads(1)
    SOUND_SHARDS.clear()  # refused because of this script
    for late in ("datasets", "torch._dynamo", "transformers.distributed.tensor_parallel"):
        import_module(late)  # once for all ranks
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": str(RANKS)}
    chosen = sys.argv[1:] or [*families()]
    ends: dict[str, dict[str, str]] = {}
    for at in range(0, len(chosen), TOGETHER):
        ends |= of_families(chosen[at : at + TOGETHER])
    print(f"transformers {version('transformers')}, torch {version('torch')}\n")
    print(f"{len(ends)} families\n\n| strategy | end | families |\n|---|---|---|")
    for name in NAMES:
        kinds: dict[str, list[str]] = {}
        for family, of_names in ends.items():
            kinds.setdefault(of_names[name].split(":")[0], []).append(family)
        for kind, those in sorted(kinds.items()):
            print(f"| `{name}` | {kind} | {len(those)} |")
    print()
    alike: dict[tuple[str, str], list[str]] = {}
    for family, of_names in ends.items():
        for end in dict.fromkeys(of_names.values()):
            under = ", ".join(name for name in NAMES if of_names[name] == end)
            alike.setdefault((under, end), []).append(f"`{family}`")
    for (under, end), those in alike.items():
        if end != "equal":
            print(f"- {', '.join(those)} under {under}: {end}")


def families() -> Iterator[str]:
    """Yield the types of causal LMs whose config has a tensor-parallel plan."""
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            text = AutoConfig.for_model(family).get_text_config(decoder=True)
        except Exception:  # a config without defaults
            continue
        if getattr(text, "base_model_tp_plan", None):
            yield family


def of_families(names: list[str]) -> dict[str, dict[str, str]]:
    """Return how a small model of each family ended under each strategy."""
    ends: dict[str, dict[str, str]] = {}
    context = multiprocessing.get_context("fork")
    while rest := [name for name in names if name not in ends]:
        with tempfile.TemporaryDirectory() as folder:
            told, tells = context.Pipe(duplex=False)
            ranks = [
                context.Process(target=train, args=(rest, rank, folder, tells))
                for rank in range(RANKS)
            ]
            for rank in ranks:
                rank.start()
            tells.close()
            for family in rest:
                begun, why = time.monotonic(), f"no answer in {SECONDS} s"
                try:
                    ends[family] = told.recv() if told.poll(SECONDS) else {}
                except EOFError:
                    ends[family], why = {}, "the ranks died"
                seconds = time.monotonic() - begun
                print(family, f"{seconds:.0f} s", ends[family], file=sys.stderr, flush=True)
                if not ends[family]:  # the ranks may wait for each other
                    ends[family] = dict.fromkeys(NAMES, why)
                    break
            for rank in ranks:
                rank.kill()
                rank.join()
    return ends


def train(names: list[str], rank: int, folder: str, tells: Any) -> None:
    """Train each family as one rank of four, and tell of each how it ended."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    for family in names:
        ends = of_family(family, f"{folder}/{family}")
        if rank == 0:
            tells.send(ends)
    torch.distributed.barrier()
    os._exit(0)


def of_family(family: str, folder: str) -> dict[str, str]:
    """Return how one family ended under each strategy; a collective."""
    try:
        small(family).save_pretrained(folder)  # on rank 0 alone
        torch.distributed.barrier()
    except Exception as error:
        return dict.fromkeys(NAMES, f"no small model: {_sentence(error)}")
    ends: dict[str, str] = {}
    for name in NAMES:
        try:
            ends[name] = of_strategy(family, folder, STRATEGIES[name].on_ranks(RANKS))
        except UsageError as error:
            ends[name] = f"refused: {_sentence(error)}"
        except Exception as error:  # any: each family has code of its own
            ends[name] = f"fails: {_sentence(error)}"
        torch.distributed.barrier()
    return ends


def small(family: str) -> Any:
    """Return a small model of a family in fp32, without dropout.

    Raises:
        ValueError: it has too many parameters, or sizes that don't fit each other.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes(AutoConfig.for_model(family)))
    config.get_text_config(decoder=True).use_cache = False
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).parameters()
    if (number := sum(p.numel() for p in parameters)) > LARGEST:
        raise ValueError(f"{number:,} parameters with the sizes of this script")
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms of ones and biases of zeros hide faults
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return trainable(model)


def trainable(model: Any) -> Any:
    """Return a model in training mode, without dropout."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def sizes(config: Any) -> dict[str, Any]:
    """Return small sizes under the names that a config and those inside of it have for them."""
    taken: dict[str, Any] = {name: SIZES[name] for name in SIZES if _takes(config, name)}
    if "kv_lora_rank" in taken:  # every head has keys and values of its own
        taken["num_key_value_heads"] = taken["num_attention_heads"]
    for name, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in name or "jitter" in name):
            taken[name] = 0.0
        elif isinstance(value, PreTrainedConfig):
            taken[name] = {"model_type": value.model_type} | sizes(value)
    return taken


def _takes(config: Any, name: str) -> bool:
    try:
        value = getattr(config, name)
    except Exception:  # missing, or different in each layer
        return False
    return isinstance(value, int) or (value is None and name in OFTEN_NONE)


def window() -> list[dict[str, torch.Tensor]]:
    """Return the micro-batches of a step, padded to the right."""
    generator = torch.Generator().manual_seed(7)
    batches: list[dict[str, torch.Tensor]] = []
    for length in LENGTHS:
        ids = torch.randint(1, 60, (ROWS, length), generator=generator)
        mask = (torch.arange(length) < length - torch.arange(ROWS)[:, None]).long()
        labels = ids.masked_fill(mask == 0, -100)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


def of_strategy(family: str, folder: str, strategy: Strategy) -> str:
    """Train one step whole and split, and say whether they are equal; a collective."""
    check_split(folder, strategy, RANKS)
    batches = window()
    items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    control = small(family)
    losses = [control(**batch, num_items_in_batch=items).loss for batch in batches]
    wanted = torch.stack(losses).sum()
    wanted.backward()
    whole = {n: _or_zeros(p.grad, p) for n, p in control.named_parameters()}
    norm = torch.nn.utils.get_total_norm([*whole.values()])

    accelerator, model = prepared(folder, strategy, micro_batches=len(batches))
    backend = backend_of(model)
    share = _loss_of_rows(accelerator, model, batches, items) / RANKS
    torch.distributed.all_reduce(share)
    gradients = {
        n: float((backend.full_gradient(p) - whole[n]).norm() / max(whole[n].norm(), 1e-6 * norm))
        for n, p in backend.full_parameters()
    }
    gathered = gather_full(backend, scale=1.0)
    clipped = float(accelerator.clip_grad_norm_(model.parameters(), LIMIT))
    worst = max(gradients, key=lambda name: gradients[name])
    gaps = {
        "loss": float((share - wanted).abs() / wanted.abs()),
        "norm": abs(clipped / float(norm) - 1),
        "gradient": gradients[worst],
    }
    refused = clipping_mismatches(gather_objects((gathered, clipped)))
    wrong = [f"{name} by {gap:.1g}" for name, gap in gaps.items() if not gap <= GAPS[name]]
    if not wrong:
        return "equal"
    words = f"{', '.join(wrong)}, most in {worst}"
    if refused:
        return f"not equal and refused in the second step: {words}; {refused[0].what}"
    return f"not equal: {words}"


def prepared(folder: str, strategy: Strategy, *, micro_batches: int) -> tuple[Any, Any]:
    """Return an Accelerator and the model as the strategy splits it."""
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        distributed_config=claim_mesh(strategy, RANKS, precision="no"),
    )
    model.config.get_text_config(decoder=True).use_cache = False
    if strategy.schedule is not None:
        request = pipeline.PipelineRequest(strategy=strategy, balance="flops", sequence=16)
        pipeline.ask_for(model, request)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=micro_batches, sync_with_dataloader=False
        ),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    loader: Any = DataLoader([*range(8)])  # pyright: ignore[reportArgumentType]: a list will do
    model, _, _ = wrap(accelerator, trainable(model), optimizer, loader)
    return accelerator, model


def _loss_of_rows(
    accelerator: Any, model: Any, batches: list[dict[str, torch.Tensor]], items: int
) -> torch.Tensor:
    """Run the step's passes as `toolkit.training.loop` does, and return this rank's loss."""
    backend = backend_of(model)
    readers, reader = backend.data_parallel_size(), backend.data_parallel_rank()
    rows = slice(reader * ROWS // readers, (reader + 1) * ROWS // readers)
    of_rank = [{name: values[rows] for name, values in batch.items()} for batch in batches]
    losses = backend.run_together(accelerator, of_rank, items)
    if losses is not None:
        return torch.stack(losses).sum()
    total = torch.zeros(())
    for batch in of_rank:
        with accelerator.accumulate(model):
            loss = model(**batch, num_items_in_batch=items).loss * readers
            backend.backward(accelerator, loss, micro_batches=len(of_rank))
            total += loss.detach()
    return total


def _or_zeros(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


if __name__ == "__main__":
    main()
