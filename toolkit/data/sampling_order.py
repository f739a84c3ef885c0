"""Order and batches: which rows a run trains on, for any number of ranks, and their tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.data.packing import pack
from toolkit.data.tokens import in_batches
from toolkit.errors import UsageError
from toolkit.records.evidence import IGNORED
from toolkit.records.record import FILLER_ID

if TYPE_CHECKING:
    import torch
    from datasets import Dataset


def count_steps(
    rows: int, *, global_batch: int, max_steps: int, num_train_epochs: float = 0.0
) -> int:
    """Return the optimizer steps of a run; a positive `max_steps` wins, as in the Trainer."""
    if max_steps > 0:
        return max_steps
    return max(1, math.ceil(_steps_per_epoch(rows, global_batch) * num_train_epochs))


def rows_needed(values: Mapping[str, Any], *, num_processes: int) -> int | None:
    """Return the rows that `max_steps` optimizer steps take; None where epochs are asked for."""
    if values["max_steps"] <= 0:
        return None
    of_a_rank = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    return values["max_steps"] * of_a_rank * num_processes


def training_rows(
    dataset: Dataset,
    *,
    steps: int,
    global_batch: int,
    seed: int,
    reverse: bool = False,
    throughput_steps: int = 0,
    max_length: int,
    pad_token_id: int = 0,
) -> Dataset:
    """Return the rows of a whole run, to be read one after the other.

    First the rows of `steps` optimizer steps, one seeded permutation an epoch, then the packed
    rows of `throughput_steps` more. When W ranks take every W-th batch, as Accelerate deals
    them, a step holds the same rows for every W. Where the rows of an epoch don't fill its last
    step, fillers do: rows of one ignored `pad_token_id`, which `has_fillers` and the gates know by
    their `sample_id`, FILLER_ID. So each row is trained once an epoch, and a loss that is divided
    by the tokens of the step stays right.

    With `reverse`, the rows of each of the `steps` come in reverse. Micro-batches hold the same
    rows then, so the training differs in the order of its sums alone.

    Raises:
        UsageError: one step takes more rows than there are.
    """
    import numpy as np
    from datasets import concatenate_datasets

    steps_per_epoch = _steps_per_epoch(len(dataset), global_batch)
    filled = steps_per_epoch * global_batch
    # The filler stands behind the data, under the number that comes after theirs.
    fillers = np.full(filled - len(dataset), len(dataset))
    epochs = [
        # PCG64 by name: `default_rng` may be another generator in a later NumPy.
        np.random.Generator(np.random.PCG64(seed + epoch)).permutation(len(dataset))
        for epoch in range(-(-steps // steps_per_epoch))
    ]
    parts = [part for epoch in epochs for part in (epoch, fillers)]
    order = np.concatenate([*parts, np.empty(0, dtype=np.int64)])[: steps * global_batch]
    if reverse:
        order = order.reshape(steps, global_batch)[:, ::-1].reshape(-1)
    ragged = _with_filler(dataset, pad_token_id) if len(dataset) in order else dataset
    # In memory: `datasets` would write the numbers of the rows into a file of the cache.
    ragged = ragged.select(order, keep_in_memory=True)
    if not throughput_steps:
        return ragged
    packed = pack(dataset, length=max_length, rows=throughput_steps * global_batch)
    return concatenate_datasets([ragged, packed])


def count_trained(rows: Dataset, number: int) -> tuple[int, int]:
    """Count the first rows and their tokens, without those that only fill steps."""
    trained = tokens = 0
    for table in in_batches(rows.select(range(number)).with_format("arrow")):
        lengths = table["input_ids"].combine_chunks().value_lengths().to_numpy()
        real = table["sample_id"].to_numpy() != FILLER_ID
        trained += int(real.sum())
        tokens += int(lengths[real].sum())
    return trained, tokens


def validation_rows(dataset: Dataset, *, global_batch: int, pad_token_id: int = 0) -> Dataset:
    """Return the rows in their order, filled up to whole batches over all ranks.

    Each row is evaluated exactly once for any number of ranks; a loss has to be summed and
    divided by the supervised tokens, for fillers have none.
    """
    missing = -len(dataset) % global_batch
    if not missing:
        return dataset
    order = [*range(len(dataset)), *[len(dataset)] * missing]
    return _with_filler(dataset, pad_token_id).select(order, keep_in_memory=True)


def _with_filler(dataset: Dataset, pad_token_id: int) -> Dataset:
    from datasets import Dataset, concatenate_datasets

    filler: dict[str, list[object]] = {
        "input_ids": [[pad_token_id]],
        "labels": [[IGNORED]],
        "sample_id": [FILLER_ID],
        "position_ids": [[0]],
    }
    columns = {name: filler[name] for name in dataset.column_names}
    return concatenate_datasets([dataset, Dataset.from_dict(columns, features=dataset.features)])


def _steps_per_epoch(rows: int, global_batch: int) -> int:
    if rows < global_batch:
        raise UsageError(
            f"One optimizer step takes {global_batch} rows and the data have only {rows}. Lower "
            "--per_device_train_batch_size or --gradient_accumulation_steps, or pass more data."
        )
    return -(-rows // global_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """Pads rows on the right to the longest of their batch.

    Padding is masked by its position, never by its id: where the padding token is also the
    end of text, a model has to go on learning to end.

    Rows with `position_ids` hold several texts. They get no attention mask, because only without
    one does transformers separate texts at position 0. Each padding token is its own text.
    """

    pad_token_id: int
    multiple: int = 1
    """Of tokens, up to which the longest row is padded as well."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        import torch

        lengths = [len(row["input_ids"]) for row in rows]
        width = -(-max(lengths) // self.multiple) * self.multiple

        def padded(values: Iterable[Sequence[int]], filler: int) -> torch.Tensor:
            return torch.tensor([[*value, *[filler] * (width - len(value))] for value in values])

        if "position_ids" in rows[0]:
            apart = {"position_ids": padded((row["position_ids"] for row in rows), 0)}
        else:
            apart = {"attention_mask": padded(([1] * length for length in lengths), 0)}
        return {
            "input_ids": padded((row["input_ids"] for row in rows), self.pad_token_id),
            **apart,
            "labels": padded((row["labels"] for row in rows), IGNORED),
            "sample_id": torch.tensor([row["sample_id"] for row in rows]),
        }
