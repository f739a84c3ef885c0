"""Training data: from text to token rows, in the order they are trained in.

The same arguments give the same rows in the same order on every rank, for any number of
ranks. The built-in data need no network. What takes time is cached.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import logging
import math
import platform
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.environment import cache_root
from toolkit.errors import UsageError
from toolkit.training.arguments import DataArguments
from toolkit.training.cache import build_once

if TYPE_CHECKING:
    import torch
    from datasets import Dataset, Features
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

IGNORED = -100
"""The label of a token that the loss leaves out, as PyTorch and transformers have it."""

BUILT_IN_DATA = "standard-library"

_ROWS_RECIPE = 1
_TOKENS_RECIPE = 1
"""To be raised with any change to what a cached folder holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """Tokenised rows in the cache, and what a record says of them."""

    name: str
    hash: str
    """sha256 over the text of the rows."""

    tokens_hash: str
    """sha256 over the token ids and labels."""

    rows: int
    dropped: int
    """Rows left out because none of their tokens is trained on."""

    largest_id: int
    python: str | None
    """Version of the Python that the rows come from; None for other data."""

    folder: Path

    def load(self) -> Dataset:
        """Return the rows: `input_ids`, `labels`, and `sample_id`, the row's number in the data."""
        from datasets import Dataset

        return Dataset.load_from_disk(str(self.folder / "rows"))

    def facts(self) -> dict[str, Any]:
        names = ("name", "hash", "tokens_hash", "rows", "dropped", "python")
        return {name: getattr(self, name) for name in names}


