"""The meaning of a data row: found from its columns, and converted into one form.

A row is text, a prompt with its completion, a question with its answer, or a chat; prompts and
completions are text or messages. `messages` reads the messages of a chat. A question with its
answer, such as Alpaca's columns, becomes a chat of two turns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from toolkit.data.arguments import DataArguments
from toolkit.data.messages import Chat, read_messages, read_tools, with_system
from toolkit.data.tokens import in_batches
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

Kind = Literal[
    "text", "prompt and completion", "question and answer", "chat", "chat prompt and completion"
]
LossOn = Literal["all", "completion", "assistant"]

_PAIR = ("prompt", "completion")
_CHAT_COLUMNS = ("messages", "conversations")
_TOOLS = ("tools", "functions")
_SYSTEM = ("system", "system_prompt")

_ANSWERS = {
    "instruction": ("output", "response", "completion", "answer"),
    "prompt": ("response",),
    "question": ("answer", "response"),
    "query": ("response", "answer"),
}
"""Columns of questions, and those of their answers beside them."""

_INPUTS = ("input", "context")
"""Columns of what a question is about."""

_LOSSES: dict[Kind, tuple[LossOn, ...]] = {
    "text": ("all",),
    "prompt and completion": ("completion", "all"),
    "question and answer": ("assistant", "all"),
    "chat": ("assistant", "all"),
    "chat prompt and completion": ("completion", "assistant", "all"),
}
"""The parts of a row that can be learned, by kind; the first is the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The columns that are trained on, and how."""

    kind: Kind
    columns: tuple[str, ...]
    loss_on: LossOn
    features: Mapping[str, Any]
    """Of the columns, as `datasets` describes them."""

    system: str | None = None
    tools: str | None = None
    """The columns that hold these, the last of `columns`."""

    @property
    def is_chat(self) -> bool:
        return self.kind not in ("text", "prompt and completion")


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
    if columns[0] in _ANSWERS and columns != _PAIR:
        kind = "question and answer"
    elif len(columns) == 2:
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
    system = tools = None
    if kind in ("chat", "question and answer"):
        system = next((column for column in _SYSTEM if column in dataset.column_names), None)
    if chats[0]:
        tools = next((column for column in _TOOLS if column in dataset.column_names), None)
    columns += tuple(column for column in (system, tools) if column is not None)
    features = {column: dataset.features[column] for column in columns}
    return Format(
        kind=kind, columns=columns, loss_on=loss_on, features=features, system=system, tools=tools
    )


def _columns(dataset: Dataset, name: str, arguments: DataArguments) -> tuple[str, ...]:
    """Return the columns that are trained on, or that ask for what is."""
    there = set(dataset.column_names)
    requested = arguments.text_column or arguments.messages_column
    chats = [column for column in _CHAT_COLUMNS if column in there]
    if requested is not None:
        columns: tuple[str, ...] = (requested,)
    elif set(_PAIR) <= there:
        columns = _PAIR
    elif not chats and (asked := _asked_columns(there, name)):
        columns = asked
    elif "text" in there or not chats:
        columns = ("text",)
        if chats:
            logger.info("%s has text and %s: --messages_column %s", name, chats[0], chats[0])
    else:
        columns = (chats[0],)
    is_tree = requested is None and {"parent_id", "role"} <= there
    if is_tree or not set(columns) <= there:
        missing = f"no column {requested!r}" if requested else "no column to train on"
        missing = "one message of a tree in each row, and no chats" if is_tree else missing
        raise UsageError(
            f"{name} has {missing}; its columns are: {', '.join(dataset.column_names) or 'none'}. "
            "Name the column with --text_column or --messages_column, or rename the columns to "
            "text, messages, prompt and completion, or instruction, input and output."
        )
    return columns


def _asked_columns(there: set[str], name: str) -> tuple[str, ...]:
    """Return the columns of a question, what it is about and its answer; none if there are none."""
    pairs = [
        (asked, answer)
        for asked, answers in _ANSWERS.items()
        for answer in answers
        if {asked, answer} <= there
    ]
    inputs = [column for column in _INPUTS if column in there]
    if pairs and (len(pairs) > 1 or len(inputs) > 1):
        listed = sorted({column for pair in pairs for column in pair}.union(inputs))
        raise UsageError(
            f"{name} can be read in several ways, by its columns {', '.join(listed)}: keep one "
            "question, one answer and at most one input, or name one column with --text_column."
        )
    return (pairs[0][0], *inputs, pairs[0][1]) if pairs else ()


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

    A question whose answer is blank gives a chat without messages.

    Raises:
        UsageError: it is no list of messages, or a message is not understood, or not text.
    """
    row = dict(zip(form.columns, values, strict=True))
    tools = read_tools(row.pop(form.tools), where) if form.tools else None
    system = row.pop(form.system) if form.system else None
    if form.kind == "question and answer":
        question, *contexts, answer = (text or "" for text in row.values())
        if not answer.strip():
            return Chat(messages=[], prompt=0, tools=None)
        # The template `alpaca` takes the question and its input apart.
        context = "".join(contexts) if "".join(contexts).strip() else ""
        asked = {"content": "\n\n".join(filter(str.strip, (question, context)))}
        asked |= {"role": "user", "instruction": question, "input": context}
        turns = [asked, {"role": "assistant", "content": answer}]
        return Chat(messages=with_system(system, turns, where), prompt=0, tools=None)
    parts = [read_messages(value, where) for value in row.values()]
    parts[0] = with_system(system, parts[0], where)
    return Chat(
        messages=[message for part in parts for message in part],
        prompt=len(parts[0]) if len(parts) == 2 else 0,
        tools=tools,
    )


def _as_written(value: Any, feature: Any) -> Any:
    """Remove Arrow's additions: a struct has the fields of every other row, as None."""
    from datasets import LargeList, List

    if isinstance(value, Mapping) and isinstance(feature, dict):
        present = {name: field for name, field in value.items() if field is not None}
        return {name: _as_written(field, feature[name]) for name, field in present.items()}
    if isinstance(value, list) and isinstance(feature, List | LargeList):
        return [_as_written(item, feature.feature) for item in value]
    return value
