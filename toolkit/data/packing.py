"""Packing: several texts in one row.

`fixed` cuts a stream of texts into rows of one length: there is no padding, so speed can be
measured, but texts are cut and see their neighbours. `best_fit` puts whole texts together:
positions restart at each text, attention stays within it, and no token is predicted from another
text.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.configs.proven_models import PROVEN_MODELS
from toolkit.data.tokens import (
    CACHES,
    IGNORED,
    add_row,
    empty_rows,
    in_batches,
    row_features,
    supervised_tokens,
)
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from datasets import Dataset

PROVEN_ATTENTION = ("sdpa", "eager")
"""Implementations for which a test shows equal losses and gradients packed and unpacked."""

MIXED = (
    "with a cache of keys and values (use_cache) transformers lets texts in one row see each other"
)


def pack(dataset: Dataset, *, length: int, rows: int) -> Dataset:
    """Return `rows` rows of exactly `length` tokens, for measuring speed.

    The texts follow each other without a gap, are cut where a row is full, begin again after the
    last one, and every token is trained on. `sample_id` is negative: -1, -2, ... Where the data
    have positions, so have these rows, each as one text.
    """
    import numpy as np
    from datasets import Dataset

    needed = rows * length
    pieces: list[list[int]] = []
    count = 0
    while count < needed:
        for batch in in_batches(dataset):
            pieces += batch["input_ids"]
            count += sum(map(len, batch["input_ids"]))
            if count >= needed:
                break
    stream = np.concatenate([*pieces, np.empty(0, dtype=np.int64)]).astype(np.int32)
    blocks = list(stream[:needed].reshape(rows, length))
    columns = {
        "input_ids": blocks,
        "labels": blocks,
        "sample_id": [-1 - row for row in range(rows)],
    }
    positions = "position_ids" in dataset.column_names
    if positions:
        columns["position_ids"] = [np.arange(length, dtype=np.int32)] * rows
    return Dataset.from_dict(columns, features=row_features(positions=positions))


class FixedPacking:
    """Cuts the stream of all texts into rows of `length` tokens; made for `datasets.map`.

    Learned tokens stay learned. Rows are numbered from 0. Rows without a learned token are left
    out, and so are the tokens at the end that fill no row.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.made = 0
        self.ids: list[int] = []
        self.labels: list[int] = []

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            self.ids += ids
            self.labels += labels
        rows = empty_rows()
        end = len(self.ids) - len(self.ids) % self.length
        for start in range(0, end, self.length):
            labels = self.labels[start : start + self.length]
            if supervised_tokens(labels):
                add_row(rows, self.ids[start : start + self.length], labels, self.made)
            self.made += 1
        # The rest begins the first row of the next batch.
        self.ids, self.labels = self.ids[end:], self.labels[end:]
        return rows


def best_fit(lengths: Sequence[int], *, room: int) -> list[list[int]]:
    """Return the numbers of the texts in each row, every text in the fullest row that it fits.

    Best fit decreasing: longest first, equals in their order, so the same lengths give the same
    rows everywhere. No text may have more tokens than the `room` of a row.
    """
    rows: list[list[int]] = []
    free: list[int] = []  # amounts of room that some row has left, ascending
    with_free: dict[int, list[int]] = {}
    for text in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        need = lengths[text]
        at = bisect.bisect_left(free, need)
        if at == len(free):
            row, left = len(rows), room
            rows.append([])
        else:
            left = free[at]
            row = with_free[left].pop()
            if not with_free[left]:
                del with_free[left], free[at]
        rows[row].append(text)
        left -= need
        if left not in with_free:
            bisect.insort(free, left)
        with_free.setdefault(left, []).append(row)
    return rows