def prepare_data(
    arguments: DataArguments, tokenizer: str | Path, *, trust_remote_code: bool = False
) -> TrainingData:
    """Return the rows that `arguments` ask for, tokenised once and cached.

    Args:
        tokenizer: the folder of the tokenizer, as `model.resolve_tokenizer` gives it.

    Raises:
        UsageError: the data can't be found or read, have unknown columns, or leave no row.
    """
    source = _find_source(arguments)
    key = _digest(
        _TOKENS_RECIPE,
        source.identity,
        arguments.text_column,
        arguments.max_length,
        arguments.max_train_samples,
        _tokenizer_identity(Path(tokenizer)),
    )

    def build(folder: Path) -> None:
        from toolkit.training.model import load_tokenizer

        logger.info("Tokenising %s", source.name)
        raw = _first_rows(source.load(folder / "raw"), arguments.max_train_samples)
        columns = _columns(raw, source.name, arguments.text_column)
        facts = _write_tokens(
            raw,
            folder,
            columns=columns,
            tokenizer=load_tokenizer(tokenizer, trust_remote_code=trust_remote_code),
            max_length=arguments.max_length,
            key=key,
        )
        if not facts["rows"]:
            raise UsageError(
                f"{source.name} leaves zero training rows: none of its {len(raw)} rows has a token "
                f"to train on within --max_length {arguments.max_length}. Pass a longer "
                "--max_length, or data with text."
            )
        (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")

    folder = build_once(cache_root() / "tokens" / key, build)
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    return TrainingData(name=source.name, python=source.python, folder=folder, **facts)


def standard_library_rows() -> Dataset:
    """Return the built-in data: one row for each public, documented function.

    The prompt is the function's signature and the completion its docstring, read from the
    sources of the running Python, never imported.

    Raises:
        UsageError: this Python comes without its sources.
    """
    from datasets import Dataset

    with (_standard_library() / "rows.jsonl").open(encoding="utf-8") as lines:
        return Dataset.from_list([json.loads(line) for line in lines])


def standard_library_hash() -> str:
    """Return the sha256 over the rows of the built-in data."""
    return (_standard_library() / "hash").read_text(encoding="utf-8")


def supervised_tokens(labels: Sequence[int]) -> int:
    """Count the tokens of a row that are trained on; a causal LM never predicts the first."""
    return sum(label != IGNORED for label in labels[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """Pads rows on the right to the longest of their batch.

    Padding is masked by its position, never by its id: where the padding token is also the
    end of text, a model has to go on learning to end.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        import torch

        lengths = [len(row["input_ids"]) for row in rows]

        def padded(values: Iterable[Sequence[int]], filler: int) -> torch.Tensor:
            width = max(lengths)
            return torch.tensor([[*value, *[filler] * (width - len(value))] for value in values])

        return {
            "input_ids": padded((row["input_ids"] for row in rows), self.pad_token_id),
            "attention_mask": padded(([1] * length for length in lengths), 0),
            "labels": padded((row["labels"] for row in rows), IGNORED),
            "sample_id": torch.tensor([row["sample_id"] for row in rows]),
        }


def count_steps(
    rows: int, *, global_batch: int, max_steps: int, num_train_epochs: float = 0.0
) -> int:
    """Return the optimizer steps of a run; a positive `max_steps` wins, as in the Trainer."""
    if max_steps > 0:
        return max_steps
    return max(1, math.ceil(_steps_per_epoch(rows, global_batch) * num_train_epochs))


def training_rows(
    dataset: Dataset,
    *,
    steps: int,
    global_batch: int,
    seed: int,
    throughput_steps: int = 0,
    max_length: int,
) -> Dataset:
    """Return the rows of a whole run, to be read one after the other.

    First the ragged rows of `steps` optimizer steps, one seeded permutation an epoch, then the
    packed rows of `throughput_steps` more. When W ranks take every W-th batch, as Accelerate
    deals them, a step holds the same rows for every W. Each epoch leaves out the rows at
    its end that fill no step, so no step holds a row twice.

    Raises:
        UsageError: one step takes more rows than there are.
    """
    import numpy as np
    from datasets import concatenate_datasets

    steps_per_epoch = _steps_per_epoch(len(dataset), global_batch)
    epochs = [
        np.random.Generator(np.random.PCG64(seed + epoch)).permutation(len(dataset))
        for epoch in range(-(-steps // steps_per_epoch))
    ]
    whole_steps = [epoch[: steps_per_epoch * global_batch] for epoch in epochs]
    order = np.concatenate([*whole_steps, np.empty(0, dtype=np.int64)])[: steps * global_batch]
    ragged = dataset.select(order, keep_in_memory=True)
    if not throughput_steps:
        return ragged
    packed = pack(dataset, length=max_length, rows=throughput_steps * global_batch)
    return concatenate_datasets([ragged, packed])


def pack(dataset: Dataset, *, length: int, rows: int) -> Dataset:
    """Return `rows` rows of exactly `length` tokens, for measuring speed.

    The texts follow each other without a gap, are cut where a row is full, begin again after the
    last one, and every token is trained on. `sample_id` is negative: -1, -2, ...
    """
    import numpy as np
    from datasets import Dataset

    needed = rows * length
    pieces: list[list[int]] = []
    held = 0
    while held < needed:
        for batch in dataset.iter(batch_size=1000):
            pieces += batch["input_ids"]
            held += sum(map(len, batch["input_ids"]))
            if held >= needed:
                break
    stream = np.concatenate([*pieces, np.empty(0, dtype=np.int64)]).astype(np.int32)
    blocks = list(stream[:needed].reshape(rows, length))
    return Dataset.from_dict(
        {"input_ids": blocks, "labels": blocks, "sample_id": [-1 - row for row in range(rows)]},
        features=_features(),
    )


def _steps_per_epoch(rows: int, global_batch: int) -> int:
    if rows < global_batch:
        raise UsageError(
            f"One optimizer step takes {global_batch} rows and the data have only {rows}. Lower "
            "--per_device_train_batch_size or --gradient_accumulation_steps, or pass more data."
        )
    return rows // global_batch


# Where rows come from


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    name: str
    identity: str
    """Changes whenever the rows may have changed."""

    load: Callable[[Path], Dataset]
    """Returns the rows; may write to the folder it is given, which doesn't last."""

    python: str | None = None


def _find_source(arguments: DataArguments) -> _Source:
    if arguments.train_file is not None:
        return _file_source(Path(arguments.train_file))
    if arguments.dataset_name is not None:
        return _hub_source(arguments, arguments.dataset_name)
    return _Source(
        name=BUILT_IN_DATA,
        identity=standard_library_hash(),
        load=lambda _: standard_library_rows(),
        python=platform.python_version(),
    )


_FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {}),
}
"""The builder of `datasets` for each kind of file, and its options."""


def _file_source(path: Path) -> _Source:
    if not path.is_file():
        what = "is a folder, not a file" if path.is_dir() else "is not there"
        raise UsageError(
            f"--train_file {path} {what}: check the path (this is {Path.cwd()}), or leave it out "
            "for the built-in data."
        )
    if path.suffix not in _FORMATS:
        raise UsageError(
            f"--train_file {path} ends in {path.suffix!r}: use a file that ends in one of "
            f"{', '.join(_FORMATS)}."
        )
    if not path.stat().st_size:
        raise UsageError(f"{path} is empty: zero training rows. Pass a file with rows.")
    builder, options = _FORMATS[path.suffix]

    def load(scratch: Path) -> Dataset:
        from datasets import load_dataset_builder
        from datasets.exceptions import DatasetsError

        with _quiet_progress():
            try:
                reader = load_dataset_builder(
                    builder, data_files=str(path.absolute()), cache_dir=str(scratch), **options
                )
                reader.download_and_prepare()
            # Depending on what is wrong, pyarrow's or pandas' own errors come through: ValueErrors.
            except (DatasetsError, ValueError) as error:
                raise UsageError(
                    f"{path} can't be read as {builder}: {_first_line(error.__cause__ or error)} "
                    "Correct the file, or give it the ending of what it holds."
                ) from error
        if not reader.info.splits["train"].num_examples:
            raise UsageError(f"{path.name} has zero training rows: pass data with rows.")
        return reader.as_dataset("train")

    with path.open("rb") as content:
        identity = hashlib.file_digest(content, "sha256").hexdigest()
    return _Source(name=path.name, identity=f"{path.suffix} {identity}", load=load)


def _hub_source(arguments: DataArguments, name: str) -> _Source:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    with _quiet_progress():
        try:
            dataset = load_dataset(
                name, arguments.dataset_config_name, split=arguments.dataset_split
            )
        # An unknown configuration or split is a ValueError, no network a ConnectionError.
        except (DatasetsError, ValueError, OSError) as error:
            raise UsageError(
                f"The data set {name!r} can't be loaded: {_first_line(error)} Check "
                "--dataset_name, --dataset_config_name, --dataset_split and the network; or pass "
                "--train_file, or neither for the built-in data."
            ) from error
    # `datasets` derives its fingerprint from the files of its cache; `map` relies on it as well.
    return _Source(name=name, identity=dataset._fingerprint, load=lambda _: dataset)


def _first_rows(dataset: Dataset, limit: int | None) -> Dataset:
    return dataset if limit is None else dataset.select(range(min(limit, len(dataset))))


def _columns(dataset: Dataset, name: str, text_column: str | None) -> tuple[str, ...]:
    """Return `("prompt", "completion")`, or the one column of text."""
    from datasets import Value

    found = ", ".join(dataset.column_names) or "none"
    if not len(dataset):
        raise UsageError(f"{name} has zero training rows: pass data with rows.")
    if text_column is not None:
        columns: tuple[str, ...] = (text_column,)
    elif {"prompt", "completion"} <= set(dataset.column_names):
        columns = ("prompt", "completion")
    else:
        columns = ("text",)
    if not set(columns) <= set(dataset.column_names):
        missing = f"no column {text_column!r}" if text_column else "no column to train on"
        raise UsageError(
            f"{name} has {missing}; its columns are: {found}. Name the column with --text_column, "
            "or rename the columns to text, or to prompt and completion."
        )
    for column in columns:
        feature = dataset.features[column]
        if not (isinstance(feature, Value) and feature.dtype in ("string", "large_string", "null")):
            raise UsageError(
                f"The column {column!r} of {name} holds {feature}, not text. Write the text into a "
                "column of its own (for messages: apply the chat template) and pass --text_column."
            )
    return columns


def _first_line(error: BaseException) -> str:
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return line if line.endswith((".", "!", "?")) else f"{line}."


@contextlib.contextmanager
def _quiet_progress() -> Iterator[None]:
    """Keep the bars of `datasets` out of logs: where nobody watches, each update is a line."""
    import datasets

    if sys.stderr.isatty() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


# The built-in data


_SKIPPED_MODULES = {"antigravity", "ensurepip", "idlelib", "lib2to3", "this", "turtledemo"}
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "test", "tests"}

