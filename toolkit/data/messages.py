"""The messages of a chat, from the formats in which they are published into one.

OpenAI's (`role` and `content`, which may be a list of parts), Anthropic's (parts that call tools
and hold their results) and ShareGPT's (`from` and `value`) become messages of text, with
`tool_calls` as transformers' templates take them. What is not text is refused by its row and part.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from toolkit.errors import UsageError

ROLES: Final = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model", "bing", "bard"), "assistant"),
    "function_call": "assistant",
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
}
"""Speakers in the data, and the roles of chat templates that they have."""

_TEXTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of parts that are text, and the fields that hold it."""

_CONTENTS: Final = ("content", "value", "text", "refusal", "audio")
"""Fields that hold what a message says, of which it has one."""

_JSON_TEXT: Final = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """One conversation; `prompt` counts the messages at its start that were only asked."""

    messages: list[dict[str, Any]]
    prompt: int
    tools: list[Any] | None


def read_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Return a list of messages in OpenAI's style, with text as their content.

    Raises:
        UsageError: it is no list of messages, or a message is not understood, or not text.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UsageError(f"{where} holds {value!r:.60} where a list of messages should be.")
    try:
        return [read for message in value for read in _message(message, where)]
    except (AttributeError, KeyError, TypeError) as error:
        raise UsageError(
            f"{where} has a part or a call of a tool that is not as OpenAI or Anthropic write it: "
            f"{type(error).__name__}: {error}. Correct the row."
        ) from error


def with_system(value: Any, messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return the messages behind the system prompt of a column, if there is one.

    Raises:
        UsageError: it is not text.
    """
    system = _text(value or "", f"{where}, column system,")
    if not system.strip():
        return messages
    return [{"role": "system", "content": system}, *messages]


def read_tools(value: Any, where: str) -> list[Any] | None:
    """Return the descriptions of tools as templates take them; Anthropic's are converted.

    Raises:
        UsageError: they are no list, or no JSON.
    """
    try:
        value = json.loads(value or "null") if isinstance(value, str) else value
        # A column of JSON may hold each schema as text.
        tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in value or []]
        return list(map(_tool, tools)) or None
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"The tools of {where} are {value!r:.60}, not a list of JSON schemas."
        ) from error


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if (schema := tool.get("input_schema")) is None:
        return tool
    function = {name: value for name, value in tool.items() if name != "input_schema"}
    return {"type": "function", "function": function | {"parameters": schema}}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of a tool with its arguments as an object, where they are JSON."""
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    with suppress(TypeError, ValueError):
        parsed = json.loads(arguments)  # pyright: ignore[reportArgumentType]
        arguments = parsed if isinstance(parsed, dict) else arguments
    others = call if "function" in call else {"type": "function"}
    return {**others, "function": {**function, "arguments": arguments}}


def functions_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the name and arguments of each call of a tool in the messages."""
    for message in messages:
        yield from (call["function"] for call in message.get("tool_calls") or ())


def texts_of(chat: Chat) -> Iterator[tuple[str, str, int]]:
    """Yield what a template has to render of a chat: what it is, its text, and how many times.

    Of thoughts these are the last ones alone: templates leave out those of earlier turns.
    """
    for number, message in enumerate(chat.messages, 1):
        for field in ("instruction", "input") if "input" in message else ("content",):
            text = str(message.get(field) or "").rpartition("</think>")[2].strip()
            yield f"message {number}, from {message['role']}", text, 1
    # Tools are described in front of the chat, so a call is one more mention of its name.
    names = Counter(str(tool.get("function", tool).get("name", "")) for tool in chat.tools or ())
    for name in names:
        yield "the tools", name, 1
    for function in functions_of(chat.messages):
        name = str(function.get("name", ""))
        names[name] += 1
        yield "a call of a tool", name, names[name]
        if isinstance(arguments := function["arguments"], dict):
            for text in _JSON_TEXT.findall(json.dumps(arguments, ensure_ascii=False)):
                yield "the arguments of a call of a tool", json.loads(text).strip(), 1
    last = chat.messages[-1]
    thought = last.get("reasoning_content") or last.get("thinking") or ""
    yield "the thoughts of the assistant", str(thought).strip(), 1


def _message(message: Any, where: str) -> Iterator[dict[str, Any]]:
    """Yield a message as one or more: results of tools are messages of their own."""
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} holds the message {message!r:.60}, which is no mapping.")
    message = {name: value for name, value in message.items() if value is not None}
    field = "role" if isinstance(message.get("role"), str) else "from"
    speaker = message.pop(field, None)
    if not isinstance(speaker, str):
        raise UsageError(
            f"{where} holds a message with the fields {', '.join(message) or 'none'}: write role "
            "and content, or from and value."
        )
    # A template may know more roles than these; other speakers are none of its.
    role = ROLES.get(speaker.lower(), speaker if field == "role" else None)
    if role is None:
        raise UsageError(
            f"{where} has a message from {speaker!r}; known are {', '.join(ROLES)}. Rename it."
        )
    name = next((name for name in _CONTENTS if name in message), None)
    content = None if name is None else message.pop(name)
    if isinstance(call := message.pop("function_call", None), Mapping):  # OpenAI's until 2023
        message["tool_calls"] = [call]
    if message.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    if isinstance(content, list):
        yield from _of_parts(role, content, message, where)
        return
    # Calls of tools say something, and thoughts: text or lists beside the name of the speaker.
    others = (value for other, value in message.items() if other != "name")
    if content is None and not any(isinstance(v, str | list | dict) and v for v in others):
        raise UsageError(
            f"{where} has a message from {speaker!r} whose "
            f"{'content' if field == 'role' else 'value'} is null. Write what it says, or remove "
            "the row."
        )
    if not isinstance(content, str | None):
        raise UsageError(_not_text(f"{where}, message from {speaker},", name))
    yield {"role": role, "content": content or ""} | message


def _of_parts(
    role: str, parts: Sequence[Any], others: dict[str, Any], where: str
) -> Iterator[dict[str, Any]]:
    texts: list[str] = []
    calls: list[Any] = others.pop("tool_calls", [])
    for number, part in enumerate(parts, 1):
        place = f"{where}, part {number} of a message from {role}"
        kind = part.get("type") if isinstance(part, Mapping) else None
        # A message of a template has its text first, and then its calls.
        if (calls and kind != "tool_use") or (texts and kind == "tool_result"):
            raise UsageError(f"{place} is out of order: write it as a message of its own.")
        if kind == "tool_use":
            function = {"name": part["name"], "arguments": part.get("input") or {}}
            calls.append({"id": part["id"], "type": "function", "function": function})
        elif kind == "tool_result":
            content = _text(part.get("content") or "", place)
            yield {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": content}
        elif kind == "thinking":
            others["reasoning_content"] = others.get("reasoning_content", "") + part["thinking"]
        else:
            texts.append(_text([part], place))
    if calls:
        others["tool_calls"] = calls
    if texts or calls or "reasoning_content" in others or not parts:
        yield {"role": role, "content": "".join(texts)} | others


def _text(parts: str | Sequence[Any], where: str) -> str:
    """Return the text of parts that are text."""
    texts: list[str] = []
    for part in [parts] if isinstance(parts, str) else parts:
        fields = part if isinstance(part, Mapping) else {"text": part}
        kind = fields.get("type", "text")
        text = fields.get(_TEXTS.get(kind, ""))
        if not isinstance(text, str):
            raise UsageError(_not_text(where, kind))
        texts.append(text)
    return "".join(texts)


def _not_text(where: str, kind: object) -> str:
    return f"{where} is not text ({kind}), and only text is trained: remove the part or the row."
