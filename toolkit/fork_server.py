"""`python -m toolkit.fork_server PARENT_PID LISTENER ROOM`: launches are forked from this process.

It makes the imports of a rank once. A launch is a fork of it that goes on as
`toolkit.launching.supervised`, whose fork goes on as `accelerate launch`. torchelastic starts,
watches and stops the ranks as usual, but they are forks as well: of a process that is idle after
the imports. So no process that forks has more than one thread, or has touched a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.abc
import importlib.util
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
import types
import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from toolkit import environment, search_path
from toolkit.configs.check.libraries import accelerate_library, deepspeed_library
from toolkit.launching import forking, supervised
from toolkit.launching.forking import COLD, STREAMS, Fork, ForkRequest, WarmError
from toolkit.launching.launch import LAUNCHER
from toolkit.launching.ranks import die_with_parent, leave, say
from toolkit.records.shapes import mismatches

SUBPROCESSES: Final = (
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
)
"""The module whose `Popen` torchelastic uses to start ranks (torch 2.13)."""

TORCHRUN: Final = "torch.distributed.run"
LAUNCHERS: Final = (LAUNCHER, [sys.executable, "-m", TORCHRUN])
"""Beginnings of the commands that start ranks."""

IMPORTED: Final = (
    TORCHRUN,
    SUBPROCESSES,
    "accelerate.commands.launch",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "deepspeed",
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "peft",
    "datasets",
    "rich.progress",
    "toolkit.training.run",
    "toolkit.training.preflight",
    "toolkit.training.preflight_process",
    "toolkit.measuring.script_attestation",
)

NO_THREADS: Final = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Variables under which numpy and pyarrow start no thread when they are imported."""

NO_CUDA: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""With it torch counts GPUs by NVML. DeepSpeed sets it in every process that imports it, too."""

GPU_DEVICES: Final = "/dev/nvidia"

REQUEST_SECONDS: Final = 5.0
"""How long a process that has connected may take to send all of its request: the others wait."""

TORCH_SEED: Final = 67280421310721
"""`default_rng_seed_val` of c10, with which every process began before torch drew a seed."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """State of the warm process after its imports, which every fork of it inherits."""

    search_path: tuple[str, ...]
    """The end of `sys.path`, behind the folders in PYTHONPATH."""

    variables: dict[str, str]
    """Environment variables that the libraries set."""

    files: frozenset[int]
    """File descriptors that they opened."""

    threads_since: str | None = None
    """The last import before this process got a second thread; None while it has one."""


def main(arguments: Sequence[str]) -> NoReturn:
    parent, listener = map(int, arguments[:2])
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    set_process_title([sys.executable, "-m", forking.FORK_SERVER, *arguments[:2]])
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = tuple(entry for entry in sys.path if entry not in folders)
    with watched_imports() as watch:
        variables = import_everything()
    files = open_files() - {listener}
    keep_operators_at_exit()
    gc.freeze()  # a collection in a fork would copy every page
    gc.enable()
    imported = Imported(
        search_path=installed, variables=variables, files=files, threads_since=watch.since
    )
    serve(socket.socket(fileno=listener), imported)


class ThreadWatch(importlib.abc.MetaPathFinder):
    """Finds no module; notes which import was the last before this process got a second thread.

    The library that starts a thread, or initialises CUDA, is that module or the one that imports
    it.
    """

    def __init__(self) -> None:
        self.latest = "Python started"
        self.since: str | None = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        self.look()
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and "importlib" in caller.f_code.co_filename:
            caller = caller.f_back
        importer = "Python" if caller is None else caller.f_globals.get("__name__")
        self.latest = f"{importer} looked for {fullname}"

    def look(self) -> None:
        if self.since is None and len(os.listdir("/proc/self/task")) > 1:
            self.since = self.latest


@contextlib.contextmanager
def watched_imports() -> Generator[ThreadWatch]:
    watch = ThreadWatch()
    sys.meta_path.insert(0, watch)
    try:
        yield watch
    finally:
        sys.meta_path.remove(watch)
        watch.look()


def import_everything() -> dict[str, str]:
    """Make the imports of a rank, and return the variables that libraries set meanwhile."""
    gc.disable()  # it takes a fifth of the time, and imported objects stay
    before = dict(os.environ)
    os.environ |= NO_THREADS | NO_CUDA
    import torch

    if not torch.cuda.device_count():
        os.environ["DS_ACCELERATOR"] = "cpu"  # as every rank will, for it has to rehearse
    with capabilities_by_nvml():
        for name in IMPORTED:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                print(f"not imported: {error}", flush=True)  # noqa: T201
    with contextlib.suppress(ImportError):  # transformers 5.24; without it a rank compiles them
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")  # a thousand patterns, of all models
    for library in (accelerate_library, deepspeed_library):  # each rank judges its config by them
        with contextlib.suppress(Exception):  # not installed, which a rank says that needs it
            library()
    ours = {*before, *NO_THREADS, "DS_ACCELERATOR"}
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    os.environ.clear()
    os.environ.update(before)
    close_nvml()
    return variables


def keep_operators_at_exit() -> None:
    """Have no fork take back torch's operators one by one at its end: that copies 40 MB of pages.

    `torch.library.Library` registers it (torch 2.13); the process ends, and its operators with it.
    """
    from torch.library import Library

    for finalizer in weakref.finalize._select_for_exit():  # pyright: ignore[reportAttributeAccessIssue]
        if (watched := finalizer.peek()) and isinstance(watched[0], Library):
            finalizer.atexit = False


@contextlib.contextmanager
def capabilities_by_nvml() -> Generator[None]:
    """Have torch take the compute capability of a GPU from NVML, not from CUDA.

    bitsandbytes 0.50 asks torch for it when it is imported (cuda_specs.py), as peft does where it
    is installed, and torch initialises CUDA to answer: then nothing may be forked.
    """
    import torch

    gpus = environment.gpus()
    by_cuda = torch.cuda.get_device_capability

    def by_nvml(device: Any = None) -> tuple[int, int]:
        position = getattr(device, "idx", device) or 0
        return gpus[position].capability if isinstance(position, int) else by_cuda(device)

    if gpus:
        torch.cuda.get_device_capability = by_nvml
    try:
        yield
    finally:
        torch.cuda.get_device_capability = by_cuda


def close_nvml() -> None:
    """Close NVML, which libraries opened to count GPUs; torch opens it anew whenever it counts."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return
    while nvml.nvmlShutdown() == 0:  # as often as it was opened
        pass


