"""Prepare model and data once, in a process of its own, so that no rank waits for them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from toolkit.errors import UsageError
from toolkit.escaping import one_line, plain
from toolkit.launching.forking import COLD, SOCKET, Fork, start
from toolkit.launching.outcome import WARM_PROCESS_ENDED
from toolkit.launching.python import python_environment
from toolkit.launching.supervised import supervised
from toolkit.redaction import learn

PREPARE: Final = (sys.executable, "-m", "toolkit.training.preflight_process")

FLAGS: Final = "toolkit.training.flags"
"""The module that checks flags without torch."""

PROGRESS_BAR: Final = re.compile(r"\d+%\|")


def prepare_once(flags: Sequence[str], *, num_processes: int | None = None) -> dict[str, Any]:
    """Fill the caches for a launch with these flags of `toolkit.train`, and return the facts.

    They include the first rows of the data. A model without weights will do. Progress is shown on
    stderr: a bar on a terminal, else lines.

    Raises:
        SystemExit: 2 if flags, model or data are not usable, else 1; the reason is on stderr.
    """
    learn(flags)
    ranks = [] if num_processes is None else [f"--num_processes={num_processes}"]
    command = supervised([*PREPARE, "--preview", *ranks, *flags])
    done = subprocess.run(command, stdout=subprocess.PIPE, env=python_environment(), check=False)
    if (end := end_by_signal(done.returncode)) is not None:
        sys.stderr.write(f"toolkit: Preparing model and data {end}.\n")
    if done.returncode != 0:
        raise SystemExit(2 if done.returncode == 2 else 1)
    return cast("dict[str, Any]", json.loads(done.stdout.decode().splitlines()[-1]))


def prepare_launch(
    options: Sequence[str],
    flags: Sequence[str],
    *,
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Fill the caches for a launch, forked from a warm process where there is one.

    Args:
        options: Those of the worker: `--strategies=...` and the like.
        flags: Those of `toolkit.train`.
        environment: All variables of the worker.
        say: Gets each line of its messages.

    Returns:
        The facts of `toolkit.training.preflight`.

    Raises:
        UsageError: the data are not usable, the flags are not under at least one strategy, or the
            model is not under the first.
        PrepareError: the preparation failed for another reason.
    """
    if SOCKET in environment:  # the warm process takes longer to import than a look at the flags
        command = [sys.executable, "-m", FLAGS, *flags]
        looked = subprocess.run(command, stderr=subprocess.PIPE, env={**environment}, check=False)
        if looked.returncode == 2:
            raise UsageError(plain(looked.stderr.decode(errors="replace").strip().split("\n")[-1]))
    last = ""
    # Its messages are shown at once; the facts, on stdout, are read at its end.
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as answer, open(reader, errors="replace") as lines:
        try:
            process = start(
                supervised([*PREPARE, *options, *flags]),
                environment=environment,
                stdout=answer.fileno(),
                stderr=writer,
                on_cold=lambda reason: say(f"toolkit: {COLD}{reason}"),
            )
        finally:
            os.close(writer)
        try:
            for line in lines:
                if not line.strip() or PROGRESS_BAR.search(line):
                    continue
                # Printed one line late: the very last line may be the error that is raised below.
                if last:
                    say(last)
                last = line.strip()
        except BaseException:
            process.terminate()
            raise
        finally:
            code = process.wait()
        answer.seek(0)
        facts = answer.read()
    if isinstance(process, Fork) and process.has_lost_parent:
        say(f"{WARM_PROCESS_ENDED} They are started again.")
        return prepare_launch(options, flags, environment=environment, say=say)
    if code == 2:
        raise UsageError(plain(last) or "The flags of toolkit.train are not usable.")
    if last:
        say(last)
    if code != 0:
        end = end_by_signal(code) or f"ended with status {code}"
        raise PrepareError(f"Preparing model and data {end}.")
    return cast("dict[str, Any]", json.loads(facts))


class PrepareError(RuntimeError):
    """Model and data could not be prepared; the reason is on the screen."""


def end_by_signal(code: int) -> str | None:
    """Return how the supervisor's exit code says that a signal ended the preparation, if so."""
    if code - 128 not in signal.valid_signals():
        return None
    name = signal.Signals(code - 128).name
    return f"was ended by {name} (SIGKILL: by the system, short of RAM; SIGSEGV: a library crashed)"


def described(facts: Mapping[str, Any]) -> list[str]:
    """Return lines that describe the contents of the cache, with the first rows of the data."""
    data = facts["data"]
    unread = f" (not read: {', '.join(data['unread_columns'])})" if data["unread_columns"] else ""
    lines = [
        ("model", facts["model"]["name"]),
        ("data", f"{data['name']} ({data['format']})"),
        ("columns", ", ".join(data["columns"]) + unread),
    ]
    lines += _rows(data)
    if data["template"] is not None:
        lines.append(("chat template", data["template"]["name"]))
    lines += [("trained", data["loss_on"]), ("packing", data["packing"])]
    if (validation := facts["validation"]) is not None:
        lines.append(("validation", validation["name"]))
        lines += [(f"  {name}", text) for name, text in _rows(validation)]
        lines.append(("  cache", validation["folder"]))
    lines.append(("cache", data["folder"]))
    width = max(len(name) for name, _ in lines)
    table = [one_line(f"{name:<{width}}  {text}") for name, text in lines]
    return [*table, *_shown(facts["rows_shown"])]


def _shown(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the first rows as the model reads them, with marks around what is trained."""
    text = f"\nThe first {len(rows)} rows as the model reads them; ⟦these tokens⟧ are trained:\n"
    for row in rows:
        number, tokens, trained = row["row"], row["tokens"], row["trained_tokens"]
        text += f"\nrow {number} ({tokens:,} tokens, {trained:,} trained)\n"
        shown = "".join(f"⟦{p['text']}⟧" if p["trained"] else p["text"] for p in row["parts"])
        text += "".join(f"  {one_line(line)}\n" for line in shown.split("\n"))
    return re.sub("⟦[^⟧]*⟧", "\x1b[1;32m\\g<0>\x1b[0m", text).split("\n")


def _rows(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    packed = f" of {data['texts']:,} texts" if data["packing"] != "none" else ""
    keeps = f" (--max_length {data['longest_text']} keeps all)" if data["truncated"] else ""
    why = ", ".join(f"{count:,} {reason}" for reason, count in data["dropped_why"].items())
    share = data["supervised_tokens"] / data["tokens"]
    rows, stopping = data["rows"], data["rows_with_stop"]
    stop = f"{data['stop_token']} is trained in {stopping:,} of {rows:,} rows"
    if not stopping:
        stop = f"{data['stop_token'] or 'none'}: not trained, so the model does not learn to stop"
    return [
        ("rows", f"{rows:,}{packed}"),
        ("rows cut", f"{data['truncated']:,}{keeps}"),
        ("rows left out", f"{data['dropped']:,}{f': {why}' if why else ''}"),
        ("tokens", f"{data['tokens']:,}"),
        ("tokens trained", f"{data['supervised_tokens']:,} ({share:.0%})"),
        ("stop token", stop),
        ("longest row", f"{data['longest']:,} tokens"),
    ]
