"""Go on with an adapter, held near a second one by the divergence of their predictions."""

import torch
from accelerate import PartialState
from common import arguments, encoded, load, padded
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments


class NearTheReference(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        inner = self.accelerator.unwrap_model(model)
        inner.set_adapter("ref")
        with torch.no_grad():
            before = model(**inputs).logits.log_softmax(-1)
        inner.set_adapter("default")
        outputs = model(**inputs)
        now = outputs.logits.log_softmax(-1)
        apart = (now.exp() * (now - before)).sum(-1).mean()
        loss = outputs.loss + 0.01 * apart
        return (loss, outputs) if return_outputs else loss


args = arguments()
tokenizer, model = load(args)
start = f"{args.output_dir}/start"
config = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
state = PartialState()
if state.is_main_process:
    get_peft_model(load(args)[1], config).save_pretrained(start)
state.wait_for_everyone()
model = PeftModel.from_pretrained(model, start)
model.load_adapter(start, "ref")
trainer = NearTheReference(
    model,
    TrainingArguments(f"{args.output_dir}/run", max_steps=6, report_to="none"),
    train_dataset=encoded(args, tokenizer),
    data_collator=padded(tokenizer),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model()
