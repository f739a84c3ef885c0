"""Somebody's own script: a subclass of `ToolkitTrainer` with a loss of its own."""

import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from toolkit import ToolkitTrainer

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from small_models import tiny_llama


class LeavesCountOut(ToolkitTrainer):
    """Returns the model's mean, as examples for older releases do."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class AsksParentWithoutCount(ToolkitTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        return (loss, outputs) if return_outputs else loss


class PassesCountOn(ToolkitTrainer):
    def compute_loss(self, model, inputs, **kwargs):
        return super().compute_loss(model, inputs, **kwargs)


class DividesBySteps(ToolkitTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss = model(**inputs).loss
        loss /= self.current_gradient_accumulation_steps
        return loss


class Weighted(ToolkitTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return 0.7 * model(**inputs).loss


class Distilled(ToolkitTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        teacher = torch.zeros_like(outputs.logits).log_softmax(-1)
        student = outputs.logits.log_softmax(-1)
        further = torch.nn.functional.kl_div(
            student, teacher, log_target=True, reduction="batchmean"
        )
        return outputs.loss / self.current_gradient_accumulation_steps + further


class OfTransformers(Trainer):
    """The same without the toolkit."""

    compute_loss = LeavesCountOut.compute_loss


ADDING = (LeavesCountOut, AsksParentWithoutCount)
LEGITIMATE = (PassesCountOn, DividesBySteps, Weighted, Distilled)


def rows(count=16):
    """Rows of one length, of which each trains on another number of tokens."""
    made = []
    for number in range(count):
        ids = [(10 + number + at) % 60 for at in range(24)]
        ignored = 4 + number % 4 * 5
        made.append({"input_ids": ids, "labels": [-100] * ignored + ids[ignored:]})
    return made


def trainer_of(kind, folder, *, micro_batches=4):
    args = TrainingArguments(
        folder,
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=micro_batches,
        report_to="none",
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    return kind(model=tiny_llama(), args=args, train_dataset=rows())


if __name__ == "__main__":
    trainer_of(globals()[sys.argv[1]], sys.argv[2]).train()
