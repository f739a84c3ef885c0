"""Text that a person reads: words in a list, and any text as one line that is shown unchanged."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Final

UNSEEN: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff"
    "\ud800-\udfff\ufffe\uffff"
)
"""Control characters but tab and line feed, those that turn the direction of a text or end a line,
and halves of a surrogate pair, which no file can hold; the inside of a character class."""

UNSEEN_OR_SPLIT: Final = re.compile(f"[\t\n{UNSEEN}]")


CONTROL_CHARACTERS: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def plain(text: str) -> str:
    """Return `text` without characters that would move the cursor or colour the screen."""
    return CONTROL_CHARACTERS.sub("", text)


def one_line(text: str) -> str:
    r"""Return `text` with its control characters spelled out: a line feed is `\n`."""
    return UNSEEN_OR_SPLIT.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def listed(words: Iterable[object]) -> str:
    """Return words as a sentence lists them: `A`, `A and B`, `A, B and C`."""
    texts = [*map(str, words)]
    return " and ".join(filter(None, (", ".join(texts[:-1]), *texts[-1:])))


def code(text: str) -> str:
    """Return `text` as code in a line of markdown, with more backticks than it has itself."""
    line = one_line(text)
    longest = max((len(run) for run in re.findall(r"`+", line)), default=0)
    mark = "`" * (longest + 1)
    return f"{mark} {line} {mark}" if longest else f"{mark}{line}{mark}"


def shell_line(words: Iterable[str]) -> str:
    """Return the words of a command as one line that a shell reads back."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if not UNSEEN_OR_SPLIT.search(word):
        return shlex.quote(word)
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{UNSEEN_OR_SPLIT.sub(_in_ansi_quotes, plain)}'"


def _in_ansi_quotes(match: re.Match[str]) -> str:
    if match[0] in "\t\n\r":
        return match[0].encode("unicode_escape").decode()
    number = ord(match[0])
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a name that is not UTF-8
        return f"\\x{number - 0xDC00:02x}"
    return f"\\x{number:02x}" if number < 0x80 else f"\\u{number:04x}"
