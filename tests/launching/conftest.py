"""A launcher that behaves as torchelastic does, without its three seconds of imports."""

import os
import sys
import time

import psutil
import pytest

LAUNCHER = """
import os, signal, subprocess, sys, time

script, number = sys.argv[1], int(sys.argv[2])
ranks = [
    subprocess.Popen(
        [sys.executable, script],
        env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(number)},
        start_new_session=True,
    )
    for rank in range(number)
]
while True:
    codes = [rank.poll() for rank in ranks]
    if any(codes):
        break
    if None not in codes:
        sys.exit(0)
    time.sleep(0.02)
for rank in ranks:
    if rank.poll() is None:
        rank.send_signal(signal.SIGTERM)
for rank in ranks:
    rank.wait(30)
first = next(i for i, code in enumerate(codes) if code)
says = "E0101 10:00:00.123456 7 /x/torch/distributed/elastic/multiprocessing/api.py:1002]"
print(f"{says} failed (exitcode: {codes[first]}) local_rank: {first} (pid: {ranks[first].pid})")
print("Traceback (most recent call last):")
print('  File "/x/torch/distributed/run.py", line 1, in run')
print("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ")
print("=" * 60)
for i, rank in enumerate(ranks):
    if rank.returncode:
        print(f"  exitcode  : {rank.returncode} (pid: {rank.pid})")
print("=" * 60)
sys.exit(1)
"""

RANK = '''
import os, signal, subprocess, sys, time
from pathlib import Path
from toolkit.launching.ranks import die_with_parent
from toolkit.launching.status import StatusFile, guard, status_folder

die_with_parent()
rank = int(os.environ["RANK"])
status = StatusFile(status_folder(Path()), rank)

def await_stopped(number):
    """Return when that rank is stopped."""
    import json
    import psutil

    other = status.path.with_name(f"rank-{number}.json")
    while not other.exists():
        time.sleep(0.01)
    process = psutil.Process(json.loads(other.read_text())["pid"])
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
'''


@pytest.fixture
def ranks(tmp_path):
    """Return a function from the body of a rank's script to a command that runs two of them."""

    def write(body, *, number=2):
        (tmp_path / "driver.py").write_text(LAUNCHER)
        (tmp_path / "rank.py").write_text(RANK + body)
        return [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "rank.py"), str(number)]

    return write


@pytest.fixture(autouse=True)
def nothing_left(tmp_path):
    """Every test must end with no process of its own alive; kill what is left, then say so."""
    yield
    left = processes_of(tmp_path)
    for process in left:
        process.kill()
    assert not left


def processes_of(folder):
    """Return the living processes whose command line or environment names `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            named = " ".join([*process.cmdline(), *process.environ().values()])
            alive = process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if process.pid != os.getpid() and alive and str(folder) in named:
            found.append(process)
    return found


@pytest.fixture
def wait_until():
    def wait(condition, *, seconds=10.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not so after {seconds} s"
            time.sleep(0.02)

    return wait


@pytest.fixture
def living(tmp_path):
    return lambda: processes_of(tmp_path)
