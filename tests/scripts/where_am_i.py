"""Write down what a script can see of how it was started, and numbers drawn by chance."""

import json
import logging
import os
import random
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import torch

NOTED = {
    "argv": sys.argv,
    "shown_as": Path("/proc/self/cmdline").read_text().replace("\0", " ").split()[:4],
    "path": sys.path,
    "environment": dict(os.environ),
    "folder": str(Path.cwd()),
    "flags": str(sys.flags),
    "main": str(sys.modules["__main__"].__dict__.get("__file__")),
    "name": __name__,
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
    "python_threads": len(threading.enumerate()),
    "process_group": torch.distributed.is_initialized(),
    "grad_mode": torch.is_grad_enabled(),
    "dtype": str(torch.get_default_dtype()),
    "log_level": logging.root.level,
    "log_handlers": [type(handler).__name__ for handler in logging.root.handlers],
    "warnings": len(warnings.filters),
    "signals": {
        name: str(signal.getsignal(getattr(signal, name)))
        for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGCHLD", "SIGPIPE", "SIGXFSZ")
    },
    "leads_its_session": os.getsid(0) == os.getpid(),
    "files": sorted(
        os.readlink(f"/proc/self/fd/{name}").partition(":")[0]
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    ),
    "stdin": os.readlink("/proc/self/fd/0"),
    "buffering": [sys.stdout.line_buffering, sys.stdout.write_through, sys.stdout.encoding],
    "umask": os.umask(0o22),
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
    "cuda": torch.cuda.is_available(),
}

DRAWN = [random.random(), float(np.random.rand()), float(torch.rand(1, dtype=torch.float64))]

file = Path(f"{sys.argv[1]}-{os.environ.get('RANK', '0')}")
file.write_text(json.dumps({"noted": NOTED, "drawn": DRAWN}))
