"""The flags for the training rows, their form, and the rows kept for validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from toolkit.data.flags import flag
from toolkit.errors import UsageError

LENGTH_OF_BUILT_IN: Final = 128
MOST_BY_ITSELF: Final = 2048
"""Tokens from which rows are cut where no --max_length is passed: memory grows with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataArguments:
    """The rows to train on; the built-in rows if neither a data set nor a file is given."""

    dataset_name: str | None = flag(None, "A data set on the Hub, or a folder with one.")
    dataset_config_name: str | None = flag(None, "Configuration of the Hub data set.")
    dataset_split: str = flag("train", "Split of the Hub data set.")
    train_file: str | None = flag(None, "A json(l), csv, tsv, parquet or txt file, or a folder.")
    streaming: bool = flag(False, "Fetch only the rows that the run needs, not the whole data.")
    text_column: str | None = flag(
        None,
        "The column of text to train on; none: found among the usual names, prompt and completion "
        "first, then instruction and output, text, messages, conversations.",
    )
    messages_column: str | None = flag(None, "The column of chat messages to train on.")
    chat_template: str | None = flag(
        None,
        "A jinja file, or alpaca, chatml or roles, which come with the toolkit; none: the model's "
        "own, else one of these.",
    )
    loss_on: Literal["auto", "all", "completion", "assistant"] = flag(
        "auto", "The tokens to learn; auto: completions, a chat's replies, all of text."
    )
    max_length: int | None = flag(
        None,
        "Longer rows are cut to this many tokens; none: as long as the longest row, at most "
        f"{MOST_BY_ITSELF} and the model's positions ({LENGTH_OF_BUILT_IN} for the built-in rows).",
        aliases=["--block_size", "--block-size"],
    )
    packing: Literal["none", "best_fit", "fixed"] = flag(
        "none",
        "best_fit: whole texts share a row and don't see each other; fixed: rows of exactly "
        "--max_length, cut from a stream of texts, for benchmarks.",
    )
    max_train_samples: int | None = flag(None, "Use only the first rows of the data.")
    validation_file: str | None = flag(None, "A file of rows to evaluate on.")
    validation_split: str | None = flag(None, "The Hub data set's split to evaluate on.")
    validation_split_percentage: float | None = flag(
        None, "Part of the training rows to evaluate on and not to train on, chosen by content."
    )
    max_eval_samples: int | None = flag(None, "Evaluate on only the first of those rows.")

    @property
    def is_built_in(self) -> bool:
        return self.dataset_name is None and self.train_file is None

    @property
    def length(self) -> int:
        """Tokens that rows are cut to, where the model has positions for so many."""
        by_itself = LENGTH_OF_BUILT_IN if self.is_built_in else MOST_BY_ITSELF
        return self.max_length or by_itself

    @property
    def validation_flags(self) -> list[str]:
        """The flags that name the source of validation rows."""
        names = ("validation_file", "validation_split", "validation_split_percentage")
        return [f"--{name}" for name in names if getattr(self, name) is not None]

    @property
    def has_validation(self) -> bool:
        return any(getattr(self, flag[2:]) for flag in self.validation_flags)

    def __post_init__(self) -> None:
        if self.dataset_name is not None and self.train_file is not None:
            raise UsageError("--dataset_name and --train_file exclude each other: pass one.")
        if self.dataset_config_name is not None and self.dataset_name is None:
            raise UsageError("--dataset_config_name needs --dataset_name.")
        if self.text_column is not None and self.messages_column is not None:
            raise UsageError("--text_column and --messages_column exclude each other: pass one.")
        if self.streaming and self.is_built_in:
            raise UsageError("--streaming needs --dataset_name or --train_file.")
        if self.max_length is not None and self.max_length < 2:
            raise UsageError(
                f"--max_length {self.max_length} leaves no token to predict: use 2 or more."
            )
        if self.max_train_samples is not None and self.max_train_samples < 1:
            raise UsageError(
                f"--max_train_samples {self.max_train_samples} leaves zero training rows: "
                "use 1 or more, or leave it out."
            )
        if len(self.validation_flags) > 1:
            raise UsageError(f"{' and '.join(self.validation_flags)} exclude each other: pass one.")
        if self.validation_split is not None and self.dataset_name is None:
            raise UsageError("--validation_split needs --dataset_name.")
        percentage = self.validation_split_percentage
        if percentage is not None and not 0 < percentage < 100:
            raise UsageError(
                f"--validation_split_percentage {percentage:g}: use a number between 0 and 100."
            )
        limit = self.max_eval_samples
        if limit is not None and (limit < 1 or not self.validation_flags):
            raise UsageError(
                f"--max_eval_samples {limit} needs to be 1 or more, and rows to "
                "evaluate on: --validation_file, --validation_split or "
                "--validation_split_percentage."
            )
