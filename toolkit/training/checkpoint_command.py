"""The process of `toolkit checkpoint`: it reads and writes folders of checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from toolkit.checkpoints import judging
from toolkit.checkpoints.atomic_folder import save_failure
from toolkit.checkpoints.converting import convert
from toolkit.errors import SaveError, UsageError, file_sentence, is_full_disk
from toolkit.launching.ranks import quiet


def run(verb: str, folder: Path, *, as_json: bool = False, **settings: Any) -> int:
    """Do what one verb asks for, and return the exit code."""
    if (base := settings.get("base")) is not None:
        if not Path(base, "config.json").is_file():  # these take longer to import than most merges
            from toolkit.training.arguments import ModelArguments
            from toolkit.training.model import resolve_model

            base = resolve_model(ModelArguments(model_name_or_path=base))
        settings["base"] = Path(base)
    if verb in ("convert", "merge"):
        write = convert
        if verb == "merge":
            from toolkit.training.merging import merge as write

        print(write(folder, Path(settings.pop("output")), **settings))  # noqa: T201
        return 0
    if verb == "show":
        facts = judging.show(folder, **settings)
    else:
        against = settings["against"]
        facts = judging.verify(folder, None if against is None else Path(against))
    print(json.dumps(facts, indent=2) if as_json else "\n".join(judging.lines(facts)))  # noqa: T201
    return 0 if facts.get("ok", True) else 1


def main() -> None:
    quiet()
    settings = json.loads(sys.argv[1])
    output = settings.get("output")
    try:
        code = run(folder=Path(settings.pop("folder")), **settings)
    except Exception as error:
        code = 2
        if output is not None and is_full_disk(error):  # safetensors has an error of its own
            code, text = 1, f"{output} was not written: {save_failure(error, Path(output))}"
        elif isinstance(error, OSError):
            text = file_sentence(error)
        elif isinstance(error, UsageError | SaveError):
            text = str(error)
        else:
            raise
        sys.stderr.write(f"toolkit: {text}\n")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
