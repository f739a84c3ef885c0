"""One training script, any backend, results you can trust.

Names are resolved when they are used: importing this package loads neither torch nor
transformers.
"""

from toolkit.search_path import leave_current_folder, runs_as_module

if runs_as_module(__name__):
    leave_current_folder()  # before a file of the user's stands in for one of the modules below

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.comparing.run.options import CompareOptions as CompareOptions
    from toolkit.configs.files import write_configs as write_configs
    from toolkit.errors import GuardError as GuardError
    from toolkit.errors import UsageError as UsageError
    from toolkit.notebook import certify as certify
    from toolkit.notebook import compare as compare
    from toolkit.notebook import launch as launch
    from toolkit.notebook import report as report
    from toolkit.notebook import warm_launches as warm_launches
    from toolkit.planning.plan import plan as plan
    from toolkit.planning.recommend import recommend as recommend
    from toolkit.strategies import STRATEGIES as STRATEGIES
    from toolkit.strategies import Strategy as Strategy
    from toolkit.training.speed_arguments import SpeedArguments as SpeedArguments
    from toolkit.training.trainer import ToolkitTrainer as ToolkitTrainer

_HOMES = {
    "CompareOptions": "toolkit.comparing.run.options",
    "GuardError": "toolkit.errors",
    "STRATEGIES": "toolkit.strategies",
    "SpeedArguments": "toolkit.training.speed_arguments",
    "Strategy": "toolkit.strategies",
    "ToolkitTrainer": "toolkit.training.trainer",
    "UsageError": "toolkit.errors",
    "certify": "toolkit.notebook",
    "compare": "toolkit.notebook",
    "launch": "toolkit.notebook",
    "plan": "toolkit.planning.plan",
    "recommend": "toolkit.planning.recommend",
    "report": "toolkit.notebook",
    "warm_launches": "toolkit.notebook",
    "write_configs": "toolkit.configs.files",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
