"""`toolkit generate`: check what can be checked without torch, then start the process that answers.

This process becomes that one, so its output can be piped and Ctrl-C ends it as any other program.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NoReturn

from toolkit.errors import UsageError, sentence_of
from toolkit.launching.python import become

ADAPTER_CONFIG: Final = "adapter_config.json"


def generate(folder: Path, prompt: str, **settings: Any) -> NoReturn:
    """Become the process that prints the model's answer; `settings` are those of the verb.

    Raises:
        UsageError: the folder holds no model, or an adapter whose base model is missing.
    """
    become("toolkit.training.generate", json.dumps(settings), str(model_folder(folder)), prompt)


def model_folder(folder: Path) -> Path:
    """Return the folder itself, or the `final` in it, whichever holds a model or an adapter."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder (this is {Path.cwd()}). Pass that of a model.")
    for place in (folder, folder / "final"):
        if (place / ADAPTER_CONFIG).is_file():
            base_of(place)
        elif not (place / "config.json").is_file():
            continue
        elif not any(place.glob("tokenizer*")):
            raise UsageError(f"{place} holds a model and no tokenizer: save its tokenizer there.")
        return place
    raise UsageError(
        f"{folder} holds no model: neither it nor its final/, which a training writes at its end, "
        f"has a config.json or {ADAPTER_CONFIG}."
    )


def base_of(folder: Path) -> tuple[str, str]:
    """Return the base model of an adapter, a folder or a name on the Hub, and its revision.

    Raises:
        UsageError: it is neither.
    """
    from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType]

    base = None
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        base, revision = config["base_model_name_or_path"], config.get("revision") or "main"
        if not (Path(base) / "config.json").is_file():
            hf_hub_download(base, "config.json", revision=revision)
    except (OSError, ValueError, LookupError, TypeError) as error:
        # The text of the others is about the form of the Hub's names.
        reason = f" ({sentence_of(error)})" if isinstance(error, OSError) else ""
        raise UsageError(
            f"{folder} holds an adapter, and its base model {base} is neither a folder with a "
            f"model nor to be had from the Hub{reason}. Put it there, or correct "
            f"base_model_name_or_path in {ADAPTER_CONFIG}."
        ) from error
    return base, revision
