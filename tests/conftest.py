"""The two tiers and the sweeps, and what tests of whole launches share: a cache, a launcher."""

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import launches
import pytest
from launches import environment_in
from places import ROOT, SCRIPTS

from toolkit.launching import forking
from toolkit.launching.forking import SOCKET, warm_process

gc.set_threshold(20_000, 10, 10)  # imported objects stay: look at them less often
# Many processes share few cores: threads of one would wait for each other where others compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish():
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Keep what a file leaves behind out of later collections.

    Libraries collect by themselves, and one over all that is imported takes half a second.
    """
    yield
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption("--cold", action="store_true", help="start every launch cold")
    parser.addoption("--all", action="store_true", help="run every test that starts a launch too")


def pytest_xdist_auto_num_workers(config):
    """One worker for each core, eight at most; none for tests that were named."""
    return 0 if _named(config) else min(len(os.sched_getaffinity(0)), 8)


def _named(config):
    """Whether the command names tests, by a path or an expression."""
    paths = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    return paths or bool(config.option.keyword)


def pytest_configure(config):
    launches.count_runs()
    config.option.all |= _named(config) or bool(config.option.markexpr)


OF_LAUNCHES = {"launch_environment", "cold_environment", "warm_environment"}
"""Fixtures of tests that start ranks, as a user would: they are left out unless marked `short`."""


def pytest_itemcollected(item):
    if OF_LAUNCHES & {*item.fixturenames} and not {"short", "sweep"} & {*item.keywords}:
        item.add_marker("long")


def pytest_collection_modifyitems(config, items):
    """Leave out the long tests, unless they are asked for, and run the files that launch first.

    Short tests then fill the gap at the end of a worker. Sweeps run where they are named.
    """
    if not _named(config) and "sweep" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if "sweep" in item.keywords])
        items[:] = [item for item in items if "sweep" not in item.keywords]
    if not config.option.all:
        left_out = [item for item in items if "long" in item.keywords]
        config.hook.pytest_deselected(items=left_out)
        launches.left_out = [item.nodeid for item in left_out]
        items[:] = [item for item in items if "long" not in item.keywords]
    of_launches = {item.path for item in items if OF_LAUNCHES & {*item.fixturenames}}
    items.sort(key=lambda item: item.path not in of_launches)


def pytest_sessionfinish(session):
    if output := getattr(session.config, "workeroutput", None):
        output["started"], output["left_out"] = launches.started, launches.left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    if hasattr(node, "workeroutput"):
        launches.started.extend(node.workeroutput["started"])
        launches.left_out = node.workeroutput["left_out"]


def pytest_terminal_summary(terminalreporter, config):
    """Say how many launches it took: those of tests, and those of comparisons."""
    folder = config._tmp_path_factory.getbasetemp()
    lines = {path.read_text() for path in folder.rglob("command.txt")}
    of_comparisons = len({line for line in lines if "accelerate launch" in line})
    here = len(launches.started)
    terminalreporter.write_line(
        f"launches: {here + of_comparisons} ({of_comparisons} of them by comparisons)"
    )
    if launches.left_out:
        terminalreporter.write_line(
            f"{len(launches.left_out)} tests that start launches were left out: pytest --all"
        )
    seconds = Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            tier = next((name for name in ("sweep", "long") if name in report.keywords), "short")
            seconds[_room(report.nodeid), tier] += report.duration
    terminalreporter.write_line(
        "seconds of workers, by room: those of short tests, of long ones, of sweeps"
    )
    for room in sorted({room for room, _ in seconds}):
        short, long, sweep = (seconds[room, tier] for tier in ("short", "long", "sweep"))
        terminalreporter.write_line(f"{room:>14} {short:6.0f} {long:6.0f} {sweep:6.0f}")


def _room(nodeid):
    folders = Path(nodeid.partition("::")[0]).parts[1:-1]
    return folders[0] if folders else "whole runs"


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """Ctrl-C must reach what the tests start, also where a shell started them in the background.

    Such a shell has SIGINT ignored, and what is ignored stays so in every process below.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    import torch

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def cold_environment(tmp_path_factory, session_cache):
    """The variables of a user: caches of his own, and nothing of the tests' own process."""
    of_the_user = environment_in(tmp_path_factory.mktemp("caches"))
    return of_the_user | {"TOOLKIT_CACHE": str(session_cache)}


