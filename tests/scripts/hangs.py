"""Train under any config, and have rank 1 keep the others waiting after its second step.

accelerate launch --config_file ddp.yaml -m toolkit.rehearse tests/scripts/hangs.py FAULT FILE

FILE gets the time at which the fault begins.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

FAULTS = ("raises", "skips", "stopped", "slow", "uneven", "unused", "held")
STEPS = 4
FAULTY_STEP = 3
SECONDS_OF_WORK = 12


class Branching(LlamaForCausalLM):
    """Its last layer is left out where `short` is set."""

    short = False

    def forward(self, **inputs):
        kept = self.config.num_hidden_layers
        self.config.num_hidden_layers = kept - int(self.short)  # the layers that run
        try:
            return super().forward(**inputs)
        finally:
            self.config.num_hidden_layers = kept


def main(fault: str, file: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        pad_token_id=0,
    )
    accelerator = Accelerator()
    model = Branching(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.utils.data.DataLoader(torch.randint(128, (STEPS * 4, 8)), batch_size=2)
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    faulty = accelerator.process_index == 1
    for step, batch in enumerate(rows, 1):
        now = faulty and step == FAULTY_STEP
        if now:
            Path(file).write_text(str(time.time()))
        if now and fault == "raises":
            raise ValueError("rank 1 has had enough")
        if now and fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if now and fault == "held":
            ctypes.PyDLL(None).sleep(10_000)  # and no thread of Python's runs meanwhile
        if now and fault == "slow":
            time.sleep(10_000)
        if now and fault == "uneven":
            break
        if now and fault == "works":  # for longer than the others' limit
            for second in range(SECONDS_OF_WORK):
                Path(file).write_bytes(bytes(2**21 + second))
                time.sleep(1)
        accelerator.unwrap_model(model).short = now and fault == "unused"
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if not (now and fault == "skips"):
            accelerator.reduce(loss.detach())
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
