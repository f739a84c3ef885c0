"""Functions put in front of methods for a while, and taken back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

Undo = Callable[[], None]
"""A function that undoes the effect of the call that returned it."""


def nothing() -> None:
    """Do nothing: an `Undo` without an effect to undo."""


def replace_method(owner: Any, name: str, replacement: Any) -> Undo:
    """Replace a method, and return the `Undo` that restores it.

    If the replacement was itself replaced since then, the newer one still calls it. `Undo` then
    leaves it in place, and the replacement must pass every call on from then on.
    """
    before = vars(owner).get(name)
    setattr(owner, name, replacement)

    def undo() -> None:
        if vars(owner).get(name) is not replacement:
            return
        if before is None:  # the method was inherited
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


def intercept(owner: Any, name: str, replacement: Callable[..., Any]) -> Undo:
    """Replace a method by a function that gets the original one in front of its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def intercepted(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return replace_method(owner, name, intercepted)


def wrap_method(
    owner: Any, name: str, context: Callable[[], AbstractContextManager[object]]
) -> Undo:
    """Enter a context around every call of a method."""

    def surrounded(original: Any, *args: Any, **kwargs: Any) -> Any:
        with context():
            return original(*args, **kwargs)

    return intercept(owner, name, surrounded)