@pytest.fixture(scope="session")
def warm_environment(cold_environment):
    """The same, and where the session's warm process is."""
    with warm_process(launches.of_runs(cold_environment)) as path:
        yield cold_environment | {SOCKET: str(path)}


@pytest.fixture(scope="session")
def launch_environment(request):
    """One of the two: launches are warm unless `pytest --cold` was said."""
    cold = request.config.getoption("--cold")
    return request.getfixturevalue("cold_environment" if cold else "warm_environment")


@pytest.fixture
def as_launched(launch_environment, monkeypatch):
    """Give this process the variables of a user, so that it launches as a command would."""
    for name in os.environ:
        monkeypatch.delenv(name)
    for name, value in launch_environment.items():
        monkeypatch.setenv(name, value)
    # pytest sets it anew for each phase of a test.
    kept = forking.OF_A_LAUNCH | {"PYTEST_CURRENT_TEST"}
    monkeypatch.setattr(forking, "OF_A_LAUNCH", kept)


@pytest.fixture(scope="session")
def launch(launch_environment):
    """Run `accelerate launch` from the repository root, under a checked-in file or another."""

    def run(strategy, *script, timeout=600, cold=False, **environment):
        checked_in = ROOT / "accelerate_configs" / f"{strategy}.yaml"
        config = checked_in if checked_in.exists() else strategy
        command = [*launches.TYPED, "--config_file", config, *script]
        variables = launches.cold(launch_environment) if cold else launch_environment
        return launches.run(command, environment=variables | environment, timeout=timeout)

    return run


@pytest.fixture(scope="session")
def toolkit(launch_environment, tmp_path_factory):
    """Run the `toolkit` command in a folder of its own."""

    def run(*arguments, timeout=1200):  # DeepSpeed compiles for minutes, once
        return subprocess.run(
            ["toolkit", *map(str, arguments)],
            cwd=tmp_path_factory.mktemp("here"),
            env=launch_environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def command(tmp_path_factory):
    """Run `toolkit` as a process, where not its start is looked at: one that forks imports once."""
    folder = tmp_path_factory.mktemp("commands")
    files = {"stdout": folder / "stdout", "stderr": folder / "stderr"}
    forking_process = [sys.executable, SCRIPTS / "forked_commands.py"]

    def run(*words, cwd=None, **variables):
        for path in files.values():
            path.write_bytes(b"")
        request = {
            "words": [*map(str, words)],
            "folder": str(cwd or Path.cwd()),
            "environment": os.environ | variables,
            **{name: str(path) for name, path in files.items()},
        }
        process.stdin.write(f"{json.dumps(request)}\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        texts = {name: path.read_text() for name, path in files.items()}
        return subprocess.CompletedProcess(request["words"], code, **texts)

    with subprocess.Popen(
        forking_process, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield run


@pytest.fixture(scope="session")
def small_model(tmp_path_factory, launch_environment):
    """A folder with the built-in tokenizer and a Llama: a step takes half the built-in one's time.

    Its widths are multiples of 64, as those of the built-in model are, and for the same reason.
    Half of its matrices is more than the mebibyte from which DeepSpeed swaps to NVMe.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from toolkit.training.model import build_model

    folder = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TOOLKIT_CACHE", launch_environment["TOOLKIT_CACHE"])
        tokenizer = AutoTokenizer.from_pretrained(build_model())
    sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=2, **sizes, **heads)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_training(small_model):
    """Flags that train it at the built-in model's learning rate, which is 20 times the usual one.

    So what is wrong in an update moves the losses of the next steps.
    """
    return "--model_name_or_path", str(small_model), "--learning_rate", "1e-3"


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory, request):
    """The cache of all workers: what one has built, no other builds again."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if hasattr(request.config, "workerinput") else folder) / "cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def cache(session_cache, monkeypatch):
    """The cache of this process, kept between tests."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(session_cache))
    return session_cache
