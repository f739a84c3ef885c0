"""Two ranks that train small models cut into stages, and write what one process has to equal.

Arguments: the rank, the store's file, the folder of the outcome.
"""

import sys
from pathlib import Path

import torch

RANK, STORE, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
sys.path.insert(0, str(Path(__file__).parents[1]))

from pipeline_cases import CASES, loss_between_steps, optimizer_for, windows  # noqa: E402

from toolkit.engines.pipelining.running import Pipeline  # noqa: E402
from toolkit.planning.schedules import SCHEDULES  # noqa: E402

torch.set_num_threads(1)
store = torch.distributed.FileStore(STORE, 2)
torch.distributed.init_process_group("gloo", store=store, rank=RANK, world_size=2)


def train(case):
    model = case.model()
    pipeline = Pipeline(
        model, SCHEDULES[case.schedule], device=torch.device("cpu"), balance=case.balance
    )
    optimizer = optimizer_for(model)
    names = pipeline.cut.names
    outcome = {"losses": [], "norms": [], "slots": [], "facts": pipeline.cut.facts}
    for window, items in windows(case):
        losses = pipeline.run(window, items=items)
        outcome["losses"].append(losses)
        outcome["gradients"] = {
            names[name]: None if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
        }
        outcome["norms"].append(pipeline.clip(case.limit))
        outcome["slots"].append(tuple(pipeline.slots()))
        outcome["work"] = [tuple(work) for work in pipeline.work]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        outcome["between"] = loss_between_steps(case, model)
    outcome["weights"] = {names[n]: p.detach() for n, p in model.named_parameters()}
    return outcome


torch.save({name: train(case) for name, case in CASES.items()}, FOLDER / f"rank-{RANK}.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
