"""Observes the first steps of any script by hooks: what it reads, computes and changes.

Nothing is sent between ranks but for the evidence of the first step, which gathers the model within
the optimizer's own step, where all ranks are.
"""

from __future__ import annotations

import json
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack, suppress
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, TypeGuard

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from toolkit.engines.backend import backend_of
from toolkit.engines.hooks import Undo, intercept
from toolkit.engines.optimizers import optimizer_of
from toolkit.engines.tensors import elements_of, local, named_parameters, shape_of
from toolkit.engines.wrapped import world_size
from toolkit.engines.wrappers import innermost
from toolkit.launching.ranks import rank
from toolkit.measuring.attestation import gather_objects
from toolkit.measuring.evaluations import Evaluations, sums
from toolkit.measuring.evidence import EvidenceKeeper
from toolkit.measuring.few_steps import FewSteps
from toolkit.measuring.stepped import rates_of
from toolkit.records.json_files import SCHEMA, write_json
from toolkit.records.observation import (
    MICRO_BATCHES,
    Batch,
    Observation,
    Parameter,
    Tokens,
    observation_file,
)

ROWS_OF_DATA: Final = 64
"""Rows of the data set, and batches of a loader, that ranks compare."""

MOST_FORWARDS: Final = 2_000

ORDER: Final = 1234
"""Seed of the order of rows that a loader shuffles without one."""

AGAIN: Final = 1_000
"""Added to the seed of the second of two equal runs."""

WORKERS: Final = "workers-"
"""Beginning of the names of files that the workers of loaders write."""

EXAMINED: Final = 512
"""Rows of the data set that trains with which the evaluated ones are compared."""

SHARD: Final = 10_000
"""Rows of a rank's part of the data set that ranks compare."""

ANSWER: Final = "certain"
"""Content of a turn by which the end of a turn is found in what the template writes."""


