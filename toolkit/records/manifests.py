"""The manifest of a committed folder: its files by size and sha256, and facts about it.

A manifest carries a hash of itself, so a changed fact is damage like a changed file. The names in
it are relative and stay inside the folder, so they cannot reach any other file.
A manifest proves that a folder is unchanged, not who wrote it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypedDict, cast

from toolkit.errors import UsageError
from toolkit.records.json_files import read_json, write_json
from toolkit.records.shapes import mismatches
from toolkit.redaction import redacted

MANIFEST: Final = "manifest.json"
SCHEMA: Final = 2

FORMAT: Final = 1
"""Version of a checkpoint's layout; increased when older layouts can no longer be read."""

TO_BE_EDITED: Final = frozenset({"README.md"})
"""Files that users may change, such as a model card; a change is no damage."""

DRAFT_MARK: Final = ".toolkit-draft"
"""Empty file in a folder that is still being written; it marks a leftover as the toolkit's."""

_HASH: Final = "manifest_sha256"


class Entry(TypedDict):
    """A file as it was saved."""

    bytes: int
    sha256: str


class Damaged(ValueError):
    """A folder that was never committed, or has changed since."""


def checkpoint_step(folder: Path) -> int | None:
    """Return the step that a checkpoint's name says; None for other names."""
    match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(match[1]) if match else None


def write_manifest(folder: Path, files: Mapping[str, Mapping[str, Any]], **facts: Any) -> None:
    """Write the manifest of a folder with complete files; `files` has their entries by name."""
    # The hash is of the text on the disk, from which secrets are removed.
    content = redacted({**facts, "schema": SCHEMA, "files": dict(files)})
    write_json(folder / MANIFEST, content | {_HASH: _hash_of(content)})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a committed folder, without checking its files.

    Raises:
        Damaged: the manifest is missing, cut off or changed, or names files outside the folder.
        UsageError: a newer toolkit wrote it.
    """
    try:
        if (folder / MANIFEST).is_symlink():
            raise UsageError(f"{folder / MANIFEST} is a link.")
        manifest = read_json(folder / MANIFEST)
        if not isinstance(manifest, dict):
            raise UsageError("it is no JSON object")
        content = cast("dict[str, Any]", manifest)
        if type(content.get("schema")) is not int or content["schema"] < SCHEMA:
            raise UsageError(f"its schema is not {SCHEMA}")
    except (UsageError, OSError) as error:
        raise Damaged(f"{folder} has no manifest that can be read: {error}") from None
    written = content.pop(_HASH, None)
    # Checked first, because a later format may have another hash.
    for name, known in (("schema", SCHEMA), ("format", FORMAT)):
        number = content.get(name)
        if type(number) is int and number > known:
            raise UsageError(
                f"{folder} was written by a newer toolkit: its manifest has {name} {number}, and "
                f"this one reads up to {known}. Update this toolkit, or name another folder."
            )
    if written != _hash_of(content):
        raise Damaged(f"{folder} has a manifest that has changed since it was written")
    files: Any = content.get("files")
    if any(mismatches(files, dict[str, Entry])) or not all(map(_is_inside, files)):
        raise Damaged(f"{folder} has a manifest that lists names that cannot be files of it")
    return content


def check_file(folder: Path, name: str, wanted: Mapping[str, Any]) -> None:
    """Check one file of a committed folder against its entry in the manifest.

    Raises:
        Damaged: the file is missing, cut off or changed.
    """
    path = folder / name
    if not path.is_file():
        raise Damaged(f"{path} is missing")
    size = path.stat().st_size
    if size != wanted["bytes"]:
        raise Damaged(f"{path} has {size} bytes, it was saved with {wanted['bytes']}")
    if _sha256(path) != wanted["sha256"]:
        raise Damaged(f"{path} has changed since it was saved")


def entry(folder: Path, name: str) -> dict[str, Any]:
    """Flush one file to the disk, and return its entry in the manifest."""
    path = folder / name
    sync(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def file_names(folder: Path) -> list[str]:
    """Return sorted relative paths of a folder's files, except manifest and draft mark."""
    regular = (name for name, mode in contents(folder) if stat.S_ISREG(mode))
    return [name for name in regular if name not in (MANIFEST, DRAFT_MARK)]


def contents(folder: Path) -> list[tuple[str, int]]:
    """Return name and mode of all entries below a folder except folders, sorted.

    Links are returned as links and never followed.
    """
    return sorted(_below(folder, ""))


def remove_listed(folder: Path, names: Collection[str]) -> None:
    """Remove the named files of a folder and the folders that become empty, the manifest last.

    All other entries stay, and so do files behind a link.
    """
    if not is_real_folder(folder):
        return
    removed = [name for name in sorted(names) if _is_inside(name) and is_own(folder, name)]
    for name in removed:
        (folder / name).unlink(missing_ok=True)
    emptied = {folder / parent for name in removed for parent in Path(name).parents} - {folder}
    # Deepest first, since only an empty folder can be removed.
    for parent in sorted(emptied, key=lambda path: -len(path.parts)):
        remove_if_empty(parent)
    (folder / MANIFEST).unlink(missing_ok=True)
    remove_if_empty(folder)


def remove_if_empty(folder: Path) -> None:
    if is_real_folder(folder) and not any(folder.iterdir()):
        folder.rmdir()


def is_own(folder: Path, name: str) -> bool:
    """Whether a name is a file of this folder itself: not a link, and not behind one."""
    parents = [folder / parent for parent in Path(name).parents]
    return not any(path.is_symlink() for path in (folder / name, *parents))


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def is_real_folder(path: Path) -> bool:
    """Whether the path is a folder, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def _hash_of(content: Mapping[str, Any]) -> str:
    # Non-finite numbers are written by name (`json_files.write_json`).
    written = json.loads(json.dumps(content), parse_constant=str)
    return hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()


def _is_inside(name: str) -> bool:
    is_relative = all(part not in ("", ".", "..") for part in name.split("/"))
    return is_relative and "\0" not in name and name != MANIFEST


def _below(folder: Path, prefix: str) -> Iterator[tuple[str, int]]:
    with os.scandir(folder) as entries:
        for child in entries:
            name = f"{prefix}{child.name}"
            if child.is_dir(follow_symlinks=False):
                yield from _below(folder / child.name, f"{name}/")
            else:
                yield name, child.stat(follow_symlinks=False).st_mode


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
