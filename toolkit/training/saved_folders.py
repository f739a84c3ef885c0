"""`python -m toolkit.training.saved_folders FOLDER`: read what a script saved, as its owner would.

FOLDER holds the files of the ranks, which name the paths that were saved. Nothing of the script
runs here. What was found is written beside these files.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from toolkit.engines.names import plain_name
from toolkit.engines.tensors import is_spread
from toolkit.errors import sentence_of
from toolkit.launching.ranks import quiet
from toolkit.measuring.saves import described, tensors_by_name
from toolkit.records.json_files import SCHEMA, write_json
from toolkit.records.saves import READ_FILE, AllRead, ReadBack, read_saves

OF_A_MODEL: Final = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.*")
"""Files that belong to the config beside them."""

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth")

STATES: Final = (
    *("optimizer*", "scheduler*", "scaler*", "rng_state*", "random_states*", "training_args.bin"),
    *("custom_checkpoint*", "*_states.pt", "dl_state*", "sampler*"),
)
"""Files of a checkpoint that hold no weights, or those of one engine alone."""


def main(folder: Path) -> None:
    calls = [call for one in read_saves(folder) for call in one["calls"] if call["error"] is None]
    paths = dict.fromkeys(call["path"] for call in calls if os.path.exists(call["path"]))
    found = [_read(Path(path)) for path in paths]
    write_json(folder / READ_FILE, {**AllRead(schema=SCHEMA, found=found)})


def _read(path: Path) -> ReadBack:
    found = ReadBack(
        path=str(path),
        kind="nothing",
        error=None,
        missing=[],
        unexpected=[],
        base=None,
        tensors={},
        lacks=[],
        unread=[],
    )
    if path.is_file() and any(path.match(name) for name in OF_A_MODEL):
        path = path.parent
    if not any((path / name).is_file() for name in ("adapter_config.json", "config.json")):
        for config in path.glob("*/adapter_config.json"):  # of an adapter with a name
            path = config.parent
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            if (path / "adapter_config.json").is_file():
                found["kind"] = "adapter"
                _read_adapter(path, found)
                found["missing"] += [str(w.message) for w in warned if "missing adapter" in str(w)]
            elif (path / "config.json").is_file():
                found["kind"] = "model"
                _read_model(path, found)
            else:
                _read_weights(path, found)
        except Exception as error:  # any: damaged files fail at any line of their loaders
            found["error"] = f"{type(error).__name__}: {sentence_of(error)}"
            if found["kind"] == "model":  # its files may show why
                with suppress(Exception):
                    _read_weights(path, found)
                found["kind"] = "model"
    return found


def _read_model(folder: Path, found: ReadBack) -> None:
    import transformers

    if "auto_map" in json.loads((folder / "config.json").read_bytes()):
        found["base"] = "its config names code of its own, which is not run here"
        _read_weights(folder, found)
        found["kind"] = "model"
        return
    config = transformers.AutoConfig.from_pretrained(folder)
    architectures = config.architectures or [""]
    # A reward model has the type of the causal LM that it was made of, and another head.
    kind: Any = getattr(transformers, architectures[0], transformers.AutoModelForCausalLM)
    model, report = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
    found["missing"] = sorted(map(str, report["missing_keys"]))
    found["unexpected"] = sorted(map(str, report["unexpected_keys"]))
    found["missing"] += [str(one) for one in report["mismatched_keys"]]
    _take(found, dict(model.named_parameters()))
    names = {path.name for path in folder.iterdir()}
    tokenizer = folder / "tokenizer_config.json"
    if not tokenizer.is_file():
        found["lacks"].append("tokenizer")
    elif "chat_template.jinja" not in names and b"chat_template" not in tokenizer.read_bytes():
        found["lacks"].append("chat template")
    if model.can_generate() and "generation_config.json" not in names:
        found["lacks"].append("generation_config.json")
    held = "model*.safetensors" if any(n.endswith(".safetensors") for n in names) else "pytorch*"
    found["unread"] = [path.name for path in _files(folder) if not path.match(held)]


def _read_adapter(folder: Path, found: ReadBack) -> None:
    from peft import PeftConfig, PeftModel
    from peft.utils.save_and_load import load_peft_weights
    from transformers import AutoModelForCausalLM

    _take(found, load_peft_weights(str(folder), device="cpu"))
    found["unread"] = [path.name for path in _files(folder) if not path.match("adapter_model.*")]
    name = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    if not name:
        found["base"] = "adapter_config.json names no base model"
        return
    try:
        base = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
        PeftModel.from_pretrained(base, str(folder))
    except Exception as error:  # any: see above; a base with new tokens has to be resized first
        found["base"] = f"it was not put into its base model {name}: {sentence_of(error)}"


def _read_weights(path: Path, found: ReadBack) -> None:
    """Read files of tensors, without running what stands in them."""
    for file in [path] if path.is_file() else _files(path):
        content = _content(file)
        if content:
            _take(found, content)
            found["kind"] = "weights"


def _files(folder: Path) -> Iterator[Path]:
    for pattern in WEIGHTS:
        for file in sorted(folder.glob(pattern)):
            if not any(file.match(state) for state in STATES):
                yield file


def _content(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    if file.suffix == ".safetensors":
        return load_file(file)
    return tensors_by_name(torch.load(file, map_location="cpu", weights_only=True))


def _take(found: ReadBack, tensors: Mapping[str, torch.Tensor]) -> None:
    if any(map(is_spread, tensors.values())):
        raise ValueError("its tensors are the parts of one rank (DTensor)")
    for name, tensor in tensors.items():
        # A wrapper's own name in front of all, as DDP and DeepSpeed have it.
        found["tensors"][plain_name(name).removeprefix("module.")] = described(tensor)


if __name__ == "__main__":
    quiet()
    main(Path(sys.argv[1]))
