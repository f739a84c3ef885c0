"""Functions put in front of methods for a while, and taken back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

Undo = Callable[[], None]
"""Takes back what returned it."""


def nothing() -> None:
    """Take nothing back."""


def stand_in(owner: Any, name: str, replacement: Any) -> Undo:
    """Put something in place of a method, and return what takes that back.

    Where something else was put in front of the replacement since then, it holds the replacement:
    `Undo` then leaves it, and the replacement has to let everything through from then on.
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


def surround(owner: Any, name: str, context: Callable[[], AbstractContextManager[object]]) -> Undo:
    """Enter a context around every call of a method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def surrounded(*args: Any, **kwargs: Any) -> Any:
        with context():
            return original(*args, **kwargs)

    return stand_in(owner, name, surrounded)
