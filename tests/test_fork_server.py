"""A run that is forked from a warm process is the run that a cold start gives."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import launches
import psutil
import pytest
import torch
from bitsandbytes import cuda_specs
from places import ROOT, SCRIPTS
from transformers import conversion_mapping

from toolkit import environment, fork_server
from toolkit.environment import InstalledGpu
from toolkit.launching import forking
from toolkit.launching.forking import SOCKET, key_of, warm_process
from toolkit.launching.launch import launch_command, run
from toolkit.records.record import read_record


@pytest.fixture
def start(as_launched, warm_environment, monkeypatch):
    """Launch a script warm or cold, and return how it ended, with all that it printed."""

    def launched(strategy, script, folder, *, cold=False, **options):
        monkeypatch.setenv(SOCKET, warm_environment[SOCKET])
        if cold:
            monkeypatch.delenv(SOCKET)
        lines = []
        config = ROOT / "accelerate_configs" / f"{strategy}.yaml"
        outcome = run(
            launch_command(config, script, gpu_ids="all"),
            folder=folder,
            timeout=300,
            loopback=True,
            on_line=lines.append,
            **options,
        )
        assert not [line for line in lines if "started cold" in line]
        return outcome, lines

    return launched


BY_CHANCE = {
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TOOLKIT_LAUNCHER_PID",
}
OF_IMPORTS = {"TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK"}
"""torch and deepspeed set them when they are imported, which not every script has by then."""

BY_CHANCE |= OF_IMPORTS | {"TOOLKIT_STATUS_DIR", SOCKET, "TORCHELASTIC_USE_AGENT_STORE"}
BY_CHANCE |= {"_MLFLOW_TELEMETRY_SESSION_ID"}  # of an import too, where mlflow is installed


@pytest.fixture
def ignore():
    """Ignore these signals, as under `nohup` or in a shell's background, and no other."""
    numbers = (signal.SIGHUP, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}

    def only(ignored):
        for number in numbers:
            handler = signal.SIG_IGN if number in ignored else signal.SIG_DFL
            signal.signal(number, handler)

    yield only
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("strategy", "ignored"),
    [
        ("ddp", [signal.SIGHUP, signal.SIGINT]),
        pytest.param("zero2", [], marks=pytest.mark.sweep),
        pytest.param("single", [signal.SIGHUP], marks=pytest.mark.sweep),
    ],
)
def test_a_script_finds_itself_in_the_same_place(start, tmp_path, ignore, strategy, ignored):
    ignore(ignored)
    seen, drawn = {}, []
    for kind in ("warm", "cold"):
        folder = tmp_path / kind
        script = ["-m", "toolkit.rehearse", str(SCRIPTS / "where_am_i.py"), str(folder / "seen")]
        outcome, lines = start(strategy, script, folder, cold=kind == "cold")
        assert outcome.status == "ok", lines
        files = sorted(folder.glob("seen-*"))
        ranks = [json.loads(file.read_text().replace(str(folder), "FOLDER")) for file in files]
        seen[kind] = ranks[0]["noted"]
        drawn += [number for rank in ranks for number in rank["drawn"]]
    assert len(set(drawn)) == len(drawn)  # by no two processes alike
    assert seen["warm"]["environment"].keys() >= OF_IMPORTS
    for name, value in seen["cold"].items():
        other = seen["warm"][name]
        if name == "environment":
            value, other = (
                {key: text for key, text in one.items() if key not in BY_CHANCE}
                for one in (value, other)
            )
        if name == "argv":
            value, other = value[:1], other[:1]
        assert other == value, name


def test_the_ranks_of_torchrun_are_forked_too(warm_environment, tmp_path):
    script = tmp_path / "forked.py"
    script.write_text(
        "from toolkit.launching import forking\nprint('forked', forking.shared_bytes > 0)\n"
    )
    words = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", script)
    done = launches.run((sys.executable, *words), environment=warm_environment)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("forked True") == 2, done.stdout


