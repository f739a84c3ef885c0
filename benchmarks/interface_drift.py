"""Write toolkit/configs/check/renames.toml: what releases took away, and what took its place.

    python benchmarks/interface_drift.py FOLDER

FOLDER has the sources of past releases, one folder each, named LIBRARY-RELEASE, with the package in
it (an unpacked wheel, or `git archive` of a tag). The signatures of neighbouring releases are
compared, then with what is installed here; what the installed ones take again is left out. The name
that took the place of another is read from the deprecation messages of the last release that had
it, or stands in SUCCESSORS, with its source.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from packaging.version import Version

from toolkit.configs.check import signatures, sources

ROOT = Path(__file__).resolve().parents[1]
WATCHED = {
    "transformers": [
        *("TrainingArguments", "Seq2SeqTrainingArguments", "Trainer", "Seq2SeqTrainer"),
        *("Trainer.train", "Trainer.evaluate", "Trainer.save_model", "Trainer.push_to_hub"),
        *("DataCollatorForLanguageModeling", "DataCollatorForSeq2Seq", "DataCollatorWithPadding"),
        "PreTrainedModel.from_pretrained",
    ],
    "accelerate": [
        *("Accelerator", "Accelerator.prepare", "Accelerator.save_state", "Accelerator.save_model"),
        *("Accelerator.gather_for_metrics", "Accelerator.unwrap_model", "Accelerator.accumulate"),
        *(
            "DeepSpeedPlugin",
            "FullyShardedDataParallelPlugin",
            "notebook_launcher",
            "prepare_pippy",
        ),
        *("utils.DataLoaderConfiguration", "utils.ProjectConfiguration"),
    ],
    "peft": ["get_peft_model", "prepare_model_for_kbit_training"],
    "datasets": ["load_dataset", "load_from_disk", "Dataset.map", "Dataset.shuffle"],
    "trl": [],
}
"""Classes, functions and methods."""

ENDS = {"trl": ("Config", "Trainer"), "peft": ("Config",)} | dict.fromkeys(
    ("transformers", "accelerate", "datasets"), ()
)
"""Ends of the names of other classes that are watched, as far as a library exports them."""

DPO_CONFIG = "trl/trainer/dpo_config.py of 0.28.0"
BOTH_LENGTHS = "max_length, of prompt and completion together"
OLD_ARGUMENTS = "transformers/training_args.py of 4.50.3"
ARGUMENTS = "transformers/training_args.py of 4.57.6"
SUCCESSORS = {
    "transformers.TrainingArguments": {
        "adafactor": ("optim='adafactor'", ARGUMENTS),
        "dispatch_batches": (
            "accelerator_config={'dispatch_batches': ...}",
            "transformers/training_args.py of 4.50.3",
        ),
        "fsdp_min_num_params": ("fsdp_config={'min_num_params': ...}", ARGUMENTS),
        "fsdp_transformer_layer_cls_to_wrap": (
            "fsdp_config={'transformer_layer_cls_to_wrap': ...}",
            ARGUMENTS,
        ),
        "group_by_length": (
            "train_sampling_strategy='group_by_length'",
            "transformers/training_args.py of 5.2.0",
        ),
        "include_inputs_for_metrics": ("include_for_metrics=['inputs']", ARGUMENTS),
        "logging_dir": (
            "the environment variable TENSORBOARD_LOGGING_DIR",
            "transformers/integrations/integration_utils.py of 5.17.0",
        ),
        "overwrite_output_dir": (
            "",
            ARGUMENTS + ": it only silenced a check of the example scripts",
        ),
        "push_to_hub_organization": ("hub_model_id='ORGANIZATION/NAME'", ARGUMENTS),
        "split_batches": (
            "accelerator_config={'split_batches': ...}",
            "transformers/training_args.py of 4.50.3",
        ),
    },
    "transformers.PreTrainedModel.from_pretrained": {
        "load_in_4bit": (
            "quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
            "transformers/modeling_utils.py of 4.57.6",
        ),
        "load_in_8bit": (
            "quantization_config=BitsAndBytesConfig(load_in_8bit=True)",
            "transformers/modeling_utils.py of 4.57.6",
        ),
        "use_flash_attention_2": (
            "attn_implementation='flash_attention_2'",
            "transformers/modeling_utils.py of 4.50.3",
        ),
    },
    "transformers": {
        "AdamW": ("torch.optim.AdamW", "transformers/optimization.py of 4.50.3"),
    },
    "accelerate.Accelerator": {
        name: (
            f"dataloader_config=DataLoaderConfiguration({name}=...)",
            "accelerate/accelerator.py of 0.34.2",
        )
        for name in ("dispatch_batches", "even_batches", "split_batches", "use_seedable_sampler")
    },
    "accelerate.Accelerator.gather_for_metrics": {
        "tensor": ("input_data", "signatures of 0.24.1 and before")
    },
    "datasets": {"load_metric": ("evaluate.load", "datasets/metric.py of 2.21.0")},
    "datasets.load_dataset": {
        "ignore_verifications": ("verification_mode='no_checks'", "datasets/load.py of 2.10.0")
    },
    "datasets.load_from_disk": {
        "fs": ("storage_options=fs.storage_options", "datasets/load.py of 2.21.0")
    },
    "peft": {
        "prepare_model_for_int8_training": (
            "prepare_model_for_kbit_training",
            "peft/utils/other.py of 0.8.2",
        )
    },
    "trl": {
        "DataCollatorForCompletionOnlyLM": (
            "SFTConfig(completion_only_loss=True) on prompts and completions",
            "trl/trainer/utils.py of 0.19.1",
        ),
        "setup_chat_format": ("clone_chat_template", "trl/models/utils.py of 0.23.1"),
    },
    "trl.SFTTrainer": {
        "max_seq_length": ("SFTConfig(max_length=...)", "trl/trainer/sft_config.py of 0.19.1")
    },
    "trl.SFTConfig": {
        "dataset_batch_size": ("", "trl/trainer/sft_config.py of 0.17.0"),
        "num_of_sequences": (
            "max_length, in tokens of a packed row",
            "trl/trainer/sft_config.py of 0.17.0",
        ),
        "chars_per_token": ("", "trl/trainer/sft_config.py of 0.17.0"),
    },
    "trl.DPOConfig": {
        "max_completion_length": (
            BOTH_LENGTHS,
            DPO_CONFIG,
        ),
        "max_target_length": (
            BOTH_LENGTHS,
            "trl/trainer/dpo_config.py of 0.13.0",
        ),
        "max_prompt_length": (
            BOTH_LENGTHS,
            DPO_CONFIG,
        ),
        "rpo_alpha": (
            "loss_type and loss_weights",
            DPO_CONFIG,
        ),
        "padding_value": ("", "trl/trainer/dpo_config.py of 0.25.1"),
    },
}
"""By owner and by what is gone: what took its place, where messages do not say it in one name, and
where that was read. A text that is more than a name is never written into a script."""


def main(folder: Path) -> None:
    found: dict[str, dict[str, dict[str, str]]] = {}
    # All are read before anything is imported: an imported package is found where it was.
    for library, surfaces in {library: surfaces_of(library, folder) for library in WATCHED}.items():
        installed = surfaces[-1][2]
        for (_, path, before), (since, _, after) in zip(surfaces, surfaces[1:], strict=False):
            for of, old in gone(before, after):
                if of in installed and old not in installed[of] and not spared(of, old):
                    new, source = successor(library, of, old, path, after[of])
                    source = source or f"signatures up to {since}"
                    entry = {"new": new, "since": since, "source": source}
                    found.setdefault(of, {})[old] = entry
        for of in installed:
            for entry in found.get(of, {}).values():
                entry["new"] = still_there(entry["new"], installed[of], found[of])
    found["transformers"]["AutoModelForVision2Seq"] = {  # models are not compared
        "new": "AutoModelForImageTextToText",
        "since": "5.0.0",
        "source": "transformers/models/auto/modeling_auto.py of 4.57.6",
    }
    lines = ["# Written by benchmarks/interface_drift.py."]
    for of in sorted(found):
        lines += ["", f"[{json.dumps(of)}]"]
        for old, entry in sorted(found[of].items()):
            words = ", ".join(
                f"{key} = {json.dumps(value)}" for key, value in entry.items() if value
            )
            lines.append(f"{old} = {{ {words} }}")
    signatures.RENAMES.write_text("\n".join(lines) + "\n", "utf-8")
    print({of: len(names) for of, names in found.items()})


def still_there(new: str, taken: set[str], entries: dict[str, dict[str, str]]) -> str:
    """Return a successor, or its own where that one is gone too; nothing where none is left."""
    while new.isidentifier() and new not in taken:
        new = entries.get(new, {}).get("new", "")
    return new


Surface = dict[str, set[str]]


def surfaces_of(library: str, folder: Path) -> list[tuple[str, Path, Surface]]:
    """Return each release of a library, its folder and what it takes; the installed one last."""
    releases = sorted(
        (Version(path.name.partition("-")[2]), path) for path in folder.glob(f"{library}-*")
    )
    found = [(str(version), path, surface(library, path)) for version, path in releases]
    return [*found, (str(sources.version_of(library)), folder, surface(library, None))]


def surface(library: str, folder: Path | None) -> Surface:
    """Return what a release takes, by full name; what can be imported, under the library's name."""
    if folder is not None:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    for one in [*vars(signatures).values(), *vars(sources).values()]:
        if hasattr(one, "cache_clear"):
            one.cache_clear()
    try:
        names = {
            name for name in signatures._exports(library) if re.fullmatch(r"[A-Za-z]\w+", name)
        }
        found = {library: {name for name in names if can_be_imported(library, name)}}
        ends = (
            ("Config", "Trainer") if library == "trl" else ("Config",) if library == "peft" else ()
        )
        for name in [*WATCHED[library], *(name for name in names if ends and name.endswith(ends))]:
            if (taken := arguments(f"{library}.{name}")) is not None:
                found[f"{library}.{name}"] = taken
        return found
    finally:
        if folder is not None:
            sys.path.remove(str(folder))


