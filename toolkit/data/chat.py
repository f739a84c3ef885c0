"""Chats: rendered by a template, and the assistant's turns found in them by token positions.

The template's `{% generation %}` markers say which tokens the assistant wrote. Without them
transformers gives an empty mask, and a loss that looks healthy: there the turns are found by
rendering the conversation up to each of them, and a template that renders a conversation's start
differently once it goes on is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from toolkit.data.formats import Format, Kind, read_batch, read_chat
from toolkit.data.messages import Chat, functions_of, texts_of
from toolkit.data.tokens import (
    CUT_AWAY,
    IGNORED,
    Tally,
    add_row,
    common_prefix,
    empty_ids,
    empty_rows,
    supervised_tokens,
)
from toolkit.errors import UsageError, sentence_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHIPPED = Path(__file__).with_name("templates")

MODELS_OWN = "the model's own"

_QUESTION = "Q7z"
_ANSWER = "A7z"
"""Words that no chat template contains."""

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A chat template, and where it comes from."""

    name: str
    text: str

    @property
    def marks_turns(self) -> bool:
        return _MARKER.search(self.text) is not None

    def facts(self) -> dict[str, str]:
        return {"name": self.name, "sha256": hashlib.sha256(self.text.encode()).hexdigest()}


def shipped_templates() -> dict[str, str]:
    """Return the templates that come with the toolkit, by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(SHIPPED.glob("*.jinja"))}


def requested_template(name: str) -> Template:
    """Return the template that `--chat_template` names: a shipped one's name, or a file.

    Raises:
        UsageError: it is neither.
    """
    shipped = shipped_templates()
    if name in shipped:
        return Template(name=name, text=shipped[name])
    try:
        return Template(name=Path(name).name, text=Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--chat_template {name} is no file that can be read ({sentence_of(error)}) and none "
            f"of the shipped ones: {', '.join(shipped)}."
        ) from error


def find_template(
    tokenizer: PreTrainedTokenizerBase, requested: str | None, kind: Kind = "chat"
) -> Template:
    """Return the requested template, else the model's, else a shipped one.

    Of the shipped ones, questions and answers get `alpaca`; chats get `chatml` if the tokenizer has
    its two tokens, and otherwise `roles`, which needs none.

    Raises:
        UsageError: there is no such template, or the tokenizer lacks what it needs.
    """
    if requested is not None:
        template = requested_template(requested)
    elif tokenizer.chat_template is not None:
        try:
            return Template(name=MODELS_OWN, text=tokenizer.get_chat_template())
        except ValueError as error:  # several, none of them the default
            raise UsageError(
                f"The model's chat template can't be chosen: {sentence_of(error)} Pass one as "
                "--chat_template FILE."
            ) from error
    else:
        for_chats = "chatml" if _knows_chatml(tokenizer) else "roles"
        template = requested_template("alpaca" if kind == "question and answer" else for_chats)
    if template.name == "chatml" and not _knows_chatml(tokenizer):
        raise UsageError(
            "The chat template chatml needs <|im_start|> and <|im_end|>, and the tokenizer does "
            "not have them as tokens: pass --chat_template roles."
        )
    if template.name in ("alpaca", "roles") and tokenizer.eos_token is None:
        raise UsageError(
            f"The chat template {template.name} ends turns with the end of text, and the tokenizer "
            "has no such token: pass --chat_template FILE."
        )
    return template


def brought(template: Mapping[str, str] | None, asked: Mapping[str, Any]) -> str | None:
    """Return the name of a shipped template that was not asked for; None for any other.

    Args:
        template: Its `facts`; None of rows without one.
        asked: The flags of the data that were passed, with their values.
    """
    if template is None or template["name"] == MODELS_OWN or "chat_template" in asked:
        return None
    return template["name"]


def _knows_chatml(tokenizer: PreTrainedTokenizerBase) -> bool:
    return all(
        len(ids) == 1 and ids[0] != tokenizer.unk_token_id
        for ids in (
            tokenizer.encode(token, add_special_tokens=False)
            for token in ("<|im_start|>", "<|im_end|>")
        )
    )


def turn_end(tokenizer: Any, template: str | None = None) -> int | None:
    """Return the token that ends the assistant's turns in a template, by default the tokenizer's.

    It is found in a rendered chat, as the first special token after the assistant's words. Some
    templates put it in front of the next turn instead, as GLM's: there in a chat that goes on.
    None if there is no template, or if its turns end in ordinary text.
    """
    if template is None and getattr(tokenizer, "chat_template", None) is None:
        return None
    from jinja2 import TemplateError

    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    question = {"role": "user", "content": _QUESTION}
    replied = [question, {"role": "assistant", "content": _ANSWER}]
    for chat in (replied, [*replied, question]):
        try:
            text = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
        except (TemplateError, TypeError, ValueError):  # it may need more than this chat has
            return None
        behind = text.rpartition(_ANSWER)[2].lstrip()
        ids = tokenizer.encode(behind, add_special_tokens=False) if behind else []
        if ids and ids[0] in special and ids[0] != tokenizer.unk_token_id:
            return ids[0]
    return None


@dataclass
class ChatTokeniser:
    """Turns batches of conversations into rows; made for `datasets.map`.

    The token that ends a turn is learned with it, whether or not it also pads, and also where the
    template puts it in front of the next turn. A turn of the assistant that opens a chat replies to
    nothing, and is not learned. A chat whose end is no special token gets the end of text. Rows
    that `max_length` cut before the first learned token are left out; a row without one even before
    it is cut is an error, and so is one whose replies are all empty.
    """

    tokenizer: PreTrainedTokenizerBase
    template: Template
    form: Format
    max_length: int
    name: str
    tally: Tally

    def __post_init__(self) -> None:
        added = self.tokenizer.added_tokens_decoder
        special = {number for number, token in added.items() if token.special}
        self.special = special | set(self.tokenizer.all_special_ids)
        self.uses_markers = self.template.marks_turns and self.tokenizer.is_fast
        end = turn_end(self.tokenizer, self.template.text)
        self.ends = {end, cast("int | None", self.tokenizer.eos_token_id)} - {None}
        self.empty = self.ends | empty_ids(self.tokenizer)

    def __call__(
        self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]
    ) -> dict[str, list[Any]]:
        rows = empty_rows()
        for number, values in zip(numbers, read_batch(batch, self.form), strict=True):
            where = f"Row {number} of {self.name}"
            chat = read_chat(values, self.form, where=where)
            if self.form.kind == "question and answer" and not chat.messages:
                self.tally.dropped["empty"] += 1
                continue
            ids, learned = self.tokens(chat, where=where)
            pairs = zip(ids, learned, strict=True)
            labels = [token if is_learned else IGNORED for token, is_learned in pairs]
            if not supervised_tokens(labels):
                raise UsageError(self._nothing_learned(where))
            text = [token for token in labels if token != IGNORED and token not in self.empty]
            if not str(self.tokenizer.decode(text)).strip():
                raise UsageError(
                    f"{where} has nothing to learn but the end of a turn: what the assistant says "
                    "in it is empty, or text that the tokenizer has no token for. Remove or "
                    "correct the row."
                )
            self.tally.cut(len(ids), self.max_length)
            ids, labels = ids[: self.max_length], labels[: self.max_length]
            if supervised_tokens(labels):
                add_row(rows, ids, labels, number)
            else:
                self.tally.dropped[CUT_AWAY] += 1
        return rows

    def tokens(self, chat: Chat, *, where: str) -> tuple[list[int], list[bool]]:
        """Return the whole conversation's token ids, and which of them are learned."""
        if not chat.messages:
            raise UsageError(f"{where} has no messages: remove it.")
        chat = self._fitted(chat, where)
        text = self._render(chat, where)
        self._check_complete(chat, text, where)
        is_whole = all(map(_is_learned, chat.messages))
        if self.form.loss_on == "assistant" and self.uses_markers and is_whole:
            ids, learned = self._marked(chat, where)
            self._learn_ends(ids, learned)
            if chat.messages[0]["role"] == "assistant":
                opening = Chat(messages=chat.messages[:1], prompt=0, tools=chat.tools)
                taken = common_prefix(self._marked(opening, where)[0], ids)
                learned[:taken] = [False] * taken
        else:
            ids, learned = self._by_position(text, self._spans(chat, text, where))
            if self.form.loss_on == "assistant":
                self._learn_ends(ids, learned)
        if chat.messages[-1]["role"] == "assistant" and _is_learned(chat.messages[-1]):
            self._end(ids, learned)
        return ids, learned

    def _fitted(self, chat: Chat, where: str) -> Chat:
        """Return a chat with the roles and fields that the template knows."""
        renamed = {} if "developer" in self.template.text else {"developer": "system"}
        chat = replace(
            chat, messages=[m | {"role": renamed.get(m["role"], m["role"])} for m in chat.messages]
        )
        functions = list(functions_of(chat.messages))
        if not functions:
            return chat
        # Most templates take the arguments of a call as an object. Those that expect JSON fail, or
        # write an object down in Python's form.
        with suppress(UsageError):
            rendered = self._render(chat, where)
            if not any(f["arguments"] and repr(f["arguments"]) in rendered for f in functions):
                return chat
        as_json = replace(chat, messages=deepcopy(chat.messages))
        for function in functions_of(as_json.messages):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        with suppress(UsageError):
            self._render(as_json, where)
            return as_json
        return chat

    def _check_complete(self, chat: Chat, rendered: str, where: str) -> None:
        """Refuse a chat of which the template leaves something out, as without a word it would."""
        for what, text, times in texts_of(chat):
            forms = {text, *(json.dumps(text, ensure_ascii=a)[1:-1] for a in (False, True))}
            if sum(rendered.count(form) for form in forms) < times:
                raise UsageError(
                    f"{where}: the chat template ({self.template.name}) leaves out {what}. Pass "
                    "another --chat_template, or remove it from the row."
                )

    def _spans(self, chat: Chat, text: str, where: str) -> list[tuple[int, int]]:
        """Return the characters of `text` that are learned."""
        if self.form.loss_on == "all":
            return [(0, len(text))]
        if self.form.loss_on == "completion":
            return [(self._prefix(chat, chat.prompt, text, where), len(text))]
        return [
            (
                self._prefix(chat, n, text, where),
                self._prefix(chat, n + 1, text, where, header=False),
            )
            for n, message in enumerate(chat.messages)
            if message["role"] == "assistant" and n and _is_learned(message)
        ]

    def _prefix(self, chat: Chat, count: int, text: str, where: str, *, header: bool = True) -> int:
        """Return how much of `text` the first messages take; `header`: with the reply's header."""
        first = Chat(messages=chat.messages[:count], prompt=0, tools=chat.tools)
        start = self._render(first, where, header=header) if count else ""
        if not header and count < len(chat.messages):
            # Phi-3's template ends a conversation, but not each turn, with the end of text.
            start = start.removesuffix(str(self.tokenizer.eos_token or ""))
        if not text.startswith(start):
            raise UsageError(
                f"{where}: the chat template ({self.template.name}) renders the first {count} "
                "messages differently when more follow, so the assistant's tokens can't be told "
                "by their place. Pass --chat_template FILE with {% generation %} around what the "
                f"assistant writes, or one of: {', '.join(shipped_templates())}."
            )
        return len(start)

    def _marked(self, chat: Chat, where: str) -> tuple[list[int], list[bool]]:
        marked = self._apply(
            chat, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(marked["input_ids"]), [bool(mark) for mark in marked["assistant_masks"]]

    def _render(self, chat: Chat, where: str, *, header: bool = False) -> str:
        return self._apply(chat, where, tokenize=False, add_generation_prompt=header)

    def _apply(self, chat: Chat, where: str, **options: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                chat.messages, tools=chat.tools, chat_template=self.template.text, **options
            )
        # Templates raise their own errors, and stumble over fields that a message doesn't have.
        except (TemplateError, TypeError, ValueError) as error:
            raise UsageError(
                f"{where} does not go through the chat template ({self.template.name}): "
                f"{sentence_of(error)} Correct the row, or pass another --chat_template."
            ) from error

    def _by_position(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[bool]]:
        """Tokenise `text`; a token is learned where it reaches into a span.

        Text after the special token at the end of a span, such as a line break, is not learned.
        """
        if self.tokenizer.is_fast:
            coded = self.tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            ids, places = list(coded["input_ids"]), coded["offset_mapping"]
            learned = [
                any(start < last and first < end for first, last in spans) for start, end in places
            ]
        else:
            ids, learned = self._by_prefixes(text, spans)
        for end in _ends(learned):
            begin = end
            while begin and learned[begin - 1] and ids[begin - 1] not in self.special:
                begin -= 1
            rest = str(self.tokenizer.decode(ids[begin:end]))
            if begin and learned[begin - 1] and not rest.strip():
                learned[begin:end] = [False] * (end - begin)
        return ids, learned

    def _by_prefixes(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[bool]]:
        """Do the same with tokenizers that give no offsets of their tokens."""

        def tokens(part: str) -> list[int]:
            return self.tokenizer.encode(part, add_special_tokens=False)

        ids = tokens(text)
        learned = [False] * len(ids)
        for first, last in spans:
            begin = common_prefix(tokens(text[:first]), ids)
            end = len(ids) if last == len(text) else common_prefix(tokens(text[:last]), ids)
            learned[begin:end] = [True] * (end - begin)
        return ids, learned

    def _learn_ends(self, ids: list[int], learned: list[bool]) -> None:
        """Learn the ends of turns that stand behind them: in front of the next turn, for one.

        Where no marker tells what the assistant wrote, any special token behind its words ends
        them: GLM's templates end a call of a tool with another token than a reply.
        """
        # A list: of two ends in a row the second may begin the next turn (bos = eos).
        for behind in list(_ends(learned)):
            at, last = behind, ids[behind - 1]
            while at < len(ids) and self._is_blank(ids[at]):
                at += 1
            if at == len(ids) or last in self.ends:
                continue
            unmarked = not self.uses_markers and last not in self.special
            if ids[at] in self.ends or (unmarked and ids[at] in self.special):
                learned[behind : at + 1] = [True] * (at + 1 - behind)

    def _is_blank(self, token: int) -> bool:
        return token not in self.special and not str(self.tokenizer.decode([token])).strip()

    def _end(self, ids: list[int], learned: list[bool]) -> None:
        """Have a chat that ends without a special token end with the end of text, learned."""
        eos = cast("int | None", self.tokenizer.eos_token_id)
        last = max((at for at, is_learned in enumerate(learned) if is_learned), default=None)
        if last is None or eos is None or self.special & set(ids[max(last - 1, 0) :]):
            return
        learned[last + 1 :] = [True] * (len(ids) - last - 1)
        ids.append(eos)
        learned.append(True)

    def _nothing_learned(self, where: str) -> str:
        parts = {"assistant": "turn of the assistant", "completion": "completion", "all": "token"}
        why = f"has no {parts[self.form.loss_on]} that the loss could be taken on"
        if self.uses_markers and self.form.loss_on == "assistant":
            why += f", or the chat template ({self.template.name}) marks none in it"
        return f"{where} {why}. Remove or correct the row, or pass --loss_on all."


def _is_learned(message: Mapping[str, Any]) -> bool:
    """Whether a reply may be learned: OpenAI's files leave out those of the weight 0."""
    return message.get("weight", 1) != 0


def _ends(learned: Sequence[bool]) -> Iterator[int]:
    """Yield the place behind each run of learned tokens."""
    for at, is_learned in enumerate(learned):
        if is_learned and not (at + 1 < len(learned) and learned[at + 1]):
            yield at + 1
