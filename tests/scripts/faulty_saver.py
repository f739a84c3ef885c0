"""A loop or a Trainer that saves, sound but for the one fault that is named."""

import argparse
import copy
import json
from contextlib import suppress
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import (
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

parser = argparse.ArgumentParser()
parser.add_argument("fault")
parser.add_argument("output_dir", type=Path)
parser.add_argument("--by", choices=["loop", "trainer"], default="loop")
parser.add_argument("--lora", action="store_true")
parser.add_argument("--tied", action="store_true")
parser.add_argument("--from", dest="resume_from", type=Path)
args = parser.parse_args()
fault = args.fault

set_seed(0)
tokenizer = ByT5Tokenizer()
shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
config = LlamaConfig(
    vocab_size=len(tokenizer), num_attention_heads=2, tie_word_embeddings=args.tied, **shape
)


def made():
    model = LlamaForCausalLM(config)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        whole = ["lm_head"] if fault == "whole_head" else None
        model = get_peft_model(
            model, LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=whole)
        )
        if fault == "head_beside_the_adapter":
            model.base_model.model.lm_head.weight.requires_grad_(True)
    return model


def row(number):
    ids = torch.arange(number, number + 24) % 200 + 3
    return {"input_ids": ids, "labels": ids.clone()}


rows = [row(number) for number in range(64)]


class Count:
    """Saves how often it was asked, and does not take it back."""

    asked = 0

    def state_dict(self):
        self.asked += 1
        return {"asked": self.asked * 7 + bool(args.resume_from)}

    def load_state_dict(self, state):
        pass


def train_by_trainer():
    arguments = TrainingArguments(
        args.output_dir,
        per_device_train_batch_size=2,
        max_steps=8,
        logging_steps=1,
        report_to="none",
        save_only_model=fault == "weights_alone",
        save_strategy="no" if fault == "no_checkpoint" else "steps",
        disable_tqdm=True,
    )
    kind = Trainer
    if fault == "resumes_without_moments":

        class kind(Trainer):
            def _load_optimizer_and_scheduler(self, checkpoint):
                pass

    trainer = kind(made(), arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(args.output_dir / "final"))


def train_by_loop():
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model = made()
    untrained = copy.deepcopy(model) if fault == "another_model" else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, 24)
    loader = DataLoader(rows, batch_size=2, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if fault == "forgets_its_count":
        accelerator.register_for_checkpointing(Count())
    final = args.output_dir / "final"
    if fault == "a_file_in_the_way" and accelerator.is_main_process:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        final.write_text("a note")
    done = 0
    if args.resume_from:
        if fault == "loads_the_model_alone":
            model.load_state_dict(
                {
                    f"module.{name}": tensor
                    for name, tensor in torch.load(args.resume_from / "own.bin").items()
                }
            )
        elif fault == "takes_what_it_can_read":
            model.module.load_state_dict(load_file(args.resume_from / "model.safetensors"))
            with suppress(RuntimeError, FileNotFoundError):
                optimizer.load_state_dict(torch.load(args.resume_from / "optimizer.bin"))
                scheduler.load_state_dict(torch.load(args.resume_from / "scheduler.bin"))
        else:
            accelerator.load_state(args.resume_from)
        done = (
            1
            if fault == "takes_what_it_can_read"
            else json.loads((args.resume_from / "step.json").read_text())["step"]
        )
        if fault == "rate_begins_anew":
            for group in optimizer.param_groups:
                group["lr"] = 1e-3
        if fault != "reads_the_first_rows_again":
            loader = accelerator.skip_first_batches(loader, done)

    def save(folder, **options):
        unwrapped = accelerator.unwrap_model(model)
        if fault == "nothing":
            return
        if fault == "another_model":
            if accelerator.is_main_process:
                untrained.save_pretrained(folder)
            return
        if fault in ("past_the_gathering", "past_the_gathering_by_torch"):
            tensors = unwrapped.state_dict()
            if fault == "past_the_gathering_by_torch":
                folder.mkdir(parents=True, exist_ok=True)
                if accelerator.is_main_process:
                    torch.save({"model": tensors}, folder / "model.pt")
            else:
                unwrapped.save_pretrained(
                    folder, is_main_process=accelerator.is_main_process, state_dict=tensors
                )
            return
        if fault in ("merged", "merged_twice_as_much", "unloaded"):
            if accelerator.is_main_process:
                copied = copy.deepcopy(unwrapped)
                if fault == "merged_twice_as_much":
                    for module in copied.modules():
                        if hasattr(module, "lora_A"):
                            module.scaling["default"] *= 2
                plain = copied.unload() if fault == "unloaded" else copied.merge_and_unload()
                plain.save_pretrained(folder)
            return
        tensors = accelerator.get_state_dict(model)
        if fault == "one_slice":
            tensors = {
                name: tensor[: len(tensor) // 2] if "lora_" in name else tensor
                for name, tensor in tensors.items()
            }
        if fault == "in_bf16":
            unwrapped = copy.deepcopy(unwrapped).bfloat16()
            tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        if fault == "untied_in_the_config":
            unwrapped.config.tie_word_embeddings = not args.tied
        if fault == "layer_left_out":
            tensors = {name: one for name, one in tensors.items() if "layers.1" not in name}
        if fault == "by_save_file":
            folder.mkdir(parents=True, exist_ok=True)
            if accelerator.is_main_process:
                save_file(
                    {name: one.clone() for name, one in tensors.items()},
                    folder / "model.safetensors",
                )
                unwrapped.config.save_pretrained(folder)
            return
        unwrapped.save_pretrained(
            folder,
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=tensors,
        )
        if accelerator.is_main_process:
            tokenizer.save_pretrained(folder)

    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        done += 1
        if done == 1 and fault == "too_early":
            save(final)
        if done == 1 and not args.resume_from:
            folder = args.output_dir / "step_1"
            accelerator.save_state(folder)
            if accelerator.is_main_process:
                (folder / "step.json").write_text(json.dumps({"step": done}))
                if fault == "loads_the_model_alone":
                    torch.save(accelerator.unwrap_model(model).state_dict(), folder / "own.bin")
            accelerator.wait_for_everyone()
    if fault != "too_early":
        save(final)
    accelerator.end_training()


train_by_trainer() if args.by == "trainer" else train_by_loop()
