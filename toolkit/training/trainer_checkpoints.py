"""What `ToolkitTrainer` does about checkpoints in the place of transformers' Trainer (5.23)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from toolkit.checkpoints.folders import checkpoint_folder
from toolkit.checkpoints.keeping import Keeper
from toolkit.checkpoints.resume_request import LAST, asked_checkpoint
from toolkit.checkpoints.resuming import Resumed, find_checkpoint
from toolkit.engines.backend import backend_of
from toolkit.strategies import Strategy
from toolkit.training.arguments import output_dir_of
from toolkit.training.fingerprint import facts_of_trainer

if TYPE_CHECKING:
    from toolkit.training.trainer import ToolkitTrainer


def keeper_for(trainer: ToolkitTrainer, strategy: Strategy) -> Keeper:
    """Return a keeper by the Trainer's arguments; when it saves, the Trainer's own flow decides."""
    return Keeper(
        output_dir=output_dir_of(trainer.args),
        facts=facts_of_trainer(trainer, strategy),
        recorder=trainer.recorder,
        limit=trainer.args.save_total_limit,
    )


def find_for(trainer: ToolkitTrainer, resume: str | bool | None) -> Resumed | None:
    """Return the checkpoint to go on from, whole and of this training on every rank."""
    if resume is None or resume is False:
        return None
    said = LAST if resume is True else str(resume)
    asked = asked_checkpoint(
        {"output_dir": trainer.args.output_dir, "resume_from_checkpoint": said}
    )
    return None if asked is None else find_checkpoint(asked, trainer.keeper.facts)


def save_for(trainer: ToolkitTrainer, trial: Any) -> None:
    """Do what `Trainer._save_checkpoint` does, committed as a whole, unless a step was spoiled."""
    state = trainer.state
    trainer.store_flos()
    output_dir = Path(trainer._get_output_dir(trial=trial))
    best_before = state.best_model_checkpoint
    best = checkpoint_folder(output_dir, state.best_global_step or 0)
    # The best one may be the one that is being saved.
    if state.best_global_step and (best.is_dir() or state.best_global_step == state.global_step):
        state.best_model_checkpoint = str(best)
    folder = trainer.keeper.save(
        trainer.prepared(),
        state.global_step,
        output_dir=output_dir,
        write_more=lambda draft: _write_state(trainer, draft),
        keep=[Path(state.best_model_checkpoint)] if state.best_model_checkpoint else [],
    )
    if folder is None:
        state.best_model_checkpoint = best_before
    elif trainer.args.push_to_hub:
        trainer._push_from_checkpoint(str(folder))


def load_best_for(trainer: ToolkitTrainer) -> None:
    """Put the weights of the best checkpoint back, when the training is over."""
    state, prepared = trainer.state, trainer.prepared()
    folder = Path(str(state.best_model_checkpoint))
    step = int(state.best_global_step or 0)
    backend_of(prepared.model).read_model(folder, prepared, step=step)


def _write_state(trainer: ToolkitTrainer, draft: Path) -> None:
    """Write the Trainer's state, with the states of its callbacks in it."""
    states = cast("dict[str, Any]", trainer.state.stateful_callbacks)
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if not isinstance(callback, ExportableState):
            continue
        name = type(callback).__name__
        if isinstance(states[name], list):
            states[name].append(callback.state())
        else:
            states[name] = callback.state()
    trainer.state.save_to_json(str(draft / TRAINER_STATE_NAME))
