"""Files in folders where others may write too: no link is followed, and no file is torn."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from toolkit.errors import UsageError
from toolkit.redaction import redact_known


def write_text(path: Path, text: str, *, durable: bool = True, private: bool = False) -> None:
    """Replace the file at `path` in one move: a reader sees the old file or the whole new one.

    Args:
        path: A symbolic link there is replaced, and the file that it names is left alone.
        text: The new content; known secrets in it are removed.
        durable: Wait until the text is on the disk. Not for a file that is rewritten every step.
        private: Whether its owner alone may read it; else the umask decides.
    """
    write_bytes(path, redact_known(text).encode(), durable=durable, private=private)


def write_bytes(path: Path, content: bytes, *, durable: bool = True, private: bool = False) -> None:
    """Replace the file at `path` as `write_text` does; `content` is written unchanged."""
    # No other file or link has this random name by chance; `_open_new` would refuse it.
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    number = _open_new(draft, private=private)
    try:
        with open(number, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(number)
        os.replace(draft, path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(path)  # a failed write names no file, a failed rename the draft
        draft.unlink(missing_ok=True)
        raise


def new_file(path: Path, *, private: bool) -> BinaryIO:
    """Open a new file in the place of `path`; at no moment may others read a private one."""
    path.unlink(missing_ok=True)
    return open(_open_new(path, private=private), "wb")


def without_links(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=without_links)`.

    Raises:
        UsageError: it is a symbolic link, which may name any file of the user's.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UsageError(
            f"{path} is a symbolic link, and nothing is written through one. Remove it."
        ) from None


def read_settings(file: Path, what: str) -> Any:
    """Return the contents of a JSON or YAML file that a user wrote, `what` it is called.

    Raises:
        UsageError: it can't be read, or is of neither kind.
    """
    load: Callable[[str], Any] = json.loads
    broken: tuple[type[Exception], ...] = (ValueError, RecursionError)  # and what is no text
    if file.suffix.lower() in (".yaml", ".yml"):
        import yaml

        load, broken = yaml.safe_load, (*broken, yaml.YAMLError)
    try:
        return load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{what} {file} can't be read: {error.strerror}.") from None
    except broken as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{what} {file} can't be parsed: {reason}.") from None


def check_takes_files(folder: Path, *, flag: str) -> None:
    """Raise UsageError where a folder, which `flag` named, cannot be made or written to.

    No file is written, and the folder need not exist.
    """
    places = (folder, *folder.absolute().parents)
    place = next(place for place in places if os.path.lexists(place))
    by_effective_ids = os.access in os.supports_effective_ids
    if not place.is_dir():
        problem = "is not a folder"
    # On a read-only file system this is true for root as well.
    elif not os.access(place, os.R_OK | os.W_OK | os.X_OK, effective_ids=by_effective_ids):
        problem = "is read-only, or not yours to write to"
    else:
        return
    raise UsageError(f"{flag} {folder} takes no files: {place} {problem}. Name another folder.")


def _open_new(path: Path, *, private: bool) -> int:
    # Not tempfile: its files are for their owner alone, and a report has its readers' umask.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return os.open(path, flags, 0o600 if private else 0o666)
