"""Each change of a config, judged by `toolkit check` and by the real libraries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import real_parsers
import yaml
from config_mutations import mutations

from toolkit.configs.check.documents import document_of, value_at
from toolkit.configs.check.finding import Finding
from toolkit.configs.check.rules import findings_of
from toolkit.configs.check.setup import Setup, complete, name_json
from toolkit.errors import UsageError

OF_OUR_RANKS = "dp_shard"
"""In what Accelerate says of the bundled files whose ranks only `toolkit.train` lays out."""

LATER = ("nvme_path",)
"""Keys without which DeepSpeed raises when it makes the engine, not when it reads the file."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One change of one file."""

    file: str
    change: str
    keys: tuple[str, ...]
    real: str
    """`raises`, `changed` (another value comes of it) or `same`, by the real libraries."""

    ours: str
    """`error`, `finding` or `nothing`: what the check says of the changed file alone."""

    rules: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Whether the check says an error where the libraries raise, and nothing without cause."""
        if self.real == "raises":
            return self.ours == "error"
        if self.change == "misspelt":
            return self.ours == ("error" if self.real == "changed" else self.ours) != "nothing"
        if self.change == "removed":
            return self.ours != "error" or self.real == "changed" or self.keys[-1] in LATER
        if self.real == "changed":
            return self.ours != "nothing"
        # No effect, and said to have none.
        return set(self.rules) <= {"ignored-key", "process-count"}


def findings_on(file: Path, content: dict, named_json: dict | None = None) -> list[Finding] | None:
    """Return what is found in the contents of a file; None where it is no config any more."""
    is_json = file.suffix == ".json"
    text = json.dumps(content, indent=2) if is_json else yaml.safe_dump(content, sort_keys=False)
    try:
        document = document_of(file, text)
    except UsageError:
        return None
    setup = Setup(deepspeed=document) if is_json else Setup(accelerate=document)
    name = value_at(content, ("deepspeed_config", "deepspeed_config_file"))
    if named_json is not None and isinstance(name, str) and name:
        setup.deepspeed = document_of(Path("named.json"), json.dumps(named_json))
    elif not is_json:
        name_json(setup)
    if document.kind != ("deepspeed" if is_json else "accelerate"):
        return None
    complete(setup)
    return findings_of(setup)


def read(file: Path) -> tuple[dict, dict | None]:
    """Return the contents of a file, and those of the JSON that it names."""
    text = file.read_text()
    if file.suffix == ".json":
        return json.loads(text), None
    content = yaml.safe_load(text)
    name = value_at(content, ("deepspeed_config", "deepspeed_config_file"))
    root = Path(__file__).parents[2]
    return content, None if name is None else json.loads((root / name).read_text())


def sweep(file: Path, folder: Path) -> Iterator[Case]:
    """Return every change of a file with both judgements; `folder` is for files in between."""
    content, named = read(file)

    def real(changed: dict) -> tuple[object, str | None]:
        try:
            if file.suffix == ".json":
                return real_parsers.of_json(changed), None
            return real_parsers.of_yaml(changed, folder / "config.yaml", named), None
        except real_parsers.Refused as error:
            return None, str(error)

    before, refused = real(content)
    known = {(one.rule, one.text) for one in findings_on(file, content, named) or ()}
    of_our_ranks = refused is not None and OF_OUR_RANKS in refused
    for change, keys, changed in mutations(content):
        if of_our_ranks and keys[0] in ("parallelism_config", "distributed_type", "debug"):
            continue
        after, reason = real(changed)
        found = findings_on(file, changed, named)
        if found is None:
            continue
        new = [one for one in found if (one.rule, one.text) not in known]
        says = "raises" if reason is not None else "same" if after == before else "changed"
        errors = [one for one in new if one.severity == "error"]
        yield Case(
            file=file.name,
            change=change,
            keys=keys,
            real="same" if of_our_ranks and reason == refused else says,
            ours="error" if errors else "finding" if new else "nothing",
            rules=tuple(sorted({one.rule for one in new})),
        )
