"""Files of torch and transformers: safetensors, pickles, shards of FSDP2, numbered optimizers."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from toolkit.checkpoints.portable_files import state_key
from toolkit.checkpoints.stored import (
    LORA,
    Contents,
    NotWhole,
    Stored,
    add_groups,
    damage_named,
    load_pickle,
    load_plain,
    name_in_model,
    read_safetensors,
    scalar,
)
from toolkit.engines.names import LIST, MASTER, STAGE, TENSOR_RANKS
from toolkit.errors import UsageError, sentence_of

LOADED: Final = (
    *("model.safetensors.index.json", "model.safetensors"),
    *("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
"""Files of a model that `from_pretrained` loads."""

WHOLE: Final = (
    *("adapter_model.safetensors", "adapter_model.bin", "pytorch_model_fsdp.bin"),
    *LOADED,
)
"""Files of a whole model or adapter, of which the first that is there is read."""

IN_LAYER: Final = ("base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
"""Parts of a layer with an adapter, in the order of its parameters (peft 0.21)."""

NO_DECAY: Final = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names that the Trainer keeps out of weight decay (transformers 5.24, trainer.py)."""


def whole_weights(folder: Path, files: Sequence[str] = WHOLE) -> dict[str, Stored] | None:
    """Return the weights of the first of these files that is there, by name; None without any.

    Raises:
        UsageError: a file is missing or damaged.
    """
    file = next((folder / name for name in files if (folder / name).is_file()), None)
    if file is None:
        return None
    parts = [file]
    if file.suffix == ".json":
        with damage_named(file):
            names: dict[str, str] = json.loads(file.read_bytes())["weight_map"]
            parts = [folder / Path(name).name for name in sorted({*names.values()})]
    weights: dict[str, Stored] = {}
    for part in parts:
        tensors, metadata = of_file(part)
        # Of a weight with two names, safetensors keeps the first by the alphabet, such as the
        # head's, and notes the others. The model has it by that of the embeddings.
        for other, kept in metadata.items():
            if kept in tensors:
                tensors[max(other, kept)] = tensors.pop(kept)
        weights |= {name_in_model(name): tensor for name, tensor in tensors.items()}
    return weights


