"""Storages: those alive, their bytes, their categories, and the peak of their sum.

Each is counted once, from its creation until it is freed, through weak references only. Its
category may become known after the peak, and then holds for the peak as well. Sums are kept as
storages come and go, so keeping the peak is a copy of a few numbers.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

CATEGORIES = ("parameters", "master", "gradients", "optimizer", "activations", "other")

UNDECIDED = "undecided"
"""Made by forward: an activation if it is alive when backward begins, a temporary if not."""

BY_BIRTH = (UNDECIDED, "activations", "other")
"""Categories that give way to one by use."""


class Storages:
    """The storages on one kind of device."""

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
        """Count a storage by the size that it has now, if it is counted."""
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
