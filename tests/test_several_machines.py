"""Several machines: launchers train as one, on loopback and in two network namespaces."""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import launches
import pytest

from toolkit.causes.diagnosis import diagnose_text
from toolkit.configs import ConfigOptions
from toolkit.configs.files import commands_of_machines, write_configs
from toolkit.measuring.machines import SILENT_SECONDS
from toolkit.strategies import STRATEGIES

SCRIPTS = Path(__file__).parent / "scripts"

MACHINES = {"ddp": 2, "zero2": 2, "zero3": 2, "fsdp_hybrid": 3}
RANKS = {"ddp": 2, "zero3": 2, "fsdp_hybrid": 6}
"""Of all machines together: of fsdp_hybrid three groups of two ranks, not the bundled two."""


@pytest.fixture(scope="session")
def steps(small_training):
    return "--max_steps", "4", *small_training


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def configs(name, folder, *, ranks, address="127.0.0.1", port=None):
    options = ConfigOptions(
        num_processes=ranks,
        num_machines=MACHINES[name],
        main_process_ip=address,
        main_process_port=port or free_port(),
    )
    files = write_configs(STRATEGIES[name], folder / "configs", options=options)
    return [command.split() for command in commands_of_machines(files, options)]


@contextlib.contextmanager
def started(commands, output_dir, environment, *flags, before=((), (), ()), own=(), script=()):
    """Start all launchers, and yield them and their logs; none is left behind.

    `own` are flags of the last machine only. A script is rehearsed in place of the training.
    """
    with contextlib.ExitStack() as stack:
        running = []
        for number, words in enumerate(commands):
            log = output_dir.parent / f"machine-{number}.log"
            launcher, train = (
                words[: words.index("-m")],
                [*words[words.index("-m") : -1], output_dir],
            )
            rehearsed = ["-m", "toolkit.rehearse", *script]
            words = [*before[number], *launcher, *(rehearsed if script else train), *flags]
            words += own if number == len(commands) - 1 else ()
            file = stack.enter_context(log.open("wb"))
            launcher = launches.start(words, environment=environment, log=file)
            stack.callback(launcher.kill)
            running.append((launcher, log))
        yield running


def record_of(folder):
    return json.loads((folder / "record.json").read_text())


def train(commands, output_dir, environment, *flags, **options):
    with started(commands, output_dir, environment, *flags, **options) as running:
        for launcher, log in running:
            assert launcher.wait(300) == 0, log.read_text()
            silences = re.findall(r"no sign of life for (\d+) s", log.read_text())
            assert all(int(seconds) >= SILENT_SECONDS for seconds in silences)
    return record_of(output_dir)


@pytest.fixture(scope="module")
def on_one_machine(steps, launch_environment, tmp_path_factory):
    """Return the record of a strategy that one launcher trains with the same ranks."""
    known = {}

    def record(name):
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            groups = MACHINES[name] if name == "fsdp_hybrid" else None
            options = ConfigOptions(num_processes=RANKS[name], replicas=groups)
            files = write_configs(STRATEGIES[name], folder, options=options)
            command = [*launches.TYPED, "--config_file", files.accelerate, "-m", "toolkit.train"]
            done = launches.run(
                [*command, *steps, "--output_dir", folder / "run"], environment=launch_environment
            )
            assert done.returncode == 0, done.stdout
            known[name] = record_of(folder / "run")
        return known[name]

    return record


@pytest.mark.parametrize(
    "name", [pytest.param("ddp", marks=pytest.mark.sweep), "zero3", "fsdp_hybrid"]
)
def test_launchers_train_as_one(name, steps, on_one_machine, launch_environment, tmp_path):
    ranks, machines = RANKS[name], MACHINES[name]
    commands = configs(name, tmp_path, ranks=ranks)
    record = train(commands, tmp_path / "run", launch_environment, *steps, "--strategy", name)
    control = on_one_machine(name)
    assert record["losses"] == pytest.approx(control["losses"], rel=1e-6)
    assert len(set(record["losses"])) == 4
    assert record["strategy"] == name
    assert record["attestation"]["held"]
    assert record["sample_ids"] == control["sample_ids"]
    each = ranks // machines
    held = [machine["ranks"] for machine in record["machines"]]
    assert held == [[*range(first, first + each)] for first in range(0, ranks, each)]
    groups = record["attestation"]["engaged"]["replicas"]
    assert groups == (machines if name == "fsdp_hybrid" else 1)
    assert all(machine["name"] for machine in record["machines"])
    assert control["machines"] == [{"name": None, "ranks": [*range(ranks)]}]


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.sweep)])
def test_the_machine_that_is_gone_is_named(killed, launch_environment, tmp_path):
    commands = configs("ddp", tmp_path, ranks=2)
    many = ("--max_steps", "100000")
    with started(commands, tmp_path / "run", launch_environment, *many) as running:
        launcher, log = running[killed]
        other, its_log = running[1 - killed]
        until = time.monotonic() + 300
        while not any("step 1/" in path.read_text() for _, path in running):
            assert launcher.poll() is None, log.read_text()
            assert time.monotonic() < until
            time.sleep(0.1)
        launcher.kill()
        assert other.wait(120) == 1
    text = its_log.read_text()
    (said,) = [line for line in text.splitlines() if line.startswith("toolkit: Machine")]
    assert said.startswith(f"toolkit: Machine {killed} (")
    assert ") is gone: " in said
    (failed,) = [
        status["error"]
        for path in (tmp_path / "run" / "status").glob("rank-*.json")
        if (status := json.loads(path.read_text()))["rank"] == 1 - killed
    ]
    assert failed["type"] == "MachineLostError"
    assert failed["message"] == said.removeprefix("toolkit: ")
    found = diagnose_text(text)
    assert found is not None
    assert found.name == "machine-gone"


