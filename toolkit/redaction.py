"""Redaction: take secrets out of what is written or printed.

A secret is the value of every environment variable and every flag of this process whose name says
so (`MY_DB_PASSWORD`, `--hub_token`), and what has the shape of a token. The training gets the real
values; files, terminal and reports get `[removed]`.
"""

from __future__ import annotations

import base64
import functools
import html
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO, cast
from urllib.parse import quote, quote_plus

REMOVED: Final = "[removed]"

LEAST_CHARACTERS: Final = 8
"""A shorter value is removed beside its name only: elsewhere the same letters may mean anything."""

LONGEST_SHAPE: Final = 1024
"""Bytes that a token whose value is not known is taken to have at most."""

SECRET_WORD: Final = (
    # A tokenizer's special tokens are no secrets, nor are seconds per token.
    r"(?:token(?<!(?:pad|eos|bos|unk|sep|cls|per|eot|boi|eoi)[_ -]token)(?<!mask[_ -]token)"
    r"(?<!(?:image|audio|video)[_ -]token)"
    r"|secret|passw(?:or)?d|passphrase|credentials?"
    r"|(?:api|access|private|secret)[_ -]?key|access[_-]?key[_-]?id)"
)
"""The end of a name whose value is secret, in any text."""

SECRET_NAME: Final = re.compile(rf"(?i)(?:{SECRET_WORD}|[_-]key|(?:^|[_-])pat|[_-]pass)$")
"""A variable, flag or field whose value is secret; in prose these endings mean other things too."""

VALUE: Final = r"(?:\[removed\]|\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',;)}\]]+)"

COUNT: Final = r"(?<=token)[ \t]*[=:]=?[ \t]*-?\d+(?:\.\d*)?(?:e[+-]?\d+)?(?![\w.])"
"""A number behind `token`: of a token of text, not of one that lets somebody in."""


class Removal(NamedTuple):
    """One thing to look for, and what of it stays."""

    hints: tuple[str, ...]
    """Letters of which some must be there, in lower case: a log is long, and looking is slow."""

    pattern: re.Pattern[str]
    instead: str = rf"\1{REMOVED}"


