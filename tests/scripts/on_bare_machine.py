"""Train, resume, loop and plan where optional libraries may be missing; print what came of it."""

import json
import pkgutil
import sys
from importlib import import_module
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import toolkit
from toolkit import STRATEGIES, ToolkitTrainer, checkpoints, environment, measuring, training
from toolkit.data.sampling_order import Collator
from toolkit.measuring.attestation import Requested
from toolkit.measuring.recorder import Recorder
from toolkit.training.loop import train_loop

STEPS = 4


def import_all():
    for package in (checkpoints, measuring, training):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            import_module(module.name)


def small_model():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=2, **shape))


def arguments(folder, **changed):
    flags = {
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(folder), **flags | changed)


def trained(folder, rows, *, resume=None):
    trainer = ToolkitTrainer(model=small_model(), args=arguments(folder), train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "final"))
    return json.loads((folder / "record.json").read_text())["losses"]


def looped(folder, rows):
    asked = Requested(strategy=STRATEGIES["single"], num_processes=1)
    recorder = Recorder(asked, rehearsal=True)
    numbered = [row | {"sample_id": number} for number, row in enumerate(rows)]
    train_loop(
        small_model(),
        arguments(folder),
        numbered,
        Collator(pad_token_id=0),
        recorder=recorder,
        scheduled_steps=STEPS,
    )
    recorder.close()
    return recorder.finish()["losses"]


def main():
    import_all()
    folder = Path(sys.argv[1])
    drawn = torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in drawn.tolist()]
    straight = trained(folder / "run", rows)
    resumed = trained(folder / "run", rows, resume=str(folder / "run" / "checkpoint-2"))
    LlamaForCausalLM.from_pretrained(folder / "run" / "final")
    plan = toolkit.plan("7b", gpu="H100", gpus=8)
    result = {
        "straight": straight,
        "resumed": resumed,
        "looped": looped(folder / "loop", rows),
        "planned": {row.strategy.name: row.verdict.answer for row in plan.rows},
        "environment": environment.snapshot(),
        "imported": sorted({name.partition(".")[0] for name in sys.modules}),
    }
    (folder / "result.json").write_text(json.dumps(result))


main()
