"""Checkpoints as files: tensors are places of bytes in them, and no code of a file is run.

Nothing here needs torch before a tensor is read: to import it takes longer than most checkpoints.
"""

from __future__ import annotations

import errno
import io
import json
import math
import mmap
import pickle
import re
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

from toolkit.checkpoints.portable_files import Group
from toolkit.engines.names import GETATTR, METADATA_TYPES, plain_name
from toolkit.errors import UsageError, sentence_of
from toolkit.records.manifests import Damaged

if TYPE_CHECKING:
    import torch

LORA: Final = ".lora_"
"""Part of the names of all weights of adapters."""

PIECE: Final = 1 << 22
"""Bytes that are copied at once."""


class Dtype(NamedTuple):
    size: int
    safetensors: str
    storage: str
    """In torch's pickles."""


DTYPES: Final = {
    "float64": Dtype(8, "F64", "DoubleStorage"),
    "float32": Dtype(4, "F32", "FloatStorage"),
    "float16": Dtype(2, "F16", "HalfStorage"),
    "bfloat16": Dtype(2, "BF16", "BFloat16Storage"),
    "int64": Dtype(8, "I64", "LongStorage"),
    "int32": Dtype(4, "I32", "IntStorage"),
    "int16": Dtype(2, "I16", "ShortStorage"),
    "int8": Dtype(1, "I8", "CharStorage"),
    "uint8": Dtype(1, "U8", "ByteStorage"),
    "bool": Dtype(1, "BOOL", "BoolStorage"),
    "float8_e4m3fn": Dtype(1, "F8_E4M3", "Float8_e4m3fnStorage"),
    "float8_e5m2": Dtype(1, "F8_E5M2", "Float8_e5m2Storage"),
}
"""Types of numbers by torch's names."""


class NotWhole(UsageError):
    """A checkpoint whose files are missing, cut off, damaged, or would run code."""


class Span(NamedTuple):
    """Bytes of a file, or of a number that lies in memory."""

    source: Path | bytes
    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole tensor in files, of which nothing is read before it is used."""

    shape: tuple[int, ...]
    dtype: str
    spans: tuple[Span, ...]
    strides: tuple[int, ...] | None = None
    """Of elements that do not lie one after the other; None where they do."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPES[self.dtype].size

    def __float__(self) -> float:
        if self.dtype == "float32":
            return struct.unpack("<f", b"".join(self.pieces()))[0]
        return float(self.read())

    def part(self, begin: int, elements: int) -> Stored:
        """Return elements that follow each other, as a flat tensor."""
        if self.strides is not None:
            raise UsageError("A tensor whose elements do not lie in their order has no parts.")
        size, spans = DTYPES[self.dtype].size, list[Span]()
        skipped, left = begin * size, elements * size
        for span in self.spans:
            taken = max(0, min(span.length - skipped, left))
            if taken:
                spans.append(Span(span.source, span.begin + skipped, taken))
            skipped, left = max(0, skipped - span.length), left - taken
        return Stored((elements,), self.dtype, tuple(spans))

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes as they lie in the files."""
        opened: dict[Path, BinaryIO] = {}  # a matrix that was cut by columns has a span a row
        with ExitStack() as files:
            for source, begin, length in self.spans:
                if isinstance(source, bytes):
                    yield source
                    continue
                with damage_named(source):
                    if source not in opened:
                        opened[source] = files.enter_context(source.open("rb"))
                    opened[source].seek(begin)
                    for at in range(0, length, PIECE):
                        piece = opened[source].read(min(PIECE, length - at))
                        if len(piece) < min(PIECE, length - at):
                            raise EOFError("It ends within a tensor.")
                        yield piece

    def read(self) -> torch.Tensor:
        import torch

        if not self.elements:
            return torch.empty(self.shape, dtype=getattr(torch, self.dtype))
        flat = torch.frombuffer(self._buffer(), dtype=getattr(torch, self.dtype))
        if self.strides is not None:
            return flat.as_strided(self.shape, self.strides).contiguous()
        return flat.view(self.shape)

    def _buffer(self) -> Any:
        """Return the bytes, where it can be as a mapped part of a file, which is read when used."""
        source, begin, length = self.spans[0]
        page = begin % mmap.ALLOCATIONGRANULARITY
        if len(self.spans) > 1 or isinstance(source, bytes) or page % DTYPES[self.dtype].size:
            return bytearray().join(self.pieces())
        with damage_named(source), source.open("rb") as opened:
            mapped = mmap.mmap(
                opened.fileno(), page + length, access=mmap.ACCESS_COPY, offset=begin - page
            )
        return memoryview(mapped)[page:]


@dataclass(kw_only=True)
class Contents:
    """What a folder holds, by the names that the weights have in the model."""

    folder: Path
    library: str
    """Whose files they are."""

    strategy: str
    """The strategy that wrote them, in words."""

    weights: dict[str, Stored]
    """In the dtype that the optimizer steps on, where the files have it."""

    states: dict[str, Stored] = field(default_factory=dict[str, Stored])
    """States of the optimizer, by the keys of a portable checkpoint."""

    groups: list[Group] = field(default_factory=list[Group])
    scheduler: dict[str, Any] = field(default_factory=dict[str, Any])
    loss_scale: dict[str, float] | None = None
    step: int | None = None
    ranks: int | None = None
    losses: list[float] | None = None
    manifest: dict[str, Any] | None = None
    """That of the toolkit; None for other libraries' folders."""

    missing: list[str] = field(default_factory=list[str])
    """Sentences about what is not there, or cannot be read."""

    @property
    def is_adapter(self) -> bool:
        return any(LORA in name for name in self.weights)


