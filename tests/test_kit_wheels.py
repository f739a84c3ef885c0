"""Wheels for a machine without a network: collected up to a limit, and installed beside it."""

import os
import random
import re
import subprocess
import sys
from zipfile import ZIP_LZMA, ZipFile

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from kit.wheels import install

COLLECT = ROOT / "benchmarks" / "gpu_kit_wheels.sh"


def write_wheel(folder, name, version="1.0", tag="py3-none-any", files=()):
    """Write a wheel of one module `NAME.py` and of `files`, packed as small as the script does."""
    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    contents = {
        f"{stem}.py": f"version = {version!r}\n",
        **dict(files),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = "".join(f"{path},,\n" for path in (*contents, f"{info}/RECORD"))
    file = folder / f"{stem}-{version}-{tag}.whl"
    with ZipFile(file, "w", ZIP_LZMA) as archive:
        for path, content in (contents | {f"{info}/RECORD": record}).items():
            archive.writestr(path, content)
    return file


@pytest.fixture
def wheels(tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    return folder


@pytest.fixture
def target(tmp_path):
    return tmp_path / "carried" / "site-packages"


def names_in(target):
    return sorted(file.name for file in target.glob("*.py"))


def test_a_wheel_is_installed_once_and_found_behind_all_others(wheels, target):
    write_wheel(wheels, "gpu-kit-one")
    write_wheel(wheels, "gpu-kit-two", "2.5")
    assert install(wheels, target) == ["Installed from wheels: gpu_kit_one 1.0, gpu_kit_two 2.5."]
    code = "import gpu_kit_two; print(gpu_kit_two.version)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "2.5\n", done.stderr
    assert install(wheels, target) == []


def test_what_is_here_is_left_as_it_is_whatever_its_spelling(wheels, target):
    write_wheel(wheels, "PyYAML", "99.0")
    write_wheel(wheels, "typing.extensions", "99.0")
    assert install(wheels, target) == []
    assert not target.exists()


def test_a_wheel_of_another_python_or_that_is_damaged_stops_no_other(wheels, target):
    write_wheel(wheels, "gpu-kit-good")
    other = write_wheel(wheels, "gpu-kit-other", tag="cp27-cp27m-win32")
    damaged = wheels / "gpu_kit_torn-1.0-py3-none-any.whl"
    damaged.write_bytes(other.read_bytes()[:100])
    sentences = install(wheels, target)
    assert len(sentences) == 3
    refused, last = " ".join(sentences[:2]), sentences[2]
    assert f"{other.name} was not installed: ERROR: " in refused
    assert "not a supported wheel" in refused
    assert f"{damaged.name} was not installed: ERROR: " in refused
    assert last == "Installed from wheels: gpu_kit_good 1.0."
    assert names_in(target) == ["gpu_kit_good.py"]


def test_without_a_folder_nothing_is_done_and_another_name_of_the_target_is_refused(
    wheels, target, tmp_path
):
    assert install(tmp_path / "none", target) == []
    with pytest.raises(ValueError, match="site-packages"):
        install(wheels, tmp_path / "carried")


# What is collected, from wheels that stand in for those that are published


@pytest.fixture
def published(tmp_path):
    """A small wheel for each that the script names, but two that are 0.6 MiB, and two of more."""
    folder = tmp_path / "published"
    folder.mkdir()
    noise = random.Random(1).randbytes(2**20 + 2**18)
    files = {
        **{name: {f"{name}/noise": noise[: 6 * 2**20 // 10]} for name in ("peft", "trl")},
        "pandas": {"pandas/core/kept.py": "", "pandas/tests/noise": noise},
        "bitsandbytes": {f"bitsandbytes/lib_cuda{n}.so": noise[n:] for n in (126, 132)}
        | {"bitsandbytes/lib_cuda130.so": "kept"},
    }
    for name, version in re.findall(r"([\w-]+)==([\w.]+)", COLLECT.read_text()):
        write_wheel(folder, name, version, files=files.get(name, {}))
    return folder


def collect(folder, published, **variables):
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(published), "PYTHON": sys.executable}
    return subprocess.run(
        [COLLECT, folder], env=os.environ | offline | variables, capture_output=True, text=True
    )


def test_wheels_are_collected_up_to_the_limit_without_what_is_never_imported(wheels, published):
    done = collect(wheels, published, LIMIT_MIB="1")
    assert done.returncode == 0, done.stderr
    assert sum(file.stat().st_size for file in wheels.iterdir()) < 2**20
    names = {file.name.split("-")[0] for file in wheels.iterdir()}
    assert names == {file.name.split("-")[0] for file in published.iterdir()} - {"trl"}
    (refused,) = [line for line in done.stdout.splitlines() if "left out" in line]
    assert 0.6 <= float(refused.split()[0]) < 0.63
    assert "trl==" in refused
    (pandas,) = wheels.glob("pandas-*")
    kept = ZipFile(pandas).namelist()
    assert "pandas/core/kept.py" in kept
    assert not any("tests" in name for name in kept)
    record = ZipFile(pandas).read(kept[-1]).decode()
    assert [row.split(",")[0] for row in record.splitlines()] == kept
    (bitsandbytes,) = wheels.glob("bitsandbytes-*")
    assert [n for n in ZipFile(bitsandbytes).namelist() if "cuda" in n] == [
        "bitsandbytes/lib_cuda130.so"
    ]


def test_a_folder_with_something_in_it_is_refused(wheels, published):
    write_wheel(wheels, "torch", "1.0")
    done = collect(wheels, published)
    assert done.returncode == 2
    assert "Remove it" in done.stderr
