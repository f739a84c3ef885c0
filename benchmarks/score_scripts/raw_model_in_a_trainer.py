"""Fine-tune with a training_step of one's own."""

from common import arguments, encoded, load, padded
from transformers import Trainer, TrainingArguments


class OwnTrainer(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.state.global_step % 2 == 0:
            model = self.model
        model.train()
        loss = model(**self._prepare_inputs(inputs)).loss
        self.accelerator.backward(loss)
        return loss.detach()


args = arguments()
tokenizer, model = load(args)
trainer = OwnTrainer(
    model,
    TrainingArguments(
        args.output_dir,
        max_steps=6,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to="none",
    ),
    train_dataset=encoded(args, tokenizer),
    data_collator=padded(tokenizer),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model()
