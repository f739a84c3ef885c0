"""Who trains, and with which switches for speed: the rows of every table of speeds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from toolkit.strategies import get_strategy

SWITCHES: dict[str, dict[str, Any]] = {
    "packing": {},
    "chunked loss": {"loss_impl": "chunked"},
    "lean masks": {"lean_masks": True},
    "fused optimizer": {},
    "bucket view": {"ddp_bucket_view": True},
    "prefetch": {"fsdp_prefetch": 1},
    "compiled layers": {"compile_blocks": True},
}
"""In the recipe, where the strategy has them; compiled layers where they were asked for."""

NOT_TUNED = ("packing", "compiled layers")
"""Of the recipe, what is for the user to choose."""

FOR_MEMORY: dict[str, dict[str, Any]] = {
    "checkpoint selective": {"checkpoint_layers": "selective"},
    "checkpoint every:2": {"checkpoint_layers": "every:2"},
    "checkpoint all": {"checkpoint_layers": "all"},
}
"""Slower, and smaller: not in the recipe."""

ONLY_FOR = {
    "fused optimizer": ("single", "ddp", "fsdp"),
    "bucket view": ("ddp",),
    "prefetch": ("fsdp",),
}
"""The backends that a switch is for, where it isn't for all."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    name: str
    kind: str = "ours"
    """stock: transformers' Trainer; trl: TRL's SFTTrainer; ours: ToolkitTrainer."""

    switches: frozenset[str] = frozenset()
    speed: dict[str, Any] = field(default_factory=dict)
    """Values of `SpeedArguments`."""

    @property
    def packed(self) -> bool:
        return "packing" in self.switches


def ours(name: str, switches: list[str], **speed: Any) -> Variant:
    """Return ToolkitTrainer with some of `SWITCHES`, and further values of `SpeedArguments`."""
    for switch in switches:
        speed |= SWITCHES[switch]
    return Variant(name=name, switches=frozenset(switches), speed=speed)


def recipe_of(strategy: str, *, compiled: bool) -> list[str]:
    """Return the switches of the full recipe under a strategy."""
    backend = get_strategy(strategy).backend
    return [
        name
        for name in SWITCHES
        if backend in ONLY_FOR.get(name, (backend,)) and (compiled or name != "compiled layers")
    ]


def variants(strategy: str, *, compiled: bool) -> list[Variant]:
    """Return every variant: all off, each switch alone, tuned, the recipe, and it without each."""
    recipe = recipe_of(strategy, compiled=compiled)
    tuned = [name for name in recipe if name not in NOT_TUNED]
    without = {name: [other for other in recipe if other != name] for name in recipe}
    return [
        Variant(name="stock", kind="stock"),
        ours("all off", []),
        *(ours(f"{name} alone", [name]) for name in recipe),
        ours("tuned", tuned),
        *(
            ours(f"recipe without {name}", rest)
            for name, rest in without.items()
            if rest != tuned  # that row is there
        ),
        ours("recipe", recipe),
        *(ours(name, [], **speed) for name, speed in FOR_MEMORY.items()),
        Variant(name="trl", kind="trl"),
        Variant(name="trl packing", kind="trl", switches=frozenset({"packing"})),
    ]
