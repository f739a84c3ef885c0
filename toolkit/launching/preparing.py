"""`toolkit prepare`: prepare model and data once, so that no rank waits for them in a launch."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from toolkit.launching.python import python_environment
from toolkit.launching.supervised import supervised
from toolkit.redaction import learn

WORKER = "toolkit.training.prepare"


def prepare_once(flags: Sequence[str], *, num_processes: int | None = None) -> dict[str, Any]:
    """Fill the caches for a launch with these flags of `toolkit.train`, and return the facts.

    Progress is shown on stderr: a bar on a terminal, else lines.

    Raises:
        SystemExit: 2 if flags, model or data are not usable, else 1; the reason is on stderr.
    """
    learn(flags)
    ranks = [] if num_processes is None else [f"--num_processes={num_processes}"]
    command = supervised([sys.executable, "-m", WORKER, *ranks, *flags])
    done = subprocess.run(command, stdout=subprocess.PIPE, env=python_environment(), check=False)
    if (end := end_by_signal(done.returncode)) is not None:
        sys.stderr.write(f"toolkit: Preparing model and data {end}.\n")
    if done.returncode != 0:
        raise SystemExit(2 if done.returncode == 2 else 1)
    return cast("dict[str, Any]", json.loads(done.stdout.decode().splitlines()[-1]))


def end_by_signal(code: int) -> str | None:
    """Return how the supervisor's exit code says that a signal ended the preparation, if so."""
    if code - 128 not in signal.valid_signals():
        return None
    name = signal.Signals(code - 128).name
    return f"was ended by {name} (SIGKILL: by the system, short of RAM; SIGSEGV: a library crashed)"


def described(facts: Mapping[str, Any]) -> list[str]:
    """Return lines that describe the contents of the cache."""
    data = facts["data"]
    lines = [("model", facts["model"]["name"]), ("data", f"{data['name']} ({data['format']})")]
    lines += _rows(data)
    if data["template"] is not None:
        lines.append(("chat template", data["template"]["name"]))
    lines += [("learned", data["loss_on"]), ("packing", data["packing"])]
    if (validation := facts["validation"]) is not None:
        lines.append(("validation", validation["name"]))
        lines += [(f"  {name}", text) for name, text in _rows(validation)]
        lines.append(("  cache", validation["folder"]))
    lines.append(("cache", data["folder"]))
    width = max(len(name) for name, _ in lines)
    return [f"{name:<{width}}  {text}" for name, text in lines]


def _rows(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    packed = f" of {data['texts']:,} texts" if data["packing"] != "none" else ""
    keeps = f"--max_length {data['longest_text']} keeps all"
    cut = f", {data['truncated']:,} cut to fit ({keeps})" if data["truncated"] else ""
    share = data["supervised_tokens"] / data["tokens"]
    return [
        ("rows", f"{data['rows']:,}{packed}{cut}"),
        ("rows left out", f"{data['dropped']:,} without a token to train on"),
        ("tokens", f"{data['tokens']:,}"),
        ("tokens learned", f"{data['supervised_tokens']:,} ({share:.0%})"),
        ("longest row", f"{data['longest']:,} tokens"),
    ]
