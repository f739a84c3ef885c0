"""Training data: from the sources in the flags to cached token rows, the same on every rank.

Rows are tokenised once and cached under a key of all inputs. If the cache is empty, one rank fills
it and the others wait for a kernel lock. This happens before they make a process group, so no
collective can time out over it.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from toolkit.data.arguments import DataArguments
from toolkit.data.building import TEMPLATE_FILE, Build, Part
from toolkit.data.cache import build_once, changed_meanwhile, read_cached
from toolkit.data.chat import brought, requested_template, shipped_templates
from toolkit.data.flags import changed_flags
from toolkit.data.sources import Source, training_source, unreadable_rows, validation_source
from toolkit.data.tokens import (
    check_size,
    digest,
    load_tokenizer,
    supervised_tokens,
    tokenizer_identity,
)
from toolkit.environment import cache_root
from toolkit.errors import UsageError
from toolkit.escaping import one_line
from toolkit.records.evidence import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

_RECIPE = 6
"""Version of a cached folder's contents: raise it with any change to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDataset:
    """Tokenised rows in the cache, and the facts of them in a record."""

    name: str
    hash: str
    """sha256 over the text of the rows."""

    tokens_hash: str
    """sha256 over the token ids and labels, and the positions where rows hold several texts."""

    rows: int
    dropped: int
    """Rows left out because none of their tokens is trained on."""

    largest_id: int
    tokenizer_size: int | None = None
    """Tokens that the tokenizer has."""

    python: str | None
    """Version of the Python that the rows come from; None for other data."""

    folder: Path

    dropped_why: dict[str, int] = field(default_factory=dict[str, int])
    """The number of rows left out, by the reason."""

    columns: list[str] = field(default_factory=list[str])
    """The columns of the source that were read."""

    unread_columns: list[str] = field(default_factory=list[str])

    format: str = "text"
    """The rows of the source, as `formats.Kind` names them."""

    loss_on: str = "all"
    """The tokens that are learned: all, completion or assistant."""

    template: dict[str, str] | None = None
    """Name and sha256 of the chat template; None where none was used."""

    packing: str = "none"
    texts: int | None = None
    """Texts or chats that the rows hold."""

    truncated: int | None = None
    """Texts or chats that lost their end to `--max_length`."""

    lost_tokens: int | None = None
    """Tokens of these ends."""

    longest_text: int | None = None
    """Tokens of the longest text before it is cut."""

    longest: int | None = None
    """Tokens of the longest row."""

    tokens: int | None = None
    supervised_tokens: int | None = None
    """Tokens that are predicted and trained on."""

    stop_token: str | None = None
    """The token that ends a text, or a turn of a chat."""

    rows_with_stop: int | None = None
    """Rows in which it is trained on."""

    asked: dict[str, Any] = field(default_factory=dict[str, Any], compare=False)
    """The flags of `DataArguments` that were not at their defaults."""

    def load(self) -> Dataset:
        """Return the rows: `input_ids`, `labels`, and `sample_id`, the row's number in the data.

        Packed rows are numbered anew, 0, 1, ...; with best_fit they have `position_ids`.
        """
        from datasets import Dataset

        return Dataset.load_from_disk(str(self.folder / "rows"))

    def chat_template(self) -> str | None:
        """Return the template that the chats were rendered with; None for other data."""
        if self.template is None:
            return None
        return (self.folder / TEMPLATE_FILE).read_text(encoding="utf-8")

    @property
    def brought_template(self) -> str | None:
        """Name of the template that chats got from the toolkit, since their model has none."""
        return brought(self.template, self.asked)

    def notes(self) -> list[str]:
        """Return sentences on what was done to the rows without being asked for."""
        notes: list[str] = []
        if self.format == "question and answer":
            columns, others = ", ".join(self.columns), ", ".join(self.unread_columns)
            read = f"{columns} are read as a turn of the user and a reply"
            read += f"; not read: {others}" if others else ""
            notes.append(one_line(f"{self.name}: {read}"))
        if (name := self.brought_template) is not None:
            notes.append(
                f"the model has no chat template: the chats of {one_line(self.name)} are trained "
                f"with {name}, which comes with the toolkit and is saved with the model "
                "(--chat_template chooses another)"
            )
        return [*notes, *(f"{one_line(self.name)}: {text}" for text in self.left_out())]

    def left_out(self) -> list[str]:
        """Return sentences on the rows, and the ends of rows, that are not trained on."""
        texts: list[str] = []
        if self.dropped:
            why = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped_why.items())
            texts.append(
                f"{self.dropped} of {self.dropped + (self.texts or 0)} rows are left out, without "
                f"a token to train on within --max_length ({why})"
            )
        if self.truncated and self.python is None:  # the built-in data are for measuring
            lost = self.lost_tokens or 0
            texts.append(
                f"{self.truncated:,} of {self.texts:,} texts are cut to --max_length, and the "
                f"{lost / (lost + (self.tokens or 0)):.1%} of all tokens behind are not trained on "
                f"(--max_length {self.longest_text} keeps all)"
            )
        return texts

    def facts(self) -> dict[str, Any]:
        left_out = ("folder", "largest_id", "tokenizer_size")
        facts = {name: getattr(self, name) for name in self.__slots__ if name not in left_out}
        return facts | {"name": one_line(self.name)}


