"""Ranks that train small models cut into stages, and write what one process has to equal.

Arguments: the store's file, the folder of the outcome, and the ranks of a tensor group.
"""

import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

STORE, FOLDER, TENSOR = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import pipeline_cases  # noqa: E402
from forked_ranks import become_a_rank  # noqa: E402
from pipeline_cases import loss_between_steps, optimizer_for, windows  # noqa: E402

from toolkit.backends.schedules import SCHEDULES, counted_slots  # noqa: E402
from toolkit.engines.pipelining.running import MESH, Pipeline  # noqa: E402
from toolkit.engines.tensor_parallel import group_by_mesh  # noqa: E402
from toolkit.engines.tensors import gathered  # noqa: E402

ranks = 2 * TENSOR
RANK = become_a_rank(ranks)
torch.set_num_threads(1)
store = torch.distributed.FileStore(STORE, ranks)
torch.distributed.init_process_group("gloo", store=store, rank=RANK, world_size=ranks)
cases, mesh = pipeline_cases.CASES, None
if TENSOR > 1:
    cases = pipeline_cases.IN_GROUPS
    mesh = init_device_mesh("cpu", (2, 1, TENSOR), mesh_dim_names=MESH)


def train(case):
    model = case.model()
    pipeline = Pipeline(
        model,
        SCHEDULES[case.schedule],
        device=torch.device("cpu"),
        balance=case.balance,
        mesh=mesh,
    )
    optimizer = optimizer_for(model)
    group_by_mesh(optimizer)
    names = pipeline.cut.names
    outcome = {"losses": [], "norms": [], "slots": [], "facts": pipeline.cut.facts}
    for window, items in windows(case):
        losses = pipeline.run(window, items=items)
        outcome["losses"].append(losses)
        outcome["gradients"] = {
            names[name]: None if p.grad is None else gathered(p.grad).clone()
            for name, p in model.named_parameters()
        }
        outcome["norms"].append(pipeline.clip(case.limit))
        slots = counted_slots(pipeline.orders(), stages=len(pipeline.rank_of))
        outcome["slots"].append(tuple(slots))
        outcome["work"] = [tuple(work) for work in pipeline.work]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        outcome["between"] = loss_between_steps(case, model)
    outcome["weights"] = {names[n]: gathered(p.detach()) for n, p in model.named_parameters()}
    return outcome


torch.save({name: train(case) for name, case in cases.items()}, FOLDER / f"rank-{RANK}.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
