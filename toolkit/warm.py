"""`python -m toolkit.warm PARENT_PID LISTENER ROOM`: the process that launches are forked from.

It imports what every rank imports, once. A launch is a fork of it that goes on as
`toolkit.launching.supervised`, whose fork goes on as `accelerate launch`. torchelastic starts,
watches and stops the ranks as ever, but they are forks as well: of a process that does nothing
after the imports. So no process that forks has more than one thread, or has touched a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.abc
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import traceback
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from toolkit import search_path
from toolkit.launching import supervised
from toolkit.launching.fork_server import Listener, open_files, serve
from toolkit.launching.forking import COLD, Fork, WarmError, fork
from toolkit.launching.launch import LAUNCHER
from toolkit.launching.ranks import die_with_parent, leave, say

SUBPROCESSES: Final = (
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
)
"""The module by whose `Popen` torchelastic starts ranks (torch 2.13)."""

IMPORTED: Final = (
    "torch.distributed.run",
    SUBPROCESSES,
    "accelerate.commands.launch",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "deepspeed",
    "peft",
    "datasets",
    "toolkit.training.run",
    "toolkit.training.prepare",
    "toolkit.measuring.foreign",
)

NO_THREADS: Final = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Variables under which numpy and pyarrow start no thread when they are imported."""

NO_CUDA: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""With it torch counts GPUs by NVML. DeepSpeed sets it in every process that imports it, too."""

GPU_DEVICES: Final = "/dev/nvidia"

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


def main(arguments: Sequence[str]) -> NoReturn:
    parent, listener = map(int, arguments[:2])
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    show_as([sys.executable, "-m", "toolkit.warm", *arguments[:2]])
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = tuple(entry for entry in sys.path if entry not in folders)
    variables = import_everything()
    files = open_files() - {listener}
    gc.freeze()  # a collection in a fork would copy every page
    gc.enable()
    serve_forks(
        socket.socket(fileno=listener),
        Imported(search_path=installed, variables=variables, files=files),
    )


def serve_forks(listener: Listener, imported: Imported) -> NoReturn:
    serve(listener, lambda args: become(args, imported), inherited=imported.files, unfit=why_unfit)


def import_everything() -> dict[str, str]:
    """Import what ranks import, and return the variables that libraries set meanwhile."""
    gc.disable()  # it takes a fifth of the time, and what imports make stays
    before = dict(os.environ)
    os.environ |= NO_THREADS | NO_CUDA
    import torch

    if not torch.cuda.device_count():
        os.environ["DS_ACCELERATOR"] = "cpu"  # as every rank will, for it has to rehearse
    for name in IMPORTED:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            print(f"not imported: {error}", flush=True)  # noqa: T201
    ours = {*before, *NO_THREADS, "DS_ACCELERATOR"}
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    os.environ.clear()
    os.environ.update(before)
    close_nvml()
    return variables


def close_nvml() -> None:
    """Close NVML, which libraries opened to count GPUs; torch opens it anew whenever it counts."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return
    while nvml.nvmlShutdown() == 0:  # as often as it was opened
        pass


def why_unfit() -> str | None:
    """Return why nothing may be forked from this process, None where it may."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"{threads} threads run in the warm process"
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


def become(args: list[str], imported: Imported) -> NoReturn:
    """Go on as a Python that was started with these arguments, supervisor or rank."""
    try:
        show_as(args)
        entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [*dict.fromkeys([*filter(None, entries), *imported.search_path])]
        for name, value in imported.variables.items():
            os.environ.setdefault(name, value)
        if args[:3] == [sys.executable, "-m", supervised.__name__]:
            # Its parent is the warm process, which sends SIGTERM when the asking one is gone.
            rest = [str(os.getppid()), *args[4:]]
            code = supervised.main(rest, run=lambda command: become_python(command, imported))
        else:
            if args[: len(LAUNCHER)] == LAUNCHER:
                fork_ranks(imported)
            code = run_python(args[1:])
        leave(code)
    except SystemExit as error:
        leave(exit_code(error))
    except BaseException:
        traceback.print_exc()
        leave(1)


def become_python(command: list[str], imported: Imported) -> None:
    """Go on as the command if it runs a module or a script in this Python; else return."""
    words = [word for word in command[1:2] if word == "-m" or not word.startswith("-")]
    if command[0] == sys.executable and words:
        become(command, imported)


def show_as(words: Sequence[str]) -> None:
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
    """Have ranks forked from a copy of this process as it is now, whatever it does later."""
    ours, theirs = socket.socketpair()
    launcher = os.getpid()
    if os.fork() == 0:
        ours.close()
        die_with_parent()
        if os.getppid() != launcher:
            os._exit(1)
        show_as([sys.executable, "-m", "toolkit.warm", str(launcher)])
        serve_forks(PassedConnections(theirs), imported)
    theirs.close()

    class Popen(subprocess.Popen[Any]):
        """Starts Pythons by forking, and other programs as ever."""

        def __new__(cls, args: Any, **options: Any) -> Any:
            if not isinstance(args, (list, tuple)) or str(args[0]) != sys.executable:
                return super().__new__(cls)
            try:
                return forked(ours, [str(word) for word in args], **options)
            except WarmError as error:
                say(f"{COLD}{error}")
                return cold(args, **options)

    cold = subprocess.Popen
    subprocess.Popen = Popen
    # It has imported the class by its name.
    vars(importlib.import_module(SUBPROCESSES))["Popen"] = Popen


def forked(
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
    streams = [
        0,
        1 if stdout is None else stdout.fileno(),
        2 if stderr is None else stderr.fileno(),
    ]
    try:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(control, [b"+"], [theirs.fileno()])
    except OSError as error:
        raise WarmError(f"no process to fork from answers: {error}") from error
    return fork(
        ours,
        args,
        environment=os.environ if env is None else env,
        streams=streams,
        new_session=start_new_session,
    )


class PassedConnections:
    """A listener whose connections come, as file descriptors, through a socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def fileno(self) -> int:
        return self._control.fileno()

    def setblocking(self, flag: bool) -> None:
        self._control.setblocking(flag)

    def accept(self) -> tuple[socket.socket, None]:
        data, files, _, _ = socket.recv_fds(self._control, 1, 1)
        if not data:
            os._exit(0)  # the launcher is gone
        return socket.socket(fileno=files[0]), None


def begin_anew() -> None:
    """Repeat what Python does at its start, and libraries at their import, in every process."""
    import numpy as np
    import torch

    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    np.random.seed()
    if torch.initial_seed() != TORCH_SEED:
        torch.default_generator.seed()


def run_python(words: list[str]) -> int:
    """Run the module or script of `python WORDS`, and return the exit code."""
    begin_anew()
    while words[0] == "-u":
        words = words[1:]
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    if words[0] == "-m":
        name, *rest = words[1:]
        sys.argv = words
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
    try:
        exec(code, module.__dict__)
    except SystemExit as error:
        return exit_code(error)
    return 0


def exit_code(error: SystemExit) -> int:
    if isinstance(error.code, int) or error.code is None:
        return error.code or 0
    print(error.code, file=sys.stderr)  # noqa: T201
    return 1


if __name__ == "__main__":
    main(sys.argv[1:])
