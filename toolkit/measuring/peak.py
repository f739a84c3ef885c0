"""Peak: the moment of most memory in one optimizer step, and its bytes by category.

A dispatch mode sees the input and output tensors of every operation, under DDP, `fully_shard` and
DeepSpeed alike. It reads no value and never waits for a GPU, so losses stay the same to the last
bit. It stays for one step; the other steps run without it.

It counts storages on the device that the rank computes on. On a GPU, offloaded states are therefore
left out. On a CPU they are in: in a rehearsal the host is the device, and offload makes the peak no
smaller. Not counted are storages that an operation makes and frees within itself (workspaces), the
rounding of allocators, and earlier storages that no operation of the step touches, unless
`toolkit.engines` knows them.

`activations` are storages from forward that are alive when backward begins: those that autograd
keeps, and outputs that the loop still holds. (Hooks on saved tensors would separate the two, but
`torch.vmap`, with which transformers makes its masks, refuses to run under them.) Operations in
backward that autograd records are a recomputed forward. `gradients` are the tensors that autograd
hands to a parameter, and the reduced buffers; `parameters` include the buffers that an all-gather
fills. Ranks that share layers or rows gather and reduce activations among themselves: such tensors
keep the category of their birth.

torch's own `MemTracker` doesn't know DeepSpeed's partitions and buckets, nor storages made before
it started; its `FSDPMemTracker` replaces methods of `fully_shard` that change from version to
version. The way to follow `UntypedStorage.resize_`, which no mode sees, is learned from it.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from toolkit.engines.backend import backend_of
from toolkit.engines.base import Backend
from toolkit.engines.hooks import Undo, nothing, replace_method
from toolkit.engines.optimizers import states_held, watch_optimizer
from toolkit.engines.tensors import tensors_in
from toolkit.measuring.traffic import (
    CALLS,
    NAMESPACES,
    CountingMode,
    arguments_of,
    group_of,
    is_among_sharers,
)

Phase = Literal["forward", "backward", "optimizer"]

COMPILED = "torch.compile makes tensors within its graphs, where nobody can count them"

LET_GO_SECONDS = 1.0
"""Longest wait for gloo's thread after a collective."""


