"""What a launch is asked for, together: files, flags and variables, and what comes of it.

The launcher and the plugins of the installed libraries say what comes of it (`libraries`). What
they refuse is taken out, so that the rest is judged as well.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

from toolkit.configs.check.deepspeed_file import without_auto
from toolkit.configs.check.documents import (
    NOTHING,
    Document,
    Keys,
    keys_of,
    read_document,
    value_at,
)
from toolkit.configs.check.flags import training_argument_defaults
from toolkit.configs.check.libraries import (
    Launched,
    Rank,
    accelerate_library,
    deepspeed_library,
    filled_by_trainer,
)
from toolkit.configs.requested import (
    DEEPSPEED_FILE,
    read_deepspeed_config,
    requested_replicas,
    requested_tensor_size,
    starts_ranks_alone,
)
from toolkit.errors import UsageError, sentence_of

LEGACY: Final = {"fp16", "dynamo_backend"}
"""Keys at the top level that Accelerate 1.15 still converts."""

NEEDED: Final[dict[Keys, Any]] = {("distributed_type",): "NO", ("num_processes",): 2}
"""Keys without which the launcher goes no further, each with a value that every launcher takes."""

NO_ZERO: Final[dict[str, Any]] = {"zero_optimization": {"stage": 0}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A key for which the launcher or a rank's `Accelerator()` raises."""

    keys: Keys
    reason: str


@dataclass(slots=True, kw_only=True)
class Setup:
    """One launch, as far as it is written down."""

    accelerate: Document = NOTHING
    deepspeed: Document = NOTHING
    flags: Document = NOTHING
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    launched: Launched | None = None
    """None where no YAML is given, or Accelerate cannot be asked."""

    rank: Rank = Rank()
    refusals: list[Refusal] = field(default_factory=list[Refusal])
    beside_json: list[Keys] = field(default_factory=list[Keys])
    """Keys of the YAML that Accelerate refuses where it names a JSON."""

    unknown: list[Keys] = field(default_factory=list[Keys])
    """Keys at the top level of the YAML for which Accelerate refuses it."""

    json_problem: str | None = None
    """What is wrong with the name of the JSON in the YAML."""

    mismatches: list[str] = field(default_factory=list[str])
    """Where the Trainer refuses the JSON beside the flags, in its words."""

    filled: dict[str, Any] | None = None
    """The JSON after the Trainer has filled it from the flags; None without both."""

    not_judged: list[str] = field(default_factory=list[str])

    @property
    def documents(self) -> list[Document]:
        return [one for one in (self.accelerate, self.deepspeed, self.flags) if one]

    @property
    def num_processes(self) -> int | None:
        return None if self.launched is None else self.launched.num_processes

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """The DeepSpeed config that counts: the JSON, or what Accelerate makes of the YAML."""
        if self.deepspeed:
            return self.deepspeed.content
        return getattr(self.rank.deepspeed, "deepspeed_config", None)

    def zero(self, *keys: str) -> Any:
        """Return a value below `zero_optimization` of the DeepSpeed config that counts."""
        return value_at(self.deepspeed_config, ("zero_optimization", *keys))

    def flag(self, name: str) -> Any:
        """Return the value of a flag; None where it is not passed."""
        return self.flags.content.get(name)


def read_setups(
    files: Sequence[Path],
    flags: Document,
    environ: Mapping[str, str],
    *,
    num_processes: int | None = None,
) -> list[Setup]:
    """Return a launch for each Accelerate YAML, and for each JSON that none of them names.

    `num_processes` is the flag of the launcher, which counts before a YAML.

    Raises:
        UsageError: a file is not there, or no config.
    """
    documents = [read_document(file) for file in files]
    flags = next((one for one in documents if one.kind == "flags"), flags)
    setups: list[Setup] = []
    named: set[Path] = set()
    for document in documents:
        if document.kind == "accelerate":
            if num_processes is not None:
                content = document.content | {"num_processes": num_processes}
                document = replace(document, content=content)
            setup = Setup(accelerate=document, flags=flags, environ=environ)
            name_json(setup)
            if setup.deepspeed:
                named.add(setup.deepspeed.file.absolute())
            setups.append(setup)
    setups += [
        Setup(deepspeed=document, flags=flags, environ=environ)
        for document in documents
        if document.kind == "deepspeed" and document.file.absolute() not in named
    ]
    if not setups:
        setups = [Setup(flags=flags, environ=environ)]
    for setup in setups:
        complete(setup)
    return setups


