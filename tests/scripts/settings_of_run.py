"""A stock Trainer that prints the settings it trains with. It knows nothing of the toolkit."""

import json
from enum import Enum

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
rows = [{"input_ids": (ids := torch.randint(0, 512, (16,))), "labels": ids} for _ in range(64)]
trainer = Trainer(model, args, train_dataset=rows)
trainer.train()

state, engine = trainer.accelerator.state, trainer.model_wrapped
found = {"distributed_type": state.distributed_type.value, "num_processes": state.num_processes}
found["mixed precision"] = state.mixed_precision
if state.deepspeed_plugin is not None:
    config = engine._config
    found |= {name: value for name, value in vars(config).items() if not name.startswith("_")}
    sections = {"zero_optimization": config.zero_config, "bf16": config.bfloat16_config}
    for section, read in (sections | {"fp16": config.float16_config}).items():
        stack = [(section, read.model_dump(by_alias=True))]
        for path, values in stack:
            for name, value in values.items():
                found[f"{path}.{name}"] = value
                stack += [(f"{path}.{name}", value)] if isinstance(value, dict) else []
else:
    for name, value in vars(state.fsdp_plugin).items():
        name = name if name.startswith("fsdp_") else f"fsdp_{name}"
        found[name] = value.name if isinstance(value, Enum) else value
plain = {name: value for name, value in found.items() if type(value) in (bool, int, float, str)}
trainer.accelerator.print("SETTINGS", json.dumps(plain))
