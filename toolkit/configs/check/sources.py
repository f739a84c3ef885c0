"""The installed libraries' own code that reads configs, run without torch.

What a release accepts is best said by that release. Its modules for configs are plain Python, but
importing them brings torch with them, which takes seconds. Here they are executed from the
installed files with a stand-in for torch and everything else that is heavy, under names of their
own: nobody else sees them, and the variables and files that they see are those of a check.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

REAL: Final = {"yaml", "packaging", "pydantic", "typing_extensions"}
"""Packages that are imported as they are, beside the standard library."""

QUIET: Final = {"logging", "warnings", "socket", "subprocess"}
"""Modules of the standard library that a check must not use: they speak, or reach outside."""

FULL_EXPORTS: Final = ("trl", "accelerate", "peft", "datasets")
"""Libraries whose `__init__` names all that can be imported from them; that of transformers finds
the names of its models at run time."""

Definition = ast.ClassDef | ast.FunctionDef


class StandIn(type):
    """A class that has every attribute, and returns itself where it is called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        inner = stand_in(f"{cls.__name__}.{name}")
        setattr(cls, name, inner)
        return inner

    def __call__(cls, *_: object, **__: object) -> Any:
        return cls

    def __getitem__(cls, _: object) -> Any:
        return cls

    def __or__(cls, _: object) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Any:
        return iter(())

    def __bool__(cls) -> bool:
        return False

    def __instancecheck__(cls, instance: object) -> bool:
        return instance is cls or cls in getattr(instance, "__mro__", ())


def stand_in(name: str, **attributes: Any) -> Any:
    """Return something in place of a module, a class or a function that is not loaded."""
    return StandIn(name, (), attributes)


class Sources:
    """Modules of one library and of those that it reads, each executed when it is first asked for.

    Args:
        library: The package that the caller asks for.
        stand_ins: What stands in for its own modules that a check does not need.
    """

    def __init__(self, library: str, stand_ins: Mapping[str, Any]) -> None:
        self._packages = {library}
        self._modules: dict[str, Any] = dict(stand_ins)
        self._builtins = vars(builtins) | {"__import__": self._import, "open": self._open}
        self.environ: dict[str, str] = {}
        """Variables, as the library sees them."""

        self.files: dict[str, str] = {}
        """Text of files by name, as the library sees them, in place of those on the disk."""

        system = vars(os) | {"environ": self.environ, "getenv": self.environ.get}
        self._modules["os"] = SimpleNamespace(**system)

    def replace(self, name: str, module: Any) -> None:
        """Have something stand in for a module that is not yet loaded."""
        self._modules[name] = module

    def load_or_stand_in(self, name: str) -> Any:
        """Return what stands in for a module, before anything else has asked for it."""
        if name not in self._modules:
            release = version_of(name) or "0"
            self._modules[name] = stand_in(name, __version__=release)
        return self._modules[name]

    def get(self, module: str, name: str) -> Any:
        """Return what a module defines under a name."""
        found = self.load(module)
        if isinstance(found, ModuleType) and name not in vars(found) and hasattr(found, "__path__"):
            return self._member(found, name)
        return getattr(found, name)

    def load(self, name: str) -> Any:
        """Return a module; a package is never executed, and has its modules' names only."""
        if name not in self._modules:
            path = file_of(name)
            if path is None:
                top = name.partition(".")[0]
                is_there = find_spec(top) is not None
                raise ModuleNotFoundError(f"no {name}" if is_there else f"{top} is not installed")
            module = ModuleType(f"{__name__}:{name}")
            is_package = path.name == "__init__.py"
            module.__package__ = name if is_package else name.rpartition(".")[0]
            module.__file__ = str(path)
            module.__dict__["__builtins__"] = self._builtins
            # Decorators of dataclasses and models look their module up, under its own name.
            self._modules[name] = sys.modules[module.__name__] = module
            if is_package:
                module.__path__ = [str(path.parent)]
            else:
                code = SourceFileLoader(name, str(path)).get_code(name)
                assert code is not None, path
                exec(code, module.__dict__)
        return self._modules[name]

    def _member(self, package: ModuleType, name: str) -> Any:
        """Return a package's module, or what its `__init__` takes from one."""
        inner = f"{_name_of(package)}.{name}"
        if inner in self._modules or file_of(inner) is not None:
            return self.load(inner)
        entry = names_of(_name_of(package)).get(name)
        if not isinstance(entry, tuple) or entry[0].partition(".")[0] not in self._packages:
            return stand_in(inner)
        return self.get(*entry)

    def _import(
        self,
        name: str,
        scope: Mapping[str, Any] | None = None,
        _: object = None,
        wanted: tuple[str, ...] = (),
        level: int = 0,
    ) -> Any:
        if level and scope is not None:
            above = str(scope["__package__"]).split(".")
            name = ".".join([*above[: len(above) - level + 1], *([name] if name else [])])
        top = name.partition(".")[0]
        if top in self._packages or name in self._modules:
            if not wanted:
                return self.load(name if name in self._modules else top)
            module = self.load(name)
            if isinstance(module, ModuleType) and not hasattr(module, "__path__"):
                return module
            return SimpleNamespace(**{each: self.get(name, each) for each in wanted})
        if top in QUIET or not (top in REAL or top in sys.stdlib_module_names):
            within = self.load_or_stand_in(top)
            for part in name.split(".")[1:]:
                within = getattr(within, part)
            return within if wanted else self._modules[top]
        return importlib.__import__(name, scope, None, wanted, 0)

    def _open(self, file: object, *_: object, **__: object) -> Any:
        if str(file) not in self.files:
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return io.StringIO(self.files[str(file)])


def _name_of(module: ModuleType) -> str:
    """Return a module's name in the library."""
    return module.__name__.rpartition(":")[2]


@cache
def version_of(library: str) -> str | None:
    """Return the release of a library that is installed; None for none."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


@cache
def file_of(name: str) -> Path | None:
    """Return the file of a module of an installed library; None for none."""
    top, *rest = name.split(".")
    spec = find_spec(top)
    if spec is None or spec.origin is None:
        return None
    base = Path(spec.origin).parent.joinpath(*rest)
    files = (base / "__init__.py", base.with_suffix(".py"))
    return next((file for file in files if file.is_file()), None)


@cache
def tree_of(name: str) -> ast.Module:
    """Return what stands in the file of a module; an empty one where there is none."""
    file = file_of(name)
    return ast.parse("" if file is None else file.read_bytes())


@cache
def names_of(module: str) -> dict[str, Definition | tuple[str, str]]:
    """Return what a module defines, and what it imports: the module and the name there."""
    found: dict[str, Definition | tuple[str, str]] = {}
    is_package = file_of(f"{module}.__init__") is not None
    for node in _statements(tree_of(module).body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            steps = module.split(".")
            if node.level:
                kept = len(steps) - node.level + is_package
                source = ".".join([*steps[:kept], *([node.module] if node.module else [])])
            else:
                source = node.module or ""
            for alias in node.names:
                # Those of transformers are its models, thousands of files.
                followed = alias.name == "*" and module.partition(".")[0] in FULL_EXPORTS
                everything = names_of(source) if followed else ()
                found.update({name: (source, name) for name in everything if name not in found})
                found.setdefault(alias.asname or alias.name, (source, alias.name))
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Give the statements of a module, those under its conditions too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.body)
            yield from _statements(node.orelse)
