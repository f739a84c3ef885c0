"""A config file as values with their places: YAML or JSON, text and offsets kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast

from toolkit.configs.check.finding import Edit, Finding, Place, Severity, finding_of
from toolkit.errors import UsageError

Kind = Literal["accelerate", "deepspeed", "flags"]
"""Whose a file is: that of `accelerate launch`, of DeepSpeed, or values of `TrainingArguments`."""

Keys = tuple[str | int, ...]
"""The way to a value: keys of mappings, indices of lists."""

OF_ACCELERATE: Final = {"distributed_type", "compute_environment"}
OF_DEEPSPEED: Final = {
    *("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"),
    *("fp16", "bf16", "zero_allow_untested_optimizer", "gradient_clipping"),
}

_WANTED: Final = "Name an Accelerate YAML or a DeepSpeed JSON."


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key of a mapping, or an item of a list."""

    key: Place
    """Of an item, that of its value."""

    value: Place
    in_flow: bool
    """Whether it stands between brackets, where commas separate entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One file, read."""

    file: Path
    text: str
    kind: Kind
    content: dict[str, Any]
    entries: Mapping[Keys, Entry] = field(default_factory=dict[Keys, Entry])
    findings: tuple[Finding, ...] = ()
    """What is wrong with the text itself: it cannot be read, or a key stands there twice."""

    def __bool__(self) -> bool:
        return bool(self.text)

    def get(self, *keys: str | int) -> Any:
        """Return the value at a place; None where there is none."""
        return value_at(self.content, keys)

    def place(self, keys: Keys, *, value: bool = False) -> Place:
        """Return the place of a key or of its value, or of the nearest one around it."""
        while keys and keys not in self.entries:
            keys, value = keys[:-1], False
        if not keys:
            return Place()
        entry = self.entries[keys]
        return entry.value if value else entry.key

    def shown(self, keys: Keys) -> str:
        """Return where a value stands, for a sentence: the file's name and the line."""
        return f"{self.file.name}:{self.place(keys).line}"

    def found(
        self,
        case: str,
        keys: Keys,
        edits: tuple[Edit, ...] = (),
        *,
        severity: Severity | None = None,
        **values: object,
    ) -> Finding:
        """Return the finding of a case at the place of a key; see `finding_of`.

        `name`, `path` and `value` in the texts are the key's.
        """
        name = keys[len(keys) - 1] if keys else ""
        known = {"name": name, "path": dotted(keys), "value": self.get(*keys)}
        return finding_of(
            case, self.file, self.place(keys), edits, severity=severity, **(known | values)
        )

    def rename(self, keys: Keys, name: str) -> tuple[Edit, ...]:
        """Return the edit that gives a key another name; none where the key has no place."""
        if keys not in self.entries:
            return ()
        key = self.entries[keys].key
        quoted = self.text[key.start]
        text = f"{quoted}{name}{quoted}" if quoted in "\"'" else name
        return (Edit(start=key.start, end=key.end, text=text),)

    def replace(self, keys: Keys, text: str) -> tuple[Edit, ...]:
        """Return the edit that writes another value."""
        if keys not in self.entries:
            return ()
        value = self.entries[keys].value
        return (Edit(start=value.start, end=value.end, text=text),)

    def remove(self, keys: Keys) -> tuple[Edit, ...]:
        """Return the edit that takes a key out: its lines, or itself and a comma."""
        if keys not in self.entries:
            return ()
        entry, text = self.entries[keys], self.text
        start, end = entry.key.start, entry.value.end
        if not entry.in_flow:
            start = text.rfind("\n", 0, start) + 1
            # A comment behind the value belongs to it.
            stop = text.find("\n", max(end - 1, start))
            return (Edit(start=start, end=len(text) if stop < 0 else stop + 1, text=""),)
        behind = text[end:]
        if behind.lstrip().startswith(","):
            end += len(behind) - len(behind.lstrip()) + 1
            end += len(text[end:]) - len(text[end:].lstrip())
        else:
            before = text[:start].rstrip()
            start = len(before) - 1 if before.endswith(",") else start
        return (Edit(start=start, end=end, text=""),)


NOTHING: Final = Document(file=Path(), text="", kind="flags", content={})
"""In place of a file that is not given: it has no key."""


