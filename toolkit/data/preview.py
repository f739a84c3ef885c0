"""A look at prepared rows: their text as the model reads it, and which of it is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, cast

from toolkit.data.prepared import PreparedData
from toolkit.data.tokens import IGNORED, supervised_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN: Final = 3
"""Rows that are shown."""

MOST_TOKENS: Final = 240
"""Tokens of a row, from which those in the middle are left out."""


def shown_rows(data: PreparedData, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the first rows of the data: their number and counts, and their text in parts.

    Each part has its `text` and whether it is `trained`. Special tokens are visible, and what is
    left out is counted in square brackets.
    """
    rows = data.load().select(range(min(SHOWN, data.rows)))
    return [
        {
            "row": row["sample_id"],
            "tokens": len(row["input_ids"]),
            "trained_tokens": supervised_tokens(row["labels"]),
            "parts": list(_parts(tokenizer, row["input_ids"], row["labels"])),
        }
        for row in cast("Iterable[dict[str, Any]]", rows)
    ]


def _parts(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], labels: list[int]
) -> Iterator[dict[str, Any]]:
    """Yield the runs of tokens that are trained or not; the first token is never predicted."""
    cut = range(MOST_TOKENS // 2, len(ids) - MOST_TOKENS // 2)
    kinds = [
        (at > 0 and label != IGNORED and at not in cut, at in cut)
        for at, label in enumerate(labels)
    ]
    end, before = 0, ""
    for (is_trained, is_cut), run in groupby(kinds):
        begin, end = end, end + len(list(run))
        # Decoders may write a token differently at the start of a text, so all up to it is decoded.
        text = str(tokenizer.decode(ids[:end]))
        part = text if text.startswith(before) else before + str(tokenizer.decode(ids[begin:end]))
        note = f" [... {len(cut):,} tokens ...] "
        yield {"text": note if is_cut else part.removeprefix(before), "trained": is_trained}
        before = text
