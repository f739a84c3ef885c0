"""No file or folder of the user's stands in for the toolkit, or for a module that it needs."""

import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

import pytest
from places import ROOT

from toolkit import search_path
from toolkit.configs.files import write_configs
from toolkit.launching import python
from toolkit.launching.launch import run
from toolkit.launching.python import PACKAGE_FOLDER, package_folder, python_environment
from toolkit.strategies import STRATEGIES

OF_THE_LIBRARY = ("random.py", "grp.py", "typing.py", "__future__.py", "json/__init__.py")
SHADOWS = (*OF_THE_LIBRARY, "yaml.py", "psutil.py")
SITE_PACKAGES = site.getsitepackages()[0]


def write_shadows(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"raise ImportError('{name} of the user was imported')\n")


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """Be in a folder with files that are named like modules, a whole `toolkit/` among them."""
    folder = tmp_path / "hostile"
    write_shadows(folder, *SHADOWS, "toolkit/__init__.py")
    monkeypatch.chdir(folder)
    return folder


def python_m(*words, folder, path, **options):
    """Run `python -m` where nothing was imported before it: `-S` leaves .pth files out."""
    return subprocess.run(
        [sys.executable, "-S", "-m", *map(str, words)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        **options,
    )


@pytest.mark.parametrize(
    "words", [("toolkit.configs", "out"), ("toolkit.cli", "plan", "0.5b", "--gpu", "L4")], ids=str
)
def test_a_module_of_ours_takes_nothing_from_the_current_folder(words, tmp_path):
    write_shadows(tmp_path, *SHADOWS)
    done = python_m(*words, folder=tmp_path, path=[ROOT, SITE_PACKAGES])
    assert done.returncode == 0, done.stderr


def test_a_current_folder_that_was_removed_is_no_mistake(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    remove = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); "
    start = "os.execv(os.sys.executable, [os.sys.executable, '-m', 'toolkit.configs', '--help'])"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", remove + start], env=environment, capture_output=True, text=True
    )
    assert "getcwd" not in done.stderr, done.stderr


def test_a_checkout_that_is_not_installed_runs_from_its_own_folder(tmp_path):
    shutil.copytree(ROOT / "toolkit", tmp_path / "toolkit")
    write_shadows(tmp_path, *OF_THE_LIBRARY)
    done = python_m("toolkit.configs", "out", folder=tmp_path, path=[SITE_PACKAGES])
    assert done.returncode == 0, done.stderr