def serve(requests: socket.socket, imported: Imported) -> NoReturn:
    """Fork a process for each request and tell how each ended, for ever.

    Requests come through a listening socket, or through one that connections are passed through.
    """
    waker, woken = socket.socketpair()
    for end in (waker, woken, requests):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, wake_up)
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    with contextlib.suppress(BlockingIOError):
                        woken.recv(2**12)
                    for connection in tell_ends(running):
                        if connection in selector.get_map():
                            selector.unregister(connection)
                        connection.close()
                elif key.data is not None:
                    # A tied connection sends no data after its request: this is its end.
                    selector.unregister(key.fileobj)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(key.data, signal.SIGTERM)
                else:
                    connection = next_connection(requests)
                    received = receive(connection)
                    if received is None:
                        connection.close()
                        continue
                    request, streams = received
                    if (reason := why_unfit(imported.threads_since)) is not None:
                        answer(connection, {"unfit": reason})
                        connection.close()
                        close_all(streams)  # who reads the other end waits for the last copy
                        continue
                    pid = os.fork()
                    if pid == 0:
                        try:
                            begin(request, streams, imported.files)
                            run_as(request["args"], imported)
                        finally:
                            os._exit(1)  # after any error, the fork must not continue this loop
                    close_all(streams)
                    running[pid] = connection
                    if request["tied"]:
                        selector.register(connection, selectors.EVENT_READ, data=pid)
                    answer(connection, {"pid": pid})


def wake_up(number: int, frame: FrameType | None) -> None:
    """Do nothing: the loop wakes up by the byte that Python writes for the signal."""


def next_connection(requests: socket.socket) -> socket.socket:
    if requests.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        connection, _ = requests.accept()
        connection.setblocking(True)
        return connection
    data, files, _, _ = socket.recv_fds(requests, 1, 1)
    if not data:
        os._exit(0)  # the launcher is gone
    return socket.socket(fileno=files[0])