class ScriptObserver:
    """Observes one rank of a script.

    Args:
        folder: Of the run; the ranks share it.
        few: Counts the steps that are observed.
        strategy: Its name, for the evidence of the first step.
        precision: As the launcher asks for it.
    """

    def __init__(self, folder: Path, few: FewSteps, *, strategy: str, precision: str) -> None:
        self.keeper = EvidenceKeeper(
            folder, strategy=strategy, engine="script", precision=precision
        )
        self._folder, self._few = folder, few
        self._hooks = ExitStack()
        self._batches: list[Batch] = []
        self._rows: list[list[int]] = []
        self._passes: list[tuple[Any, list[int]]] = []
        self._rates: list[float] = []
        self._logged: list[dict[str, Any]] = []
        self._tokenizers: list[Any] = []
        self._unresized: dict[int, int] = {}
        self._model: Any = None
        self._sums: dict[str, int] = {}
        self._evaluating = 0
        self._steps = 0
        self._dropout = 0.0
        self._draws: list[int] | None = None
        self._data: list[int] | None = None
        self._trainer: str | None = None
        self._own_step = False
        self._prepared_schedule = False
        self._packed: dict[str, Any] | None = None
        self._leak: float | None = None
        self._joined: list[int] | None = None
        self._kept_gradients = self._looked_at = 0

    def __deepcopy__(self, _: Any) -> Any:
        return self  # a script may copy a model with its hooks

    def start(self) -> None:
        """Watch what the script makes; before it begins.

        Ranks that are forked share numpy's random state, which would hide a shuffle without a seed.
        Of torch, rank 0 and one process get the same numbers: new weights of a script that sets no
        seed would differ.
        """
        np.random.seed()
        seed = ORDER + AGAIN * self._few.again
        torch.manual_seed(seed + rank())
        from accelerate import Accelerator
        from accelerate.scheduler import AcceleratedScheduler
        from transformers import PreTrainedModel, PreTrainedTokenizerBase

        self._few.pass_begins = self._pass_begins
        for place, owner, name in (
            ("optimizer", Optimizer, "__init__"),
            ("loader", DataLoader, "__init__"),
            ("schedule", LRScheduler, "__init__"),
            ("prepare", Accelerator, "prepare"),
            ("backward", Accelerator, "backward"),
            ("clip", Accelerator, "clip_grad_norm_"),
            ("load", Accelerator, "load_state"),
        ):
            self._hooks.callback(self._note_place(place, owner, name))
        self._hooks.callback(_watch_workers(self._folder))

        def resized(resize: Any, model: Any, *arguments: Any, **options: Any) -> Any:
            before = model.get_input_embeddings().num_embeddings
            self._unresized.setdefault(id(model), before)
            return resize(model, *arguments, **options)

        def made(make: Any, tokenizer: Any, *arguments: Any, **options: Any) -> None:
            make(tokenizer, *arguments, **options)
            self._tokenizers.append(tokenizer)

        def advancing(advance: Any, *arguments: Any, **options: Any) -> None:
            self._prepared_schedule = True
            advance(*arguments, **options)

        def prepare_loader(prepare: Any, this: Any, loader: Any, *rest: Any, **options: Any) -> Any:
            _seed(getattr(loader, "sampler", None), seed)
            made = prepare(this, loader, *rest, **options)
            if self._draws is None and self._data is None:
                self._data = _rows_of_data(getattr(loader, "dataset", None))
                self._draws = _watch_draws(made)
            return made

        for owner, name, replacement in (
            (PreTrainedModel, "resize_token_embeddings", resized),
            (PreTrainedTokenizerBase, "__init__", made),
            (AcceleratedScheduler, "step", advancing),
            (Accelerator, "prepare_data_loader", prepare_loader),
        ):
            self._hooks.callback(intercept(owner, name, replacement))

    def _note_place(self, place: str, owner: Any, name: str) -> Undo:
        def noting(original: Any, *arguments: Any, **options: Any) -> Any:
            self._few.place(place)
            return original(*arguments, **options)

        return intercept(owner, name, noting)

    def before_prepare(self, models: Iterable[torch.nn.Module]) -> None:
        """Switch dropout off, which no two runs would draw alike."""
        for model in models:
            for owner in (*model.modules(), getattr(model, "config", model)):
                names = [name for name in vars(owner) if "dropout" in name]
                names += ["p"] if isinstance(owner, torch.nn.Dropout) else []
                for name in names:
                    value = getattr(owner, name)
                    if isinstance(value, float) and value:
                        self._dropout = max(self._dropout, value)
                        setattr(owner, name, 0.0)

    def prepared(self, model: Any, optimizer: Any) -> None:
        """Watch a prepared model and its optimizer from now on."""
        self._model, self._optimizer, self._ranks = model, optimizer, world_size()
        self._sums, self._evaluations = dict(sums(model)), Evaluations(model, self._few)
        inner = innermost(model)
        hook = inner.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._hooks.callback(hook.remove)
        hook = inner.register_forward_hook(self._after_forward, with_kwargs=True)
        self._hooks.callback(hook.remove)
        self._hooks.callback(
            backend_of(model).watch_step(optimizer, before=self._begins, after=self._stepped)
        )
        trainer = sys.modules.get("transformers.trainer")
        if trainer is not None:

            def logging(
                log: Any, this: Any, logs: dict[str, Any], *rest: Any, **options: Any
            ) -> None:
                self._trainer = type(this).__name__
                self._own_step = _has_own_step(type(this), trainer.Trainer)
                if not self._few.is_done or "loss" in logs:
                    now = {"step": this.state.global_step, "epoch": this.state.epoch}
                    self._logged.append({**now, **_plain(logs)})
                log(this, logs, *rest, **options)

            self._hooks.callback(intercept(trainer.Trainer, "log", logging))

    def write(self) -> None:
        """Write what this rank has seen; without a collective."""
        self._hooks.close()
        self.keeper.close()
        if self._model is None:
            return
        now = dict(sums(self._model))
        stepped = {id(tensor) for tensor in optimizer_of(self._optimizer).state}
        if not any(id(parameter) in stepped for parameter in self._model.parameters()):
            stepped = None
        self._folder.mkdir(parents=True, exist_ok=True)
        content = Observation(
            schema=SCHEMA,
            rank=rank(),
            num_processes=self._ranks,
            steps=self._steps,
            cut=self._few.was_cut,
            trainer=self._trainer,
            own_step=self._own_step,
            model=type(innermost(self._model)).__name__,
            batches=self._batches,
            rows=self._rows,
            passes=[*self._passes_of_training()],
            rates=self._rates,
            prepared_schedule=self._prepared_schedule,
            logged=self._logged if rank() == 0 else [],
            tokens=self._special_tokens(),
            parameters={
                name: Parameter(
                    elements=elements_of(parameter),
                    dims=len(shape_of(parameter)),
                    trained=parameter.requires_grad,
                    moved=now[name] != self._sums[name]
                    if name in self._sums & now.keys()
                    else None,
                    stepped=None if stepped is None else id(parameter) in stepped,
                )
                for name, parameter in named_parameters(self._model)
            },
            evaluating=self._evaluating,
            dropout=self._dropout,
            leak=self._leak,
            evaluations=self._evaluations.seen(),
            trained_rows=self._trained_rows(),
            workers=_drawn_by_workers(self._folder),
            places=self._few.places,
            kept_gradients=self._kept_gradients,
            joined=self._joined,
            shard=_shard_of(self._evaluations.of_training),
            draws=self._draws,
            data=self._data,
        )
        write_json(observation_file(self._folder, rank()), content)

    # In the steps

    def _pass_begins(self, loader: Any, batch: Any) -> None:
        inputs = batch if hasattr(batch, "get") else {}
        tokens = inputs.get("input_ids")
        if _is_batch(tokens) and len(self._passes) < ROWS_OF_DATA:
            self._passes.append((loader, list(_hashes(tokens, _mask_of(inputs, tokens)))))
            self._joined = self._joined or _joined(loader, inputs, len(tokens))

    def _passes_of_training(self) -> Iterator[list[int]]:
        """Yield the first rows of each pass over the loader that gave the first micro-batch."""
        first = next((loader for loader, rows in self._passes if [rows] == self._rows[:1]), None)
        sampler = getattr(first, "batch_sampler", None)
        while sampler is not None and not isinstance(sampler, SequentialSampler | RandomSampler):
            sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        if not isinstance(sampler, SequentialSampler):
            yield from (rows for loader, rows in self._passes if loader is first)

    def _before_forward(self, module: Any, arguments: Any, inputs: dict[str, Any]) -> None:
        tokens = inputs.get("input_ids")
        if tokens is None and arguments and isinstance(arguments[0], torch.Tensor):
            tokens = arguments[0]
        if torch.is_grad_enabled():
            self._few.place("forward")
            self._evaluations.trains(module)
        if self._few.is_done or not torch.is_grad_enabled() or not _is_batch(tokens):
            return
        self._evaluating += not module.training
        mask, labels = _mask_of(inputs, tokens), inputs.get("labels")
        if len(self._rows) < MOST_FORWARDS:
            self._rows.append(list(_hashes(tokens, mask)))
        if len(self._batches) < MICRO_BATCHES:
            positions = inputs.get("position_ids")
            restarts = _restarts(positions)
            if restarts and self._packed is None and not arguments:
                self._packed = dict(inputs)
            self._batches.append(
                Batch(
                    step=self._steps + 1,
                    tokens=tokens.tolist(),
                    labels=labels.tolist() if _is_batch(labels) else None,
                    mask=None if mask is None else mask.tolist(),
                )
            )

    def _after_forward(
        self, module: Any, arguments: Any, inputs: dict[str, Any], output: Any
    ) -> None:
        if torch.is_grad_enabled():
            self.keeper.micro_batch(None, inputs.get("labels"))
            made = [getattr(output, name, None) for name in ("loss", "logits")]
            made = [one for one in made if isinstance(one, torch.Tensor) and one.requires_grad]
            if made and self._looked_at < self._steps and not self._few.is_done:
                made[0].register_hook(self._goes_back)
            return
        tokens = inputs.get("input_ids", arguments[0] if arguments else None)
        if _is_batch(tokens) and inputs.get("past_key_values") is None:
            loss, logits = (getattr(output, name, None) for name in ("loss", "logits"))
            value = loss if loss is not None or logits is None else logits.float().sum()
            self._few.place("evaluation")
            self._evaluations.evaluates(
                module,
                list(_hashes(tokens, _mask_of(inputs, tokens))),
                None if value is None else float(value),
            )

    def _goes_back(self, _: torch.Tensor) -> None:
        """Look for what is left of the step before, when the first backward of a step begins."""
        if self._looked_at < self._steps:
            self._looked_at = self._steps
            held = (local(p.grad) for p in self._model.parameters() if p.grad is not None)
            self._kept_gradients += any(bool(gradient.any()) for gradient in held)

    def _begins(self) -> None:
        if not self._few.is_done:
            self._rates.append(
                max(map(float, rates_of(optimizer_of(self._optimizer).param_groups)))
            )

    def _stepped(self) -> None:
        if not self._few.is_done:
            self._steps += 1
            self._evaluations.stepped()
            if self._steps == self._few.steps and all(gather_objects(self._packed is not None)):
                self._leak = self._leaked()
            self.keeper.step_done(within_step=True)

    @torch.no_grad()
    def _leaked(self) -> float | None:
        """Change the first text of a packed row, and see what the second makes of it."""
        inputs = self._packed or {}
        positions, tokens = inputs["position_ids"], inputs["input_ids"]
        row, at = (positions[:, 1:] < positions[:, :-1]).nonzero()[0].tolist()
        changed = tokens.clone()
        changed[row, : at + 1] = tokens[row, : at + 1].roll(1)
        changed[row, 0] = tokens[row, -1]
        logits = [
            getattr(self._model(**inputs | {"input_ids": ids}), "logits", None)
            for ids in (tokens, changed)
        ]
        if any(one is None or one.shape[:2] != tokens.shape for one in logits):
            return None
        before, after = (one[row, at + 1 :].float() for one in logits if one is not None)
        return float((after - before).norm() / before.norm().clamp_min(1e-12))

    # At the end

    def _trained_rows(self) -> list[int]:
        """Return hashes of the first rows that can train, each as the loader collates it alone."""
        found: list[int] = []
        loader = self._evaluations.of_training
        if rank() == 0 and self._evaluations.all:
            with suppress(Exception):  # a stream, or code of the script's own
                for at in range(min(EXAMINED, len(loader.dataset))):
                    inputs = loader.collate_fn([loader.dataset[at]])
                    tokens = inputs["input_ids"]
                    found += _hashes(tokens, _mask_of(inputs, tokens))
        return found

    def _special_tokens(self) -> Tokens:
        tokenizer = self._tokenizers[-1] if self._tokenizers else None
        bos, eos, pad = (
            getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")
        )
        inner = innermost(self._model)
        generation = getattr(inner, "generation_config", None)
        ends = getattr(generation, "eos_token_id", None)
        stops = {eos, *(ends if isinstance(ends, list) else [ends])} - {None}
        rows, table_trained = 0, False
        with suppress(AttributeError, NotImplementedError):
            table = inner.get_input_embeddings()
            rows = table.num_embeddings
            table_trained = any(parameter.requires_grad for parameter in table.parameters())
        before = (self._unresized[id(m)] for m in inner.modules() if id(m) in self._unresized)
        shown = {token for batch in self._batches for row in batch["tokens"] for token in row}
        return Tokens(
            bos=bos,
            eos=eos,
            pad=pad,
            stops=sorted({*stops, *_turn_end(tokenizer, stops)}),
            has_template=bool(getattr(tokenizer, "chat_template", None)),
            vocabulary=rows,
            vocabulary_before=next(before, rows),
            table_trained=table_trained,
            texts={str(token): tokenizer.decode([token]) for token in sorted(shown) if tokenizer},
        )


