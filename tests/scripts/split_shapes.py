"""Prints, as JSON, the shape of rank 0's part of every parameter of small models, by family.

    python split_shapes.py RANKS FAMILY ...

No weight is made and no process started: the group is torch's fake one.
"""

import json
import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from small_models import small_of

from toolkit.engines.tensors import local

ranks, families = int(sys.argv[1]), sys.argv[2:]
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
found = {}
for family in families:
    model = small_of(family, "eager").to("meta")
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=ranks))
    apply_tensor_parallelism(model, mesh, plan)
    model.tie_weights()  # as after loading
    shapes = {name: list(local(p).shape) for name, p in model.named_parameters()}
    found[family] = {"config": model.config.to_dict(), "shapes": shapes}
sys.stdout.write(json.dumps(found, default=str))
