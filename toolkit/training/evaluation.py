"""Evaluations and samples of a run: before the first step, in between and after the last.

The losses of all predicted tokens are summed in float64 over every batch and rank, and divided once
by their number. Every row counts exactly once for any number of ranks, so the loss is the same
under every strategy except for rounding. It is the plain cross-entropy in fp32, without the extra
terms of a training loss (such as the loss of expert routers).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.functional import cross_entropy

from toolkit.data.sampling_order import validation_rows
from toolkit.engines.backend import backend_of, side_effect_free
from toolkit.engines.wrapped import Wrapped
from toolkit.files import write_text
from toolkit.launching.progress import progressed
from toolkit.launching.ranks import rank, say
from toolkit.measuring.recorder import Recorder
from toolkit.records.evidence import IGNORED
from toolkit.records.fields import Evaluated, Sample
from toolkit.training.evaluation_plan import EvaluationPlan, Schedule
from toolkit.training.generation import stop_tokens
from toolkit.training.observers import Observer
from toolkit.training.speed.lean_batches import POSITIONS

CHUNK: Final = 1024
"""Number of positions whose fp32 logits are computed at once for the loss.

The model also returns the logits of the whole batch. Those are in fp32 too if Accelerate converts
the model's outputs (DDP and FSDP2 in bf16 and fp16). With the chunked loss, at most the logits of
`--loss_chunk_tokens` tokens are in memory, as in training.
"""


@dataclass(eq=False)
class Evaluation(Observer):
    """Evaluates before the first step, when its schedule says so, and after the last step."""

    rows: Any
    """Rows to evaluate on. Each counts once; `validation_rows` fills up the last batches."""

    collate: Callable[[list[Any]], dict[str, torch.Tensor]]
    batch_rows: int
    """Rows of one forward on one rank."""

    schedule: Schedule
    recorder: Recorder
    pad_token_id: int = 0
    """Padding token of the rows that fill the last batches."""

    results: list[Evaluated] = field(default_factory=list)

    def prepared(self, wrapped: Wrapped) -> None:
        self._engine = wrapped
        done = self.recorder.steps_before
        # A run may have ended after its last step and before the evaluation that follows it.
        is_missing = done not in {result["step"] for result in self.results}
        if is_missing and (done == 0 or done >= self.schedule.last):
            self._evaluate(done)

    def step_done(self, step: int) -> None:
        if self.schedule.due(step):
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        engine, begun = self._engine, time.perf_counter()
        with self.recorder.aside():
            total, tokens = loss_and_tokens(
                engine.accelerator,
                engine.model,
                self.rows,
                self.collate,
                batch_rows=self.batch_rows,
                pad_token_id=self.pad_token_id,
            )
            loss = total / tokens if tokens else math.nan
            result = Evaluated(
                step=step,
                loss=loss,
                perplexity=perplexity(loss),
                tokens=tokens,
                rows=len(self.rows),
                seconds=time.perf_counter() - begun,
            )
            self.results.append(result)
            values = {"eval_loss": loss, "eval_perplexity": result["perplexity"]}
            self.recorder.logged(step, **values)
            engine.report(step, values)
            when = f"after step {step}" if step else "before the first step"
            engine.accelerator.print(
                f"toolkit: evaluation {when}: loss {loss:.6f}, perplexity {perplexity(loss):.2f} "
                f"({tokens:,} tokens of {len(self.rows):,} rows, {result['seconds']:.1f} s)",
                flush=True,
            )


def loss_and_tokens(
    accelerator: Any,
    model: Any,
    rows: Any,
    collate: Callable[[list[Any]], dict[str, torch.Tensor]],
    *,
    batch_rows: int,
    pad_token_id: int = 0,
) -> tuple[float, int]:
    """Return the summed loss of all predicted tokens, in nats, and their number.

    A collective: every rank calls it, and each takes every W-th batch. A batch that names the
    positions to project is for a model that has the chunked loss (`LeanCollator`), and takes it.

    Args:
        model: The wrapped model.
        rows: `input_ids`, `labels` and `sample_id`, the same on every rank.
        collate: Makes a padded batch of them.
        batch_rows: Rows of one forward on one rank.
        pad_token_id: Of the rows that fill the last batches.

    Raises:
        NotBetweenSteps: gradients are being accumulated.
    """
    device = accelerator.device
    # In fp64: many batches are added up, and counts of tokens have to stay exact.
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    backend = backend_of(model)
    ranks = backend.data_parallel_size()
    filled = validation_rows(rows, global_batch=batch_rows * ranks, pad_token_id=pad_token_id)
    with side_effect_free(accelerator, model), backend.splitting(batch_rows):
        # Not a DataLoader, which draws a random number whenever it is iterated.
        starts = range(backend.data_parallel_rank() * batch_rows, len(filled), ranks * batch_rows)
        for start in starts:
            batch = collate([filled[at] for at in range(start, start + batch_rows)])
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            batch.pop("sample_id", None)
            progressed()
            of_batch = _chunked_sums if POSITIONS in batch else _sums
            with backend.shard_batch(accelerator, batch) as shard:
                sums += of_batch(model, shard)
        # Ranks that share one batch have all summed it, or a shard each.
        copies = 1 if backend.sequence_parallel else accelerator.num_processes // ranks
        total, tokens = (accelerator.reduce(sums, "sum") / copies).tolist()
    return total, int(tokens)


def _chunked_sums(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the result of `_sums` for a model with the chunked loss, summed in fp32 by batch."""
    loss = model(**batch, num_items_in_batch=1).loss  # undivided, thus the sum
    return torch.stack([loss.double(), (_targets(batch) != IGNORED).sum().double()])