@pytest.mark.parametrize(
    "strategy",
    ["zero3", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("ddp", "fsdp"))],
)
def test_it_trains_the_same_to_the_last_bit(start, small_training, tmp_path, strategy):
    records = {}
    for kind in ("warm", "cold"):
        folder = tmp_path / kind
        flags = ["--output_dir", str(folder), "--max_steps", "4", *small_training]
        script = ["-m", "toolkit.train", *flags]
        outcome, lines = start(strategy, script, folder, cold=kind == "cold", num_processes=2)
        assert outcome.status == "ok", lines
        records[kind] = read_record(folder)
    one, other = records["warm"], records["cold"]
    same = ("losses", "grad_norms", "learning_rates", "sample_ids", "attestation", "traffic")
    for name in (*same, "training", "data", "engine", "strategy", "guards", "not_measured"):
        assert one[name] == other[name], name
    for name in ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "master_bytes"):
        assert one["memory"][name] == other["memory"][name]
    assert one.keys() == other.keys()
    assert 2**27 < one["memory"]["host_shared_bytes"] < one["memory"]["host_peak_bytes"]
    assert other["memory"]["host_shared_bytes"] == 0


def test_a_rank_that_dies_of_a_signal_ends_the_run_with_its_name(start, tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "time.sleep(300)\n"
    )
    ends = {}
    for kind in ("warm", "cold"):
        folder = tmp_path / kind
        command = ["-m", "toolkit.rehearse", str(script)]
        outcome, _ = start("ddp", command, folder, cold=kind == "cold", num_processes=2)
        ends[kind] = (outcome.status, outcome.reason)
    assert ends["warm"] == ends["cold"]
    assert "SIGSEGV" in ends["warm"][1]


def test_other_variables_are_a_cold_start_and_it_is_said(as_launched, warm_environment, tmp_path):
    lines = []
    outcome = run(
        [sys.executable, "-c", "print('here')"],
        folder=tmp_path,
        timeout=60,
        environment=warm_environment | {"OMP_NUM_THREADS": "3"},
        loopback=True,
        on_line=lines.append,
    )
    assert outcome.status == "ok"
    assert lines[0] == "toolkit: started cold: the warm process was started with other variables"
    assert "here" in lines


def test_a_warm_process_that_hangs_in_an_import_holds_up_no_launch(tmp_path, monkeypatch):
    monkeypatch.setattr(forking, "ANSWER_SECONDS", 0.1)
    path = tmp_path / key_of({})
    said = []
    with socket.socket(socket.AF_UNIX) as hanging, (tmp_path / "out").open("w") as out:
        hanging.bind(str(path))
        hanging.listen()
        process = forking.start(
            [sys.executable, "-c", "print('cold')"],
            environment={SOCKET: str(path)},
            stdout=out.fileno(),
            stderr=out.fileno(),
            on_cold=said.append,
        )
        assert process.wait(60) == 0
    assert said == ["the warm process does not answer"]
    assert (tmp_path / "out").read_text() == "cold\n"


@pytest.mark.timeout(300)
def test_of_a_process_with_a_second_thread_nothing_is_forked_and_it_is_said(
    tmp_path, cold_environment
):
    threaded = "import threading, time\nthreading.Thread(target=time.sleep, args=[600]).start()\n"
    (tmp_path / "sitecustomize.py").write_text(threaded)
    variables = cold_environment | {"PYTHONPATH": str(tmp_path)}
    said = []
    reader, writer = os.pipe()
    with warm_process(variables) as path, open(reader, "rb") as printed:
        started = forking.start(
            [sys.executable, "-S", "-c", "print('cold')"],
            environment=variables | {SOCKET: str(path)},
            stdout=writer,
            stderr=writer,
            on_cold=said.append,
        )
        os.close(writer)
        # To its end, while the process that could not be forked from is alive.
        assert printed.read() == b"cold\n"
        assert started.wait(60) == 0
    (reason,) = said
    assert reason.startswith("2 threads run in the warm process (")
    assert "python" in reason
    assert reason.endswith(", since Python started")