def can_be_imported(library: str, name: str) -> bool:
    """Whether a release has a class or function of that name at its top, models left out."""
    return name.isidentifier() and signatures._find(f"{library}.{name}") is not None


def arguments(name: str) -> set[str] | None:
    """Return the arguments of a class, function or method, those of its decorators too."""
    found = signatures._find(name)
    if found is None:
        owner = signatures._find(name.rpartition(".")[0])
        if owner is None or not isinstance(owner[1], ast.ClassDef):
            return None
        method = signatures._method(*owner, name.rpartition(".")[2])
        return None if method is None else of_function(method)
    module, node = found
    return of_class(module, node) if isinstance(node, ast.ClassDef) else of_function(node)


def of_class(module: str, node: ast.ClassDef) -> set[str]:
    own = signatures._own_method(node, "__init__")
    if own is not None:
        return of_function(own)
    bases = [
        base for one in node.bases if (base := signatures._base(module, node, one)) is not None
    ]
    return {*signatures._fields(node)}.union(*(of_class(*base) for base in bases))


def of_function(node: ast.FunctionDef) -> set[str]:
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    told = (one for decorator in node.decorator_list for one in ast.walk(decorator))
    words = {one.value for one in told if isinstance(one, ast.Constant)}
    popped = {
        str(one.args[0].value)
        for one in ast.walk(node)
        if isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr in ("pop", "get")
        and ast.unparse(one.func.value) in ("kwargs", "config_kwargs")
        and one.args
        and isinstance(one.args[0], ast.Constant)
    }
    names = {one.arg for one in arguments} | {one for one in words if isinstance(one, str)} | popped
    return {one for one in names if one.isidentifier()} - {"self", "cls"}