def _sums(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the summed loss and the number of predicted tokens of a batch."""
    targets_of_rows = _targets(batch)
    unlabelled = {n: t for n, t in batch.items() if n not in ("labels", "shift_labels")}
    logits = model(**unlabelled).logits
    sums = torch.zeros(2, dtype=torch.float64, device=logits.device)
    for row, wanted in zip(logits, targets_of_rows, strict=True):
        chunks = zip(row[: len(wanted)].split(CHUNK), wanted.split(CHUNK), strict=True)
        for scores, targets in chunks:
            losses = cross_entropy(
                scores.float(), targets, ignore_index=IGNORED, reduction="none"
            ).double()
            sums += torch.stack([losses.sum(), (targets != IGNORED).sum().double()])
    return sums


def _targets(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the tokens to predict, [rows, tokens]: in a shard of rows, one for each token."""
    shifted = batch.get("shift_labels")
    return batch["labels"][:, 1:] if shifted is None else shifted


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite where that is more than a float holds."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


NEW_TOKENS: Final = 64

SHOWN: Final = 72
"""Letters of a text that the terminal shows."""

NOT_REQUESTED: Final = {
    "evaluation": "no rows to evaluate on were asked for: --validation_split_percentage, for one",
    "samples": "no prompts were asked for: --sample_prompts",
}
"""Why fields of a record are null."""

SO_FAR: Final = "so_far.json"
"""In a checkpoint: the evaluations and samples before it."""


class BeforeAndAfter(Observer):
    """Carries out an evaluation plan, in one run or in several that resume each other.

    Args:
        plan: Rows, prompts and schedule.
        collate: Makes a padded batch of rows.
        checkpoint: The checkpoint that the run goes on from, with the results before it.
    """

    def __init__(
        self,
        plan: EvaluationPlan,
        collate: Callable[[list[Any]], dict[str, Any]],
        *,
        tokenizer: Any,
        recorder: Recorder,
        checkpoint: Path | None = None,
    ) -> None:
        self._data = plan.data
        self._rows_hash = None if plan.data is None else plan.data["tokens_hash"]
        self._observers: list[Evaluation | Samples] = []
        self.evaluations: list[Evaluated] = []
        self.samples: list[Sample] = []
        if plan.rows is not None:
            evaluation = Evaluation(
                plan.rows,
                collate,
                batch_rows=plan.batch_rows,
                schedule=plan.schedule,
                recorder=recorder,
                pad_token_id=tokenizer.pad_token_id,
                results=self.evaluations,
            )
            self._observers.append(evaluation)
        if plan.prompts:
            samples = Samples(
                plan.prompts, tokenizer, last_step=plan.schedule.last, recorder=recorder
            )
            self.samples = samples.results
            self._observers.append(samples)
        if checkpoint is not None and self._observers:
            self._read_so_far(checkpoint)

    def prepared(self, wrapped: Wrapped) -> None:
        for observer in self._observers:
            observer.prepared(wrapped)

    def step_done(self, step: int) -> None:
        for observer in self._observers:
            observer.step_done(step)

    def write_so_far(self, folder: Path) -> None:
        """Write the results so far into a checkpoint, for a run that resumes from it."""
        if self._observers:
            so_far = {
                "rows": self._rows_hash,
                "evaluation": self.evaluations,
                "samples": self.samples,
            }
            write_text(folder / SO_FAR, json.dumps(so_far))

    def with_results(self, measured: dict[str, Any]) -> dict[str, Any]:
        """Return the measured part of a record, with the evaluations and samples in it."""
        results = {"evaluation": self.evaluations or None, "samples": self.samples or None}
        reasons = {name: reason for name, reason in NOT_REQUESTED.items() if results[name] is None}
        not_measured = measured["not_measured"] | reasons
        return measured | results | {"validation": self._data, "not_measured": not_measured}

    def _read_so_far(self, folder: Path) -> None:
        """Load results from before the checkpoint, if they have the same rows and prompts."""
        file = folder / SO_FAR
        if not file.exists():  # saved by a run without evaluation
            return
        so_far = json.loads(file.read_text(encoding="utf-8"))
        if so_far["rows"] == self._rows_hash:
            self.evaluations += so_far["evaluation"]
        elif so_far["evaluation"] and rank() == 0:
            say(
                f"the evaluations before {folder.name} were of other rows: the record leaves "
                "them out"
            )
        earlier = {sample["prompt"]: sample for sample in so_far["samples"]}
        self.samples[:] = [earlier.get(sample["prompt"], sample) for sample in self.samples]


@dataclass(eq=False)
class Samples(Observer):
    """Continues prompts greedily before the first step and after the last.

    All ranks continue the same prompt, since those that share a model's weights must run the same
    forwards; rank 0 keeps the text. Layers that are compiled for training run as they are
    meanwhile: with a cache, torch would compile each of them anew, give up (`recompile_limit`),
    and then compile no step of the training.
    """

    prompts: Sequence[Sequence[int]]
    """The token ids of every prompt."""

    tokenizer: Any
    last_step: int
    recorder: Recorder

    def __post_init__(self) -> None:
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in self.prompts]
        self.results = [Sample(prompt=text, before=None, after=None) for text in texts]

    def prepared(self, wrapped: Wrapped) -> None:
        self._engine = wrapped
        done = self.recorder.steps_before
        if done == 0:
            for sample, text in zip(self.results, self._continued(), strict=True):
                sample["before"] = text
        elif done >= self.last_step and any(sample["after"] is None for sample in self.results):
            # The run ended after its last step and before these samples.
            self.step_done(self.last_step)

    def step_done(self, step: int) -> None:
        if step != self.last_step:
            return
        for sample, text in zip(self.results, self._continued(), strict=True):
            sample["after"] = text
            self._engine.accelerator.print(f"toolkit: {_shown(sample)}", flush=True)

    def _continued(self) -> list[str]:
        engine = self._engine
        with self.recorder.aside():
            return continuations(engine.accelerator, engine.model, self.prompts, self.tokenizer)


