"""What a folder is, by its files: ours, the Trainer's, Accelerate's, DeepSpeed's, FSDP2's, peft's.

Every reader gives whole tensors by the names that they have in the model, and reads none of them
before it is used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from toolkit.checkpoints.atomic_folder import check
from toolkit.checkpoints.deepspeed_files import deepspeed_folder, read_deepspeed
from toolkit.checkpoints.folders import KIND
from toolkit.checkpoints.portable_files import (
    OPTIMIZER,
    PORTABLE,
    STATE_FILE,
    WEIGHTS,
    PortableState,
)
from toolkit.checkpoints.stored import Contents, Stored, damage_named, load_plain, read_parts
from toolkit.checkpoints.torch_files import (
    LOADED,
    add_named_shards,
    add_optimizer,
    read_shards_of,
    read_stages,
    whole_weights,
)
from toolkit.engines.names import LIST, SHARDS, STAGE
from toolkit.errors import UsageError
from toolkit.records.json_files import read_as
from toolkit.records.manifests import MANIFEST

OPTIMIZERS: Final = ("optimizer.pt", "optimizer.bin", "optimizer_0")
LOSSES: Final = "losses.json"


def read_folder(folder: Path, *, base: Path | None = None) -> Contents:
    """Return what a folder holds.

    Args:
        folder: A checkpoint, a model or an adapter.
        base: A folder with the model's config, for optimizers that number their parameters; by
            default it is looked for beside the checkpoint.

    Raises:
        UsageError: it is of no known kind, damaged or incomplete, or would run code.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder (this is {Path.cwd()}). Name a checkpoint's.")
    manifest: dict[str, Any] = {}
    if (folder / MANIFEST).is_file():
        with damage_named(folder / MANIFEST):
            manifest = check(folder)
    model = model_folder(folder, base)
    if manifest.get("kind") == KIND:
        contents = _of_toolkit(folder, manifest, model)
    else:
        contents = _of_libraries(folder, model)
        if manifest:
            contents.library = "toolkit"
            contents.manifest = manifest
            contents.strategy = str(manifest.get("strategy", contents.strategy))
            contents.step = manifest.get("step")
    _drop_second_names(contents, model)
    if not contents.weights:
        raise UsageError(f"{folder} holds no weights. Name the folder of a whole checkpoint.")
    return contents


def _drop_second_names(contents: Contents, model: Path | None) -> None:
    """Drop a tied head, which the model and its optimizer have by the name of the embeddings.

    The file of the model that was trained does not have it either; where none is known, its bytes
    are those of a weight that was trained.
    """
    trained = {name for group in contents.groups for name in group["names"]}
    others = {*contents.weights} - trained
    if not trained or not others or len(others) > 2 or contents.is_adapter:
        return
    held = (None if model is None else whole_weights(model, LOADED)) or {}
    is_known = trained <= held.keys()
    for name in others - held.keys():
        tensor = contents.weights[name]
        twins = (contents.weights[other] for other in trained & contents.weights.keys())
        if is_known or any(_has_same_bytes(tensor, twin) for twin in twins):
            del contents.weights[name]


def _has_same_bytes(one: Stored, other: Stored) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype) or len(one.shape) < 2:
        return False
    return one.spans == other.spans or b"".join(one.pieces()) == b"".join(other.pieces())


def model_folder(folder: Path, base: Path | None = None) -> Path | None:
    """Return the folder with the config of a checkpoint's model; None where none is beside it."""
    for place in (base, folder, folder.parent / "final"):
        if place is not None and (place / "config.json").is_file():
            return place
    for place in (base, folder, folder.parent / "final"):
        if place is not None and (file := place / "adapter_config.json").is_file():
            with damage_named(file):
                return _with_config(json.loads(file.read_bytes())["base_model_name_or_path"])
    record = folder.parent / "record.json"
    if not record.is_file():
        return None
    with damage_named(record):
        return _with_config(json.loads(record.read_bytes())["model"]["path"])


def _with_config(place: str | None) -> Path | None:
    return Path(place) if place and Path(place, "config.json").is_file() else None


# Ours


