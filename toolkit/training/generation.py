"""The end of generation: a trained model stops at the token that ends its training turns.

A chat template may end turns with a different token than the stop token in the model's own
configuration. A model trained on it would then also write the user's next turn.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from toolkit.data.chat import turn_end


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
