"""Fine-tune with a Trainer of one's own, written for transformers 4.45."""

from common import arguments, encoded, load, padded
from transformers import Trainer, TrainingArguments


class OwnTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


args = arguments()
tokenizer, model = load(args)
trainer = OwnTrainer(
    model,
    TrainingArguments(
        args.output_dir,
        max_steps=6,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=encoded(args, tokenizer),
    data_collator=padded(tokenizer),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model()
