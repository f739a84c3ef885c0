"""What is in a checkpoint, whether it is whole, and whether it equals another, without training."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.portable_files import PORTABLE, parameter_and_state
from toolkit.checkpoints.reading import read_folder
from toolkit.checkpoints.stored import Contents, NotWhole, Stored

if TYPE_CHECKING:
    import torch


def show(folder: Path, *, base: Path | None = None) -> dict[str, Any]:
    """Return what is in a folder, by the words of `toolkit checkpoint show`."""
    contents = read_folder(folder, base=base)
    dtypes = Counter[str]()
    for tensor in contents.weights.values():
        dtypes[tensor.dtype] += tensor.elements
    states = Counter(parameter_and_state(key)[1] for key in contents.states)
    manifest = contents.manifest or {}
    return {
        "folder": str(folder),
        "library": contents.library,
        "form": manifest.get("form", "native" if manifest.get("kind") else None),
        "strategy": contents.strategy,
        "ranks": contents.ranks,
        "step": contents.step,
        "holds": "adapter" if contents.is_adapter else "full model",
        "weights": len(contents.weights),
        "parameters": sum(tensor.elements for tensor in contents.weights.values()),
        "dtypes": dict(dtypes),
        "optimizer_states": dict(states),
        "groups": [
            {"parameters": len(group["names"]), "lr": group["lr"]} for group in contents.groups
        ],
        "scheduler": bool(contents.scheduler),
        "losses": None if contents.losses is None else len(contents.losses),
        "whole": "every byte is as it was saved"
        if manifest
        else "all files are there, none is cut",
        "missing": _missing(contents),
        "next": _next(contents),
    }


def _missing(contents: Contents) -> list[str]:
    missing = [*contents.missing]
    if not contents.states and not missing:
        missing.append("no states of an optimizer")
    if not contents.scheduler:
        missing.append("no state of a scheduler")
    return missing


def _next(contents: Contents) -> str:
    """Return the command that goes on from it."""
    manifest, folder = contents.manifest or {}, contents.folder
    if manifest.get("form") == PORTABLE:
        return f"toolkit train --resume_from_checkpoint {folder}"
    if "facts" in manifest:
        ranks = f" --num_processes {contents.ranks}" if contents.ranks else ""
        strategy = f"--strategy {contents.strategy}{ranks}"
        return f"toolkit train {strategy} --resume_from_checkpoint {folder}"
    if contents.states:
        return f"toolkit checkpoint convert {folder} --output FOLDER"
    if any(folder.glob("*config.json")):
        return f"toolkit generate {folder} 'A prompt'"
    return f"toolkit checkpoint merge {folder} --output FOLDER --base MODEL"


def verify(folder: Path, against: Path | None = None) -> dict[str, Any]:
    """Read every tensor of a folder, and compare each with that of another.

    `ok` says whether all is whole, finite, and equal to the bit.
    """
    import torch

    verdict: dict[str, Any] = {"folder": str(folder), "ok": False, "damage": None}
    try:
        first = read_folder(folder)
        others = None if against is None else read_folder(against)
        tensors = {**first.weights, **first.states}
        pairs: dict[str, Stored] = {}
        only: list[str] = []
        if others is not None:
            pairs = dict(others.weights)
            if first.states and others.states:
                pairs |= others.states
            else:  # one of them is a model, and holds no states
                tensors = first.weights
            only = sorted(tensors.keys() ^ pairs.keys())
        bad, different, largest = [], None, 0.0
        for name, tensor in tensors.items():
            value = tensor.read()
            if value.is_floating_point() and not torch.isfinite(value).all():
                bad.append(name)
            if name in pairs:
                gap = _gap(value, pairs[name].read())
                if gap is not None:
                    different, largest = different or name, max(largest, gap)
    except NotWhole as error:
        return verdict | {"damage": str(error)}
    verdict |= {"tensors": len(tensors), "not_finite": bad}
    if against is not None:
        verdict |= {
            "against": str(against),
            "only_in_one": only,
            "first_difference": different,
            "largest_gap": largest,
        }
    return verdict | {"ok": not (bad or only or different)}


def _gap(one: torch.Tensor, other: torch.Tensor) -> float | None:
    """Return the largest gap of two tensors; None if they are equal to the bit."""
    import torch

    if one.shape != other.shape:
        return float("inf")
    if one.dtype == other.dtype and torch.equal(one, other):
        return None
    gap = (one.double() - other.double()).abs()
    return float(gap.nan_to_num(nan=float("inf")).max()) if gap.numel() else 0.0


def lines(facts: dict[str, Any]) -> list[str]:
    """Return the lines of an answer for a person."""
    shown = [(key.replace("_", " "), _words(value)) for key, value in facts.items()]
    width = max(len(key) for key, _ in shown)
    return [f"{key:<{width}}  {value}" for key, value in shown if value]


def _words(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case dict():
            return ", ".join(f"{_words(number)} {name}" for name, number in value.items())
        case [dict(), *_]:
            return "; ".join(
                ", ".join(f"{name} {_words(one)}" for name, one in group.items()) for group in value
            )
        case list():
            shown = "; ".join(value[:5])
            return f"{shown}; and {len(value) - 5} more" if len(value) > 5 else shown
        case _:
            return str(value)
