"""Pages on `results.json` and `record.json`: every field, from the types that declare it.

The meaning of a field is the string below it in its class, the unit and the meaning of null come
from its `Fact`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    is_typeddict,
)

from toolkit.records.fields import Fact
from toolkit.records.shapes import hints_of

UNITS_OF_PARTS = {"step seconds": "seconds", "interval": "bytes", "difference": ""}
"""Units of values with several fields: the fields have units of their own."""

NOT_MEASURED = "`not_measured` has the reason"

PLAIN_TYPES = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    NoneType: "null",
    Any: "any value",
}


@dataclass
class Section:
    """A type of the file, and the paths of the fields that have it."""

    kind: Any
    paths: dict[str, None] = field(default_factory=dict[str, None])


def json_page(name: str, kind: Any, opening: str) -> str:
    """Return the reference of a file: a table of fields for each of its objects."""
    sections = sections_of(kind)
    parts = [
        f"# `{name}`",
        opening,
        "The file is JSON, with `schema` 1. Fields may be added and are never renamed. A value "
        "that was not measured is `null`, and `not_measured` has the reason under the path of the "
        "field, such as `memory.peak_bytes`. Sizes are in bytes, times in seconds.",
    ]
    for section in sections:
        parts += _section(section, top=section.kind is kind)
    return "\n\n".join(parts) + "\n"


def sections_of(kind: Any) -> list[Section]:
    """Return the objects within a file, the file itself first, in the order of their fields."""
    sections: dict[str, Section] = {kind.__name__: Section(kind)}
    _collect(kind, "", sections)
    return list(sections.values())


def _collect(kind: Any, path: str, sections: dict[str, Section]) -> None:
    for name, declared in hints_of(kind).items():
        for inner, suffix in _objects_in(declared):
            section = sections.setdefault(inner.__name__, Section(inner))
            section.paths[f"{path}{name}{suffix}"] = None
            _collect(inner, f"{path}{name}{suffix}.", sections)


def _objects_in(declared: Any) -> Iterator[tuple[Any, str]]:
    """Yield the objects that a declared type contains, and how a path names them."""
    if is_typeddict(declared):
        yield declared, ""
        return
    suffix = {list: "[]", dict: ".*"}.get(get_origin(declared), "")
    for part in (*get_args(declared), *getattr(declared, "__metadata__", ())):
        for inner, rest in _objects_in(part):
            yield inner, suffix + rest


def _section(section: Section, *, top: bool) -> Iterator[str]:
    kind = section.kind
    yield "## Fields" if top else f"## {kind.__name__}"
    if not top:
        yield "At " + ", ".join(f"`{path}`" for path in section.paths) + "."
    if not top and (text := _meaning_of_kind(kind)):
        yield text
    rows = [
        _row(name, declared, _meaning(kind, name, declared))
        for name, declared in hints_of(kind).items()
    ]
    header = ("field", "meaning", "type", "unit", "where null")
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ("---",) * len(header), *rows)]
    yield "\n".join(["{.fields}", *lines])


def _row(name: str, declared: Any, meaning: str) -> tuple[str, ...]:
    return f"`{name}`", meaning, _type(declared), _unit(declared), _null(declared, meaning)


def _fact(declared: Any) -> Fact | None:
    facts = [part for part in _metadata(declared) if isinstance(part, Fact)]
    return facts[0] if facts else None


def _metadata(declared: Any) -> tuple[Any, ...]:
    while get_origin(declared) is NotRequired:
        declared = get_args(declared)[0]
    return getattr(declared, "__metadata__", ())


def _unit(declared: Any) -> str:
    fact = _fact(declared)
    return "" if fact is None else UNITS_OF_PARTS.get(fact.unit, fact.unit)


def _null(declared: Any, meaning: str) -> str:
    """Return what a value of null says."""
    if not _may_be_null(declared):
        return "never"
    fact = _fact(declared)
    reason = fact and (fact.null_means or fact.missing)
    return reason or ("see its meaning" if "null" in meaning else NOT_MEASURED)


def _may_be_null(declared: Any) -> bool:
    if get_origin(declared) in (Annotated, NotRequired):
        return _may_be_null(get_args(declared)[0])
    return NoneType in get_args(declared)


def _type(declared: Any) -> str:
    """Return a declared type in words, with a link to the table of an object."""
    origin, arguments = get_origin(declared), get_args(declared)
    if is_typeddict(declared):
        return f"[{declared.__name__}](#{declared.__name__.lower()})"
    if origin is NotRequired:
        return f"{_type(arguments[0])}, or absent"
    if origin is Annotated:
        closer = [
            part
            for part in declared.__metadata__
            if is_typeddict(part) or get_origin(part) is Literal
        ]
        return _type(closer[0] if closer else arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return ", or ".join(_type(part) for part in arguments if part is not NoneType)
    if origin is list:
        return f"list of: {_type(arguments[0])}"
    if origin is dict:
        return f"object by name: {_type(arguments[1])}"
    return PLAIN_TYPES[declared]


def _meaning(kind: Any, name: str, declared: Any) -> str:
    # Functional syntax has no string below a field, so that it stands beside the type.
    beside = [part for part in _metadata(declared) if isinstance(part, str)]
    text = meanings_of(kind).get(name) or "".join(beside)
    if not text:
        inner = [part for part, _ in _objects_in(declared)]
        text = _meaning_of_kind(inner[0]) if inner else ""
    return " ".join(text.split()).replace("|", "\\|")


def _meaning_of_kind(kind: Any) -> str:
    # The base class, dict, has a docstring of its own.
    text = kind.__dict__.get("__doc__") or meanings_in(kind.__module__).get(kind.__name__) or ""
    return " ".join(inspect.cleandoc(text).split())


def meanings_of(kind: Any) -> dict[str, str]:
    """Return the string below each field of a TypedDict and of those that it inherits from."""
    meanings: dict[str, str] = {}
    for base in _bases_of(kind):
        meanings |= meanings_of(base)
    return meanings | meanings_in(kind.__module__, kind.__name__)


def _bases_of(kind: Any) -> list[Any]:
    """Return the TypedDicts that another inherits from, which Python 3.11 has only as text."""
    module = sys.modules[kind.__module__]
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
            names = [base.id for base in node.bases if isinstance(base, ast.Name)]
            return [base for name in names if is_typeddict(base := getattr(module, name))]
    return []


@cache
def meanings_in(module: str, name: str | None = None) -> dict[str, str]:
    """Return the string below each assignment of a module, or of a class in it."""
    tree: ast.Module | ast.ClassDef = ast.parse(inspect.getsource(sys.modules[module]))
    if name is not None:
        classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
        found = next((node for node in classes if node.name == name), None)
        if found is None:
            return {}
        tree = found
    meanings: dict[str, str] = {}
    for node, below in zip(tree.body, tree.body[1:], strict=False):
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        if isinstance(target, ast.Name) and isinstance(below, ast.Expr):
            meanings[target.id] = ast.literal_eval(below.value)
    return meanings
