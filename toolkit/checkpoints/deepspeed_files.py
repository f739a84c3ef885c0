"""DeepSpeed's files, plain and universal: partitions of all ranks, joined parameter by parameter.

As deepspeed 0.19 reads them itself (`utils/zero_to_fp32.py`, `checkpoint/ds_to_universal.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from toolkit.checkpoints.portable_files import state_key
from toolkit.checkpoints.stored import (
    Contents,
    NotWhole,
    Span,
    Stored,
    add_groups,
    damage_named,
    load_plain,
    name_in_model,
    scalar,
)
from toolkit.errors import UsageError

MODEL: Final = "*mp_rank_00_model_states.pt"
OPTIMIZER: Final = "*_optim_states.pt"
UNIVERSAL: Final = "zero"
SWAPPED: Final = "offloaded_tensors"


def deepspeed_folder(folder: Path) -> Path | None:
    """Return the folder with DeepSpeed's files: this one, or the one that `latest` names in it.

    Raises:
        UsageError: the folder that `latest` names is not there.
    """
    if any(folder.glob(MODEL)) or (folder / UNIVERSAL).is_dir():
        return folder
    inside = sorted({file.parent for file in folder.glob(f"*/{MODEL}")})
    latest = folder / "latest"
    if latest.is_file():
        named = folder / latest.read_text(encoding="utf-8").strip()
        if not named.is_dir():
            raise NotWhole(f"{latest} names {named}, which is missing. Copy the whole folder.")
        return named
    return inside[-1] if inside else None


def read_deepspeed(folder: Path, swapped: Sequence[dict[str, Any]] = ()) -> Contents:
    """Return what a folder with DeepSpeed's files holds.

    Args:
        folder: As `deepspeed_folder` returns it.
        swapped: What the toolkit has saved of each rank beside copies of files on NVMe.

    Raises:
        UsageError: a rank's file is missing or damaged, or the ranks shared the model.
    """
    if any(folder.glob("*mp_rank_01*")) or any(folder.glob("*expert_*")):
        raise UsageError(
            f"{folder} has a model that ranks share by layers, matrices or experts, which is not "
            "read yet. Let the training that wrote it save the whole model."
        )
    models = _by_rank(folder.glob(MODEL))
    if not models:
        raise NotWhole(f"{folder} lacks *_model_states.pt. Copy the whole checkpoint.")
    first = load_plain(models[0])
    if (folder / UNIVERSAL).is_dir():
        file = folder / UNIVERSAL / "optimizer_state.pt"
        contents = _universal(folder, first["param_shapes"], file)
    elif optimizers := _by_rank(folder.glob(OPTIMIZER)):
        contents = _partitioned(folder, models, first, optimizers, swapped)
    else:
        weights = {n: t for n, t in first["module"].items() if t.elements}
        contents = Contents(folder=folder, library="DeepSpeed", strategy="zero0", weights=weights)
        contents.missing.append(f"{folder} has no *_optim_states.pt: no states of the optimizer")
    contents.step = first.get("global_steps")
    contents.ranks = first.get("dp_world_size")
    for name in first.get("buffer_names") or ():
        contents.weights[name] = first["module"][name]
    if isinstance(scheduler := first.get("lr_scheduler"), dict):
        contents.scheduler = scheduler
    contents.weights = {name_in_model(n): t for n, t in contents.weights.items()}
    return contents


def _by_rank(files: Iterator[Path]) -> list[Path]:
    return sorted(files, key=lambda file: (len(file.name), file.name))


def _partitioned(
    folder: Path,
    models: list[Path],
    first: dict[str, Any],
    optimizers: list[Path],
    swapped: Sequence[dict[str, Any]],
) -> Contents:
    of_rank = [load_plain(file)["optimizer_state_dict"] for file in optimizers]
    if (folder / SWAPPED).is_dir() and not swapped:
        raise UsageError(
            f"{folder / SWAPPED} has states that lay on NVMe, and DeepSpeed does not write which "
            "parameters they are of. Let the training that wrote it save the whole model."
        )
    for rank, (held, beside) in enumerate(zip(of_rank, swapped, strict=False)):
        _put_back(held, beside["groups"], folder / SWAPPED / f"rank{rank:02}")
    stage, ranks = int(of_rank[0].get("zero_stage", 1)), of_rank[0]["partition_count"]
    ranks = max(ranks) if isinstance(ranks, list) else int(ranks)
    _require_ranks(optimizers, ranks)
    inner = of_rank[0].get("base_optimizer_state", of_rank[0].get("optimizer_state_dict"))
    if not isinstance(inner, dict) or "state" not in inner:
        raise UsageError(f"{optimizers[0]} has states in a form that is not read yet.")
    contents = Contents(
        folder=folder, library="DeepSpeed", strategy=f"zero{stage}", weights={}, ranks=ranks
    )
    shapes: list[dict[str, Any]] = first["param_shapes"]
    if stage == 3:
        _require_ranks(models, ranks)
        _join_stage_3(contents, shapes, of_rank, optimizers)
        frozen = [load_plain(file)["frozen_param_fragments"] for file in models]
    else:
        _join_stages_1_2(contents, shapes, of_rank, optimizers)
        frozen = [first["frozen_param_fragments"]]
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        parts = _joined([fragments[name] for fragments in frozen])
        contents.weights[name] = _shaped(parts, shape, optimizers[0])
    add_groups(contents, shapes, inner["param_groups"])
    scaler = vars(of_rank[0]["loss_scaler"]) if "loss_scaler" in of_rank[0] else {}
    if "scale_window" in scaler:
        since = (scaler["cur_iter"] - scaler["last_overflow_iter"] - 1) % scaler["scale_window"]
        contents.loss_scale = {"scale": scaler["cur_scale"], "steps_since_change": since}
    return contents


def _put_back(held: dict[str, Any], groups: list[dict[str, Any]], folder: Path) -> None:
    """Put the states of one rank that lay on NVMe where they stand in other checkpoints."""

    def swapped(group: dict[str, Any], prefix: str = "") -> Stored:
        file = folder / f"{prefix}{group['id']}.tensor.swp"
        with damage_named(file):
            size = file.stat().st_size
        elements: int = group.get("elements", size // 4)
        if size < 4 * elements:
            raise _mixed(file, size // 4, elements)
        return Stored((elements,), "float32", (Span(file, 0, 4 * elements),))

    held["fp32_flat_groups"] = [
        swapped(group) if group["flat"] is None else group["flat"] for group in groups
    ]
    held["optimizer_state_dict"]["state"] = {
        number: group["state"] | {name: swapped(group, f"{name}-") for name in group["in_files"]}
        for number, group in enumerate(groups)
    }


def _require_ranks(files: list[Path], ranks: int) -> None:
    """Require a file of each rank; the names differ in the number of the rank alone.

    Raises:
        UsageError: one is missing.
    """
    for rank in range(ranks):
        wanted = files[0].name.replace("pp_rank_0_", f"pp_rank_{rank}_")
        if files[0].with_name(wanted) not in files:
            raise NotWhole(
                f"{files[0].with_name(wanted)} is missing: {ranks} ranks wrote this checkpoint. "
                "Copy the files of all of them."
            )


def _join_stages_1_2(
    contents: Contents,
    shapes: list[dict[str, Any]],
    of_rank: list[dict[str, Any]],
    files: list[Path],
) -> None:
    """Join groups that were flattened as a whole, and then cut into one partition a rank."""
    for number, of_group in enumerate(shapes):
        paddings = of_rank[0].get("param_alignment_paddings") or {}
        between = paddings[number] if paddings else [0] * len(of_group)
        begin = 0
        masters = [held["single_partition_of_fp32_groups"][number] for held in of_rank]
        states = [held["base_optimizer_state"]["state"].get(number, {}) for held in of_rank]
        for (name, shape), padding in zip(of_group.items(), between, strict=True):

            def cut(flats: Sequence[Stored], place: int = begin, shape: Any = shape) -> Stored:
                return _shaped(_joined(flats), shape, files[0], place)

            _add(contents, name, cut, masters, states)
            begin += math.prod(shape) + padding


def _join_stage_3(
    contents: Contents,
    shapes: list[dict[str, Any]],
    of_rank: list[dict[str, Any]],
    files: list[Path],
) -> None:
    """Join parameters each of which was cut into one partition a rank."""
    of_ranks = [[flat.elements for flat in held["fp32_flat_groups"]] for held in of_rank]
    sizes, begin, group = of_ranks[0], 0, 0
    needed = sum(-(-math.prod(s) // len(of_rank)) for names in shapes for s in names.values())
    for file, held in zip(files, of_ranks, strict=True):
        if held != sizes or sum(held) != needed:
            raise _mixed(file, sum(held), needed)
    for name, shape in (item for names in shapes for item in names.items()):
        length = -(-math.prod(shape) // len(of_rank))
        while group < len(sizes) - 1 and begin >= sizes[group]:
            begin, group = begin - sizes[group], group + 1
        if begin + length > sizes[group]:
            raise UsageError(
                f"{name} lies in two groups of {files[0]}, which is not read yet. Convert it with "
                "DeepSpeed's ds_to_universal.py."
            )

        def cut(
            flats: Sequence[Stored], place: int = begin, length: int = length, shape: Any = shape
        ) -> Stored:
            return _shaped(_joined([flat.part(place, length) for flat in flats]), shape, files[0])

        masters = [held["fp32_flat_groups"][group] for held in of_rank]
        states = [held["optimizer_state_dict"]["state"].get(group, {}) for held in of_rank]
        _add(contents, name, cut, masters, states)
        begin += length


def _add(
    contents: Contents, name: str, cut: Any, masters: list[Any], states: list[dict[str, Any]]
) -> None:
    contents.weights[name] = cut(masters)
    for state, value in states[0].items():
        is_flat = isinstance(value, Stored) and value.shape
        held = cut([of_rank[state] for of_rank in states]) if is_flat else scalar(value)
        contents.states[state_key(name_in_model(name), state)] = held


def _joined(flats: Sequence[Stored]) -> Stored:
    """Return flat tensors one behind the other."""
    spans = tuple(span for flat in flats for span in flat.spans)
    return Stored((sum(flat.elements for flat in flats),), flats[0].dtype, spans)


def _shaped(flat: Stored, shape: Sequence[int], file: Path, place: int = 0) -> Stored:
    """Return a parameter whose elements stand in a flat tensor, of which padding may follow."""
    elements = math.prod(shape)
    if flat.elements < place + elements:
        raise _mixed(file, flat.elements, place + elements)
    return replace(flat.part(place, elements), shape=tuple(shape))


def _mixed(file: Path, held: int, needed: int) -> NotWhole:
    return NotWhole(
        f"{file} holds {held:,} elements where {needed:,} belong. The files are of different "
        "checkpoints: copy all files of one."
    )


def _universal(folder: Path, shapes: list[dict[str, Any]], file: Path) -> Contents:
    contents = Contents(folder=folder, library="DeepSpeed", strategy="universal", weights={})
    saved = load_plain(file) if file.is_file() else {}
    steps = saved.get("optimizer_state_dict", {}).get("state", {})
    for number, names in enumerate(shapes):
        for name, shape in names.items():
            place = folder / UNIVERSAL / name
            contents.weights[name] = _of_universal(place / "fp32.pt", tuple(shape))
            key = partial(state_key, name_in_model(name))
            if "step" in steps.get(number, {}):  # of ZeRO-3 it is not beside the parameter
                contents.states[key("step")] = scalar(steps[number]["step"])
            for other in sorted({*place.glob("*.pt")} - {place / "fp32.pt"}):
                contents.states[key(other.stem)] = _of_universal(other, tuple(shape))
    add_groups(contents, shapes, saved.get("param_groups", []))
    return contents


def _of_universal(file: Path, shape: tuple[int, ...]) -> Stored:
    held = load_plain(file)
    value = held["param"] if isinstance(held, dict) else held
    if not isinstance(value, Stored) or not value.shape:
        return scalar(value)
    if value.elements != math.prod(shape):
        raise _mixed(file, value.elements, math.prod(shape))
    return replace(value, shape=shape)
