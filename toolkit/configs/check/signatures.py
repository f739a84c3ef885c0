"""What the installed libraries take: their signatures, read by `ast`, and what was renamed.

Nothing is imported: a library is found on the path of imports, and only the files that define what
a script names are parsed.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from toolkit.configs.check.sources import FULL_EXPORTS, Definition, file_of, names_of, tree_of

LIBRARIES: Final = ("transformers", "trl", "accelerate", "peft", "datasets")
"""Those whose names and arguments are judged."""

RENAMES: Final = Path(__file__).with_name("renames.toml")

TRANSPARENT: Final = {
    *("dataclass", "staticmethod", "classmethod", "abstractmethod"),
    *("requires", "add_start_docstrings"),
}
"""Decorators that leave the arguments as they stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rename:
    """An argument, or a name to import, that a release no longer has."""

    since: str
    """The first release that was found without it."""

    source: str
    """Where this was read."""

    new: str = ""
    """What took its place: a name, or words where that is more than a name; empty for nothing."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """The arguments of a class or function."""

    names: tuple[str, ...]
    positional: int
    """Number of those that may be given by their place."""


@cache
def renames() -> dict[tuple[str, str], Rename]:
    """Return the table of renames: by class, function or module, and by what is gone from it."""
    content = tomllib.loads(RENAMES.read_text("utf-8"))
    return {(of, old): Rename(**content[of][old]) for of in content for old in content[of]}


def renamed(of: str, old: str) -> Rename | None:
    """Return what became of an argument, or of a name to import.

    What the configs and trainers of TRL have from transformers is looked up there.
    """
    found = renames().get((of, old))
    if found is not None or not of.startswith(("trl.", "transformers.Seq2Seq")):
        return found
    if of.endswith(("Config", "Arguments")):
        return renamed("transformers.TrainingArguments", old)
    return renamed("transformers.Trainer", old) if of.endswith("Trainer") else None


def gone(owner: str, old: str) -> Rename | None:
    """Return what became of a name, with its owner as an error calls it: `SFTConfig.__init__`."""
    owner = owner.removesuffix(".__init__")
    tries = (owner, *(f"{library}.{owner}" for library in LIBRARIES))
    return next((found for of in tries if (found := renamed(of, old)) is not None), None)


def lacks(module: str, name: str) -> bool:
    """Whether an installed library certainly has no such name to import from its top."""
    if module not in LIBRARIES or file_of(module) is None:
        return False
    if module in FULL_EXPORTS:
        return name not in _exports(module) and file_of(f"{module}.{name}") is None
    return renamed(module, name) is not None and name not in _exports(module)


def parameters(name: str, *, of_class: bool = False) -> Parameters | None:
    """Return what a class, a function or a method takes; a method of the class itself, `self` too.

    None where that is not certain: it is not installed, takes any argument, or is made by a
    decorator or a base that reading does not follow.
    """
    library, _, rest = name.partition(".")
    if library not in LIBRARIES or not rest:
        return None
    found = _find(name)
    if found is not None:
        module, node = found
        return _of_class(module, node) if isinstance(node, ast.ClassDef) else _of_function(node, 0)
    owner, _, method = name.rpartition(".")
    found = _find(owner)
    if found is None or not isinstance(found[1], ast.ClassDef):
        return None
    function = _method(found[0], found[1], method)
    if function is None:
        return None
    bound = any(_decorator(one) == "classmethod" for one in function.decorator_list)
    return _of_function(function, 0 if of_class and not bound else 1)


def _of_class(module: str, node: ast.ClassDef) -> Parameters | None:
    """Return what making an object takes."""
    if any(_decorator(one) not in TRANSPARENT for one in node.decorator_list) or node.keywords:
        return None
    if _own_method(node, "__new__") is not None:
        return None
    if (own := _own_method(node, "__init__")) is not None:
        return _of_function(own, 1)
    bases = [_base(module, node, base) for base in node.bases]
    names: tuple[str, ...] = ()
    for base in bases:
        # A dataclass on a class that is none, and takes nothing: `KwargsHandler`.
        found = None if base is None else _of_class(*base)
        if found is None:
            return None
        names += found.names
    if any(_decorator(one) == "dataclass" for one in node.decorator_list):
        names = (*dict.fromkeys((*names, *_fields(node))),)
    return Parameters(names, len(names))


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            without = isinstance(one.value, ast.Call) and any(
                word.arg == "init" for word in one.value.keywords
            )
            if not without and "ClassVar" not in ast.unparse(one.annotation):
                yield one.target.id


def _of_function(node: ast.FunctionDef, skipped: int) -> Parameters | None:
    if node.args.kwarg is not None:
        return None
    if any(_decorator(one) not in TRANSPARENT for one in node.decorator_list):
        return None
    if any(_decorator(one) == "staticmethod" for one in node.decorator_list):
        skipped = 0
    places = [one.arg for one in (*node.args.posonlyargs, *node.args.args)][skipped:]
    positional = len(places) if node.args.vararg is None else 1_000
    return Parameters((*places, *(one.arg for one in node.args.kwonlyargs)), positional)


def _decorator(node: ast.expr) -> str:
    inner = node.func if isinstance(node, ast.Call) else node
    return ast.unparse(inner).rpartition(".")[2]


def _own_method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    own = (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == name)
    return next(own, None)


def _method(module: str, node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """Return a method, of the class or of the first base that has it."""
    if (own := _own_method(node, name)) is not None:
        return own
    for base in node.bases:
        found = _base(module, node, base)
        if found is None:
            return None
        if (function := _method(*found, name)) is not None:
            return function
    return None


def _base(module: str, node: ast.ClassDef, base: ast.expr) -> tuple[str, ast.ClassDef] | None:
    """Return a base of a class and its module; None if it is not found in the judged libraries."""
    found = _look_up(module, base.id) if isinstance(base, ast.Name) else None
    if found is None or found[1] is node or not isinstance(found[1], ast.ClassDef):
        return None
    return found[0], found[1]


def _find(name: str) -> tuple[str, Definition] | None:
    """Return the definition of a full name, and the module that it stands in."""
    module, _, last = name.rpartition(".")
    return _look_up(module, last) if module else None


@cache
def _look_up(module: str, name: str) -> tuple[str, Definition] | None:
    """Return the definition of a name of a module, followed through its imports."""
    seen: set[tuple[str, str]] = set()
    while module.partition(".")[0] in LIBRARIES and (module, name) not in seen:
        seen.add((module, name))
        entry = names_of(module).get(name)
        if entry is None or not isinstance(entry, tuple):
            return None if entry is None else (module, entry)
        module, name = entry
    return None


@cache
def _exports(module: str) -> frozenset[str]:
    """Return what the text of a module names: defined, imported, or listed for a lazy import."""
    nodes = [*ast.walk(tree_of(module))]
    named = {node.value for node in nodes if isinstance(node, ast.Constant)}
    assigned = {node.id for node in nodes if isinstance(node, ast.Name)}
    texts = {one for one in named if isinstance(one, str)}
    return frozenset(texts | assigned | {*names_of(module)})
