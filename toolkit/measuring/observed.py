"""Observations of any script by hooks alone: its models, its optimizers, its rows.

Nothing is sent in a step. At the end each rank makes a `Report`, and `between_ranks` holds those of
all ranks against each other.

Also found is a loss of a user's own whose step adds up the means of its micro-batches. The Trainer
(transformers 5.24) passes `compute_loss` the number of tokens of the whole step, and does not
divide by the micro-batches. A subclass that leaves the number out, as examples for older releases
do, trains with gradients that are as many times too large as a step has micro-batches.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from toolkit.engines.backend import backend_of
from toolkit.engines.loading import loads_on_rank_0
from toolkit.engines.names import plain_name
from toolkit.engines.optimizers import optimizer_of
from toolkit.engines.tensors import is_spread, named_parameters
from toolkit.engines.wrapped import world_size
from toolkit.engines.wrappers import (
    class_name,
    innermost,
    is_wrapped_twice,
    left_out_of_reduction,
    optimizer_inside,
    watch_engine,
    watch_wrapping,
)
from toolkit.measuring.between_ranks import ModelReport, OptimizerReport, Report, TensorReport
from toolkit.measuring.forwards import Forwards
from toolkit.measuring.replica_checks import checksums
from toolkit.measuring.stepped import Optimizers, Stepped, SteppedTensor, rates_of


@dataclass(eq=False)
class ObservedModel:
    """A model that a script has prepared, or wrapped by itself."""

    model: Any
    forwards: Forwards
    at_start: dict[str, int] | None
    """Sums of the weights that this rank began with; None where it had none of its own."""

    steps: int = 0
    steps_in_evaluation_mode: int = 0
    most_micro_batches: int = 0
    parameters: dict[str, Any] = field(init=False)
    """Its parameters when it was wrapped."""

    def __post_init__(self) -> None:
        self.parameters = dict(named_parameters(self.model))

    @property
    def name(self) -> str:
        return class_name(self.model)

    def stepped(self) -> None:
        """Note an optimizer step with some of its parameters."""
        micro_batches, in_evaluation_mode = self.forwards.take_step()
        self.steps += 1
        self.steps_in_evaluation_mode += in_evaluation_mode
        self.most_micro_batches = max(self.most_micro_batches, micro_batches)


class Place(NamedTuple):
    """Where a stepped tensor stands."""

    model: ObservedModel
    name: str
    shard: tuple[int, ...] | None
    """As `Backend.parameter_shards` says; None where no other rank has the same shard."""


class Observed:
    """Observes the models, optimizers and rows of a script from `start` to `close`."""

    def __init__(self) -> None:
        self.models: list[ObservedModel] = []
        self.optimizers = Optimizers(self._is_inside, self._stepped)
        self._prepared: weakref.WeakSet[Any] = weakref.WeakSet()
        self._of_engines: list[Stepped] = []
        self._accelerators: list[Any] = []
        self._schedulers: list[Any] = []
        self._places: dict[int, Place | None] = {}
        self._ranks = 1
        self._hooks = ExitStack()

    def start(self) -> None:
        """Follow each optimizer, and each model that DDP is put around."""
        self.optimizers.start()
        self._hooks.callback(watch_wrapping(self.wrapped))

    def close(self) -> None:
        """Remove all hooks."""
        self.optimizers.close()
        self._hooks.close()
        for observed in self.models:
            observed.forwards.close()

    def wrapped(self, model: Any, at_start: dict[str, int] | None = None) -> None:
        """Observe a wrapped model.

        Args:
            model: As the script trains with it.
            at_start: `sums_at_start` of it, from before it was wrapped.
        """
        inside = innermost(model)
        for observed in self.models:
            if innermost(observed.model) is inside:
                observed.at_start = observed.at_start or at_start
                if observed.model is not model:
                    observed.forwards.close()
                    observed.model, observed.forwards = model, Forwards(model)
                return
        self.models.append(ObservedModel(model, Forwards(model), at_start))
        if optimizer_inside(model) is not None:
            self._follow_engine(self.models[-1])

    def prepared(
        self, accelerator: Any, objects: Iterable[Any], at_start: Iterable[dict[str, int] | None]
    ) -> None:
        """Observe what `Accelerator.prepare` returned; `at_start` has an entry for each model."""
        self._ranks = world_size()  # a script may end its process group itself
        if accelerator not in self._accelerators:
            self._accelerators.append(accelerator)
        starts = iter(at_start)
        for made in objects:
            if isinstance(made, torch.nn.Module):
                self.wrapped(made, next(starts))
            elif hasattr(made, "param_groups"):
                self._prepared.add(optimizer_of(made))
            elif hasattr(made, "step_with_optimizer"):
                self._schedulers.append(made)

    def unprepared(self) -> list[Stepped]:
        """Return the optimizers that have stepped and that no Accelerator prepared."""
        return [s for s in self.optimizers.all if s.steps and not self._is_prepared(s)]

    def report(self) -> Report:
        """Return what this rank saw; sums the tensors once more."""
        self._place_all()
        return Report(
            ended_well=True,
            models=[self._of_model(observed) for observed in self.models],
            optimizers=[self._of_optimizer(s) for s in self.optimizers.all if s.steps],
            notes=[*self._notes()],
        )

    # While the script runs

    def _is_inside(self, optimizer: Any) -> bool:
        return any(optimizer_inside(observed.model) is optimizer for observed in self.models)

    def _follow_engine(self, observed: ObservedModel) -> None:
        """Follow an engine, which steps by itself on flat copies, by its model's parameters."""
        inner: Any = optimizer_inside(observed.model)
        stepped = self.optimizers.add(type(inner).__name__)
        self._of_engines.append(stepped)

        def trained() -> list[Any]:
            return [p for p in innermost(observed.model).parameters() if p.requires_grad]

        def after() -> None:
            stepped.done(trained(), rates_of(inner.param_groups))
            self._stepped(stepped)

        self._hooks.callback(
            watch_engine(observed.model, before=lambda: stepped.begin(trained()), after=after)
        )

    def _stepped(self, stepped: Stepped) -> None:
        if any(number not in self._places for number in stepped.tensors):
            self._place_all()
        places = (self._places[number] for number in stepped.tensors)
        for observed in {place.model for place in places if place is not None}:
            observed.stepped()

    def _place_all(self) -> None:
        """Find the tensors that have no place yet: adapters may be attached at any time."""
        stepped = [number for s in self.optimizers.all for number in s.tensors]
        if any(self._places.get(number) is None for number in stepped):
            places = {
                id(parameter): place
                for observed in self.models
                for place, parameter in self._placed(observed)
            }
            for number in stepped:
                self._places[number] = self._places.get(number) or places.get(number)

    def _placed(self, observed: ObservedModel) -> Iterator[tuple[Place, Any]]:
        """Yield the present parameters of a model, each with its place."""
        alone = left_out_of_reduction(observed.model)
        shards = {name: shard for name, _, shard in backend_of(observed.model).parameter_shards()}
        for name, parameter in named_parameters(observed.model):
            shard = None if name in alone else shards.get(name)
            yield Place(observed, name, shard), parameter

    # At the end

    def _is_prepared(self, stepped: Stepped) -> bool:
        prepared = [self.optimizers.of(optimizer) for optimizer in self._prepared]
        return any(stepped is own for own in (*prepared, *self._of_engines))

    def _of_optimizer(self, stepped: Stepped) -> OptimizerReport:
        held = stepped.tensors.values()
        # A flat copy of parameters is no parameter, and one that is spread belongs to a wrapper.
        plain = all(isinstance(h.tensor, torch.nn.Parameter) for h in held) and bool(held)
        placed = any(
            self._places[number] or is_spread(h.tensor) for number, h in stepped.tensors.items()
        )
        return OptimizerReport(
            name=stepped.name,
            steps=stepped.steps,
            tensors=len(held),
            highest_rate=stepped.highest_rate,
            has_changed=stepped.has_changed,
            is_of_no_model=plain and not placed,
            history=stepped.history,
        )

    def _of_model(self, observed: ObservedModel) -> ModelReport:
        forwards = observed.forwards
        rows = forwards.rows
        tensors = dict(self._tensors(observed))
        unprepared = {name for name, tensor in tensors.items() if not tensor.is_prepared}
        before = dict(self._tensors(observed, prepared_alone=True)) if unprepared else {}
        return ModelReport(
            name=observed.name,
            data_parallel_rank=backend_of(observed.model).data_parallel_rank(),
            at_start=observed.at_start,
            tensors=dict(self._others(observed)) | tensors,
            prepared_before={name: before[name] for name in unprepared & before.keys()},
            added=[*self._added(observed, tensors)],
            rows=[zlib.crc32(repr(of_forward).encode()) for of_forward in rows],
            different_rows=len({row for of_forward in rows for row in of_forward}),
            bypassed=forwards.bypassed,
        )

    def _tensors(
        self, observed: ObservedModel, *, prepared_alone: bool = False
    ) -> Iterator[tuple[str, TensorReport]]:
        """Yield the parameters that this rank has stepped, each as its last optimizer left it."""
        latest: dict[str, tuple[SteppedTensor, int]] = {}
        stepped = [s for s in self.optimizers.all if s.steps]
        for index, optimizer in enumerate(stepped):
            if prepared_alone and not self._is_prepared(optimizer):
                continue
            for number, held in optimizer.tensors.items():
                place = self._places[number]
                if place is None or place.model is not observed or not held.steps:
                    continue
                if place.name not in latest or latest[place.name][0].at < held.at:
                    latest[place.name] = held, index
        for name, (held, index) in latest.items():
            place = self._places[id(held.tensor)]
            if place is not None and place.shard is not None:
                yield (
                    name,
                    TensorReport(
                        shard=[*place.shard],
                        after=held.after,
                        now=held.now(),
                        steps=held.steps,
                        optimizer=index,
                        is_prepared=self._is_prepared(stepped[index]),
                    ),
                )

    def _added(self, observed: ObservedModel, stepped: Iterable[str]) -> Iterator[str]:
        """Yield the stepped parameters that are not those of when the model was wrapped."""
        now = {place.name: parameter for place, parameter in self._placed(observed)}
        for name in stepped:
            if name in now and now[name] is not observed.parameters.get(name):
                yield name

    def _others(self, observed: ObservedModel) -> Iterator[tuple[str, TensorReport]]:
        """Yield the trained parameters as they are now, for ranks that have not stepped them."""
        for place, parameter in self._placed(observed):
            if parameter.requires_grad and place.shard is not None:
                now = SteppedTensor(parameter, before=None).now()
                yield (
                    place.name,
                    TensorReport(
                        shard=[*place.shard],
                        after=None,
                        now=now,
                        steps=0,
                        optimizer=None,
                        is_prepared=False,
                    ),
                )

    def _notes(self) -> Iterator[str]:
        trained = [observed for observed in self.models if observed.steps]
        for observed in trained:
            if evaluating := observed.steps_in_evaluation_mode:
                yield (
                    f"{evaluating} of {observed.steps} optimizer steps were made while "
                    f"{observed.name} was in evaluation mode, without dropout: from_pretrained "
                    "leaves a model in it. Call model.train() before training"
                )
            if is_wrapped_twice(observed.model):
                yield (
                    f"DDP is wrapped around {observed.name} twice, and its gradients are averaged "
                    "twice. Take out one of the two wrappers"
                )
        most = {observed.most_micro_batches for observed in trained if observed.steps > 1}
        for accelerator in self._accelerators:
            requested = accelerator.gradient_accumulation_steps
            if requested > 1 and most == {1}:
                yield (
                    f"Accelerator(gradient_accumulation_steps={requested}) was asked, and every "
                    "optimizer step was made of one micro-batch. Put the micro-batch under "
                    "`with accelerator.accumulate(model):`"
                )
        for scheduler in self._schedulers:
            yield from self._of_scheduler(scheduler)

    def _of_scheduler(self, scheduler: Any) -> Iterator[str]:
        stepped = [self.optimizers.of(optimizer_of(made)) for made in scheduler.optimizers]
        steps = max((s.steps for s in stepped if s is not None), default=0)
        inner = scheduler.scheduler
        if not steps or inner.last_epoch <= steps or self._ranks == 1:
            return
        idle = max(s.steps_at_rate_0 for s in stepped if s is not None)
        then = f", and the learning rate was 0 in the last {idle} of them" if idle > 1 else ""
        yield (
            f"the prepared {type(inner).__name__} went {inner.last_epoch} steps in {steps} "
            f"optimizer steps, one for each process{then}. Count its length before the data loader "
            "is prepared, or leave the scheduler out of Accelerator.prepare"
        )


