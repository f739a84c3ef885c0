"""Samples: the same prompts continued before and after training, greedily, under every strategy.

All ranks continue the same prompt, since those that share a model's weights must run the same
forwards; rank 0 keeps the text. Layers that are compiled for training run as they are meanwhile:
with a cache, torch would compile each of them anew, give up (`recompile_limit`), and then compile
no step of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Samples(Observer):
    """Continues prompts before the first step and after the last.

    Args:
        prompts: Token ids of each.
        tokenizer: Turns them into text, and knows where a turn ends.
        last_step: Of the training.
        recorder: What it times and counts, this is no part of.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        tokenizer: Any,
        *,
        last_step: int,
        recorder: Recorder,
    ) -> None:
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._last_step = last_step
        self._recorder = recorder
        self.found = [
            Sample(prompt=tokenizer.decode(each, skip_special_tokens=True), before=None, after=None)
            for each in prompts
        ]

    def prepared(self, prepared: Prepared) -> None:
        self._engine = prepared
        done = self._recorder.steps_before
        if done == 0:
            for sample, text in zip(self.found, self._continued(), strict=True):
                sample["before"] = text
        elif done >= self._last_step and any(each["after"] is None for each in self.found):
            # It died before these.
            self.step_done(self._last_step)

    def step_done(self, step: int) -> None:
        if step != self._last_step:
            return
        for sample, text in zip(self.found, self._continued(), strict=True):
            sample["after"] = text
            self._engine.accelerator.print(f"toolkit: {_shown(sample)}", flush=True)

    def _continued(self) -> list[str]:
        engine = self._engine
        with self._recorder.aside():
            return continuations(engine.accelerator, engine.model, self._prompts, self._tokenizer)


def continuations(
    accelerator: Any, model: Any, prompts: Sequence[Sequence[int]], tokenizer: Any
) -> list[str]:
    """Return what the model continues each prompt with, in at most `NEW_TOKENS` tokens.

    A collective: every rank calls it with the same prompts.

    Args:
        accelerator: The Accelerator that prepared the model.
        model: The wrapped model.
        prompts: Token ids of each.
        tokenizer: Of the model.

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
    texts: list[str] = []
    with between_steps(accelerator, model), torch.compiler.set_stance("force_eager"):
        for prompt in prompts:
            prompt = prompt[-_room(unwrapped, len(prompt)) :]
            ids = torch.tensor([prompt], device=accelerator.device)
            written = unwrapped.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                **options,
            )
            texts.append(tokenizer.decode(written[0, len(prompt) :], skip_special_tokens=True))
    return texts


def _room(model: Any, asked: int) -> int:
    """Return the tokens that a prompt may have, where positions are learned and thus few."""
    positions = getattr(model.config, "max_position_embeddings", None)
    return asked if positions is None else max(1, min(asked, positions - NEW_TOKENS))


def _shown(sample: Sample) -> str:
    before, after = (
        "not known" if text is None else repr(_one_line(text)[:SHOWN])
        for text in (sample["before"], sample["after"])
    )
    prompt = _one_line(sample["prompt"])[-SHOWN:]
    return f"sample …{prompt!r}: before {before}, after {after}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
