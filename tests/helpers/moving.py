"""Trainings that go on in another launch than the one that saved, for tests and a benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from killing import Run
from safetensors.torch import load_file

from toolkit.backends import backend_of
from toolkit.comparing.parity.gates import limit_of
from toolkit.records.evidence import AFTER_FILE, BEFORE_FILE, GRADIENTS_FILE
from toolkit.strategies import STRATEGIES

SAVED = 2

ROWS = 8
"""Rows of a step in every launch."""

FLAGS = (
    *("--max_length", 32, "--max_train_samples", 64, "--dropout", "off", "--max_steps", 4),
    *("--warmup_steps", 3, "--save_steps", SAVED, "--checkpoint_form", "portable"),
    *("--per_device_train_batch_size", 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """How far the step after a move is from the same step of the run that went on."""

    weights: list[str]
    """Weights before the step that differ by a bit."""

    gradient: float | None
    """Largest distance of a parameter's gradient, as a part of its size. This and the two beside it
    are not known where ranks split rows."""

    update: float | None
    """Distance of the weights after the step, as a part of what the step changed."""

    loss: float
    norm: float
    """Relative difference, the largest of the steps that follow."""

    rows: bool
    """Whether each step has the same rows, and the same learning rate."""

    said: str

    def problem(self, precision: str = "no") -> str | None:
        """Say what is beyond the gates of a comparison; None if nothing is."""
        if self.weights:
            return f"other weights: {', '.join(self.weights[:3])}"
        if not self.rows:
            return "other rows, or another learning rate"
        gaps = {"loss": self.loss, "grad_norm": self.norm}
        gaps |= {"gradients": self.gradient, "weights": self.update}
        wrong = [
            f"{name} {gap:.1e}"
            for name, gap in gaps.items()
            if gap is not None and not gap <= limit_of(name, precision)
        ]
        return ", ".join(wrong) or None


def run_in(
    folder: Path, strategy: str, ranks: int, environment: dict[str, str], *flags: Any
) -> Run:
    """Make a training of eight rows a step, with evidence of the step after the save."""
    engines, readers = STRATEGIES[strategy].engines, STRATEGIES[strategy].data_parallel_size(ranks)
    asked: tuple[Any, ...] = ("--gradient_accumulation_steps", ROWS // readers)
    if not backend_of(STRATEGIES[strategy]).splits_rows:  # evidence is of whole rows
        asked += ("--evidence", folder / "evidence", "--evidence_step", SAVED + 1)
    if engines == ("loop",):
        asked += ("--strategy", strategy)
    engine = "loop" if "loop" in engines else "trainer"
    return Run(strategy, engine, folder, environment, (*FLAGS, *asked, *flags), ranks=ranks)


def moved(wrote: Run, resumed: Run, *, checkpoint: Path | None = None) -> Move:
    """Let a run go on from what another has saved, and compare both."""
    checkpoint = checkpoint or wrote.output / f"checkpoint-{SAVED}"
    said = resumed.go("--resume_from_checkpoint", checkpoint)
    straight, after = wrote.tail(SAVED), resumed.tail(SAVED)
    gaps = {
        name: max(abs(a - b) / abs(a) for a, b in zip(straight[name], after[name], strict=True))
        for name in ("losses", "grad_norms")
    }
    rows = [[set(chain(*ids)) for ids in tail["sample_ids"]] for tail in (straight, after)]
    kept = [(run.output.parent / "evidence").is_dir() for run in (wrote, resumed)]
    weights, gradient, update = _evidence(wrote, resumed) if all(kept) else ([], None, None)
    return Move(
        weights=weights,
        gradient=gradient,
        update=update,
        loss=gaps["losses"],
        norm=gaps["grad_norms"],
        rows=rows[0] == rows[1] and straight["learning_rates"] == after["learning_rates"],
        said=said,
    )


def _evidence(wrote: Run, resumed: Run) -> tuple[list[str], float, float]:
    before, here = (_tensors(run, BEFORE_FILE) for run in (wrote, resumed))
    assert before.keys() == here.keys()
    steps = [
        torch.cat([(tensor - before[name]).ravel() for name, tensor in after.items()])
        for after in (_tensors(run, AFTER_FILE) for run in (wrote, resumed))
    ]
    gradients = [_tensors(run, GRADIENTS_FILE) for run in (wrote, resumed)]
    others = [name for name in before if not torch.equal(before[name], here[name])]
    return others, max(_gaps(*gradients)), _distance(*steps)


def _tensors(run: Run, file: str) -> dict[str, torch.Tensor]:
    return load_file(run.output.parent / "evidence" / file)


def _gaps(straight: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[float]:
    assert straight.keys() == after.keys()
    return [_distance(tensor, after[name]) for name, tensor in straight.items()]


def _distance(straight: torch.Tensor, after: torch.Tensor) -> float:
    return float((after - straight).norm() / straight.norm().clamp_min(1e-12))
