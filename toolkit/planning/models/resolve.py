"""The shape of the model that a user names: a folder, a count, the Hub's cache, or the table."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

from toolkit.errors import UsageError
from toolkit.jobs.shape import ModelShape
from toolkit.planning.models import architectures
from toolkit.planning.models.architectures import shape_from_config
from toolkit.planning.models.reading import shown

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_LONGEST_NAME = 200
_LARGEST_CONFIG = 4 * 2**20
"""Bytes. The longest published ones have some 100 KiB, of labels."""


@dataclass(frozen=True, slots=True, eq=False)
class WellKnown:
    """Models of one shape, as the Hub calls them."""

    ids: tuple[str, ...]
    config: Mapping[str, Any]
    source: str


def resolve_model(name: str | Path) -> ModelShape:
    """Return the shape of the model that `name` means.

    In this order: a folder with a config.json or the path of such a file, a parameter count, a Hub
    model whose config.json is in the Hub's cache on this machine, a well-known model, with its
    organisation or without where that is unambiguous, in any case. Nothing is downloaded.

    Raises:
        UsageError: there is no such model here, or its config can't be planned with.
    """
    text = str(name)
    if not text.strip() or len(text) > 4096 or not text.isprintable():
        raise UsageError(f"{shown(text)} names no model. Give a folder, a Hub name, or 7b.")
    local = _local_config(text)
    if local is not None:
        return shape_of_config(_read(local), text)
    if isinstance(name, Path) or text.startswith((".", "/", "~")) or "\\" in text:
        raise UsageError(
            f"There is no model at {text}: it should be a folder with a config.json, or that file."
        )
    if _COUNT.fullmatch(text.strip()):
        return shape_from_count(text)
    if _HUB_NAME.fullmatch(text) and len(text) <= _LONGEST_NAME:
        cached = _cached_config(text)
        if cached is not None:
            return shape_of_config(_read(cached), text)
        known = _by_name().get(text.lower())
        if known is not None:
            return _well_known_shape(known, text)
    raise _not_found(text)


@lru_cache(maxsize=1)
def well_known() -> tuple[WellKnown, ...]:
    """Return the models that are shipped as shapes."""
    table = json.loads(Path(__file__).with_name("wellknown.json").read_text(encoding="utf-8"))
    return tuple(
        WellKnown(tuple(entry["ids"]), entry["config"], entry["source"])
        for entry in table["models"]
    )


@lru_cache(maxsize=1)
def _by_name() -> dict[str, int]:
    """Return places in the table, by lower-case Hub id, and by its last part where that is one."""
    places: dict[str, int] = {}
    short: dict[str, set[int]] = {}
    for place, entry in enumerate(well_known()):
        for name in entry.ids:
            places[name.lower()] = place
            short.setdefault(name.lower().rpartition("/")[2], set()).add(place)
    for name, same_name in short.items():
        if len(same_name) == 1:
            places.setdefault(name, *same_name)
    return places


@lru_cache(maxsize=256)
def _well_known_shape(place: int, name: str) -> ModelShape:
    return shape_of_config(well_known()[place].config, name)


def shape_of_config(config: Any, name: str) -> ModelShape:
    """Return the shape of a config: at once by the table, else counted in a child process."""
    try:
        return shape_from_config(config, name=name)
    except architectures.UnknownArchitectureError:
        from toolkit.planning.models.counted import counted_shape

        part, note = architectures.text_part(config, name)
        shape = counted_shape(part, name=name)
        return replace(shape, note=f"{note} {shape.note}".strip())


def _local_config(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        if path.is_file() and path.suffix == ".json":
            return path
        inside = path / "config.json"
        return inside if inside.is_file() else None
    # A name longer than a file system takes, a home that isn't there, no permission.
    except (OSError, RuntimeError):
        return None


def _cached_config(name: str) -> Path | None:
    """Return the config.json of a Hub model's main branch, where a library has fetched it before.

    The layout is that of huggingface_hub's cache: `models--org--name/refs/main` holds the commit
    whose files are in `snapshots/<commit>`.
    """
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        config = folder / "snapshots" / commit / "config.json"
        # A damaged reference must not lead out of the cache.
        return config if re.fullmatch(r"[0-9A-Za-z]+", commit) and config.is_file() else None
    except (OSError, UnicodeDecodeError):
        return None


def hub_cache() -> Path:
    """Return the folder of huggingface_hub's downloads, by the same variables."""
    explicit = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.path.expandvars(os.path.expanduser(explicit or f"{home}/hub")))


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > _LARGEST_CONFIG:
            raise UsageError(
                f"{path} has {path.stat().st_size:,} bytes, so it is no model's config.json."
            )
        return json.loads(path.read_text(encoding="utf-8-sig"), object_hook=_number)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror or error}.") from error
    # Malformed JSON and UTF-8, a number of more digits than Python reads, and deep nesting.
    except (ValueError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path} is no JSON that can be read: {reason}.") from error


_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _number(entry: dict[str, Any]) -> Any:
    """Return the number that transformers 5 saves as an object, since JSON has none; else `entry`.

    It is `_decode_special_floats` of transformers 5.24 (configuration_utils.py).
    """
    named = entry.get("__float__") if len(entry) == 1 else None
    return _NUMBERS.get(named, entry) if isinstance(named, str) else entry


def _not_found(name: str) -> UsageError:
    hub = _HUB_NAME.fullmatch(name) and len(name) <= _LONGEST_NAME
    near = _nearest(name.lower()[:_LONGEST_NAME])
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    fetch = f"fetch its config (hf download {name} config.json), " if hub and "/" in name else ""
    return UsageError(
        f"There is no model {shown(name)} here: no folder with a config.json, nothing in the Hub's "
        f"cache ({hub_cache()}), nothing in the table of well-known models.{hint} You can {fetch}"
        "give the folder of a model, or a parameter count such as 7b."
    )


