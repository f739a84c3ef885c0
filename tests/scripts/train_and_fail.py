"""`toolkit.train`, in which one rank comes to grief: after its third step, or before the first."""

import os
import signal
import sys
import time

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


def count_for_ever(*args, **options):
    if os.environ["RANK"] == "1":
        time.sleep(10_000)
    return count_steps(*args, **options)


Recorder.step_done = fail_after_three
if how == "prepare":
    from toolkit.training import job

    count_steps, job.count_steps = job.count_steps, count_for_ever
main()