def open_files() -> frozenset[int]:
    """Return the file descriptors of this process."""
    listed = {int(name) for name in os.listdir("/proc/self/fd")}
    # One of them was that of the folder while it was listed.
    return frozenset(number for number in listed if os.path.lexists(f"/proc/self/fd/{number}"))


def receive(connection: socket.socket) -> tuple[ForkRequest, list[int]] | None:
    """Return a request and its standard streams; None where no request comes, or a wrong one."""
    streams: list[int] = []
    until = time.monotonic() + REQUEST_SECONDS
    connection.settimeout(REQUEST_SECONDS)
    try:
        data, streams, _, _ = socket.recv_fds(connection, 1, len(STREAMS))
        if data and len(streams) == len(STREAMS):
            request = json.loads(_read_line(connection, until))
            if not any(mismatches(request, ForkRequest)):
                connection.settimeout(None)
                return request, streams
    except (OSError, ValueError, RecursionError):
        pass
    close_all(streams)
    return None


def _read_line(connection: socket.socket, until: float) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(until - time.monotonic(), 0))
        if not (part := connection.recv(2**16)):
            break
        line += part
    return line


def close_all(streams: Sequence[int]) -> None:
    for stream in streams:
        os.close(stream)


def begin(request: ForkRequest, streams: list[int], inherited: frozenset[int]) -> None:
    """Give a forked process only the state that its request names, and none of its parent's."""
    signal.set_wakeup_fd(-1)
    for number in forking.passed_signals():
        # As after `exec`: an ignored signal stays ignored, all others are at their default.
        if number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        elif forking.is_ignored(number) or callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["new_session"]:
        os.setsid()
    for number, stream in zip(STREAMS, streams, strict=True):
        os.dup2(stream, number)
    for number in open_files() - inherited - {*STREAMS}:
        os.close(number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["args"][1:]
    sys.orig_argv = request["args"]
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    forking.shared_bytes = resident_pages * resource.getpagesize()


def tell_ends(running: dict[int, socket.socket]) -> list[socket.socket]:
    """Tell of each process that ended how it did, and return the connections that were told."""
    ended: list[socket.socket] = []
    with contextlib.suppress(ChildProcessError):  # there is no child left
        while (result := os.waitpid(-1, os.WNOHANG))[0] != 0:
            pid, status = result
            connection = running.pop(pid, None)
            if connection is not None:
                answer(connection, {"code": os.waitstatus_to_exitcode(status)})
                ended.append(connection)
    return ended


def answer(connection: socket.socket, content: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the process that asked may be gone
        connection.sendall(json.dumps(content).encode() + b"\n")


def why_unfit(threads_since: str | None) -> str | None:
    """Return why this process may not be forked; None if it may."""
    threads = list(Path("/proc/self/task").iterdir())
    if len(threads) != 1:
        names = ", ".join(sorted({(thread / "comm").read_text().strip() for thread in threads}))
        since = "" if threads_since is None else f", since {threads_since}"
        return f"{len(threads)} threads run in the warm process ({names}){since}"
    if on_gpu():
        return "the warm process has touched a GPU"
    return None


def on_gpu() -> bool:
    """Whether this process has opened an NVIDIA device, or initialised CUDA."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(GPU_DEVICES):
                return True
        except OSError:
            continue
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def run_as(args: list[str], imported: Imported) -> NoReturn:
    """Go on as a Python that was started with these arguments, supervisor or rank."""
    code = 0
    try:
        set_process_title(args)
        entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [*dict.fromkeys([*filter(None, entries), *imported.search_path])]
        for name, value in imported.variables.items():
            os.environ.setdefault(name, value)
        if args[:3] == [sys.executable, "-m", supervised.__name__]:
            # Its parent is the warm process, which sends SIGTERM when the asking one is gone.
            rest = [str(os.getppid()), *args[4:]]
            code = supervised.main(rest, run=lambda command: run_python_as(command, imported))
        else:
            if args[:3] in LAUNCHERS:
                fork_ranks(imported)
            run_python(args[1:])
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)  # noqa: T201
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        print_as_python_does(error)
        code = 1
    # Not within `except`: the error's frames may hold files that are not flushed yet.
    leave(code)


def print_as_python_does(error: BaseException) -> None:
    """Print what ends this process by the hook that is set: torch's puts the rank before a line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(trace or error.__traceback__), trace)
    except BaseException:
        traceback.print_exc()


def run_python_as(command: list[str], imported: Imported) -> None:
    """Go on as the command if it runs a module or a script in this Python; else return."""
    words = [word for word in command[1:2] if word == "-m" or not word.startswith("-")]
    if command[0] == sys.executable and words:
        run_as(command, imported)


def set_process_title(words: Sequence[str]) -> None:
    """Have `ps`, `pkill -f` and `nvidia-smi` show this process as a command, cut where too long.

    Linux reads the memory of the first arguments: up to its end, or as one text where its last
    byte is not zero. ROOM is an argument that makes it long.
    """
    # `arg_start` and `arg_end`, fields 48 and 49 of proc_pid_stat(5); the first two are cut off.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = " ".join(words).encode()[: end - begin - 2]
    ctypes.memmove(begin, text.ljust(end - begin - 1, b"\0") + b"-", end - begin)


def fork_ranks(imported: Imported) -> None:
    """Have ranks forked from a copy of this process in its present state."""
    ours, theirs = socket.socketpair()
    launcher = os.getpid()
    if os.fork() == 0:
        ours.close()
        die_with_parent()
        if os.getppid() != launcher:
            os._exit(1)
        set_process_title([sys.executable, "-m", forking.FORK_SERVER, str(launcher)])
        serve(theirs, imported)
    theirs.close()

    class Popen(subprocess.Popen[Any]):
        """Starts Pythons by forking, and other programs as usual."""

        def __new__(cls, args: Any, **options: Any) -> Any:
            if not isinstance(args, (list, tuple)) or str(args[0]) != sys.executable:
                return super().__new__(cls)
            try:
                return forked_rank(ours, [str(word) for word in args], **options)
            except (OSError, WarmError) as error:
                say(f"{COLD}{forking.why_cold(error)}")
                return cold(args, **options)

    cold = subprocess.Popen
    subprocess.Popen = Popen
    # It has imported the class by its name.
    vars(importlib.import_module(SUBPROCESSES))["Popen"] = Popen


def forked_rank(
    control: socket.socket,
    args: list[str],
    *,
    env: dict[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    start_new_session: bool = False,
    **_: Any,
) -> Fork:
    """Start a rank; the arguments are those of `subprocess.Popen` that launchers give."""
    sys.stdout.flush()
    sys.stderr.flush()
    ours, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(control, [b"+"], [theirs.fileno()])
    return forking.fork(
        ours,
        args,
        environment=os.environ if env is None else env,
        streams=[0, stdout.fileno() if stdout else 1, stderr.fileno() if stderr else 2],
        new_session=start_new_session,
    )


def reinitialise() -> None:
    """Repeat per-process actions of Python's start and of libraries' imports."""
    import numpy as np
    import torch

    for number in forking.IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_IGN)
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    np.random.seed()
    if torch.initial_seed() != TORCH_SEED:
        torch.default_generator.seed()


def run_python(words: list[str]) -> None:
    """Run the module or script of `python WORDS`; an exit code comes as SystemExit."""
    reinitialise()
    while words[0] == "-u":
        words = words[1:]
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    if words[0] == "-m":
        _, name, *rest = words
        sys.argv = ["-m", *rest]  # as Python has it while it looks for the module
        if search_path.runs_as_module("toolkit"):
            search_path.leave_current_folder()
        spec = importlib.util.find_spec(name)
        if spec is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
            raise ModuleNotFoundError(f"No module named {name!r}")
        code = spec.loader.get_code(name)
        assert code is not None  # of Python modules it never is
        module.__spec__ = spec
        module.__loader__ = spec.loader
        module.__package__ = spec.parent
        module.__file__ = spec.origin
        sys.argv = [str(spec.origin), *rest]
    else:
        module.__file__ = words[0]
        code = compile(Path(words[0]).read_bytes(), words[0], "exec")
        sys.argv = list(words)
        if not sys.flags.safe_path:
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
    exec(code, module.__dict__)


if __name__ == "__main__":
    main(sys.argv[1:])