def test_the_import_that_started_a_thread_is_named(tmp_path):
    """By what was looked for last before it, so also where the thread is one of a driver's."""
    (tmp_path / "outer.py").write_text("import inner\nimport json.tool\n")
    (tmp_path / "inner.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"
    )
    script = (
        "from toolkit import fork_server\n"
        "with fork_server.watched_imports() as watch:\n"
        "    import fractions\n"
        "    print(watch.since)\n"
        "    import outer\n"
        "print(fork_server.why_unfit(watch.since))\n"
        "print(watch in fork_server.sys.meta_path)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    none, reason, left = done.stdout.splitlines()
    assert (none, left) == ("None", "False")
    assert reason.startswith("2 threads run in the warm process (")
    assert reason.endswith("), since outer looked for inner")


def test_an_import_that_asks_for_a_gpu_s_capability_does_not_initialise_cuda(monkeypatch):
    """bitsandbytes asks; the first answer shows that it still asks torch, which asks CUDA."""
    asked = []
    gpus = [InstalledGpu(name="GPU", memory_bytes=0, capability=one) for one in ((8, 9), (9, 0))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda_specs, "get_cuda_version_tuple", lambda: (13, 0))
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: asked.append("CUDA") or 1 / 0)
    monkeypatch.setattr(environment, "gpus", lambda: gpus)
    assert cuda_specs.get_cuda_specs() is None
    assert asked == ["CUDA"]
    with fork_server.capabilities_by_nvml():
        assert cuda_specs.get_cuda_specs().highest_compute_capability == (9, 0)
    assert asked == ["CUDA"]


@pytest.mark.parametrize(
    ("end", "number"), [("kill", signal.SIGKILL), ("terminate", signal.SIGTERM)]
)
def test_a_fork_ends_by_the_signals_that_end_a_process(warm_environment, end, number):
    process = forking.start(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        environment=launches.of_runs(warm_environment),
        stdout=1,
        stderr=1,
        on_cold=pytest.fail,
    )
    assert process.poll() is None
    getattr(process, end)()
    assert process.wait(30) == -number


def test_a_process_that_holds_a_gpu_s_file_is_told_from_one_that_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(fork_server, "GPU_DEVICES", str(tmp_path / "nvidia"))
    assert not fork_server.on_gpu()
    with (tmp_path / "nvidia0").open("w"):
        assert fork_server.on_gpu()
    assert not fork_server.on_gpu()


FORKED = (
    sys.executable,
    "-c",
    "import sys\n"
    "from toolkit import fork_server\n"
    "path, files = (*sys.path,), frozenset()\n"
    "imported = fork_server.Imported(search_path=path, variables={}, files=files)\n"
    "fork_server.run_as([sys.executable, *sys.argv[1:]], imported)\n",
)
"""A Python that goes on as a fork does; the words behind it are the fork's."""

ROOM = "-" * 4000


def test_a_script_that_exits_leaves_its_open_files_whole(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "def main():\n"
        "    file = open(sys.argv[1], 'w')\n"
        "    file.write('whole')\n"
        "    raise SystemExit(7)\n"
        "main()\n"
    )
    assert subprocess.run([*FORKED, script, tmp_path / "written", ROOM]).returncode == 7
    assert (tmp_path / "written").read_text() == "whole"


@pytest.mark.parametrize("hook", ["", "sys.excepthook = lambda *error: print('[rank1]', *error)\n"])
def test_an_error_is_printed_as_python_prints_it(tmp_path, hook):
    script = tmp_path / "script.py"
    script.write_text(f"import sys\n{hook}def main():\n    raise ValueError('no')\nmain()\n")
    ended = [
        subprocess.run([*command, script, ROOM], capture_output=True, text=True)
        for command in ([sys.executable], FORKED)
    ]
    plain, forked = (
        (done.returncode, re.sub("0x[0-9a-f]+", "", done.stdout), done.stderr) for done in ended
    )
    assert "no" in plain[1 if hook else 2]
    assert forked == plain


def test_at_its_end_a_fork_takes_back_no_operator_and_runs_the_handlers_of_others():
    script = (
        "import atexit, sys, weakref\n"
        "from torch.library import Library\n"
        "import torch\n"
        "from toolkit import fork_server\n"
        "of_imports = Library('of_imports', 'DEF')\n"
        "of_imports.define('one(Tensor x) -> Tensor')\n"
        "weakref.finalize(sys, print, 'of others')\n"
        "fork_server.keep_operators_at_exit()\n"
        "atexit._run_exitfuncs()\n"
        "print(hasattr(torch.ops.of_imports, 'one'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == ["of others", "True"]


def test_an_error_whose_hook_fails_is_printed_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nsys.excepthook = lambda *error: 1 / 0\nraise ValueError('the first')\n"
    )
    for command in ([sys.executable], FORKED):
        done = subprocess.run([*command, script, ROOM], capture_output=True, text=True)
        assert done.returncode == 1, command
        for error in ("ZeroDivisionError: division by zero", "ValueError: the first"):
            assert error in done.stderr, (command, error)


