"""Tokens and labels: text to rows of ids, and which of them are learned.

A token is learned or not by where it stands, never by its id: the token that ends a text is
learned also where the tokenizer pads with it.

The tokenizer is loaded from its folder with a padding token, and known by its files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from toolkit.errors import UsageError, sentence_of
from toolkit.records.evidence import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from transformers import PreTrainedTokenizerBase


SMALLEST_SHARE: Final = 0.5
"""Least share of a model's ids that its own tokenizer has tokens for. Models have more ids than
tokens, for their matrices to divide well, but by a few percent."""


def load_tokenizer(
    folder: str | Path, *, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer in `folder`, with a padding token: the end-of-text token if need be.

    That is safe since `Collator` masks padding by its position. A `chat_template` takes the place
    of the tokenizer's, and is saved with it.

    Raises:
        UsageError: there is no tokenizer, or it has neither token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"No tokenizer can be loaded from {folder}: {sentence_of(error)} "
            "Pass --tokenizer_name with one that fits the model."
        ) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UsageError(
                f"The tokenizer in {folder} has no pad token, and no end-of-text token to take "
                'its place. Set "pad_token" in its tokenizer_config.json, or pass --tokenizer_name '
                "with one that has it."
            )
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def check_size(tokens: int | None, ids: int | None, folder: str | Path) -> None:
    """Check that a tokenizer is not far smaller than the vocabulary of the model it is for.

    Without its files transformers (5.24) makes some tokenizers empty, without a warning: any text
    then has no token, or the special ones alone.

    Args:
        tokens: Tokens of the tokenizer in `folder`; None: not known.
        ids: Ids of the model; None: not known.

    Raises:
        UsageError: it is.
    """
    if tokens is not None and ids is not None and tokens < SMALLEST_SHARE * ids:
        raise UsageError(
            f"The tokenizer in {folder} has {tokens:,} token{'s' if tokens != 1 else ''} and the "
            f"model {ids:,} ids: it is another model's, or files of it are missing. Put the "
            "model's own (tokenizer.json) there, or pass --tokenizer_name with its folder."
        )


_TOKENIZER_FILES = re.compile(
    r"(tokenizer|tokenization|special_tokens|added_tokens|vocab|merges|sentencepiece|spiece"
    r"|chat_template).*|.*\.(model|tiktoken|py)"
)


def tokenizer_identity(folder: Path) -> str:
    """Return a hash that changes whenever the tokenizer in `folder`, or its template, may have."""
    return digest(list(_tokenizer_files(folder)), version("transformers"), version("tokenizers"))


def _tokenizer_files(folder: Path) -> Iterator[tuple[str, str]]:
    templates = folder / "additional_chat_templates"
    inside = sorted(templates.glob("*.jinja"))
    for path in (*sorted(folder.iterdir()), *inside):
        if path.is_file() and (path in inside or _TOKENIZER_FILES.fullmatch(path.name)):
            yield path.name, hashlib.sha256(path.read_bytes()).hexdigest()


CUT_AWAY = "cut before the first token to train on"
"""Why a row is left out that --max_length cut too short."""

CACHES = ("cache", "past_key_values")
"""Names of a model's argument for the cache of keys and values: transformers 5.24 renamed it."""


@dataclass(slots=True)
class Tally:
    """Counts of a tokenisation, beside the rows that it returned."""

    truncated: int = 0
    """Rows longer than `--max_length`, which lost their end."""

    lost: int = 0
    """Tokens of these ends."""

    longest: int = 0
    """Tokens of the longest row before it is cut."""

    without_tokens: int = 0
    """Rows of text that the tokenizer has no token for."""

    dropped: Counter[str] = field(default_factory=Counter[str])
    """Rows that were left out, by the reason."""

    def cut(self, length: int, max_length: int) -> None:
        """Count a row that is about to be cut."""
        self.truncated += length > max_length
        self.lost += max(0, length - max_length)
        self.longest = max(self.longest, length)


