"""Versions: floors, requirements of packages, releases with silent faults, NCCL."""

import re
from importlib.metadata import Distribution

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from toolkit.doctor import software
from toolkit.doctor.software import check_nccl, check_packages
from toolkit.environment import TorchBuild
from toolkit.stack import known_faults

GOOD = {
    "toolkit": ("0.1.0", ["torch>=2.11", "deepspeed>=0.19", "trl>=1; extra == 'test'"]),
    "torch": ("2.13.0+cu128", ["filelock"]),
    "deepspeed": ("0.19.8", ["torch"]),
    "transformers": ("5.23.0", ["tokenizers<0.24,>=0.22"]),
    "tokenizers": ("0.23.1", []),
    "filelock": ("3.20.0", []),
}


class Made(Distribution):
    def __init__(self, version, requires):
        self.text = "\n".join(
            ["Metadata-Version: 2.1", "Name: made", f"Version: {version}"]
            + [f"Requires-Dist: {line}" for line in requires]
        )

    def read_text(self, filename):
        return self.text if filename == "METADATA" else None

    def locate_file(self, path):
        raise NotImplementedError


@pytest.fixture
def installed(monkeypatch):
    """Put other packages in place of those that are installed."""

    def install(**others):
        there = GOOD | {name.replace("_", "-"): package for name, package in others.items()}
        made = {name: Made(*package) for name, package in there.items() if package is not None}
        monkeypatch.setattr(software, "_installed", made.get)
        monkeypatch.setattr(software.environment, "verified", dict)

    return install


def levels():
    return {
        finding.name: (finding.level, finding.fix)
        for finding in check_packages()
        if finding.level != "ok"
    }


def test_versions_that_go_together_are_all_right(installed):
    installed()
    assert levels() == {}


def test_a_version_below_our_floor_is_a_fault(installed):
    installed(torch=("2.10.1", ["filelock"]))
    assert levels() == {"versions": ("fail", "pip install 'torch>=2.11'")}


def test_a_missing_package_is_a_fault(installed):
    installed(deepspeed=None)
    assert levels() == {"versions": ("fail", "pip install 'deepspeed>=0.19'")}


def test_packages_that_do_not_go_together_are_named_with_both_versions(installed):
    installed(tokenizers=("0.24.2", []))
    assert levels() == {"packages": ("warn", "pip install transformers 'tokenizers<0.24,>=0.22'")}
    (finding,) = [finding for finding in check_packages() if finding.name == "packages"]
    assert finding.text == "transformers requires tokenizers<0.24,>=0.22 (0.24.2)."


def test_an_extra_and_another_system_are_not_required(installed):
    installed(transformers=("5.23.0", ["none; extra == 'x'", "nope; sys_platform == 'win32'"]))
    assert levels() == {}


def test_a_toolkit_that_was_never_installed_is_not_called_ok(installed):
    installed(toolkit=None)
    assert levels() == {"versions": ("warn", "pip install .")}


SCHEDULES = {"8171", "8179"}


@pytest.mark.parametrize(
    ("others", "issues"),
    [
        ({"deepspeed": ("0.19.8", [])}, set()),
        ({"deepspeed": ("0.19.6", [])}, set()),
        ({"deepspeed": ("0.19.5", [])}, {"3877", "8224"}),
        ({"deepspeed": ("0.19.3", [])}, {"3877", "8224", *SCHEDULES}),
        ({"deepspeed": ("0.19.0", [])}, {"3877", "8080", "8224", *SCHEDULES}),
        (
            {"deepspeed": ("0.18.3", [])},
            {"7967", "7839", "3877", "7898", "8080", "8224", *SCHEDULES},
        ),
        (
            {"deepspeed": ("0.18.3", []), "torch": ("2.9.1", [])},
            {"7967", "7839", "3877", "8080", "8224", *SCHEDULES},
        ),
        ({"transformers": ("5.4.0", [])}, {"45313", "45994", "40709"}),
        ({"transformers": ("5.5.0", [])}, {"45994", "40709"}),
        ({"transformers": ("5.17.0", [])}, set()),
    ],
)
def test_releases_with_silent_faults_are_named_by_their_issue(others, issues, installed):
    installed(**others)
    faults = [finding for finding in check_packages() if finding.name == "silent faults"]
    assert {issue for found in faults for issue in re.findall(r"/(\d+)", found.text)} == issues
    assert {finding.level for finding in faults} == {"fail" if issues else "ok"}


def test_the_release_to_install_has_none_of_the_faults(installed):
    installed(deepspeed=("0.18.3", []), transformers=("5.4.0", []))
    fixes = {finding.fix for finding in check_packages() if finding.name == "silent faults"}
    assert fixes == {"pip install 'deepspeed>=0.19.6'", "pip install 'transformers>=5.17'"}


def test_every_fault_of_the_table_is_gone_in_the_release_that_it_names():
    faults = known_faults()
    assert len(faults) > 5
    for fault in faults:
        releases = SpecifierSet(fault["releases"])
        assert Version(fault.get("first", "999")) not in releases, fault
        assert fault["link"].startswith(("https://github.com/", "no thread is known"))


def test_one_nccl_is_named(installed):
    build = TorchBuild(version="2.13.0", cuda="12.8", hip=None)
    installed(nvidia_nccl_cu12=("2.27.5", []))
    (finding,) = check_nccl(build)
    assert (finding.level, finding.text) == ("ok", "2.27.5 (nvidia-nccl-cu12).")


def test_two_packages_with_the_same_library_are_a_fault(installed):
    build = TorchBuild(version="2.13.0", cuda="13.0", hip=None)
    installed(nvidia_nccl_cu12=("2.27.5", []), nvidia_nccl_cu13=("2.28.9", []))
    (finding,) = check_nccl(build)
    assert finding.level == "fail"
    assert finding.fix == (
        "pip uninstall -y nvidia-nccl-cu12 && "
        "pip install --force-reinstall --no-deps nvidia-nccl-cu13==2.28.9"
    )


def test_an_nccl_of_the_system_is_found_and_none_is_not_called_ok(installed, monkeypatch, tmp_path):
    build = TorchBuild(version="2.13.0", cuda="12.8", hip=None)
    installed()
    monkeypatch.setattr(software, "LIBRARIES", tmp_path)
    (finding,) = check_nccl(build)
    assert (finding.level, "not checked" in finding.text) == ("warn", True)
    folder = tmp_path / "x86_64-linux-gnu"
    folder.mkdir()
    (folder / "libnccl.so.2.27.3").touch()
    (folder / "libnccl.so.2").symlink_to("libnccl.so.2.27.3")
    (finding,) = check_nccl(build)
    assert (finding.level, finding.text.split()[0]) == ("ok", "2.27.3")


def test_a_build_of_torch_without_cuda_needs_no_nccl():
    assert check_nccl(TorchBuild(version="2.13.0+cpu", cuda=None, hip=None)) == []
