"""`toolkit explain`: the value of every setting, who set it, and what was left aside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Final

from toolkit.backends.deepspeed_json import AUTO
from toolkit.configs.check.deepspeed_file import BATCH, TOP_LEVEL, without_auto
from toolkit.configs.check.documents import Keys, dotted, value_at
from toolkit.configs.check.finding import table
from toolkit.configs.check.libraries import accelerate_library, deepspeed_library
from toolkit.configs.check.rules import findings_of, keys_of_sections
from toolkit.configs.check.setup import Setup
from toolkit.configs.check.sources import StandIn, version_of

OF_PLUGIN: Final = {"transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap"}
"""Keys of fsdp_config whose names the plugin of accelerate 1.15 does not keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting."""

    name: str
    value: Any
    source: str
    """The file and line that set it, a flag, a variable, or the library whose default it is."""

    note: str = ""
    """What else stands there and does not count, or why this counts."""


def effective(setup: Setup) -> list[Setting]:
    """Return the settings of a launch: the launcher's, DeepSpeed's, then flags."""
    settings = [*_of_launcher(setup), *_of_deepspeed(setup)]
    settings += [
        Setting(name=f"--{name}", value=value, source="flag")
        for name, value in setup.flags.content.items()
    ]
    flag = next((name for name in ("fp16", "bf16") if setup.flag(name) is True), None)
    if flag is not None:  # the Trainer asks its flags first
        note = "in a Trainer; mixed_precision above is the launcher's"
        settings.append(Setting(name="mixed precision", value=flag, source="flag", note=note))
    return settings


def lines(settings: Sequence[Setting]) -> Iterator[str]:
    """Return a line for each setting, in columns."""
    width = max((len(one.name) for one in settings), default=0)
    wide = max((len(str(one.value)) for one in settings), default=0)
    for one in settings:
        note = f"  ({one.note})" if one.note else ""
        yield f"{one.name:<{width}}  {one.value!s:<{wide}}  {one.source}{note}"


def to_json(settings: Sequence[Setting]) -> dict[str, Any]:
    """Return the settings as JSON of schema 1."""
    return {"schema": 1, "settings": [asdict(one) | {"value": str(one.value)} for one in settings]}


def _of_launcher(setup: Setup) -> Iterator[Setting]:
    yaml, launched = setup.accelerate, setup.launched
    if launched is None:
        return
    written: dict[str, Keys] = {
        name: (section, key) for section, key, name in keys_of_sections(yaml)
    }
    written |= {name: (name,) for name in yaml.content}
    notes: dict[tuple[int, int], str] = {}
    for one in findings_of(setup):
        if one.file == yaml.file:
            place = (one.line, one.column)
            notes[place] = " ".join([*filter(None, [notes.get(place)]), one.text])
    sections = table()["facts"]["sections"].items()
    begins = [start for name, facts in sections if yaml.get(name) for start in facts["begins"]]
    of_sections = {name for name in launched.read if name.startswith(tuple(begins))}
    names = [name for name in accelerate_library().top_level if name in launched.read]
    names += sorted(of_sections - {"deepspeed_fields_from_accelerate_config"})
    for name in dict.fromkeys(["distributed_type", *names]):
        value, keys = launched.arguments.get(name), written.get(name)
        if name in yaml.content:
            value = yaml.get(name)
        if name.startswith("fsdp_"):
            field = name.removeprefix("fsdp_")
            made = getattr(setup.rank.fsdp, OF_PLUGIN.get(field, field), value)
            made = made.name if isinstance(made, Enum) else made
            value = value if isinstance(made, StandIn) else made
        variable = name.upper() if name.startswith("fsdp_") else f"ACCELERATE_{name.upper()}"
        if keys is not None:
            place = yaml.place(keys)
            note = notes.get((place.line, place.column), "")
            yield Setting(name=name, value=value, source=yaml.shown(keys), note=note)
        elif value is None and variable in setup.environ:
            yield Setting(name=name, value=setup.environ[variable], source=f"variable {variable}")
        elif value is not None or name not in of_sections:
            source = f"default of Accelerate {version_of('accelerate')}"
            yield Setting(name=name, value=value, source=source)


def _of_deepspeed(setup: Setup) -> Iterator[Setting]:
    config = setup.filled or setup.deepspeed_config
    if not config:
        return
    plain = without_auto(config)
    sizes = {"train_micro_batch_size_per_gpu": 1} if not {*BATCH} & plain.keys() else {}
    read = deepspeed_library().config(plain | sizes, ranks=setup.num_processes or 1)
    values: dict[Keys, Any] = {
        (name,): getattr(read, name) for name in TOP_LEVEL if hasattr(read, name)
    }
    models = {"zero_optimization": read.zero_config, "fp16": read.float16_config}
    models |= {"bf16": read.bfloat16_config}
    for section, model in models.items():
        values |= dict(_fields(model, (section,)))
    for keys, value in values.items():
        name, note = dotted(keys), ""
        if value_at(config, keys) == AUTO or (sizes and keys[0] in BATCH):
            is_filled = name in table()["facts"]["filled"]
            value = AUTO if is_filled else value
            note = "the run fills it in" if is_filled else "nothing fills it"
        if isinstance(value, int | float | str | None) and (value is not None or config.get(name)):
            yield Setting(name=name, value=value, source=_source(setup, keys), note=note)


def _fields(model: Any, within: Keys) -> Iterator[tuple[Keys, Any]]:
    """Return the values of a model of DeepSpeed's by their keys, those of inner models too."""
    for name, field in model.__class__.model_fields.items():
        value, keys = getattr(model, name, None), (*within, str(field.alias or name))
        if hasattr(value, "model_dump"):
            yield from _fields(value, keys)
        elif "deprecated" not in (field.json_schema_extra or ()):
            yield keys, value


def _source(setup: Setup, keys: Keys) -> str:
    document, filled = setup.deepspeed, value_at(setup.filled, keys)
    in_yaml = {place: name for name, place in table()["facts"]["in_json"].items()}
    yaml_keys = ("deepspeed_config", in_yaml.get(dotted(keys), ""))
    if document.get(*keys) is not None:
        where = document.shown(keys)
        is_filled = document.get(*keys) == AUTO and filled not in (None, AUTO)
        return f"flags, or the Trainer's defaults (auto in {where})" if is_filled else where
    if setup.accelerate.get(*yaml_keys) is not None:
        return setup.accelerate.shown(yaml_keys)
    if value_at(setup.deepspeed_config, keys) is not None:
        return f"Accelerate {version_of('accelerate')}"
    return f"default of DeepSpeed {version_of('deepspeed')}"
