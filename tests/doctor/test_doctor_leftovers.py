"""Hidden configs, stale locks, a taken port: what earlier work leaves behind."""

import importlib.util
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
from accelerate.commands.config import config_args

from toolkit.doctor import machine
from toolkit.doctor.machine import check_leftovers
from toolkit.environment import TorchBuild

OLDER = TorchBuild(version="2.13.0+cpu", cuda=None, hip=None)


@pytest.fixture
def port():
    """A port of which the system says that it is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def checked(name, port=0, torch=OLDER):
    found = [finding for finding in check_leftovers(torch, port=port) if finding.name == name]
    assert found
    return found[0] if len(found) == 1 else found


def test_a_clean_home_is_all_right(clean, port):
    assert {finding.level for finding in check_leftovers(OLDER, port=port)} == {"ok"}


@pytest.mark.parametrize("end", ["yaml", "json"])
@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, ".cache/huggingface"),
        ({"HF_HOME": "hf"}, "hf"),
        ({"XDG_CACHE_HOME": "x"}, "x/huggingface"),
    ],
)
def test_a_default_config_of_accelerate_is_found(variables, folder, end, clean, tmp_path):
    home = tmp_path / "home"
    for name, value in variables.items():
        clean.setenv(name, str(home / value))
    assert checked("default config").level == "ok"
    file = home / folder / "accelerate" / f"default_config.{end}"
    file.parent.mkdir(parents=True)
    file.write_text("num_processes: 1\n")
    finding = checked("default config")
    assert (finding.level, finding.fix) == ("warn", f"mv {file} {file}.off")


def test_that_config_is_the_one_that_accelerate_reads(clean, tmp_path):
    clean.setenv("HF_HOME", str(tmp_path / "hf"))
    # It looks for the variables while it is imported.
    read_anew = importlib.util.module_from_spec(config_args.__spec__)
    config_args.__spec__.loader.exec_module(read_anew)
    file = Path(read_anew.default_yaml_config_file)
    file.parent.mkdir(parents=True)
    file.touch()
    assert checked("default config").level == "warn"


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("home/.deepspeed_env", {}),
        (".deepspeed_env", {}),
        ("home/mine", {"DS_ENV_FILE": "mine"}),
        ("hostfile", {}),
    ],
)
def test_files_of_deepspeeds_launcher_are_found(name, variables, clean, tmp_path):
    clean.setattr(machine, "HOSTFILE", tmp_path / "hostfile")
    for variable, value in variables.items():
        clean.setenv(variable, value)
    assert checked("deepspeed files").level == "ok"
    (tmp_path / name).write_text("A=B\n")
    finding = checked("deepspeed files")
    assert finding.level == "warn"
    assert str(tmp_path / name) in finding.text


@pytest.fixture
def lock(clean, tmp_path):
    """A lock that a killed build left an hour ago."""
    clean.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / "cpu_adam" / "lock"
    path.parent.mkdir()
    path.touch()
    hour_ago = time.time() - 3600
    os.utime(path, (hour_ago, hour_ago))
    return path


def test_a_stale_lock_of_a_build_is_found_and_left_there(lock):
    finding = checked("compile locks")
    assert (finding.level, finding.fix) == ("warn", f"rm {lock}")
    assert finding.evidence == (str(lock),)
    assert lock.exists()
    subprocess.run(finding.fix, shell=True, check=True)
    assert checked("compile locks").level == "ok"


def test_a_torch_that_locks_by_the_system_does_not_wait_for_it(lock):
    newer = TorchBuild(version="2.15.0.dev1", cuda=None, hip=None)
    assert checked("compile locks", torch=newer).level == "ok"
    assert checked("compile locks", torch=None).level == "warn"


@pytest.mark.parametrize(
    ("family", "address"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::"), (socket.AF_INET6, "::1")],
)
def test_a_taken_port_is_found(family, address, port):
    assert checked("port", port).level == "ok"
    with socket.socket(family) as listener:
        try:
            listener.bind((address, port))
        except OSError:
            pytest.skip("no such addresses here")
        listener.listen()
        finding = checked("port", port)
    assert finding.level == "warn"
    assert str(port) in finding.text
    assert "--main_process_port 0" in finding.fix


def test_a_connection_that_just_ended_does_not_take_the_port(port):
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        with socket.create_connection(("127.0.0.1", port)):
            served, _ = listener.accept()
            served.close()  # the end that closes first waits
    assert checked("port", port).level == "ok"
