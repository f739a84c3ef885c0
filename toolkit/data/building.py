"""One folder of the cache: the rows of a source, tokenised, packed and counted."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from toolkit.data.arguments import DataArguments
from toolkit.data.chat import ChatTokeniser, Template, find_template, turn_end
from toolkit.data.formats import Format, find_format, read_rows
from toolkit.data.packing import FixedPacking, best_fit, pack_texts
from toolkit.data.sources import quiet_progress
from toolkit.data.tokens import (
    Tally,
    characters,
    described_rows,
    digest,
    in_batches,
    row_bytes,
    row_features,
    text_hash,
    tokenise,
)
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Part = Literal["training", "validation"]

TEMPLATE_FILE = "template.jinja"

LONGEST_ROW: Final = 2**22
"""Characters of a row: the tokenizer takes about 200 bytes of memory for each of them."""

BATCH_BYTES: Final = 2**24
"""Bytes of rows of a common length that are tokenised at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Writes one cached folder: rows chosen, tokenised, packed, and counted."""

    arguments: DataArguments
    name: str
    tokenizer: PreTrainedTokenizerBase
    part: Part
    limit: int | None
    key: str

    def write(self, raw: Dataset, folder: Path) -> dict[str, Any]:
        """Write the rows to `folder / "rows"`, and return facts of them by name."""
        form = find_format(raw, self.name, self.arguments)
        numbers = self._chosen(raw, form)
        chosen = raw if len(numbers) == len(raw) else raw.select(numbers)
        template = None
        if form.is_chat:
            template = find_template(self.tokenizer, self.arguments.chat_template, form.kind)
            (folder / TEMPLATE_FILE).write_text(template.text, encoding="utf-8")
        elif self.arguments.chat_template is not None:
            raise UsageError(
                f"--chat_template is for chats, and the rows of {self.name} are {form.kind}. "
                "Leave it out, or name the chats with --messages_column."
            )
        with quiet_progress():
            texts, tally = self._tokenise(chosen, form, numbers, template, folder)
            rows = self._pack(texts, folder)
            rows.save_to_disk(str(folder / "rows"))
        own_end = template and turn_end(self.tokenizer, template.text)
        stop = own_end or cast("int | None", self.tokenizer.eos_token_id)
        facts = {
            "hash": text_hash(read_rows(chosen, form)),
            "rows": len(rows),
            "dropped": len(chosen) - len(texts),
            "dropped_why": dict(tally.dropped),
            "columns": list(form.columns),
            "unread_columns": [name for name in raw.column_names if name not in form.columns],
            "stop_token": None if stop is None else self.tokenizer.convert_ids_to_tokens(stop),
            "format": form.kind,
            "loss_on": form.loss_on,
            "template": None if template is None else template.facts(),
            "packing": self._packing,
            "texts": len(texts),
            "truncated": tally.truncated,
            "lost_tokens": tally.lost,
            "longest_text": tally.longest,
            "tokenizer_size": len(self.tokenizer),
        } | described_rows(rows, stop=stop)
        for name in ("map.arrow", "packed.arrow"):
            (folder / name).unlink(missing_ok=True)
        self._check(facts, len(chosen), without_tokens=tally.without_tokens)
        return facts

    def _chosen(self, raw: Dataset, form: Format) -> list[int]:
        """Return the numbers of the rows that this part takes."""
        percentage = self.arguments.validation_split_percentage
        numbers = list(range(len(raw)))
        if percentage is not None:
            held_out = self.part == "validation"
            numbers = [
                number
                for number, row in enumerate(read_rows(raw, form))
                if _is_held_out(row_bytes(row), percentage) == held_out
            ]
            if not numbers:
                raise UsageError(
                    f"--validation_split_percentage {percentage:g} leaves zero {self.part} rows of "
                    f"the {len(raw)} of {self.name}. Pass another percentage, or more data."
                )
        return numbers[: self.limit]

    @property
    def _packing(self) -> str:
        return self.arguments.packing if self.part == "training" else "none"

    def _tokenise(
        self,
        rows: Dataset,
        form: Format,
        numbers: list[int],
        template: Template | None,
        folder: Path,
    ) -> tuple[Dataset, Tally]:
        """Return the chosen rows as token ids, and the counts of their tokenisation."""
        tally = Tally()
        # A stream of texts is cut where a row is full, so no text has to be cut before.
        length = sys.maxsize if self._packing == "fixed" else self.arguments.length
        tokenise_batch: Callable[[Any, list[int]], dict[str, list[Any]]]
        if template is None:
            tokenise_batch = partial(
                tokenise,
                tokenizer=self.tokenizer,
                columns=form.columns,
                max_length=length,
                learn_prompt=form.loss_on == "all",
                tally=tally,
            )
        else:
            tokenise_batch = ChatTokeniser(
                self.tokenizer, template, form, max_length=length, name=self.name, tally=tally
            )
        columns = list(form.columns)

        def checked(batch: Mapping[str, Sequence[Any]], places: list[int]) -> dict[str, list[Any]]:
            of_batch = [numbers[place] for place in places]
            for number, *row in zip(of_batch, *(batch[name] for name in columns), strict=True):
                self._check_length(number, characters(row))
            return tokenise_batch(batch, of_batch)

        row_size = max(1, rows.data.nbytes // max(1, len(rows.data)))
        texts = rows.select_columns(columns).map(
            checked,
            batched=True,
            # A batch of long rows could take gigabytes.
            batch_size=min(1000, max(1, BATCH_BYTES // row_size)),
            with_indices=True,
            remove_columns=columns,
            features=row_features(),
            load_from_cache_file=False,
            cache_file_name=str(folder / "map.arrow"),
            # Without it `datasets` hashes the tokenizer, whose pickle is not always the same.
            new_fingerprint=self.key[:32],
            desc="Tokenising",
        )
        return texts, tally

    def _check_length(self, number: int, length: int) -> None:
        if length > LONGEST_ROW:
            raise UsageError(
                f"Row {number} of {self.name} has {length:,} characters, and a row may have "
                f"{LONGEST_ROW:,}. Write its text as several rows, such as the lines of a .txt "
                "file: --packing fixed joins them and cuts them into full rows without loss."
            )

    def _pack(self, texts: Dataset, folder: Path) -> Dataset:
        from datasets import Dataset

        options: dict[str, Any] = {
            "batched": True,
            "load_from_cache_file": False,
            "cache_file_name": str(folder / "packed.arrow"),
            "new_fingerprint": digest(self.key, self._packing)[:32],
            "desc": "Packing",
        }
        length = self.arguments.length
        if self._packing == "fixed":
            cut = FixedPacking(length)
            rows = texts.map(cut, features=row_features(), **options)
            logger.info("%s: %d tokens fill no row of %d", self.name, len(cut.ids), length)
            return rows
        if self._packing == "best_fit" and len(texts):
            lengths = [len(ids) for batch in in_batches(texts) for ids in batch["input_ids"]]
            shared = Dataset.from_dict({"texts": best_fit(lengths, room=length)})
            return shared.map(
                pack_texts,
                with_indices=True,
                fn_kwargs={"texts": texts},
                remove_columns=["texts"],
                features=row_features(positions=True),
                **options,
            )
        return texts

    def _check(self, facts: dict[str, Any], read: int, *, without_tokens: int) -> None:
        length = self.arguments.length
        if not facts["texts"] and without_tokens:
            raise UsageError(
                f"{self.name} leaves zero {self.part} rows: the tokenizer in "
                f"{self.tokenizer.name_or_path} has no token for the text of {without_tokens} of "
                f"its {read} rows. Pass --tokenizer_name with one that fits the model and the text."
            )
        if not facts["texts"]:
            raise UsageError(
                f"{self.name} leaves zero {self.part} rows: none of its {read} rows has a token "
                f"to train on within --max_length {length}. Pass a longer "
                "--max_length, or data with text."
            )
        if not facts["rows"]:
            raise UsageError(
                f"{self.name} leaves zero {self.part} rows: its texts together don't fill one row "
                f"of --max_length {length}, which --packing fixed needs. Pass a shorter "
                "--max_length, more data, or another --packing."
            )


def _is_held_out(content: bytes, percentage: float) -> bool:
    """Whether a row is for validation, by its content alone, so that equal rows stay together."""
    seeded = hashlib.sha256(b"toolkit validation" + content).digest()
    return int.from_bytes(seeded[:8], "big") < percentage / 100 * 2**64
