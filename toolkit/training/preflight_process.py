"""`python -m toolkit.training.preflight_process FLAGS`: the process that prepares a launch.

Takes the flags of `toolkit.train`, the `--num_processes` of the launch, and for a comparison all
its `--strategies`, which get the same flags. Flags are checked before torch is imported. Prints one
line of JSON on stdout, the facts, and progress on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import UsageError, file_sentence, is_full_disk
from toolkit.launching.ranks import quiet
from toolkit.redaction import redact_output
from toolkit.training.flags import checked_flags


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num_processes", "--num-processes", type=int)
    parser.add_argument("--strategies", default="")
    parser.add_argument("--ranks", default="")
    parser.add_argument("--tensor_size", type=int)
    parser.add_argument("--rehearsal", action="store_true")
    parser.add_argument("--preview", action="store_true")
    parser.add_argument("--output", type=Path)
    ours, flags = parser.parse_known_args(argv)
    redact_output()
    try:
        # Output of libraries must not mix with the one line on stdout.
        with contextlib.redirect_stdout(sys.stderr):
            facts = _prepared(ours, flags)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except Exception as error:
        if not is_full_disk(error):
            raise
        sys.stderr.write(f"{file_sentence(error)}\n")
        return 1
    sys.stdout.write(json.dumps(facts) + "\n")
    return 0


def _prepared(ours: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    own = checked_flags(flags)
    quiet()  # before transformers imports peft and bitsandbytes, which warns on some CPUs
    from transformers.utils.logging import disable_progress_bar

    from toolkit.training.preflight import preflight
    from toolkit.training.request import check_output_folder

    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    logging.getLogger("toolkit").setLevel(logging.INFO)
    if not sys.stderr.isatty():
        disable_progress_bar()  # without a terminal, each update would be a line
    if ours.output is not None:
        check_output_folder(ours.output, own.method, trackers=(), more=["stdout.log"])
    return preflight(
        flags,
        num_processes=ours.num_processes,
        strategies=[name for name in ours.strategies.split(",") if name],
        ranks=_read_ranks(ours.ranks),
        rehearsal=ours.rehearsal,
        tensor_size=ours.tensor_size,
        preview=ours.preview,
    )


def _read_ranks(text: str) -> dict[str, list[int]]:
    """Return the numbers in `ddp:2,ddp:4` by strategy."""
    ranks: dict[str, list[int]] = {}
    for name, _, count in (pair.partition(":") for pair in text.split(",") if pair):
        ranks.setdefault(name, []).append(int(count))
    return ranks


if __name__ == "__main__":
    sys.exit(main())
