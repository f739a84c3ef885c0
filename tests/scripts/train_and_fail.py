"""`toolkit.train`, in which one rank comes to grief after its third step."""

import os
import signal
import sys

import torch

from toolkit.measuring.recorder import Recorder
from toolkit.train import main

how = sys.argv.pop(1)
step_done = Recorder.step_done


def fail_after_three(self, **values):
    step_done(self, **values)
    if len(self._steps) == 3 and os.environ["RANK"] == "1":
        if how == "raise":
            raise ArithmeticError("the third step went wrong on rank 1")
        if how == "memory":
            torch.empty(2**52)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "leave":
            os._exit(0)


Recorder.step_done = fail_after_three
main()
