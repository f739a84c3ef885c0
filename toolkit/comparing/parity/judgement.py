"""Input and output of a judge: two runs, and the judgement on one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, cast

from toolkit.records.record import Record
from toolkit.records.results import Broken, Judged

GATED_STEPS: Final = 20
"""Last gated step: rounding grows with every step, and at step 200 zero3 exceeded the limits."""


# Largest ratios of clean runs to the control's own distance, at learning rates of 1e-2 to 1e-1 and
# where a gap was beyond its limit: loss 1.4, gradient norm 6.3, final weights 0.98.
# benchmarks/results/2026-11-26-rounding.md has the numbers.
ROUNDING_OF_STEPS: Final = 10.0
ROUNDING_OF_WEIGHTS: Final = 4.0
"""How much farther from the control than itself, by rounding alone, a sound run may be."""

ROUNDED: Final = (
    "rounding alone explains the gap: the control, trained once more with its sums in another "
    "order, parts from itself as far"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Distances of the control from itself when its sums are added up in another order.

    Rounding grows with the steps, the faster the higher the learning rate is. Distances of steps
    are the largest until then, since two trainings that part may meet by chance.
    """

    steps: Mapping[str, Mapping[int, float]]
    """By gate and step, from 1."""

    weights: float | None
    """Of the final weights, in units of the control's update; None: not measured."""

    def limit(self, gate: str, step: int | None) -> float:
        """Return the largest distance that rounding explains; 0 where it was not measured."""
        if step is None:
            return ROUNDING_OF_WEIGHTS * (self.weights or 0.0)
        return ROUNDING_OF_STEPS * self.steps.get(gate, {}).get(step, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run and the control, as the input of a judge."""

    record: Record
    control: Record
    folder: Path
    """Folder of the run's record; its final weights lie below."""

    control_folder: Path
    first_step: int = 1
    """First step that is compared, see `gates.first_common_step`."""

    last_step: int = GATED_STEPS
    """A difference after this step breaks no gate."""

    rounding: Rounding | None = None
    """None: every gap beyond the limit is a fault."""

    limit: float = math.nan
    """Limit of the gate in this precision; NaN, which no value is within, if it has no distance."""

    def explains(self, gate: str, gap: float, step: int | None = None) -> bool:
        """Whether rounding alone may have made a gap; in the first step it cannot have grown."""
        if self.rounding is None or (step is not None and step <= self.first_step):
            return False
        return gap <= self.rounding.limit(gate, step)


@dataclass(slots=True, kw_only=True)
class Judgement:
    """Distances of a run from the control, and the gates that held."""

    strategy: str = ""
    engine: str = ""
    gaps: Judged = field(
        default_factory=lambda: cast(Judged, dict.fromkeys(Judged.__annotations__))
    )
    gates: dict[str, bool] = field(default_factory=dict[str, bool])
    """A gate that cannot be judged is omitted, with its reason in `not_measured`."""

    broken: list[Broken] = field(default_factory=list[Broken])
    not_measured: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])
    judged_steps: int | None = None
    """Last step that was judged, where rounding alone explains the gaps from the next one on."""

    def hold(self, gate: str) -> None:
        self.gates[gate] = True

    def leave_open(self, gate: str, reason: str) -> None:
        """Omit a gate that cannot be judged."""
        self.gates.pop(gate, None)
        self.not_measured[f"gates.{gate}"] = reason

    def end_at(self, gate: str, step: int) -> None:
        """Hold a gate up to a step, where rounding explains larger gaps from the next one on."""
        self.hold(gate)
        self.judged_steps = min(step, self.judged_steps or step)

    def break_gate(
        self,
        gate: str,
        reason: str,
        *,
        first_step: int | None = None,
        value: float | None = None,
        limit: float | None = None,
    ) -> None:
        self.gates[gate] = False
        self.not_measured.pop(f"gates.{gate}", None)
        self.broken.append(
            Broken(
                strategy=self.strategy,
                engine=self.engine,
                name=f"{self.strategy}-{self.engine}",
                gate=gate,
                first_step=first_step,
                value=value,
                limit=limit,
                reason=reason,
            )
        )


def broken_sentence(broken: Broken) -> str:
    """Say which gate broke, where, and by how much."""
    where = f" at step {broken['first_step']}" if broken["first_step"] is not None else ""
    sizes = [
        f"{name} {size:.2e}"
        for name, size in (("is", broken["value"]), ("limit", broken["limit"]))
        if size is not None
    ]
    measured = f" ({', '.join(sizes)})" if sizes else ""
    which = f", repeat {broken['repeat']}" if "repeat" in broken else ""
    return (
        f"{broken['name']}{which}: the {broken['gate']} gate broke{where}: "
        f"{broken['reason']}{measured}."
    )


def combined(judgements: Sequence[Judgement]) -> Judgement:
    """Return the judgement on a run from the judgements on its starts.

    Gaps are taken from the first start. A gate holds only if it held in each start in which it
    could be judged. A broken gate names its start where there are several.
    """
    several = len(judgements) > 1
    gates: dict[str, bool] = {}
    broken: list[Broken] = []
    notes: list[str] = []
    not_measured: dict[str, str] = {}
    for number, judgement in enumerate(judgements, 1):
        for name, held in judgement.gates.items():
            gates[name] = gates.get(name, True) and held
        for gate in judgement.broken:
            broken.append(gate.copy())  # a row writes its name into it
            if several:
                broken[-1]["repeat"] = number
        notes += [f"repeat {number}: {note}" if several else note for note in judgement.notes]
        for name, reason in judgement.not_measured.items():
            if number == 1 or name.startswith("gates."):
                not_measured.setdefault(name, reason)
    for name in gates:
        not_measured.pop(f"gates.{name}", None)
    judged = [one.judged_steps for one in judgements if one.judged_steps is not None]
    return replace(
        judgements[0],
        gates=gates,
        broken=broken,
        notes=notes,
        not_measured=not_measured,
        judged_steps=min(judged, default=None),
    )