def of_file(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    if file.suffix == ".safetensors":
        return read_safetensors(file)
    held = load_plain(file)
    if not isinstance(held, dict):
        raise UsageError(f"{file} holds no weights by name. Name a folder of a whole model.")
    return {n: t for n, t in held.items() if isinstance(t, Stored)}, {}


# Shards


def read_shards_of(folder: Path) -> tuple[dict[tuple[Any, ...], Any], int]:
    """Return what `torch.distributed.checkpoint` wrote by its path, and how many ranks did.

    Tensors are not read yet; other values are.

    Raises:
        UsageError: a file is missing or damaged, or would run code.
    """
    listed = load_pickle(folder / LIST)
    sizes: dict[str, int] = {}
    for place in listed.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise NotWhole(f"{folder / LIST} names {place.relative_path!r}, no file beside it.")
        end = place.offset + place.length
        sizes[place.relative_path] = max(end, sizes.get(place.relative_path, 0))
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            raise NotWhole(f"{file} is missing: {LIST} names it. Copy the files of all ranks.")
        if file.stat().st_size < size:
            raise NotWhole(
                f"{file} is cut off: it has {file.stat().st_size:,} of {size:,} bytes. Take "
                "another checkpoint."
            )
    places = {
        (index.fqn, tuple(vars(index).get("offset") or ())): p
        for index, p in listed.storage_data.items()
    }
    values: dict[tuple[Any, ...], Any] = {}
    for name, facts in listed.state_dict_metadata.items():
        path = tuple((listed.planner_data or {}).get(name, (name,)))
        if hasattr(facts, "chunks"):
            values[path] = _of_chunks(folder, name, facts, places)
        elif (name, ()) in places:
            values[path] = _loaded(folder, places[name, ()])
    return values, len({name.split("_")[2] for name in sizes if name.startswith("__")})


def _of_chunks(folder: Path, name: str, facts: Any, places: dict[Any, Any]) -> Stored:
    parts: list[tuple[Sequence[int], Stored]] = []
    for chunk in facts.chunks:
        part: Stored = _loaded(folder, places[name, tuple(chunk.offsets)])
        if part.shape != tuple(chunk.sizes):
            raise NotWhole(f"{folder / LIST} gives {name} another shape. Copy the folder anew.")
        parts.append((chunk.offsets, part))
    return _joined(tuple(facts.size), facts.properties.values[0], parts, f"{folder / LIST}: {name}")


def _joined(
    shape: tuple[int, ...], dtype: str, parts: Sequence[tuple[Sequence[int], Stored]], what: str
) -> Stored:
    """Return a tensor of parts, each with the place of its first element."""
    runs = [
        (at, part.part(begin, length))
        for offsets, part in parts
        for at, begin, length in _runs(shape, offsets, part.shape)
    ]
    runs.sort(key=lambda run: run[0])
    if sum(part.elements for _, part in runs) != math.prod(shape):
        raise NotWhole(f"{what} is there in part alone. Copy the whole checkpoint.")
    return Stored(shape, dtype, tuple(span for _, part in runs for span in part.spans))


def _runs(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield what follows each other in a tensor and its part: where in each, and how long."""
    at = len(shape) - 1
    while at > 0 and sizes[at] == shape[at]:
        at -= 1
    inner = math.prod(shape[at + 1 :])
    length = math.prod(sizes[at:])
    for number, index in enumerate(itertools.product(*map(range, sizes[: max(at, 0)]))):
        place = 0
        for dim, size in enumerate(shape[: at + 1]):
            place = place * size + offsets[dim] + (index[dim] if dim < at else 0)
        yield place * inner, number * length, length


def _loaded(folder: Path, place: Any) -> Any:
    return load_plain(folder / place.relative_path, place.offset, place.length)


def add_named_shards(contents: Contents, values: dict[tuple[Any, ...], Any]) -> None:
    """Put shards into weights, states and groups of the optimizer, by their paths."""
    groups: dict[int, dict[str, Any]] = {}
    for path, value in values.items():
        match path:
            case ("optimizer" | "optim", "state", str(name), str(state)):
                held = value if isinstance(value, Stored) else scalar(value)
                contents.states[state_key(name_in_model(name), state)] = held
            case ("optimizer" | "optim", "param_groups", int(number), str(key)):
                groups.setdefault(number, {})[key] = value
            case (*_, str(name)) if isinstance(value, Stored):
                contents.weights[name_in_model(name)] = value
            case _:
                pass
    ordered = [groups[number] for number in sorted(groups)]
    add_groups(contents, (group["params"] for group in ordered), ordered)


# Pipelines


def read_stages(contents: Contents, files: Sequence[Path]) -> None:
    """Join what ranks of a pipeline wrote: layers of their stages, or parts of their matrices.

    Args:
        contents: To be filled.
        files: Of weights, beside those of optimizers, in the order of the ranks.

    Raises:
        UsageError: a file is damaged, or of an older toolkit.
    """
    ranks, groups = 1, dict[tuple[float, float | None, float], dict[str, None]]()
    weights, states = dict[str, list[Stored]](), dict[str, list[Stored]]()
    cuts: dict[str, int] = {}
    for file in files:
        tensors, described = read_safetensors(file)
        if TENSOR_RANKS not in described:
            raise UsageError(
                f"{file} is of a toolkit that did not write yet what joins the stages. Resume it "
                "as it was launched, and save with --checkpoint_form portable."
            )
        ranks = int(described[TENSOR_RANKS])
        for name, tensor in tensors.items():
            weights.setdefault(name, []).append(tensor)
        cuts |= {name: int(described[name]) for name in tensors.keys() & described.keys()}
        held = load_plain(file.with_name(file.stem.replace(STAGE, "optimizer") + ".pt"))
        for group in held["param_groups"]:
            rates = float(group["lr"]), group.get("initial_lr"), group["weight_decay"]
            groups.setdefault(rates, {}).update(dict.fromkeys(group["param_names"]))
            for number, name in zip(group["params"], group["param_names"], strict=True):
                for state, value in held["state"].get(number, {}).items():
                    key = state_key(name, state)
                    states.setdefault(key, []).append(scalar(value))
                    cuts |= {key: cuts[name]} if name in cuts else {}
    for whole, parts in ((contents.weights, weights), (contents.states, states)):
        whole |= {key: _along(cuts.get(key), found[:ranks], key) for key, found in parts.items()}
    rates = [{"lr": lr, "initial_lr": first} for lr, first, _ in groups]
    add_groups(contents, groups.values(), rates)


def _along(dim: int | None, parts: Sequence[Stored], what: str) -> Stored:
    """Return the tensor whose parts lie one after the other along a dimension."""
    first = parts[0]
    if dim is None or not first.shape:  # each rank has all of it
        return first
    lengths = [part.shape[dim] for part in parts]
    begins = itertools.accumulate(lengths, initial=0)
    offsets = [(0,) * dim + (begin,) + (0,) * len(first.shape[dim + 1 :]) for begin in begins]
    shape = (*first.shape[:dim], sum(lengths), *first.shape[dim + 1 :])
    return _joined(shape, first.dtype, [*zip(offsets, parts, strict=False)], what)


# Optimizers


def add_optimizer(contents: Contents, file: Path, model: Path | None) -> None:
    """Put what an optimizer saved into the contents, by the names of its parameters.

    Args:
        contents: With weights.
        file: Of `torch.save`.
        model: A folder with the model's config; None if it is not known.
    """
    held = load_plain(file)
    if not (isinstance(held, dict) and "state" in held and held.get("param_groups")):
        contents.missing.append(f"{file} holds states in a form that is not read yet")
        return
    groups, states = held["param_groups"], held["state"]
    numbers = [number for group in groups for number in group["params"]]
    if all(isinstance(number, str) for number in numbers):
        names = {number: number for number in numbers}
    elif all("param_names" in group for group in groups):
        of_groups = [name for group in groups for name in group["param_names"]]
        names = dict(zip(numbers, map(name_in_model, of_groups), strict=True))
    else:
        names = _names_by_order(contents, file, groups, states, model)
        if names is None:
            return
    for number, of_parameter in states.items():
        name = name_in_model(names[number])
        for state, value in of_parameter.items():
            if state == MASTER:
                contents.weights[name] = value
            elif value is not None:
                contents.states[state_key(name, state)] = scalar(value)
    add_groups(contents, ([names[n] for n in group["params"]] for group in groups), groups)


def _names_by_order(
    contents: Contents,
    file: Path,
    groups: list[dict[str, Any]],
    states: dict[int, dict[str, Any]],
    model: Path | None,
) -> dict[int, str] | None:
    """Return the names of numbered parameters; None, with a sentence, if they are not certain."""
    reason = "its model is not known: name it with --base"
    try:
        if model is not None:
            ordered = _trained_in_order(contents, model)
            by_group = ordered if len(groups) == 2 else [[n for part in ordered for n in part]]
            if len(groups) == 1:
                by_group = [_in_order(contents, model)]
            reason = f"its groups are not those of the Trainer, nor all parameters of {model}"
            if [len(group["params"]) for group in groups] == [len(part) for part in by_group]:
                numbers = [number for group in groups for number in group["params"]]
                names = dict(zip(numbers, (n for part in by_group for n in part), strict=True))
                wrong = [n for number, n in names.items() if not _fits(contents, n, states, number)]
                if not wrong:
                    return names
                reason = f"the states of {wrong[0]} would have another shape than it"
    except (OSError, ValueError, LookupError) as error:
        reason = f"its model was not built: {sentence_of(error)}"
    contents.missing.append(f"{file} numbers its parameters, and {reason}")
    return None


def _fits(contents: Contents, name: str, states: dict[int, Any], number: int) -> bool:
    shape = contents.weights[name].shape
    moments = [t for t in states.get(number, {}).values() if isinstance(t, Stored)]
    return all(moment.shape in ((), (1,), shape) for moment in moments)


def skeleton(folder: Path) -> Any:
    """Return a model without numbers, from the config in a folder; none of its code is run."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        if kind is None:
            model = transformers.AutoModelForCausalLM.from_config(config)
        else:
            model = kind(config)
    model.tie_weights()
    return model


def _in_order(contents: Contents, model: Path) -> list[str]:
    """Return the trained weights in the order of the model's parameters."""
    whole = skeleton(model)
    if not contents.is_adapter:
        return [name for name, _ in whole.named_parameters()]
    places = {name: place for place, (name, _) in enumerate(whole.named_modules())}

    def place(name: str) -> tuple[int, int, str]:
        layer, _, rest = name.partition(LORA)
        if not rest:  # an embedding or a head that is trained beside the adapters
            return places[name.rpartition(".")[0]], -1, name
        part = f"lora_{rest.partition('.')[0]}"
        return places[layer], IN_LAYER.index(part), name

    return sorted((n for n in contents.weights if ".base_layer." not in n), key=place)


def _trained_in_order(contents: Contents, model: Path) -> list[list[str]]:
    """Return the trained weights as the Trainer groups them: with decay, and without."""
    import torch
    from transformers.trainer_pt_utils import get_parameter_names

    whole = skeleton(model)
    # A layer norm's own parameters never decay; others by their names.
    decayed = {*get_parameter_names(whole, [torch.nn.LayerNorm], NO_DECAY)}
    without = {name for name, _ in whole.named_parameters()} - decayed
    names = _in_order(contents, model)
    return [[n for n in names if n not in without], [n for n in names if n in without]]
