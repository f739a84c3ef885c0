"""GPUs that people train on: memory, rates, bandwidths and links, each with its source.

Rates are dense, in FLOP/s, with fp32 accumulation, which is what torch asks for; datasheets of the
Ada and Hopper generations print twice as much, with sparsity. Memory is what torch sees of a card
and not what is printed on its box: the smallest total that a published out-of-memory message names
for it, less the 0.005 GiB that two decimals can hide; without one, nvidia-smi's total less what
torch does not see of a card of the same generation. The CUDA context is not taken off.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

from toolkit.errors import UsageError
from toolkit.files import read_settings
from toolkit.jobs.terms import Interval
from toolkit.planning.job import GPUS_PER_NODE, MOST_GPUS_PER_NODE

MIB = 1 << 20
TERA = 1e12
GIGA = 1e9

PCIE_GB_PER_LANE = {"3.0": 0.985, "4.0": 1.969, "5.0": 3.938, "6.0": 7.563}
"""GB/s of one lane in one direction, after encoding (stas00/ml-engineering network/README.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU: its memory, its peak rates and its links."""

    name: str
    memory_bytes: int
    """What torch can see of its memory, a CUDA context of a few hundred MiB included."""

    compute_capability: tuple[int, int]
    bf16_flops: float | None
    """FLOP/s of dense bf16 matrix products; None without native bf16."""

    fp16_flops: float
    tf32_flops: float | None
    fp32_flops: float
    """Outside of the tensor cores: torch leaves TF32 off for matrix products."""

    memory_bandwidth: float
    """Bytes per second."""

    nvlink_bandwidth: float | None
    """Bytes per second in one direction, all links together; None without."""

    pcie_bandwidth: float
    """Bytes per second in one direction."""

    host_bandwidth: float | None = None
    """Bytes per second in one direction to the host's memory; None where that is PCIe's."""

    network_bandwidth: Interval | None = None
    """Bytes per second of a usual node's network cards together, in one direction; an interval
    where clouds differ, None where it is not known."""

    per_node: int = GPUS_PER_NODE
    """GPUs of a usual machine, at most."""

    watts: float | None = None
    matmul_share: float | None = None
    """Share of the dense rate that the best shape of a large product reaches, where known."""

    matmul_share_low: float | None = None
    source: str = ""
    memory_source: str = ""
    matmul_source: str = ""
    network_source: str = ""
    node_source: str = ""
    unchecked: tuple[str, ...] = ()
    """Keys of the table whose value no second source confirms."""

    dollars_per_hour: float | None = None
    """Of one GPU."""

    dollars_date: str = ""
    """Day of that price."""

    mixed: bool = False
    """Whether it stands for several different GPUs, by the least of them."""

    aliases: tuple[str, ...] = ()

    @property
    def host_link(self) -> float:
        """Bytes per second in one direction between the GPU and the host's memory."""
        return self.host_bandwidth or self.pcie_bandwidth

    @property
    def measured(self) -> bool:
        """Whether rows of it are committed: benchmarks/results/2026-11-26-gpu-kit.json."""
        return self.name == "H200"

    @property
    def has_bf16(self) -> bool:
        """Native, in tensor cores. Older cards emulate it slowly, so they train in fp16."""
        return self.compute_capability >= (8, 0)

    def flops(self, dtype: str) -> float:
        """FLOP/s of dense matrix products whose operands are `bf16`, `fp16` or `fp32`.

        Raises:
            UsageError: the GPU has no bf16.
        """
        if dtype == "fp32":
            return self.fp32_flops
        if dtype == "fp16":
            return self.fp16_flops
        if self.bf16_flops is None or not self.has_bf16:
            raise UsageError(
                f"{self.name} has no bf16 (compute capability "
                f"{'.'.join(map(str, self.compute_capability))}). Ask for precision fp16."
            )
        return self.bf16_flops


EXAMPLE = (
    '{"name": "Mine", "memory_mib": 81559, "compute_capability": "9.0", "bf16_tflops": 989, '
    '"fp16_tflops": 989, "fp32_tflops": 67, "memory_gb_per_second": 3350, "pcie": "5.0 x16"}'
)
"""An entry of a file with all keys that it must have."""

_OTHER_MAKERS = re.compile(
    r"amd|instinct|radeon|mi\d|rx ?\d|tpu|v\d[ep]|trn|inf\d|trainium|gaudi|hpu|apple|mps|"
    r"m\d( ?(pro|max|ultra))?$|intel|arc|ascend|npu|cpu"
)
_SHARED = (
    *("_bytes", "_flops", "_capability", "per_node"),
    *("memory_bandwidth", "nvlink_bandwidth", "pcie_bandwidth", "host_bandwidth"),
)
"""Ends of fields that several different GPUs have only as much of as the least of them."""

BUILT_IN = Path(__file__).with_name("gpus.json")


def gpu(name: str, *, file: Path | None = None) -> Gpu:
    """Return the GPU called `name`: `l4`, `RTX 4090`, or as torch has it, `NVIDIA A100-SXM4-80GB`.

    Case and vendor don't matter. GPUs of a JSON or YAML file go before built-in ones of the same
    name. Of several names with commas between, it is the least of all in every part.

    Raises:
        UsageError: no such GPU, several that it could be, or a broken file.
    """
    if "," in name:
        return _least([gpu(part, file=file) for part in name.split(",")])
    wanted = _word(name)
    if file is None and wanted in (places := _built_in_places()):
        return _entry(_built_in_entries()[places[wanted]], BUILT_IN)  # the others are not read
    table = built_in_gpus() if file is None else {**built_in_gpus(), **read_gpus(file)}
    by_word = {_word(alias): entry for entry in table.values() for alias in entry.aliases}
    by_word |= {_word(entry.name): entry for entry in table.values()}
    if wanted in by_word:
        return by_word[wanted]
    starts = (wanted, f"rtx{wanted}")
    family = [entry.name for entry in table.values() if _word(entry.name).startswith(starts)]
    if wanted and len(family) > 1:
        raise UsageError(f"{name!r} could be any of {', '.join(family)}: name one of them.")
    own = f"Describe it in a JSON or YAML file (--gpu-file), such as {EXAMPLE}"
    if _OTHER_MAKERS.match(name.strip().lower()):
        raise UsageError(
            f"{name[:60]!r} is no NVIDIA GPU, and plans are for these: nothing was measured on "
            f"others, and toolkit.train has not run on them. {own}, with the compute capability "
            "of an NVIDIA GPU like it, and take the answer as a guess."
        )
    close = difflib.get_close_matches(wanted, by_word, n=3, cutoff=0.5)
    similar = dict.fromkeys(by_word[word].name for word in close)
    hint = " or ".join(family if wanted and family else similar)
    raise UsageError(
        f"There is no GPU {name[:60]!r} in the table."
        + (f" Did you mean {hint}?" if hint else f" It has {', '.join(table)}.")
        + f" {own}."
    )


def _least(cards: list[Gpu]) -> Gpu:
    """Return a GPU that is the least of several in every part: each step waits for the slowest."""
    names = dict.fromkeys(card.name for card in cards)
    least: dict[str, Any] = {"name": " + ".join(names), "mixed": len(names) > 1}
    for key in (field.name for field in fields(Gpu) if field.name.endswith(_SHARED)):
        held = [getattr(card, key) for card in cards]
        least[key] = None if None in held else min(held)
    return replace(min(cards, key=lambda card: card.memory_bytes), **least)


def _word(name: str) -> str:
    """Return a name as names are compared: lower case, without vendor and punctuation."""
    word = name.lower()
    for vendor in ("nvidia", "geforce", "tesla"):
        word = word.replace(vendor, "")
    return "".join(filter(str.isalnum, word))


@lru_cache(maxsize=1)
def built_in_gpus() -> Mapping[str, Gpu]:
    """Return the built-in table, by name."""
    return read_gpus(BUILT_IN)


@lru_cache(maxsize=1)
def _built_in_entries() -> list[dict[str, Any]]:
    return json.loads(BUILT_IN.read_text(encoding="utf-8"))["gpus"]


def _built_in_places() -> dict[str, int]:
    """Return the place in the built-in table of each name and alias."""
    entries = _built_in_entries()
    words = {_word(a): n for n, entry in enumerate(entries) for a in entry.get("aliases", ())}
    return words | {_word(entry["name"]): n for n, entry in enumerate(entries)}


_REQUIRED = [key for key in json.loads(EXAMPLE) if key != "bf16_tflops"]
_NUMBERS = {
    "memory_mib": ("memory_bytes", MIB, 1 << 24),
    "fp16_tflops": ("fp16_flops", TERA, 1e6),
    "fp32_tflops": ("fp32_flops", TERA, 1e6),
    "memory_gb_per_second": ("memory_bandwidth", GIGA, 1e6),
    "bf16_tflops": ("bf16_flops", TERA, 1e6),
    "tf32_tflops": ("tf32_flops", TERA, 1e6),
    "nvlink_gb_per_second": ("nvlink_bandwidth", GIGA, 1e6),
    "host_gb_per_second": ("host_bandwidth", GIGA, 1e6),
    "watts": ("watts", 1, 1e6),
    "matmul_share": ("matmul_share", 1, 1),
    "matmul_share_low": ("matmul_share_low", 1, 1),
    "dollars_per_hour": ("dollars_per_hour", 1, 1e4),
}
"""Of each number of an entry: the field of a `Gpu`, its unit, and the most that is believed."""

MOST_NETWORK_GBPS = 1e6

_TEXTS = ("dollars_date", *(f.name for f in fields(Gpu) if f.name.endswith("source")))
_LISTS = ("aliases", "unchecked")


def read_gpus(file: Path) -> dict[str, Gpu]:
    """Return the GPUs of a JSON or YAML file: one entry, a list of them, or a list under `gpus`.

    Raises:
        UsageError: the file can't be read, or an entry is broken; names file, key and value.
    """
    contents = read_settings(file, "The GPU file")
    if isinstance(contents, dict):
        mapping = cast("dict[str, Any]", contents)
        contents = mapping.get("gpus", [mapping])
    if not isinstance(contents, list) or not contents:
        raise UsageError(f"{file} holds no GPUs: a list of entries under the key gpus.")
    gpus = [_entry(entry, file) for entry in cast("list[Any]", contents)]
    names = [entry.name for entry in gpus]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{file} has two GPUs called {twice!r}: rename one of them.")
    return {entry.name: entry for entry in gpus}


def _entry(entry: object, file: Path) -> Gpu:
    if not isinstance(entry, dict):
        raise UsageError(f"{file}: {entry!r} is no GPU, which is a mapping with a name and more.")
    values: dict[str, Any] = cast("dict[str, Any]", entry)
    allowed = {*_REQUIRED, *_NUMBERS, *_TEXTS, *_LISTS, "network_gbps", "gpus_per_node"}
    name = values.get("name")
    if not isinstance(name, str) or not _word(name):
        raise UsageError(f"{file}: name is {name!r}. It is the GPU's name.")
    where = f"{file}, {name}"
    for key in values:
        if key not in allowed:
            keys = ", ".join(sorted(allowed))
            raise UsageError(f"{where}: there is no key {key!r}. The keys are {keys}.")
    missing = [key for key in _REQUIRED if values.get(key) is None]
    capability = (0, 0)
    if "compute_capability" not in missing:
        capability = _capability(values["compute_capability"], where)
        if capability < (8, 0):
            values = {**values, "bf16_tflops": None}  # such GPUs have none, whatever the file says
        elif values.get("bf16_tflops") is None:
            missing.append("bf16_tflops, which is due from compute capability 8.0,")
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UsageError(f"{where}: {', '.join(missing)} {verb} missing. An entry: {EXAMPLE}")

    def check(key: str, expected: str, fits: Callable[[Any], object]) -> Any:
        value = values.get(key)
        if value is not None and not fits(value):
            raise UsageError(f"{where}: {key} is {value!r}. It is {expected}.")
        return value

    given: dict[str, Any] = {"name": name, "compute_capability": capability}
    for key, (field, unit, most) in _NUMBERS.items():
        expected = f"a number above 0, up to {most:g}"
        number = check(key, expected, partial(_is_number, most=most))
        given[field] = None if number is None else float(number) * unit
    given["memory_bytes"] = int(values["memory_mib"]) * MIB
    given["pcie_bandwidth"] = _pcie(values["pcie"], where)
    network = check("network_gbps", "Gbit/s above 0, or a list of the least and the most", _ends)
    if network is not None:
        low, high = (end * GIGA / 8 for end in _ends(network))
        given["network_bandwidth"] = Interval(low, high)
    most = MOST_GPUS_PER_NODE
    per_node = check("gpus_per_node", f"a whole number from 1 to {most}", _is_count)
    if per_node is not None:
        given["per_node"] = per_node
    if values.get("dollars_date"):  # YAML reads a day as a date
        values = {**values, "dollars_date": str(values["dollars_date"])}
    for key in _TEXTS:
        given[key] = check(key, "a text", lambda value: isinstance(value, str)) or ""
    for key in _LISTS:
        given[key] = tuple(check(key, "a list of texts", _is_texts) or ())
    return Gpu(**given)


def _is_number(value: object, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_number(value, MOST_GPUS_PER_NODE)


def _ends(value: object) -> list[float]:
    """Return the least and the most of a number or of a list of two; empty where it is neither."""
    ends = cast("list[float]", value) if isinstance(value, list) else [cast("float", value)] * 2
    right = len(ends) == 2 and all(_is_number(end, MOST_NETWORK_GBPS) for end in ends)
    return ends if right and ends[0] <= ends[1] else []


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(text, str) for text in cast("list[object]", value)
    )


def _capability(value: object, where: str) -> tuple[int, int]:
    major, _, minor = str(value).partition(".")
    # YAML reads 8.0 as a number.
    if isinstance(value, bool) or not (major.isdecimal() and minor.isdecimal()):
        raise UsageError(f"{where}: compute_capability is {value!r}. It looks like 8.6.")
    return min(int(major), 999), min(int(minor), 999)


def _pcie(value: object, where: str) -> float:
    generation, _, lanes = str(value).replace(" ", "").lower().partition("x")
    if "." not in generation:
        generation += ".0"
    if generation not in PCIE_GB_PER_LANE or lanes not in ("1", "2", "4", "8", "16"):
        raise UsageError(f"{where}: pcie is {value!r}. It looks like 4.0 x16.")
    return PCIE_GB_PER_LANE[generation] * int(lanes) * GIGA