def test_a_launcher_whose_forking_process_was_killed_starts_its_ranks_cold():
    script = (
        "import subprocess, sys\n"
        "import psutil\n"
        "from toolkit import fork_server\n"
        "path, files = (*sys.path,), frozenset()\n"
        "imported = fork_server.Imported(search_path=path, variables={}, files=files)\n"
        "fork_server.fork_ranks(imported)\n"
        "(forking,) = psutil.Process().children()\n"
        "forking.kill()\n"
        "forking.wait()\n"
        "sys.exit(subprocess.Popen([sys.executable, '-c', 'print(7)']).wait())\n"
    )
    command = [sys.executable, "-c", script, "-" * 4000]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert "started cold: " in done.stdout
    assert done.stdout.endswith("\n7\n")


def test_a_wrong_or_missing_request_neither_ends_nor_holds_a_warm_process(tmp_path, monkeypatch):
    monkeypatch.setattr(forking, "ANSWER_SECONDS", 30.0)
    path = tmp_path / key_of({})
    good = {"args": ["x"], "environment": {}, "folder": "/", "ignored": [], "new_session": True}
    wrong = [
        {},
        [],
        None,
        good,
        good | {"tied": 1, "args": "x"},
        good | {"tied": True, "args": [1]},
    ]
    texts = [*(json.dumps(request).encode() for request in wrong), b"{", b"\xff", b"[" * 100_000]
    script = (
        "import socket, sys\n"
        "from toolkit import fork_server\n"
        "fork_server.REQUEST_SECONDS = 0.2\n"
        "path, files = (*sys.path,), frozenset({0})\n"
        "imported = fork_server.Imported(search_path=path, variables={}, files=files)\n"
        "fork_server.serve(socket.socket(fileno=int(sys.argv[1])), imported)\n"
    )
    with contextlib.ExitStack() as stack, (tmp_path / "out").open("w") as out:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(64)
        number = listener.fileno()
        process = subprocess.Popen([sys.executable, "-c", script, str(number)], pass_fds=[number])
        stack.callback(process.wait)
        stack.callback(process.kill)

        def connected():
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(30)
            connection.connect(str(path))
            return connection

        for text in texts:
            connection = connected()
            socket.send_fds(connection, [b"+"], [0, 1, 2])
            connection.sendall(text + b"\n")
            assert connection.recv(1) == b"", text  # it was refused, and not answered with a fork
        silent, without_a_line, slow = connected(), connected(), connected()
        for one in (without_a_line, slow):
            socket.send_fds(one, [b"+"], [0, 1, 2])
        trickle = threading.Thread(target=send_bytes, args=(slow, sent := []))
        trickle.start()
        started = forking.start(
            [sys.executable, "-m", "this"],
            environment={SOCKET: str(path)},
            stdout=out.fileno(),
            stderr=out.fileno(),
            on_cold=pytest.fail,
        )
        assert started.wait(60) == 0
        assert [one.recv(1) for one in (silent, without_a_line)] == [b"", b""]
        trickle.join()
        assert len(sent) < TRICKLED


TRICKLED = 200


def send_bytes(connection, sent):
    """Send one byte after the other, each well within the time for all, until that is refused."""
    with contextlib.suppress(OSError):
        for _ in range(TRICKLED):
            connection.send(b"x")
            sent.append(1)
            time.sleep(0.05)


