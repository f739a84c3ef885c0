"""Attestation of a script that doesn't use the toolkit: its `Accelerator.prepare` is watched.

Covers a plain `Accelerator` and the HF Trainer, which prepares through one. Settings of the
launcher's config or the script's own flags must engage. Settings that belong to the script
(clipping, accumulation) are only reported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from toolkit.configs.requested import (
    accumulation_dtype,
    agreed_strategy,
    requested_accumulation_dtype,
    requested_processes,
    requested_strategy,
    requests_checkpointing,
    shown,
)
from toolkit.engines.backend import backend_of, strategy_of_plugins
from toolkit.errors import UsageError
from toolkit.launching.progress import progressed
from toolkit.launching.ranks import rank, say
from toolkit.measuring.attestation import Refused, Requested
from toolkit.measuring.learned_rows import LearnedRows
from toolkit.measuring.recorder import Recorder
from toolkit.strategies import Strategy


@contextmanager
def watch(*, rehearsal: bool) -> Iterator[None]:
    """Attest the first model that is prepared for training, and report it even if the script fails.

    Raises:
        Refused: the engaged settings differ from the requested ones.
        UsageError: the config asks for a backend that the toolkit doesn't run, or the script asks
            for another backend than the config.
    """
    from accelerate import Accelerator

    launched = dict(os.environ)  # a script may change it
    strategy = requested_strategy(launched)
    if strategy.splits_rows:
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
    recorder = Recorder(requested, rehearsal=rehearsal)
    watched: list[tuple[Any, Any]] = []
    models: list[Any] = []
    optimizers: list[Any] = []
    counting: list[RemovableHandle] = []
    plugins: dict[int, dict[str, Any]] = {}
    rows = LearnedRows()
    original, original_init = Accelerator.prepare, Accelerator.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        given = signature(original_init).bind(self, *arguments, **options).arguments
        plugins[id(self)] = {
            "deepspeed": given.get("deepspeed_plugin") or given.get("deepspeed_plugins"),
            "fsdp": given.get("fsdp_plugin"),
            "parallelism": given.get("parallelism_config"),
        }
        original_init(self, *arguments, **options)

    def prepare(self: Any, *objects: Any, **options: Any) -> Any:
        prepared = original(self, *objects, **options)
        if watched:
            return prepared
        results = prepared if isinstance(prepared, tuple | list) else (prepared,)
        # One call or several: a loop may prepare its model first and its optimizer later.
        models.extend(made for made in results if isinstance(made, torch.nn.Module))
        optimizers.extend(made for made in results if hasattr(made, "param_groups"))
        if models and optimizers:
            watched.append((self, models[0]))
            given = plugins[id(self)]
            recorder.requested = replace(requested, strategy=_agreed(given, launched))
            if given["deepspeed"] is not None:
                summed = accumulation_dtype(self.state.deepspeed_plugin.deepspeed_config)
                recorder.requested = replace(recorder.requested, accumulation_dtype=summed)
            recorder.prepared(self, models[0], optimizers[0])
            recorder.first_step_alone()
            counting.extend(
                (
                    models[0].register_forward_pre_hook(lambda *_: progressed()),
                    models[0].register_forward_pre_hook(rows.before_forward, with_kwargs=True),
                    register_optimizer_step_post_hook(lambda *_: progressed(step=True)),
                )
            )
            if self.is_main_process:
                say(f"{shown(recorder.requested.strategy)} engaged")
        return prepared

    Accelerator.prepare, Accelerator.__init__ = prepare, init
    refused = False
    try:
        yield
    except (Refused, UsageError):
        refused = True
        raise
    finally:  # a script that crashes may have been attested, too
        Accelerator.prepare, Accelerator.__init__ = original, original_init
        for hook in counting:
            hook.remove()
        if rank() == 0 and not refused:
            for line in [*_report(recorder, watched), *rows.notes()]:
                say(line)


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


def _report(recorder: Recorder, watched: list[tuple[Any, Any]]) -> Iterator[str]:
    name = shown(recorder.requested.strategy)
    if not watched:
        yield (
            f"{name} was asked, and the script never passed a model and an optimizer through "
            "Accelerator.prepare: nothing could be attested"
        )
        return
    accelerator, model = watched[0]
    facts = recorder.engaged
    if "optimizer_class" not in facts:
        yield f"{name} engaged, and the script ended before its first optimizer step"
        return
    keys = ("distributed_type", "num_processes", "zero_stage", "sharded_fraction")
    keys += ("optimizer_fraction", "optimizer_class", "parameter_dtypes", "precision")
    yield f"attested {name}: " + ", ".join(f"{key} {facts[key]}" for key in keys if key in facts)
    yield from recorder.notes
    exported = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if exported not in ("no", facts["precision"]):
        yield f"the launcher asks for {exported}, the script computes in {facts['precision']}"
    clipping = recorder.clip
    backend = backend_of(model)
    engine_clips, engine_counts = backend.gradient_clipping(), backend.accumulation_steps()
    if engine_clips is None:
        yield "the script does not clip" if clipping is None else f"the script clips at {clipping}"
    elif clipping is None and engine_clips:
        yield (
            f"the script does not clip, DeepSpeed does, at {engine_clips}: "
            'gradient_clipping "auto" means 1.0 outside of the Trainer'
        )
    elif clipping is not None and clipping != engine_clips:
        yield f"the script clips at {clipping}, DeepSpeed at {engine_clips}, which holds"
    else:
        yield f"DeepSpeed clips at {engine_clips}"
    if engine_counts not in (None, accelerator.gradient_accumulation_steps):
        yield (
            f"the Accelerator accumulates {accelerator.gradient_accumulation_steps} "
            f"micro-batches, DeepSpeed {engine_counts}"
        )
