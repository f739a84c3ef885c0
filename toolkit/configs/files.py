"""Config files on disk: the bundled pair of folders, and copies with absolute paths."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit import environment
from toolkit.configs.accelerate import accelerate_config
from toolkit.configs.deepspeed import deepspeed_config
from toolkit.errors import UsageError, is_full_disk
from toolkit.files import write_text
from toolkit.strategies import STRATEGIES, Device, Strategy

PRECISIONS = ("no", "bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFiles:
    """The files of one strategy; `deepspeed` is None where DeepSpeed has no part in it."""

    accelerate: Path
    deepspeed: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigOptions:
    """Settings of a file beyond its strategy; None leaves them to the run."""

    num_processes: int | None = None
    precision: str | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    offload_device: Device | None = None
    nvme_path: Path | None = None
    decoder_layer: str | None = None

    def __post_init__(self) -> None:
        if self.precision is not None and self.precision not in PRECISIONS:
            raise UsageError(
                f"There is no precision {self.precision!r}. Choose from: {', '.join(PRECISIONS)}."
            )
        steps = self.gradient_accumulation_steps
        if steps is not None and steps < 1:
            raise UsageError(f"Gradient accumulation needs 1 step or more, {steps} asked.")
        clipping = self.gradient_clipping
        if clipping is not None and not 0 <= clipping < math.inf:
            raise UsageError(
                f"A gradient norm cannot be clipped to {clipping}. "
                "Give 0 for no clipping, or a positive norm."
            )


def render_configs(
    strategy: Strategy,
    *,
    deepspeed_json: Path | None = None,
    options: ConfigOptions | None = None,
) -> tuple[str, str | None]:
    """Return the text of a strategy's YAML, and of its JSON where it has one."""
    import yaml

    chosen = ConfigOptions() if options is None else options
    _check_options(strategy, chosen)
    text = None
    if strategy.reads_deepspeed_json:
        section = deepspeed_config(
            strategy,
            precision=chosen.precision,
            gradient_accumulation_steps=chosen.gradient_accumulation_steps,
            gradient_clipping=chosen.gradient_clipping,
            offload_device=chosen.offload_device,
            nvme_path=chosen.nvme_path,
        )
        text = json.dumps(section, indent=2) + "\n"
    launcher: dict[str, Any] = accelerate_config(
        strategy,
        num_processes=chosen.num_processes,
        precision=chosen.precision,
        decoder_layer=chosen.decoder_layer,
        deepspeed_json=deepspeed_json,
    )
    header = f"# {strategy.name}: {strategy.summary}\n"
    return header + yaml.safe_dump(launcher, sort_keys=False), text


def write_configs(
    strategy: Strategy,
    folder: Path,
    *,
    options: ConfigOptions | None = None,
    force: bool = False,
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


def write_bundled(root: Path) -> list[Path]:
    """Write `accelerate_configs/` and `deepspeed_configs/` below a repository root.

    Accelerate opens the JSON from the current folder, so these name it relative to the root.
    """
    written: list[Path] = []
    for strategy in STRATEGIES.values():
        relative = Path("deepspeed_configs") / f"{strategy.name}.json"
        launcher, deepspeed = render_configs(strategy, deepspeed_json=relative)
        target = root / "accelerate_configs" / f"{strategy.name}.yaml"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, launcher)
        written.append(target)
        if deepspeed is not None:
            (root / relative).parent.mkdir(parents=True, exist_ok=True)
            write_text(root / relative, deepspeed)
            written.append(root / relative)
    return written


def cached_configs(strategy: Strategy) -> ConfigFiles:
    """Return a strategy's bundled files with absolute paths, written once into the cache.

    The folder is named by what is in the files, so another release never finds stale ones.
    """
    launcher, deepspeed = render_configs(strategy, deepspeed_json=Path("x"))
    key = hashlib.sha256((launcher + (deepspeed or "")).encode()).hexdigest()[:12]
    return write_configs(strategy, environment.cache_root() / "configs" / key, force=True)


def _check_options(strategy: Strategy, options: ConfigOptions) -> None:
    """Raise UsageError for every option that no file of the strategy has a place for."""
    findings: list[str] = []
    if not strategy.reads_deepspeed_json:
        belongs_to_the_run = {
            "--accumulation": options.gradient_accumulation_steps,
            "--clipping": options.gradient_clipping,
        }
        findings += [
            f"{flag} stands in DeepSpeed's file only: tell it to the training script"
            for flag, value in belongs_to_the_run.items()
            if value is not None
        ]
        if options.offload_device is not None:
            findings.append(
                "--offload-device is DeepSpeed's: use fsdp_offload, or a strategy of ZeRO's"
            )
    if strategy.sharding != "rows" and options.decoder_layer is not None:
        findings.append("--layer is FSDP's: leave it out")
    if findings:
        raise UsageError(f"{strategy.name}: {'; '.join(findings)}.")
