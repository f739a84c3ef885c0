"""What a script saves in its first steps, and the state of its model after each of them.

A save is noted without a collective, for often rank 0 saves alone. What should stand in it is known
before: the weights are gathered within each step of the optimizer, where all ranks are.
"""

from __future__ import annotations

import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, Final

import torch

from toolkit.engines.backend import backend_of
from toolkit.engines.deepspeed import is_engine
from toolkit.engines.hooks import intercept
from toolkit.engines.names import plain_name
from toolkit.engines.optimizers import optimizer_of, states_held
from toolkit.engines.tensors import dtype_name, named_parameters
from toolkit.engines.wrappers import innermost
from toolkit.errors import sentence_of
from toolkit.launching.ranks import rank
from toolkit.measuring.evidence import digest_of
from toolkit.measuring.few_steps import FewSteps, line_of_script
from toolkit.measuring.stepped import rates_of
from toolkit.records.json_files import SCHEMA, write_json
from toolkit.records.saves import STATES, Call, Saves, State, Tensor, saves_file

CASTS: Final = (torch.float32, torch.bfloat16, torch.float16)
VALUES: Final = 64

SECOND: Final = "second"
"""Folder of a checkpoint that is saved right after one was loaded."""


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
        self._loaded_from: Path | None = None
        self._second = folder / SECOND
        self._others: list[str] | None = None

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
            second=self._differing(),
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

        def loading(
            load: Any, this: Any, input_dir: Any = None, *arguments: Any, **options: Any
        ) -> None:
            load(this, input_dir, *arguments, **options)
            if self._first and input_dir is not None and self._loaded_from is None:
                self._loaded_from = Path(input_dir)
                self._is_saving = True  # by us
                this.save_state(str(self._folder / SECOND))
                self._is_saving = False

        def post_init(finish: Any, this: Any) -> None:
            finish(this)
            self._watch_trainers()

        self.hooks.callback(intercept(Accelerator, "load_state", loading))
        self.hooks.callback(intercept(TrainingArguments, "__post_init__", post_init))

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
        declared = signature(getattr(owner, name))
        shown = owner.__name__ if hasattr(owner, "__name__") else type(owner).__name__

        def saving(original: Any, *arguments: Any, **options: Any) -> Any:
            given = declared.bind(*arguments, **options).arguments
            if self._is_saving or (tensors and not self._has_weights(given[tensors])):
                return original(*arguments, **options)
            path = place(given) if callable(place) else given.get(place)
            call = Call(
                name=f"{shown}.{name}",
                where=line_of_script(),
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

        self.hooks.callback(intercept(owner, name, saving))

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

        def made(init: Any, this: Any, *arguments: Any, **options: Any) -> None:
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

                def resuming(train: Any, resume_from_checkpoint: Any = None, **more: Any) -> Any:
                    return train(resume_from_checkpoint=self._resume_from, **more)

                intercept(this, "train", resuming)
                this.add_callback(_calling(lambda *_: self._save_again(this), "on_step_begin"))
            elif self._few.again:
                this.add_callback(_calling(_hold_back, "on_step_end", "on_epoch_end"))
            elif self._few.steps and not self._first:
                _evaluate_twice(this)
                act = _acting_after(max(1, self._few.steps // 2), this.args)
                this.add_callback(_calling(act, "on_step_end"))

        def folder(trainer: Any) -> str:
            return str(trainer.args.output_dir)

        self.hooks.callback(intercept(module.Trainer, "__init__", made))

    def _save_again(self, trainer: Any) -> None:
        """Save, before its first step, what a Trainer has loaded."""
        if self._loaded_from is None and self._resume_from is not None:
            self._loaded_from, self._is_saving = Path(self._resume_from), True
            trainer._save_checkpoint(trainer.model_wrapped, None)
            self._is_saving = False
            self._second = Path(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}")

    def _differing(self) -> list[str] | None:
        """Name the files that differ in the second of two checkpoints, and remove that one."""
        first, second = self._loaded_from, self._second
        if first is None or rank() or not second.is_dir():
            return self._others
        files = [path.relative_to(first) for path in sorted(first.rglob("*")) if path.is_file()]
        held = [path for path in files if path.suffix in STATES]
        self._others = [str(at) for at in held if not _is_same(first / at, second / at)]
        shutil.rmtree(second)
        return self._others

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
        adapters: dict[str, torch.Tensor] = {}
        for name, parameter in self._backend.full_parameters():
            if self._states and not parameter.requires_grad:
                continue
            tensor = self._backend.full_weight(parameter)
            if rank() == 0:
                weights[name] = described(tensor)
                if ".lora_" in name:
                    adapters[name] = tensor.detach().cpu().double()
        moments = [moment.detach() for moment in states_held(self._optimizer)]
        return State(
            weights=weights,
            merged=dict(self._merged(self._states[0]["weights"] if self._states else {}, adapters)),
            moments=[digest_of([moment]) for moment in moments],
            sizes=[float(torch.linalg.vector_norm(moment.double())) for moment in moments],
            seed=torch.initial_seed(),
            rate=self._rate,
            batches=self._batches,
            losses=self._losses,
        )

    def _merged(
        self, base: Mapping[str, Tensor], adapters: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, list[float]]]:
        """Yield the described numbers of weights with one adapter each, as merging adds it."""
        modules = dict(innermost(self._model).named_modules())
        for name, first in adapters.items():
            prefix, is_first, rest = name.partition(".lora_A.")
            module, weight = modules.get(prefix), base.get(f"{prefix}.base_layer.weight")
            second = adapters.get(f"{prefix}.lora_B.{rest}")
            adapter, is_product, _ = rest.partition(".weight")
            if not (is_first and is_product and module) or weight is None or second is None:
                continue
            transposed = getattr(module, "fan_in_fan_out", False)
            added = (second @ first) * module.scaling[adapter]
            added = added.T if transposed else added
            # DoRA scales the sum, and weights of 4 bits have another shape.
            if list(added.shape) == weight["shape"] and not module.use_dora.get(adapter):
                values = zip(weight["values"], _few_of(added), strict=True)
                yield f"{prefix}.base_layer.weight", [old + new for old, new in values]


def _few_of(tensor: torch.Tensor) -> list[float]:
    """Return a few numbers of a tensor, evenly spaced."""
    flat = tensor.reshape(-1)
    places = torch.linspace(0, max(0, flat.numel() - 1), min(VALUES, flat.numel())).long()
    return flat[places].double().tolist()


def described(tensor: torch.Tensor) -> Tensor:
    """Describe a whole tensor."""
    # A copy: numpy, which the digests need, keeps a storage from being freed by FSDP2.
    held = tensor.detach().cpu().clone()
    dtypes = {held.dtype, *CASTS} if held.is_floating_point() else {held.dtype}
    return Tensor(
        shape=list(held.shape),
        dtype=dtype_name(held.dtype),
        digests={dtype_name(dtype): digest_of([held.to(dtype)]) for dtype in dtypes},
        values=_few_of(held),
    )


def tensors_by_name(content: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict, or of one under the usual names in a dictionary."""
    if not isinstance(content, Mapping):
        return {}
    for name in ("model", "module", "state_dict", "model_state_dict"):
        if isinstance(content.get(name), Mapping):
            return tensors_by_name(content[name])
    return {str(n): one for n, one in content.items() if isinstance(one, torch.Tensor)}


def _calling(act: Callable[[Any, Any], None], *events: str) -> Any:
    """Return a callback of a Trainer that calls a function with its state and its control."""
    from transformers import TrainerCallback

    callback = TrainerCallback()
    for event in events:
        setattr(callback, event, lambda _, state, control, **__: act(state, control))
    return callback


def _hold_back(_: Any, control: Any) -> None:
    control.should_save = control.should_evaluate = False


def _acting_after(step: int, asked: Any) -> Callable[[Any, Any], None]:
    """Have a Trainer save and evaluate after a step, where it was asked to at any."""

    def act(state: Any, control: Any) -> None:
        control.should_save |= state.global_step == step and asked.save_strategy != "no"
        control.should_evaluate |= state.global_step == step and asked.eval_strategy != "no"

    return act


def _evaluate_twice(trainer: Any) -> None:
    """Repeat the first evaluation of a Trainer."""
    seen: list[Any] = []

    def evaluating(evaluate: Any, *arguments: Any, **options: Any) -> Any:
        if not seen:
            seen.append(evaluate(*arguments, **options))
        return evaluate(*arguments, **options)

    intercept(trainer, "evaluation_loop", evaluating)


def _is_same(one: Path, other: Path) -> bool:
    """Whether two files that this script has written hold the same states."""
    if not other.is_file() or one.read_bytes() == other.read_bytes():
        return other.is_file()
    by_torch = one.suffix not in (".safetensors", ".distcp")
    return by_torch and _are_equal(*(torch.load(file, weights_only=False) for file in (one, other)))


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_are_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):  # a tuple may come back as a list
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return repr(one) == repr(other)
