"""The built-in data: signatures and docstrings of the standard library, without a network.

Read from the sources of the running Python, which are never imported, and cached.
"""

from __future__ import annotations

import ast
import json
import logging
import platform
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from toolkit.data.cache import build_once
from toolkit.data.tokens import digest, text_hash
from toolkit.environment import cache_root
from toolkit.errors import UsageError

logger = logging.getLogger(__name__)

BUILT_IN_DATA = "standard-library"

_RECIPE = 2
"""Version of the cached folder's contents: raise it with any change to them."""


def standard_library_texts() -> list[dict[str, str]]:
    """Return the built-in data: one row for each public function with a short description.

    The prompt is the function's signature and the completion its docstring.

    Raises:
        UsageError: this Python comes without its sources.
    """
    with (_standard_library() / "rows.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def standard_library_hash() -> str:
    """Return the sha256 over the rows of the built-in data."""
    return (_standard_library() / "hash").read_text(encoding="utf-8")


_SKIPPED_MODULES = {"antigravity", "ensurepip", "idlelib", "lib2to3", "this", "turtledemo"}
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "test", "tests"}

_MOST_LETTERS = 300
"""Most letters of a row: with short rows, activations are small and states dominate memory."""

# A Python with sources has thousands; a zip or a stripped image leaves a handful of stray files.
_FEWEST_ROWS = 500


def _standard_library() -> Path:
    """Return the folder with `rows.jsonl`, and `hash`, that of the rows."""
    root = Path(sysconfig.get_path("stdlib"))
    key = digest(_RECIPE, sys.version, str(root))[:16]

    def build(folder: Path) -> None:
        logger.info("Reading the standard library in %s", root)
        rows = list(dict.fromkeys(_documented_functions(root)))
        if len(rows) < _FEWEST_ROWS:
            raise UsageError(
                f"This Python comes without the sources of its standard library ({len(rows)} "
                f"documented functions in {root}), and the built-in data are made from them. Pass "
                "--train_file or --dataset_name."
            )
        lines = (json.dumps({"prompt": prompt, "completion": text}) for prompt, text in rows)
        (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / "hash").write_text(text_hash(rows), encoding="utf-8")

    name = f"{BUILT_IN_DATA}-{platform.python_version()}-{key}"
    return build_once(cache_root() / name, build)


def _documented_functions(root: Path) -> Iterator[tuple[str, str]]:
    for path in _sources(root):
        # Old code in the library warns of its own escapes while it is parsed.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes(), str(path))
        yield from (row for row in _functions(tree.body) if len("".join(row)) <= _MOST_LETTERS)


def _sources(root: Path) -> Iterator[Path]:
    for module in sorted(sys.stdlib_module_names - _SKIPPED_MODULES):
        if (root / f"{module}.py").is_file():
            yield root / f"{module}.py"
        inside = (path.relative_to(root) for path in (root / module).rglob("*.py"))
        wanted = (path for path in inside if not _SKIPPED_FOLDERS & set(path.parts))
        yield from (root / path for path in sorted(wanted, key=Path.as_posix))


def _functions(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield signature and docstring of the public functions and methods, in their order."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                text = ast.get_docstring(node)
                if text and not node.name.startswith("_"):
                    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
                    yield f"{kind} {node.name}({ast.unparse(node.args)}):\n", text
            case ast.ClassDef() if not node.name.startswith("_"):
                yield from _functions(node.body)
            case ast.If():
                yield from _functions([*node.body, *node.orelse])
            case ast.Try():
                handlers = (statement for handler in node.handlers for statement in handler.body)
                yield from _functions([*node.body, *handlers, *node.orelse, *node.finalbody])
