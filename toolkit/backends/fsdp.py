"""FSDP2 (`fully_shard`) as Accelerate wraps a model: the rows of each tensor are dealt out.

From the code of torch 2.11 to 2.15 (distributed/fsdp/_fully_shard) and accelerate 1.15, which
gathers the last norm and the head once: their unit is not resharded (fsdp_utils.py). The embedding
is gathered again for backward, where nothing needs it. Gradients stay unreduced until the last
micro-batch (`set_requires_gradient_sync`), unless `sync_each_batch` is on; the gathers of every
micro-batch remain in either case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from toolkit.backends.base import (
    Backend,
    HostTraffic,
    norm,
    on_gpu,
    packed_savings,
    packed_size,
    padded,
    sharded_frozen_bytes,
)
from toolkit.backends.launcher import mesh
from toolkit.jobs import optimizers
from toolkit.jobs.config_options import ConfigOptions
from toolkit.jobs.job import Job
from toolkit.jobs.shape import ModelShape
from toolkit.jobs.terms import (
    FIRST,
    RUNNING,
    Collective,
    Held,
    Interval,
    StateBytes,
    Term,
    product,
)
from toolkit.jobs.weights import Units, Weights, trained_units, units_of, weights_of


class Fsdp2(Backend):
    """Everything is sharded, and the step is on the shards themselves."""

    distributed_type = "FSDP"
    wraps_layers = True
    shards_rows = True
    cutter = "FSDP2 shards"
    all_reduces = "gradients are all-reduced between the replicas besides"

    def takes_replicas(self) -> bool:
        return self.strategy.replicas > 1

    def sections(self, processes: int, options: ConfigOptions) -> dict[str, Any]:
        section: dict[str, Any] = {
            # Without the version the launcher means FSDP1; without a policy no layer is wrapped.
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": self.strategy.reshard_after_forward,
            "fsdp_offload_params": self.strategy.offload_parameters == "cpu",
            # A stock Trainer leaves no model at all with SHARDED_STATE_DICT (transformers 5.23).
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            "fsdp_activation_checkpointing": False,
            # The launcher refuses the first without the second, which FSDP2 itself ignores.
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_sync_module_states": True,
        }
        if options.decoder_layer is not None:
            section["fsdp_transformer_layer_cls_to_wrap"] = options.decoder_layer
        replicas = self.strategy.replicas
        ranks = mesh(processes, replicate=replicas) if replicas > 1 else {}
        return {"fsdp_config": section} | ranks

    @property
    def least_ranks(self) -> int:
        return 1 if self.strategy.replicas == 1 else 2

    def groups_problem(self, ranks: int) -> str | None:
        return self._replicas_problem(ranks, least=1)

    def _replicas_problem(self, ranks: int, *, least: int) -> str | None:
        """Say why so many ranks don't make replicas of `least` ranks or more each."""
        replicas, smallest = self.strategy.replicas, max(2, self.strategy.tensor)
        if ranks % replicas == 0 and ranks // replicas >= least:
            return None
        return (
            f"{self.strategy.name} keeps {replicas} groups of at least {smallest} processes each, "
            f"so it needs {smallest * replicas} or more in multiples of {replicas}; {ranks} asked."
        )

    def ranks_problem(self, ranks: int) -> str | None:
        problem = super().ranks_problem(ranks)
        if problem is not None or self.strategy.replicas == 1:
            return problem
        # A group of one rank shards nothing; a tensor group is a replica.
        return self._replicas_problem(ranks, least=max(2, self.strategy.tensor))

    def weight_size(self, job: Job) -> int:
        """Return the bytes of an element of a trained parameter, as a rank keeps it.

        Accelerate raises trained weights to fp32 in mixed precision (fsdp_utils.py).
        """
        return 4 if job.precision != "no" else super().weight_size(job)

    def raises_frozen(self, job: Job) -> bool:
        return False

    def parameter_shards(self, job: Job) -> int:
        return job.shards

    def frozen_bytes(self, job: Job, weights: Weights) -> int:
        return sharded_frozen_bytes(job, weights, weights.frozen.chunked(job.shards))

    def stepped_at_once(self, job: Job) -> int:
        return weights_of(job).trained.chunked(job.shards)

    def states(self, job: Job, rank: int = 0) -> StateBytes:
        weights, size, shards = weights_of(job), self.weight_size(job), job.shards
        shard = weights.trained.chunked(shards) * size
        # The replicas of hybrid sharding hold the same shards.
        states = self._optimizer_bytes(job, weights.trained.chunk_of(shards, rank % shards))
        parameters = shard + self.frozen_bytes(job, weights)
        if not self.steps_on_cpu:
            return on_gpu(job, parameters=parameters, gradients=shard, optimizer=states)
        # The scales of 4-bit weights are no parameters: an offload leaves them on the GPU.
        scales = weights.quantisation_bytes
        return StateBytes(
            parameters=Held(gpu=scales, host=parameters - scales),
            master=Held(),
            gradients=Held(host=shard),
            optimizer=Held(host=states),
        )

    def _optimizer_bytes(self, job: Job, shard: int) -> int:
        """Return the bytes of optimizer state of a shard, whose tensors keep rows and columns."""
        trained, size = weights_of(job).trained, self.weight_size(job)
        match job.optimizer:
            case "adafactor":
                return optimizers.of_tensors(job.optimizer, trained, size)
            case "adamw_8bit" | "paged_adamw_8bit":
                return -(-optimizers.of_tensors(job.optimizer, trained, size) // job.shards)
            case _:
                return optimizers.of_elements(
                    job.optimizer, shard, size, tensors=len(trained.sizes)
                )

    def holds_gradients(self, job: Job) -> bool:
        return job.sums_reduced

    def sync_saves_memory(self, job: Job) -> bool:
        return job.shards > self.strategy.tensor or self.strategy.offloads

    def ends_unreduced(self, job: Job) -> bool:
        return not job.reduces

    def buffers(self, job: Job) -> Iterator[Term]:
        units = units_of(job.model)
        size = packed_size(job)
        compute = job.compute_size
        reduce = 4 if job.reduce_in_fp32 else compute
        tail = units.tail * compute  # never packed
        inputs = {"size": size, "layer": units.layer, "tail": units.tail}
        if not self.strategy.reshard_after_forward:
            yield product(
                "gathered",
                "gathered weights, kept until backward is through",
                {"size": size, "parameters": job.model.parameters},
                RUNNING,
            )
            yield Term(
                category="gathered",
                name="buffers of the last all-gathers, which forward ends with",
                bytes=Interval(0, units.layer * size + tail),
                formula="up to size * (layer + tail)",
                inputs=inputs,
                phases=FIRST,
                communicated=True,
            )
        else:
            yield product(
                "gathered",
                "head and last norm, gathered from forward into backward",
                {"size": compute, "tail": units.tail},
                # On a GPU, buffers that another stream still reads are freed late.
                FIRST if job.on_cpu else RUNNING,
            )
            least, copy = (0, tail) if job.on_cpu else (2, 0)
            # The only shard is copied when its layer begins, and never ahead (torch 2.13).
            fewest = 1 if job.shards == 1 else 2
            gathered = Term(
                category="gathered",
                name="the layer at work, the one after it, and a buffer of the all-gather",
                # Forward keeps the last all-gather's buffer; backward gathers one layer ahead. On a
                # CPU it waits for that, and gloo's thread may free the buffer late: 1 run of 8.
                bytes=Interval(fewest * units.layer * size, 3 * units.layer * size),
                formula=f"{fewest} to 3 * size * layer",
                inputs=inputs,
                phases=("backward",),
                communicated=True,
            )
            yield gathered
            yield replace(
                gathered,
                name="the last layer, gathered for backward, and buffers of all-gathers",
                bytes=Interval(least * units.layer * size, 3 * units.layer * size + copy),
                formula=f"{least} to 3 * size * layer, and up to a copy of the tail",
                phases=FIRST,
            )
        if job.trains_head:
            yield from self._whole_gradients(job, trained_units(job), compute, reduce)
        if job.sums_unreduced:
            yield product(
                "gradients",
                "whole gradients, summed up without sync",
                {"reduce size": reduce, "trained parameters": weights_of(job).trained.elements},
                RUNNING,
            )

    def _whole_gradients(self, job: Job, units: Units, compute: int, reduce: int) -> Iterator[Term]:
        """Yield unsharded gradients before they are reduced: of the head first, then of a layer."""
        inputs = {"tail": units.tail, "size": compute, "reduce size": reduce}
        head = Term(
            category="gradients",
            name="whole gradients of the head, and what they are reduced in",
            bytes=Interval(units.tail * compute, units.tail * (compute + reduce)),
            formula="tail * (size + up to reduce size)",
            inputs=inputs,
            phases=("head",),
            communicated=job.reduces,
        )
        yield head
        if not job.reduces:
            # No gradient is reduced yet: new gradients stay, or are added to earlier ones.
            yield replace(head, formula="size * tail", phases=("backward",))
            return
        unit = units.layer if job.sums_unreduced else units.largest
        low, high = unit * (compute + reduce), unit * (compute + 2 * reduce)
        if job.sums_unreduced or job.on_cpu:
            # The head's gradient has been reduced to a shard; a layer's gradients come one by one.
            # Where earlier shards are held, the head's is added to them.
            low = 0 if job.sums_reduced else units.tail * reduce // job.shards
            high = max(high, low + units.layer * (compute + 2 * reduce))
        if job.sums_unreduced and job.on_cpu:
            high = low + units.widest * compute + unit * reduce
        if job.sums_reduced:
            # The reduced shard, in the dtype of the wire and of the weights, until it is added.
            size = self.weight_size(job)
            high += unit // job.shards * (reduce + (size if size != reduce else 0))
        yield Term(
            category="gradients",
            name="whole gradients of a unit, and what they are reduced in",
            # A unit's gradients, and the input of its reduce-scatter or of the previous unit's.
            bytes=Interval(low, high),
            formula="unit * (size + 1 to 2 * reduce size); the first of summed ones less",
            inputs=inputs | {"unit": unit},
            phases=("backward",),
            communicated=True,
        )

    def communicators(self, job: Job) -> int:
        return 1 if self.strategy.replicas == 1 else 2

    def host_traffic(self, job: Job) -> HostTraffic | None:
        """Return the copies of an offloaded step: of gradients that are reduced, and of gathers.

        Shards come in the dtype in which they are kept (`CPUOffloadPolicy`). The root, with the
        last norm and the head, is gathered once a micro-batch, and all else again for backward.
        """
        if not self.steps_on_cpu:
            return None
        weights, size = weights_of(job), self.weight_size(job)
        computed = job.compute_size
        held = weights.trained.elements * size + weights.frozen.elements * computed
        held += weights.packed.elements / 2
        if self.strategy.reshard_after_forward:
            root = units_of(job.model).tail * (size if job.trains_head else computed)
            held = 2 * held - root
        return HostTraffic(
            sent=size * self.stepped_share(job) * job.reductions,
            received=job.accumulation * held / job.shards,
            # It steps with whatever the job asks for.
            is_fused=job.optimizer != "adamw",
        )

    def gathers(self) -> int:
        return 2 if self.strategy.reshard_after_forward else 1

    def volume(self, trained: int, everything: int, ranks: int) -> int:
        return self.gathers() * everything + trained

    def collectives(self, job: Job, tokens: int, rank: int) -> tuple[Collective, ...]:
        weights, shards = weights_of(job), job.shards
        size, dtype = job.compute_size, job.computes_in  # accelerate computes and reduces in one
        once, again = _fsdp_units(job.model, shards)
        gradients = weights.trained.chunked(shards) * shards
        again += weights.adapters.chunked(shards) * shards
        again -= packed_savings(job, weights.packed.chunked(shards))
        gathers = self.gathers()
        per_node = job.gpus // job.nodes
        units = job.model.layers + 2
        inside: dict[str, Any] = {
            "ranks": shards,
            "nodes": max(1, -(-shards // per_node)),
            "rings": max(1, per_node // shards) if shards > per_node else 1,
        }
        reduced = 4 if job.reduce_in_fp32 else size
        reduce = partial(
            Collective,
            purpose="gradients",
            element_size=reduced,
            dtype="float32" if reduced == 4 else dtype,
            times=job.reductions,
            calls=units,
        )
        in_shards = (
            Collective(
                kind="all_gather",
                purpose="parameters",
                elements=once + again * gathers,
                element_size=size,
                dtype=dtype,
                times=job.accumulation,
                calls=units * 2,
                formula=(
                    "(once + twice * gathers) * size * micro-batches: head, last norm and what no "
                    "unit holds once, layers and embedding twice if they are resharded after "
                    "forward"
                ),
                inputs={
                    "once": once,
                    "twice": again,
                    "gathers": gathers,
                    "size": size,
                    "micro-batches": job.accumulation,
                },
                **inside,
            ),
            reduce(
                kind="reduce_scatter",
                elements=gradients,
                formula="trained * size * times, rows padded to the shards",
                inputs={
                    "trained": gradients,
                    "size": reduced,
                    "shards": shards,
                    "times": job.reductions,
                },
                **inside,
            ),
        )
        of_norms = replace(
            norm(job, len(weights.trained.sizes), 4),
            calls=1,
            formula="one number for each trained tensor, at once",
        )
        # A group of one shard has nothing to gather or scatter.
        in_groups = (*in_shards, of_norms) if shards > 1 else (of_norms,)
        if self.strategy.replicas == 1:
            return in_groups
        return (
            reduce(
                kind="all_reduce",
                elements=gradients // shards,
                ranks=self.strategy.replicas,
                nodes=min(job.nodes, self.strategy.replicas),
                rings=min(per_node, shards) if job.nodes > 1 else 1,
                formula="trained / shards * size * times, between the replicas",
                inputs={
                    "trained": gradients,
                    "shards": shards,
                    "size": reduced,
                    "times": job.reductions,
                },
            ),
            *in_groups,
        )


@lru_cache(maxsize=512)
def _fsdp_units(model: ModelShape, shards: int) -> tuple[int, int]:
    """Padded elements of the units that are gathered once a micro-batch, and of all others."""
    once = again = 0
    for tensor in model.tensors:
        rows = tensor.shape[0] if tensor.shape else 1
        elements = padded(rows, shards) * (tensor.elements // rows)
        if tensor.layer is not None or (tensor.kind == "embedding" and not model.tied):
            again += elements
        else:
            once += elements
    return once, again
