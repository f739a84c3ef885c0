"""Model states of one rank: their bytes by kind of memory."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes by kind of memory."""

    gpu: int = 0
    host: int = 0
    nvme: int = 0

    @property
    def in_memory(self) -> int:
        return self.gpu + self.host

    def __add__(self, more: Held) -> Held:
        return Held(self.gpu + more.gpu, self.host + more.host, self.nvme + more.nvme)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Model states of one rank."""

    parameters: Held
    """Bytes after an optimizer step, including parameters that stay gathered."""

    master: Held
    """fp32 weights that the optimizer updates: DeepSpeed's partitions, or those of `bf16_weights`.
    Others update the parameters themselves."""

    gradients: Held
    """Bytes at their peak: after the last backward of a step, before the optimizer."""

    optimizer: Held

    @property
    def total(self) -> Held:
        return self.parameters + self.master + self.gradients + self.optimizer

    def in_one_place(self) -> StateBytes:
        """Return the states of a rehearsal, in which offloaded ones share the others' memory."""
        moved = {
            field.name: Held(gpu=held.in_memory, nvme=held.nvme)
            for field in fields(self)
            for held in [getattr(self, field.name)]
        }
        return StateBytes(**moved)

    def counted(self) -> dict[str, int]:
        """Return the bytes in memory, GPU and host together, under the names used in records."""
        return {f"{f.name}_bytes": getattr(self, f.name).in_memory for f in fields(self)}
