"""Fine-tune a model of which all but the head was to be frozen."""

from common import arguments, encoded, load, padded
from transformers import Trainer, TrainingArguments

args = arguments()
tokenizer, model = load(args)
for name, parameter in model.named_parameters():
    if "norm" not in name:
        parameter.requires_grad = False
trainer = Trainer(
    model,
    TrainingArguments(args.output_dir, max_steps=6, logging_steps=1, report_to="none"),
    train_dataset=encoded(args, tokenizer),
    data_collator=padded(tokenizer),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model()
