"""Fine-tune on what the assistant says in chats of two turns, with TRL."""

from common import arguments, load, read
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %}{{ '<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}"
    "{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_end|>\n<|im_start|>assistant\n' }}{% endif %}"
)

args = arguments()
tokenizer, model = load(args)
tokenizer.chat_template = TEMPLATE
chats = [row["messages"] for row in read(args)]
rows = [{"messages": [*one, *two]} for one, two in zip(chats[::2], chats[1::2], strict=False)]
trainer = SFTTrainer(
    model,
    SFTConfig(
        args.output_dir,
        max_steps=6,
        per_device_train_batch_size=2,
        assistant_only_loss=True,
        max_length=256,
        bf16=False,
        report_to="none",
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model()
