"""Flags of transformers' `TrainingArguments`, from their source: importing it takes seconds."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from toolkit.configs.check.documents import Document, Entry, Keys
from toolkit.configs.check.finding import Place
from toolkit.configs.check.sources import tree_of

ON: Final = {"yes", "true", "t", "y", "1"}
OFF: Final = {"no", "false", "f", "n", "0"}


@cache
def training_argument_types() -> dict[str, str]:
    """Return the fields of `TrainingArguments`, each with its type as it is written.

    `HfArgumentParser` makes a flag of each, and of a switch that is on one more, `--no_...`
    (transformers 5.24, hf_argparser.py).
    """
    return {name: ast.unparse(line.annotation) for name, line in _fields().items()}


@cache
def training_argument_defaults() -> dict[str, Any]:
    """Return the defaults of `TrainingArguments` that are written as plain values."""
    defaults: dict[str, Any] = {}
    for name, line in _fields().items():
        value = line.value
        if isinstance(value, ast.Call):
            named = {keyword.arg: keyword.value for keyword in value.keywords}
            value = named.get("default")
        defaults[name] = None
        if value is not None:
            with suppress(ValueError):
                defaults[name] = ast.literal_eval(value)
    return defaults


@cache
def _fields() -> Mapping[str, ast.AnnAssign]:
    return {
        line.target.id: line
        for node in tree_of("transformers.training_args").body
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def flags_document(words: Sequence[str]) -> Document:
    """Return the flags of a command as a document of one line, each by its name."""
    text = shlex.join(words)
    content: dict[str, Any] = {}
    entries: dict[Keys, Entry] = {}
    start, name = 0, ""
    for word in words:
        quoted = shlex.quote(word)
        place = Place(start=start, end=start + len(quoted), column=start + 1)
        start += len(quoted) + 1
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            name = flag[2:].replace("-", "_")
            content[name] = _value(name, value) if equals else True
            entries[(name,)] = Entry(key=place, value=place, in_flow=True)
            name = "" if equals else name
        elif name:
            content[name] = _value(name, word)
            entries[(name,)] = Entry(key=entries[(name,)].key, value=place, in_flow=True)
            name = ""
    return Document(file=Path("flags"), text=text, kind="flags", content=content, entries=entries)


def values_of_other_types(content: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Return the flags whose text is none of their type: name, text and the type in words."""
    nouns = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    for name, value in content.items():
        kind = training_argument_types().get(name, "").removesuffix(" | None")
        if kind in nouns and isinstance(value, str):
            yield name, value, nouns[kind]


def _value(name: str, text: str) -> Any:
    """Return a flag's value in its type; as text where it is of another."""
    kinds = training_argument_types().get(name, "").replace(" ", "").split("|")
    if "bool" in kinds and text.lower() in ON | OFF:
        return text.lower() in ON
    for kind, convert in (("int", int), ("float", float)):
        if kind in kinds:
            with suppress(ValueError):
                return convert(text)
    return text
