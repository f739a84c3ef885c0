"""What a whole optimizer step asks of the device, in both engines: nothing, where it needn't."""

import traceback

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from small_models import tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback, TrainingArguments

from toolkit.data.sampling_order import Collator
from toolkit.data.tokens import row_features
from toolkit.measuring.attestation import Requested
from toolkit.measuring.recorder import Recorder
from toolkit.records.evidence import IGNORED
from toolkit.strategies import STRATEGIES
from toolkit.training.arguments import OUR_DEFAULTS
from toolkit.training.loop import train_loop
from toolkit.training.observers import Observer
from toolkit.training.speed import Speed
from toolkit.training.speed_arguments import SpeedArguments
from toolkit.training.trainer import ToolkitTrainer

ANSWERS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"}
"""Operations that hand the host what only the device knows; on a GPU each waits for it."""

NOT_OF_THE_DEVICE = (
    "torch/optim/",  # counts its steps in tensors on the CPU, wherever it computes
    "lean_batches.py",  # a batch is made on the CPU
    "data/order.py",
    "torch/utils/data/",
    "measuring/heartbeat.py",  # reads the step before, of which a copy lies in the host's memory
)
STEPS, FIRST = 6, 3
"""The first step is attested, the second carries the ledgers."""


class Waits(TorchDispatchMode):
    """Keeps who asked, the innermost places first."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ANSWERS:
            places = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_stack()][:-1]
            if not any(part in place for place in places for part in NOT_OF_THE_DEVICE):
                self.asked.append(places[::-1])
        return func(*args, **(kwargs or {}))


class Watched(Observer):
    def __init__(self):
        self.mode = Waits()

    def step_done(self, step):
        if step == FIRST - 1:
            self.mode.__enter__()
        elif step == STEPS - 1:
            self.mode.__exit__(None, None, None)


@pytest.fixture
def alone():
    """No state of Accelerate's from a test before, and none left behind."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def rows(packed):
    numbers = torch.Generator().manual_seed(1)
    columns = {"input_ids": [], "labels": [], "sample_id": [], "position_ids": []}
    for number in range(4 * STEPS):
        length = 8 + number % 5
        ids = torch.randint(60, (length,), generator=numbers).tolist()
        columns["input_ids"].append(ids)
        columns["labels"].append([IGNORED, *ids[1:]])
        columns["sample_id"].append(number)
        columns["position_ids"].append([*range(4), *range(length - 4)])
    if not packed:
        del columns["position_ids"]
    return Dataset.from_dict(columns, features=row_features(positions=packed))


def arguments(folder):
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **OUR_DEFAULTS
        | {
            "report_to": [],
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "logging_steps": 100,
        },
    )


def recorder():
    return Recorder(Requested(strategy=STRATEGIES["single"], num_processes=1), rehearsal=True)


@pytest.mark.parametrize("engine", ["trainer", "loop"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_tuned_step_waits_for_nothing(engine, packed, alone, tmp_path):
    model, speed, watched = tiny_llama(), Speed(SpeedArguments(tuned=True)), Watched()
    speed.apply(model)
    collate = speed.collating(Collator(pad_token_id=0))
    args = arguments(tmp_path)
    if engine == "loop":
        told = recorder()
        train_loop(
            *(model, args, rows(packed), collate),
            recorder=told,
            scheduled_steps=STEPS,
            observers=[speed, watched],
        )
        told.close()
    else:
        trainer = ToolkitTrainer(
            model=model,
            args=args,
            train_dataset=rows(packed),
            data_collator=collate,
            observers=[speed, watched],
        )
        trainer.train()
    assert watched.mode.asked == []


def test_a_stock_step_waits_and_the_test_can_tell(alone, tmp_path):
    """transformers looks at the mask in every forward, and for a loss that is not finite."""
    watched = Watched()

    class AtSteps(TrainerCallback):
        def on_step_end(self, args, state, *_, **__):
            watched.step_done(state.global_step)

    args = arguments(tmp_path)
    args.logging_nan_inf_filter = True  # transformers' own default
    plain = Collator(pad_token_id=0)

    def collate(batch):
        made = plain(batch)
        del made["sample_id"]
        return made

    trainer = Trainer(
        model=tiny_llama(), args=args, train_dataset=rows(False), data_collator=collate
    )
    trainer.add_callback(AtSteps())
    trainer.train()
    told = ["\n".join(places) for places in watched.mode.asked]
    assert any("masking_utils.py" in places for places in told)
    assert any("trainer.py" in places and "masking_utils" not in places for places in told)
