"""The script beside this one, for two ranks that share each row, by the file of either strategy.

    accelerate launch --config_file FILE tests/faults/train_split_rows_with_faults.py \
        MODEL OUTPUT NAME ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parent))  # a rank's path is a safe one
import torch
import train_with_faults as script
from splitting import fault, main
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toolkit.configs.requested import requested_strategy
from toolkit.data.sampling_order import Collator
from toolkit.engines import rows
from toolkit.engines.context import Context
from toolkit.engines.deepspeed_config import checked_deepspeed_config, use_deepspeed_config
from toolkit.engines.ulysses import Ulysses
from toolkit.records.evidence import IGNORED
from toolkit.rehearse import rehearse_if_needed

STRATEGY = requested_strategy(os.environ)
BACKEND = Ulysses if STRATEGY.reads_deepspeed_json else Context
WHOLE_ATTENTION = ALL_ATTENTION_FUNCTIONS["sdpa"]


def load(folder: str, **options: Any) -> Any:
    """Load a model, after the last run's attention and groups of ranks are gone."""
    ALL_ATTENTION_FUNCTIONS["sdpa"] = WHOLE_ATTENTION
    if (state := sys.modules.get(STATE)) is not None:
        from deepspeed.utils import groups

        groups.mpu = None
        state._release_sequence_parallel_groups()  # type: ignore[attr-defined]
    return AutoModelForCausalLM.from_pretrained(folder, **options)


STATE = "deepspeed.runtime.sequence_parallel.parallel_state_sp"


@fault
def labels_shifted_within_each_piece() -> Iterator[None]:
    """The last token of a shard then learns nothing: its next one is in another shard."""
    original = rows.next_tokens

    def within(labels: torch.Tensor) -> torch.Tensor:
        shards = labels.chunk(2 * script.RANKS, dim=1)
        return torch.cat([original(shard) for shard in shards], dim=1)

    with patch.object(rows, "next_tokens", within):
        yield


@fault
def loss_averaged_over_the_pieces() -> Iterator[None]:
    """Each rank divides by its own tokens, and the mean over ranks is taken for the loss."""
    original, backward, loss_of_rows = BACKEND.shard_batch, BACKEND.backward, BACKEND.loss_of_rows
    of_shard: list[float] = []

    def tokens(labels: torch.Tensor) -> int:
        return int((labels != IGNORED).sum())

    @contextmanager
    def shard_batch(self: Any, accelerator: Any, batch: Any) -> Iterator[Any]:
        evenly = tokens(batch["labels"][:, 1:]) / script.RANKS
        with original(self, accelerator, batch) as found:
            of_shard[:] = [evenly / max(1, tokens(found["shift_labels"]))]
            yield found

    with (
        patch.object(BACKEND, "shard_batch", shard_batch),
        patch.object(
            BACKEND,
            "backward",
            lambda self, by, loss, **options: backward(self, by, loss * of_shard[0], **options),
        ),
        patch.object(
            BACKEND, "loss_of_rows", lambda self, loss: loss_of_rows(self, loss * of_shard[0])
        ),
    ):
        yield


@fault
def positions_that_restart_in_each_piece() -> Iterator[None]:
    def restarting(ids: torch.Tensor) -> torch.Tensor:
        place = torch.arange(ids.shape[1], device=ids.device)
        return (place % (ids.shape[1] // script.RANKS)).repeat(len(ids), 1)

    with patch.object(rows, "positions_of", restarting):
        yield


@fault
def gradients_divided_by_all_ranks() -> Iterator[None]:
    """As DeepSpeed 0.19 at stage 3 and FSDP2 leave them, where a loss is that of a shard."""
    original = BACKEND.backward

    def backward(self: Any, by: Any, loss: torch.Tensor, **options: Any) -> None:
        original(self, by, loss / script.RANKS, **options)

    with patch.object(BACKEND, "backward", backward):
        yield


if __name__ == "__main__":
    rehearse_if_needed()
    if STRATEGY.reads_deepspeed_json:
        use_deepspeed_config(
            checked_deepspeed_config(),
            parameters=200_000,
            hidden_size=64,
            gradient_clipping=script.MAX_GRAD_NORM,
            rehearsal=True,
        )
    multiple = STRATEGY.row_multiple(script.RANKS)
    with patch.object(script, "Collator", partial(Collator, multiple=multiple)):
        main(STRATEGY, load)