def scalar(value: Any) -> Stored:
    """Return a number of an optimizer's state, such as its steps, as torch's AdamW keeps it."""
    if isinstance(value, Stored):
        return value
    return Stored((), "float32", (Span(struct.pack("<f", value), 0, 4),))


def name_in_model(name: str) -> str:
    """Return a weight's name without what wrappers, peft and its files put around it."""
    name = plain_name(name).removeprefix("module.").removeprefix("base_model.model.")
    # peft leaves the name of an adapter out of its files.
    return re.sub(r"(\.lora_(?:[AB]|embedding_[AB]))(?=\.weight$|$)", r"\1.default", name)


def add_groups(
    contents: Contents, names: Iterable[Iterable[str]], groups: Iterable[Mapping[str, Any]]
) -> None:
    """Add an optimizer's groups, each with the names of its parameters."""
    for of_group, group in zip(names, groups, strict=False):
        rates = {"lr": float(group["lr"]), "initial_lr": group.get("initial_lr")}
        contents.groups.append(Group(names=[*map(name_in_model, of_group)], **rates))


@contextmanager
def damage_named(file: Path) -> Generator[None]:
    """Turn a library's error about a file into one that names it.

    Raises:
        NotWhole: in place of the error.
    """
    try:
        yield
    except UsageError:
        raise
    except Damaged as error:
        raise NotWhole(f"{error}. Take another checkpoint.") from error
    except FileNotFoundError as error:
        raise NotWhole(f"{file} is missing. Copy the whole checkpoint.") from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # a place before the beginning of a file
            raise
        raise _damaged(file, error) from error
    except pickle.UnpicklingError as error:
        if (name := re.search(r"names ([\w.]+)", str(error))) is not None:
            raise NotWhole(
                f"{file} would run code and was not loaded: it names {name[1]}. Use only folders "
                "that you trust."
            ) from error
        raise _damaged(file, error) from error
    except _DAMAGE as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: BaseException) -> NotWhole:
    return NotWhole(
        f"{file} is cut off or damaged: {sentence_of(error)[:200]} Take another checkpoint."
    )


_DAMAGE: Final = (zipfile.BadZipFile, AttributeError, EOFError, LookupError, TypeError, ValueError)
"""Errors of files that are cut off or were changed."""


