"""The end of generation: a trained model stops at the token that ends its training turns.

A chat template may end turns with a different token than the stop token in the model's own
configuration. A model trained on it would then also write the user's next turn.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

_QUESTION = "Q7z"
_ANSWER = "A7z"
"""Words that no chat template contains."""


def turn_end(tokenizer: Any) -> int | None:
    """Return the token that ends the assistant's turns in the tokenizer's chat template.

    It is found in a rendered chat, as the first special token after the assistant's words. None if
    there is no template, or if its turns end in ordinary text.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    from jinja2 import TemplateError

    chat = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _ANSWER},
    ]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except (TemplateError, TypeError, ValueError):  # it may need more than this chat has
        return None
    behind = text.rpartition(_ANSWER)[2].lstrip()
    ids = tokenizer.encode(behind, add_special_tokens=False) if behind else []
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return ids[0] if ids and ids[0] in special and ids[0] != tokenizer.unk_token_id else None


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a generation: the model's own first, then the end of a turn."""
    end = turn_end(tokenizer)
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = getattr(tokenizer, "eos_token_id", None)
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return ids if end is None or end in ids else [*ids, end]


def generation_config_of(model: Any, tokenizer: Any) -> Any:
    """Return the generation config to be saved with a model: its own, stopping at turns' ends.

    A config that already stops there is returned unchanged.
    """
    config = model.generation_config
    if turn_end(tokenizer) is None:
        return config
    ids = stop_tokens(model, tokenizer)
    wanted = ids if len(ids) > 1 else ids[0]
    if config.eos_token_id in (wanted, ids):
        return config
    config = deepcopy(config)
    config.eos_token_id = wanted
    return config