class PeakLedger(CountingMode):
    """Follows the storages of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self._storages = Storages("cpu")
        self._fullest: Fullest | None = None
        self._phase: Phase | None = None
        self._micro_batches: list[dict[str, int]] = []
        self._sharing: tuple[str, ...] = ()
        self._underway: dict[int, list[torch.Tensor]] = {}
        self._look_at_states: Callable[[], None] = nothing

    def start(self, model: Any, optimizer: Any, *, device: torch.device | str) -> None:
        """Count from now on the storages of a prepared model's rank on the device it computes on.

        Storages that exist already are counted too.
        """
        self._storages, self._fullest = Storages(device), None
        self._micro_batches = []
        self._phase = None
        backend = backend_of(model)
        self._sharing = backend.model_parallel_groups()
        self._look_at_states = lambda: self._learn_states(backend, optimizer)
        self._storages.meet(backend.parameters_held(), "parameters")
        self._storages.meet(backend.gathered_buffers(), "parameters")
        self._look_at_states()
        self._storages.meet(model.buffers(), "other")
        self.begin_counting(
            model.register_forward_pre_hook(
                self._forward_begins, prepend=True, with_kwargs=True
            ).remove,
            _follow_resizes(self._storages.resized),
            *map(self._follow_gradient, backend.leaves()),
            backend.watch_step(
                optimizer, before=lambda: self._begin("optimizer"), after=self._step_ended
            ),
            # DeepSpeed gives its optimizer the states that it steps on part by part.
            watch_optimizer(optimizer, before=self._look_at_states, after=self._look_at_states),
        )

    def stop(self) -> None:
        if not self.running:
            return
        super().stop()
        self._storages.settle()
        self._fullest, self._storages = self._storages.fullest, Storages("cpu")
        self._phase, self._look_at_states = None, nothing
        self._underway.clear()

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Run the body as this phase of a step; free of cost while the ledger is off."""
        self._begin(phase)
        try:
            yield
        finally:
            self._phase = None

    def counted(self, step: int) -> dict[str, Any] | None:
        """Return the step's moment of most memory as `fields.Peak`; None if no phase was seen."""
        if self._fullest is None:
            return None
        return {
            "step": step,
            "phase": self._fullest.phase,
            "total_bytes": self._fullest.total_bytes,
            "categories": {name: self._fullest.bytes[name] for name in CATEGORIES},
            "micro_batches": self._micro_batches,
        }

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # Only autograd shows the beginning of backward in every engine.
        if torch._C._current_graph_task_id() != -1 and self._phase != "backward":
            self._begin("backward")
        taken = list(tensors_in((args, kwargs)))
        if self._phase == "forward":
            self._storages.meet(taken, "other")  # the batch
        out = func(*args, **kwargs)
        given = list(tensors_in(out))
        self._storages.make(given, self._category_by_birth(), taken=taken)
        if getattr(func, "namespace", None) in NAMESPACES:
            name = func._schema.name.partition("::")[2]
            if name in CALLS:
                _, group = group_of(arguments_of(func, args, kwargs))
                self._learn_from_collective(name, group, [*taken, *given])
            if func.namespace == "_c10d_functional":
                self._follow_input(name, taken, given)
        if self._phase is not None:
            self._storages.look(self._phase)
        return out

    # The use of storages

    def _category_by_birth(self) -> str:
        if self._phase == "forward" or (self._phase == "backward" and torch.is_grad_enabled()):
            return UNDECIDED
        return "other"

    def _learn_states(self, backend: Backend, optimizer: Any) -> None:
        self._learn(list(backend.masters_held()), "master")
        self._learn(list(states_held(optimizer)), "optimizer")
        self._learn(list(backend.gradients_held()), "gradients")
        self._learn(list(backend.unreduced_gradients()), "gradients")

    def _learn_from_collective(
        self, name: str, group: str | None, tensors: list[torch.Tensor]
    ) -> None:
        if is_among_sharers(name, group, self._sharing):
            return  # activations, or their gradients
        kind, _ = CALLS[name]
        if kind == "all_gather" and self._phase is not None:
            self._learn(tensors, "parameters")
        elif kind in ("all_reduce", "reduce_scatter", "reduce") and self._phase == "backward":
            self._learn(tensors, "gradients")

    def _follow_input(
        self, name: str, taken: list[torch.Tensor], given: list[torch.Tensor]
    ) -> None:
        """Wait until gloo's thread has let go of the input of a collective that has ended.

        It drops inputs and outputs a moment after the rank went on. On a busy CPU, the rank would
        reach its fullest moment before, and the peak would change from run to run.
        """
        if not given or given[0].device.type != "cpu":
            return
        key = given[0].untyped_storage()._cdata
        if name.startswith(("all_gather", "reduce_scatter", "all_to_all")):
            self._underway[key] = taken
        elif name == "wait_tensor":
            deadline = time.monotonic() + LET_GO_SECONDS
            for tensor in self._underway.pop(key, ()):
                # Its Python object holds it once; autograd may keep it as well, and for longer.
                while _use_count(tensor) > 1 and time.monotonic() < deadline:
                    time.sleep(0)

    def _learn(self, tensors: list[torch.Tensor], category: str) -> None:
        self._storages.meet(tensors, category)
        self._storages.learn(tensors, category)

    # Hooks that mark the phases

    def _begin(self, phase: Phase) -> None:
        if not self.running:  # a hook that could not be taken off
            return
        self._storages.settle()
        self._phase = phase
        self._look_at_states()

    def _forward_begins(self, module: Any, _: Any, inputs: dict[str, Any]) -> None:
        # An evaluation between two steps is not part of either.
        if not module.training:
            self._phase = None
            return
        self._begin("forward")
        ids = inputs.get("input_ids")
        if isinstance(ids, torch.Tensor) and ids.dim() == 2:
            self._micro_batches.append({"rows": len(ids), "tokens": ids.numel()})

    def _step_ended(self) -> None:
        self._phase = None

    def _follow_gradient(self, leaf: torch.Tensor) -> Undo:
        """Have autograd report the gradients that it hands to a parameter."""
        handle = leaf.register_hook(lambda gradient: self._storages.learn([gradient], "gradients"))

        def undo() -> None:
            handle.remove()
            if not leaf._backward_hooks:
                leaf._backward_hooks = None  # else autograd asks an empty list in every step

        return undo


def _use_count(tensor: torch.Tensor) -> int:
    # torch 2.11 to 2.14 have it and use it (torch.utils.swap_tensors), but declare it nowhere.
    return tensor._use_count()  # pyright: ignore[reportAttributeAccessIssue]


