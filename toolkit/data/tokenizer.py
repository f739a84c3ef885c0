"""The tokenizer: loaded from its folder with a padding token, and known by its files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from toolkit.data.tokens import digest
from toolkit.errors import UsageError, sentence_of

if TYPE_CHECKING:
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
