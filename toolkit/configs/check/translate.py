"""`toolkit translate FILE --to fsdp`: an Accelerate YAML for FSDP1 as one for FSDP2.

Unlike `accelerate to-fsdp2` (1.15), it keeps hybrid sharding, comments, and the form in which a
state is saved, and it leaves no key behind that FSDP2 does not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from toolkit.configs.check.command import apply
from toolkit.configs.check.documents import NOTHING, Document
from toolkit.configs.check.finding import Edit, table
from toolkit.configs.check.rules import keys_of_sections
from toolkit.configs.check.setup import read_setups
from toolkit.errors import UsageError

RESHARDS: Final = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "_HYBRID_SHARD_ZERO2": False,
}
"""FSDP1's strategies that FSDP2 has: whether parameters are freed after the forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A file for FSDP2."""

    text: str
    notes: tuple[str, ...]
    """What has no counterpart, or is said in another way."""


def translate(file: Path) -> Translation:
    """Return an Accelerate YAML for FSDP1 as one for FSDP2.

    Raises:
        UsageError: it is not for FSDP1, or asks for what is no sharding.
    """
    setup = read_setups([file], NOTHING, {})[0]
    yaml, plugin = setup.accelerate, setup.rank.fsdp
    if not yaml or plugin is None or setup.launched is None:
        raise UsageError(f"{file} is no Accelerate YAML for FSDP: toolkit check {file} says more.")
    if plugin.fsdp_version == 2:
        raise UsageError(f"{file} is for FSDP2 already.")
    strategy = plugin.sharding_strategy.name
    if strategy not in RESHARDS:
        raise UsageError(f"{strategy} shards nothing, it is DDP: use accelerate_configs/ddp.yaml.")
    machines, ranks = int(yaml.get("num_machines") or 1), setup.launched.num_processes
    notes: list[str] = []
    mesh = ""
    if "HYBRID" in strategy and machines > 1:
        # FSDP1 shards on each machine, and keeps a copy on each.
        sizes = {"dp_replicate": machines, "dp_shard": ranks // machines}
        lines = [f"  parallelism_config_{name}_size: {size}" for name, size in sizes.items()]
        mesh = "\n".join(["parallelism_config:", *lines]) + "\n"
        notes.append(f"{strategy}: a mesh of {machines} copies, each sharded over a machine.")
    elif "HYBRID" in strategy:
        notes.append(f"{strategy} on one machine has one copy: it is sharded over all ranks.")
    edits = _of_section(yaml, reshards=RESHARDS[strategy], notes=notes)
    text = apply(yaml.text, edits)
    return Translation(text=text.rstrip("\n") + "\n" + mesh, notes=tuple(notes))


def _of_section(yaml: Document, *, reshards: bool, notes: list[str]) -> list[Edit]:
    """Return the edits in fsdp_config; what is lost by them is added to `notes`."""
    found = {name: (section, key) for section, key, name in keys_of_sections(yaml)}
    wanted: dict[str, str] = {
        "fsdp_version": "2",
        "fsdp_reshard_after_forward": str(reshards).lower(),
    }
    state = str(yaml.get(*found.get("fsdp_state_dict_type", ("",))) or "FULL_STATE_DICT").upper()
    if state == "LOCAL_STATE_DICT":
        notes.append("LOCAL_STATE_DICT: FSDP2 has SHARDED_STATE_DICT in its place.")
        state = "SHARDED_STATE_DICT"
    wanted["fsdp_state_dict_type"] = state
    edits: list[Edit] = []
    for name, facts in table()["facts"]["fsdp1"].items():
        if (keys := found.get(name)) is None:
            continue
        value = str(yaml.get(*keys))
        if name == "fsdp_sharding_strategy" and "fsdp_reshard_after_forward" not in found:
            edits += yaml.rename(keys, "fsdp_reshard_after_forward")
            found["fsdp_reshard_after_forward"] = keys
            continue
        edits += yaml.remove(keys)
        if name != "fsdp_sharding_strategy" and value.upper() not in facts["same"]:
            notes.append(f"{keys[-1]}: {value} has no counterpart: FSDP2 {facts['does']}.")
    new: list[str] = []
    for name, value in wanted.items():
        if name in found:
            edits += yaml.replace(found[name], value)
        else:
            new.append(f"{name}: {value}")
    *_, last = yaml.get("fsdp_config")
    first = yaml.place(next(iter(found.values())))
    end = yaml.text.find("\n", yaml.place(("fsdp_config", last), value=True).end)
    end = len(yaml.text) if end < 0 else end
    indent = "\n" + " " * (first.column - 1)
    added = "".join(indent + line for line in new)
    if any(one.end >= end and not one.text for one in edits):  # where the last line goes
        added = added.removeprefix("\n")
    edits = [Edit(start=one.start, end=min(one.end, end), text=one.text) for one in edits]
    return [*edits, Edit(start=end, end=end, text=added)]
