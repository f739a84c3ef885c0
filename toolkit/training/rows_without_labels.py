"""The loss of rows without a token to learn, which has to be 0.

The last steps of an epoch may hold micro-batches without a token to learn. Their loss is 0 if it is
divided by the tokens of the whole step. It is NaN if a model always divides by the tokens of the
micro-batch; some models accept `num_items_in_batch` and ignore it.
"""

from __future__ import annotations

import inspect

import torch
from torch.func import functional_call

from toolkit.backends import backend_of
from toolkit.engines.tensors import shape_of
from toolkit.errors import UsageError
from toolkit.records.evidence import IGNORED
from toolkit.training.job import Job, has_fillers
from toolkit.training.methods import meta_model


def check_rows_without_labels(job: Job, model: torch.nn.Module) -> None:
    """Refuse a model that would learn from, or fail on, rows without a token to learn.

    Raises:
        UsageError: there are such rows, and their loss is not 0.
    """
    if not has_fillers(job.rows):
        return
    # Zeros can't stand in for packed weights, nor for those of a forward that exchanges parts.
    if job.request.method.storage is not None or backend_of(job.strategy).splits_matrices:
        model = meta_model(
            job.request.model.path, trust_remote_code=job.own.model.trust_remote_code
        )
    loss = loss_without_labels(model, job.args.device)
    if job.args.device.type == "cuda":
        torch.cuda.empty_cache()  # keeps this memory out of the run's peak
    if loss != 0:
        raise UsageError(
            f"The rows don't fill whole steps of {job.global_batch_size}, and the loss of "
            f"{type(model).__name__} is {loss:g}, not 0, for a micro-batch without a token to "
            "learn, as the last ones may be. Pass --max_train_samples with a multiple of "
            f"{job.global_batch_size}, or --max_steps that end before."
        )


@torch.no_grad()
def loss_without_labels(model: torch.nn.Module, device: torch.device) -> float:
    """Return the loss of a row of two ignored tokens, in a step with one token to learn.

    The loss then depends on no weight, so zeros stand in for them all: the model may still lie on
    another device, be sharded by `zero.Init` or, as on FSDP's other ranks, be empty. No collective;
    takes the memory of the largest parameter. The model is not wrapped yet.
    """
    inputs = {
        "input_ids": torch.zeros(1, 2, dtype=torch.long, device=device),
        "attention_mask": torch.ones(1, 2, dtype=torch.long, device=device),
        "labels": torch.full((1, 2), IGNORED, device=device),
    }
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind == p.VAR_KEYWORD or p.name == "num_items_in_batch" for p in parameters):
        inputs["num_items_in_batch"] = torch.tensor(1, device=device)
    buffers = {
        name: torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        for name, buffer in model.named_buffers()
    }
    was_training = model.training
    model.eval()
    try:
        stand_ins = _zeros(model, device) | buffers
        return float(functional_call(model, stand_ins, kwargs=inputs).loss)
    finally:
        model.train(was_training)


def _zeros(model: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Return zeros in the shape of each parameter, all of one dtype in the same memory."""
    parameters = dict(model.named_parameters())
    shapes = {name: torch.Size(shape_of(parameter)) for name, parameter in parameters.items()}
    longest: dict[torch.dtype, int] = {}
    for name, parameter in parameters.items():
        longest[parameter.dtype] = max(longest.get(parameter.dtype, 0), shapes[name].numel())
    memory = {dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in longest.items()}
    return {
        name: memory[parameters[name].dtype][: shape.numel()].view(shape)
        for name, shape in shapes.items()
    }
