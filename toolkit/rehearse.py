"""Run any script, also a user's own, under a config made for GPUs on a machine without them.

    accelerate launch --config_file zero3.yaml -m toolkit.rehearse script.py --its --own flags

The processes, the collectives (gloo) and the engines are real; only the device is the CPU.
Without it, Accelerate 1.15 starts the same ranks on a machine without a GPU, and each trains as if
it were alone (`DistributedType.NO`); told to use the CPU, it runs plain DDP for every backend
(state.py, `_prepare_backend`). With as many GPUs as ranks, this module has no effect.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from toolkit.causes.diagnosis import diagnose_error
from toolkit.configs import requested
from toolkit.engines import deepspeed_config
from toolkit.engines.on_cpu import (
    patch_accelerate,
    patch_deepspeed,
    patch_hub,
    patch_torch,
    patch_transformers,
)
from toolkit.environment import check_installed
from toolkit.errors import MachineLostError, UsageError, file_sentence, is_full_disk
from toolkit.escaping import one_line
from toolkit.launching.processes import start_of
from toolkit.launching.python import check_package_folder
from toolkit.launching.ranks import die_with_parent, leave, local_rank, quiet, rank, say, staying
from toolkit.launching.status import STATUS_DIR, StatusFile, guard
from toolkit.launching.watchdog import DEFAULT_SECONDS, HANG_FILE, Watchdog, seconds_of
from toolkit.redaction import redact, redact_output
from toolkit.search_path import put_behind_library

if TYPE_CHECKING:
    from toolkit.measuring.few_steps import FewSteps

USAGE = (
    "Usage: accelerate launch --config_file FILE -m toolkit.rehearse [--shrink[=auto]] [--steps N] "
    "[--hang_timeout SECONDS] SCRIPT.py [ARGS], or with -m MODULE [ARGS] in place of the script"
)

PURPOSE = (
    "Runs the script unchanged, with fewer GPUs than processes on the CPU, under the same config, "
    "and says at the end what engaged. --shrink: where the script loads a large causal LM, it gets "
    "a small random model of the same architecture, and rows as long as RAM allows; =auto: only "
    "where the large one would not fit. --steps N: the "
    "training ends after N optimizer steps, and the script goes on to its own end; nothing is "
    "pushed to a hub or a tracker. A run in which nothing progresses is ended after "
    "--hang_timeout seconds: on the CPU 600 where it is not passed, on GPUs never; 0: never."
)

FLAGS = (
    *("--hang_timeout", "--steps", "--observe", "--for_ranks"),
    *("--first_step", "--resume_from"),
)
"""Flags of ours that take a value; the last four are those of a certificate."""

FIRST_SPEAKS_SECONDS = 5.0

SWEEP_SECONDS = 3600.0
"""Age from which the folder of a launch that was killed is removed."""


def main() -> None:
    """Run the script named on the command line in this rank.

    Leaves with the script's own status; 2 for a mistake of the user's, 3 when refused.
    """
    die_with_launcher()
    if sys.argv[1:2] in (["-h"], ["--help"]):
        if rank() == 0:
            print(f"{USAGE}\n\n{PURPOSE}")  # noqa: T201
        return
    redact_output()
    quiet()
    from toolkit.measuring.attestation import Refused
    from toolkit.measuring.launcher import check_config_file

    code = 0
    rehearsal = False
    try:
        options, arguments = _options(sys.argv[1:])
        run_script = _script(arguments)
        folder = os.environ.get(STATUS_DIR)
        status = None if folder is None else StatusFile(Path(folder), rank())
        with guard(status, refused_by=(Refused,)) if status else contextlib.nullcontext():
            check_package_folder()
            check_config_file()
            rehearsal = rehearse_if_needed()
            if not rehearsal and requested.asks_for_deepspeed(os.environ):
                check_installed("deepspeed")
                deepspeed_config.say_builds(requested.read_deepspeed_config(os.environ))
            from toolkit.measuring import machines
            from toolkit.measuring.script_attestation import watch

            hang_timeout = options.hang_timeout
            if hang_timeout is None:
                hang_timeout = DEFAULT_SECONDS if rehearsal else 0.0
            with (
                _watchdog(hang_timeout, status),
                _made_small(options, rehearsal=rehearsal) as few,
                watch(rehearsal=rehearsal, few=few, observe=options.observe),
                machines.watched(),
                staying(),
            ):
                try:
                    run_script()
                except StopIteration:  # it reads by hand as many batches as its loader should give
                    if few is None or not few.is_done:
                        raise
                    few.cut()
    except UsageError as error:
        code = print_reason(2, str(error))
    except Refused as error:
        code = print_reason(3, f"refused: {error}", alone=error.is_of_this_rank_alone)
    except MachineLostError as error:
        code = print_reason(1, str(error))
    except Exception as error:
        if not print_full_disk(error):
            print_cause(error)
            raise
        code = 1
    if code:
        raise SystemExit(code)
    if rehearsal:
        leave()


def print_reason(code: int, reason: str, *, alone: bool = False) -> int:
    """Print once on each machine why all ranks leave, or this one `alone`; return the exit code."""
    if alone or local_rank() == 0:
        print(f"toolkit: {one_line(redact(reason))}", file=sys.stderr, flush=True)  # noqa: T201
    else:
        # The launcher ends all ranks when one leaves: the first must have printed by then.
        time.sleep(FIRST_SPEAKS_SECONDS)
    return code


def print_cause(error: BaseException) -> None:
    """Print the cause and the fix of an error that ends this rank, where they are known."""
    diagnosis = diagnose_error(error)
    if diagnosis is not None and _is_first_to_say(diagnosis.name):
        say(redact(f"{diagnosis.name}: {diagnosis.text} What helps: {diagnosis.fix}"))


def _is_first_to_say(name: str) -> bool:
    """Whether no other rank of this launch on this machine has said so."""
    try:
        (folder_of_launch() / f"said-{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except (OSError, UsageError):
        return True
    return True


def print_full_disk(error: BaseException) -> bool:
    """Print one line if an error that ends this rank is that a disk is full; whether it is."""
    if not is_full_disk(error):
        return False
    diagnosis = diagnose_error(error)
    if diagnosis is not None and diagnosis.name != "disk-full":
        return False  # shared memory, for instance, has another cure
    print_reason(1, file_sentence(error) or str(error), alone=True)
    return True


@dataclass(slots=True, kw_only=True)
class _Options:
    """The flags in front of a script."""

    hang_timeout: float | None = None
    shrink: str = ""
    """`asked`, or `auto`: only what would not fit; empty: nothing."""

    steps: int | None = None
    observe: Path | None = None
    """Folder for what is observed of the script."""

    for_ranks: int = 1
    """Ranks whose work this process does."""

    first_step: int | None = None
    """Step that the script begins with; what it saves is noted where this is passed."""

    again: bool = False
    """Whether this is the second of two equal runs."""

    resume_from: str | None = None
    """Checkpoint from which its Trainer goes on."""


def _options(arguments: list[str]) -> tuple[_Options, list[str]]:
    """Return our own flags, and the arguments without them."""
    options = _Options()
    while arguments:
        name, _, value = arguments[0].partition("=")
        if arguments[0] == "--again":
            options.again, arguments = True, arguments[1:]
            continue
        if arguments[0] in ("--shrink", "--shrink=auto"):
            options.shrink = value or "asked"
            arguments = arguments[1:]
            continue
        if name not in FLAGS:
            break
        value, arguments = (
            (value, arguments[1:]) if value else ("".join(arguments[1:2]), arguments[2:])
        )
        match name:
            case "--hang_timeout":
                options.hang_timeout = seconds_of(value)
            case "--steps":
                options.steps = _counted(value, name, "optimizer steps")
            case "--for_ranks":
                options.for_ranks = _counted(value, name, "ranks")
            case "--first_step":
                options.first_step = int(value)
            case "--resume_from":
                options.resume_from = value
            case _:
                options.observe = Path(value)
    if options.steps is None and (options.observe is not None or options.for_ranks > 1):
        raise UsageError("--observe and --for_ranks count optimizer steps: pass --steps N, too.")
    return options, arguments


def _counted(value: str, flag: str, things: str) -> int:
    if value.isdecimal() and int(value):
        return int(value)
    raise UsageError(f"{flag} takes a number of {things} from 1 on, not {value!r}.")


@contextlib.contextmanager
def _made_small(options: _Options, *, rehearsal: bool) -> Iterator[FewSteps | None]:
    """Let the script that runs within have small models and few steps, where it was asked."""
    if not options.shrink and options.steps is None:
        yield None
        return
    from toolkit.measuring.few_steps import FewSteps, few_steps
    from toolkit.measuring.shrinking import most_parameters, shrinking

    few = FewSteps(options.steps)
    few.again = options.again
    with contextlib.ExitStack() as stack:
        if options.shrink:
            folder = (options.observe or folder_of_launch()) / f"small-models-{rank()}"
            ranks = max(options.for_ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            most = most_parameters(ranks, rehearsal=rehearsal) if options.shrink == "auto" else None
            small = shrinking(folder, only_above=most, keep=options.observe is not None)
            few.most_tokens = stack.enter_context(small).most_tokens
        stack.enter_context(few_steps(few))
        if options.for_ranks > 1:
            from toolkit.measuring.one_for_many import one_for_many

            stack.enter_context(one_for_many(options.for_ranks))
        if options.observe is not None and options.first_step is not None:
            from toolkit.measuring.saves import watching_saves

            first, checkpoint = options.first_step, options.resume_from
            stack.enter_context(
                watching_saves(options.observe, few, first=first, resume_from=checkpoint)
            )
        yield few


def _watchdog(seconds: float, status: StatusFile | None) -> AbstractContextManager[None]:
    """Return what watches this rank of a script; nothing does for 0 seconds."""
    if not seconds:
        return contextlib.nullcontext()
    from toolkit.engines.flight_recorder import COLLECTIVES
    from toolkit.measuring import machines

    return Watchdog(
        folder=folder_of_launch() if status is None else status.path.parent,
        seconds=seconds,
        texts=machines.meeting(),
        collectives=COLLECTIVES,
        ending=(lambda error: None) if status is None else status.failed,
    )


def folder_of_launch() -> Path:
    """Return a folder that the ranks of a launch on this machine share, and no other launch."""
    _sweep()
    launcher = os.getppid() if "WORLD_SIZE" in os.environ else os.getpid()
    name = f"{_folders()}{launcher}-{start_of(launcher):.2f}"
    folder = Path(tempfile.gettempdir(), name)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise UsageError(f"{folder} belongs to another user: set TMPDIR to a folder of your own.")
    return folder


def _folders() -> str:
    return f"toolkit-{os.getuid()}-"


def _sweep() -> None:
    """Remove the folders of launches that were killed; one with the stacks of a hang stays."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_folders()}*"):
        with contextlib.suppress(OSError, ValueError):
            # A launch that lives, also one in another container, writes there all the time.
            newest = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
            if time.time() - newest > SWEEP_SECONDS and not (folder / HANG_FILE).exists():
                shutil.rmtree(folder)


