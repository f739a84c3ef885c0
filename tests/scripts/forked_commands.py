"""Runs `toolkit` commands, one after the other, each a fork of this process.

It has imported what they import. A line of its stdin is a command; it answers with the exit status.
"""

import gc
import importlib
import json
import os
import sys

from toolkit import cli

IMPORTED = (
    "matplotlib.figure",
    "matplotlib.backends.backend_svg",
    "toolkit.comparing.report.diff.files",
    "toolkit.comparing.report.picture",
    "toolkit.comparing.report.write",
    "toolkit.comparing.run.schedule",
    "typer._adapters",
)


def become(request):
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = ["toolkit", *request["words"]]
    for number, path in ((1, request["stdout"]), (2, request["stderr"])):
        file = os.open(path, os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)


def main():
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        if (number := os.fork()) == 0:
            become(json.loads(line))
            cli.main()
            return
        _, status = os.waitpid(number, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


main()