def test_machines_that_were_started_differently_are_refused(steps, launch_environment, tmp_path):
    port = free_port()
    ddp, zero2 = (configs(name, tmp_path, ranks=2, port=port) for name in ("ddp", "zero2"))
    commands = [ddp[0], zero2[1]]
    run, own = tmp_path / "run", ("--learning_rate", "0.5", "--max_steps", "5")
    with started(commands, run, launch_environment, *steps, own=own) as running:
        for launcher, log in running:
            assert launcher.wait(200) == 1, log.read_text()
    for _, log in running:
        (said,) = [line for line in log.read_text().splitlines() if "machine 1" in line]
        assert said.startswith("toolkit: The machines were started for different trainings: ")
        assert "learning_rate is 0.001 on machine 0 and 0.5 on machine 1" in said
        assert "strategy is ddp on machine 0 and zero2 on machine 1" in said
        assert "steps of the training is 4 on machine 0 and 5 on machine 1" in said
    assert not run.exists()


def test_a_machine_that_leaves_before_the_ranks_meet_is_named(steps, launch_environment, tmp_path):
    commands = configs("ddp", tmp_path, ranks=2)
    own = ("--train_file", "nowhere.jsonl")
    with started(commands, tmp_path / "run", launch_environment, *steps, own=own) as running:
        for launcher, log in running:
            assert launcher.wait(200) == 1, log.read_text()
    assert "toolkit: --train_file nowhere.jsonl is not there" in running[1][1].read_text()
    found = diagnose_text(running[0][1].read_text())
    assert found is not None
    assert found.name == "machine-gone"
    assert any("Machine 1 (" in line for line in found.evidence)


def test_a_machine_whose_rank_failed_is_named_too(launch_environment, tmp_path):
    commands = configs("ddp", tmp_path, ranks=2)
    script = [SCRIPTS / "fails_on_a_machine.py"]
    with started(commands, tmp_path / "unused", launch_environment, script=script) as running:
        for launcher, log in running:
            assert launcher.wait(200) == 1, log.read_text()
    assert "ValueError: this rank is broken" in running[1][1].read_text()
    found = diagnose_text(running[0][1].read_text())
    assert found is not None
    assert found.name == "machine-gone"
    assert any("Machine 1 (" in line for line in found.evidence)


@pytest.mark.parametrize(
    ("fault", "code", "verdict"),
    [
        ("slow", 1, "rank 1 is missing: it has not entered broadcast of Float"),
        ("works", 0, None),
    ],
)
def test_machines_that_share_no_folder_wait_for_each_other_and_name_who_is_missing(
    fault, code, verdict, launch_environment, tmp_path
):
    """Each launcher has a temporary folder of its own; the store of the launch joins them."""
    script = ["--hang_timeout", "5", SCRIPTS / "hangs.py", fault, tmp_path / "begun"]
    commands = configs("ddp", tmp_path, ranks=2)
    with started(commands, tmp_path / "unused", launch_environment, script=script) as running:
        for launcher, log in running:
            assert launcher.wait(200) == code, log.read_text()
    for _, log in running:
        text = log.read_text()
        lines = [line for line in text.splitlines() if "nothing has progressed" in line]
        assert len(lines) == (verdict is not None), text
        assert all(verdict in line for line in lines)
        if verdict is not None:
            assert "rank 0, after step 2, waits in broadcast" in text
            text = text.replace(f"{SCRIPTS.parent.parent}/", "")
            assert "rank 1, after step 2, is at tests/scripts/hangs.py" in text, text


@pytest.fixture
def two_hosts():
    """Two network namespaces with names of their own, joined by a cable: words before a command."""
    ip = shutil.which("ip")
    names = [f"toolkit-{free_port()}-{number}" for number in (0, 1)]
    run = lambda *words: subprocess.run([ip, *words], check=True, capture_output=True)  # noqa: E731
    with contextlib.ExitStack() as stack:
        try:
            if ip is None or shutil.which("unshare") is None:
                raise FileNotFoundError("ip or unshare")
            for name in names:
                run("netns", "add", name)
                stack.callback(run, "netns", "delete", name)
            cable = [f"tk{free_port()}{end}" for end in "ab"]
            run("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
            for number, (name, end) in enumerate(zip(names, cable, strict=True)):
                run("link", "set", end, "netns", name)
                run("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", end)
                run("-n", name, "link", "set", end, "up")
                run("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"this machine makes no network namespaces: {error}")
        rename = 'hostname "$0" && exec "$@"'
        yield [
            (ip, "netns", "exec", name, "unshare", "--uts", "sh", "-c", rename, f"node-{number}")
            for number, name in enumerate(names)
        ]


def test_two_hosts_train_as_one(two_hosts, steps, on_one_machine, cold_environment, tmp_path):
    commands = configs("ddp", tmp_path, ranks=2, address="10.77.0.1")
    record = train(commands, tmp_path / "run", cold_environment, *steps, before=two_hosts)
    assert record["losses"] == pytest.approx(on_one_machine("ddp")["losses"], rel=1e-6)
    assert record["machines"] == [
        {"name": "node-0", "ranks": [0]},
        {"name": "node-1", "ranks": [1]},
    ]


STUCK_NETWORK = """
import threading
from toolkit.measuring import machines

asked = threading.Event()

class Store:
    def set(self, *_):
        asked.set()
        threading.Event().wait()

machines._connected = Store
signs = machines.MachineSigns(number=0, machines=2)
signs.start()
asked.wait()
signs.stop(left=True)
"""


def test_a_network_that_hangs_holds_up_no_process_that_ends():
    subprocess.run([sys.executable, "-c", STUCK_NETWORK], check=True, timeout=120)