def _spawn_without_current_folder() -> None:
    """Have `multiprocessing` start Python without the current folder in front of the library.

    PYTHONSAFEPATH would also take their own folders from the scripts that the script may start.
    tests/test_search_path.py fails when the function moves (Python 3.11).
    """
    from multiprocessing import util

    module: Any = util  # typeshed leaves the function out
    original = module._args_from_interpreter_flags
    module._args_from_interpreter_flags = lambda: [*original(), "-P"]


def _script(arguments: list[str]) -> Callable[[], None]:
    """Return the call that runs the script as `python SCRIPT` or `python -m MODULE` would."""
    if not arguments:
        raise UsageError(f"Name the script to rehearse. {USAGE}")
    if arguments[0] == "-m":
        words, folder = arguments[1:], Path.cwd()
        name = words[0] if words else ""
        if not _is_module(name):
            raise UsageError(f"There is no module {name!r} to rehearse. {USAGE}")
        start = partial(runpy.run_module, name, run_name="__main__", alter_sys=True)
    else:
        words, script = arguments, Path(arguments[0])
        if not script.is_file():
            raise UsageError(f"There is no script {script} here ({Path.cwd()}). {USAGE}")
        folder = script.parent.resolve()
        start = partial(runpy.run_path, str(script), run_name="__main__")

    def run() -> None:
        _spawn_without_current_folder()
        sys.argv = words
        put_behind_library(str(folder))
        try:
            start()
        except SystemExit as error:
            if error.code not in (None, 0):  # with 0 the script has ended well
                raise

    return run


