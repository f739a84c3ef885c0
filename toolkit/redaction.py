"""Redaction: take secrets out of files and output.

Secrets are the values of environment variables and flags of this process with names such as
`MY_DB_PASSWORD` and `--hub_token`, and texts in the shape of a token. The training gets the real
values; files, terminal and reports get `[removed]`.
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast
from urllib.parse import quote, quote_plus

REMOVED: Final = "[removed]"

LEAST_CHARACTERS: Final = 8
"""A shorter value is removed beside its name only: elsewhere it may be another word."""

LONGEST_SHAPE: Final = 1024
"""Most bytes of a token whose value is not known."""

SECRET_WORD: Final = (
    # A tokenizer's special tokens are no secrets, nor are seconds per token.
    r"(?:token(?<!(?:pad|eos|bos|unk|sep|cls|per|eot|boi|eoi)[_ -]token)(?<!mask[_ -]token)"
    r"(?<!(?:image|audio|video)[_ -]token)"
    r"|secret|passw(?:or)?d|passphrase|credentials?"
    r"|(?:api|access|account|private|secret)[_ -]?key|access[_-]?key[_-]?id)"
)
"""The end of a name whose value is secret, in any text."""

OWNED_PASS: Final = r"(?:my|db|database|user|root|admin|login|sql|smtp|mail|ssh|ftp|proxy|key)pass"

SECRET_NAME: Final = re.compile(
    rf"(?i)(?:{SECRET_WORD}|[_-](?:key|pass|pwd)|(?:^|[_-])(?:pat|auth|cookies?)|{OWNED_PASS})$"
)
"""A variable, flag or field whose value is secret; in prose the endings have other meanings."""

VALUE: Final = r"(?:\[removed\]|\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',;)}\]]+)"

COUNT: Final = r"(?<=token)[ \t]*[=:]=?[ \t]*-?\d+(?:\.\d*)?(?:e[+-]?\d+)?(?![\w.])"
"""A number behind `token`: that of a token of text, not a token of access."""


class Removal(NamedTuple):
    """A pattern to look for, and its replacement."""

    hints: tuple[str, ...]
    """Lower-case texts, at least one of which must occur: logs are long, and patterns are slow."""

    pattern: str
    instead: str = rf"\1{REMOVED}"


# Each pattern begins where a run of its letters does: from every letter of a line it would take
# the square of the line's length.
# What is looked for follows the lists of detect-secrets and gitleaks, without those of
# their rules that judge a text by its entropy.
SHAPES: Final = (
    Removal(("bearer",), r"(?i)(\bbearer[ \t]+)[\w.~+/=-]{8,}"),
    Removal(
        ("authorization",),
        r"(?i)(\bauthorization\W{1,5}(?:basic|token|negotiate|ntlm|api-?key|oauth)[ \t]+)"
        r"[\w.~+/=-]{8,}",
    ),
    Removal(
        ("digest",),
        r"(?i)(\bauthorization\W{1,5}digest[ \t]+)"
        r"(?:\w{1,40}=(?:\\?\"[^\"\\\n]*\\?\"|[\w.]+)(?:,[ \t]*)?)+",
    ),
    Removal(
        ("authorization",),
        r"(?i)(\bauthorization['\"]?[ \t]*[:=][ \t]*['\"]?(?:[\w-]{1,40}[ \t]+)?)"
        r"(?:\[removed\]|(?=[^\s'\"]{0,64}\d)[^\s'\",;\\]{8,}(?:,[ \t]*\w{1,40}=[^\s'\",;\\]+)*)",
    ),
    Removal(("cookie",), r"(?i)(\bcookie['\"]?[ \t]*:[ \t]*['\"]?)[\w.!$*-]{1,99}=[^'\"\\\n]+"),
    Removal(
        ("sig=", "signature=", "-token=", "-credential=", "accesskeyid="),
        r"(?i)((?:[?&;]|\\u0026)(?:sig|signature|x-(?:amz|goog)-(?:signature|credential|"
        r"security-token)|(?:aws)?accesskeyid)=)[^\s&'\"<>\\]{8,}",
    ),
    Removal(
        ("hooks.slack.com/", "/api/webhooks/", "webhook.office.com/", "api.telegram.org/bot"),
        r"(?i)(\bhooks\.slack\.com/[a-z]{1,20}/|/api/webhooks/\d{1,20}/|api\.telegram\.org/bot"
        r"|\bwebhook\.office\.com/\w{1,20}/)[\w@:/+-]{8,}",
    ),
    Removal(
        (" private key",),
        # Up to its end; without one, the lines that follow and are base64 alone.
        r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)"
        r"(?:(?:[^-'\"]++|-(?!----))*+(?=-----END)"
        r"|(?:(?:\s|\\[nr])++[A-Za-z0-9+/]{32,}={0,2})++)",
    ),
    Removal(("://",), r"(://)[^/\s@'\"]+@", rf"\1{REMOVED}@"),
    Removal(
        ("api key", "api-key", "api_key", "apikey"),
        r"(?i)(\bapi[_ -]?key[ \t]+)(?=[a-z_-]*\d)[\w-]{16,}",
    ),
    Removal(
        (
            *("hf_", "api_org_", "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
            *("glpat-", "akia", "asia", "aiza", "xox", "xapp-", "wandb_v", "eyj", "npm_", "pypi-"),
            *("dckr_", "sg.", "nvapi-", "r8_", "_live_", "dapi", "glsa_", "hvs.", "gsk_", "ya29."),
        ),
        r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[opusr]_\w{16,}"
        r"|github_pat_\w{16,}|glpat-[\w-]{16,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}"
        r"|xox[a-z]-[\w-]{10,}|xapp-[\w-]{16,}|wandb_v\d+_[\w-]{16,}|npm_[A-Za-z0-9]{30,}"
        r"|pypi-AgE[\w-]{16,}|dckr_[a-z]{3}_[\w-]{16,}|SG\.[\w-]{16,40}\.[\w-]{16,}"
        r"|nvapi-[\w-]{16,}|r8_[A-Za-z0-9]{30,}|[rs]k_live_\w{16,}|dapi[0-9a-f]{32}"
        r"|glsa_\w{16,}|hvs\.[\w-]{16,}|gsk_\w{30,}|ya29\.[\w-]{16,})"
        r"|(?<![\w-])eyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]{5,}",
        REMOVED,
    ),
)
"""Secret in any place; none of the patterns matches a quote, so JSON stays JSON."""

NAMED: Final = (
    Removal(
        ("--",),
        rf"(?i)((?<![\w-])--[\w-]*(?:{SECRET_WORD}|[_-](?:key|pat|pass|pwd|auth|cookie))"
        rf"(?:=|[ \t]+|['\"],[ \t]*)){VALUE}",
    ),
    Removal(
        (
            *("secret", "passw", "passphrase", "credential", "key_id", "keyid", "key-id"),
            # `tokens/s` stands in every line.
            *(f"{word}{end}" for word in ("token", "key") for end in "=:'\"]) \t"),
        ),
        rf"(?i)({SECRET_WORD}\b(?!{COUNT})['\"\])]*[ \t]*[=:]=?[ \t]*){VALUE}",
    ),
    Removal(
        ("_key", "_pat", "_pass"),
        r"(\b[A-Z][A-Z0-9]*_(?:[A-Z0-9]+_)*(?:KEY|PAT|PASS)['\"\])]*[ \t]*[=:][ \t]*)" + VALUE,
    ),
    Removal(
        ("pass=", "pass'", 'pass"', *(f"{w}{end}" for w in ("auth", "cookie") for end in "='\"")),
        rf"(\b(?:[A-Z0-9]{{1,40}}_){{0,9}}(?:AUTH|COOKIE|{OWNED_PASS.upper()})"
        rf"(?:=|['\"][\])]?[ \t]*[=:][ \t]*)){VALUE}",
    ),
    # In a connection's address; with capitals alone it is the shell's folder.
    Removal(
        ("pwd=", "pwd'", 'pwd"'),
        r"(\b[Pp]wd(?:=|['\"]:[ \t]*)|_(?:pwd|PWD)['\"]?[=:][ \t]*)(?!['\"]?[/~.])" + VALUE,
    ),
)
"""A value behind the name of a secret."""

# A commit has 40 hex digits as well: a key of W&B's is recognised by the words on its line.
HEX_KEY: Final = re.compile(r"(?<![\w/-])[0-9a-f]{40}(?![\w/])")
HEX_KEY_HINTS: Final = ("wandb", "w&b", "biases", "api", "login", "log in")

_learned: set[str] = set()


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a variable, a flag or a field of this name holds a secret."""
    return SECRET_NAME.search(name) is not None


