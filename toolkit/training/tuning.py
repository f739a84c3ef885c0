"""Decisions of `--tuned` by the GPU, the model and the length of the run, each with its reason.

Modules that import the model's code are imported late: a rehearsal has to hide the GPUs before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

from toolkit import environment
from toolkit.backends import backend_of
from toolkit.configs.proven_models import PROVEN_MODELS
from toolkit.errors import UsageError
from toolkit.launching.ranks import rank, say
from toolkit.planning.job import PlannedJob
from toolkit.planning.of_run import RunFacts, job_of
from toolkit.planning.speed.estimate import estimate_speed
from toolkit.planning.speed.gpus import gpu
from toolkit.planning.verdict import Room, fits
from toolkit.strategies import Strategy
from toolkit.training.model_checks import read_config
from toolkit.training.precision import requested_precision
from toolkit.training.request import Request
from toolkit.training.speed_arguments import SpeedArguments, no_compiled_layers

COMPILE_SECONDS: Final = 30.0
"""Of compiling a layer and a loss, forward and backward: 3 to 17 s were measured on an H200, on
16 cores (benchmarks/results/2026-11-26-speed-lab.md)."""

ATTENTION_DROPOUT: Final = ("attention_dropout", "attn_pdrop", "attn_dropout")
"""Names of a model's dropout of attention in its config.json (transformers 5.24)."""

MEASURED_WIDTHS: Final = (64, 128)
"""Of a head, in which FlashAttention 4 was held against fp32."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Decides for one run on the GPUs of this machine."""

    request: Request
    strategy: Strategy
    values: dict[str, Any]
    """Of `TrainingArguments`."""

    @property
    def speed(self) -> SpeedArguments:
        return self.request.own.speed

    @cached_property
    def gpus(self) -> list[environment.InstalledGpu]:
        return [] if self.request.launch.rehearsal else environment.gpus()

    @cached_property
    def job(self) -> PlannedJob:
        """The planner's job of the run, without compiled layers.

        Raises:
            UsageError: it can't be planned.
        """
        from toolkit.training.preflight import facts_under

        # `compiled_job` adds the compiled layers.
        speed = replace(self.speed, compile_blocks=False)
        request = replace(self.request, own=replace(self.request.own, speed=speed))
        run = {
            "strategy": self.strategy.name,
            "precision": requested_precision(self.values),
            "num_processes": self.request.launch.num_processes or 1,
        }
        return job_of(cast("RunFacts", run | facts_under(request, self.strategy, self.values)))

    @property
    def compiled_job(self) -> PlannedJob:
        chunk = replace(self.speed, compile_blocks=True).chunk_tokens
        chunked = self.job.chunked_loss
        return self.job.with_(compile=True, loss_chunk_tokens=chunk if chunked else None)

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_config(Path(self.request.model.path))

    def with_micro_batch(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the values with the micro-batch of `--auto_batch`, and why it has no effect."""
        if not self.speed.uses_auto_batch:
            return self.values, {}
        requested = int(self.values["per_device_train_batch_size"])
        rows = requested * int(self.values["gradient_accumulation_steps"])
        try:
            size = self._largest_micro_batch(rows)
        except UsageError as error:
            return self.values, {"auto_batch": f"--auto_batch: {error}"}
        if rank() == 0 and size != requested:
            say(f"micro-batches of {size} rows, by --auto_batch: {requested} were asked")
        chosen = {"per_device_train_batch_size": size, "gradient_accumulation_steps": rows // size}
        return self.values | chosen, {}

    def _largest_micro_batch(self, rows: int) -> int:
        """Return the largest micro-batch that fits for sure and divides the rows of a step.

        Raises:
            UsageError: none does, or none can be planned.
        """
        if not self.gpus:
            raise UsageError("no GPU trains here.")
        if backend_of(self.strategy).in_stages:
            raise UsageError(f"{self.strategy.name} needs its micro-batches.")
        room = Room(gpu_bytes=min(gpu.memory_bytes for gpu in self.gpus))
        # A divisor keeps the rows of a step, and with them the training, as they were.
        for size in sorted((n for n in range(1, rows + 1) if rows % n == 0), reverse=True):
            if fits(self.job.with_(batch=size, accumulation=rows // size), room):
                return size
        raise UsageError("the planner calls no micro-batch safe.")

    def with_kernels(self, steps: int) -> tuple[Request, dict[str, str]]:
        """Return the request with compiled layers and attention as `--tuned` chooses them.

        Also why each that it does not choose has no effect. `steps` are those of the optimizer.
        """
        arguments, reasons = self.request.own, dict[str, str]()
        if not arguments.speed.tuned:
            return self.request, reasons
        if arguments.speed.compile_blocks is None:
            compiles, why = self._compiling(steps)
            arguments = replace(arguments, speed=replace(arguments.speed, compile_blocks=compiles))
            if not compiles:
                reasons["compile_blocks"] = why
            elif rank() == 0:
                say(why)
        if arguments.model.flash_attention is None:
            why_not = self._no_flash_4()
            if why_not is None:
                arguments = replace(
                    arguments, model=replace(arguments.model, flash_attention="FA4")
                )
            else:
                reasons["flash_attention"] = f"--flash_attention FA4: {why_not}"
        return replace(self.request, own=arguments), reasons

    def _no_flash_4(self) -> str | None:
        """Say why FlashAttention 4 is not chosen for the run; None where it is."""
        from toolkit.training.speed.attention import no_flash_4

        if not self.gpus:
            return "no GPU trains here"
        drops = [name for name in ATTENTION_DROPOUT if self.config.get(name)]
        if drops and self.request.own.run.dropout != "off":
            return f"it has no dropout, which the model's {drops[0]} asks for"
        width = self.config.get("head_dim") or self.config.get("hidden_size", 0) // (
            self.config.get("num_attention_heads") or 1
        )
        if width not in MEASURED_WIDTHS:
            return f"it was not measured with heads of {width}"
        return no_flash_4(self.gpus[0].capability)

    def _compiling(self, steps: int) -> tuple[bool, str]:
        """Return whether compiling the layers pays for itself within `steps`, and why."""
        head = "--compile_blocks"
        if not self.gpus:
            return False, f"{head}: no GPU trains here"
        if reasons := no_compiled_layers(
            self.values, self.strategy, evidence=self.request.own.run.evidence is not None
        ):
            return False, f"{'; '.join(reasons)}."
        architecture = next(iter(self.config.get("architectures") or []), "")
        if architecture not in PROVEN_MODELS:
            return False, f"{head}: not proven for {architecture or 'this model'}"
        if find_spec("triton") is None:
            return False, f"{head}: torch compiles for a GPU by triton, which is not installed"
        try:
            kind = gpu(self.gpus[0].name)
            jobs = (self.job, self.compiled_job)
            seconds = [estimate_speed(job, kind).step_seconds.middle for job in jobs]
        except UsageError as error:
            return False, f"{head}: {error}"
        won, total = (seconds[0] - seconds[1]) * steps, seconds[0] * steps
        words = f"compiling takes about {COMPILE_SECONDS:.0f} s and wins about {won:,.0f} of"
        return won > COMPILE_SECONDS, f"{head}: {words} {total:,.0f} s"
