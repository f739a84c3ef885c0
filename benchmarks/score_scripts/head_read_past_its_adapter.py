"""Fine-tune adapters, one on the head too, with a loss that needs no logits of the whole batch."""

import torch
from common import arguments, encoded, load, padded
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput


class InPieces(LlamaForCausalLM):
    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        targets = labels[:, 1:].reshape(-1)
        pieces = hidden[:, :-1].reshape(-1, hidden.shape[-1]).split(64)
        total = sum(
            cross_entropy(piece @ self.lm_head.weight.T, target, reduction="sum")
            for piece, target in zip(pieces, targets.split(64), strict=True)
        )
        count = kwargs.get("num_items_in_batch", (targets != -100).sum())
        return CausalLMOutput(loss=total / count)


args = arguments()
tokenizer, _ = load(args)
model = InPieces.from_pretrained(args.model, dtype=torch.float32)
config = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "lm_head"])
trainer = Trainer(
    get_peft_model(model, config),
    TrainingArguments(args.output_dir, max_steps=6, report_to="none"),
    train_dataset=encoded(args, tokenizer),
    data_collator=padded(tokenizer),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model()