def test_the_path_of_a_module_that_only_imports_the_package_is_left_alone(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("import toolkit\n")
    (tmp_path / "theirs" / "main.py").write_text("import beside\n")
    (tmp_path / "beside.py").write_text("print(1)\n")
    done = python_m("theirs.main", folder=tmp_path, path=[ROOT, SITE_PACKAGES])
    assert done.stdout == "1\n", done.stderr


def test_what_we_start_finds_the_same_toolkit_and_nothing_before_the_library(hostile, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{hostile.parent}{os.pathsep}")
    script = "import sys, json, toolkit; print(json.dumps([sys.path, toolkit.__file__]))"
    said = subprocess.run(
        [sys.executable, "-c", script], env=python_environment(), capture_output=True, check=True
    )
    path, file = json.loads(said.stdout)
    assert Path(file).parent == package_folder()
    assert str(hostile) not in path


def test_only_a_toolkit_that_is_not_installed_is_put_on_the_path(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(python, "ROOT", SITE_PACKAGES)
    installed = python_environment()["PYTHONPATH"].split(os.pathsep)
    assert installed[0] == sysconfig.get_paths()["stdlib"]
    assert installed[-1] == SITE_PACKAGES
    monkeypatch.setattr(python, "ROOT", str(tmp_path))
    assert python_environment()["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), *installed]


def test_a_folder_goes_behind_the_library_and_before_all_others(monkeypatch):
    library = [entry for entry in sys.path if search_path._is_library(entry)]
    assert len(library) == 3
    monkeypatch.setattr(sys, "path", ["/given", library[0], "/mine", *library[1:], SITE_PACKAGES])
    search_path.put_behind_library("/mine")
    assert sys.path == [*library, "/mine", "/given", SITE_PACKAGES]


SCRIPT = """
import json, multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
import datasets, grp, model, random, utils

def where(module):
    return sys.modules[module].__file__

def started():
    return [utils.NAME, where("random"), where("datasets")]

def made_by_the_rehearsal():
    names = ("peft", "bitsandbytes", "transformers.training_args")
    imported = [name for name in names if name in sys.modules]
    from accelerate.state import PartialState
    from torch.distributed import is_initialized
    return {"imported": imported, "groups": [is_initialized(), bool(PartialState._shared_state)]}

if __name__ == "__main__":
    from toolkit import UsageError

    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        spawned = pool.submit(started).result()
    said = {"here": started(), "spawned": spawned, "toolkit": where("toolkit")}
    print(json.dumps(said | made_by_the_rehearsal()))
"""


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_a_rehearsed_script_finds_what_lies_beside_it_behind_the_library(hostile, as_module):
    """Its own `datasets` wins over the installed one, as without a rehearsal."""
    beside = hostile if as_module else hostile.parent / "scripts"
    write_shadows(beside, "random.py", "grp.py", "toolkit/__init__.py")
    (beside / "datasets").mkdir()
    for name in ("utils.py", "model.py", "datasets/__init__.py"):
        (beside / name).write_text("NAME = 'of the user'\n")
    (beside / "its_name.py").write_text(SCRIPT)
    which = ["-m", "its_name"] if as_module else [str(beside / "its_name.py")]
    # As a user's launcher starts it: with the current folder in front, and no toolkit in it.
    shutil.rmtree(hostile / "toolkit")
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.rehearse", *which],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(next(line for line in done.stdout.splitlines() if line[0] == "{"))
    library = Path(os.__file__).parent
    assert said["here"] == [
        "of the user",
        str(library / "random.py"),
        str(beside / "datasets/__init__.py"),
    ]
    assert said["spawned"] == said["here"]
    assert said["imported"] == []  # they take seconds, and this script needs none
    assert said["groups"] == [False, False]
    assert Path(said["toolkit"]).parent == package_folder()


@pytest.mark.parametrize(
    "words", [("toolkit.train",), ("toolkit.rehearse", "no_such.py")], ids=["train", "rehearse"]
)
def test_a_rank_with_another_toolkit_than_its_launcher_refuses(words, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(ROOT / "toolkit", other / "toolkit")
    (tmp_path / "script.py").touch()
    if "rehearse" in words[0]:
        words = (words[0], str(tmp_path / "script.py"))
    outcome = run(
        [sys.executable, "-m", *words],
        folder=tmp_path,
        timeout=120,
        environment={"PYTHONPATH": str(other)},
    )
    assert outcome.status == "usage", outcome.tail
    assert str(other / "toolkit") in outcome.reason
    assert str(package_folder()) in outcome.reason


def test_a_rank_whose_launcher_finds_the_toolkit_through_a_link_goes_on(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(package_folder())
    monkeypatch.setenv(PACKAGE_FOLDER, str((tmp_path / "link").resolve()))
    python.check_package_folder()


def test_a_comparison_takes_nothing_from_the_current_folder(hostile, launch_environment):
    """Under ZeRO too, where accelerate puts that folder on the ranks' PYTHONPATH."""
    command = ["toolkit", "compare", "--strategies", "single,zero2", "--max_steps", "2"]
    command += ["--throughput_steps", "0", "--output", "compared"]
    done = subprocess.run(command, env=launch_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_training_that_the_user_launches_takes_no_module_from_the_current_folder(
    hostile, launch_environment, tmp_path
):
    shutil.rmtree(hostile / "toolkit")  # Python would run that one, and none of ours
    origin = json.loads(distribution("toolkit").read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):  # Python finds us by a module that imports it
        (hostile / "__future__.py").unlink()
    config = write_configs(STRATEGIES["zero2"], tmp_path).accelerate  # on the ranks' PYTHONPATH
    command = ["accelerate", "launch", "--config_file", str(config), "-m", "toolkit.train"]
    done = subprocess.run(
        [*command, "--no_such_flag"], env=launch_environment, capture_output=True, text=True
    )
    assert "of the user was imported" not in done.stderr
    assert "There is no flag --no_such_flag" in done.stderr, done.stderr
