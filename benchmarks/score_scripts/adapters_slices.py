"""Fine-tune adapters with a Trainer, from its last checkpoint if asked."""

from common import arguments, encoded, load, padded
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

args = arguments(resume=str)
tokenizer, model = load(args)
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
trainer = Trainer(
    model,
    TrainingArguments(
        args.output_dir,
        max_steps=6,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        save_steps=2,
        report_to="none",
    ),
    train_dataset=encoded(args, tokenizer),
    data_collator=padded(tokenizer),
)
trainer.train(resume_from_checkpoint=args.resume)