def _nearest(name: str) -> list[str]:
    """Return up to three well-known ids like a lower-case name, the most probable first.

    Of the names that are spelled alike, those of the same size come first, then those of the same
    version, and then those with the fewest other letters.
    """
    # Needed for a mistake only.
    import difflib

    sizes, versions = _numbers(name)
    ranked: list[tuple[bool, int, float, str]] = []
    for known in (known for entry in well_known() for known in entry.ids):
        full = known.lower()
        likeness = max(
            difflib.SequenceMatcher(None, name, spelled).ratio()
            for spelled in (full, full.rpartition("/")[2])
        )
        if likeness < _ALIKE:
            continue
        its_sizes, its_versions = _numbers(full)
        other_version = (
            0 if versions == its_versions else 1 if versions[:1] == its_versions[:1] else 2
        )
        ranked.append((bool(sizes) and sizes != its_sizes, other_version, -likeness, known))
    return [known for *_, known in sorted(ranked)[:3]]


_ALIKE = 0.7
"""Share of equal letters (difflib's ratio) from which a name may be a typo of another."""

_SIZE = re.compile(r"(?<![b-z])(?:\d+x)?\d+(?:\.\d+)?[bm](?![a-z0-9])")


def _numbers(name: str) -> tuple[list[str], list[str]]:
    """Return the sizes (`8b`, `8x7b`) in a name, and its other numbers, of which 3.1 is 3 and 1."""
    last = name.rpartition("/")[2]
    return _SIZE.findall(last), re.findall(r"\d+", _SIZE.sub("", last))


FEWEST_PARAMETERS, MOST_PARAMETERS = 10**6, 10**13

_COUNT = re.compile(
    # Digits in threes, or without marks: 7,5b would be a tenfold mistake.
    r"((?:[0-9]{1,3}(?:,[0-9]{3}){1,5}|[0-9]{1,3}(?:_[0-9]{3}){1,5}|[0-9]{1,20})"
    r"(?:\.[0-9]{1,10})?)\s?([kmbt]?)",
    re.IGNORECASE,
)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}

_PROPORTIONS = (
    (124e6, 768 / 12),
    (1.1e9, 2048 / 22),
    (6.7e9, 4096 / 32),
    (13e9, 5120 / 40),
    (32.5e9, 6656 / 60),
    (65.2e9, 8192 / 80),
    (405e9, 16384 / 126),
)
"""Parameters, and hidden size by layers, of GPT-2, TinyLlama, Llama 7B to 65B (arXiv 2302.13971,
table 2) and Llama 3.1 405B (arXiv 2407.21783, table 3)."""

_VOCABULARY = 32_000
_TIED_BELOW = 10**9


def shape_from_count(count: str) -> ModelShape:
    """Return a Llama of `count` parameters, with widths that such models have.

    The widths are assumed: 32,000 tokens (fewer below 16m), a head tied to the embedding below 1b,
    as many key and value heads as query heads, which is the most that they can need, hidden size
    and layers in proportion as in the published model that is nearest, and an MLP of 8/3 of
    the hidden size, adjusted by steps of 8 until the total is as asked, within 0.5%.

    Raises:
        UsageError: that is no count, or none between one million and ten trillion.
    """
    match = _COUNT.fullmatch(count.strip())
    if match is None:
        raise UsageError(
            f"{shown(count)} is no number of parameters. Write it like 7b, 350m or 6738415616."
        )
    number, unit = match.groups()
    total = int(Decimal(re.sub("[_,]", "", number)) * _FACTORS[unit.lower()])
    if not FEWEST_PARAMETERS <= total <= MOST_PARAMETERS:
        raise UsageError(
            f"{shown(count)} is no plausible number of parameters: they go from 1m to 10t. "
            "Write 7b for seven billion."
        )
    return _shape(total, count.strip())


@lru_cache(maxsize=64)
def _shape(total: int, name: str) -> ModelShape:
    vocabulary = min(_VOCABULARY, total // 500)
    tied = total < _TIED_BELOW
    hidden, layers = _proportions(total, vocabulary * (1 if tied else 2))
    outside = vocabulary * hidden * (1 if tied else 2) + hidden
    of_layer = (total - outside) / layers
    ffn = max(8, 8 * round((of_layer - 4 * hidden**2 - 2 * hidden) / (3 * hidden) / 8))
    shape = shape_from_config(
        {
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // (128 if hidden >= 2048 else 64),
            "tie_word_embeddings": tied,
        },
        name=name,
    )
    return replace(
        shape,
        exact=False,
        max_positions=None,
        note=f"Only the count is known: the widths of a Llama of {layers} layers of {hidden} are "
        "assumed.",
    )


def _proportions(total: int, rows: int) -> tuple[int, int]:
    """Return hidden size and layers in the ratio of published models of this size."""
    _, wanted = min(_PROPORTIONS, key=lambda pair: max(pair[0] / total, total / pair[0]))
    best = (64, 1)
    gap = float("inf")
    for hidden in (*range(64, 1024, 64), *range(1024, 65537, 128)):
        left = total - rows * hidden
        # A layer of a Llama: 4 h^2 of attention, and three times 8/3 h^2 of MLP.
        layers = round(left / (12 * hidden**2))
        if layers < 1:
            break
        ratio = hidden / layers / wanted
        if max(ratio, 1 / ratio) < gap:
            best, gap = (hidden, layers), max(ratio, 1 / ratio)
    return best