def _follow_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Undo:
    """Call `resized` with every storage that Python resizes."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        returned = original(storage, size)
        resized(storage)
        return returned

    return replace_method(torch.UntypedStorage, "resize_", resize_)


CATEGORIES = ("parameters", "master", "gradients", "optimizer", "activations", "other")

UNDECIDED = "undecided"
"""Made by forward: an activation if it is alive when backward begins, a temporary if not."""

BY_BIRTH = (UNDECIDED, "activations", "other")
"""Categories that give way to one by use."""


class Storages:
    """The storages on one kind of device: those alive, their bytes, and the peak of their sum.

    Each is counted once, from its creation until it is freed, through weak references only. Its
    category may become known after the peak, and then holds for the peak as well. Sums are kept as
    storages come and go, so keeping the peak is a copy of a few numbers.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.total_bytes = 0
        self.fullest: Fullest | None = None
        self._device = torch.device(device).type
        self._bytes: dict[str, int] = dict.fromkeys((*CATEGORIES, UNDECIDED), 0)
        self._moment = 0
        self._held: dict[int, _Storage] = {}
        self._undecided: set[int] = set()
        self._gone: deque[_Reference] = deque()

    def meet(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Count storages made before counting: they existed all along, also at the peak so far."""
        self._take_off_the_dead()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.device.type != self._device or storage._cdata in self._held:
                continue
            self._add(storage, category, born=0)
            if self.fullest is not None:
                self.fullest.bytes[category] += storage.nbytes()

    def make(
        self, tensors: Iterable[torch.Tensor], category: str, *, taken: Iterable[torch.Tensor]
    ) -> None:
        """Count the outputs of an operation that are new and no views of its inputs.

        A category other than `UNDECIDED` decides on all undecided storages before it.
        """
        self._take_off_the_dead()
        self._moment += 1
        before = {tensor.untyped_storage()._cdata for tensor in taken}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata in self._held:
                self.resized(storage)
                continue
            if storage._cdata in before or storage.device.type != self._device:
                continue
            if self._undecided and category != UNDECIDED:
                self.settle()
            self._add(storage, category, born=self._moment)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Correct the bytes of a counted storage after its size has changed."""
        held = self._held.get(storage._cdata)
        if held is not None and held.size != (size := storage.nbytes()):
            self._count(held.category, size - held.size)
            # The peak so far had the old size there: it keeps its category.
            held.size, held.born = size, self._moment + 1

    def learn(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Set the category of storages by their use, if it is known only from their creation."""
        self._take_off_the_dead()
        for tensor in tensors:
            held = self._held.get(tensor.untyped_storage()._cdata)
            if held is not None and held.category in BY_BIRTH:
                self._move(held, category)
                self._undecided.discard(held.reference.key)

    def settle(self) -> None:
        """Decide the undecided: live storages are activations, freed ones were temporaries."""
        self._take_off_the_dead()
        for key in self._undecided:
            self._move(self._held[key], "activations")
        self._undecided.clear()
        if self.fullest is not None:
            self.fullest.bytes["other"] += self.fullest.bytes[UNDECIDED]
            self.fullest.bytes[UNDECIDED] = 0

    def look(self, phase: str) -> None:
        """Keep this moment if its sum is the largest so far."""
        if self.fullest is None or self.total_bytes > self.fullest.total_bytes:
            self.fullest = Fullest(phase, self._moment, self._bytes.copy())

    def _add(self, storage: torch.UntypedStorage, category: str, *, born: int) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._held[key] = _Storage(_Reference(storage, self._gone.append), size, category, born)
        self._count(category, size)
        if category == UNDECIDED:
            self._undecided.add(key)

    def _take_off_the_dead(self) -> None:
        """Update the sums from the finalizers' notes; finalizers run in any thread."""
        while self._gone:
            reference = self._gone.popleft()
            held = self._held.get(reference.key)
            if held is not None and held.reference is reference:
                del self._held[reference.key]
                self._undecided.discard(reference.key)
                self._count(held.category, -held.size)

    def _count(self, category: str, size: int) -> None:
        self._bytes[category] += size
        self.total_bytes += size

    def _move(self, held: _Storage, category: str) -> None:
        self._bytes[held.category] -= held.size
        self._bytes[category] += held.size
        if self.fullest is not None and held.born <= self.fullest.moment:
            self.fullest.bytes[held.category] -= held.size
            self.fullest.bytes[category] += held.size
        held.category = category


@dataclass(frozen=True, slots=True)
class Fullest:
    """The moment with the most bytes alive."""

    phase: str
    moment: int
    bytes: dict[str, int]
    """By category."""

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())


class _Reference(weakref.ref[torch.UntypedStorage]):
    """A weak reference that reports the end of a storage by its key."""

    __slots__ = ("key",)

    def __init__(self, storage: torch.UntypedStorage, gone: Callable[[Any], None]) -> None:
        super().__init__(storage, gone)  # pyright: ignore[reportCallIssue]: typeshed has __new__
        self.key = storage._cdata


@dataclass(slots=True)
class _Storage:
    reference: _Reference
    size: int
    """Bytes."""

    category: str
    born: int
    """The moment of its making, or of its last resizing."""