def _seed(sampler: Any, seed: int) -> None:
    """Give a sampler an order of its own: one process has drawn other numbers before than ranks."""
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        sampler.generator = torch.Generator()
        # That of torch stands where the script has set none: in a second run the order is another.
        own = torch.initial_seed() != seed + rank()
        sampler.generator.manual_seed(ORDER if own else seed)


def _has_own_step(kind: type[Any], Trainer: type[Any]) -> bool:
    names = ("training_step", "compute_loss")
    return any(getattr(kind, name) is not getattr(Trainer, name) for name in names)


def _turn_end(tokenizer: Any, stops: set[int]) -> list[int]:
    """Return the id that the template ends an answer with: a stop token, or the first behind it."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWER}]
    with suppress(Exception):  # a template may refuse what it is given in its own way
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        behind = text.rpartition(ANSWER)[2].strip()
        ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
        return [token for token in ids if token in stops][:1] or ids[:1]
    return []


def _is_batch(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point()


def _restarts(positions: Any) -> bool:
    """Whether positions begin again within a row."""
    return _is_batch(positions) and bool((positions[:, 1:] < positions[:, :-1]).any())


def _joined(loader: Any, inputs: Any, given: int) -> list[int] | None:
    """Return how many rows a loader draws for a batch, where it gives fewer."""
    sampler, data = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    drawn = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None) or 0
    is_last = not isinstance(data, Sized) or len(data) < drawn * world_size()
    packed = any(name.startswith(("cu_seq", "seq_idx")) for name in inputs)
    if given >= drawn or is_last or packed or _restarts(inputs.get("position_ids")):
        return None
    return [drawn, given]


def _shard_of(loader: Any) -> list[int] | None:
    """Return the first rows that a distributed sampler draws; it draws the same each time."""
    sampler = getattr(loader, "sampler", None)
    return [*islice(sampler, SHARD)] if isinstance(sampler, DistributedSampler) else None


def _mask_of(inputs: Any, tokens: torch.Tensor) -> torch.Tensor | None:
    mask = inputs.get("attention_mask")
    return mask if _is_batch(mask) and mask.shape == tokens.shape else None


def _hashes(tokens: torch.Tensor, mask: torch.Tensor | None) -> Iterator[int]:
    """Yield a hash of each row without its padding."""
    for at, row in enumerate(tokens):
        held = row if mask is None else row[mask[at].bool()]
        yield zlib.crc32(held.contiguous().cpu().numpy().tobytes())


def _rows_of_data(data: Any) -> list[int] | None:
    """Return a hash of each of the first rows of a data set that has numbered rows."""
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return None
    first, again = (
        [_hash(data[at]) for at in range(min(ROWS_OF_DATA, len(data)))] for _ in range(2)
    )
    return [len(data), *first] if first == again else None


def _hash(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    elif isinstance(value, dict):
        value = sorted((str(name), _hash(one)) for name, one in value.items())
    elif isinstance(value, list | tuple):
        value = [_hash(one) if isinstance(one, torch.Tensor | dict) else one for one in value]
    return zlib.crc32(repr(value).encode())


def _watch_draws(loader: Any) -> list[int] | None:
    """Return a list that takes a hash of each of the first batches that a loader draws."""
    shard = getattr(loader, "batch_sampler", None)
    inner = getattr(shard, "batch_sampler", None)
    if not hasattr(shard, "process_index") or inner is None:
        return None
    draws: list[int] = []

    def drawing(original: Any, this: Any) -> Iterator[Any]:
        for batch in original(this):
            if this is inner and len(draws) < ROWS_OF_DATA:
                draws.append(zlib.crc32(repr(list(batch)).encode()))
            yield batch

    intercept(type(inner), "__iter__", drawing)
    return draws


class _Drawing:
    """What a worker of a loader calls first: notes the random states that it begins with."""

    def __init__(self, begin: Callable[[int], object] | None, name: Path) -> None:
        self.begin, self.name, self.number = begin, name, 0

    def __call__(self, worker: int) -> None:
        if self.begin is not None:
            self.begin(worker)
        states = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state())
        drawn = [zlib.crc32(repr(state).encode()) for state in states]
        path = self.name.with_name(f"{self.name.name}{self.number}-{worker}.json")
        path.write_text(json.dumps([self.number, worker, *drawn]), "utf-8")


def _watch_workers(folder: Path) -> Undo:
    number = count()

    def iterating(load: Any, loader: Any) -> Any:
        if loader.num_workers and not isinstance(loader.worker_init_fn, _Drawing):
            folder.mkdir(parents=True, exist_ok=True)
            name = folder / f"{WORKERS}{rank()}-"
            loader.worker_init_fn = _Drawing(loader.worker_init_fn, name)
        if loader.num_workers:
            loader.worker_init_fn.number = next(number)
        return load(loader)

    return intercept(DataLoader, "__iter__", iterating)


def _drawn_by_workers(folder: Path) -> list[list[int]]:
    files = folder.glob(f"{WORKERS}{rank()}-*.json")
    return sorted(json.loads(path.read_text("utf-8")) for path in files)


def _plain(logs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: float(value)
        for name, value in islice(logs.items(), 50)
        if isinstance(value, int | float)
    }
