"""Strategy -> the files a launcher reads: Accelerate's YAML and DeepSpeed's JSON.

Names are resolved when they are used: the planner needs what DeepSpeed gets, and no files.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.configs.accelerate import accelerate_config as accelerate_config
    from toolkit.configs.deepspeed import deepspeed_config as deepspeed_config
    from toolkit.configs.files import ConfigFiles as ConfigFiles
    from toolkit.configs.files import ConfigOptions as ConfigOptions
    from toolkit.configs.files import cached_configs as cached_configs
    from toolkit.configs.files import render_configs as render_configs
    from toolkit.configs.files import write_bundled as write_bundled
    from toolkit.configs.files import write_configs as write_configs
    from toolkit.configs.fitting import FittedConfig as FittedConfig
    from toolkit.configs.fitting import fit_to_run as fit_to_run

_HOMES = {
    "ConfigFiles": "files",
    "ConfigOptions": "files",
    "FittedConfig": "fitting",
    "accelerate_config": "accelerate",
    "cached_configs": "files",
    "deepspeed_config": "deepspeed",
    "fit_to_run": "fitting",
    "render_configs": "files",
    "write_bundled": "files",
    "write_configs": "files",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
