"""How this package starts Python: with this package, and with no module of the current folder."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

from toolkit.errors import UsageError
from toolkit.search_path import ROOT

PACKAGE_FOLDER = "TOOLKIT_PACKAGE_FOLDER"


def python_environment() -> dict[str, str]:
    """Return this process's variables for another Python, which then finds the same toolkit.

    It imports installed modules, never files of the same name in the current folder.
    """
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    # An empty entry would be the current folder.
    folders = [folder for folder in environment.pop("PYTHONPATH", "").split(os.pathsep) if folder]
    # In front of the standard library, installed packages could shadow it.
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    if Path(ROOT).resolve() not in [Path(folder).resolve() for folder in installed]:
        folders = [ROOT, *(folder for folder in folders if folder != ROOT)]
    # Accelerate adds the current folder for ranks under DeepSpeed: these go before it.
    paths = sysconfig.get_paths()
    library = [paths["stdlib"], os.path.join(paths["platstdlib"], "lib-dynload")]
    folders += [*library, *site.getsitepackages()]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folders))
    return environment


def package_folder() -> Path:
    return Path(ROOT, "toolkit").resolve()


def check_package_folder() -> None:
    """Raise UsageError in a rank of a launcher whose toolkit lies in another folder."""
    launchers = os.environ.get(PACKAGE_FOLDER)
    if launchers and Path(launchers) != package_folder():
        raise UsageError(
            f"The ranks find the toolkit in {package_folder()}, and what started them is the one "
            f"in {launchers}. Install one of the two alone, or remove the folder of the other from "
            "PYTHONPATH."
        )


def become(module: str, *words: str) -> NoReturn:
    """Let this process become the Python that runs a module, which may import torch."""
    os.execve(sys.executable, [sys.executable, "-m", module, *words], python_environment())