def _of_toolkit(folder: Path, manifest: dict[str, Any], model: Path | None) -> Contents:
    strategy = str(manifest["facts"].get("strategy", "another library's"))
    contents = Contents(
        folder=folder, library="toolkit", strategy=strategy, weights={}, manifest=manifest
    )
    files = sorted(folder.glob("rank-*.pt"), key=lambda file: (len(file.name), file.name))
    swapped = [states for file in files if (states := load_plain(file)["swapped"]) is not None]
    if manifest.get("form") == PORTABLE:
        _read_portable(contents, folder / PORTABLE)
    elif (folder / SHARDS / LIST).is_file():
        values, _ = read_shards_of(folder / SHARDS)
        add_named_shards(contents, values)
    elif (place := deepspeed_folder(folder)) is not None:
        held = read_deepspeed(place, swapped)
        contents.weights, contents.states, contents.groups = held.weights, held.states, held.groups
        contents.missing, contents.loss_scale = held.missing, held.loss_scale
    elif stages := sorted(folder.glob(f"{STAGE}-*"), key=lambda file: (len(file.name), file.name)):
        read_stages(contents, stages)
    elif (weights := whole_weights(folder)) is not None:
        contents.weights = weights
        add_optimizer(contents, folder / "optimizer.pt", model)
    else:
        raise UsageError(
            f"{folder} has the files of {strategy}, which are not read yet. Resume it under "
            f"{strategy} and use the model in its final/."
        )
    contents.step = manifest["step"]
    contents.ranks = contents.ranks or len(files) or None
    if files:
        _read_rank(contents, files[0])
    if (file := folder / LOSSES).is_file():
        with damage_named(file):
            contents.losses = json.loads(file.read_bytes())["losses"]
    return contents


def _read_rank(contents: Contents, file: Path) -> None:
    states = load_plain(file)
    contents.scheduler = states["scheduler"]
    if not any(contents.folder.glob(f"{STAGE}-*")):  # ranks of a pipeline have groups of their own
        for group, rate in zip(contents.groups, states["learning_rates"], strict=False):
            group["lr"] = rate
    if (scaler := states["scaler"]) is not None:
        contents.loss_scale = _scale_of(scaler)


def _scale_of(scaler: dict[str, Any]) -> dict[str, float]:
    return {"scale": scaler["scale"], "steps_since_change": scaler["_growth_tracker"]}


def _read_portable(contents: Contents, folder: Path) -> None:
    state = read_as(folder / STATE_FILE, PortableState)
    contents.weights = read_parts(folder / WEIGHTS)
    contents.states = read_parts(folder / OPTIMIZER)
    contents.groups, contents.scheduler = state["groups"], state["scheduler"]
    contents.loss_scale, contents.ranks = state["loss_scale"], state["ranks"]
    contents.strategy = state["strategy"]


# Other libraries'


def _of_libraries(folder: Path, model: Path | None) -> Contents:
    deepspeed = deepspeed_folder(folder)
    shards = next(
        (f for f in (folder / "pytorch_model_fsdp_0", folder) if (f / LIST).is_file()), None
    )
    if deepspeed is not None:
        contents = read_deepspeed(deepspeed)
    elif shards is not None:
        contents = Contents(folder=folder, library="torch", strategy="fsdp", weights={})
        values, contents.ranks = read_shards_of(shards)
        add_named_shards(contents, values)
    elif (weights := whole_weights(folder)) is not None:
        contents = Contents(
            folder=folder, library="transformers", strategy="whole", weights=weights
        )
        if contents.is_adapter:
            contents.library = "peft"
    else:
        raise UsageError(
            f"{folder} holds no checkpoint, model or adapter that is known: it has "
            f"{', '.join(sorted(path.name for path in folder.iterdir())[:5]) or 'nothing'}. Name "
            "the folder that the training wrote."
        )
    contents.folder = folder
    file = next((folder / name for name in OPTIMIZERS if (folder / name).exists()), None)
    if deepspeed is None and file is not None:
        if file.is_dir():
            contents.strategy = "fsdp"
            add_named_shards(contents, read_shards_of(file)[0])
        else:
            add_optimizer(contents, file, model)
    _read_beside(contents)
    return contents


def _read_beside(contents: Contents) -> None:
    """Read the small files of the Trainer and of Accelerate."""
    folder = contents.folder
    for library, own, of_rank in (
        ("Trainer", "trainer_state.json", "rng_state_*.pth"),
        ("Accelerate", "random_states_0.pkl", "random_states_*.pkl"),
    ):
        if (folder / own).is_file():
            contents.library = library
            contents.ranks = contents.ranks or len([*folder.glob(of_rank)]) or 1
    for name in ("scheduler.pt", "scheduler.bin"):
        if (folder / name).is_file():
            contents.scheduler = load_plain(folder / name)
    if (folder / "scaler.pt").is_file() and (scaler := load_plain(folder / "scaler.pt")):
        contents.loss_scale = _scale_of(scaler)
    if (file := folder / "trainer_state.json").is_file():
        with damage_named(file):
            state = json.loads(file.read_bytes())
            contents.step = state["global_step"]
            losses = [line["loss"] for line in state["log_history"] if "loss" in line]
            contents.losses = losses if len(losses) == contents.step else None
    steps = [tensor for key, tensor in contents.states.items() if key.endswith(".step")]
    if contents.step is None and steps:
        contents.step = int(float(steps[0]))