def prepare_data(
    arguments: DataArguments,
    tokenizer: str | Path,
    *,
    trust_remote_code: bool = False,
    rows_needed: int | None = None,
    vocab_size: int | None = None,
) -> TokenDataset:
    """Return the rows that `arguments` ask for, tokenised once and cached.

    Args:
        arguments: Source, format, template, mask and packing.
        tokenizer: The folder of the tokenizer.
        trust_remote_code: Run code that comes with the tokenizer.
        rows_needed: Rows to stream where `--max_train_samples` is not passed; None: not known. They
            are counted before packing and before rows are left out, so a run may begin again.
        vocab_size: Ids of the model; None: not known.

    Raises:
        UsageError: the data can't be found or read, have unknown columns, don't fit the template,
            or leave no row; or the tokenizer is far smaller than the model's vocabulary.
    """
    limit = arguments.max_train_samples
    if arguments.streaming:
        limit = limit or rows_needed
        if limit is None:
            raise UsageError(
                "--streaming fetches as many rows as the run needs, and nothing says how many: "
                "pass --max_train_samples, or --max_steps (to toolkit prepare with the "
                "--num_processes of the launch)."
            )
    source = training_source(arguments, limit=limit if arguments.streaming else None)
    return _prepare(
        source, arguments, Path(tokenizer), "training", limit, trust_remote_code, vocab_size
    )


def prepare_validation(
    arguments: DataArguments, tokenizer: str | Path, *, trust_remote_code: bool = False
) -> TokenDataset | None:
    """Return the rows to evaluate on, prepared like the training rows but never packed.

    They come from `--validation_file` or `--validation_split`, or are the
    `--validation_split_percentage` of the training rows that `prepare_data` leaves out.

    Raises:
        UsageError: as `prepare_data`.
    """
    if not arguments.has_validation:
        return None
    source = validation_source(arguments)
    if source is None:
        streamed = arguments.max_train_samples if arguments.streaming else None
        if arguments.streaming and streamed is None:
            raise UsageError(
                "--validation_split_percentage with --streaming needs --max_train_samples: the "
                "part is taken of the rows that are fetched."
            )
        source = training_source(arguments, limit=streamed)
    limit = arguments.max_eval_samples
    return _prepare(source, arguments, Path(tokenizer), "validation", limit, trust_remote_code)


def _prepare(
    source: Source,
    arguments: DataArguments,
    tokenizer: Path,
    part: Part,
    limit: int | None,
    trust_remote_code: bool,
    vocab_size: int | None = None,
) -> TokenDataset:
    template = arguments.chat_template
    key = digest(
        _RECIPE,
        source.identity,
        part,
        limit,
        arguments.validation_split_percentage,
        arguments.text_column,
        arguments.messages_column,
        arguments.loss_on,
        arguments.length,
        arguments.packing if part == "training" else "none",
        [sorted(shipped_templates().items()), template and requested_template(template).facts()],
        tokenizer_identity(tokenizer),
    )

    def build(folder: Path) -> None:
        loaded = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
        check_size(len(loaded), vocab_size, tokenizer)
        logger.info("Tokenising %s", one_line(source.name))
        job = Build(
            arguments=arguments, name=source.name, tokenizer=loaded, part=part, limit=limit, key=key
        )
        scratch = folder / "raw"
        with unreadable_rows(source.name):
            facts = job.write(source.load(scratch), folder)  # holds the only reference to its maps
        shutil.rmtree(scratch, ignore_errors=True)
        (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")

    folder = build_once(cache_root() / "tokens" / key, build)
    facts = read_cached(folder / "facts.json")
    check_size(facts.get("tokenizer_size"), vocab_size, tokenizer)  # maybe built for another model
    origin = {"name": source.name, "python": source.python, "asked": changed_flags(arguments)}
    try:
        return TokenDataset(folder=folder, **origin, **facts)
    except TypeError as error:
        raise changed_meanwhile(folder / "facts.json") from error


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN: Final = 3
"""Rows that are shown."""

MOST_TOKENS: Final = 240
"""Tokens of a row, from which those in the middle are left out."""


def shown_rows(data: TokenDataset, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
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
