"""Known families of models: what was counted of each, for every width and setting of its config.

The files in `known/` are written by benchmarks/known_models.py. One is read when a config of its
family is, and the rest stay closed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from toolkit.jobs.kept import KeptForms

_FOLDER: Final = Path(__file__).with_name("known")
_ENDING: Final = ".json.gz"

_GZIP: Final = 31
"""`wbits` of zlib for a file that gzip wrote; the module gzip takes longer to import than this."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """The models of one `model_type`."""

    architecture: str
    """The class that `AutoModelForCausalLM` builds."""

    stack: str
    """Name of the list of decoder layers."""

    grouped: bool
    """Whether fused attention takes fewer heads of keys than of queries."""

    keys: Mapping[str, str]
    """Key of the config for each width. A width without a key is derived."""

    aliases: Mapping[str, str]
    """Other names of a key."""

    defaults: Mapping[str, Any]
    """Defaults of transformers' config class for keys that config.json leaves out."""

    dropout: Sequence[str]
    softcap: str
    """Key of the soft cap of the final logits."""

    switches: Sequence[str]
    """Settings that decide which parameters a model has."""

    keeping: Sequence[str]
    """Settings that decide what autograd keeps."""

    kinds: Sequence[str]
    """The kinds of decoder layers."""

    tensors: Sequence[tuple[str, Sequence[int], str, int | None]]
    """Name, forms of the dimensions, kind and split of each parameter, of layers below the layer.
    """

    parameters: Mapping[str, Mapping[str, Any]]
    """Numbers of the tensors before, in and after the layers, and more, by the switches."""

    kept: Mapping[str, Mapping[str, Any]]
    """Rows of `KeptForms`, by the settings and the attention."""

    features: Sequence[str]
    forms: Sequence[Sequence[float]]

    def kept_forms(self, settings: str, *, grouped: bool) -> KeptForms:
        """Return what autograd keeps; `grouped`: query heads share keys and values."""
        alone = f"{settings}-alone"
        eager = f"{settings}-eager" if grouped or alone not in self.kept else alone
        rows = {**self.kept[f"{settings}-flash"], **self.kept[eager]}
        return KeptForms(features=self.features, forms=self.forms, rows=rows)


class _Families(Mapping[str, Family]):
    """The families by `model_type`, each read when it is asked for."""

    def __getitem__(self, model_type: str) -> Family:
        if model_type not in _names():
            raise KeyError(model_type)
        return _read(model_type)

    def __iter__(self):
        return iter(_names())

    def __len__(self) -> int:
        return len(_names())


FAMILIES: Final[Mapping[str, Family]] = _Families()


@lru_cache(maxsize=1)
def _names() -> tuple[str, ...]:
    files = sorted(_FOLDER.glob(f"*{_ENDING}"))
    return tuple(file.name.removesuffix(_ENDING) for file in files)


@cache
def _read(model_type: str) -> Family:
    data = (_FOLDER / f"{model_type}{_ENDING}").read_bytes()
    return Family(**json.loads(zlib.decompress(data, _GZIP)))