def learn(words: Iterable[str]) -> None:
    """Remember the secrets among flags with which this process was not started."""
    _learned.update(_values_in(list(words)))


def redact(text: str) -> str:
    """Return free text, such as a log or an error, without secrets."""
    return _without(NAMED, _without_known(text, _known()))


def redact_known(text: str) -> str:
    """Return `text` without known values and shapes of tokens; values beside names stay.

    For text that is formatted already: JSON stays JSON, and a sentence on `--hub_token` a sentence.
    """
    return _without_known(text, _known())


def redacted(value: Any) -> Any:
    """Return a copy of a JSON value, with `redact` applied to every text in it."""
    known = _known()  # once for all

    @functools.cache  # the same names stand in each row
    def without_secrets(text: str) -> str:
        return _without(NAMED, _without_known(text, known))

    return each_text(value, without_secrets)


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a JSON value, its texts changed, and those under secret names removed."""
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
    clean: list[str] = []
    value_follows = False
    for word in words:
        name, equals, _ = word.partition("=")
        if value_follows and not word.startswith("--"):
            clean.append(REMOVED)
        elif equals and is_secret_name(name):
            clean.append(f"{name}={REMOVED}")
        else:
            clean.append(redact(word))
        value_follows = word.startswith("-") and not equals and is_secret_name(word)
    return clean


def longest_secret() -> int:
    """Return how many bytes at the end of a text may still be the beginning of a secret."""
    return max([LONGEST_SHAPE, *(len(form.encode(errors="surrogateescape")) for form in _known())])


def redact_output() -> None:
    """Apply `redact_known` to all output of this process, piece by piece as it is written."""
    for stream in (sys.stdout, sys.stderr):
        # Not a stream around it: libraries use its file number, and whether it is a terminal.
        stream.write = functools.partial(_write_redacted, stream.write)


def _write_redacted(write: Callable[[str], int], text: str) -> int:
    write(redact_known(text))
    return len(text)


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
            text = re.sub(pattern, instead, text)
    return text


def _has_any(words: Iterable[str], text: str) -> bool:
    return any(word in text for word in words)


def _known() -> tuple[str, ...]:
    """Return the texts that are removed in any place, the longest first."""
    variables = {value for name, value in os.environ.items() if is_secret_name(name)}
    return _forms_of(frozenset(variables | _values_in(sys.orig_argv) | _learned))


def _values_in(words: Sequence[str]) -> set[str]:
    """Return the values of flags with secret names."""
    values: set[str] = set()
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if not is_secret_name(name):
            continue
        if equals:
            values.add(value)
        elif word.startswith("-") and not following.startswith("--"):
            values.add(following)
    return values


@functools.lru_cache(maxsize=8)
def _forms_of(values: frozenset[str]) -> tuple[str, ...]:
    # A key of several lines is looked for line by line.
    lines = {line.strip() for value in values for line in (value, *value.splitlines())}
    forms = {form for line in lines if _is_telling(line) for form in _spellings(line)}
    return tuple(sorted(forms, key=len, reverse=True))


def _is_telling(value: str) -> bool:
    """Whether a value can be removed in any place without harm to other text."""
    if len(value) < LEAST_CHARACTERS or value.isdecimal():
        return False
    places = (os.path.abspath(os.curdir), str(Path.home()), sys.prefix, os.path.dirname(__file__))
    # The name of a file with a secret is no secret, nor is a part of every path.
    return not any(value in place for place in places) and not (
        value.startswith(os.sep) and os.path.exists(value)
    )


def _spellings(value: str) -> set[str]:
    """Return a value as written in a shell, a program, JSON, a URL, a page and in base64."""
    import html  # it has a large table, and most processes know no secret

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