def read_document(file: Path) -> Document:
    """Read a file, and say whose it is.

    Raises:
        UsageError: it is not there, or of none of the kinds that are checked.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}. Check the path.") from None
    except UnicodeDecodeError:
        raise UsageError(
            f"{file} is no text. Name an Accelerate YAML or a DeepSpeed JSON."
        ) from None
    return document_of(file, text)


def document_of(file: Path, text: str) -> Document:
    """Return a text as a document; raises as `read_document`."""
    import yaml

    is_json = file.suffix == ".json" or text.lstrip()[:1] == "{"
    try:
        content = json.loads(text) if is_json else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        return _unread(file, text, error, is_json=is_json)
    if not isinstance(content, dict):
        raise UsageError(f"{file} holds no keys. {_WANTED}")
    values = cast("dict[str, Any]", content)
    kind = _kind(values)
    if kind is None:
        raise UsageError(
            f"{file} is no config of Accelerate (distributed_type), of DeepSpeed "
            "(zero_optimization) or of transformers' TrainingArguments."
        )
    entries: dict[Keys, Entry] = {}
    repeated: list[tuple[Keys, Place]] = []
    try:
        # A tab is white space in JSON, and an error in YAML, of which JSON is nearly a part.
        compose = cast("Any", yaml).compose
        root = compose(text.replace("\t", " ") if is_json else text, Loader=yaml.SafeLoader)
        _collect(root, (), entries, repeated)
    except yaml.YAMLError:
        entries.clear()  # without places
    twice = tuple(
        finding_of("repeated-key.twice", file, place, path=dotted(keys)) for keys, place in repeated
    )
    return Document(
        file=file, text=text, kind=kind, content=values, entries=entries, findings=twice
    )


def dotted(keys: Keys) -> str:
    """Return a way to a value as one word."""
    return ".".join(map(str, keys))


def value_at(content: Any, keys: Keys) -> Any:
    """Return the value at a place of nested mappings; None where there is none."""
    for key in keys:
        if isinstance(content, dict):
            content = cast("dict[Any, Any]", content).get(key)
        else:
            return None
    return content


def keys_of(content: Any, *, within: Keys = ()) -> Iterator[Keys]:
    """Return the way to every key of nested mappings, outer ones first."""
    if isinstance(content, dict):
        for key, value in cast("dict[str, Any]", content).items():
            yield (*within, key)
            yield from keys_of(value, within=(*within, key))


def _kind(content: Mapping[str, Any]) -> Kind | None:
    if OF_ACCELERATE & content.keys():
        return "accelerate"
    if OF_DEEPSPEED & content.keys():
        # TrainingArguments have switches of these names.
        switches = [content.get(name) for name in ("bf16", "fp16")]
        if "learning_rate" not in content and not any(isinstance(one, bool) for one in switches):
            return "deepspeed"
    from toolkit.configs.check.flags import training_argument_types

    known = training_argument_types().keys() & content.keys()
    return "flags" if len(known) > len(content) / 3 else None


def _collect(
    node: Any, keys: Keys, entries: dict[Keys, Entry], repeated: list[tuple[Keys, Place]]
) -> None:
    import yaml

    if isinstance(node, yaml.MappingNode):
        for key, value in cast("list[tuple[Any, Any]]", node.value):
            inner = (*keys, str(key.value))
            if inner in entries:
                repeated.append((inner, _place(key)))
            flow = bool(node.flow_style)
            entries[inner] = Entry(key=_place(key), value=_place(value), in_flow=flow)
            _collect(value, inner, entries, repeated)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(cast("list[Any]", node.value)):
            place, flow = _place(value), bool(node.flow_style)
            entries[(*keys, index)] = Entry(key=place, value=place, in_flow=flow)
            _collect(value, (*keys, index), entries, repeated)


def _place(node: Any) -> Place:
    start = node.start_mark
    return Place(start=start.index, end=_end(node), line=start.line + 1, column=start.column + 1)


def _end(node: Any) -> int:
    """Return where a node's text ends; without brackets, its own mark is the next key's start."""
    while node.id in ("mapping", "sequence") and not node.flow_style and node.value:
        node = node.value[-1][1] if node.id == "mapping" else node.value[-1]
    return node.end_mark.index


def _unread(file: Path, text: str, error: Exception, *, is_json: bool) -> Document:
    mark = getattr(error, "problem_mark", None)
    place, reason = Place(), str(error)
    if isinstance(error, json.JSONDecodeError):
        place, reason = Place(line=error.lineno, column=error.colno), error.msg
    elif mark is not None:
        place = Place(line=mark.line + 1, column=mark.column + 1)
        reason = str(getattr(error, "problem", ""))
    name = "JSON" if is_json else "YAML"
    finding = finding_of("unreadable.text", file, place, kind=name, reason=reason)
    kind: Kind = "deepspeed" if is_json else "accelerate"
    return Document(file=file, text=text, kind=kind, content={}, findings=(finding,))
