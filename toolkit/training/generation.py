"""How a trained model ends what it generates: with the token that its turns were trained to end in.

A chat template may end turns with another token than the one that the model's own configuration
stops at; a model that was trained on it would write the user's next turn as well.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

_ASKED = "Q7z"
_ANSWERED = "A7z"
"""Words that no template has in it by itself."""


def turn_end(tokenizer: Any) -> int | None:
    """Return the token that ends the assistant's turns in the tokenizer's chat template.

    It is found in a rendered chat: the first token of its own behind what the assistant said.
    None where there is no template, or its turns end in ordinary text.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    from jinja2 import TemplateError

    chat = [
        {"role": "user", "content": _ASKED},
        {"role": "assistant", "content": _ANSWERED},
    ]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except (TemplateError, TypeError, ValueError):  # it may ask for more than this chat has
        return None
    behind = text.rpartition(_ANSWERED)[2].lstrip()
    ids = tokenizer.encode(behind, add_special_tokens=False) if behind else []
    own = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return ids[0] if ids and ids[0] in own and ids[0] != tokenizer.unk_token_id else None


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a generation: the model's own first, then the end of a turn."""
    own = model.generation_config.eos_token_id
    if own is None:
        own = getattr(tokenizer, "eos_token_id", None)
    found = [] if own is None else [own] if isinstance(own, int) else list(own)
    end = turn_end(tokenizer)
    return found if end is None or end in found else [*found, end]


def generation_config_of(model: Any, tokenizer: Any) -> Any:
    """Return the generation config to be saved with a model: its own, stopping at turns' ends.

    One that stops there already is returned as it is.
    """
    config = model.generation_config
    if turn_end(tokenizer) is None:
        return config
    wanted = stop_tokens(model, tokenizer)
    own = config.eos_token_id
    if wanted == ([own] if isinstance(own, int) else own):
        return config
    config = deepcopy(config)
    config.eos_token_id = wanted if len(wanted) > 1 else wanted[0]
    return config
