"""A loop or a Trainer that evaluates, sound but for the one fault that is named."""

import argparse
import random

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("fault")
parser.add_argument("--output_dir")
args = parser.parse_args()
fault = args.fault

if fault != "no_seed":
    set_seed(0)
shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=256, num_attention_heads=2, attention_dropout=0.1, **shape)
model = LlamaForCausalLM(config)


def row(number):
    ids = torch.arange(number, number + 24) % 250 + 3
    return {"input_ids": ids, "labels": ids.clone()}


rows = [row(number) for number in range(64)]
held_out = [row(number) for number in range(100, 112)]
if fault == "evaluates_training_rows":
    held_out = rows[:12]


class Rows(torch.utils.data.Dataset):
    """Rows of which a worker changes one token at random."""

    def __len__(self):
        return len(rows)

    def __getitem__(self, number):
        made = {name: tensor.clone() for name, tensor in rows[number].items()}
        made["input_ids"][0] = torch.randint(250, ()) + 3
        return made


class Rounding(TrainerCallback):
    """Evaluates what is served later, in bf16, and trains on with it."""

    def on_evaluate(self, args, state, control, model, **_):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())


class Own(Trainer):
    def log(self, logs, *rest):
        if fault == "logs_another_loss" and "eval_loss" in logs:
            logs["eval_loss"] = 0.9 * logs["eval_loss"]
        super().log(logs, *rest)


def train_by_trainer():
    arguments = TrainingArguments(
        args.output_dir,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_steps=6,
        logging_steps=1,
        report_to="none",
        eval_strategy="epoch",
        save_strategy="no",
        disable_tqdm=True,
    )
    rank, ranks = arguments.process_index, arguments.world_size
    trained = rows[rank::ranks] if fault == "split_by_hand" else rows
    callbacks = [Rounding()] if fault == "rounds_its_weights" else []
    Own(model, arguments, train_dataset=trained, eval_dataset=held_out, callbacks=callbacks).train()


def by_chance(batch):
    made = {name: torch.stack([row[name] for row in batch]) for name in batch[0]}
    hidden = torch.rand(made["labels"].shape) < 0.5
    return made | {"labels": made["labels"].masked_fill(hidden, -100)}


def train_by_loop():
    accelerator = Accelerator()
    order = [*range(64)]
    if fault == "order_of_its_own":
        random.Random().shuffle(order)
        broadcast_object_list(order)
    elif fault == "workers_alike":
        order = Rows()
    data = order if fault == "workers_alike" else [rows[number] for number in order]
    workers = {"num_workers": 2, "worker_init_fn": lambda _: set_seed(1)}
    loader = DataLoader(data, batch_size=2, **(workers if fault == "workers_alike" else {}))
    collated = {"collate_fn": by_chance} if fault == "labels_by_chance" else {}
    eval_loader = DataLoader(held_out, batch_size=2, **collated)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained, optimizer, loader, eval_loader = accelerator.prepare(
        model, optimizer, loader, eval_loader
    )
    inside = accelerator.unwrap_model(trained)
    mean = [parameter.detach().clone() for parameter in inside.parameters()]

    def evaluate():
        if fault == "seeds_anew":
            set_seed(0)
        if fault != "in_training_mode":
            trained.eval()
        if fault == "keeps_the_mean":  # in place of the weights
            with torch.no_grad():
                for parameter, held in zip(inside.parameters(), mean, strict=True):
                    parameter.lerp_(held, 0.5)
        for batch in eval_loader:
            with torch.no_grad():
                trained(**batch)
        if fault != "stays_in_evaluation_mode":
            trained.train()

    for _ in range(4):
        for step, batch in enumerate(loader):
            loss = trained(**batch).loss
            if fault == "noise_of_its_own":
                # The first difference is as small as one of rounding, and hides no later one.
                loss = loss * (1 + (9 if step else 1e-5) * torch.rand((), generator=noise))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                evaluate()
    accelerator.end_training()


noise = torch.Generator()
noise.seed()
trained_by = train_by_trainer if args.output_dir else train_by_loop
trained_by()
