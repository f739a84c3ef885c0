"""Token rows from the built-in data, for any vocabulary, as lists: `datasets` is not needed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

IGNORED = -100


@cache
def texts() -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each built-in row: its prompt, and its completion with an end."""
    from toolkit.data.sources import standard_library_texts
    from toolkit.data.tokens import load_tokenizer
    from toolkit.training.model import build_model

    tokenizer = load_tokenizer(build_model())
    rows = standard_library_texts()
    prompts = tokenizer([row["prompt"] for row in rows])["input_ids"]
    completions = tokenizer([row["completion"] for row in rows], add_special_tokens=False)
    end = [tokenizer.eos_token_id]
    return [
        (list(prompt), [*completion, *end])
        for prompt, completion in zip(prompts, completions["input_ids"], strict=True)
    ]


def full_rows(count: int, tokens: int) -> list[dict[str, Any]]:
    """Return rows of exactly `tokens` tokens, texts one after the other, all of them learned."""
    stream = itertools.chain.from_iterable(
        prompt + completion for prompt, completion in itertools.cycle(texts())
    )
    rows: list[dict[str, Any]] = []
    for number in range(count):
        ids = list(itertools.islice(stream, tokens))
        rows.append({"input_ids": ids, "labels": list(ids), "sample_id": number})
    return rows


def ragged_rows(count: int, tokens: int) -> list[dict[str, Any]]:
    """Return rows of 1 to 8 texts and up to `tokens` tokens; completions alone are learned."""
    source = itertools.cycle(texts())
    rows: list[dict[str, Any]] = []
    for number in range(count):
        ids, labels = _joined(source, texts_in_row=1 + number * 5 % 8)
        row = {"input_ids": ids[:tokens], "labels": labels[:tokens], "sample_id": number}
        if any(label != IGNORED for label in row["labels"][1:]):
            rows.append(row)
    return rows


def _joined(
    source: Iterator[tuple[list[int], list[int]]], *, texts_in_row: int
) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    labels: list[int] = []
    for prompt, completion in itertools.islice(source, texts_in_row):
        ids += prompt + completion
        labels += [IGNORED] * len(prompt) + completion
    return ids, labels


def packed_rows(rows: Sequence[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Return rows packed as `--packing best_fit` does it: whole ones, `tokens` tokens at most."""
    from toolkit.data.packing import best_fit, packed_row

    packed: list[dict[str, Any]] = []
    for members in best_fit([len(row["input_ids"]) for row in rows], room=tokens):
        pairs = [(rows[number]["input_ids"], rows[number]["labels"]) for number in members]
        ids, labels, positions = packed_row(pairs)
        row = {"input_ids": ids, "labels": labels, "position_ids": positions}
        packed.append(row | {"sample_id": len(packed)})
    return packed