class _Stage(IntEnum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class Record:
    """Stands in for an object of a library that has no methods which are needed here."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.values = state


def _tensor(
    storage: tuple[str, Span],
    first: int,
    shape: Sequence[int],
    strides: Sequence[int],
    _requires_grad: bool,
    _hooks: Any,
    dtype: str = "",
    *_: Any,
) -> Stored:
    name, span = storage
    name = dtype if isinstance(dtype, str) and dtype in DTYPES else name
    size, lies, dense = DTYPES[name].size, 1, True
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        dense = dense and (stride == lies or length == 1)
        lies *= length
    if not dense and lies:
        lies = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if first < 0 or (first + lies) * size > span.length or min((*shape, *strides), default=0) < 0:
        raise ValueError("A tensor reaches beyond its storage.")
    spans = (Span(span.source, span.begin + first * size, lies * size),)
    return Stored(tuple(shape), name, spans, None if dense or not lies else tuple(strides))


def _member(kind: Any, name: str) -> Any:
    """Return a member of an enum, or its name: what stands in for `getattr` in a pickle."""
    if kind is _Stage:
        return _Stage[name]
    if kind is Record:
        return name
    raise pickle.UnpicklingError(f"it names getattr of {kind}")


_SHARDS: Final = "torch.distributed.checkpoint"
_NAMES: Final[dict[str, Any]] = {
    **{f"torch.{kind.storage}": name for name, kind in DTYPES.items()},
    **{f"torch.{name}": name for name in DTYPES},
    **dict.fromkeys(("torch.device", "torch.serialization._get_layout"), str),
    **{f"collections.{kind.__name__}": kind for kind in (Counter, OrderedDict)},
    **{f"builtins.{kind.__name__}": kind for kind in (bytearray, complex, set)},
    "_codecs.encode": lambda text, _: text.encode("latin1"),  # bytes
    ".".join(GETATTR): _member,
    "torch.Size": tuple,
    "torch.Tensor": Record,
    "torch.nn.parameter.Parameter": Record,
    "torch.storage.UntypedStorage": "uint8",
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._tensor._rebuild_from_type_v2": lambda make, _kind, values, _state: make(*values),
    "deepspeed.runtime.zero.config.ZeroStageEnum": _Stage,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Record,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Record,
    "deepspeed.utils.tensor_fragment.fragment_address": Record,
    f"{_SHARDS}.filesystem._StorageInfo": Record,
    **{f"{_SHARDS}.metadata.{name}": Record for name in METADATA_TYPES},
    **dict.fromkeys(("pathlib.PosixPath", "pathlib._local.PosixPath"), Path),
}
"""All that a checkpoint's pickle may name (torch 2.11 to 2.15, deepspeed 0.19)."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, opened: Any, places: Mapping[str, Span]) -> None:
        super().__init__(opened, encoding="utf-8")
        self._places = places

    def find_class(self, module: str, name: str) -> Any:
        wanted = f"{module.replace('__builtin__', 'builtins')}.{name}"
        if wanted not in _NAMES:
            raise pickle.UnpicklingError(f"it names {wanted.removeprefix('builtins.')}")
        return _NAMES[wanted]

    def persistent_load(self, pid: Any) -> tuple[str, Span]:
        _, dtype, key, *_ = pid
        return dtype, self._places[key]


def load_pickle(file: Path) -> Any:
    """Return what a plain pickle holds, and run no code of it."""
    with damage_named(file), file.open("rb") as opened:
        return _Unpickler(opened, {}).load()


def load_plain(file: Path, begin: int = 0, length: int | None = None) -> Any:
    """Return what `torch.save` wrote, with tensors that are not read yet, and run no code of it.

    Args:
        file: A file of torch 1.6 or later.
        begin: Where in the file it was written, and how many bytes.
        length: As above; None: to the end.

    Raises:
        UsageError: it is damaged, or names code.
    """
    with damage_named(file), file.open("rb") as opened:
        opened.seek(begin)
        if opened.read(2) != b"PK":
            raise ValueError("torch 1.6 or later did not write it: save it again with that.")
        end = 0 if length is None else begin + length  # of which 0 is the whole file
        with mmap.mmap(opened.fileno(), end, access=mmap.ACCESS_READ) as mapped:
            archive: Any = mapped
            places: dict[str, Span] = {}
            with zipfile.ZipFile(archive) as members:
                for member in members.infolist():
                    if member.compress_type != zipfile.ZIP_STORED:
                        raise ValueError("It is compressed, as torch.save writes no file.")
                    at = member.header_offset
                    at += 30 + sum(struct.unpack("<HH", mapped[at + 26 : at + 30]))
                    span = Span(file, at, member.file_size)
                    places[member.filename.partition("/")[2]] = span
            pickled = places.pop("data.pkl")
            held = io.BytesIO(mapped[pickled.begin : pickled.begin + pickled.length])
        of_data = {name.removeprefix("data/"): span for name, span in places.items()}
        return _Unpickler(held, of_data).load()


def read_safetensors(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return the tensors of a file by name, and its metadata."""
    names = {kind.safetensors: name for name, kind in DTYPES.items()}
    with damage_named(file), file.open("rb") as opened:
        size = file.stat().st_size
        begin = 8 + int.from_bytes(opened.read(8), "little")
        if begin > size:
            raise EOFError("It ends within its header.")
        header: dict[str, Any] = json.loads(opened.read(begin - 8))
        metadata: dict[str, str] = header.pop("__metadata__", {})
        tensors: dict[str, Stored] = {}
        for name, facts in header.items():
            first, last = facts["data_offsets"]
            span = Span(file, begin + first, last - first)
            tensors[name] = Stored(tuple(facts["shape"]), names[facts["dtype"]], (span,))
            if tensors[name].nbytes != span.length or first < 0 or begin + last > size:
                raise EOFError(f"{name} does not lie within it.")
    return tensors, metadata


def read_parts(folder: Path) -> dict[str, Stored]:
    """Return the tensors of all safetensors files of a folder, as a portable checkpoint has them.

    Raises:
        UsageError: a file is damaged, or a name stands in two of them.
    """
    parts: dict[str, Stored] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors, _ = read_safetensors(file)
        if twice := sorted(tensors.keys() & parts.keys()):
            raise NotWhole(f"{file} holds {twice[0]}, as another file does. Copy it anew.")
        parts |= tensors
    return parts


def write_files(
    tensors: Mapping[str, Stored], folder: Path, name: str, *, limit: int, dtype: str | None = None
) -> dict[str, str]:
    """Write tensors into safetensors files, a piece at a time, and return the file of each name.

    Args:
        tensors: By name.
        folder: Is made.
        name: Of each file, with places for its number and how many there are.
        limit: Bytes of a file, unless a tensor has more.
        dtype: Of floating-point numbers; None: as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts, held = list[dict[str, Stored]]([{}]), 0
    for key, tensor in tensors.items():
        if parts[-1] and held + tensor.nbytes > limit:
            parts.append({})
            held = 0
        parts[-1][key] = tensor
        held += tensor.nbytes
    files: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = name.format(number, len(parts))
        _write_file(part, folder / file, dtype)
        files |= dict.fromkeys(part, file)
    return files


def written_dtype(tensor: Stored, dtype: str | None) -> str:
    """Return the type of a tensor's numbers in a file whose floating-point ones are `dtype`."""
    return dtype if dtype is not None and "float" in tensor.dtype else tensor.dtype


def _write_file(tensors: Mapping[str, Stored], file: Path, dtype: str | None) -> None:
    # Each is aligned, as safetensors has them: those of larger numbers go first.
    ordered = sorted(tensors.items(), key=lambda item: -DTYPES[written_dtype(item[1], dtype)].size)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        kind = DTYPES[written_dtype(tensor, dtype)]
        begin, end = end, end + tensor.elements * kind.size
        shape, offsets = [*tensor.shape], [begin, end]
        header[name] = {"dtype": kind.safetensors, "shape": shape, "data_offsets": offsets}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as opened:
        opened.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, tensor in ordered:
            for piece in _bytes_of(tensor, written_dtype(tensor, dtype)):
                opened.write(piece)


def _bytes_of(tensor: Stored, dtype: str) -> Iterable[Any]:
    if tensor.strides is None and dtype == tensor.dtype:
        return tensor.pieces()
    import torch

    value = tensor.read().to(getattr(torch, dtype)).contiguous()
    return [value.view(-1).view(torch.uint8).numpy()] if tensor.elements else []