def _is_module(name: str) -> bool:
    before = [*sys.path]
    put_behind_library(str(Path.cwd()))
    try:
        return bool(name) and importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
    finally:
        sys.path[:] = before  # no later import of ours may find a file in the module's folder


def die_with_launcher() -> None:
    """Don't outlive the launcher. A process that no launcher started may outlive its shell."""
    if {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys():
        die_with_parent()


def rehearse_if_needed() -> bool:
    """Move this rank to the CPU when the machine has fewer GPUs than ranks.

    Must run before anything in the process asks CUDA or Accelerate for a device.

    Returns:
        Whether this is a rehearsal.

    Raises:
        Refused: the launcher was asked for more ranks than it started, or for a backend.
        UsageError: the shell holds variables of another launch, or the config has mistakes.
    """
    import torch

    from toolkit.measuring.launcher import check_launch

    check_launch(os.environ)
    requested.check_left_over(os.environ)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.accelerator.device_count()
    if gpus >= ranks:
        return False
    if local_rank() == 0:
        hidden = f" The {gpus} found stay hidden." if gpus else ""
        everywhere = int(os.environ.get("WORLD_SIZE", ranks))
        count = str(ranks) if everywhere == ranks else f"{ranks} of {everywhere}"
        noun = "rank" if everywhere == 1 else "ranks"
        say(
            f"rehearsal{_of_strategy()}: {count} {noun}, {gpus} GPUs. Training runs on the CPU."
            f"{hidden}"
        )
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "ACCELERATE_BYPASS_DEVICE_MAP": "true",  # DDP gets no device_ids
        "DS_ACCELERATOR": "cpu",
        # DeepSpeed's count of devices; without it each count starts a process (0.19, numa.py).
        "LOCAL_SIZE": str(ranks),
    }
    if (interface := _interface(ranks)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if requested.asks_for_deepspeed(os.environ):
        deepspeed_config.use_deepspeed_config(
            deepspeed_config.checked_deepspeed_config(), rehearsal=True
        )
    patch_torch()
    patch_accelerate()
    patch_transformers()
    patch_hub()
    if importlib.util.find_spec("deepspeed") is not None:
        patch_deepspeed()
        deepspeed_config.fit_configs_of_scripts()
    return True


def _interface(ranks: int) -> str | None:
    """Return the network interface by which the ranks reach each other; None if not known.

    Gloo takes that of the host's name, which often stands for an address of loopback
    (torch 2.13, ProcessGroupGloo.cpp).
    """
    if os.environ.get("WORLD_SIZE", "1") == str(ranks):
        return "lo" if "lo" in {name for _, name in socket.if_nameindex()} else None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            own = probe.getsockname()[0]  # nothing is sent: the address is that of the route
    except (OSError, KeyError, ValueError):
        return None
    addresses = psutil.net_if_addrs().items()
    return next(
        (name for name, all_of in addresses if own in {one.address for one in all_of}), None
    )


def _of_strategy() -> str:
    """Name the strategy that the launcher's config requests; empty if it has mistakes."""
    with contextlib.suppress(UsageError):
        strategy = requested.requested_strategy(os.environ)
        if requested.LAUNCHER in os.environ:
            return f" of {requested.shown(strategy)}"
    return ""


if __name__ == "__main__":
    main()
