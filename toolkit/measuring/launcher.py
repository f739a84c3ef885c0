"""Compare what `accelerate launch` was asked for with the one process that it started.

Accelerate 1.15 (commands/launch.py) starts a single plain process, without a word, for `--cpu`
beside any config, and for `--num_processes` without `--multi_gpu` or a config for several GPUs on a
machine with fewer than two. Nothing in the process's environment tells of the request: it stands
only in the command line of its parent.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any, Final

import psutil

from toolkit.configs.check.command import refuse_errors
from toolkit.launching.forking import FORK_SERVER
from toolkit.measuring.attestation import Refused

RANKS: Final = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""The variables of which torch's launcher or one of MPI sets one for each of its ranks."""

BACKENDS: Final = {
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
}
"""Accelerate's flags for a backend, with the `distributed_type` of a config that asks for it."""


def check_launch(environ: Mapping[str, str]) -> None:
    """Refuse to go on alone where the launcher was asked for several ranks or for a backend.

    Args:
        environ: Of the rank.

    Raises:
        Refused: names both, and what to change.
    """
    # A launcher of several ranks obeys its command line.
    if any(name in environ for name in RANKS):
        return
    words = words_of_launch()
    if words is not None and (refusal := refusal_of(words)) is not None:
        raise Refused(refusal)


def check_config_file() -> None:
    """Refuse what is wrong in the launcher's config file, where its command line names one.

    Raises:
        UsageError: as `refuse_errors`.
    """
    words = words_of_launch()
    arguments = None if words is None else _parsed(words)
    if arguments is not None and arguments.config_file and Path(arguments.config_file).is_file():
        # The variables are those that the launcher made of the file.
        refuse_errors([Path(arguments.config_file)], {}, num_processes=arguments.num_processes)


def words_of_launch() -> Sequence[str] | None:
    """Return the arguments of the `accelerate launch` that started this rank; None: not known.

    They stand in the command of the parent, or of the next above where a parent forks ranks.
    """
    with suppress(psutil.Error, OSError):
        for above in psutil.Process().parents():
            command = above.cmdline()
            if FORK_SERVER not in command:
                return launcher_words(command)
    return None


def launcher_words(command: Sequence[str]) -> Sequence[str] | None:
    """Return the arguments of `accelerate launch` in a process's command; None for another one."""
    # The interpreter, which may have options, stands in front of it.
    for at, word in enumerate(command):
        name, following = Path(word).name.removesuffix(".exe"), command[at + 1 : at + 2]
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            return command[at + 1 :]
        if name in ("accelerate", "accelerate.commands.accelerate_cli") and following == ["launch"]:
            return command[at + 2 :]
    return None


def refusal_of(words: Sequence[str]) -> str | None:
    """Return a sentence if these arguments ask for more than one plain process; else None.

    Args:
        words: Arguments of `accelerate launch`, its script's included.
    """
    if (arguments := _parsed(words)) is None:
        return None
    config = _config_of(arguments)
    kind = str(getattr(config, "distributed_type", ""))
    ranks = arguments.num_processes
    if ranks is None:
        ranks = getattr(config, "num_processes", None)
    if arguments.tpu or "XLA" in kind:  # started by torch_xla, in the launcher itself
        return None
    flags = [name for name in BACKENDS if getattr(arguments, name)]
    # A flag takes precedence over the config.
    names = [BACKENDS[flags[0]]] if flags else [] if arguments.multi_gpu else BACKENDS.values()
    backend = next((name for name in names if flags or name in kind), None)
    if backend is None and (ranks or 1) <= 1:
        return None
    request = f"{ranks} rank{'' if ranks == 1 else 's'}" if ranks else "ranks"
    request += f" of {backend}" if backend else ""
    return (
        f"accelerate launch was asked for {request} ({_sources(arguments)}), and started one "
        f"process without a backend. {_remedy(arguments)}"
    )


def _parsed(words: Sequence[str]) -> Any | None:
    """Return the arguments as Accelerate itself reads them; None where this version does not."""
    from accelerate.commands.launch import launch_command_parser

    with suppress(SystemExit), redirect_stderr(io.StringIO()):
        return launch_command_parser().parse_args([*words])
    return None


def _config_of(arguments: Any) -> Any | None:
    """Return the launcher's config file, read; None without one, or where it is gone."""
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    file = arguments.config_file
    if file is None and (arguments.cpu or not Path(default_config_file).is_file()):
        return None
    with suppress(OSError, ValueError):
        return load_config_from_file(file)
    return None


def _sources(arguments: Any) -> str:
    """Name the flags and the file that a launcher's request may stand in."""
    flags = [f"--num_processes {arguments.num_processes}"] if arguments.num_processes else []
    flags += [f"--{name}" for name in BACKENDS if getattr(arguments, name)]
    flags += [f"--config_file {arguments.config_file}"] if arguments.config_file else []
    return " ".join(flags) or "by its default config file"


def _remedy(arguments: Any) -> str:
    if arguments.cpu:
        return (
            "With --cpu it heeds no config and no number of processes. Leave --cpu out: with fewer "
            "GPUs than ranks, the toolkit runs all ranks on the CPU anyway."
        )
    return (
        "Without a config for several ranks it starts one process where it finds fewer than two "
        "GPUs. Pass --config_file with a file of toolkit configs path ddp or of another strategy, "
        "or --num_processes 1."
    )