def sums_at_start(model: torch.nn.Module) -> dict[str, int] | None:
    """Return the sums of a model's weights before it is wrapped; None where rank 0's come later."""
    if world_size() == 1 or loads_on_rank_0(model):
        return None
    if any(is_spread(p) or p.is_meta for p in model.parameters()):
        return None
    return {plain_name(name): value for name, value in checksums(model).items()}


@contextmanager
def judging_loss(
    model: Any, *, micro_batches: int, of: str
) -> Iterator[Callable[[torch.Tensor], str | None]]:
    """Watch the forwards of one micro-batch, and yield a check of the loss that it is trained with.

    The check returns a sentence where a step would add such means up. A loss that differs from the
    model's own mean may be weighted, distilled or divided: it passes.

    Args:
        model: The wrapped model.
        micro_batches: Of the optimizer step, more than one.
        of: Name of the trainer's class.
    """
    means: list[torch.Tensor] = []

    def keep_mean(_: Any, __: Any, inputs: dict[str, Any], output: Any) -> None:
        loss = getattr(output, "loss", None)
        if loss is not None and inputs.get("num_items_in_batch") is None:
            means.append(loss.detach().clone())  # a copy: the loss may be divided in place

    def problem(loss: torch.Tensor) -> str | None:
        if not any(mean.equal(loss.to(mean)) and mean.item() != 0 for mean in means):
            return None
        return (
            f"compute_loss of {of} returns the model's own mean over a micro-batch, and a step "
            f"adds up those of {micro_batches} micro-batches: loss and gradients are "
            f"{micro_batches} times too large. Pass num_items_in_batch on to "
            "super().compute_loss, which divides by the tokens of the step, or divide the loss "
            "by self.current_gradient_accumulation_steps."
        )

    hook = model.register_forward_hook(keep_mean, with_kwargs=True)
    try:
        yield problem
    finally:
        hook.remove()
