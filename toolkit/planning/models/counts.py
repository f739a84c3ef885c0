"""A shape for a bare parameter count: `7b`, `1.3b`, `350m`, `6738415616`."""

from __future__ import annotations

import re
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache

from toolkit.errors import UsageError
from toolkit.planning.models.architectures import shape_from_config
from toolkit.planning.models.reading import shown
from toolkit.planning.models.shape import ModelShape

LEAST, MOST = 10**6, 10**13

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


def looks_like_count(text: str) -> bool:
    """Whether `text` can only be meant as a count: it starts with a digit and has nothing else."""
    return _COUNT.fullmatch(text.strip()) is not None


def shape_from_count(count: str | int) -> ModelShape:
    """Return a Llama of `count` parameters, with widths that such models have.

    The widths are assumed: 32,000 tokens (fewer below 16m), a head tied to the embedding below 1b,
    as many key and value heads as query heads, which is the most that they can need, hidden size
    and layers in proportion as in the published model that is nearest, and an MLP of 8/3 of
    the hidden size, adjusted by steps of 8 until the total is as asked, within 0.5%.

    Raises:
        UsageError: that is no count, or none between one million and ten trillion.
    """
    total = _parameters(count)
    return _shape(total, str(count).strip())


def _parameters(count: str | int) -> int:
    if isinstance(count, str):
        match = _COUNT.fullmatch(count.strip())
        if match is None:
            raise UsageError(
                f"{shown(count)} is no number of parameters. Write it like 7b, 350m or 6738415616."
            )
        number, unit = match.groups()
        exact = Decimal(re.sub("[_,]", "", number)) * _FACTORS[unit.lower()]
        total = int(exact)
    elif isinstance(count, bool):
        raise UsageError(f"{shown(count)} is no number of parameters. Write it like 7b or 350m.")
    else:
        total = count
    if not LEAST <= total <= MOST:
        raise UsageError(
            f"{shown(count)} is no plausible number of parameters: they go from 1m to 10t. "
            "Write 7b for seven billion."
        )
    return total


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
            "num_attention_heads": hidden // _head_dim(hidden),
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
    """Hidden size and layers whose ratio is nearest to that of published models of this size."""
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


def _head_dim(hidden: int) -> int:
    return 128 if hidden >= 2048 else 64