@pytest.fixture
def short_path():
    """A folder whose name leaves room for that of a socket, of which Linux takes 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_the_folder_of_a_killed_warm_process_is_removed_when_the_next_starts(
    short_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    script = (
        "import os, time\n"
        "from toolkit.launching.forking import warm_process\n"
        "with warm_process(os.environ) as path:\n"
        "    print(path, flush=True)\n"
        "    time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"TMPDIR": str(short_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    abandoned = Path(owner.stdout.readline().strip())
    processes = psutil.Process(owner.pid).children(recursive=True)
    owner.kill()
    for process in processes:  # at once, as by the system: it may not yet follow its parent
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    owner.communicate()
    psutil.wait_procs(processes, timeout=60)
    assert abandoned.exists()
    with warm_process(os.environ) as first:
        assert not abandoned.parent.exists()
        with warm_process(os.environ) as second:
            assert first.exists()
            assert second.exists()
    assert not list(short_path.iterdir())


def test_a_folder_that_goes_while_abandoned_ones_are_looked_for_holds_up_no_start(
    short_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    (short_path / f"{forking.FOLDER_PREFIX}gone").mkdir()
    scan = os.scandir

    def gone(path=".", *rest):
        if "gone" in os.fspath(path):
            raise FileNotFoundError(path)
        return scan(path, *rest)

    monkeypatch.setattr(os, "scandir", gone)
    forking._remove_abandoned()


def test_transformers_still_keeps_the_conversions_that_a_warm_process_has_compiled(monkeypatch):
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
    conversion_mapping.get_checkpoint_conversion_mapping("llama")
    assert len(conversion_mapping._checkpoint_conversion_mapping_cache) > 10


def test_every_variable_but_those_of_one_launch_is_part_of_the_key():
    base = {"PATH": "/bin", "HF_HUB_OFFLINE": "1"}
    assert key_of(base) == key_of(base | {"TOOLKIT_STATUS_DIR": "/somewhere", "TERM": "dumb"})
    assert key_of(base | {"CUDA_VISIBLE_DEVICES": "0"}) == key_of(base)
    assert key_of(base | {"PATH": "/bin:/bin"}) == key_of(base)
    assert key_of({"PATH": "/bin:/opt:/bin"}) != key_of({"PATH": "/opt:/bin"})
    others = [
        {"CUDA_VISIBLE_DEVICES": ""},
        {"HF_HUB_OFFLINE": "0"},
        {"DS_ACCELERATOR": "cpu"},
        {"PYTORCH_ALLOC_CONF": ""},
    ]
    assert len({key_of(base | other) for other in [{}, *others]}) == 5


SLEEPER = """
import os, subprocess, sys, time
from pathlib import Path
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
Path(sys.argv[1], os.environ["RANK"]).touch()
time.sleep(600)
"""

PARENT = """
import sys
from pathlib import Path
from toolkit.launching.launch import launch_command, launch_environment, run
from toolkit.launching.forking import warm_launches
config, script, folder = sys.argv[1:]
hidden = {"CUDA_VISIBLE_DEVICES": ""}
with warm_launches(launch_environment(hidden, loopback=True)):
    command = launch_command(Path(config), ["-m", "toolkit.rehearse", script, folder])
    run(command, folder=Path(folder), timeout=300, environment=hidden, loopback=True)
"""


@pytest.fixture
def sleeping(tmp_path, cold_environment):
    """A command whose warm launch sleeps in two ranks, and all processes below it."""
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    folder = tmp_path / "run"
    folder.mkdir()
    config = ROOT / "accelerate_configs" / "ddp.yaml"
    command = [sys.executable, "-c", PARENT, str(config), str(script), str(folder)]
    with (tmp_path / "log").open("w") as log:
        parent = subprocess.Popen(command, env=cold_environment, stdout=log, stderr=log)
    while not all((folder / rank).exists() for rank in "01"):
        assert parent.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    below = psutil.Process(parent.pid).children(recursive=True)
    assert len(below) >= 7  # warm, supervisor, launcher, its forker, two ranks, their children
    return parent, below


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.sweep)],
)
def test_whatever_ends_the_command_nothing_of_it_stays(sleeping, number):
    parent, below = sleeping
    os.kill(parent.pid, number)
    parent.wait(60)
    _, alive = psutil.wait_procs(below, timeout=30)
    assert alive == []


def test_a_warm_process_that_is_killed_takes_its_launches_along(sleeping):
    parent, below = sleeping
    (process,) = (one for one in below if one.ppid() == parent.pid)
    process.kill()
    assert parent.wait(60) == 0  # `run` returns, with a failure
    _, alive = psutil.wait_procs(below, timeout=30)
    assert alive == []
