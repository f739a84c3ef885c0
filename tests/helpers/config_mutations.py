"""Changes of a config: each key misspelt, removed and retyped, at every depth."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from toolkit.configs.check.documents import keys_of, value_at


def mutations(content: dict[str, Any]) -> Iterator[tuple[str, tuple[str, ...], dict[str, Any]]]:
    """Return each change: its kind, the key's place, and the changed content."""
    for keys in keys_of(content):
        *outer, last = keys
        value = value_at(content, keys)
        middle = len(last) // 2
        yield "misspelt", keys, _renamed(content, keys, last[:middle] + last[middle + 1 :])
        removed = copy.deepcopy(content)
        del value_at(removed, outer)[last]
        yield "removed", keys, removed
        for other in _others(value):
            retyped = copy.deepcopy(content)
            value_at(retyped, outer)[last] = other
            yield f"retyped {other!r}", keys, retyped


def _renamed(content, keys, name):
    changed = copy.deepcopy(content)
    *outer, last = keys
    within = value_at(changed, outer)
    items = [(name if key == last else key, value) for key, value in within.items()]
    within.clear()
    within.update(items)
    return changed


def _others(value):
    if isinstance(value, bool):
        return [str(value).lower(), "maybe", 7]
    if isinstance(value, int | float):
        return [str(value), "many", [value]]
    if value == "auto":
        return ["never", [value]]
    if isinstance(value, str):
        return [3, [value], ""]
    if isinstance(value, dict):
        return ["text", [], 5]
    return []
