"""The ranks of tensor groups: each trains every case, and keeps what it saw.

python splits.py RANKS STORE MODELS OUTPUT STRATEGY ...
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import split_cases
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from forked_ranks import become_a_rank
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from toolkit.engines.backend import backend_of, wrap
from toolkit.engines.tensor_parallel import claim_mesh
from toolkit.engines.wrapped import rows_of_rank
from toolkit.measuring.replica_checks import wrong_shares
from toolkit.strategies import STRATEGIES


def train(case, folder, strategy, ranks):
    split = claim_mesh(strategy.on_ranks(ranks), ranks, precision="no")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=split
    ).train()
    model.config.use_cache = False
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=case.micro_batches, sync_with_dataloader=False
        ),
    )
    loader = DataLoader(list(range(8)), batch_size=2)
    optimizer = split_cases.optimizer_for(model)
    model, optimizer, loader = wrap(accelerator, model, optimizer, loader)
    backend = backend_of(model)
    readers, reader = backend.data_parallel_size(), backend.data_parallel_rank()
    kept = {"losses": [], "norms": [], "gradients": [], "rows": torch.cat(list(loader)).tolist()}
    for window in split_cases.windows(case):
        items = split_cases.items_of(window)
        share = torch.zeros(())
        for batch in window:
            with accelerator.accumulate(model):
                rows = slice(reader * 4 // readers, (reader + 1) * 4 // readers)
                own = {name: values[rows] for name, values in batch.items()}
                loss = model(**own, num_items_in_batch=items).loss * readers
                backend.backward(accelerator, loss, micro_batches=len(window))
                share += loss.detach() / readers
                if accelerator.sync_gradients:
                    kept["gradients"].append(
                        {
                            name: backend.full_gradient(parameter).clone()
                            for name, parameter in model.named_parameters()
                        }
                    )
                    kept["squares"] = [
                        (name, float(squares), copies)
                        for name, squares, copies in backend.gradient_squares()
                    ]
                    norm = accelerator.clip_grad_norm_(model.parameters(), split_cases.LIMIT)
                    kept["norms"].append(norm)
                optimizer.step()
                optimizer.zero_grad()
        kept["losses"].append(share)
    kept["weights"] = {
        name: backend.full_weight(parameter).detach().clone()
        for name, parameter in model.named_parameters()
    }
    kept["parts"] = {
        name: wrong_shares(rows_of_rank(accelerator, DataLoader([*range(8)]), **part), reader)
        for name, part in {
            "as they should": {"place": reader, "of": readers},
            "one each": {"place": accelerator.process_index, "of": ranks},
            "all the first": {"place": 0, "of": max(2, readers)},
        }.items()
    }
    kept["held"] = sum(tensor.numel() for tensor in backend.parameters_held())
    kept["reader"] = reader
    kept["replicas"] = backend.replicas()
    for name, parameter in model.named_parameters():
        backend.set_full_weight(parameter, kept["weights"][name] + 1)
    kept["put"] = {
        name: backend.full_weight(parameter).detach().clone()
        for name, parameter in model.named_parameters()
    }
    return kept


def main():
    ranks = int(sys.argv[1])
    store, models, output = sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    rank = become_a_rank(ranks)
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    outcomes = {
        name: {
            case: train(settings, models / case, STRATEGIES[name], ranks)
            for case, settings in split_cases.CASES.items()
        }
        for name in sys.argv[5:]
    }
    torch.save(outcomes, output / f"{rank}.pt")
    torch.distributed.destroy_process_group()


main()
