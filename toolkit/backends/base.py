"""Backend: what every family answers before there is a rank, and the answer of most of them.

A family overrides what it does otherwise. Bytes and elements are those of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from toolkit.backends.launcher import mixed, ports
from toolkit.errors import UsageError
from toolkit.jobs import optimizers
from toolkit.jobs.config_options import ConfigOptions
from toolkit.jobs.job import Job
from toolkit.jobs.shape import ModelShape
from toolkit.jobs.terms import Collective, Held, Interval, Place, StateBytes, Term
from toolkit.jobs.weights import Tensors, Weights, weights_of
from toolkit.strategies import DTYPE_BYTES, Strategy

AnyJob = TypeVar("AnyJob", bound=Job)

PINNED = Interval(1, 2)
"""Factor on pinned buffers: torch's cache rounds each up to a power of two."""

PROCESS = Interval(1 << 30, 3 << 30)
"""RAM of a rank's Python, torch and libraries: 1 GiB in rehearsals on CPUs, plus CUDA's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTraffic:
    """Bytes that a rank copies in an optimizer step that runs on the CPU."""

    sent: float
    received: float
    is_fused: bool
    """Whether one kernel steps, as DeepSpeed's own optimizer for CPUs does."""

    on_disk: float = 0.0
    """Bytes of a parameter that are read from a disk and written to it; 0 without one."""