def complete(setup: Setup) -> None:
    """Ask the installed libraries what comes of a launch."""
    if setup.deepspeed.content:
        try:
            deepspeed_library()
        except Exception as error:  # as below
            setup.not_judged.append(f"what DeepSpeed makes of a JSON ({sentence_of(error)[:-1]})")
    if setup.accelerate.content:
        _ask_accelerate(setup, setup.accelerate.content)
    if setup.flags and not training_argument_defaults():
        setup.not_judged.append("flags (transformers is not installed)")
    elif setup.deepspeed and setup.flags:
        _ask_trainer(setup, setup.deepspeed.content, setup.flags.content)


def name_json(setup: Setup) -> None:
    """Read the JSON that a YAML, or a flag, names, or note that it cannot be read."""
    name = setup.accelerate.get("deepspeed_config", "deepspeed_config_file")
    name = setup.flag("deepspeed") if name is None else name
    if name not in (None, "none"):
        if Path(str(name)).is_file():
            setup.deepspeed = read_document(Path(str(name)))
        else:
            try:
                read_deepspeed_config({DEEPSPEED_FILE: str(name)})
            except UsageError as error:
                setup.json_problem = str(error)


def _ask_accelerate(setup: Setup, content: Mapping[str, Any]) -> None:
    try:
        library = accelerate_library()
    except Exception as error:  # not installed, or of a release that cannot be read without torch
        setup.not_judged.append(f"what Accelerate makes of the YAML ({sentence_of(error)[:-1]})")
        return
    if content.get("compute_environment") == "AMAZON_SAGEMAKER":
        setup.not_judged.append("a YAML for Amazon SageMaker")
        return
    config = copy.deepcopy(dict(content))
    known = {*library.top_level, *LEGACY}
    setup.unknown = [(key,) for key in config if key not in known]
    if value_at(config, ("deepspeed_config", "deepspeed_config_file")) is not None:
        setup.beside_json = list(_beside_json(config))
    for keys in (*setup.unknown, *setup.beside_json):
        drop(config, keys)

    def attempt(tried: Mapping[str, Any]) -> str | None:
        try:
            launched = library.launch(tried, setup.environ)
            stage_0 = NO_ZERO if "ACCELERATE_DEEPSPEED_CONFIG_FILE" in launched.environ else None
            rank = library.rank(_with_mesh(launched), stage_0, launched.num_processes)
            if rank.deepspeed is not None and stage_0 is None:
                inline = without_auto(rank.deepspeed.deepspeed_config)
                deepspeed_library().config(inline | {"train_micro_batch_size_per_gpu": 1})
        except Exception as error:
            return f"{type(error).__name__}: {sentence_of(error)}"
        setup.launched, setup.rank = launched, rank
        return None

    setup.refusals = list(refusals_of(config, attempt))
    if setup.launched is not None and setup.rank.deepspeed is not None:
        json = setup.deepspeed.content or None
        try:
            setup.rank = library.rank(
                _with_mesh(setup.launched), json, setup.launched.num_processes
            )
        except Exception as error:
            setup.rank = Rank()
            setup.refusals.append(Refusal(keys=("deepspeed_config",), reason=sentence_of(error)))


def _with_mesh(launched: Launched) -> dict[str, str]:
    """Return a rank's variables; without a mesh that only the toolkit's own ranks lay out."""
    environ = dict(launched.environ)
    groups = requested_tensor_size(environ) > 1 and requested_replicas(environ) > 1
    if starts_ranks_alone(environ) or (groups and "ACCELERATE_USE_FSDP" not in environ):
        del environ["ACCELERATE_USE_PARALLELISM_CONFIG"]
    return environ


