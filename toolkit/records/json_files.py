"""JSON files of the toolkit: strict JSON, checked against a TypedDict when it is read.

JSON has no non-finite floats, so they are written as the strings "NaN", "Infinity" and "-Infinity"
and read back as floats. Fields may be added, so unknown fields are kept; a newer schema number is
refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from toolkit.errors import UsageError
from toolkit.files import write_text
from toolkit.records.shapes import fill_missing, mismatches
from toolkit.redaction import redacted

SCHEMA: Final = 1

Declared = TypeVar("Declared")
"""A TypedDict."""

NOT_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

NOT_RECORDED: Final = "the toolkit that wrote this file did not record it"

MOST_LEVELS: Final = 100
"""Most levels of nested objects and lists; the toolkit's files have about ten."""


class LostError(UsageError):
    """A file of the toolkit that is missing, or has unusable content.

    A file of a newer toolkit, or without read permission, raises another error: it is not damaged.
    """


def read_as(file: Path, kind: type[Declared]) -> Declared:
    """Read a file that the toolkit wrote, with every field as the TypedDict declares it.

    A field that is missing is null if it may be; its reason is put under `not_measured`.

    Raises:
        UsageError: the file is missing, damaged, of a newer schema, or lacks a field that every
            version writes.
    """
    data = read_json(file)
    if not isinstance(data, dict) or "schema" not in data:
        raise LostError(f"{file} was not written by the toolkit: it has no schema number.")
    content = cast("dict[str, Any]", data)
    schema = content["schema"]
    if not isinstance(schema, int) or schema < 1:
        raise LostError(f"{file} has the schema number {schema!r}; this toolkit reads {SCHEMA}.")
    if schema > SCHEMA:
        raise UsageError(
            f"{file} has schema {schema}, this toolkit reads up to {SCHEMA}. "
            "A newer toolkit wrote it: update this one to read it."
        )
    fill_missing(content, kind, NOT_RECORDED)
    wrong = "; ".join(mismatches(content, kind))
    if wrong:
        raise LostError(f"{file} is not complete: {wrong[:500]}.")
    return cast(Declared, content)


def read_json(path: Path) -> Any:
    """Read strict JSON, with the names of non-finite floats turned back into floats.

    Raises:
        UsageError: there is no such file, it cannot be read, or it is not JSON.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
        return _mapped(content, _decoded)
    except FileNotFoundError:
        raise LostError(f"{path} does not exist.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from None
    # Invalid UTF-8 and whole numbers of thousands of digits raise ValueError, too.
    except (ValueError, RecursionError) as error:
        raise LostError(
            f"{path} is not JSON ({error}). Was it cut off, or damaged? Put a whole copy there."
        ) from None


def write_json(path: Path, data: Any, *, private: bool = False) -> None:
    """Write `data` as strict JSON without secrets, as `write_text` does.

    Raises:
        ValueError: `data` has more than `MOST_LEVELS` levels, which `read_json` would refuse.
    """
    text = json.dumps(_mapped(redacted(data), _encoded), indent=2, allow_nan=False) + "\n"
    write_text(path, text, private=private)


def json_line(data: Any) -> str:
    """Return `data` as one line of strict JSON without secrets, for a file that is appended to."""
    return json.dumps(_mapped(redacted(data), _encoded), allow_nan=False) + "\n"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return content


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _encoded(leaf: Any) -> Any:
    if isinstance(leaf, float) and not math.isfinite(leaf):
        return "NaN" if math.isnan(leaf) else "Infinity" if leaf > 0 else "-Infinity"
    return leaf


def _decoded(leaf: Any) -> Any:
    return NOT_FINITE.get(leaf, leaf) if isinstance(leaf, str) else leaf


def _mapped(value: Any, change: Callable[[Any], Any], *, levels: int = MOST_LEVELS) -> Any:
    """Return a copy of a JSON value, with `change` applied to all except objects and lists."""
    if not levels:
        raise ValueError(f"more than {MOST_LEVELS} levels")
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {str(key): _mapped(item, change, levels=levels - 1) for key, item in items}
    if isinstance(value, (list, tuple)):
        items = cast("list[Any]", value)
        return [_mapped(item, change, levels=levels - 1) for item in items]
    return change(value)
