"""DeepSpeed's ZeRO: flat partitions in stages 1 and 2, each tensor cut by itself in stage 3.

From the code of deepspeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py,
partition_parameters.py). Where it does something else than the papers:

- ZeRO-1 and ZeRO-2 all-reduce gradients and all-gather parameters, so 3 psi cross the wire where
  the paper has 2: `use_multi_rank_bucket_allreduce` is on by default (stage_1_and_2.py,
  `average_tensor`). ZeRO-1 does it once a step, ZeRO-2 every micro-batch.
- ZeRO-3 gathers the last `stage3_max_live_parameters` elements of a model (1e9) once a micro-batch,
  not twice, so smaller models are gathered once. Of larger ones the figure is an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from toolkit.backends.base import (
    Backend,
    HostTraffic,
    in_ram,
    norm,
    on_gpu,
    packed_at_most,
    packed_savings,
    packed_size,
    padded,
    sharded_frozen_bytes,
    step_term,
)
from toolkit.backends.deepspeed_json import deepspeed_config
from toolkit.backends.launcher import ports
from toolkit.backends.zero_gathers import gathered_elements
from toolkit.backends.zero_settings import (
    MAX_IN_CPU,
    OPTIMIZER_BUFFERS,
    PARAMETER_BUFFER_ELEMENTS,
    PARAMETER_BUFFERS,
    SWAPPED_FROM_BYTES,
    ZeroSettings,
    zero_settings,
)
from toolkit.errors import UsageError
from toolkit.jobs import optimizers
from toolkit.jobs.config_options import ConfigOptions
from toolkit.jobs.job import Job
from toolkit.jobs.terms import (
    BACK,
    RUNNING,
    Collective,
    Held,
    Interval,
    Kind,
    Phase,
    Place,
    StateBytes,
    Term,
    product,
)
from toolkit.jobs.weights import Tensors, Weights, units_of, weights_of
from toolkit.strategies import DTYPE_BYTES, DTYPES

FLAT_ALIGNMENT = 2
"""ZeRO-1 and 2 pad each flat group to this many elements a rank (`nccl_start_alignment_factor`)."""

LISTED_RANKS = 1024
"""Most ranks that are checked one by one in the search for the fullest."""

NORM_SIZE = 8
"""Bytes of fp64, in which DeepSpeed takes gradient norms (zero/utils.py, get_norm_dtype)."""


class DeepSpeed(Backend):
    """All stages: the model is cast to the computing dtype, and the step is on fp32 masters."""

    distributed_type = "DEEPSPEED"
    reads_json = True
    cutter = "DeepSpeed cuts"
    cuts_flat = True
    all_reduces = "DeepSpeed all-reduces gradients where the paper reduce-scatters them"
    stays_gathered = (
        "ZeRO-3 keeps what stays below stage3_max_live_parameters between forward and backward"
    )
    unsynced = "stage decides when gradients are reduced"

    def launcher(
        self, processes: int, options: ConfigOptions, deepspeed_json: Path | None
    ) -> dict[str, Any]:
        """Return a section with the JSON's path and no settings of the JSON.

        Accelerate raises when the YAML repeats what the JSON owns: stage, offload, accumulation,
        clipping, precision.
        """
        if deepspeed_json is None:
            raise UsageError(
                f"{self.strategy.name}: a DeepSpeed strategy needs the path of its JSON."
            )
        section = {
            "deepspeed_config_file": str(deepspeed_json),
            "zero3_init_flag": self.strategy.shards_parameters,
        }
        if (options.num_machines or 1) > 1:
            # The default, pdsh, would start the other machines from this one, by SSH.
            section["deepspeed_multinode_launcher"] = "standard"
        return ports(options) | {"deepspeed_config": section} | self.sections(processes, options)

    def launch_words(self, job: Job) -> list[str]:
        return ["--deepspeed_multinode_launcher", "standard"] if job.nodes > 1 else []

    def json_file(self, options: ConfigOptions) -> dict[str, Any]:
        return deepspeed_config(self.strategy, options)

    @property
    def least_ranks(self) -> int:
        return 1

    def has_masters(self, job: Job) -> bool:
        return True

    def autocasts(self, job: Job) -> bool:
        return job.deepspeed is not None and zero_settings(job).autocast

    def weight_size(self, job: Job) -> int:
        """Return the bytes of an element of a trained parameter: of the compute dtype.

        Raises:
            UsageError: it is to compute in fp32 with weights of 16 bits, which DeepSpeed refuses.
        """
        if job.precision == "no" and job.dtype != "float32" and job.method == "full":
            raise UsageError(
                f"{self.strategy.name} computes in fp32 with weights in fp32 only, and these are "
                f"loaded in {job.dtype}. Ask for precision bf16 or fp16, or for float32 weights."
            )
        return job.compute_size

    def pieces(self, job: Job) -> tuple[int, ...]:
        """Return the elements of each part of a rank's partition that is stepped at once."""
        raise NotImplementedError

    def stepped_at_once(self, job: Job) -> int:
        return max(self.pieces(job), default=0)

    def stepped_tensors(self, job: Job) -> int:
        # DeepSpeedCPUAdam counts in Python.
        return 0 if self.strategy.offloads else len(self.pieces(job))

    def optimizer_bytes(self, job: Job) -> int:
        """Return the bytes of the optimizer's states of a rank's partition."""
        pieces = self.pieces(job)
        if self.steps_on_cpu and "adamw" in job.optimizer:
            return 8 * sum(pieces)  # of DeepSpeedCPUAdam, which replaces any requested AdamW
        of_state = zero_settings(job).state_size
        return optimizers.of_elements(job.optimizer, sum(pieces), of_state, tensors=len(pieces))

    def step(self, job: Job) -> Iterator[Term]:
        """Yield the gradients made ready for a step on the GPU, and its temporaries."""
        if self.steps_on_cpu:
            return
        at_once, settings = self.stepped_at_once(job), zero_settings(job)
        gradient, master = self.weight_size(job), settings.master_size
        inside, formula = optimizers.beside_a_step(job, settings.state_size, at_once, at_once)
        converted = at_once * (gradient + (master if gradient != master else 0))
        held = at_once * master
        size = max(converted, held + inside)
        how = f"stepped at once * ({gradient} flattened + {master} as the masters)"
        if size > converted:
            how = f"{master} * stepped at once + {formula}"
        of_norm = NORM_SIZE * -(-weights_of(job).trained.largest // self.parameter_shards(job))
        if of_norm > size:
            size, how = of_norm, f"{NORM_SIZE} * elements of the largest gradient, for its norm"
        name = "gradients made ready for the step, and its temporaries"
        yield step_term(name, size, how, at_once)

    def overlaps(self, job: Job) -> bool:
        return zero_settings(job).overlaps

    def traffic(self, job: Job, tokens: int, rank: int) -> tuple[Collective, ...]:
        planned = self.collectives(job, tokens, rank)
        # Alone, DeepSpeed reduces over one rank, and gathers nothing.
        return tuple(c for c in planned if job.gpus > 1 or c.kind != "all_gather")

    def communication_dtype(self, job: Job) -> object:
        """Return the name of the dtype of gradients on the wire that a file gives, if one does."""
        return None if job.deepspeed is None else job.deepspeed.get("communication_data_type")

    def reduction(
        self, job: Job, kind: Kind, elements: int, *, times: int, formula: str
    ) -> Collective:
        """Return the collective that reduces gradients."""
        # The weights' own dtype, unless a file names another by one of three names (DeepSpeed 0.19,
        # runtime/config.py, `get_communication_data_type`).
        dtype = DTYPES.get(str(self.communication_dtype(job)).lower())
        size = self.weight_size(job) if dtype is None else DTYPE_BYTES[dtype]
        return Collective(
            kind=kind,
            purpose="gradients",
            elements=elements,
            element_size=size,
            dtype=dtype or job.computes_in,
            times=times,
            calls=-(-elements // zero_settings(job).reduce_bucket),
            ranks=job.gpus,
            nodes=job.nodes,
            formula=formula,
            inputs={"trained": elements, "size": size, "times": times},
        )


class Flat(DeepSpeed):
    """All tensors of a parameter group are laid end to end and cut once."""

    def pieces(self, job: Job) -> tuple[int, ...]:
        return tuple(partition_elements(group, job.shards) for group in weights_of(job).groups)

    def states(self, job: Job, rank: int = 0) -> StateBytes:
        weights, size, partition = weights_of(job), self.weight_size(job), sum(self.pieces(job))
        masters = partition * zero_settings(job).master_size
        parameters = partition * job.shards * size + self.frozen_bytes(job, weights)
        states = self.optimizer_bytes(job)
        if not self.steps_on_cpu:
            gradients = _gradient_elements(weights.groups, job.shards, rank) * size
            return on_gpu(
                job, parameters=parameters, masters=masters, gradients=gradients, optimizer=states
            )
        return StateBytes(
            parameters=Held(gpu=parameters),
            master=Held(host=masters),
            gradients=Held(host=masters),
            optimizer=Held(host=states),
        )

    def fullest_states(self, job: Job) -> StateBytes:
        if self.strategy.offloads:
            return self.states(job)
        groups = weights_of(job).groups
        ranks = range(min(job.shards, LISTED_RANKS))
        return self.states(
            job, max(ranks, key=lambda rank: _gradient_elements(groups, job.shards, rank))
        )

    def holds_gradients(self, job: Job) -> bool:
        # In fp32 on the host, where the optimizer steps.
        return self.strategy.offloads or super().holds_gradients(job)

    def new_gradients(self, job: Job, gradients: Term, *, ends_full: bool) -> Iterator[Term]:
        """Yield the gradients of one micro-batch beside the rank's part of all."""
        if self.strategy.offloads or (ends_full and not job.sums_up):
            return
        # From the first gradient on, the rank's part has a buffer that holds these.
        new = Interval(0, gradients.bytes.high)
        yield replace(gradients, name="gradients of one micro-batch", bytes=new, phases=BACK)

    def bucket_phases(self, job: Job) -> tuple[Phase, ...]:
        """Return when there are buckets: from the first gradient to the end of a micro-batch."""
        return ("head", "backward")

    def buffers(self, job: Job) -> Iterator[Term]:
        weights, settings = weights_of(job), zero_settings(job)
        size, largest = self.weight_size(job), weights.trained.largest
        count = 2 if settings.overlaps else 1
        yield product(
            "buckets",
            "buckets that gradients are reduced in",
            {"buckets": count, "size": size, "reduce_bucket_size": settings.reduce_bucket},
            self.bucket_phases(job),
        )
        flat = min(max(settings.reduce_bucket, largest), weights.trained.elements)
        alone = largest if largest > settings.reduce_bucket else 0
        yield Term(
            category="buckets",
            name="a bucket flattened for its all-reduce, and the gradient that is on its way",
            # Only tensors larger than a bucket are sent separately; others move into it at once.
            bytes=Interval(alone * size, (flat + largest) * size),
            formula="size * (up to the larger of bucket and tensor, and the largest tensor)",
            inputs={"size": size, "bucket": settings.reduce_bucket, "largest tensor": largest},
            phases=("head", "backward"),
            communicated=True,
        )
        if self.steps_on_cpu:
            yield product(
                "buckets",
                "a buffer for gradients to and from the host",
                {"buffers": 2 if job.on_cpu else 1, "size": size, "largest tensor": largest},
            )

    def beside_formula(self, job: Job) -> dict[str, float]:
        if not self.strategy.offloads:
            return {}
        share = job.model.parameters / job.shards
        return {"gradients in fp32 for the CPU": (4 - self.weight_size(job)) * share}

    def host_traffic(self, job: Job) -> HostTraffic | None:
        """Return the copies of an offloaded step.

        Micro-batches are added up in host memory, over the GPU, where a step has several; the
        stepped weights come back (stage_1_and_2.py, `copy_grads_in_partition`).
        """
        if not self.steps_on_cpu:
            return None
        elements = self.stepped_share(job)
        of_micro_batch = self.weight_size(job) * elements
        several = job.accumulation if job.accumulation > 1 else 0
        return HostTraffic(
            sent=of_micro_batch * several + 4 * elements,
            received=of_micro_batch * job.accumulation,
            is_fused=True,
        )

    def reductions(self, job: Job) -> int:
        """Return how often gradients are reduced in an optimizer step."""
        return job.accumulation

    def collectives(self, job: Job, tokens: int, rank: int) -> tuple[Collective, ...]:
        weights, size = weights_of(job), self.weight_size(job)
        flat = sum(padded(group.elements, FLAT_ALIGNMENT * job.gpus) for group in weights.groups)
        return (
            self.reduction(
                job,
                "all_reduce",
                weights.trained.elements,
                times=self.reductions(job),
                formula="trained * size * times: every micro-batch under ZeRO-2, once under ZeRO-1",
            ),
            Collective(
                kind="all_gather",
                purpose="parameters",
                elements=flat,
                element_size=size,
                dtype=job.computes_in,
                calls=len(weights.groups),
                ranks=job.gpus,
                nodes=job.nodes,
                formula="flat * size, each group of the optimizer padded to 2 * ranks",
                inputs={"flat": flat, "size": size, "ranks": job.gpus},
            ),
            norm(job, len(weights.groups), 4),
        )


class Zero1(Flat):
    """Gradients are whole until the last micro-batch's are reduced and cut."""

    reduces_late = True
    more_gradients = (
        "both cut the gradients to a rank's share before the update, but ZeRO-1 holds them whole "
        "until the last micro-batch"
    )

    def holds_gradients(self, job: Job) -> bool:
        # Its part of the gradients is allocated when they are reduced.
        return self.strategy.offloads

    def new_gradients(self, job: Job, gradients: Term, *, ends_full: bool) -> Iterator[Term]:
        """Yield the whole gradients."""
        if job.sums_up or ends_full:
            whole = weights_of(job).trained.elements * self.weight_size(job)
            yield replace(
                gradients,
                name="whole gradients, until they are reduced",
                bytes=Interval.exactly(whole),
                formula="size * trained parameters",
                phases=RUNNING if job.sums_up else BACK,
            )

    def bucket_phases(self, job: Job) -> tuple[Phase, ...]:
        return RUNNING if job.sums_up else super().bucket_phases(job)

    def reductions(self, job: Job) -> int:
        return 1


class Zero2(Flat):
    """Gradients are reduced and cut in every micro-batch, and the buckets freed after it."""

    pins_masters = True

    def host_buffers(self, job: Job, states: StateBytes) -> Iterator[tuple[str, Interval, Place]]:
        partition, size = states.master.host // 4, self.weight_size(job)
        yield in_ram("weights on their way back to the GPU", partition * size)
        largest = weights_of(job).trained.largest * size
        yield in_ram("a buffer for the largest gradient", largest)
        if job.accumulation > 1:
            yield in_ram("gradients summed up over micro-batches", 4 * partition)


class Zero3(DeepSpeed):
    """Each tensor is flattened and cut by itself, and gathered for its use."""

    compiles = False
    """torch gives up on compiled layers, since DeepSpeed's hooks are compiled anew for each module,
    and `toolkit.train` refuses them."""

    def raises_frozen(self, job: Job) -> bool:
        return False

    def parameter_shards(self, job: Job) -> int:
        return job.shards

    def pieces(self, job: Job) -> tuple[int, ...]:
        return sub_groups(weights_of(job), job.shards, zero_settings(job).sub_group)

    def frozen_bytes(self, job: Job, weights: Weights) -> int:
        return sharded_frozen_bytes(job, weights, weights.frozen.partitioned(job.shards))

    def kept_gathered(self, job: Job) -> int:
        """Return the bytes of the small tensors that stay gathered beside the partition.

        A single rank's partition is already the whole.
        """
        if job.shards == 1:
            return 0
        weights, threshold = weights_of(job), zero_settings(job).persistence_threshold
        small = sum(p.at_most(threshold, job.shards) for p in (weights.trained, weights.frozen))
        return self.weight_size(job) * (small + packed_at_most(job, threshold))

    def states(self, job: Job, rank: int = 0) -> StateBytes:
        if self.strategy.offload_parameters == "nvme":
            return self._on_nvme(job)
        weights, size, partition = weights_of(job), self.weight_size(job), sum(self.pieces(job))
        masters, gradients = partition * zero_settings(job).master_size, partition * size
        parameters = partition * size + self.frozen_bytes(job, weights)
        gathered, states = self.kept_gathered(job), self.optimizer_bytes(job)
        if not self.steps_on_cpu:
            return on_gpu(
                job,
                parameters=parameters + gathered,
                masters=masters,
                gradients=gradients,
                optimizer=states,
            )
        # The scales of 4-bit weights are no parameters: an offload leaves them on the GPU.
        scales = weights.quantisation_bytes
        return StateBytes(
            parameters=Held(gpu=gathered + scales, host=parameters - scales),
            master=Held(host=masters),
            # In the model's dtype, and others to update the masters with.
            gradients=Held(host=gradients + masters),
            optimizer=Held(host=states),
        )

    def _on_nvme(self, job: Job) -> StateBytes:
        """Return the states with NVMe files. Small pieces stay in RAM.

        So do the first `MAX_IN_CPU` elements of the parameters.
        """
        size, pieces = self.weight_size(job), self.pieces(job)
        partition, in_ram = sum(pieces), 0
        for piece in pieces:
            if in_ram + piece <= MAX_IN_CPU:
                in_ram += piece
        small = sum(piece for piece in pieces if 4 * piece < SWAPPED_FROM_BYTES)
        in_files = partition - small
        scales = weights_of(job).quantisation_bytes
        frozen = self.frozen_bytes(job, weights_of(job))
        return StateBytes(
            parameters=Held(
                gpu=self.kept_gathered(job) + scales,
                host=in_ram * size + frozen - scales,
                nvme=(partition - in_ram) * size,
            ),
            master=Held(host=4 * small, nvme=4 * in_files),
            gradients=Held(host=partition * size + 4 * small, nvme=4 * in_files),
            optimizer=Held(host=8 * small, nvme=8 * in_files),
        )

    def holds_gradients(self, job: Job) -> bool:
        return True

    def keeps_gradients(self, job: Job) -> bool:
        return True

    def buffers(self, job: Job) -> Iterator[Term]:
        weights, settings = weights_of(job), zero_settings(job)
        size, largest = self.weight_size(job), weights.trained.largest
        yield product(
            "buckets",
            "the bucket that gradients are reduced in",
            {"size": size, "reduce_bucket_size": settings.reduce_bucket},
        )
        bucket = min(settings.reduce_bucket, weights.trained.elements)
        yield Term(
            category="gradients",
            name="the largest gradient on its way, and a copy laid out for its reduce-scatter",
            # A tensor larger than a bucket is sent separately, uncopied if the ranks divide it.
            bytes=Interval(largest * size, (largest + max(bucket, largest)) * size),
            formula="size * (largest tensor, and up to the larger of bucket and tensor)",
            inputs={"size": size, "bucket": settings.reduce_bucket, "largest tensor": largest},
            phases=("head", "backward"),
            communicated=True,
        )
        # Without a piece in a file, nothing is read into them: they count as no tensor of a step's.
        if job.on_cpu and self.states(job).optimizer.nvme:
            at_once = self.stepped_at_once(job)
            yield product(
                "buckets",
                "buffers for optimizer states from files",
                {"buffers": OPTIMIZER_BUFFERS, "size": 4, "stepped at once": at_once},
            )
        if job.shards == 1 and self.strategy.offload_parameters == "none":
            return
        yield from self._live(job, weights, settings)

    def _live(self, job: Job, weights: Weights, settings: ZeroSettings) -> Iterator[Term]:
        """Yield gathered weights that ZeRO-3 keeps for another use (max_reuse_distance).

        At the end of forward, these are the weights that forward and backward use within that
        distance. With checkpointing, each layer is used a third time in between.
        """
        element = packed_size(job)
        total = job.model.parameters
        meetings = 2 if job.checkpointing == "none" else 3
        gathered = min(total, settings.max_live // meetings + units_of(job.model).largest)
        if not job.zero_init and job.checkpointing == "none":
            # A plain linear layer keeps a view of its gathered weight until backward.
            gathered = total
        # A model that fits is kept whole; of a larger one, at least the tensor in use is kept.
        least = gathered if gathered == total else min(gathered, units_of(job.model).widest)
        yield Term(
            category="gathered",
            name="gathered weights",
            bytes=Interval(least * element, gathered * element),
            formula=f"size * (largest tensor to min(parameters, max_live / {meetings} + layer))",
            inputs={"size": element, "parameters": total, "max_live": settings.max_live},
            phases=RUNNING,
        )
        if gathered < total:
            ahead = settings.prefetch_bucket
            yield Term(
                category="gathered",
                name="weights fetched ahead, as they arrive and as they are used",
                bytes=Interval(0, 2 * ahead * element),
                formula="up to 2 * size * prefetch_bucket_size",
                inputs={"size": element, "prefetch_bucket_size": ahead},
                phases=RUNNING,
                communicated=True,
            )

    def lasting_buckets(self, job: Job) -> int:
        return zero_settings(job).reduce_bucket * self.weight_size(job)

    def beside_formula(self, job: Job) -> dict[str, float]:
        differences: dict[str, float] = {}
        if self.strategy.offloads:
            share = job.model.parameters / job.shards
            differences["a second copy of gradients, in fp32, for the CPU"] = 4 * share
        if job.shards > 1:
            threshold = zero_settings(job).persistence_threshold
            small = weights_of(job).trained.at_most(threshold, job.shards)
            differences["small tensors that stay gathered"] = small * self.weight_size(job)
        return differences

    def host_buffers(self, job: Job, states: StateBytes) -> Iterator[tuple[str, Interval, Place]]:
        if self.strategy.offload_parameters != "nvme":
            return
        size = self.weight_size(job)
        resident = min(MAX_IN_CPU, weights_of(job).trained.partitioned(job.shards)) * size
        yield in_ram("parameters kept in RAM", max(0, resident - states.parameters.host))
        swap = PARAMETER_BUFFERS * PARAMETER_BUFFER_ELEMENTS * size
        yield in_ram("buffers for parameters from files", swap)
        buffers = OPTIMIZER_BUFFERS * 4 * self.stepped_at_once(job)
        yield in_ram("buffers for optimizer states from files", buffers)

    def host_traffic(self, job: Job) -> HostTraffic | None:
        """Return the copies of an offloaded step.

        Gradients are sent in the weights' dtype in every micro-batch, and come back each time to be
        added up over the GPU, the first time as well (stage3.py, `partition_grads`).
        """
        if not self.steps_on_cpu:
            return None
        elements, size = self.stepped_share(job), self.weight_size(job)
        summed = size * elements * job.accumulation
        gathered = 0.0
        if self.strategy.offload_parameters != "none":
            gathers = [c for c in Zero3.collectives(self, job, 0, 0) if c.kind == "all_gather"]
            gathered = sum(c.elements * c.element_size * c.times for c in gathers) / job.gpus
        stepped = 0 if gathered else size * elements
        # Master, both states and the gradient come from a disk, the first three go back; the 16-bit
        # weights come for each gather and go back once.
        of_disk = 16 + 12 + size * (1 + 2 * job.accumulation)
        return HostTraffic(
            sent=summed + 4 * elements,
            received=summed + stepped + gathered,
            is_fused=True,
            on_disk=of_disk if self.strategy.offload_optimizer == "nvme" else 0,
        )

    def volume(self, trained: int, everything: int, ranks: int) -> int:
        return 2 * everything + trained

    def collectives(self, job: Job, tokens: int, rank: int) -> tuple[Collective, ...]:
        weights, size, settings = weights_of(job), self.weight_size(job), zero_settings(job)
        threshold = settings.persistence_threshold
        gathered_if = partial(
            gathered_elements,
            job.model,
            checkpointing=job.checkpointing,
            threshold=threshold,
            reuse_distance=settings.max_reuse,
            max_live=settings.max_live,
            ranks=job.gpus,
        )
        first, again = gathered_if(
            trains_base=job.method == "full", trains_embedding=job.trains_head
        )
        packed = packed_at_most(job, threshold)
        persistent = packed + sum(
            part.at_most(threshold, job.gpus) for part in (weights.trained, weights.frozen)
        )
        gathered = first + again
        gradients = weights.trained.partitioned(job.gpus) * job.gpus
        if job.method != "full":
            # Adapters of a few thousand elements persist like norms; the others come and go with
            # the layers that they stand in, like 4-bit weights.
            small = weights.adapters.at_most(threshold, job.gpus)
            large = weights.adapters.partitioned(job.gpus) * job.gpus - small
            _, as_trained = gathered_if(trains_base=True, trains_embedding=True)
            gathered += round(large * (1 + as_trained / first))
            # Small ones stay; of them, only those that were small unpacked are not in `gathered`.
            saved = packed_savings(job, weights.packed.partitioned(job.shards))
            saved += packed - weights.packed.at_most(threshold, job.gpus)
            gathered -= round(saved * (1 + again / first))
        gather = partial(
            Collective,
            kind="all_gather",
            purpose="parameters",
            element_size=size,
            dtype=job.computes_in,
            ranks=job.gpus,
            nodes=job.nodes,
        )
        return (
            gather(
                elements=gathered,
                times=job.accumulation,
                calls=-(-gathered // max(1, settings.prefetch_bucket)),
                formula=(
                    "(forward + backward) * size * micro-batches; backward gathers again what "
                    "isn't among the last max_live elements, nor used again within max_reuse"
                ),
                inputs={
                    "forward": first,
                    "backward": again,
                    "size": size,
                    "micro-batches": job.accumulation,
                    "max_live": settings.max_live,
                    "max_reuse": settings.max_reuse,
                },
                exact=not again,
            ),
            gather(
                elements=persistent,
                calls=max(1, job.model.layers * 2),
                formula="persistent * size: what is never released, gathered after each step",
                inputs={"persistent": persistent, "size": size},
            ),
            self.reduction(
                job,
                "reduce_scatter",
                gradients,
                times=job.accumulation,
                formula=(
                    "trained * size * times: every micro-batch, each tensor padded to the ranks"
                ),
            ),
            norm(job, len(weights.groups), 8 if self.strategy.offload_optimizer == "none" else 4),
        )


STAGES: Final[Mapping[int, type[DeepSpeed]]] = {0: Flat, 1: Zero1, 2: Zero2, 3: Zero3}


def partition_elements(group: Tensors, shards: int) -> int:
    """Return the elements of a rank's part of a flat group of ZeRO-1 and 2, with padding."""
    alignment = FLAT_ALIGNMENT * shards
    return -(-group.elements // alignment) * FLAT_ALIGNMENT


def _gradient_elements(groups: tuple[Tensors, ...], shards: int, rank: int) -> int:
    """Return the elements in the buffers of a rank's gradients under ZeRO-1 and 2.

    A tensor at the border of two partitions is copied whole by both ranks; the padding of the last
    partition is a separate tensor.
    """
    total = 0
    for group in groups:
        partition = partition_elements(group, shards)
        start = rank * partition
        inside = max(0, min(start + partition, group.elements) - start)
        total += group.whole_between(start, start + partition) + partition - inside
    return total


def sub_groups(weights: Weights, shards: int, limit: int) -> tuple[int, ...]:
    """Return the sizes of ZeRO-3's sub-groups: whole tensors, until `limit` is reached."""
    pieces: list[int] = []
    for group in weights.groups:
        if group.partitioned(shards) <= limit:
            pieces.append(group.partitioned(shards))
            continue
        open_piece = 0
        for size in group.sizes:
            open_piece += -(-size // shards)
            if open_piece >= limit:
                pieces.append(open_piece)
                open_piece = 0
        if open_piece:
            pieces.append(open_piece)
    return tuple(pieces)