def spared(of: str, old: str) -> bool:
    """Whether a class on another one has it from there, or the installed release still drops it."""
    if of.startswith("transformers.Seq2Seq") or old.startswith(("TF", "Flax", "_", "is_")):
        return True
    if of in WATCHED and hasattr(importlib.import_module(of), old):
        return True
    method = (
        signatures._find("transformers.PreTrainedModel") if of.endswith("from_pretrained") else None
    )
    function = method and signatures._method(method[0], method[1], "from_pretrained")
    words = ast.walk(function) if function else ()
    return any(isinstance(one, ast.Constant) and one.value == old for one in words)


def gone(before: Surface, after: Surface) -> Iterator[tuple[str, str]]:
    for of in sorted({*before} & {*after}):
        yield from ((of, old) for old in sorted(before[of] - after[of]))


def successor(library: str, of: str, old: str, folder: Path, taken: set[str]) -> tuple[str, str]:
    """Return what took a name's place, and where that is said; nothing where nobody says it."""
    by_hand = SUCCESSORS.get(of, {}).get(old)
    if by_hand is not None:
        return by_hand
    if of == library:
        return moved(library, old)
    config = of.removesuffix("Trainer") + "Config"
    if of.endswith("Trainer") and old in (arguments(config) or ()):
        return f"{config.rpartition('.')[2]}({old}=...)", f"signature of {config}, installed"
    if of.endswith("Trainer") and old == "tokenizer":
        return "processing_class", "transformers/trainer.py of 4.57.6"
    for place, said in deprecations(folder / library):
        if re.search(rf"\b{old}\b", said):
            tail = said[said.index(old) + len(old) :]
            for new in re.findall(r"`(?:--)?(\w+)(?:=[^`]*)?`", tail):
                if new in taken and new != old:
                    return new, f"{library}/{place} of {folder.name.partition('-')[2]}"
    return "", ""


@cache
def definitions(library: str) -> dict[str, str]:
    """Return the public packages of the installed library that define a class or function."""
    file = sources.file_of(library)
    assert file is not None
    root = file.parent
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        steps = path.relative_to(root.parent).with_suffix("").parts
        for name in re.findall(r"^(?:class|def) ([A-Za-z]\w+)", path.read_text("utf-8"), re.M):
            found.setdefault(name, ".".join(steps[:-1]))
    return found


def moved(library: str, name: str) -> tuple[str, str]:
    """Return where a name is to be imported from now; nothing where it is gone."""
    place = definitions(library).get(name)
    if place is None or place == library or name not in signatures._exports(place):
        return "", ""
    return f"{place}.{name}", f"{place}, installed"


@cache
def deprecations(package: Path) -> list[tuple[str, str]]:
    """Return the places in a package where something is said to be deprecated, and what is said."""
    found: list[tuple[str, str]] = []
    for path in sorted(package.rglob("*.py")):
        lines = path.read_text("utf-8", errors="replace").splitlines()
        for at, line in enumerate(lines):
            if "deprecat" in line:
                said = " ".join(one.strip(" \"f'") for one in lines[max(at - 2, 0) : at + 3])
                found.append((f"{path.relative_to(package)}:{at + 1}", said))
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
