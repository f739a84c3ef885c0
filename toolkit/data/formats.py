"""The meaning of a data row: found from its columns, and converted into one form.

A row is text, a prompt with its completion, or a chat; prompts and completions are text or
messages. Messages come in OpenAI's style (`role`, `content`) or ShareGPT's (`from`, `value`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from toolkit.data.arguments import DataArguments
from toolkit.data.tokens import in_batches
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

Kind = Literal["text", "prompt and completion", "chat", "chat prompt and completion"]
LossOn = Literal["all", "completion", "assistant"]

_PAIR = ("prompt", "completion")
_CHAT_COLUMNS = ("messages", "conversations")
_TOOLS = "tools"

_LOSSES: dict[Kind, tuple[LossOn, ...]] = {
    "text": ("all",),
    "prompt and completion": ("completion", "all"),
    "chat": ("assistant", "all"),
    "chat prompt and completion": ("completion", "assistant", "all"),
}
"""The parts of a row that can be learned, by kind; the first is the default."""

ROLES = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model", "bing", "bard"), "assistant"),
    "function_call": "assistant",
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
}
"""Speakers in ShareGPT-style data, and the roles of chat templates that they have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The columns that are trained on, and how."""

    kind: Kind
    columns: tuple[str, ...]
    loss_on: LossOn
    features: Mapping[str, Any]
    """Of the columns, as `datasets` describes them."""

    tools: bool = False
    """Whether the last column holds the tools of a chat."""

    @property
    def is_chat(self) -> bool:
        return self.kind.startswith("chat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """One conversation; `prompt` counts the messages at its start that were only asked."""

    messages: list[dict[str, Any]]
    prompt: int
    tools: list[Any] | None


def find_format(dataset: Dataset, name: str, arguments: DataArguments) -> Format:
    """Return the format of the columns of `dataset`.

    Raises:
        UsageError: no column can be trained on, or not as `--loss_on` asks.
    """
    if not len(dataset):
        raise UsageError(f"{name} has zero training rows: pass data with rows.")
    columns = _columns(dataset, name, arguments)
    chats = [_holds_messages(dataset.features[column]) for column in columns]
    if len(set(chats)) > 1:
        raise UsageError(
            f"Of the columns {' and '.join(columns)} of {name} one holds text and the other "
            "messages: write both as text or both as lists of messages."
        )
    if not chats[0]:
        for column in columns:
            _check_text(dataset, name, column)
    kind: Kind
    if len(columns) == 2:
        kind = "chat prompt and completion" if chats[0] else "prompt and completion"
    else:
        kind = "chat" if chats[0] else "text"
        if chats[0] and arguments.text_column is not None:
            _check_text(dataset, name, columns[0])
        if not chats[0] and arguments.messages_column is not None:
            raise UsageError(
                f"The column {columns[0]!r} of {name} holds {dataset.features[columns[0]]}, not "
                "messages. Pass it as --text_column if it is text."
            )
    allowed = _LOSSES[kind]
    loss_on = allowed[0] if arguments.loss_on == "auto" else arguments.loss_on
    if loss_on not in allowed:
        raise UsageError(
            f"--loss_on {loss_on} does not fit {name}, whose rows are {kind}: use "
            f"{' or '.join(allowed)}, or leave it out for {allowed[0]}."
        )
    tools = chats[0] and _TOOLS in dataset.column_names
    columns = (*columns, _TOOLS) if tools else columns
    features = {column: dataset.features[column] for column in columns}
    return Format(kind=kind, columns=columns, loss_on=loss_on, features=features, tools=tools)


def _columns(dataset: Dataset, name: str, arguments: DataArguments) -> tuple[str, ...]:
    there = set(dataset.column_names)
    requested = arguments.text_column or arguments.messages_column
    chats = [column for column in _CHAT_COLUMNS if column in there]
    if requested is not None:
        columns: tuple[str, ...] = (requested,)
    elif set(_PAIR) <= there:
        columns = _PAIR
    elif "text" in there or not chats:
        columns = ("text",)
        if chats:
            logger.info("%s has text and %s: --messages_column %s", name, chats[0], chats[0])
    else:
        columns = (chats[0],)
    if not set(columns) <= there:
        missing = f"no column {requested!r}" if requested else "no column to train on"
        raise UsageError(
            f"{name} has {missing}; its columns are: {', '.join(dataset.column_names) or 'none'}. "
            "Name the column with --text_column or --messages_column, or rename the columns to "
            "text, messages, or prompt and completion."
        )
    return columns


def _check_text(dataset: Dataset, name: str, column: str) -> None:
    from datasets import Value

    feature = dataset.features[column]
    if not (isinstance(feature, Value) and feature.dtype in ("string", "large_string", "null")):
        raise UsageError(
            f"The column {column!r} of {name} holds {feature}, not text. Name a list of messages "
            "with --messages_column, for the chat template; or write the text into a column of its "
            "own and pass --text_column."
        )


def _holds_messages(feature: Any) -> bool:
    """Whether a column holds lists of mappings; their meaning is checked row by row."""
    from datasets import Json, LargeList, List

    if isinstance(feature, List | LargeList):
        return isinstance(feature.feature, dict | Json)
    return isinstance(feature, Json)


def read_rows(dataset: Dataset, form: Format) -> Iterator[list[Any]]:
    """Yield the columns that are trained on, row by row, as they were written."""
    for batch in in_batches(dataset.select_columns(list(form.columns))):
        yield from read_batch(batch, form)


def read_batch(batch: Mapping[str, Sequence[Any]], form: Format) -> Iterator[list[Any]]:
    """Yield the rows of one batch, as they were written."""
    for values in zip(*(batch[name] for name in form.columns), strict=True):
        pairs = zip(form.columns, values, strict=True)
        yield [_as_written(value, form.features[name]) for name, value in pairs]


def read_chat(values: Sequence[Any], form: Format, *, where: str) -> Chat:
    """Return the conversation in one row's columns in OpenAI's style; errors name it by `where`.

    Raises:
        UsageError: it is no list of messages, or a role or speaker is not known.
    """
    tools = _tools(values[-1], where) if form.tools else None
    parts = [_messages(value, where) for value in (values[:-1] if form.tools else values)]
    return Chat(
        messages=[message for part in parts for message in part],
        prompt=len(parts[0]) if len(parts) == 2 else 0,
        tools=tools,
    )


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UsageError(f"{where} holds {value!r:.60} where a list of messages should be.")
    return [_message(message, where) for message in value]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} holds the message {message!r:.60}, which is no mapping.")
    message = {name: value for name, value in message.items() if value is not None}
    if isinstance(message.get("role"), str):
        _check_says_something(message, "role", "content", where)
        return message
    speaker = message.get("from")
    if not isinstance(speaker, str):
        raise UsageError(
            f"{where} holds a message with the fields {', '.join(message) or 'none'}: write role "
            "and content, or from and value."
        )
    if speaker.lower() not in ROLES:
        raise UsageError(
            f"{where} has a message from {speaker!r}; known are {', '.join(ROLES)}. Rename it."
        )
    _check_says_something(message, "from", "value", where)
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    return {"role": ROLES[speaker.lower()], "content": message.get("value", "")} | others


def _check_says_something(
    message: Mapping[str, Any], speaker: str, content: str, where: str
) -> None:
    """Refuse a message whose content is null, unless it says something by other means.

    Calls of tools do, or thoughts: text or lists beside the name of the speaker.
    """
    others = (value for name, value in message.items() if name not in (speaker, "name"))
    if content not in message and not any(isinstance(v, str | list | dict) and v for v in others):
        raise UsageError(
            f"{where} has a message from {message[speaker]!r} whose {content} is null. Write what "
            "it says, or remove the row."
        )


def _tools(value: Any, where: str) -> list[Any] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UsageError(f"The tools of {where} are no JSON: {error}.") from error
    if value and not isinstance(value, list):
        raise UsageError(f"The tools of {where} are {value!r:.60}, not a list of JSON schemas.")
    # A column of JSON may hold each schema as text.
    return [json.loads(tool) if isinstance(tool, str) else tool for tool in value or []] or None


def _as_written(value: Any, feature: Any) -> Any:
    """Remove Arrow's additions: a struct has the fields of every other row, as None."""
    from datasets import LargeList, List

    if isinstance(value, Mapping) and isinstance(feature, dict):
        present = {name: field for name, field in value.items() if field is not None}
        return {name: _as_written(field, feature[name]) for name, field in present.items()}
    if isinstance(value, list) and isinstance(feature, List | LargeList):
        return [_as_written(item, feature.feature) for item in value]
    return value
