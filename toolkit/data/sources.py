"""Sources of rows, read by `datasets`: files, a data set on the Hub or the built-in data.

Streamed, rows are fetched one by one up to the number that is needed, and the rest is neither
downloaded nor converted; they are then tokenised into the cache like any other data, so that every
epoch and every rank reads the same.

The built-in data are signatures and docstrings of the standard library, without a network: read
from the sources of the running Python, which are never imported, and cached.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import hashlib
import json
import logging
import platform
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from toolkit.data.arguments import DataArguments
from toolkit.data.cache import build_once
from toolkit.data.tokens import digest, text_hash
from toolkit.environment import cache_root
from toolkit.errors import UsageError, sentence_of

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder, IterableDataset


DEEPEST: Final = 100
"""Most levels of nesting in a row: Arrow (26.0) takes fewer, and thousands crash it."""

READ_AHEAD: Final = 2**25
"""Bytes of a file that `datasets` may read before it gives the first row of a stream."""

_ESCAPES = re.compile(rb"\\.")
_STRINGS = re.compile(rb'"[^"]*"')
_OPENING, _CLOSING = b"[{", b"]}"
_NO_BRACKETS = bytes(set(range(256)) - set(_OPENING + _CLOSING))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Rows that are not read yet."""

    name: str
    identity: str
    """Changes whenever the rows may have changed, or how many of them are streamed."""

    load: Callable[[Path], Dataset]
    """Returns the rows; may write to the folder it is given, which doesn't last."""

    python: str | None = None


def training_source(arguments: DataArguments, *, limit: int | None = None) -> Source:
    """Return the source of the training rows; `limit` is the number to stream.

    Raises:
        UsageError: the data can't be found.
    """
    if arguments.train_file is not None:
        return _file_source(Path(arguments.train_file), "--train_file", limit)
    if arguments.dataset_name is not None:
        return _hub_source(arguments, arguments.dataset_split, limit)
    return Source(
        name=BUILT_IN_DATA,
        identity=standard_library_hash(),
        load=_load_built_in,
        python=platform.python_version(),
    )


def validation_source(arguments: DataArguments) -> Source | None:
    """Return the source of validation rows that are not a part of the training rows.

    Raises:
        UsageError: the data can't be found.
    """
    limit = arguments.max_eval_samples if arguments.streaming else None
    if arguments.validation_file is not None:
        return _file_source(Path(arguments.validation_file), "--validation_file", limit)
    if arguments.validation_split is not None:
        return _hub_source(arguments, arguments.validation_split, limit)
    return None


_FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {}),
}
"""The builder of `datasets` for each kind of file, and its options."""

TEXT_FILES: Final = (".txt", ".md")
"""Files of a folder of which each is one row."""


def check_file(path: Path, *, flag: str) -> None:
    """Check that a file of rows can be read, without a look at them.

    Raises:
        UsageError: it is not there, empty, or of no format that is read here; or it is a folder
            without text files, or with other files.
    """
    if path.is_dir():
        _text_files(path, flag)
        return
    if not path.is_file():
        raise UsageError(
            f"{flag} {path} is not there: check the path (this is {Path.cwd()}), or leave it out "
            "for the built-in data."
        )
    if path.suffix not in _FORMATS:
        raise UsageError(
            f"{flag} {path} ends in {path.suffix!r}: use a file that ends in one of "
            f"{', '.join(_FORMATS)}."
        )
    if not path.stat().st_size:
        raise UsageError(f"{path} is empty: zero training rows. Pass a file with rows.")


def _text_files(folder: Path, flag: str) -> list[Path]:
    """Return the text files of a folder, by name; hidden files are left out.

    Raises:
        UsageError: there are none, or others beside them.
    """
    inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    others = [path.name for path in inside if not path.is_file() or path.suffix not in TEXT_FILES]
    if others or not inside:
        raise UsageError(
            f"{flag} {folder} holds {others[0] if others else 'no files'}: a folder holds text "
            "alone, in .txt or .md files of which each is a row. Remove other files, or name one "
            "file, or pass a folder of data files as --dataset_name."
        )
    return inside


def _folder_source(folder: Path, flag: str, limit: int | None) -> Source:
    files = _text_files(folder, flag)[:limit]
    for path in files:
        _check_text(path, None)
    texts = [path.read_text(encoding="utf-8") for path in files]

    def load(_: Path) -> Dataset:
        from datasets import Dataset

        return Dataset.from_dict({"text": texts})

    identity = digest("folder", [path.name for path in files], texts)
    return Source(name=folder.resolve().name, identity=identity, load=load)


def _load_built_in(_: Path) -> Dataset:
    from datasets import Dataset

    return Dataset.from_list(standard_library_texts())