# A Python with sources has thousands; a zip or a stripped image leaves a handful of stray files.
_FEWEST_ROWS = 500


def _standard_library() -> Path:
    """Return the folder with `rows.jsonl`, and `hash`, that of the rows."""
    root = Path(sysconfig.get_path("stdlib"))
    key = _digest(_ROWS_RECIPE, sys.version, str(root))[:16]

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
        (folder / "hash").write_text(_text_hash(rows), encoding="utf-8")

    name = f"{BUILT_IN_DATA}-{platform.python_version()}-{key}"
    return build_once(cache_root() / name, build)


def _documented_functions(root: Path) -> Iterator[tuple[str, str]]:
    for path in _sources(root):
        # Old code in the library warns of its own escapes while it is parsed.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes(), str(path))
        yield from _functions(tree.body)


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


def _text_hash(rows: Iterable[Sequence[str | None]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(list(row)).encode() + b"\n")
    return digest.hexdigest()


# Tokens


_TOKENIZER_FILES = re.compile(
    r"(tokenizer|tokenization|special_tokens|added_tokens|vocab|merges|sentencepiece|spiece).*"
    r"|.*\.(model|tiktoken|py)"
)


def _tokenizer_identity(folder: Path) -> str:
    content = [
        [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]
        for path in sorted(folder.iterdir())
        if path.is_file() and _TOKENIZER_FILES.fullmatch(path.name)
    ]
    return _digest(content, version("transformers"), version("tokenizers"))


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _features() -> Features:
    from datasets import Features, List, Value

    ids = List(Value("int32"))
    return Features({"input_ids": ids, "labels": ids, "sample_id": Value("int64")})


def _write_tokens(
    raw: Dataset,
    folder: Path,
    *,
    columns: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    key: str,
) -> dict[str, Any]:
    """Write the tokenised rows to `folder / "rows"` and return what there is to say of them."""
    texts = raw.select_columns(list(columns))
    with _quiet_progress():
        tokens = texts.map(
            tokenise,
            batched=True,
            with_indices=True,
            fn_kwargs={"tokenizer": tokenizer, "columns": columns, "max_length": max_length},
            remove_columns=list(columns),
            features=_features(),
            load_from_cache_file=False,
            cache_file_name=str(folder / "map.arrow"),
            # Without it `datasets` hashes the tokenizer, whose pickle is not always the same.
            new_fingerprint=key[:32],
            desc="Tokenising",
        )
        tokens.save_to_disk(str(folder / "rows"))
    (folder / "map.arrow").unlink(missing_ok=True)

    digest = hashlib.sha256()
    largest = 0
    for table in tokens.with_format("arrow").iter(batch_size=1000):
        for name in ("sample_id", "input_ids", "labels"):
            column = table[name].combine_chunks()
            if name != "sample_id":
                digest.update(column.value_lengths().to_numpy(zero_copy_only=False).tobytes())
                column = column.flatten()
            values = column.to_numpy(zero_copy_only=False)
            digest.update(values.tobytes())
            if name == "input_ids":
                largest = max(largest, int(values.max()))
    batches = texts.iter(batch_size=1000)
    rows = (
        row for batch in batches for row in zip(*(batch[name] for name in columns), strict=True)
    )
    return {
        "hash": _text_hash(rows),
        "tokens_hash": digest.hexdigest(),
        "rows": len(tokens),
        "dropped": len(raw) - len(tokens),
        "largest_id": largest,
    }


def tokenise(
    batch: Mapping[str, Sequence[str | None]],
    numbers: Sequence[int],
    *,
    tokenizer: PreTrainedTokenizerBase,
    columns: tuple[str, ...],
    max_length: int,
) -> dict[str, list[Any]]:
    """Tokenise rows of text; of a prompt and completion, only the completion is learned.

    Both are tokenised together, as they will be read, and the prompt is what that has in
    common with the prompt alone: a token that reaches into the completion is learned. The end
    of text is appended and learned. Rows without a learned token are left out.
    """
    texts = [[value or "" for value in batch[name]] for name in columns]
    learned = [bool(text.strip()) for text in texts[-1]]
    whole = _token_ids(tokenizer, ["".join(parts) for parts in zip(*texts, strict=True)])
    prompts = _token_ids(tokenizer, texts[0]) if len(columns) == 2 else [[] for _ in whole]

    rows: dict[str, list[Any]] = {"input_ids": [], "labels": [], "sample_id": []}
    for number, ids, prompt, wanted in zip(numbers, whole, prompts, learned, strict=True):
        masked = _common_prefix(prompt, ids)
        if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
            ids = [*ids, tokenizer.eos_token_id]
        ids = ids[:max_length]
        labels = [IGNORED] * min(masked, len(ids)) + ids[masked:]
        if wanted and supervised_tokens(labels):
            rows["input_ids"].append(ids)
            rows["labels"].append(labels)
            rows["sample_id"].append(number)
    return rows


def _token_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    # Rows are cut to --max_length afterwards; the tokenizer would warn of longer ones before.
    return tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))
