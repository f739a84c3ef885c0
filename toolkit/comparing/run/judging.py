"""Every start of every run, judged against the first start of the control, each pair once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from toolkit.comparing.parity.gates import judge, judge_control, unjudged
from toolkit.comparing.parity.judgement import Judgement
from toolkit.comparing.run.attempts import Finished
from toolkit.records.results import Broken

NO_CONTROL: Final = "no control has run to its end"

Pair = tuple[Path, Path | None, int]


@dataclass(slots=True)
class Judging:
    """Judgements so far. Reading two sets of weights takes long, so none is made twice."""

    known: dict[Pair, Judgement] = field(default_factory=dict[Pair, Judgement])

    def of(
        self, starts: Sequence[Finished], *, control: Finished | None, first_step: int = 1
    ) -> Judgement:
        """Judge all starts of one run as one.

        Args:
            starts: In order, at least one.
            control: First start of the control.
            first_step: See `gates.first_common_step`.
        """
        return combined([self._of_start(start, control, first_step) for start in starts])

    def _of_start(self, start: Finished, control: Finished | None, first_step: int) -> Judgement:
        pair = (start.folder, None if control is None else control.folder, first_step)
        if pair not in self.known:
            self.known[pair] = _judged(start, control, first_step)
        return self.known[pair]


def combined(judgements: Sequence[Judgement]) -> Judgement:
    """Return the judgement on a run from those on its starts.

    Gaps are those of the first start. A gate holds only if it held in each start in which it could
    be judged; one that broke names its start where there are several.
    """
    first = judgements[0]
    if len(judgements) == 1:
        # Copies: a row belongs to whoever writes into it.
        broken = [gate.copy() for gate in first.broken]
        return replace(first, gates=dict(first.gates), broken=broken)
    gates: dict[str, bool] = {}
    broken: list[Broken] = []
    notes: list[str] = []
    not_measured: dict[str, str] = {}
    for number, judgement in enumerate(judgements, 1):
        for name, held in judgement.gates.items():
            gates[name] = gates.get(name, True) and held
        for gate in judgement.broken:
            broken.append(gate.copy())
            broken[-1]["repeat"] = number
        notes += [f"repeat {number}: {note}" for note in judgement.notes]
        for name, reason in judgement.not_measured.items():
            if number == 1 or name.startswith("gates."):
                not_measured.setdefault(name, reason)
    for name in gates:
        not_measured.pop(f"gates.{name}", None)
    return replace(first, gates=gates, broken=broken, notes=notes, not_measured=not_measured)


def _judged(start: Finished, control: Finished | None, first_step: int) -> Judgement:
    if control is None:
        return unjudged(NO_CONTROL)
    if start.folder == control.folder:
        return judge_control(start.record)
    judgement = judge(
        start.record,
        control.record,
        folder=start.folder,
        control_folder=control.folder,
        first_step=first_step,
    )
    if first_step > 1:
        judgement.notes.append(f"compared from step {first_step}, the first that no run skipped")
    return judgement
