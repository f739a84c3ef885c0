"""A Trainer of a user's own, sound but for the one fault that is named."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("fault")
parser.add_argument("output_dir")
args = parser.parse_args()
fault = args.fault

set_seed(0)
shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=2, **shape))


class Own(Trainer):
    """Computes its loss as examples for older releases do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if fault in ("own", "logs_another_loss"):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # The stock Trainer multiplies by the ranks, whose gradients DDP averages.
        counted = {"num_items_in_batch": num_items_in_batch} if fault == "divided_by_all" else {}
        outputs = model(**inputs, **counted)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def log(self, logs, *rest):
        if fault == "logs_another_loss" and "loss" in logs:
            logs["loss"] *= 0.5
        super().log(logs, *rest)


def row(number):
    length = 8 + 5 * (number % 4)
    ids = torch.arange(number, number + 36) % 60 + 2
    labels = ids.clone()
    labels[length:] = -100
    mask = (torch.arange(36) < length).long()
    return {"input_ids": ids * mask, "labels": labels, "attention_mask": mask}


arguments = TrainingArguments(
    args.output_dir,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=6,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    label_smoothing_factor=0.1 if fault == "smoothed" else 0.0,
)
kind = Trainer if fault in ("sound", "smoothed") else Own  # also for a log of its own
kind(model, arguments, train_dataset=[row(number) for number in range(64)]).train()
