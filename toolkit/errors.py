"""Errors whose text is for the user, and sentences about the errors of libraries."""

from __future__ import annotations

import errno
import re
from typing import Final

from toolkit.escaping import one_line
from toolkit.redaction import redact_known

NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

NO_SPACE_TEXT: Final = re.compile(
    r"No space left|[Qq]uota exceeded|File too large|No usable temporary directory"
    # torch's zip writer gives no other reason for an incomplete write (inline_container.cc).
    r"|unexpected pos \d+ vs \d+|PytorchStreamWriter failed"
)
"""Texts of libraries that raise errors of their own for a full disk."""


class UsageError(ValueError):
    """A mistake that the user can fix.

    The command line prints its text without a traceback and exits with status 2, before it starts a
    process or writes a file.
    """

    def __str__(self) -> str:
        # It may quote a name with a line feed in it, or a token, that the user passed.
        return one_line(redact_known(super().__str__()))


class UnfitModelError(UsageError):
    """A strategy cannot take the model; another one may."""


class GuardError(RuntimeError):
    """A guard stopped the run: every rank raises it after the same step, in the same words."""


class HangError(RuntimeError):
    """Nothing progressed in any rank for the set time, and the run was ended."""


class MachineLostError(RuntimeError):
    """Another machine of the launch is gone; the text names it."""


class SaveError(RuntimeError):
    """A failed save: the weights are not finite, could not be written, or don't load again."""


def is_full_disk(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, is that a disk or a quota is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            return True
        if NO_SPACE_TEXT.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def file_sentence(error: BaseException) -> str | None:
    """Return a sentence on an error of a file, a folder or its disk; None for other errors."""
    file, reason = None, sentence_of(error)
    if isinstance(error, OSError):
        file, reason = error.filename, f"{error.strerror or error}."
    if is_full_disk(error):
        if isinstance(error, SaveError):
            return str(error)
        if "temporary directory" in reason:
            return f"{reason} Each is full, or not yours to write to: make room, or set TMPDIR."
        where = "" if file is None else f" for {file}"
        return f"There is no space left{where}: {reason} Free some, and try again."
    if file is None:
        return None
    return f"{file}: {reason} Check the path, and whether it may be read and written."


def sentence_of(error: BaseException) -> str:
    """Return the first line of an error's text, with a full stop."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return line if line.endswith((".", "!", "?")) else f"{line}."