# Each pattern begins where a run of its letters does: from every letter of a line it would take
# the square of the line's length.
SHAPES: Final = (
    Removal(("bearer",), re.compile(r"(?i)(\bbearer[ \t]+)[\w.~+/=-]{8,}")),
    Removal(
        ("authorization",), re.compile(r"(?i)(\bauthorization\W{1,5}basic[ \t]+)[\w.~+/=-]{8,}")
    ),
    Removal(("://",), re.compile(r"(://)[^/\s@'\"]+@"), rf"\1{REMOVED}@"),
    Removal(
        ("api key", "api-key", "api_key", "apikey"),
        re.compile(r"(?i)(\bapi[_ -]?key[ \t]+)(?=[a-z_-]*\d)[\w-]{16,}"),
    ),
    Removal(
        (
            *("hf_", "api_org_", "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
            *("glpat-", "akia", "aiza", "xox", "wandb_v", "eyj"),
        ),
        re.compile(
            r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[opusr]_\w{16,}"
            r"|github_pat_\w{16,}|glpat-[\w-]{16,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}"
            r"|xox[a-z]-[\w-]{10,}|wandb_v\d+_[\w-]{16,})"
            r"|(?<![\w-])eyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]{5,}"
        ),
        REMOVED,
    ),
)
"""What is secret wherever it stands; none of them takes a quote with it, so JSON stays JSON."""

NAMED: Final = (
    Removal(
        ("--",),
        re.compile(
            rf"(?i)((?<![\w-])--[\w-]*{SECRET_WORD}(?:=|[ \t]+|['\"],[ \t]*)){VALUE}",
        ),
    ),
    Removal(
        (
            *("secret", "passw", "passphrase", "credential", "key_id", "keyid", "key-id"),
            # `tokens/s` stands in every line.
            *(f"{word}{end}" for word in ("token", "key") for end in "=:'\"]) \t"),
        ),
        re.compile(rf"(?i)({SECRET_WORD}\b(?!{COUNT})['\"\])]*[ \t]*[=:]=?[ \t]*){VALUE}"),
    ),
    Removal(
        ("_key", "_pat", "_pass"),
        re.compile(
            r"(\b[A-Z][A-Z0-9]*_(?:[A-Z0-9]+_)*(?:KEY|PAT|PASS)['\"\])]*[ \t]*[=:][ \t]*)"
            rf"{VALUE}"
        ),
    ),
)
"""A value that stands behind the name of a secret."""

# 40 hex digits are a commit as well: a key of W&B's is told by the words on its line.
HEX_KEY: Final = re.compile(r"(?<![\w/-])[0-9a-f]{40}(?![\w/])")
HEX_KEY_HINTS: Final = ("wandb", "w&b", "biases", "api", "login", "log in")

_learned: set[str] = set()


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a variable, a flag or a field of this name holds a secret."""
    return SECRET_NAME.search(name) is not None


def learn(words: Iterable[str]) -> None:
    """Keep the secrets among flags that this process was not started with."""
    _learned.update(_values_in(list(words)))


def redact(text: str) -> str:
    """Return free text, such as a log or an error, without secrets."""
    return _without(NAMED, _without_known(text, _known()))


def redact_known(text: str) -> str:
    """Return `text` without known values and shapes of tokens; what stands beside names stays.

    For what is formatted already: JSON stays JSON, and a sentence on `--hub_token` a sentence.
    """
    return _without_known(text, _known())


def redacted(value: Any) -> Any:
    """Return a copy of what can be JSON, with `redact` applied to every text in it."""
    known = _known()  # once for all
    return each_text(value, lambda text: _without(NAMED, _without_known(text, known)))


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of what can be JSON, its texts changed, and none under a secret name."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {
            each_text(key, change): REMOVED
            if isinstance(item, str) and is_secret_name(str(key))
            else each_text(item, change)
            for key, item in items
        }
    if isinstance(value, (list, tuple)):
        return [each_text(item, change) for item in cast("list[Any]", value)]
    return value


def redacted_words(words: Sequence[str]) -> list[str]:
    """Return a command, with the values of flags with secret names removed, short ones too."""
    shown: list[str] = []
    value_follows = False
    for word in words:
        name, equals, _ = word.partition("=")
        if value_follows and not word.startswith("--"):
            shown.append(REMOVED)
        elif equals and is_secret_name(name):
            shown.append(f"{name}={REMOVED}")
        else:
            shown.append(redact(word))
        value_follows = word.startswith("-") and not equals and is_secret_name(word)
    return shown


def longest_secret() -> int:
    """Return how many bytes at the end of a text may still be the beginning of a secret."""
    return max([LONGEST_SHAPE, *(len(form.encode(errors="surrogateescape")) for form in _known())])


def redact_output() -> None:
    """Have all that this process prints pass `redact_known`, piece by piece as it is written."""
    for stream in (sys.stdout, sys.stderr):
        _redact_stream(stream)


def _redact_stream(stream: TextIO) -> None:
    write = stream.write

    def write_redacted(text: str) -> int:
        write(redact_known(text))
        return len(text)

    # On the stream itself: libraries ask for its file number, and whether it is a terminal.
    stream.write = write_redacted


def _without_known(text: str, known: Sequence[str]) -> str:
    for form in known:
        text = text.replace(form, REMOVED)
    text = _without(SHAPES, text)
    if not _has_any(HEX_KEY_HINTS, text.lower()) or not HEX_KEY.search(text):
        return text
    return "\n".join(
        HEX_KEY.sub(REMOVED, line) if _has_any(HEX_KEY_HINTS, line.lower()) else line
        for line in text.split("\n")
    )


def _without(removals: Iterable[Removal], text: str) -> str:
    lower = text.lower()
    for hints, pattern, instead in removals:
        if _has_any(hints, lower):
            text = pattern.sub(instead, text)
    return text


def _has_any(words: Iterable[str], text: str) -> bool:
    return any(word in text for word in words)


def _known() -> tuple[str, ...]:
    """Return what is removed wherever it stands, the longest first."""
    variables = {value for name, value in os.environ.items() if is_secret_name(name)}
    return _forms_of(frozenset(variables | _own_flags() | _learned))


@functools.cache
def _own_flags() -> frozenset[str]:
    return frozenset(_values_in(sys.orig_argv))


def _values_in(words: Sequence[str]) -> set[str]:
    """Return the values of flags with secret names."""
    found: set[str] = set()
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if not is_secret_name(name):
            continue
        if equals:
            found.add(value)
        elif word.startswith("-") and not following.startswith("--"):
            found.add(following)
    return found


@functools.lru_cache(maxsize=8)
def _forms_of(values: frozenset[str]) -> tuple[str, ...]:
    # A key of several lines is met line by line.
    lines = {line.strip() for value in values for line in (value, *value.splitlines())}
    forms = {form for line in lines if _is_telling(line) for form in _spellings(line)}
    return tuple(sorted(forms, key=len, reverse=True))


def _is_telling(value: str) -> bool:
    """Whether a value can be removed wherever it stands, and nothing else goes with it."""
    if len(value) < LEAST_CHARACTERS or value.isdecimal():
        return False
    places = (os.path.abspath(os.curdir), str(Path.home()), sys.prefix, os.path.dirname(__file__))
    # The name of a file with a secret is none, and what is part of every path can't be one.
    return not any(value in place for place in places) and not (
        value.startswith(os.sep) and os.path.exists(value)
    )


def _spellings(value: str) -> set[str]:
    """Return a value as it looks in a shell, a program, JSON, a URL, a page and in base64."""
    raw = value.encode("utf-8", errors="surrogateescape")
    return {
        value,
        value.replace("'", "'\"'\"'"),
        repr(value)[1:-1],
        json.dumps(value)[1:-1],
        html.escape(value),
        quote(raw, safe=""),
        quote_plus(raw),
        base64.b64encode(raw).decode().rstrip("="),
        base64.urlsafe_b64encode(raw).decode().rstrip("="),
    }
