"""The process of `toolkit generate`: it loads a saved model and streams its answers to stdout."""

from __future__ import annotations

import json
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from jinja2 import TemplateError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils import logging

from toolkit.errors import UsageError, sentence_of
from toolkit.launching.generating import ADAPTER_CONFIG, base_of
from toolkit.launching.ranks import quiet
from toolkit.training.generation import stop_tokens
from toolkit.training.model_checks import check_loadable

GREEDY: Final = {"do_sample": False, **dict.fromkeys(("temperature", "top_p", "top_k"))}
"""Without the settings of sampling, which the model's own configuration may have."""


def generate(
    folder: Path, prompt: str, *, plain: bool, seed: int, most: int, **sampling: Any
) -> None:
    """Print the answer to a prompt, or with `-` one to each line of stdin.

    Args:
        folder: A model and its tokenizer, or an adapter.
        plain: Leave the chat template out.
        most: Tokens of an answer.
        sampling: `temperature` and `top_p`, of which None stands for the model's own.

    Raises:
        UsageError: a prompt does not fit the model, or the folder holds another kind of model.
    """
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    source, revision = base_of(folder) if is_adapter else (str(folder), "main")
    home = folder if any(folder.glob("tokenizer*")) else source
    tokenizer: Any = AutoTokenizer.from_pretrained(home, revision=revision)
    text_config = AutoConfig.from_pretrained(source, revision=revision).get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or sys.maxsize
    plain = plain or tokenizer.chat_template is None
    # A prompt that does not fit is named before the weights are loaded.
    prompts = sys.stdin.read().splitlines() if prompt == "-" else [prompt]
    batches = [_encoded(tokenizer, text, positions, plain=plain) for text in prompts]

    if Path(source).is_dir():
        check_loadable(source)
    options: dict[str, Any] = {"revision": revision, "dtype": "auto", "device_map": "auto"}
    model: Any = AutoModelForCausalLM.from_pretrained(source, **options)
    if is_adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(folder))
    stops = stop_tokens(model, tokenizer)
    given = {name: value for name, value in sampling.items() if value is not None}
    settings = given and {"do_sample": True, **given} if sampling["temperature"] != 0 else GREEDY
    names = " with the adapter ".join(dict.fromkeys((source, str(folder))))
    _note(f"{names} on {model.device}, {'without' if plain else 'with'} a chat template")
    for ids in batches:
        torch.manual_seed(seed)
        written = model.eval().generate(
            input_ids=ids.to(model.device),
            attention_mask=torch.ones_like(ids, device=model.device),
            max_new_tokens=min(most, positions - ids.shape[1]),
            num_beams=1,
            use_cache=True,
            eos_token_id=stops or None,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            **settings,
        )
        if int(written[0, -1]) not in stops:
            _note(f"the answer was ended after {written.shape[1] - ids.shape[1]:,} tokens")


def _encoded(tokenizer: Any, prompt: str, positions: int, *, plain: bool) -> torch.Tensor:
    """Return the tokens of a prompt, [1, tokens], which leave room for an answer."""
    if not plain:
        turns = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=plain, return_tensors="pt")["input_ids"].long()
    if not 0 < ids.shape[1] < positions:
        raise UsageError(
            f"The prompt has {ids.shape[1]:,} tokens, of {positions:,} for it and an answer."
        )
    return ids


def _note(text: str) -> None:
    sys.stderr.write(f"toolkit: {text}\n")


def main() -> None:
    for number in (signal.SIGINT, signal.SIGPIPE):  # ended by either as other programs are
        signal.signal(number, signal.SIG_DFL)
    quiet()
    warnings.simplefilter("ignore", FutureWarning)  # between libraries
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    settings, folder, prompt = sys.argv[1:]
    try:
        generate(Path(folder), prompt, **json.loads(settings))
    # A RuntimeError: an adapter for weights of another shape. A TemplateError: a prompt alone is
    # no chat to the template.
    except (OSError, ValueError, RuntimeError, TemplateError) as error:
        is_worded = isinstance(error, UsageError)
        _note(str(error) if is_worded else f"No answer from {folder}: {sentence_of(error)}")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