class Backend:
    """A strategy's backend."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    # Ranks.

    @property
    def least_ranks(self) -> int:
        """The fewest ranks that it trains on as itself; DDP would only replicate to nowhere."""
        return 2

    def groups_problem(self, ranks: int) -> str | None:
        """Say why so many ranks don't divide into its groups; None where they do."""
        return None

    def ranks_problem(self, ranks: int) -> str | None:
        """Say why it cannot train on so many ranks; None where it can."""
        least = self.least_ranks
        if ranks < least:
            return (
                f"{self.strategy.name} needs at least {least} process{'es' if least > 1 else ''}, "
                f"{ranks} asked. For one process, use single."
            )
        return self.groups_problem(ranks)

    @property
    def makes_groups(self) -> bool:
        """Whether it needs more ranks than others, for replicas or pipelines of its own."""
        return self.strategy.replicas > 1 or self.strategy.pipeline is not None

    def ranks_among(self, usual: int) -> int:
        """Return its ranks in a comparison in which the others have `usual`.

        Raises:
            UsageError: they cannot be divided into its groups.
        """
        if not self.makes_groups:
            return usual
        strategy = self.strategy
        pipeline = strategy.tensor * (strategy.pipeline or 0)
        if pipeline and usual % pipeline == 0:
            return usual
        # A group of one rank would not shard.
        ranks = max(usual, strategy.replicas * max(2, strategy.tensor), 2 * pipeline)
        unit = pipeline or strategy.replicas
        if ranks % unit:
            groups = f"pipelines of {unit} ranks" if pipeline else f"{unit} groups of equal size"
            raise UsageError(
                f"{strategy.name} has {groups}, which {ranks} processes do not make. Choose "
                f"--num_processes {ranks + unit - ranks % unit}, or leave it out."
            )
        return ranks

    # Files of a launch.

    reads_json: bool = False
    """Whether DeepSpeed trains it, which reads a JSON file of its own, and steps on the CPU by an
    optimizer of its own."""

    distributed_type: str = "MULTI_GPU"
    """Accelerate's name of the kind of launch: plain ranks, of which a family may make more."""

    has_key: bool = True
    """Whether a key of Accelerate's file asks for it; otherwise `--strategy` does."""

    wraps_layers: bool = False
    """Whether the file may name the class of layers to wrap."""

    def takes_replicas(self) -> bool:
        """Whether its groups that each hold a whole model can be of any number."""
        return False

    cutter: str = ""
    """What cuts parameters in a way that some optimizers cannot step on, with its verb."""

    cuts_flat: bool = False
    """Whether it is cut into plain tensors, on which most optimizers step."""

    def launcher(
        self, processes: int, options: ConfigOptions, deepspeed_json: Path | None
    ) -> dict[str, Any]:
        """Return the sections of Accelerate's file that are not those of every launch.

        Raises:
            UsageError: DeepSpeed is not told the path of its JSON.
        """
        return ports(options) | mixed(options) | self.sections(processes, options)

    def launch_words(self, job: Job) -> list[str]:
        """Return the options of `accelerate launch` that adapt the bundled file to a job."""
        return []

    def config_problem(self, config: Mapping[str, Any]) -> str | None:
        """Say why a config does not go with how rows are split; None where it does.

        `config` is DeepSpeed's, empty beside FSDP.
        """
        return None

    def sections(self, processes: int, options: ConfigOptions) -> dict[str, Any]:
        """Return the sections of the family."""
        return {}

    def json_file(self, options: ConfigOptions) -> dict[str, Any] | None:
        """Return the contents of DeepSpeed's file; None where DeepSpeed has no part in it."""
        return None

    # What it does with a training, for those who refuse a request or look for a better one.

    splits_model: bool = False
    """Whether several ranks share one copy of the model's computation, by matrices or by layers, so
    that no adapters stand beside the whole."""

    splits_matrices: bool = False
    """Whether several ranks share every matrix."""

    splits_rows: bool = False
    """Whether several ranks share each row, a piece each."""

    has_server: bool = False
    """Whether one rank holds the optimizer and steps for all."""

    in_stages: bool = False
    """Whether ranks hold different layers, and more micro-batches in a step idle less."""

    takes_schedule: bool = False
    """Whether a run may choose the schedule of its stages."""

    shards_rows: bool = False
    """Whether FSDP2 deals the rows of tensors out, and gathers layers that can be fetched ahead."""

    unsynced: str = ""
    """What decides when gradients are reduced, where the training loop does not."""

    def is_worth_one_gpu(self) -> bool:
        """Return whether one GPU gains by it, which keeps all that others would shard."""
        return self.steps_on_cpu

    def prices(self) -> Iterator[str]:
        """Yield in words what a training by it gives up."""
        if self.splits_matrices:
            yield "activations cross the wire in every layer, and nothing is computed meanwhile"
        elif self.strategy.offloads:
            yield "each step waits for PCIe and the CPU"
        elif self.strategy.shards_parameters:
            if self.splits_rows:
                yield (
                    "each layer waits for the GPUs that share a row, and a step for its rows in "
                    "turn"
                )
            yield "weights are gathered layer by layer, again in every micro-batch"

    # Jobs.

    def check(self, job: Job) -> None:
        """Raise UsageError where it cannot train a job, or not on so many GPUs."""
        if problem := self.groups_problem(job.gpus):
            raise UsageError(problem)

    def part(self, job: AnyJob) -> AnyJob:
        """Return what one rank of a job computes, the first of a pipeline; else the job itself.

        Raises:
            UsageError: the planner does not know how the model is split, or it cannot be.
        """
        return job

    def parts_of_ranks(self, job: AnyJob) -> list[AnyJob]:
        """Return what each rank computes where they hold different layers; empty elsewhere."""
        return []

    def split_problem(self, size: int, model: ModelShape) -> str | None:
        """Say why `size` ranks can't share the rows of a model; None where they can."""
        return None

    def different_parts(self, job: AnyJob) -> Sequence[AnyJob]:
        """Return the parts of ranks, without those that need no more than an earlier one."""
        return [self.part(job)]

    # Model states.

    whole: bool = False
    """Whether every rank has the states of all that it computes, uncut."""

    takes_bf16_weights: bool = False
    """Whether weights in 16 bits can be stepped on by masters of our own (`bf16_weights`)."""

    casts_weights: bool = True
    """Whether weights in use are in the compute dtype, where DDP computes under autocast alone."""

    compiles: bool = True
    """Whether layers can be compiled."""

    reduces_late: bool = False
    """ZeRO-1: gradients are whole until the last micro-batch's are reduced and cut."""

    has_buckets: bool = False
    """DDP: gradients are averaged in buckets, of which they may be views."""

    more_gradients: str = ""
    """Why gradients take more than another run's with the same states, as a clause."""

    def has_masters(self, job: Job) -> bool:
        """Whether the step is on fp32 copies of the weights."""
        return job.bf16_weights is not None

    def autocasts(self, job: Job) -> bool:
        """Whether torch's autocast runs."""
        return job.precision != "no"

    def weight_size(self, job: Job) -> int:
        """Return the bytes of an element of a trained parameter, as a rank keeps it.

        peft keeps adapters in fp32. DDP keeps the loaded dtype, but for `bf16_weights`.

        Raises:
            UsageError: DeepSpeed is to compute in fp32 with weights of 16 bits, which it refuses.
        """
        if job.method != "full":
            return 4
        return DTYPE_BYTES["bfloat16" if job.bf16_weights else job.dtype]

    def raises_frozen(self, job: Job) -> bool:
        """Whether embeddings, norms and head of a 4-bit model are held in fp32."""
        return job.method == "qlora" and job.raises_frozen

    def states(self, job: Job, rank: int = 0) -> StateBytes:
        """Return the model states that `rank` holds."""
        raise NotImplementedError

    def fullest_states(self, job: Job) -> StateBytes:
        """Return the states of the fullest rank; padding falls on the first ranks."""
        return self.states(job)

    def kept_gathered(self, job: Job) -> int:
        """Return the bytes of parameters that stay gathered beside the rank's own part."""
        return 0

    def parameter_shards(self, job: Job) -> int:
        """Return the ranks that share one copy of the parameters."""
        return 1

    def frozen_bytes(self, job: Job, weights: Weights) -> int:
        """Return the bytes of the frozen weights."""
        size = 4 if self.raises_frozen(job) else job.compute_size
        return weights.frozen.elements * size + weights.quantised_bytes + weights.quantisation_bytes

    def stepped_at_once(self, job: Job) -> int:
        """Return the elements that the optimizer updates at one time."""
        return weights_of(job).trained.elements

    def stepped_tensors(self, job: Job) -> int:
        """Return the tensors that the optimizer counts steps of, on the device."""
        return len(weights_of(job).trained.sizes)

    # Gradients, from backward to the step.

    def holds_gradients(self, job: Job) -> bool:
        """Whether the rank also holds its gradients during forward."""
        return job.sums_up or job.zeroes_gradients

    def keeps_gradients(self, job: Job) -> bool:
        """Whether the memory of gradients stays between two steps."""
        return False

    def ends_unreduced(self, job: Job) -> bool:
        """Whether backward ends with whole gradients beside the rank's part of them."""
        return self.reduces_late

    def sync_saves_memory(self, job: Job) -> bool:
        """Whether gradients that are reduced in every micro-batch are fewer than summed ones."""
        return False

    def tied_bytes(self, job: Job, last: float) -> int:
        """Return the bytes that a tied embedding needs at the end of backward beside its gradient.

        `last` are the bytes of the layer whose backward is last.
        """
        return 0

    def new_gradients(self, job: Job, gradients: Term, *, ends_full: bool) -> Iterator[Term]:
        """Yield what a rank holds beside its `gradients` until they are added and reduced.

        With `ends_full`, backward needs the most memory at its end.
        """
        yield from ()

    # Buffers.

    def buffers(self, job: Job) -> Iterator[Term]:
        """Yield the terms beside the states, except for the optimizer's step."""
        yield from ()

    def exchanges(self, job: Job, part: Job, tokens: int) -> Iterator[Term]:
        """Yield what a rank holds to exchange activations with others of its row or layer.

        `tokens` are those that it computes of a micro-batch of its `part` of the job.
        """
        yield from ()

    def lasting_buckets(self, job: Job) -> int:
        """Return the bytes of buckets that are always there."""
        return 0

    def beside_formula(self, job: Job) -> dict[str, float]:
        """Return the bytes of what the formula of the field leaves out, by their names."""
        return {}

    def communicators(self, job: Job) -> int:
        """Return the groups of ranks in which a rank talks to others."""
        return 1

    # What lies outside of the GPU.

    pins_masters: bool = False

    def ranks_with_states(self, job: Job) -> int:
        """Return the ranks of a node that hold states outside of their GPUs."""
        return job.gpus // job.nodes

    def off_gpu(self, job: Job, states: StateBytes) -> Iterator[tuple[str, Interval, Place]]:
        """Yield the data of a rank outside its GPU: name, bytes, place."""
        pins_parameters = self.strategy.offload_parameters == "cpu"
        yield in_ram("parameters", states.parameters.host, pinned=pins_parameters)
        yield in_ram("master weights", states.master.host, pinned=self.pins_masters)
        yield in_ram("gradients", states.gradients.host)
        yield in_ram("optimizer states", states.optimizer.host, pinned=False)
        yield from self.host_buffers(job, states)
        if self.strategy.offloads:
            yield "the processes themselves", PROCESS, "host"
        yield "states in files", Interval.exactly(states.total.nvme), "nvme"

    def host_buffers(self, job: Job, states: StateBytes) -> Iterator[tuple[str, Interval, Place]]:
        """Yield the buffers of an offload in a node's RAM."""
        yield from ()

    @property
    def steps_on_cpu(self) -> bool:
        """Whether the optimizer's states lie outside of the GPU, and its step too."""
        return self.strategy.offload_optimizer != "none"

    def step(self, job: Job) -> Iterator[Term]:
        """Yield the terms of the optimizer's step on the GPU, or on the CPU of a rehearsal."""
        if self.steps_on_cpu and not job.on_cpu:
            return
        at_once, largest = self.stepped_at_once(job), weights_of(job).trained.largest
        size, formula = optimizers.beside_a_step(job, self.weight_size(job), at_once, largest)
        if size:
            yield step_term("the optimizer's temporaries", size, formula, at_once)

    def stepped_share(self, job: Job) -> int:
        """Return the trained elements that a rank updates, without padding."""
        shards = job.shards if self.strategy.shards_optimizer else 1
        return -(-weights_of(job).trained.elements // shards)

    def host_traffic(self, job: Job) -> HostTraffic | None:
        """Return the copies of a step on the CPU; None for a step on the GPU."""
        return None

    # Collectives and time.

    def traffic(self, job: Job, tokens: int, rank: int) -> tuple[Collective, ...]:
        """Return the collectives of one rank in one optimizer step in which it reads `tokens`."""
        return () if job.gpus == 1 else self.collectives(job, tokens, rank)

    def collectives(self, job: Job, tokens: int, rank: int) -> tuple[Collective, ...]:
        """Return the collectives of `traffic` among several ranks."""
        raise NotImplementedError

    def overlaps(self, job: Job) -> bool:
        """Whether collectives go on beside the computing."""
        return True

    def waiting_share(self, job: Job) -> float | None:
        """Return the bubble of a pipeline; None where no rank waits for another's layers."""
        return None

    all_reduces: str = ""
    """Why gradients are all-reduced where the papers reduce-scatter them, as a sentence."""

    stays_gathered: str = "what is outside of the layers is not freed between forward and backward"
    """Why weights are gathered less often than in the papers, as a sentence."""

    def gathers(self) -> int:
        """Return how often the papers gather the parameters in a micro-batch."""
        return 2 if self.strategy.shards_parameters else 0

    def textbook(self, *, trained: int, everything: int, ranks: int) -> int:
        """Return the elements that the papers have a rank send in a step of one micro-batch.

        For many ranks 2 psi with data parallelism and ZeRO-1/2, 3 psi where parameters are sharded
        and gathered twice (ZeRO, arXiv 1910.02054, section 7), 2 psi where they stay gathered;
        times the element's size and (N - 1) / N. A parameter server sends psi to each of N - 1
        workers. Frozen parameters are gathered and have no gradients: `trained` are the elements
        that have some, `everything` is all of them.
        """
        if self.strategy.data_parallel_size(ranks) == 1:
            return 0  # of a lone tensor group or pipeline, activations alone cross the wire
        # A tensor group's part of the model is sharded among the groups, and a pipeline's is cut.
        parts = self.strategy.tensor * self.strategy.pipeline_ranks(ranks)
        return self.volume(trained // parts, everything // parts, ranks)

    def volume(self, trained: int, everything: int, ranks: int) -> int:
        """Return `textbook` for the part of the model that one rank of a group computes."""
        return 2 * trained


def in_ram(name: str, held: int, *, pinned: bool = True) -> tuple[str, Interval, Place]:
    """Return data of a rank in its node's RAM."""
    return name, PINNED.times(held) if pinned else Interval.exactly(held), "host"


def on_gpu(
    job: Job, *, parameters: int, masters: int = 0, gradients: int, optimizer: int
) -> StateBytes:
    """Return states that are all on the GPU, but for paged ones of an optimizer."""
    paged = optimizers.is_paged(job.optimizer)
    return StateBytes(
        parameters=Held(gpu=parameters),
        master=Held(gpu=masters),
        gradients=Held(gpu=gradients),
        optimizer=Held(host=optimizer) if paged else Held(gpu=optimizer),
    )


def step_term(name: str, size: int, formula: str, at_once: int) -> Term:
    """Return what the optimizer's step holds beside states and gradients."""
    return Term(
        category="temporaries",
        name=name,
        bytes=Interval.exactly(size),
        formula=formula,
        inputs={"stepped at once": at_once},
        phases=("step",),
    )


def sharded_frozen_bytes(job: Job, weights: Weights, frozen: int) -> int:
    """Return the bytes of frozen weights of which a rank has a shard of `frozen` elements.

    bitsandbytes keeps 4-bit values as one column of the storage dtype, which is sharded; the scales
    are no parameters, so each rank has all of them.
    """
    size = job.compute_size
    values = sum(-(-n // (2 * size) // job.shards) * size for n in weights.packed.sizes)
    return frozen * size + values + weights.quantisation_bytes


def packed_size(job: Job) -> float:
    """Return the mean bytes of a gathered element; an element of 4 bits has half a byte."""
    weights, size = weights_of(job), job.compute_size
    if not weights.packed.sizes:
        return size
    packed = weights.packed.elements
    unpacked = weights.frozen.elements + weights.trained.elements
    return (packed / 2 + unpacked * size) / (packed + unpacked)


def packed_savings(job: Job, shard: int) -> int:
    """Return the elements by which packed 4-bit values are fewer than the weights they hold.

    They travel as elements of the storage dtype. `shard` are the 4-bit weights of one rank.
    """
    packed = weights_of(job).packed
    if not packed.sizes:
        return 0
    values_per_element = 2 * job.compute_size
    return shard * job.shards - _packed_elements(packed, job.shards, values_per_element)


def packed_at_most(job: Job, threshold: int) -> int:
    """Return the elements, padded to the shards, of packed 4-bit tensors of up to `threshold`."""
    sizes = (-(-size // (2 * job.compute_size)) for size in weights_of(job).packed.sizes)
    return sum(padded(size, job.shards) for size in sizes if size <= threshold)


@lru_cache(maxsize=512)
def _packed_elements(packed: Tensors, shards: int, values_per_element: int) -> int:
    return sum(padded(size // values_per_element, shards) for size in packed.sizes)


def norm(job: Job, numbers: int, size: int) -> Collective:
    """Return the all-reduce of squared gradient norms, added up before gradients are clipped."""
    return Collective(
        kind="all_reduce",
        purpose="norm",
        elements=numbers,
        element_size=size,
        dtype="float32" if size == 4 else "float64",
        calls=numbers,
        ranks=job.gpus,
        nodes=job.nodes,
        formula="one number for each group of the optimizer",
        inputs={"numbers": numbers},
    )


def padded(elements: int, parts: int) -> int:
    """Return `elements` rounded up to a multiple of `parts`."""
    return -(-elements // parts) * parts
