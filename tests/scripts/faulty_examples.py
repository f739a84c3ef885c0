"""Two scripts in the way of official examples of 2026, each with the fault of its kind, or sound.

`counts_tokens` reads the micro-batches of a step by hand and divides by the tokens of all ranks, as
an example of Accelerate does, which also shifts its labels. `adapters` splits its rows with a seed
and then shuffles them without one, as an example of PEFT does.
"""

import argparse
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import (
    ByT5Tokenizer,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    get_constant_schedule,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["counts_tokens", "adapters"])
parser.add_argument("--sound", action="store_true")
parser.add_argument("--output_dir", default="")
args = parser.parse_args()

STEPS, MICRO_BATCHES, ROWS = 6, 2, 2

tokenizer = ByT5Tokenizer()
texts = [f"What is {at} plus 1? " + "It is so. " * (at % 5 + 1) for at in range(10, 58)]


def tiny():
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=2, **shape))


def counts_tokens():
    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES)
    set_seed(42)
    model = tiny()

    def collate(rows):
        batch = tokenizer(list(rows), padding=True, return_tensors="pt")
        ids, mask = batch["input_ids"], batch["attention_mask"]
        if args.sound:
            return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask > 0, -100)}
        labels = ids.where(mask > 0, -100)[:, 1:]
        return {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1], "labels": labels}

    loader = DataLoader(texts, collate_fn=collate, batch_size=ROWS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_constant_schedule(optimizer)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    model.train()
    batches = iter(loader)
    for _ in range(STEPS):
        of_step = [next(batches) for _ in range(MICRO_BATCHES)]
        tokens = sum(batch["labels"].ne(-100).sum() for batch in of_step)
        tokens = accelerator.gather(tokens).sum().item()
        for at, batch in enumerate(of_step):
            is_last = at == MICRO_BATCHES - 1
            alone = nullcontext() if is_last else accelerator.no_sync(model)
            with alone:
                loss = model(**batch, use_cache=False, num_items_in_batch=tokens).loss
                # Divided by the tokens of all ranks: the two means are taken back.
                accelerator.backward(loss * MICRO_BATCHES * accelerator.num_processes)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.end_training()


def adapters():
    torch.manual_seed(0)
    model = tiny()
    lora = LoraConfig(
        r=4, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], init_lora_weights="olora"
    )
    model = get_peft_model(model, lora)

    def encode(row):
        ids = tokenizer(row["text"])["input_ids"]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}

    parts = Dataset.from_list([{"text": text} for text in texts])
    parts = parts.train_test_split(test_size=8, shuffle=True, seed=42)
    train = parts["train"].shuffle(seed=0 if args.sound else None).map(encode)
    trainer = Trainer(
        model,
        TrainingArguments(
            args.output_dir,
            per_device_train_batch_size=2,
            max_steps=STEPS,
            learning_rate=3e-4,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=3,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=train,
        eval_dataset=parts["test"].map(encode),
        data_collator=DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8, padding=True),
    )
    trainer.train()
    trainer.save_model(args.output_dir)


{"counts_tokens": counts_tokens, "adapters": adapters}[args.kind]()
