"""Samples: the same prompts continued before and after training, greedily, under every strategy.

All ranks continue the same prompt, since those that share a model's weights must run the same
forwards; rank 0 keeps the text. Layers that are compiled for training run as they are meanwhile:
with a cache, torch would compile each of them anew, give up (`recompile_limit`), and then compile
no step of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from toolkit.engines.between_steps import between_steps
from toolkit.engines.prepared import Prepared
from toolkit.measuring.recorder import Recorder
from toolkit.records.fields import Sample
from toolkit.training.generation import stop_tokens
from toolkit.training.observers import Observer

NEW_TOKENS: Final = 64

SHOWN: Final = 72
"""Letters of a text that the terminal shows."""


@dataclass(eq=False)
class Samples(Observer):
    """Continues prompts before the first step and after the last."""

    prompts: Sequence[Sequence[int]]
    """The token ids of every prompt."""

    tokenizer: Any
    last_step: int
    recorder: Recorder

    def __post_init__(self) -> None:
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in self.prompts]
        self.results = [Sample(prompt=text, before=None, after=None) for text in texts]

    def prepared(self, prepared: Prepared) -> None:
        self._engine = prepared
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
    """Return what the model continues each prompt with, in at most `NEW_TOKENS` tokens.

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
        "use_cache": True,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": stop_tokens(unwrapped, tokenizer) or None,
        # Ranks may round differently; one that is done runs on until all are.
        "synced_gpus": accelerator.num_processes > 1,
    }
    # Where positions are learned there may be few of them.
    positions = getattr(unwrapped.config, "max_position_embeddings", None)
    longest = None if positions is None else max(1, positions - NEW_TOKENS)
    texts: list[str] = []
    with between_steps(accelerator, model), torch.compiler.set_stance("force_eager"):
        for prompt in prompts:
            prompt = prompt if longest is None else prompt[-longest:]
            ids = torch.tensor([prompt], device=accelerator.device)
            written = unwrapped.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                **options,
            )
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
