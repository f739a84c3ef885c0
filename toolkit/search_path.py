"""The search path of modules: no folder of the user's comes before the standard library.

This runs before a user's file can replace a module, so it imports only modules that Python itself
has loaded by then.
"""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(__file__))
"""The folder in which this package lies: site-packages, or a checkout."""

_LIBRARY = os.path.dirname(os.__file__)
_PARTS = ("lib-dynload", f"python{sys.version_info.major}{sys.version_info.minor}.zip")


def leave_current_folder() -> None:
    """Let no file of the current folder replace a module that is installed.

    `python -m` looks there first, and so do ranks under DeepSpeed: accelerate 1.15 puts the folder
    on PYTHONPATH (utils/launch.py, `prepare_deepspeed_cmd_env`); it is moved to the end. A toolkit
    that is not installed but found through it is still found, behind the standard library.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:  # the folder was removed, and its files with it
        return
    first = [] if sys.flags.safe_path else sys.path[:1]
    entries = sys.path[len(first) :]
    on_path = [entry for entry in entries if entry == here]
    sys.path[:] = [*(entry for entry in entries if entry != here), *on_path[:1]]
    if ROOT in (*first, *on_path):
        put_behind_library(ROOT)


def put_behind_library(folder: str) -> None:
    """Look for modules in `folder` before all others but those of the standard library."""
    library = [entry for entry in sys.path if _is_library(entry)]
    others = [entry for entry in sys.path if entry != folder and entry not in library]
    sys.path[:] = [*library, folder, *others]


def runs_as_module(package: str) -> bool:
    """Whether Python was started with `-m` and a module of `package`, and is about to find it."""
    # Until the module is found, `-m` takes the place of its path.
    if sys.argv[:1] != ["-m"]:
        return False
    module = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    return module.partition(".")[0] == package


def _is_library(entry: str) -> bool:
    return entry == _LIBRARY or os.path.basename(entry) in _PARTS
