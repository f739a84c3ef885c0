"""The flags that say which rows are trained on, in what form, and which are kept for validation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from toolkit.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class DataArguments:
    """Which rows are trained on; with neither a data set nor a file, the built-in ones."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "A data set on the Hub, or a folder with one."}
    )
    dataset_config_name: str | None = field(
        default=None, metadata={"help": "Configuration of the Hub data set."}
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of the Hub data set."})
    train_file: str | None = field(
        default=None, metadata={"help": "A jsonl, json, csv, tsv, parquet or txt file."}
    )
    streaming: bool = field(
        default=False,
        metadata={"help": "Fetch only the rows that the run needs, not the whole data."},
    )
    text_column: str | None = field(
        default=None,
        metadata={
            "help": "The column of text to train on; none: found among the usual names, prompt "
            "and completion first, then text, messages, conversations."
        },
    )
    messages_column: str | None = field(
        default=None, metadata={"help": "The column of chat messages to train on."}
    )
    chat_template: str | None = field(
        default=None,
        metadata={
            "help": "A jinja file, or chatml or roles, which come with the toolkit; none: the "
            "model's own, else one of these."
        },
    )
    loss_on: Literal["auto", "all", "completion", "assistant"] = field(
        default="auto",
        metadata={"help": "The tokens to learn; auto: completions, a chat's replies, all of text."},
    )
    max_length: int = field(
        default=128,
        metadata={
            "help": "Longer rows are cut to this many tokens.",
            "aliases": ["--block_size", "--block-size"],
        },
    )
    packing: Literal["none", "best_fit", "fixed"] = field(
        default="none",
        metadata={
            "help": "best_fit: whole texts share a row and don't see each other; fixed: rows of "
            "exactly --max_length, cut from a stream of texts, for benchmarks."
        },
    )
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Use only the first rows of the data."}
    )
    validation_file: str | None = field(
        default=None, metadata={"help": "A file of rows to evaluate on."}
    )
    validation_split: str | None = field(
        default=None,
        metadata={"help": "The Hub data set's split to evaluate on."},
    )
    validation_split_percentage: float | None = field(
        default=None,
        metadata={
            "help": "Part of the training rows to evaluate on and not to train on, chosen by "
            "content."
        },
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Evaluate on only the first of those rows."}
    )

    @property
    def asked_of_validation(self) -> list[str]:
        """The flags that ask for validation rows."""
        return [
            f"--{name}"
            for name in (
                "validation_file",
                "validation_split",
                "validation_split_percentage",
                "max_eval_samples",
            )
            if getattr(self, name) is not None
        ]

    @property
    def has_validation(self) -> bool:
        return bool(
            self.validation_file or self.validation_split or self.validation_split_percentage
        )

    def __post_init__(self) -> None:
        if self.dataset_name is not None and self.train_file is not None:
            raise UsageError("--dataset_name and --train_file exclude each other: pass one.")
        if self.dataset_config_name is not None and self.dataset_name is None:
            raise UsageError("--dataset_config_name needs --dataset_name.")
        if self.text_column is not None and self.messages_column is not None:
            raise UsageError("--text_column and --messages_column exclude each other: pass one.")
        if self.streaming and self.dataset_name is None and self.train_file is None:
            raise UsageError("--streaming needs --dataset_name or --train_file.")
        if self.max_length < 2:
            raise UsageError(
                f"--max_length {self.max_length} leaves no token to predict: use 2 or more."
            )
        if self.max_train_samples is not None and self.max_train_samples < 1:
            raise UsageError(
                f"--max_train_samples {self.max_train_samples} leaves zero training rows: "
                "use 1 or more, or leave it out."
            )
        self._check_validation()

    def _check_validation(self) -> None:
        named = [flag for flag in self.asked_of_validation if flag != "--max_eval_samples"]
        if len(named) > 1:
            raise UsageError(f"{' and '.join(named)} exclude each other: pass one.")
        if self.validation_split is not None and self.dataset_name is None:
            raise UsageError("--validation_split needs --dataset_name.")
        percentage = self.validation_split_percentage
        if percentage is not None and not 0 < percentage < 100:
            raise UsageError(
                f"--validation_split_percentage {percentage:g}: use a number between 0 and 100."
            )
        if self.max_eval_samples is not None and (self.max_eval_samples < 1 or not named):
            raise UsageError(
                f"--max_eval_samples {self.max_eval_samples} needs to be 1 or more, and rows to "
                "evaluate on: --validation_file, --validation_split or "
                "--validation_split_percentage."
            )
