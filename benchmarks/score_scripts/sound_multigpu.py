"""Train with a small class of a trainer that keeps a snapshot of each epoch."""

import torch
from accelerate import Accelerator
from common import arguments, encoded, load, padded
from torch.utils.data import DataLoader


class SnapshotTrainer:
    def __init__(self, accelerator, model, loader, optimizer, folder):
        self.accelerator, self.folder = accelerator, folder
        self.model, self.loader, self.optimizer = accelerator.prepare(model, loader, optimizer)

    def run_batch(self, batch):
        self.optimizer.zero_grad()
        loss = self.model(**batch).loss
        self.accelerator.backward(loss)
        self.optimizer.step()

    def snapshot(self):
        state = self.accelerator.get_state_dict(self.model)
        self.accelerator.unwrap_model(self.model).save_pretrained(
            self.folder, state_dict=state, is_main_process=self.accelerator.is_main_process
        )

    def train(self, epochs):
        self.model.train()
        for _ in range(epochs):
            for batch in self.loader:
                self.run_batch(batch)
            self.snapshot()


args = arguments()
tokenizer, model = load(args)
rows = encoded(args, tokenizer)
loader = DataLoader(rows, batch_size=4, shuffle=True, collate_fn=padded(tokenizer))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
SnapshotTrainer(Accelerator(), model, loader, optimizer, args.output_dir).train(2)