def _file_source(path: Path, flag: str, limit: int | None) -> Source:
    check_file(path, flag=flag)
    if path.is_dir():
        return _folder_source(path, flag, limit)
    if path.suffix != ".parquet":
        _check_text(path, limit)
    builder, options = _FORMATS[path.suffix]

    def load(scratch: Path) -> Dataset:
        from datasets import load_dataset_builder
        from datasets.exceptions import DatasetsError

        with quiet_progress():
            try:
                reader = load_dataset_builder(
                    builder, data_files=str(path.absolute()), cache_dir=str(scratch), **options
                )
                if limit is not None:
                    return _first_of(_stream(reader, "train"), limit)
                reader.download_and_prepare()
            # Depending on the mistake, pyarrow's or pandas' own errors come through: ValueErrors.
            except (DatasetsError, ValueError) as error:
                raise UsageError(
                    f"{path} can't be read as {builder}: {sentence_of(error.__cause__ or error)} "
                    "Correct the file, or give it the ending of what it holds."
                ) from error
        # Before the rows are read: an empty split can't be made a data set (datasets 5.2).
        splits = reader.info.splits
        if not splits or not splits["train"].num_examples:
            raise UsageError(f"{path.name} has zero training rows: pass data with rows.")
        return cast("Dataset", reader.as_dataset("train"))

    if limit is not None:  # only the start is read, so the file is not hashed to its end either
        status = path.stat()
        content = f"{path.absolute()} {status.st_size} {status.st_mtime_ns}"
    else:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    return Source(name=path.name, identity=f"{path.suffix} {content} {limit}", load=load)


def _check_text(path: Path, limit: int | None) -> None:
    """Check the lines of a file for what `datasets` (5.2) does not survive; `limit`: of a stream.

    Raises:
        UsageError: a line is not UTF-8, or JSON in it has too many levels.
    """
    depth, read = 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"Line {number} of {path} is not UTF-8: byte {error.start + 1} of it is "
                    f"0x{line[error.start]:02x}. Correct the line, or convert the file: "
                    "iconv -f LATIN1 -t UTF-8 FILE > NEW, with the encoding that it has."
                ) from error
            # A row of JSON lines begins at level 0, and few of them have many brackets at all.
            if path.suffix == ".jsonl":
                depth = 0
            if path.suffix == ".json" or sum(map(line.count, (b"[", b"{"))) > DEEPEST:
                depth = _depth_after(line, depth)
            if depth > DEEPEST:
                raise UsageError(
                    f"Line {number} of {path} nests more than {DEEPEST} levels of lists and "
                    "objects. Write that value as text, or remove it."
                )
            read += len(line)
            if limit is not None and number > limit and read > READ_AHEAD:
                return


def _depth_after(line: bytes, depth: int) -> int:
    """Return the open levels of JSON behind a line, or the first number above DEEPEST."""
    brackets = _STRINGS.sub(b"", _ESCAPES.sub(b"", line)).translate(None, _NO_BRACKETS)
    for bracket in brackets:
        depth += 1 if bracket in _OPENING else -1
        if depth > DEEPEST:
            break
    return depth


def _hub_source(arguments: DataArguments, split: str, limit: int | None) -> Source:
    from datasets import load_dataset, load_dataset_builder
    from datasets.config import HF_DATASETS_CACHE
    from datasets.exceptions import DatasetsError

    name, config = arguments.dataset_name, arguments.dataset_config_name
    assert name is not None
    with quiet_progress(), unreadable_rows(name):
        try:
            if limit is not None:
                reader = load_dataset_builder(name, config)
                # On the Hub the hash is that of the commit, in a folder that of its files.
                identity = f"{reader.hash} {reader.config_id} {split} {limit}"
                stream = _stream(reader, split)
                return Source(name=name, identity=identity, load=lambda _: _first_of(stream, limit))
            dataset = load_dataset(name, config, split=split)
        # An unknown configuration or split is a ValueError, no network a ConnectionError.
        except (DatasetsError, ValueError, OSError) as error:
            offline = f" It is not in the cache ({HF_DATASETS_CACHE}): run once with a network."
            why = sentence_of(error) + offline * isinstance(error, ConnectionError)
            raise UsageError(
                f"The data set {name!r} can't be loaded: {why} Check "
                "--dataset_name, --dataset_config_name, --dataset_split and the network; or pass "
                "--train_file, or neither for the built-in data."
            ) from error
    # `datasets` derives its fingerprint from the files of its cache; `map` relies on it as well.
    return Source(name=name, identity=dataset._fingerprint, load=lambda _: dataset)


def _stream(reader: DatasetBuilder, split: str) -> IterableDataset:
    """Return one split as a stream; only without a name would `datasets` return several."""
    return cast("IterableDataset", reader.as_streaming_dataset(split))


def _first_of(stream: IterableDataset, limit: int) -> Dataset:
    """Return the first rows of a stream, which are held in memory."""
    from datasets import Dataset

    rows = list(stream.take(limit))
    if stream.features is not None:
        return Dataset.from_list(rows, features=stream.features)
    return Dataset.from_list(rows, on_mixed_types="use_json")


@contextlib.contextmanager
def unreadable_rows(name: str) -> Iterator[None]:
    """Raise UsageError for rows that `datasets` begins to read and then does not survive."""
    try:
        yield
    except UnicodeError as error:
        raise UsageError(
            f"{name} has text that is not UTF-8: {sentence_of(error)} Correct that row, or convert "
            "the file."
        ) from error
    except RecursionError as error:
        raise UsageError(
            f"A row of {name} has more levels of lists and objects than `datasets` can read. "
            "Write the nested value as text, or remove its column."
        ) from error


@contextlib.contextmanager
def quiet_progress() -> Iterator[None]:
    """Keep the progress bars of `datasets` out of logs, where each update is a line."""
    import datasets

    if sys.stderr.isatty() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


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
        is_collecting = gc.isenabled()
        gc.disable()  # a tree has no cycles: looking for them takes a third of the time
        try:
            rows = list(dict.fromkeys(_documented_functions(root)))
        finally:
            if is_collecting:
                gc.enable()
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
