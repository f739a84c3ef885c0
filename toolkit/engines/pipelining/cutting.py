"""A causal LM cut into stages: each rank keeps the modules of its own, and stand-ins for others.

The names of the modules stay, and a stage runs the model's own forward, so masks, positions and
rotary embeddings are the model's, computed again in each stage from the same rows. In place of a
module of another rank there is one without parameters: the first layers of a later stage return the
hidden states that the stage received, and an embedding's returns zeros, which these replace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from toolkit.engines.pipelining.observed import Autocast, Observed, Part
from toolkit.engines.tensors import tensors_in
from toolkit.errors import UsageError

Batch = Mapping[str, Any]

LOSS_ONLY = frozenset(
    {
        *("labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "return_dict"),
        "supervised_positions",  # of batches for the chunked loss
        "text_borders",  # and of packed rows
    }
)
"""Arguments that a causal LM does not pass on to its decoder."""


class Mailbox:
    """The running stage of a rank, and the hidden states that it has received."""

    def __init__(self) -> None:
        self.hidden: torch.Tensor | None = None
        self.stage: StageModule | None = None
        self.through_all: Callable[..., Any] = _no_pipeline
        """Runs a forward through all stages, where the model is called and not a stage of it."""


def _no_pipeline(**_: Any) -> Any:
    raise RuntimeError("this rank holds a part of the model, and nothing links it to the others")


class AbsentLayer(torch.nn.Module):
    """A decoder layer of another stage: it hands on hidden states unchanged."""

    def __init__(self, mailbox: Mailbox | None, *, tuples: bool) -> None:
        super().__init__()
        self._mailbox = mailbox
        """Of a layer before the stage's own; it returns the received hidden states."""

        self._tuples = tuples

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if self._mailbox is not None:
            hidden = self._mailbox.hidden
        return (hidden, None) if self._tuples else hidden


class AbsentStart(torch.nn.Module):
    """An embedding of another stage, or a module after it: zeros in the shape of its result."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self._width, self._dtype = part.width, part.dtype

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        like = next(tensors_in([*args, kwargs]))
        zero = torch.zeros((), dtype=self._dtype, device=like.device)
        return zero.expand(*like.shape[:2], self._width or 1)


class AbsentEnd(torch.nn.Module):
    """A final norm or head of another stage: it hands on its input unchanged."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return next(tensors_in([*args, kwargs]))


STAND_INS: Final = (AbsentLayer, AbsentStart, AbsentEnd)
"""Classes of modules in place of those of other ranks."""


@dataclass(slots=True)
class Window:
    """The micro-batches of the running step, and the number of tokens that their loss counts."""

    batches: Sequence[Batch] = ()
    items: Any = None
    of_training: bool = True
    """Whether the last stage returns a loss, rather than the model's whole output."""

    def rows(self, number: int) -> tuple[int, int]:
        """Return the rows of a micro-batch and their length."""
        rows, length = self.batches[number]["input_ids"].shape
        return rows, length


class StageModule(torch.nn.Module):
    """One stage of a model, called with the number of a micro-batch.

    The last stage returns the loss of the micro-batch, the others their hidden states.
    """

    def __init__(
        self,
        model: Any,
        modules: Mapping[str, torch.nn.Module],
        *,
        own: Sequence[torch.nn.Module],
        last: bool,
        mailbox: Mailbox,
        autocast: Autocast = nullcontext,
    ) -> None:
        super().__init__()
        # Its parameters are those that a backward of this stage trains.
        self.own = torch.nn.ModuleList(own)
        self.last = last
        # A tuple hides the model, of which other stages of the rank hold parts, from torch.
        self._model = (model,)
        self._modules_by_name = dict(modules)
        self._mailbox = mailbox
        self._autocast = autocast
        self.window = Window()

    def forward(self, received: torch.Tensor | None = None, *, number: torch.Tensor) -> Any:
        (model,) = self._model
        batch = dict(self.window.batches[int(number)])
        if self.window.items is not None:
            batch["num_items_in_batch"] = self.window.items
        self._mailbox.hidden, self._mailbox.stage = received, self
        try:
            with put_in(model, self._modules_by_name), self._autocast():
                output = model(**batch)
        finally:
            self._mailbox.hidden = self._mailbox.stage = None
        if not self.last:
            return output.last_hidden_state
        return output.loss if self.window.of_training else output