def pack_texts(
    batch: Mapping[str, Sequence[Any]], numbers: Sequence[int], *, texts: Dataset
) -> dict[str, list[Any]]:
    """Make the rows whose texts `batch["texts"]` numbers; made for `datasets.map`.

    `sample_id` is the number of the packed row.
    """
    rows: dict[str, list[Any]] = {**empty_rows(), "position_ids": []}
    columns = texts[list(itertools.chain.from_iterable(batch["texts"]))]
    pairs = zip(columns["input_ids"], columns["labels"], strict=True)
    for number, members in zip(numbers, batch["texts"], strict=True):
        ids, labels, positions = packed_row(itertools.islice(pairs, len(members)))
        add_row(rows, ids, labels, number)
        rows["position_ids"].append(positions)
    return rows


def packed_row(
    texts: Iterable[tuple[Sequence[int], Sequence[int]]],
) -> tuple[list[int], list[int], list[int]]:
    """Return the tokens, labels and positions of a row that holds `texts`, tokens and labels each.

    The first token of a text is learned nowhere: only the text before could predict it.
    """
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for text_ids, text_labels in texts:
        ids += text_ids
        labels += [IGNORED, *text_labels[1:]]
        positions += range(len(text_ids))
    return ids, labels, positions


def check_no_cache(values: Mapping[str, Any], *, packing: str) -> None:
    """Check that `TrainingArguments` ask for no cache of keys and values beside packed texts.

    Raises:
        UsageError: they do.
    """
    if packing == "best_fit" and values.get("use_cache"):
        raise UsageError(f"--packing best_fit and --use_cache: {MIXED}. Leave one of them out.")


def keep_texts_apart(model: Any) -> None:
    """Have a model refuse rows of several texts wherever it would let them see each other.

    transformers 5.23 looks for texts that share a row only where it has no cache of keys and values
    (masking_utils.py `_preprocess_mask_arguments`), and a decoder makes one wherever `use_cache`
    is asked, by its config as well. A forward with such rows then raises UsageError.
    """
    # The decoder's own call: adapters call the outer model's forward directly, past its hooks.
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder = getattr(inner, "base_model", None)
    if decoder is not None and hasattr(decoder, "config"):
        decoder.register_forward_pre_hook(_refuse_mixing, with_kwargs=True)


def _refuse_mixing(decoder: Any, _: Any, inputs: Mapping[str, Any]) -> None:
    positions = inputs.get("position_ids")
    if positions is None or positions.dim() != 2 or inputs.get("attention_mask") is not None:
        return
    caches = inputs.get("use_cache")
    if caches is None:
        caches = getattr(decoder.config, "use_cache", False)
    if not caches and all(inputs.get(name) is None for name in CACHES):
        return
    # Only now: the answer waits for the device.
    if (positions[:, 1:] != positions[:, :-1] + 1).any():
        raise UsageError(
            f"These rows hold several texts each, and {MIXED}. Leave use_cache out, or set "
            "model.config.use_cache to False."
        )


def check_borders(
    folder: str | Path, *, attention: str | None, trust_remote_code: bool = False
) -> None:
    """Check that the model in `folder` separates the texts that `best_fit` packs into one row.

    transformers keeps texts apart by their positions where no padding mask is given, in models
    that hand the positions on to the mask and with attention that asks for one.

    Raises:
        UsageError: this is not proven for the model or its attention.
    """
    if attention is not None and attention not in PROVEN_ATTENTION:
        raise UsageError(
            f"--packing best_fit is proven for --attn_implementation "
            f"{' and '.join(PROVEN_ATTENTION)}, not for {attention}. Pass one of them, or "
            "--packing none."
        )
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    name = next(iter(config.get("architectures") or []), "a model without a named architecture")
    if trust_remote_code and "AutoModelForCausalLM" in (config.get("auto_map") or {}):
        raise UsageError(
            f"--packing best_fit is not proven for the code that comes with the model in {folder}, "
            "which --trust_remote_code runs: texts in one row might see each other. Leave that "
            "out where transformers has the model, or pass --packing none."
        )
    if name not in PROVEN_MODELS:
        raise UsageError(
            f"--packing best_fit is not proven for {name}: texts in one row might see each other. "
            "Pass --packing none, or fixed, which lets them."
        )
