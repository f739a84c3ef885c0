"""Shapes: check that data from a file are of the type that a TypedDict declares.

A field that an older toolkit did not write is null, with its reason, where null is declared.

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


PLAIN: Final = frozenset({bool, int, float, str, NoneType})
"""Types of most fields."""


@dataclass(frozen=True, slots=True)
class Least:
    """The smallest value of a finite number, beside its type: `Annotated[int, Least(1)]`."""

    value: float


def mismatches(value: Any, kind: Any, where: str = "") -> Iterator[str]:
    """Yield a phrase for each part of a value that is not of its declared type.

    Undeclared fields are ignored. A TypedDict or Literal within an `Annotated` is a second type
    that the value must have. `where` names the value within the file.
    """
    if isinstance(kind, type) and kind in PLAIN:
        if not _is_plain(value, kind):
            yield _wrong(value, where)
        return
    origin, arguments = get_origin(kind), get_args(kind)
    container = _container(kind)
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
    elif container is None:
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


def fill_missing(
    value: Any, kind: Any, reason: str, *, where: str = "", reasons: dict[str, str] | None = None
) -> None:
    """Set each declared field that is missing to null if it may be null, or to an empty container.

    Args:
        value: Content of a file, changed in place.
        kind: Its declared type.
        reason: Why the field is missing; written under its path into the nearest `not_measured`.
        where: Path of the value within the object that has this `not_measured`.
        reasons: That `not_measured`; None where no object around the value declares one.
    """
    if not isinstance(value, (dict, list)):
        return
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Annotated, NotRequired, Union, UnionType):
        for choice in arguments:
            fill_missing(value, choice, reason, where=where, reasons=reasons)
    elif origin is list and isinstance(value, list):
        for number, item in enumerate(cast("list[Any]", value)):
            if isinstance(item, (dict, list)):
                path = f"{where}[{number}]"
                fill_missing(item, arguments[0], reason, where=path, reasons=reasons)
    elif is_typeddict(kind) and isinstance(value, dict):
        _fill_fields(cast("dict[str, Any]", value), kind, reason, where, reasons)


def _fill_fields(
    content: dict[str, Any], kind: Any, reason: str, where: str, reasons: dict[str, str] | None
) -> None:
    hints = hints_of(kind)
    if "not_measured" in hints:
        where, reasons = "", content.setdefault("not_measured", {})
    for name, declared in hints.items():
        path = f"{where}.{name}" if where else name
        if name not in content and _is_required(kind, declared):
            choices = choices_of(declared)
            container = None if "schema" in hints else _container(choices[0])
            if NoneType not in choices and container is None:
                continue  # every version writes it: a file without it is not whole
            content[name] = None if NoneType in choices else cast(Any, container)()
            if isinstance(reasons, dict):
                reasons.setdefault(path, reason)
        if name in content:
            fill_missing(content[name], declared, reason, where=path, reasons=reasons)


def _container(kind: Any) -> type[dict[Any, Any]] | type[list[Any]] | None:
    """Return the class of a type of objects or lists; None for other types."""
    container = dict if is_typeddict(kind) else get_origin(kind)
    return container if container in (dict, list) else None


def _is_required(kind: Any, declared: Any) -> bool:
    return kind.__total__ and get_origin(declared) is not NotRequired


def _fields(content: dict[str, Any], kind: Any, where: str) -> Iterator[str]:
    for name, declared in hints_of(kind).items():
        path = f"{where}.{name}" if where else name
        if name in content:
            yield from mismatches(content[name], declared, path)
        elif _is_required(kind, declared):
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
    problems: list[list[str]] = []
    for kind in kinds:
        if not (phrases := list(mismatches(value, kind, where))):
            return
        problems.append(phrases)
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