def continuations(
    accelerator: Any, model: Any, prompts: Sequence[Sequence[int]], tokenizer: Any
) -> list[str]:
    """Return the model's continuation of each prompt, at most `NEW_TOKENS` tokens long.

    A collective: every rank calls it with the same prompts, as token ids.

    Raises:
        NotBetweenSteps: gradients are being accumulated.
    """
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    options: dict[str, Any] = {
        "do_sample": False,
        "num_beams": 1,
        # Of sampling, for which the model's own configuration may have them.
        **dict.fromkeys(("temperature", "top_p", "top_k")),
        "use_cache": backend_of(model).caches_in_generation,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": stop_tokens(unwrapped, tokenizer) or None,
        # Ranks may round differently; a rank that is done continues until all are done.
        "synced_gpus": accelerator.num_processes > 1,
    }
    # Where positions are learned there may be few of them.
    positions = getattr(unwrapped.config, "max_position_embeddings", None)
    longest = None if positions is None else max(1, positions - NEW_TOKENS)
    texts: list[str] = []
    with side_effect_free(accelerator, model), torch.compiler.set_stance("force_eager"):
        for prompt in prompts:
            prompt = prompt if longest is None else prompt[-longest:]
            ids = torch.tensor([prompt], device=accelerator.device)
            written = unwrapped.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                **options,
            )
            progressed()
            texts.append(tokenizer.decode(written[0, len(prompt) :], skip_special_tokens=True))
    return texts


def _shown(sample: Sample) -> str:
    before, after = (
        "not known" if text is None else repr(_on_one_line(text)[:SHOWN])
        for text in (sample["before"], sample["after"])
    )
    prompt = _on_one_line(sample["prompt"])[-SHOWN:]
    return f"sample …{prompt!r}: before {before}, after {after}"


def _on_one_line(text: str) -> str:
    return " ".join(text.split())
