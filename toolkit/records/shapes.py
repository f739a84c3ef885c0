"""Shapes: check that data from a file are of the type that a TypedDict declares.

A file can be damaged or edited by hand. It is checked once, where it is read, so that later code
need not check again whether a field exists and has its type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NotRequired,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

MOST_WHOLE: Final = 2**63
"""Exclusive bound of whole numbers: conversion of much larger ones to a float overflows."""


@dataclass(frozen=True, slots=True)
class Least:
    """The smallest value of a finite number, beside its type: `Annotated[int, Least(1)]`."""

    value: float


def mismatches(value: Any, kind: Any, where: str = "") -> Iterator[str]:
    """Yield a phrase for each part of a value that is not of its declared type.

    Undeclared fields are ignored. A TypedDict or Literal within an `Annotated` is a second type
    that the value must have. `where` names the value within the file.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    container = dict if is_typeddict(kind) else origin
    if kind is Any:
        return
    if origin in (Annotated, NotRequired):
        yield from mismatches(value, arguments[0], where)
        for second in getattr(kind, "__metadata__", ()):
            if is_typeddict(second) or get_origin(second) is Literal:
                yield from mismatches(value, second, where)
            elif isinstance(second, Least) and not _is_at_least(value, second.value):
                yield _wrong(value, where)
    elif origin in (Union, UnionType):
        yield from _union(value, arguments, where)
    elif container not in (dict, list):
        is_right = value in arguments if origin is Literal else _is_plain(value, kind)
        if not is_right:
            yield _wrong(value, where)
    elif not isinstance(value, container):
        yield _wrong(value, where)
    elif container is list:
        yield from _items(cast("list[Any]", value), arguments[0], where)
    elif is_typeddict(kind):
        yield from _fields(cast("dict[str, Any]", value), kind, where)
    else:
        for name, item in cast("dict[str, Any]", value).items():
            yield from mismatches(item, arguments[1], f"{where}.{name}")


def _fields(content: dict[str, Any], kind: Any, where: str) -> Iterator[str]:
    for name, declared in hints_of(kind).items():
        path = f"{where}.{name}" if where else name
        if name in content:
            yield from mismatches(content[name], declared, path)
        elif kind.__total__ and get_origin(declared) is not NotRequired:
            yield f"{path!r} is missing"


@cache
def hints_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def choices_of(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type, without their annotations."""
    plain = kind
    while get_origin(plain) in (Annotated, NotRequired):
        plain = get_args(plain)[0]
    return get_args(plain) if get_origin(plain) in (Union, UnionType) else (plain,)


def _union(value: Any, kinds: tuple[Any, ...], where: str) -> Iterator[str]:
    """Yield the reasons why a value has none of the types; for a part of it, where possible."""
    problems = [list(mismatches(value, kind, where)) for kind in kinds]
    if all(problems):
        general = [_wrong(value, where)]
        yield from next((phrases for phrases in problems if phrases != general), general)


def _items(items: list[Any], kind: Any, where: str) -> Iterator[str]:
    # Lists of losses and row ids are long: plain numbers are checked without a generator for each.
    if kind in (int, float) and all(_is_plain(item, kind) for item in items):
        return
    for number, item in enumerate(items):
        yield from mismatches(item, kind, f"{where}[{number}]")


def _is_plain(value: Any, kind: Any) -> bool:
    if kind in (None, NoneType):
        return value is None
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if isinstance(value, int):
        return kind in (int, float) and abs(value) < MOST_WHOLE
    return isinstance(value, kind)


def _is_at_least(value: Any, least: float) -> bool:
    return not isinstance(value, (int, float)) or least <= value < math.inf


def _wrong(value: Any, where: str) -> str:
    text = repr(value)
    return f"{where!r} is {text if len(text) <= 60 else f'{text[:50]}...'}"
