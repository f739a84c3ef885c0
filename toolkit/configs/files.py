"""Config files on disk: the bundled pair of folders, and copies with absolute paths."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit import environment
from toolkit.backends import backend_of
from toolkit.configs import ConfigOptions
from toolkit.configs.accelerate import accelerate_config, with_groups
from toolkit.errors import UsageError, is_full_disk
from toolkit.files import write_text
from toolkit.strategies import STRATEGIES, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFiles:
    """The files of one strategy; `deepspeed` is None where DeepSpeed has no part in it."""

    accelerate: Path
    deepspeed: Path | None


def render_configs(
    strategy: Strategy, *, deepspeed_json: Path | None = None, options: ConfigOptions | None = None
) -> tuple[str, str | None]:
    """Return the text of a strategy's YAML, and of its JSON where it has one."""
    import yaml

    options = ConfigOptions() if options is None else options
    _check_options(strategy, options)
    strategy = with_groups(strategy, machines=options.num_machines or 1, replicas=options.replicas)
    strategy = strategy.with_tensor_groups(options.tensor_size)
    strategy = strategy.on_ranks(options.num_processes or strategy.num_processes)
    config = backend_of(strategy).json_file(options)
    text = None if config is None else json.dumps(config, indent=2) + "\n"
    launcher = accelerate_config(strategy, options, deepspeed_json)
    header = f"# {strategy.name}: {strategy.summary}\n"
    return header + yaml.safe_dump(launcher, sort_keys=False), text


def write_configs(
    strategy: Strategy, folder: Path, *, options: ConfigOptions | None = None, force: bool = False
) -> ConfigFiles:
    """Write a strategy's files into a folder, with absolute paths inside.

    Raises:
        UsageError: a file is there already and `force` is off, the options don't fit, or the
            folder cannot be written to; nothing has been written then.
    """
    folder = folder.absolute()
    if options is not None and options.nvme_path is not None:
        options = replace(options, nvme_path=options.nvme_path.absolute())
    files = ConfigFiles(
        accelerate=folder / f"{strategy.name}.yaml",
        deepspeed=folder / f"{strategy.name}.json" if strategy.reads_deepspeed_json else None,
    )
    launcher, deepspeed = render_configs(strategy, deepspeed_json=files.deepspeed, options=options)
    present = [path for path in (files.accelerate, files.deepspeed) if path and path.exists()]
    if present and not force:
        raise UsageError(
            f"{present[0]} is there already. Choose another folder, or pass --force to replace it."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if files.deepspeed is not None and deepspeed is not None:
            write_text(files.deepspeed, deepspeed)
        write_text(files.accelerate, launcher)
    except OSError as error:
        reason = "there is no space left" if is_full_disk(error) else error.strerror
        raise UsageError(
            f"{strategy.name} cannot be written to {folder}: {reason}. Name another folder."
        ) from None
    return files


def commands_of_machines(files: ConfigFiles, options: ConfigOptions) -> list[str]:
    """Return the command that starts the training on each of several machines; none for one.

    The flag stands above the file, so one file serves all of them.
    """
    machines = options.num_machines or 1
    start = f"accelerate launch --config_file {shlex.quote(str(files.accelerate))} --machine_rank"
    train = "-m toolkit.train --output_dir SHARED_FOLDER"
    return [f"{start} {number} {train}" for number in range(machines if machines > 1 else 0)]


def write_bundled(root: Path) -> list[Path]:
    """Write `accelerate_configs/` and `deepspeed_configs/` below a repository root.

    Accelerate opens the JSON from the current folder, so these name it relative to the root.
    """
    written: list[Path] = []
    for strategy in STRATEGIES.values():
        relative = Path("deepspeed_configs") / f"{strategy.name}.json"
        launcher, deepspeed = render_configs(strategy, deepspeed_json=relative)
        texts = {
            Path("accelerate_configs") / f"{strategy.name}.yaml": launcher,
            relative: deepspeed,
        }
        for path, text in texts.items():
            if text is not None:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                write_text(root / path, text)
                written.append(root / path)
    return written


def cached_configs(strategy: Strategy) -> ConfigFiles:
    """Return a strategy's bundled files with absolute paths, written once into the cache.

    The folder is named by a hash of the files, so another release never finds stale ones.
    """
    launcher, deepspeed = render_configs(strategy, deepspeed_json=Path("x"))
    key = hashlib.sha256((launcher + (deepspeed or "")).encode()).hexdigest()[:12]
    return write_configs(strategy, environment.cache_root() / "configs" / key, force=True)


def _check_options(strategy: Strategy, options: ConfigOptions) -> None:
    """Raise UsageError for every option that no file of the strategy has a place for."""
    misplaced: list[tuple[object, str]] = []
    backend = backend_of(strategy)
    if backend.json_file(ConfigOptions()) is None:
        in_json = "stands in DeepSpeed's file only: tell it to the training script"
        elsewhere = "--offload-device is DeepSpeed's: use fsdp_offload, or a strategy of ZeRO's"
        misplaced = [
            (options.gradient_accumulation_steps, f"--accumulation {in_json}"),
            (options.gradient_clipping, f"--clipping {in_json}"),
            (options.offload_device, elsewhere),
        ]
    if not backend.takes_replicas():
        misplaced.append((options.replicas, "--replicas is for fsdp_hybrid: leave it out"))
    if backend.distributed_type == "NO":
        several = None if options.num_machines == 1 else options.num_machines
        misplaced.append((several, "--num-machines is for several processes: use ddp"))
    if not backend.wraps_layers:
        misplaced.append((options.decoder_layer, "--layer is FSDP's: leave it out"))
    if findings := [finding for value, finding in misplaced if value is not None]:
        raise UsageError(f"{strategy.name}: {'; '.join(findings)}.")
