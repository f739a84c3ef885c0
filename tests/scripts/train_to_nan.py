"""`toolkit.train`, in which the loss of rank 1 is not a number from the fifth step on."""

import math
import os

from transformers import LlamaForCausalLM

from toolkit.train import main

BAD_STEP = 5
forward = LlamaForCausalLM.forward
calls = 0


def faulty(self, *args, **kwargs):
    global calls
    output = forward(self, *args, **kwargs)
    calls += self.training
    if os.environ["RANK"] == "1" and calls >= BAD_STEP:
        output.loss = output.loss * math.nan
    return output


LlamaForCausalLM.forward = faulty
main()
