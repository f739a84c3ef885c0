"""The flags of the training method: the whole model, or adapters beside frozen weights.

Read without importing torch, like the other flags of `toolkit.train`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from toolkit.data.flags import changed_flags, flag
from toolkit.errors import UsageError

ALL_LINEAR = "all-linear"
"""peft's word for every linear layer but the output head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodArguments:
    """The weights to train, and the files to write at the end."""

    method: Literal["full", "lora", "qlora"] = flag(
        "full",
        "full: every weight; lora: adapters beside frozen weights; "
        "qlora: adapters beside weights in 4 bits.",
    )
    lora_r: int = flag(16, "Rank of the adapters.")
    lora_alpha: int = flag(32, "What the adapters add is scaled by this over the rank.")
    # Dropout masks differ from strategy to strategy, and so would the losses.
    lora_dropout: float = flag(0.0, "Share of the adapters' inputs that is dropped.")
    lora_target_modules: list[str] = flag(
        [ALL_LINEAR], "Names of the linear layers with adapters; all-linear: all but the head"
    )
    lora_embeddings: bool = flag(
        False, "Also train the input embeddings and the output head, whole: for new tokens"
    )
    merge: bool = flag(
        False, "Also write merged/, an ordinary model with the adapters in its weights"
    )

    def __post_init__(self) -> None:
        if self.is_full and (changed := [f"--{name}" for name in changed_flags(self)]):
            raise UsageError(
                f"{', '.join(changed)}: there are no adapters with --method full. Leave "
                f"{'it' if len(changed) == 1 else 'them'} out, or pass --method lora or qlora."
            )
        if self.lora_r < 1:
            raise UsageError(f"--lora_r {self.lora_r}: use 1 or more.")
        if self.lora_alpha < 1:
            raise UsageError(f"--lora_alpha {self.lora_alpha}: use 1 or more.")
        if not 0 <= self.lora_dropout < 1:
            raise UsageError(f"--lora_dropout {self.lora_dropout}: use 0 or more, less than 1.")
        if not self.lora_target_modules:
            raise UsageError("--lora_target_modules needs a name, or all-linear.")
        if ALL_LINEAR in self.lora_target_modules and len(self.lora_target_modules) > 1:
            raise UsageError("--lora_target_modules takes all-linear or names, not both.")

    @property
    def is_full(self) -> bool:
        return self.method == "full"

    def facts(self) -> dict[str, Any]:
        """The fields of a record's `training`; adapter fields are null without adapters."""
        return {
            name: None if self.is_full and name.startswith("lora_") else value
            for name, value in asdict(self).items()
        }
