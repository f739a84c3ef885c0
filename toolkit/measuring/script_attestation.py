"""Attestation of a script that doesn't use the toolkit: its `Accelerator.prepare` is watched.

Covers a plain `Accelerator` and the HF Trainer, which prepares through one. Settings of the
launcher's config or the script's own flags must engage. Settings that belong to the script
(clipping, accumulation) are only reported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_post_hook

from toolkit import backends
from toolkit.configs.requested import (
    LAUNCHER,
    accumulation_dtype,
    agreed_strategy,
    requested_accumulation_dtype,
    requested_processes,
    requested_strategy,
    requests_checkpointing,
    shown,
)
from toolkit.engines.backend import backend_of, strategy_of_plugins
from toolkit.engines.hooks import Undo, intercept, nothing
from toolkit.engines.optimizers import steps_with
from toolkit.engines.tensors import is_spread
from toolkit.errors import UsageError
from toolkit.launching.progress import progressed
from toolkit.launching.ranks import rank, say
from toolkit.measuring.attestation import Refused, Requested
from toolkit.measuring.between_ranks import FAILED, exchange, notes, refusals
from toolkit.measuring.few_steps import FewSteps
from toolkit.measuring.forwards import LearnedRows, Products
from toolkit.measuring.observed import Observed, judging_loss, sums_at_start
from toolkit.measuring.recorder import Recorder
from toolkit.measuring.script_observer import ScriptObserver
from toolkit.measuring.stepped import Stepped
from toolkit.strategies import COMPUTE_DTYPES, Strategy


@contextmanager
def watch(
    *, rehearsal: bool, few: FewSteps | None = None, observe: Path | None = None
) -> Iterator[None]:
    """Attest the first model that is prepared for training, and report it even if the script fails.

    Args:
        rehearsal: Whether ranks are compared, which takes time.
        few: Counts the steps of the prepared optimizer.
        observe: Folder for what each rank reads, computes and changes in these steps.

    Raises:
        Refused: the actual settings differ from the requested ones.
        UsageError: the config asks for a backend that the toolkit doesn't run, or the script asks
            for another backend than the config.
    """
    from accelerate import Accelerator

    launched = dict(os.environ)  # a script may change it
    strategy = requested_strategy(launched)
    if backends.backend_of(strategy).splits_rows:
        # A script opens the split around each of its forwards, where no attestation sees it.
        raise UsageError(
            f"{strategy.name} splits rows over ranks, and whether a script of your own does so in "
            f"every step can't be attested. Start toolkit.train --strategy {strategy.name} "
            "--engine loop, or use the config of another strategy."
        )
    requested = Requested(
        strategy=strategy,
        num_processes=requested_processes(os.environ),
        accumulation_dtype=requested_accumulation_dtype(os.environ),
        # A script may also switch checkpointing on by itself.
        activation_checkpointing=requests_checkpointing(os.environ) or None,
    )
    observer = None
    if observe is not None and few is not None:
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        observer = ScriptObserver(observe, few, strategy=strategy.name, precision=precision)
        observer.start()
    keeper = None if observer is None else observer.keeper
    recorder = Recorder(requested, rehearsal=rehearsal, evidence=keeper)
    script = _Script(recorder, Observed() if rehearsal else None)
    plugins: dict[int, dict[str, Any]] = {}
    hooks = ExitStack()

    def init(original: Any, self: Any, *arguments: Any, **options: Any) -> None:
        given = signature(original).bind(self, *arguments, **options).arguments
        plugins[id(self)] = {
            "deepspeed": given.get("deepspeed_plugin") or given.get("deepspeed_plugins"),
            "fsdp": given.get("fsdp_plugin"),
            "parallelism": given.get("parallelism_config"),
        }
        original(self, *arguments, **options)

    def prepare_model(original: Any, *arguments: Any, **options: Any) -> Any:
        made = original(*arguments, **options)
        script.placed.append(made)
        return made

    def prepare(original: Any, self: Any, *objects: Any, **options: Any) -> Any:
        starts = script.starts(objects)
        if observer is not None:
            observer.before_prepare(given for given in objects if isinstance(given, Module))
        prepared = original(self, *objects, **options)
        results = prepared if isinstance(prepared, tuple | list) else (prepared,)
        if script.completes(self, results, starts):
            if script.splits_its_model and LAUNCHER not in launched:
                if few is not None:
                    few.prepared(script.models[0], script.optimizers[0])
                return prepared  # no config asks for anything else
            given = plugins[id(self)]
            recorder.requested = replace(requested, strategy=_agreed(given, launched))
            if given["deepspeed"] is not None:
                summed = accumulation_dtype(self.state.deepspeed_plugin.deepspeed_config)
                recorder.requested = replace(recorder.requested, accumulation_dtype=summed)
            recorder.prepared(self, script.models[0], script.optimizers[0])
            recorder.first_step_alone()
            if observer is not None:
                if self.mixed_precision in COMPUTE_DTYPES:  # a script may ask for it by itself
                    observer.keeper.described["precision"] = self.mixed_precision
                observer.prepared(script.models[0], script.optimizers[0])
            if few is not None:  # after the observer: what it counts as done is over
                few.prepared(script.models[0], script.optimizers[0])
            hooks.callback(
                script.models[0].register_forward_pre_hook(lambda *_: progressed()).remove
            )
            hooks.callback(
                script.models[0]
                .register_forward_pre_hook(script.rows.before_forward, with_kwargs=True)
                .remove
            )
            hooks.callback(
                register_optimizer_step_post_hook(lambda *_: progressed(step=True)).remove
            )
            hooks.callback(script.products.watch_first(script.models[0]))
            if rehearsal:
                hooks.callback(_watch_own_loss(script))
            if self.is_main_process:
                say(f"{shown(recorder.requested.strategy)} engaged")
        return prepared

    with hooks:
        for name, replacement in (
            ("prepare", prepare),
            ("prepare_model", prepare_model),
            ("__init__", init),
        ):
            hooks.callback(intercept(Accelerator, name, replacement))
        if script.observed is not None:
            script.observed.start()
            hooks.callback(script.observed.close)
        try:
            yield
        except (Refused, UsageError):
            raise
        except BaseException:  # a script that crashes may have been attested, too
            script.end(ended_well=False)
            raise
        finally:
            if observer is not None:
                observer.write()
        script.end(ended_well=True)


def _watch_own_loss(script: _Script) -> Undo:
    """Judge the first micro-batch of a Trainer with a loss of its own; return the undoing.

    Nothing is imported for it: the script may have a package of a library's name beside it.
    """
    module = sys.modules.get("transformers.trainer")
    if module is None:
        return nothing
    Trainer: Any = module.Trainer
    judged: list[Any] = []

    def training_step(
        original: Any, self: Any, model: Any, *arguments: Any, **options: Any
    ) -> torch.Tensor:
        micro_batches = self.current_gradient_accumulation_steps
        own = type(self).compute_loss is not Trainer.compute_loss
        if judged or micro_batches == 1 or not own:
            return original(self, model, *arguments, **options)
        judged.append(self)  # once: judging waits for the device
        name = type(self).__name__
        with judging_loss(model, micro_batches=micro_batches, of=name) as problem:
            loss = original(self, model, *arguments, **options)
            script.of_loss += filter(None, [problem(loss)])
        return loss

    return intercept(Trainer, "training_step", training_step)


class _Script:
    """The objects that a script passed through its Accelerators, and the sentences on them."""

    def __init__(self, recorder: Recorder, observed: Observed | None) -> None:
        self.recorder, self.observed = recorder, observed
        self.products = Products()
        self.rows = LearnedRows()
        self.of_loss: list[str] = []
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.placed: list[Any] = []
        """Models that were put on their device, wrapped or not."""

        self.splits_its_model = False
        """Whether the script itself had its model split or sharded, without an Accelerator."""

        self._accelerator: Any = None
        self._is_launched = LAUNCHER in os.environ  # a script may change it

    def starts(self, objects: tuple[Any, ...]) -> list[dict[str, int] | None]:
        """Return the sums of each model's weights before it is prepared."""
        modules = [given for given in objects if isinstance(given, torch.nn.Module)]
        return [None if self.observed is None else sums_at_start(module) for module in modules]

    def completes(
        self, accelerator: Any, results: Any, starts: list[dict[str, int] | None]
    ) -> bool:
        """Take prepared objects, and return whether a model and an optimizer are there now."""
        if self.observed is not None:
            self.observed.prepared(accelerator, results, starts)
        if self._accelerator is not None:
            return False
        # One call or several: a loop may prepare its model first and its optimizer later.
        self.models += [made for made in results if isinstance(made, torch.nn.Module)]
        self.optimizers += [made for made in results if hasattr(made, "param_groups")]
        if self.optimizers and not self.models:
            # A model that transformers has split is only put on its device (5.24, trainer.py).
            self.models += [made for made in self.placed if steps_with(self.optimizers[0], made)]
            self.splits_its_model = any(
                is_spread(parameter) for made in self.models for parameter in made.parameters()
            )
        if self.models and self.optimizers:
            self._accelerator = accelerator
            if self.observed is not None:
                self.observed.wrapped(self.models[0])
        return self._accelerator is not None

    def end(self, *, ended_well: bool) -> None:
        """Say what engaged, once: by rank 0, or by the last rank that leaves.

        Raises:
            Refused: the ranks have not trained one model together.
        """
        ranks = self.recorder.requested.num_processes
        reports = None
        if self.observed is not None:
            self.observed.close()
            report = self.observed.report() if ended_well else FAILED
            reports = exchange(report, rank=rank(), ranks=ranks)
            if reports is not None and (reasons := refusals(reports)):
                error = Refused(". ".join(reasons))
                error.is_of_this_rank_alone = rank() != 0
                raise error
        if rank() == 0:
            for line in [*self._attested(), *self.rows.notes(), *self.of_loss]:
                say(line)
            if self.observed is not None and reports is None and ended_well:
                say("rank 0 left before the others: the last one compares what they trained")
        for note in notes(reports or ()):
            say(note)

    def _attested(self) -> Iterator[str]:
        name, facts = shown(self.recorder.requested.strategy), self.recorder.actual
        others = "" if self.observed is None else _steps_of(self.observed.unprepared())
        if self._accelerator is None:
            beginning = f"{name} was asked, and " if self._is_launched else ""
            yield (
                f"{beginning}the script never passed a model and an optimizer through "
                f"Accelerator.prepare: nothing could be attested{others}"
            )
            return
        if not facts:
            yield (
                "the script splits its model by itself, and no config says how it should be split: "
                f"nothing could be attested{others}"
            )
            return
        if "optimizer_class" not in facts:
            steps = "its prepared optimizer made no step" if others else "no optimizer made a step"
            yield f"{name} engaged, and {steps}{others}"
            return
        keys = ("distributed_type", "num_processes", "zero_stage", "held_fraction")
        keys += ("optimizer_fraction", "optimizer_class", "parameter_dtypes")
        shown_facts = [f"{key} {facts[key]}" for key in keys if key in facts]
        computed = str(self.products)
        shown_facts.append(
            f"products {computed}" if computed else f"precision {facts['precision']}"
        )
        yield f"attested {name}: " + ", ".join(shown_facts)
        yield from self.recorder.notes_to_print()
        yield from self._precision(facts["precision"])
        yield from self._clipping_and_accumulation()

    def _precision(self, actual: str) -> Iterator[str]:
        """Say if products are computed in another dtype than the launcher asks for."""
        exported = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        shares = self.products.shares()
        if exported not in COMPUTE_DTYPES or exported == "no":
            return
        if not shares and exported != actual:
            yield f"the launcher asks for {exported}, the script computes in {actual}"
        elif shares and COMPUTE_DTYPES[exported] not in shares:
            yield f"the launcher asks for {exported}, the script computes in {self.products}"

    def _clipping_and_accumulation(self) -> Iterator[str]:
        clipping = self.recorder.clip
        backend = backend_of(self.models[0])
        engine_clips, engine_counts = backend.gradient_clipping(), backend.accumulation_steps()
        if engine_clips is None:
            clips = "does not clip" if clipping is None else f"clips at {clipping}"
            yield f"the script {clips}"
        elif clipping is None and engine_clips:
            yield (
                f"the script does not clip, DeepSpeed does, at {engine_clips}: "
                'gradient_clipping "auto" means 1.0 outside of the Trainer'
            )
        elif clipping is not None and clipping != engine_clips:
            yield f"the script clips at {clipping}, DeepSpeed at {engine_clips}, which holds"
        else:
            yield f"DeepSpeed clips at {engine_clips}"
        requested = self._accelerator.gradient_accumulation_steps
        if engine_counts not in (None, requested):
            accumulates = f"the Accelerator accumulates {requested} micro-batches"
            yield f"{accumulates}, DeepSpeed {engine_counts}"


def _steps_of(optimizers: list[Stepped]) -> str:
    """Name optimizers that Accelerator.prepare has not seen, each with its steps."""
    if not optimizers:
        return ""
    steps = " and ".join(f"{stepped.steps} of {stepped.name}" for stepped in optimizers)
    return f". Optimizer steps that were not prepared: {steps}"


def _agreed(plugins: dict[str, Any], launched: Mapping[str, str]) -> Strategy:
    """Return the strategy that must engage, from the plugins of the script's Accelerator.

    `plugins` are as `strategy_of_plugins` takes them; `launched` holds the environment variables
    from before the script began.

    Raises:
        UsageError: the launcher's config and the script ask for different strategies.
    """
    of_script = strategy_of_plugins(**plugins)
    backend = "" if of_script is None else of_script.backend
    flags = [word for word in sys.argv[1:] if word.partition("=")[0] == f"--{backend}"]
    named = flags[0] if flags else f"the script's own {backend} plugin"
    return agreed_strategy(launched, of_script, named=named)
