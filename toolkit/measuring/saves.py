"""What a script saves in its first steps, and the state of its model after each of them.

A save is noted without a collective, for often rank 0 saves alone. What should stand in it is known
before: the weights are gathered within each step of the optimizer, where all ranks are.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, Final

import torch

from toolkit.engines.backend import backend_of
from toolkit.engines.deepspeed import is_engine
from toolkit.engines.hooks import replace_method
from toolkit.engines.optimizers import optimizer_of, states_held
from toolkit.engines.tensors import dtype_name, named_parameters, plain_name
from toolkit.engines.wrappers import innermost
from toolkit.errors import sentence_of
from toolkit.launching.ranks import rank
from toolkit.measuring.evidence import digest_of
from toolkit.measuring.few_steps import FewSteps
from toolkit.measuring.stepped import rates_of
from toolkit.records.json_files import SCHEMA, write_json
from toolkit.records.saves import Call, Saves, State, Tensor, saves_file
from toolkit.search_path import ROOT

CASTS: Final = (torch.float32, torch.bfloat16, torch.float16)
VALUES: Final = 64

LIBRARIES: Final = (sysconfig.get_paths()["stdlib"], str(Path(ROOT, "toolkit")), "<")


@contextmanager
def watching_saves(
    folder: Path, few: FewSteps, *, first: int, resume_from: str | None
) -> Iterator[None]:
    """Note what the script that runs within saves, and write it; without a collective at the end.

    Args:
        folder: Of the run; the ranks share it.
        few: Counts the steps that are observed.
        first: Step of the script's own count that it begins with. At 0, a Trainer that saves
            checkpoints is asked for one in the middle of the observed steps.
        resume_from: Checkpoint from which a Trainer goes on.
    """
    watcher = _Watcher(folder, few, first, resume_from)
    few.before_steps = watcher.prepared
    with watcher.hooks:
        watcher.watch()
        try:
            yield
        finally:
            watcher.write()


class _Watcher:
    """Notes what one rank saves, and its states."""

    def __init__(self, folder: Path, few: FewSteps, first: int, resume_from: str | None) -> None:
        self.hooks = ExitStack()
        self._folder, self._few, self._first, self._resume_from = folder, few, first, resume_from
        self._calls: list[Call] = []
        self._states: list[State] = []
        self._is_saving = False
        self._watches_trainers = False
        self._model: Any = None
        self._batches: list[int] = []
        self._losses: list[float] = []
        self._rate: float | None = None

    def __deepcopy__(self, _: Any) -> Any:
        return self  # a script may copy a model with its hooks

    def write(self) -> None:
        tied: dict[str, str] = {}
        if self._model is not None:
            first = {id(p): name for name, p in named_parameters(self._model)}
            every = innermost(self._model).named_parameters(remove_duplicate=False)
            names = ((plain_name(name), first.get(id(p), "")) for name, p in every)
            tied = {name: own for name, own in names if own and own != name}
        self._folder.mkdir(parents=True, exist_ok=True)
        content = Saves(
            schema=SCHEMA,
            rank=rank(),
            first=self._first,
            calls=self._calls,
            states=self._states,
            tied=tied,
        )
        write_json(saves_file(self._folder, rank()), content)

    # What saves

    def watch(self) -> None:
        """Watch what can be watched before the script begins."""
        import safetensors.torch
        from accelerate import Accelerator
        from transformers import PreTrainedModel, TrainingArguments

        self._watch(PreTrainedModel, "save_pretrained", "save_directory")
        self._watch(Accelerator, "save_model", "save_directory")
        self._watch(Accelerator, "save_state", "output_dir", is_checkpoint=True)
        self._watch(Accelerator, "save", "f", tensors="obj")
        self._watch(torch, "save", "f", tensors="obj")
        self._watch(safetensors.torch, "save_file", "filename", tensors="tensors")
        finish = TrainingArguments.__post_init__

        def post_init(this: Any) -> None:
            finish(this)
            self._watch_trainers()

        self.hooks.callback(replace_method(TrainingArguments, "__post_init__", post_init))

    def _watch(
        self,
        owner: Any,
        name: str,
        place: str | Callable[[Mapping[str, Any]], str],
        *,
        tensors: str = "",
        is_checkpoint: bool = False,
        weights_only: bool = False,
    ) -> None:
        """Note each call of a function that no other one makes which is watched.

        Args:
            owner: Has the function.
            name: Of the function.
            place: The argument that names a path, or what returns it.
            tensors: The argument that has the model's tensors by name; else the call doesn't count.
            is_checkpoint: As in `Call`.
            weights_only: As in `Call`.
        """
        original = getattr(owner, name)
        declared = signature(original)
        shown = owner.__name__ if hasattr(owner, "__name__") else type(owner).__name__

        @functools.wraps(original)
        def saving(*arguments: Any, **options: Any) -> Any:
            given = declared.bind(*arguments, **options).arguments
            if self._is_saving or (tensors and not self._has_weights(given[tensors])):
                return original(*arguments, **options)
            path = place(given) if callable(place) else given.get(place)
            call = Call(
                name=f"{shown}.{name}",
                where=_line_of_script(),
                path="",
                step=max(0, len(self._states) - 1),
                error=None,
                is_checkpoint=is_checkpoint,
                weights_only=weights_only,
            )
            self._calls.append(call)
            self._is_saving = True
            try:
                result = original(*arguments, **options)
            except Exception as error:
                call["error"] = f"{type(error).__name__}: {sentence_of(error)}"
                self.write()  # the launcher ends the other ranks, and soon this one
                raise
            finally:
                self._is_saving = False
            with_path = path if isinstance(path, str | os.PathLike) else result
            call["path"] = os.path.abspath(with_path) if isinstance(with_path, str | Path) else ""
            return result

        self.hooks.callback(replace_method(owner, name, saving))

    def _has_weights(self, content: Any) -> bool:
        names = {name.removeprefix("module.") for name in tensors_by_name(content)}
        known = () if self._model is None else (name for name, _ in named_parameters(self._model))
        return not names.isdisjoint(known)

    def _watch_trainers(self) -> None:
        """Watch each Trainer that is made from now on, by the methods of its own class."""
        module = sys.modules.get("transformers.trainer")
        if module is None or self._watches_trainers:
            return
        self._watches_trainers = True
        init = module.Trainer.__init__

        @functools.wraps(init)
        def made(this: Any, *arguments: Any, **options: Any) -> None:
            init(this, *arguments, **options)
            self._watch(this, "save_model", lambda given: given.get("output_dir") or folder(this))
            self._watch(
                this,
                "_save_checkpoint",  # transformers 5.24
                lambda _: f"{folder(this)}/checkpoint-{this.state.global_step}",
                is_checkpoint=True,
                weights_only=this.args.save_only_model,
            )
            if self._resume_from is not None:
                train = this.train

                def resuming(resume_from_checkpoint: Any = None, **more: Any) -> Any:
                    return train(resume_from_checkpoint=self._resume_from, **more)

                replace_method(this, "train", resuming)
            elif this.args.save_strategy != "no" and self._few.steps and not self._first:
                this.add_callback(_save_after(max(1, self._few.steps // 2)))

        def folder(trainer: Any) -> str:
            return str(trainer.args.output_dir)

        self.hooks.callback(replace_method(module.Trainer, "__init__", made))

    # The states

    def prepared(self, model: Any, optimizer: Any) -> None:
        """Follow the states of a prepared model; what is saved by classes that are known now."""
        if self._model is not None:
            return
        self._model, self._optimizer, self._backend = model, optimizer, backend_of(model)
        if (peft := sys.modules.get("peft")) is not None:
            self._watch(peft.PeftModel, "save_pretrained", "save_directory")
        if is_engine(model):
            self._watch(type(model), "save_checkpoint", "save_dir", is_checkpoint=True)
            self._watch(type(model), "save_16bit_model", "save_dir")
        hook = innermost(model).register_forward_hook(self._forward, with_kwargs=True)
        self.hooks.callback(hook.remove)
        watch = self._backend.watch_step
        self.hooks.callback(watch(optimizer, before=self._begins, after=self._stepped))

    def _forward(self, _: Any, arguments: Any, inputs: Mapping[str, Any], output: Any) -> None:
        if self._few.is_done or not torch.is_grad_enabled():
            return
        tokens = inputs.get("input_ids", arguments[0] if arguments else None)
        if isinstance(tokens, torch.Tensor):
            self._batches.append(zlib.crc32(tokens.detach().contiguous().cpu().numpy().tobytes()))
        loss = getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor):
            self._losses.append(float(loss.detach()))

    def _begins(self) -> None:
        if not self._states:
            self._states.append(self._state())
        self._rate = max(map(float, rates_of(optimizer_of(self._optimizer).param_groups)))

    def _stepped(self) -> None:
        if not self._few.is_done:
            self._states.append(self._state())
            self._batches, self._losses = [], []

    @torch.no_grad()
    def _state(self) -> State:
        """Return the state of the model; a collective."""
        weights: dict[str, Tensor] = {}
        for name, parameter in self._backend.full_parameters():
            if self._states and not parameter.requires_grad:
                continue
            tensor = self._backend.full_weight(parameter)
            if rank() == 0:
                weights[name] = described(tensor)
        moments = [moment.detach() for moment in states_held(self._optimizer)]
        return State(
            weights=weights,
            moments=[digest_of([moment]) for moment in moments],
            sizes=[float(torch.linalg.vector_norm(moment.double())) for moment in moments],
            rate=self._rate,
            batches=self._batches,
            losses=self._losses,
        )


def described(tensor: torch.Tensor) -> Tensor:
    """Describe a whole tensor."""
    # A copy: numpy, which the digests need, keeps a storage from being freed by FSDP2.
    held = tensor.detach().cpu().clone()
    dtypes = {held.dtype, *CASTS} if held.is_floating_point() else {held.dtype}
    flat = held.reshape(-1)
    places = torch.linspace(0, max(0, flat.numel() - 1), min(VALUES, flat.numel())).long()
    return Tensor(
        shape=list(held.shape),
        dtype=dtype_name(held.dtype),
        digests={dtype_name(dtype): digest_of([held.to(dtype)]) for dtype in dtypes},
        values=flat[places].double().tolist(),
    )


def tensors_by_name(content: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict, or of one under the usual names in a dictionary."""
    if not isinstance(content, Mapping):
        return {}
    for name in ("model", "module", "state_dict", "model_state_dict"):
        if isinstance(content.get(name), Mapping):
            return tensors_by_name(content[name])
    return {str(n): one for n, one in content.items() if isinstance(one, torch.Tensor)}


def _save_after(step: int) -> Any:
    from transformers import TrainerCallback

    class SaveAfter(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save |= state.global_step == step

    return SaveAfter()


def _line_of_script() -> str:
    """Return the file and line of the script that is called from."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "site-packages" not in file and not file.startswith(LIBRARIES):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
