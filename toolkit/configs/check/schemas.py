"""JSON Schemas of both kinds of config, for editors, made of the installed libraries' classes."""

from __future__ import annotations

from typing import Any, Final

from toolkit.backends.deepspeed_json import AUTO
from toolkit.configs.check.deepspeed_file import TOP_LEVEL
from toolkit.configs.check.finding import table
from toolkit.configs.check.libraries import accelerate_library, deepspeed_library
from toolkit.configs.check.sources import version_of

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"

_TYPES: Final = {"bool": ["boolean", "string"], "int": "integer", "str": "string", "dict": "object"}
_KINDS: Final = {
    "true or false": {"type": "boolean"},
    "an object": {"type": "object"},
    "a word other than auto": {"type": ["string", "null"]},
}


def accelerate_schema() -> dict[str, Any]:
    """Return the schema of an Accelerate YAML; raises what `accelerate_library` raises."""
    library = accelerate_library()
    config = library.sources.get("accelerate.commands.config.config_args", "ClusterConfig")
    properties: dict[str, Any] = {}
    for name, field in config.__dataclass_fields__.items():
        kinds = [_TYPES[kind] for kind in _TYPES if kind in str(field.type)]
        properties[name] = {"type": kinds[0]} if kinds else {}
    for section, facts in table()["facts"]["sections"].items():
        begins = tuple(facts["begins"])
        names = [name for name in library.arguments if name.startswith(begins)]
        # Without its prefix, a key is the same.
        names += [name.removeprefix(facts["prefix"]) for name in names if facts["prefix"]]
        names += ["fsdp_ignored_modules"] if section == "fsdp_config" else []
        properties[section] = _object(dict.fromkeys(names, {}))
    schema = _object(properties) | {"required": ["distributed_type"]}
    return _headed(f"Accelerate {version_of('accelerate')}", schema)


def deepspeed_schema() -> dict[str, Any]:
    """Return the schema of a DeepSpeed JSON; raises what `deepspeed_library` raises."""
    from pydantic import TypeAdapter

    library = deepspeed_library()
    read = library.config({"train_micro_batch_size_per_gpu": 1})
    models = {
        "zero_optimization": read.zero_config,
        "bf16": read.bfloat16_config,
        "fp16": read.float16_config,
        "compile": read.compile_config,
    }
    properties: dict[str, Any] = {
        name: _KINDS.get(words, {"type": ["number", "string", "null"]})
        for name, (words, _) in TOP_LEVEL.items()
    }
    definitions: dict[str, Any] = {}
    for name, model in models.items():
        inner: dict[str, Any] = {}
        for key, field in model.__class__.model_fields.items():
            # The model's own schema would hold functions, which say how an old key is read.
            schema = TypeAdapter(field.annotation).json_schema(ref_template="#/$defs/{model}")
            definitions |= schema.pop("$defs", {})
            inner[field.alias or key] = schema
        properties[name] = _with_auto(_object(inner))
    definitions = {name: _with_auto(schema) for name, schema in definitions.items()}
    schema = _object(properties) | {"$defs": definitions}
    return _headed(f"DeepSpeed {version_of('deepspeed')}", schema)


def _with_auto(schema: dict[str, Any]) -> dict[str, Any]:
    """Let each value of a model be `auto` as well, which DeepSpeed leaves to the run."""
    inner = schema.get("properties", {})
    allowed = {name: {"anyOf": [kind, {"const": AUTO}]} for name, kind in inner.items()}
    return schema | ({"properties": allowed} if inner else {})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _headed(title: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"$schema": DRAFT, "title": title} | schema
