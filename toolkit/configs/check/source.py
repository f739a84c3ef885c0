"""A Python file that is read and not run: what its names stand for, as far as the file says it.

Names are followed through imports, assignments and the calls of functions of the same file. A name
that could be several things, or comes from elsewhere, stands for nothing: rules are silent on it.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

from toolkit.configs.check.finding import Edit, Finding, Place, finding_of

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
Function = ast.FunctionDef | ast.AsyncFunctionDef

SAME_OBJECT: Final = frozenset(
    {"to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16", "requires_grad_"}
)
"""Methods that return the model that they are called on."""

MOST_STEPS: Final = 12
"""Names and calls that are followed for one answer: an end for what refers to itself."""


@dataclass(frozen=True, slots=True)
class Binding:
    """One place where a name gets its value."""

    node: ast.AST
    at: tuple[int, int]
    """Line and column from which on it holds."""

    value: ast.expr | None = None
    """What is assigned; None where the file does not say it."""

    index: int | None = None
    """Place in the tuple that `value` returns."""

    dotted: str | None = None
    """What an import brings."""


@dataclass(frozen=True, slots=True)
class Making:
    """One way by which a value may have come about."""

    by: str
    """Full name of the class, the function or the method; `?` where it is not known."""

    call: ast.Call | None = None
    index: int | None = None
    """Place in the tuple that was returned."""


UNKNOWN: Final = Making("?")


class Source:
    """A parsed file."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self.tree = ast.parse(text)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = []
        self._lists: dict[ast.AST, tuple[ast.AST, str]] = {}
        self._dotted: dict[ast.expr, str | None] = {}
        self._makings: dict[ast.expr, set[Making]] = {}
        for node in ast.walk(self.tree):
            self.nodes.append(node)
            self.parents.update((child, node) for child in ast.iter_child_nodes(node))
            for name, value in ast.iter_fields(node):
                if isinstance(value, list):
                    self._lists |= dict.fromkeys(cast(list[ast.AST], value), (node, name))
        self._bindings: dict[Scope, dict[str, list[Binding]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for node in self.nodes:
            for name, binding in _bindings(node):
                self._bindings[self._owner(node)][name].append(binding)

    # Places

    def parents_of(self, node: ast.AST) -> Iterator[ast.AST]:
        """Give what a node stands in, from the nearest on."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def scope_of(self, node: ast.AST) -> Scope:
        """Return the function, class or module that a node stands in."""
        return next(parent for parent in self.parents_of(node) if isinstance(parent, Scope))

    def _owner(self, node: ast.AST) -> Scope:
        if isinstance(node, ast.arg):
            return next(
                one for one in self.parents_of(node) if isinstance(one, Function | ast.Lambda)
            )
        return self.scope_of(node) if node in self.parents else self.tree

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls of the file."""
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    def calls_to(self, *names: str) -> Iterator[ast.Call]:
        """Give the calls of what has one of these full names; see `called`."""
        return (call for call in self.calls if self.called(call) in names)

    @cached_property
    def functions(self) -> dict[str, list[Function]]:
        """The functions by name."""
        found: dict[str, list[Function]] = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, Function):
                found[node.name].append(node)
        return found

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The classes by name."""
        return {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}

    @cached_property
    def _lines(self) -> list[str]:
        """The lines with their ends, as Python counts them."""
        return re.split(r"(?<=\n)|(?<=\r)(?!\n)", self.text)

    def place(self, node: ast.AST) -> Place:
        """Return the place of a node, whose columns count bytes of UTF-8."""
        line, column = _position(node)
        before = len(self._lines[line - 1].encode()[:column].decode())
        start = sum(map(len, self._lines[: line - 1])) + before
        return Place(start=start, line=line, column=before + 1)

    def finding(
        self, case: str, node: ast.AST, edits: tuple[Edit, ...] = (), **words: Any
    ) -> Finding:
        """Return the finding of a case of rules.toml at a node; see `finding_of`."""
        return finding_of(case, self.path, self.place(node), edits, **words)

    # Names

    def bindings(self, name: ast.Name) -> list[Binding]:
        """Return where a name got the value that it has here: in the nearest scope that has it.

        Of these, the last that certainly ran, and those after it that may have run.
        """
        scope = self.scope_of(name)
        for place in [scope, *(one for one in self.parents_of(scope) if isinstance(one, Scope))]:
            if isinstance(place, ast.ClassDef) and place is not scope:
                continue
            found = self._bindings[place].get(name.id)
            if not found:
                continue
            here = place is scope
            blocks = {*self._blocks(name)} if here else {(place, "body")}
            before = [one for one in found if not here or one.at <= _position(name)]
            for at in reversed(range(len(before))):
                node = before[at].node
                if isinstance(node, ast.arg) or next(self._blocks(node)) in blocks:
                    return before[at:]
            return before or found
        return []

    def _blocks(self, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
        """Give the lists of statements that a node stands in, as owner and name, from inside."""
        for one in (node, *self.parents_of(node)):
            if one in self._lists:
                yield self._lists[one]

    def dotted(self, expression: ast.expr, steps: int = MOST_STEPS) -> str | None:
        """Return the full name of what is imported, `transformers.Trainer`; None for all else."""
        if isinstance(expression, ast.Attribute):
            inner = self.dotted(expression.value, steps)
            return None if inner is None else f"{inner}.{expression.attr}"
        if not isinstance(expression, ast.Name) or steps == 0:
            return None
        if expression not in self._dotted:
            self._dotted[expression] = None  # for names that lead back to it
            found = {
                self.dotted(one.value, steps - 1) if one.value and one.index is None else one.dotted
                for one in self.bindings(expression)
            }
            self._dotted[expression] = found.pop() if len(found) == 1 else None
        return self._dotted[expression]

    def makers(self, expression: ast.expr) -> set[str]:
        """Return what made a value, by full name: the class, the function or the method.

        `accelerate.Accelerator` for an object of it, `accelerate.Accelerator.prepare` for what its
        method returned. `?` is among them where one of the ways to the value is not known.
        """
        return {made.by for made in self.makings(expression)}

    def makings(self, expression: ast.expr, steps: int = MOST_STEPS) -> set[Making]:
        """Return what made a value, as `makers` does, with the calls that made it."""
        if steps == 0:
            return {UNKNOWN}
        if expression not in self._makings:
            self._makings[expression] = {UNKNOWN}  # for values that lead back to it
            self._makings[expression] = self._find_makings(expression, steps)
        return self._makings[expression]

    def _find_makings(self, expression: ast.expr, steps: int) -> set[Making]:
        found: set[Making] = set()
        match expression:
            case ast.Name():
                for one in self.bindings(expression):
                    found |= self._made_by(one, steps - 1)
            case ast.IfExp():
                found |= self.makings(expression.body, steps - 1)
                found |= self.makings(expression.orelse, steps - 1)
            case ast.Attribute():
                for one in self.makings(expression.value, steps - 1):
                    trainer = is_trainer_class(self.library_class(one.by))
                    known = trainer and expression.attr == "accelerator"
                    found.add(Making(ACCELERATOR) if known else UNKNOWN)
            case ast.Call():
                function = expression.func
                if (name := self.called(expression, steps - 1)) is not None:
                    found.add(Making(name, expression))
                elif isinstance(function, ast.Attribute) and function.attr in SAME_OBJECT:
                    found |= self.makings(function.value, steps - 1)
            case _:
                pass
        return found or {UNKNOWN}

    def origins(self, expression: ast.expr, steps: int = MOST_STEPS) -> set[Making]:
        """Return what first made a model: before it was prepared, unwrapped or given adapters."""
        found: set[Making] = set()
        for one in self.makings(expression):
            wrapped = one.call is not None and one.by in WRAPPERS and steps
            at = one.index or 0
            if wrapped and one.call is not None and len(one.call.args) > at:
                found |= self.origins(one.call.args[at], steps - 1)
            else:
                found.add(one)
        return found

    def _made_by(self, binding: Binding, steps: int) -> set[Making]:
        if isinstance(binding.node, ast.arg):
            found: set[Making] = set()
            return found.union(*(self.makings(one, steps) for one in self._passed(binding.node)))
        if binding.value is None:
            return {UNKNOWN}
        made = self.makings(binding.value, steps)
        if binding.index is None:
            return made
        return {Making(one.by, one.call, binding.index) for one in made}

    def called(self, call: ast.Call, steps: int = MOST_STEPS) -> str | None:
        """Return the full name of what is called; `Class.method` for a method of a known object."""
        if (name := self.dotted(call.func)) is not None:
            return name
        if isinstance(call.func, ast.Attribute) and call.func.attr not in SAME_OBJECT and steps:
            makers = {made.by for made in self.makings(call.func.value, steps - 1)}
            if len(makers) == 1 and (maker := makers.pop()) != "?":
                return f"{maker}.{call.func.attr}"
        return None

    def _passed(self, argument: ast.arg) -> list[ast.expr]:
        """Return what the calls in this file pass for an argument; nothing if that is not known."""
        function = self._owner(argument)
        if not isinstance(function, Function) or len(self.functions[function.name]) > 1:
            return []
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        values: list[ast.expr] = []
        for call in self.calls:
            if not isinstance(call.func, ast.Name) or call.func.id != function.name:
                continue
            named = keywords_of(call).get(argument.arg)
            at = names.index(argument.arg) if argument.arg in names else len(call.args)
            values += call.args[at : at + 1] if named is None else [named]
        return values

    def base_names(self, class_: ast.ClassDef) -> list[str]:
        """Return the full names of the classes from elsewhere that a class stands on."""
        names: list[str] = []
        for base in class_.bases:
            name = self.dotted(base) or "?"
            above = self.classes.get(name.removeprefix(LOCAL)) if name.startswith(LOCAL) else None
            if above is None:
                names.append(name)
            elif above is not class_:
                names += self.base_names(above)
        return names

    def library_class(self, maker: str) -> str:
        """Return the class from elsewhere that one of this file stands on; others as they are."""
        class_ = self.classes.get(maker.removeprefix(LOCAL)) if maker.startswith(LOCAL) else None
        return maker if class_ is None else next(iter(self.base_names(class_)), "?")


LOCAL: Final = "<here>."
"""Before the name of a class of the file itself."""

ACCELERATOR: Final = "accelerate.Accelerator"
PREPARE: Final = f"{ACCELERATOR}.prepare"
DEEPSPEED: Final = "deepspeed.initialize"
WRAPPERS: Final = (PREPARE, f"{ACCELERATOR}.unwrap_model", "peft.get_peft_model")


def keywords_of(call: ast.Call) -> dict[str | None, ast.expr]:
    """Return the arguments of a call that are given by name; None: `**` of others."""
    return {one.arg: one.value for one in call.keywords}


def is_trainer_class(name: str) -> bool:
    """Whether a full name is that of a Trainer of transformers or TRL."""
    library, _, rest = name.partition(".")
    return library in ("transformers", "trl") and rest.endswith("Trainer")


def _position(node: ast.AST) -> tuple[int, int]:
    placed = cast(ast.expr, node)
    return placed.lineno, placed.col_offset


def _bindings(node: ast.AST) -> Iterator[tuple[str, Binding]]:
    """Give the names that a node binds."""
    match node:
        case ast.Import():
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                dotted = alias.name if alias.asname else name
                yield name, Binding(node, _position(node), dotted=dotted)
        case ast.ImportFrom():
            for alias in node.names:
                dotted = None if node.level else f"{node.module}.{alias.name}"
                yield alias.asname or alias.name, Binding(node, _position(node), dotted=dotted)
        case ast.Assign():
            for target in node.targets:
                yield from _of_target(target, node.value, node)
        case ast.AnnAssign() | ast.NamedExpr():
            yield from _of_target(node.target, node.value, node)
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            yield from _of_target(node.target, None, node.target)
        case ast.withitem() if node.optional_vars is not None:
            yield from _of_target(node.optional_vars, None, node.optional_vars)
        case ast.arg() | ast.FunctionDef() | ast.AsyncFunctionDef():
            name = node.arg if isinstance(node, ast.arg) else node.name
            yield name, Binding(node, _position(node))
        case ast.ClassDef():
            yield node.name, Binding(node, _position(node), dotted=f"{LOCAL}{node.name}")
        case _:
            return


def _of_target(
    target: ast.expr, value: ast.expr | None, node: ast.AST
) -> Iterator[tuple[str, Binding]]:
    """Give the names of a target; an assignment holds from its end on."""
    end = cast(ast.expr, node)
    at = (end.end_lineno or end.lineno, end.end_col_offset or end.col_offset)
    match target:
        case ast.Name():
            yield target.id, Binding(node, at, value)
        case ast.Tuple() | ast.List():
            pairs = value.elts if isinstance(value, ast.Tuple | ast.List) else None
            for index, one in enumerate(target.elts):
                if pairs is not None and len(pairs) == len(target.elts):
                    yield from _of_target(one, pairs[index], node)
                elif isinstance(one, ast.Name):
                    yield one.id, Binding(node, at, value, index)
        case _:
            return