@contextmanager
def put_in(model: torch.nn.Module, modules: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """Put other modules in the places of a model for a while."""
    before = {name: model.get_submodule(name) for name in modules}
    _place(model, modules)
    try:
        yield
    finally:
        _place(model, before)


def _place(model: torch.nn.Module, modules: Mapping[str, torch.nn.Module]) -> None:
    for name, module in modules.items():
        parent, _, key = name.rpartition(".")
        model.get_submodule(parent)._modules[key] = module


@dataclass(slots=True, kw_only=True)
class Cut:
    """A model of which this rank holds some stages."""

    stages: dict[int, StageModule]
    """The stages of this rank."""

    layers: tuple[range, ...]
    """The layers of every stage of the pipeline."""

    holders: dict[str, tuple[int, ...]]
    """The ranks with a copy of each parameter, by its name in the whole model; several ranks hold
    a tied one. The first of them speaks for it."""

    described: dict[str, torch.nn.Parameter]
    """The shape and dtype of each parameter of the whole model, without its numbers."""

    names: dict[str, str]
    """Name in the whole model of each parameter of this rank's model, whose name differs where
    only the head of a tied pair is held."""

    hidden: tuple[int, torch.dtype]
    """Width and dtype of the hidden states between two stages."""

    mailbox: Mailbox

    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """The placement, for the record."""


def cut_model(
    model: Any,
    observed: Observed,
    layers: Sequence[range],
    *,
    rank: int,
    rank_of: Sequence[int],
    autocast: Autocast = nullcontext,
) -> Cut:
    """Drop the modules of other ranks from a model, in place, and return this rank's stages.

    Args:
        model: The whole model, with the same weights on every rank.
        observed: The order of its modules.
        layers: The layers of each stage.
        rank: This rank's number in the pipeline.
        rank_of: The rank of each stage.
        autocast: Enters the precision of the training.

    Raises:
        UsageError: the model has parameters that no stage can hold.
    """
    # Before anything is cut: names of tied weights are those of the whole model.
    whole = _whole_names(model)
    modules = {name: model.get_submodule(name) for name in _places(observed)}
    places = [_places_of(observed, layers, stage) for stage in range(len(layers))]
    _check_complete(model, whole, {name for held in places for name in held})
    holders = {name: set[int]() for name in whole.values()}
    for stage, held in enumerate(places):
        for name in held:
            for below, _ in modules[name].named_parameters(remove_duplicate=False):
                holders[whole[f"{name}.{below}"]].add(rank_of[stage])
    described = {n: _without_numbers(p) for n, p in model.named_parameters()}
    mailbox = Mailbox()
    stages: dict[int, StageModule] = {}
    kept: dict[str, torch.nn.Module] = {}
    for stage, held in enumerate(places):
        if rank_of[stage] != rank:
            continue
        here = _with_stand_ins(observed, modules, held, layers[stage], mailbox)
        own = {name: modules[name] for name in held}
        kept = here | kept | own
        last = stage == len(layers) - 1
        stages[stage] = StageModule(
            model, here, own=[*own.values()], last=last, mailbox=mailbox, autocast=autocast
        )
    _place(model, kept)
    model.forward = _forward_of(model, mailbox)
    return Cut(
        stages=stages,
        layers=tuple(layers),
        holders={name: tuple(sorted(ranks)) for name, ranks in holders.items()},
        described=described,
        names={name: whole[name] for name, _ in model.named_parameters()},
        hidden=(observed.width, observed.dtype),
        mailbox=mailbox,
        facts=_facts(observed, layers, rank_of, holders),
    )


def _forward_of(model: Any, mailbox: Mailbox) -> Callable[..., Any]:
    """Return the forward of a rank's model: of the running stage, or through all stages."""
    original = model.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        stage = mailbox.stage
        if stage is None:
            return mailbox.through_all(*args, **kwargs)
        # The model's own forward has the head and the loss; the decoder alone takes no labels.
        if stage.last:
            return original(*args, **kwargs)
        return model.base_model(**{n: value for n, value in kwargs.items() if n not in LOSS_ONLY})

    return forward


def _whole_names(model: torch.nn.Module) -> dict[str, str]:
    """Return the first name of each parameter by every name that it has."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), name)
    return names


def _without_numbers(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def _places(observed: Observed) -> list[str]:
    """Return the names of all modules that belong to certain stages."""
    layers = [f"{observed.stack}.{number}" for number in range(len(observed.layers))]
    return [*layers, *(part.name for part in observed.parts if _at_start(part) or part.after)]


def _at_start(part: Part) -> bool:
    """Whether a part is the first stage's alone: one without parameters runs in every stage."""
    return part.before and next(part.module.parameters(), None) is not None


def _places_of(observed: Observed, layers: Sequence[range], stage: int) -> list[str]:
    """Return the names of the modules of a stage."""
    first, last = stage == 0, stage == len(layers) - 1
    return [
        *(part.name for part in observed.parts if first and _at_start(part)),
        *(f"{observed.stack}.{number}" for number in layers[stage]),
        *(part.name for part in observed.parts if last and part.after),
    ]


def _with_stand_ins(
    observed: Observed,
    modules: Mapping[str, torch.nn.Module],
    held: Sequence[str],
    layers: range,
    mailbox: Mailbox,
) -> dict[str, torch.nn.Module]:
    """Return the modules of a stage, with a stand-in in every other place."""
    here: dict[str, torch.nn.Module] = {}
    for number in range(len(observed.layers)):
        box = mailbox if number < layers.start else None
        here[f"{observed.stack}.{number}"] = AbsentLayer(box, tuples=observed.tuples)
    for part in observed.parts:
        if _at_start(part):
            here[part.name] = AbsentStart(part)
        elif part.after:
            here[part.name] = AbsentEnd()
    return here | {name: modules[name] for name in held}


def _check_complete(model: Any, whole: Mapping[str, str], places: set[str]) -> None:
    """Check that every parameter lies in a module that some stage holds."""
    outside = [name for name in whole if not any(name.startswith(f"{place}.") for place in places)]
    if outside:
        raise UsageError(
            f"{type(model).__name__} cannot be cut into the stages of a pipeline: "
            f"{', '.join(outside[:3])} would be in none. Use --strategy fsdp, which shards any "
            "model."
        )


def _facts(
    observed: Observed,
    layers: Sequence[range],
    rank_of: Sequence[int],
    holders: Mapping[str, set[int]],
) -> dict[str, Any]:
    return {
        "layers_of_stages": [[held.start, held.stop - 1] for held in layers],
        "ranks_of_stages": [*rank_of],
        "first_stage_also": [part.name for part in observed.parts if _at_start(part)],
        "last_stage_also": [part.name for part in observed.parts if part.after],
        "held_twice": sorted(name for name, ranks in holders.items() if len(ranks) > 1),
    }
