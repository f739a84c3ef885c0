"""A plain loop over an Accelerator, sound but for the one fault that is named."""

import argparse
import random
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import (
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    get_linear_schedule_with_warmup,
)

parser = argparse.ArgumentParser()
parser.add_argument("fault")
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--ragged", action="store_true")
parser.add_argument("--precision")
args = parser.parse_args()
fault = args.fault

IGNORED, LENGTH = -100, 48
accelerator = Accelerator(
    gradient_accumulation_steps=args.accumulation, mixed_precision=args.precision
)
set_seed(0)
tokenizer = ByT5Tokenizer()
tokenizer.add_special_tokens({"bos_token": "<s>"})
shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
if fault == "evaluation_mode":
    shape["attention_dropout"] = 0.1
config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=2, **shape)
# With a cache, transformers 5.24 does not look for texts that are packed.
config.use_cache = fault == "packed_beside_a_cache"
model = LlamaForCausalLM(config)
model.train()


def row(number):
    """Return a prompt, its answer and the end, as the model is given them."""
    prompt = tokenizer(f"What is {number} plus 1? ", add_special_tokens=False)["input_ids"]
    answer = tokenizer(
        "It is " + "so " * (number % 7 if args.ragged else 3), add_special_tokens=False
    )
    answer = [*answer["input_ids"], tokenizer.eos_token_id]
    begin = [tokenizer.bos_token_id] * (2 if fault == "begins_twice" else 1)
    ids = begin + prompt + answer
    prompted = len(begin) + len(prompt)
    labels = [IGNORED] * prompted + answer
    if fault == "nothing_trained" or (fault == "some_rows_empty" and number % 4 == 0):
        labels = [IGNORED] * len(ids)
    if fault == "stop_left_out":
        labels[-1] = IGNORED
    if fault == "shifted_by_the_script":
        labels = [*labels[1:], IGNORED]
    mask = [1] * len(ids)
    if fault == "mask_by_value":
        mask = [int(token != ids[5]) for token in ids]
    padding = LENGTH - len(ids)
    padded = [tokenizer.eos_token_id if fault == "padding_is_eos" else tokenizer.pad_token_id]
    filled = labels + [tokenizer.pad_token_id if fault == "padding_trained" else IGNORED] * padding
    if fault == "padding_is_eos":
        filled = [IGNORED if label == tokenizer.eos_token_id else label for label in filled]
    if fault.startswith("packed"):  # each row two texts
        taught = torch.tensor(labels + labels)
        taught[len(ids)] = IGNORED
        packed = {"input_ids": torch.tensor(ids + ids), "labels": taught}
        packed["position_ids"] = torch.tensor([*range(len(ids)), *range(len(ids))])
        attended = {"attention_mask": torch.ones(2 * len(ids), dtype=torch.long)}
        return packed | (attended if fault == "packed_texts_leak" else {})
    return {
        "input_ids": torch.tensor(ids + padded * padding),
        "labels": torch.tensor(filled),
        "attention_mask": torch.tensor(mask + [0] * padding),
    }


numbers = list(range(10, 74))  # prompts of one length
if fault == "shuffled_apart":
    random.Random().shuffle(numbers)
if fault == "split_by_hand":
    numbers = numbers[accelerator.process_index :: accelerator.num_processes]
loader = DataLoader(
    [row(number) for number in numbers], batch_size=2, shuffle=fault != "split_by_hand"
)
if fault == "samplers_seeded_apart":
    ranks, at = accelerator.num_processes, accelerator.process_index
    sampler = DistributedSampler(loader.dataset, ranks, at, seed=at)
    loader = DataLoader(loader.dataset, batch_size=2, sampler=sampler)
if fault == "norms_alone_on_joined_rows":
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    loader.collate_fn = lambda rows: {
        name: torch.cat([row[name][row["attention_mask"].bool()] for row in rows])[None]
        for name in rows[0]
    }
if fault == "size_0":

    class Empty(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.empty = inner, torch.nn.Parameter(torch.zeros(0))

        def forward(self, hidden):
            return self.inner(hidden) + self.empty.sum()

    model.model.layers[0].mlp = Empty(model.model.layers[0].mlp)

if fault == "one_order":

    class Stream(torch.utils.data.IterableDataset):
        """Rows in an order that is drawn anew in each pass, from the same seed."""

        def __iter__(self):
            yield from map(row, random.Random(0).sample(numbers, len(numbers)))

    loader = DataLoader(Stream(), batch_size=2)
if fault == "frozen_when_prepared":
    model.requires_grad_(False)
if fault == "new_tokens_frozen":
    weights = model.state_dict()
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights).train()
    model.resize_token_embeddings(len(tokenizer) + 8)
    model.model.embed_tokens.requires_grad_(False)
if fault == "frozen_written":
    model.model.norm.weight.requires_grad_(False)
trained = [p for p in model.parameters() if p.requires_grad] or list(model.parameters())
if fault == "left_out_of_the_optimizer":
    trained = [p for name, p in model.named_parameters() if "layers.1" not in name]
if fault == "optimizer_of_another_model":
    trained = list(LlamaForCausalLM(config).parameters())
optimizer = torch.optim.AdamW(trained, lr=1e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, 0, 12)
if fault == "not_prepared":
    loader = accelerator.prepare(loader)
elif fault in ("every_rank_the_same_rows", "samplers_seeded_apart"):
    set_seed(1)
    model, optimizer = accelerator.prepare(model, optimizer)
else:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if fault == "schedule_for_each_process":
    scheduler = accelerator.prepare(scheduler)
if fault == "evaluation_mode":
    model.eval()

epochs = 2 if fault in ("one_order", "two_epochs") else 1
for batch in (batch for _ in range(epochs) for batch in loader):
    with accelerator.accumulate(model):
        called = accelerator.unwrap_model(model) if fault == "called_past_its_wrapper" else model
        alone = accelerator.no_sync(model) if fault == "not_reduced" else nullcontext()
        with alone:
            loss = called(**batch).loss
        if fault == "divided_twice":
            loss = loss / args.accumulation
        if fault == "times_the_ranks":
            loss = loss * accelerator.num_processes
        if fault == "other_loss_on_one_rank" and accelerator.process_index:
            loss = loss * 3
        accelerator.backward(loss)
        if accelerator.sync_gradients and (
            fault != "clips_on_one_rank" or accelerator.is_main_process
        ):
            accelerator.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        if fault == "frozen_written":
            with torch.no_grad():
                accelerator.unwrap_model(model).model.norm.weight.mul_(0.99)
        by_micro_batch = fault == "schedule_by_micro_batch"
        if accelerator.sync_gradients or by_micro_batch:
            scheduler.step()
        if fault != "gradients_kept":
            optimizer.zero_grad()
accelerator.end_training()