def _beside_json(config: Mapping[str, Any]) -> Iterator[Keys]:
    """Return the keys that Accelerate refuses in a YAML that names a JSON, each asked by itself."""
    names: list[Keys] = [("deepspeed_config", name) for name in config["deepspeed_config"]]
    names += [("mixed_precision",)] if config.get("mixed_precision") is not None else []
    for keys in names:
        asked = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": str(keys[-1])}
        try:
            accelerate_library().rank(asked, NO_ZERO, 1)
        except ValueError:
            yield keys


def refusals_of(
    config: dict[str, Any], attempt: Callable[[Mapping[str, Any]], str | None]
) -> Iterator[Refusal]:
    """Take out of a config what a library refuses, one key after the other.

    Args:
        config: Changed: in the end, `attempt` takes it, or nothing can be taken out of it.
        attempt: Returns why a config is refused.
    """
    while (reason := attempt(config)) is not None:
        to_blame = _to_blame(config, attempt, reason)
        plain = reason.partition(": ")[2]
        if not to_blame:
            yield Refusal(keys=(), reason=plain)
            return
        for keys in to_blame[:1]:
            yield Refusal(keys=keys, reason=plain)
        for keys in to_blame:
            drop(config, keys)


def _to_blame(
    config: Mapping[str, Any], attempt: Callable[[Mapping[str, Any]], str | None], reason: str
) -> list[Keys]:
    """Return the keys without which a config is not refused for this reason: as few as can be."""
    candidates = sorted(keys_of(config), key=lambda keys: (keys in NEEDED, -len(keys)))
    after = {keys: attempt(_without(config, [keys])) for keys in candidates}
    ends = [keys for keys in candidates if after[keys] != reason]
    named = [keys for keys in ends if _named_in(reason, config, keys)]
    alone = [keys for keys in ends if after[keys] is None]
    if ends:
        return [*named, *alone, *ends][:1]
    taken: list[Keys] = []
    for keys in candidates:
        taken.append(keys)
        if attempt(_without(config, taken)) != reason:
            return [
                one
                for one in taken
                if attempt(_without(config, [keys for keys in taken if keys != one])) == reason
            ]
    return []


def _named_in(reason: str, config: Mapping[str, Any], keys: Keys) -> bool:
    """Whether a reason speaks of a key, or of its value."""
    value = value_at(config, keys)
    words = [str(keys[-1]).partition("_")[2] or str(keys[-1]), repr(value)]
    words += [value] if isinstance(value, str) else []
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", reason) for word in words if word)


def _ask_trainer(setup: Setup, content: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    arguments = training_argument_defaults() | dict(flags)
    ranks = setup.num_processes
    try:
        if ranks is None or not arguments:
            arguments |= {"world_size": 1}
            content = {key: value for key, value in content.items() if key != "train_batch_size"}
        filled, mismatches = filled_by_trainer(content, {"world_size": ranks or 1, **arguments})
    except Exception as error:
        setup.not_judged.append(f"what the Trainer fills into the JSON ({sentence_of(error)[:-1]})")
        return
    setup.filled, setup.mismatches = filled, mismatches


def _without(config: Mapping[str, Any], taken: Sequence[Keys]) -> dict[str, Any]:
    rest = copy.deepcopy(dict(config))
    for keys in taken:
        drop(rest, keys)
    return rest


def drop(config: dict[str, Any], keys: Keys) -> None:
    """Take a key out of nested mappings; one that has to stand there gets a value that can."""
    if keys in NEEDED:
        config[str(keys[0])] = NEEDED[keys]
        return
    within = value_at(config, keys[:-1]) if len(keys) > 1 else config
    if isinstance(within, dict):
        cast("dict[Any, Any]", within).pop(keys[len(keys) - 1], None)