def empty_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids that stand for no text of a row: begin, end, padding, unknown."""
    named = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    return {getattr(tokenizer, name) for name in named} - {None}


def supervised_tokens(labels: Sequence[int]) -> int:
    """Count the tokens of a row that are trained on; a causal LM never predicts the first."""
    return sum(label != IGNORED for label in labels[1:])


def tokenise(
    batch: Mapping[str, Sequence[str | None]],
    numbers: Sequence[int],
    *,
    tokenizer: PreTrainedTokenizerBase,
    columns: tuple[str, ...],
    max_length: int,
    learn_prompt: bool = False,
    tally: Tally | None = None,
) -> dict[str, list[Any]]:
    """Tokenise rows of text; of a prompt and completion, only the completion is learned.

    Both are tokenised together, as the model will read them. The prompt is the common prefix with
    the tokens of the prompt alone: a token that reaches into the completion is learned. The end of
    text is appended and learned. Rows without a learned token are left out, and so are those of
    which the end of text would be the only one.

    Args:
        batch: Columns of text.
        numbers: The rows' numbers, which become their `sample_id`.
        columns: One column of text, or that of the prompt and that of the completion.
        max_length: Longer rows are cut to this many tokens.
        learn_prompt: Learn the prompt as well.
        tally: Counts the rows that were cut, and those without tokens.
    """
    tally = Tally() if tally is None else tally
    empty = empty_ids(tokenizer)
    texts = [[value or "" for value in batch[name]] for name in columns]
    learned = [bool(text.strip()) for text in texts[-1]]
    joined = token_ids(tokenizer, ["".join(parts) for parts in zip(*texts, strict=True)])
    masks = len(columns) == 2 and not learn_prompt
    prompts = token_ids(tokenizer, texts[0]) if masks else [[] for _ in joined]

    rows = empty_rows()
    for number, ids, prompt, is_learned in zip(numbers, joined, prompts, learned, strict=True):
        masked = common_prefix(prompt, ids)
        if is_learned and empty.issuperset(ids[masked:]):
            tally.without_tokens += 1
            tally.dropped["text that the tokenizer has no token for"] += 1
            continue
        if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
            ids = [*ids, tokenizer.eos_token_id]
        if not is_learned or len(ids) < 2:
            tally.dropped["empty"] += 1
            continue
        tally.cut(len(ids), max_length)
        ids = ids[:max_length]
        labels = [IGNORED] * min(masked, len(ids)) + ids[masked:]
        if supervised_tokens(labels):
            add_row(rows, ids, labels, number)
        else:
            tally.dropped[CUT_AWAY] += 1
    return rows


def in_batches(rows: Dataset) -> Iterator[Mapping[str, Any]]:
    """Yield the columns of 1,000 rows at a time, so that data larger than memory can be read."""
    return cast("Iterator[Mapping[str, Any]]", rows.iter(batch_size=1000))


def empty_rows() -> dict[str, list[Any]]:
    return {"input_ids": [], "labels": [], "sample_id": []}


def add_row(rows: dict[str, list[Any]], ids: list[int], labels: list[int], number: int) -> None:
    rows["input_ids"].append(ids)
    rows["labels"].append(labels)
    rows["sample_id"].append(number)


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    # Rows are cut to --max_length afterwards; the tokenizer would warn of longer ones before.
    return tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Count the tokens that two rows begin with in common."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


def row_features(*, positions: bool = False) -> Features:
    """Return the columns of tokenised rows; with `position_ids` where texts share a row."""
    from datasets import Features, List, Value

    ids = List(Value("int32"))
    columns: dict[str, Any] = {"input_ids": ids, "labels": ids, "sample_id": Value("int64")}
    return Features(columns | ({"position_ids": ids} if positions else {}))


def described_rows(rows: Dataset, *, stop: int | None = None) -> dict[str, Any]:
    """Return the hash and the counts of tokenised rows, read batch by batch.

    Args:
        rows: Tokenised rows.
        stop: The token that ends a text or a turn; the rows are counted that learn it.
    """
    import numpy as np

    content = hashlib.sha256()
    largest = tokens = supervised = longest = stopping = 0
    lists = [name for name in ("input_ids", "labels", "position_ids") if name in rows.column_names]
    for table in in_batches(rows.with_format("arrow")):
        sample_ids = table["sample_id"].combine_chunks().to_numpy(zero_copy_only=False)
        content.update(sample_ids.tobytes())
        for name in lists:
            column = table[name].combine_chunks()
            lengths = column.value_lengths().to_numpy(zero_copy_only=False)
            values = column.flatten().to_numpy(zero_copy_only=False)
            content.update(lengths.tobytes())
            content.update(values.tobytes())
            if name == "input_ids":
                largest = max(largest, int(values.max()))
                longest = max(longest, int(lengths.max()))
                tokens += len(values)
            if name == "labels":
                firsts = np.cumsum(lengths) - lengths
                supervised += int((values != IGNORED).sum() - (values[firsts] != IGNORED).sum())
                stopping += int(np.logical_or.reduceat(values == stop, firsts).sum())
    return {
        "tokens_hash": content.hexdigest(),
        "largest_id": largest,
        "longest": longest,
        "tokens": tokens,
        "supervised_tokens": supervised,
        "rows_with_stop": stopping,
    }


def text_hash(rows: Iterable[Sequence[Any]]) -> str:
    """Return the sha256 over rows of text or other JSON values."""
    content = hashlib.sha256()
    for row in rows:
        content.update(row_bytes(row) + b"\n")
    return content.hexdigest()


def characters(value: Any) -> int:
    """Count the characters of all texts in a row or in a value of it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(characters, cast("Mapping[str, Any]", value).values()))
    return sum(map(characters, cast("list[Any]", value))) if isinstance(value, list) else 0


def row_bytes(row: Sequence[Any]) -> bytes:
    return json.dumps(list(row), default=str).encode()


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
