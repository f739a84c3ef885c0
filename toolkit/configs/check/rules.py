"""The rules of `toolkit check` for files and flags; what they say stands in rules.toml."""

from __future__ import annotations

import ast
import difflib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from toolkit import environment, stack
from toolkit.backends.deepspeed_json import AUTO
from toolkit.configs.check.deepspeed_file import BATCH, IN_SECTIONS, all_mistakes, nearest
from toolkit.configs.check.documents import Document, Keys, dotted, keys_of
from toolkit.configs.check.finding import Finding, Severity, table
from toolkit.configs.check.flags import OFF, training_argument_types, values_of_other_types
from toolkit.configs.check.libraries import accelerate_library, deepspeed_library
from toolkit.configs.check.setup import Setup
from toolkit.configs.check.sources import file_of, version_of
from toolkit.configs.requested import check_left_over
from toolkit.errors import UsageError

OF_LAUNCHERS: Final = re.compile(r"ACCELERATE_|FSDP_|PARALLELISM_CONFIG_|MEGATRON_LM_")
"""Variables by which `accelerate launch` passes a config on (accelerate/utils/launch.py)."""

HARMLESS: Final = {
    *("ACCELERATE_DEBUG_MODE", "ACCELERATE_LOG_LEVEL", "ACCELERATE_ENABLE_RICH"),
    *("ACCELERATE_DISABLE_RICH", "ACCELERATE_BYPASS_DEVICE_MAP"),
}

LIKE_A_SLIP: Final = 0.85
"""From this likeness on (difflib), a name with at most two letters more or less is a slip."""

Judge = Callable[[Setup], Iterator[Finding]]


def findings_of(setup: Setup) -> list[Finding]:
    """Return what all rules find in a launch, by place."""
    found = [finding for document in setup.documents for finding in document.findings]
    for judge in RULES:
        found += judge(setup)
    order = [document.file for document in setup.documents]
    refused = {(one.file, one.line, one.column) for one in found if one.rule == "refused-value"}
    # What is refused has no other effect.
    unique = [
        one
        for one in dict.fromkeys(found)
        if one.severity == "error" or (one.file, one.line, one.column) not in refused
    ]
    return sorted(unique, key=lambda one: (order.index(one.file), one.line, one.column, one.rule))


def _unknown_keys(setup: Setup) -> Iterator[Finding]:
    yaml = setup.accelerate
    for keys in setup.unknown:
        known = [name for name in accelerate_library().top_level if name not in yaml.content]
        home = [section for section in table()["facts"]["sections"] if _begins(section, keys[-1])]
        close = f"Move it into {home[0]}." if home and not nearest(str(keys[-1]), known) else None
        yield _misspelt(yaml, "unknown-key.top", keys, known, close=close)
    if yaml and setup.launched is not None:
        for section, key, name in keys_of_sections(yaml):
            arguments = accelerate_library().arguments
            if name not in setup.launched.read and name not in arguments:
                held = {_in_launcher(section, other) for other in yaml.get(section)}
                known = [own for own in arguments if _begins(section, own) and own not in held]
                yield _misspelt(yaml, "unknown-key.section", (section, key), known, name=name)
    if setup.deepspeed:
        for mistake in all_mistakes(setup.deepspeed.content):
            if mistake.kind == "unknown":
                raises = len(mistake.keys) > 1 and mistake.keys[0] not in IN_SECTIONS
                case = "unknown-key.model" if raises else "unknown-key.deepspeed"
                known = [] if mistake.nearest is None else [mistake.nearest]
                yield _misspelt(setup.deepspeed, case, mistake.keys, known)
    if setup.flags:
        known = [*training_argument_types()]
        for name in setup.flags.content:
            if name.removeprefix("no_") not in known and nearest(name, known) is not None:
                yield _misspelt(setup.flags, "unknown-key.flag", (name,), known)


def _misspelt(
    document: Document,
    case: str,
    keys: Keys,
    known: list[str],
    *,
    name: str = "",
    close: str | None = None,
) -> Finding:
    """Return a finding on an unknown key: an error with its repair where it looks like a slip."""
    written = name or str(keys[len(keys) - 1])
    meant, slip = nearest(written, known), False
    if meant is not None:
        is_close = difflib.SequenceMatcher(None, written, meant).ratio() >= LIKE_A_SLIP
        slip = is_close and abs(len(written) - len(meant)) <= 2
        close = f"Did you mean {meant}?"
    edits = document.rename(keys, meant) if meant and slip and document.kind != "flags" else ()
    severity: Severity | None = "error" if slip else None
    return document.found(case, keys, edits, severity=severity, close=close or "Take it out.")


def keys_of_sections(yaml: Document) -> Iterator[tuple[str, str, str]]:
    """Return the keys in sections that a kind of launch reads, each with the launcher's name."""
    for section, facts in table()["facts"]["sections"].items():
        if facts["of"] in ("", _kind(yaml)):
            keys = [str(keys[0]) for keys in keys_of(yaml.get(section)) if len(keys) == 1]
            yield from ((section, key, _in_launcher(section, key)) for key in keys)


def _kind(yaml: Document) -> str:
    value = yaml.get("distributed_type")
    return "NO" if value is False else str(value).upper()


def _in_launcher(section: str, key: str) -> str:
    """Return the name under which the launcher keeps a section's key (accelerate 1.15)."""
    prefix = str(table()["facts"]["sections"][section]["prefix"])
    return key if key.startswith(prefix.rstrip("_")) else f"{prefix}{key}"


def _begins(section: str, name: object) -> bool:
    """Whether an argument of the launcher belongs to a section of the YAML."""
    return str(name).startswith(tuple(table()["facts"]["sections"][section]["begins"]))


def _refused_values(setup: Setup) -> Iterator[Finding]:
    yaml, document = setup.accelerate, setup.deepspeed
    if yaml and setup.json_problem is not None:
        keys: Keys = ("deepspeed_config", "deepspeed_config_file")
        yield yaml.found("refused-value.missing", keys, reason=setup.json_problem)
    for refusal in setup.refusals:
        if setup.json_problem is not None and refusal.keys == ("deepspeed_config",):
            continue  # the same file, in Accelerate's words
        value, stands = yaml.get(*refusal.keys), dotted(refusal.keys) or "The file"
        if value is False and refusal.keys == ("mixed_precision",):
            edits = yaml.replace(refusal.keys, '"no"')
            yield yaml.found("refused-value.no", refusal.keys, edits)
            continue
        if refusal.keys and not isinstance(value, dict):
            stands += f": {value}"
        yield _refused(yaml, "accelerate", refusal.keys, stands=stands, reason=refusal.reason)
    for mistake in all_mistakes(document.content):
        if mistake.kind == "ignored":
            edits = document.remove(mistake.keys)
            case = "ignored-key.checkpointing"
            yield document.found(case, mistake.keys, edits, reason=mistake.text)
        elif mistake.kind == "refused":
            yield _refused(document, "deepspeed", mistake.keys, reason=mistake.text)
    for name, _, noun in values_of_other_types(setup.flags.content):
        yield setup.flags.found("refused-value.flag", (name,), noun=noun)
    yield from _of_aio(document)
    if document and document.content and "zero_optimization" not in document.content:
        of_trainer = setup.accelerate or setup.flags or AUTO in str(document.content)
        yield document.found("refused-value.zero", (), severity="error" if of_trainer else None)


def _refused(document: Document, case: str, keys: Keys, **values: Any) -> Finding:
    """Return a finding on a refused value; a number in quotes has a repair."""
    value, edits, repair = document.get(*keys), (), "Correct it, or take it out."
    if (
        keys
        and isinstance(value, str)
        and re.fullmatch(r"\d+(\.\d+)?(e\d+)?", value, re.IGNORECASE)
    ):
        number = f"{float(value):.0f}" if float(value).is_integer() else value
        edits, repair = document.replace(keys, number), f"Write {number}, without quotes."
    return document.found(f"refused-value.{case}", keys, edits, repair=repair, **values)


def _of_aio(document: Document) -> Iterator[Finding]:
    """Find keys and types below `aio`, which DeepSpeed looks up without a check."""
    known = _or_none(deepspeed_library)
    defaults: dict[str, Any] = {} if known is None else known.aio
    for keys in keys_of({"aio": document.get("aio")}):
        if len(keys) != 2 or not defaults:
            continue
        value, default = document.get(*keys), defaults.get(str(keys[1]))
        if default is None:
            names = [name for name in defaults if document.get("aio", name) is None]
            yield _misspelt(document, "unknown-key.deepspeed", keys, names)
        elif type(value) is not type(default):
            reason = f"{dotted(keys)} has to be like {_json(default)}, and is {_json(value)}"
            yield _refused(document, "deepspeed", keys, reason=reason)


def _quoted_switches(setup: Setup) -> Iterator[Finding]:
    yaml = setup.accelerate
    value = yaml.get("debug")
    if value and not isinstance(value, bool):
        edits = yaml.replace(("debug",), "false") if str(value).lower() in OFF else ()
        yield yaml.found("quoted-switch.text", ("debug",), edits)


def _contradictions(setup: Setup) -> Iterator[Finding]:
    yaml, file, flags = setup.accelerate, setup.deepspeed, setup.flags
    in_json: Mapping[str, str] = table()["facts"]["in_json"]
    for keys in setup.beside_json:
        where = in_json.get(str(keys[-1]), "")
        held = file.get(*where.split("."))
        edits = yaml.remove(keys) if held is not None and held == yaml.get(*keys) else ()
        name = file.file.name or "the JSON"
        yield yaml.found("contradiction.beside", keys, edits, json=name, held=_json(held))
    for line in setup.mismatches:
        path, _, rest = line.removeprefix("ds ").partition("=")
        document, both = file or yaml or flags, rest.replace(" vs hf ", ", and the flags say ")
        keys = tuple(path.split(".")) if file else ("deepspeed_config",)
        yield document.found("contradiction.trainer", keys, path=path, both=both)
    if not yaml:
        return
    precision = next((one for one in ("fp16", "bf16") if setup.flag(one) is True), None)
    if precision is not None and yaml.get("mixed_precision") in {"no", "fp16", "bf16"} - {
        precision
    }:
        yield yaml.found("contradiction.precision", ("mixed_precision",), flag=precision)
    plugin = setup.rank.fsdp
    if plugin is not None and setup.flag("fsdp"):
        yield flags.found("contradiction.plugin", ("fsdp",), yaml=yaml.file.name)
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if plugin is not None and plugin.activation_checkpointing and setup.flag(name) is True:
            where = yaml.shown(("fsdp_config", "fsdp_activation_checkpointing"))
            yield flags.found("contradiction.checkpointing", (name,), where=where)


def _ignored_keys(setup: Setup) -> Iterator[Finding]:
    yaml, document = setup.accelerate, setup.deepspeed or setup.accelerate
    if yaml and setup.launched is not None:
        yield from _unread(yaml, setup.launched.read)
        yield from _of_other_fsdp(yaml, setup.rank.fsdp)
    stage = setup.zero("stage")
    if not document or stage not in (0, 1, 2):
        return
    if setup.zero("offload_param", "device") in ("cpu", "nvme"):
        keys: Keys = ("zero_optimization", "offload_param")
        keys = keys if setup.deepspeed else ("deepspeed_config", "offload_param_device")
        yield document.found("ignored-key.offload", keys, stage=stage)
    keys = ("deepspeed_config", "zero3_init_flag")
    if yaml and str(yaml.get(*keys)).lower() == "true":
        yield yaml.found("ignored-key.init", keys, yaml.replace(keys, "false"), stage=stage)


def _unread(yaml: Document, read: frozenset[str]) -> Iterator[Finding]:
    """Find sections and keys that this kind of launch does not read."""
    for section, facts in table()["facts"]["sections"].items():
        value = yaml.get(section)
        if value is not None and not isinstance(value, dict):
            yield yaml.found("ignored-key.no-section", (section,))
        elif value and facts["of"] not in ("", _kind(yaml)):
            yield yaml.found("ignored-key.section", (section,), of=facts["of"], kind=_kind(yaml))
    arguments = accelerate_library().arguments
    for section, key, name in keys_of_sections(yaml):
        value = yaml.get(section, key)
        if name in read or name not in arguments or value in (None, "none", arguments[name]):
            continue
        is_path = name.endswith("nvme_path")
        yield yaml.found("ignored-key.nvme" if is_path else "ignored-key.unread", (section, key))
    if yaml.get("use_cpu") is True and "use_cpu" not in read:
        yield yaml.found("ignored-key.cpu", ("use_cpu",))
    unused = {"debug", "downcast_bf16", "tpu_use_cluster"}  # the launcher sees to these itself
    unused |= {"same_network"} if yaml.get("num_machines") in (None, 1) else set()
    for name, default in arguments.items():
        value = yaml.get(name)
        same = str(value).lower() == str(default).lower()
        if None not in (default, value) and not same and name not in unused:
            yield yaml.found("ignored-key.flag", (name,), default=default)


def _of_other_fsdp(yaml: Document, plugin: Any) -> Iterator[Finding]:
    """Find keys of FSDP1 in a section for FSDP2, and the other way round."""
    keys_by_name = {name: (section, key) for section, key, name in keys_of_sections(yaml)}
    reshard = keys_by_name.get("fsdp_reshard_after_forward")
    if plugin is not None and plugin.fsdp_version == 2:
        for name, facts in table()["facts"]["fsdp1"].items():
            if (keys := keys_by_name.get(name)) is None:
                continue
            value = str(yaml.get(*keys)).upper()
            same = value in facts["same"]
            if name == "fsdp_sharding_strategy":
                same = (value in ("1", "FULL_SHARD")) == plugin.reshard_after_forward
            case = "ignored-key.fsdp1-same" if same else "ignored-key.fsdp1"
            yield yaml.found(case, keys, yaml.remove(keys), does=facts["does"])
    elif plugin is not None:
        keys = ("fsdp_config", "fsdp_version")
        yield yaml.found("old-fsdp.version", keys, file=shlex.quote(str(yaml.file)))
    if plugin is not None and plugin.fsdp_version == 1 and reshard is not None:
        value, strategy = str(yaml.get(*reshard)).upper(), plugin.sharding_strategy.name
        same = value in (strategy, "TRUE")
        edits = yaml.rename(reshard, "fsdp_sharding_strategy") if value != "TRUE" else ()
        edits = () if "fsdp_sharding_strategy" in keys_by_name else edits
        case = "ignored-key.reshard-same" if same else "ignored-key.reshard"
        yield yaml.found(case, reshard, edits, strategy=strategy)


def _unknown_values(setup: Setup) -> Iterator[Finding]:
    document, known = setup.deepspeed, _or_none(deepspeed_library)
    if not document or known is None:
        return
    schedules: list[str] = known.schedules.VALID_LR_SCHEDULES
    own = [name for name in known.optimizers if isinstance(name, str)]
    for section, names, module in (
        ("scheduler", schedules, "torch.optim.lr_scheduler"),
        ("optimizer", own, "torch.optim"),
    ):
        keys, value = (section, "type"), document.get(section, "type")
        written = value.lower() if section == "optimizer" and isinstance(value, str) else value
        if isinstance(written, str) and not {written, value} & {*names, *_torch_names(module)}:
            close = nearest(written, names)
            edits = document.replace(keys, f'"{close}"') if close is not None else ()
            values: dict[str, Any] = {"section": section, "known": ", ".join(names)}
            yield document.found("unknown-value.refused", keys, edits, **values)
    keys = ("scheduler", "params", "warmup_type")
    if document.get(*keys) not in (None, "log", "linear"):
        yield document.found("unknown-value.warmup", keys)


def _or_none(ask: Callable[[], Any]) -> Any:
    """Return a library; None where it is not installed, or cannot be read without torch."""
    try:
        return ask()
    except Exception:
        return None


@cache
def _torch_names(module: str) -> frozenset[str]:
    """Return `__all__` of a module of torch, from its source."""
    file = file_of(module)
    text = "" if file is None else file.read_text(encoding="utf-8")
    names = re.search(r"^__all__ = (\[.*?\])", text, re.M | re.DOTALL)
    return frozenset() if names is None else frozenset(ast.literal_eval(names[1]))


def _wrapping(setup: Setup) -> Iterator[Finding]:
    yaml, plugin, folder = setup.accelerate, setup.rank.fsdp, setup.flag("model_name_or_path")
    if not yaml or plugin is None:
        return
    if plugin.auto_wrap_policy is None:
        yield yaml.found("no-wrap-policy.none", ("fsdp_config", "fsdp_auto_wrap_policy"))
    classes = _classes_of(Path(folder)) if isinstance(folder, str) else None
    for name in plugin.transformer_cls_names_to_wrap or ():
        if classes is not None and name not in classes:
            layers = [one for one in classes if one.endswith(("Layer", "Block"))]
            meant = nearest(name, layers)
            close = f"Did you mean {meant}?" if meant else "Take it out: the model's own count."
            keys = ("fsdp_config", "fsdp_transformer_layer_cls_to_wrap")
            yield yaml.found("no-wrap-policy.class", keys, name=name, folder=folder, close=close)


def _classes_of(folder: Path) -> list[str] | None:
    """Return the classes of the architecture in a folder; None where its source is not found."""
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError):
        return None
    file = file_of(f"transformers.models.{kind}.modeling_{kind}")
    source = "" if file is None else file.read_text(encoding="utf-8")
    return None if file is None else re.findall(r"^class (\w+)", source, re.MULTILINE)


def _unfilled_auto(setup: Setup) -> Iterator[Finding]:
    document = setup.deepspeed
    for keys in keys_of(document.content):
        if document.get(*keys) == AUTO and dotted(keys) not in table()["facts"]["filled"]:
            yield document.found("unfilled-auto.default", keys)


def _moved_defaults(setup: Setup) -> Iterator[Finding]:
    from packaging.version import Version

    document, release = setup.deepspeed, version_of("deepspeed")
    if not document.content or release is None:
        return
    for path, (since, before, after) in table()["facts"]["moved"].items():
        keys = tuple(path.split("."))
        section = document.get(*keys[:-1])
        if not isinstance(section, dict) or document.get(*keys) is not None:
            continue
        if document.get(*keys[:-1], "enabled") is False:
            continue
        if keys[-1] == "pin_memory" and document.get(*keys[:-1], "device") not in ("cpu", "nvme"):
            continue
        now = after if Version(release) >= Version(since) else before
        values: dict[str, Any] = {"before": _json(before), "after": _json(after), "now": _json(now)}
        value = '"auto"' if len(keys) == 1 else _json(now)
        yield document.found("moved-default.key", keys, since=since, value=value, **values)


def _silent_faults(setup: Setup) -> Iterator[Finding]:
    config = setup.filled or setup.deepspeed_config
    if config is not None:
        settings = stack.settings_of_deepspeed(config)
    elif setup.rank.fsdp is not None:
        settings = {"backend": "fsdp"}
    else:
        return
    for fault in stack.met(settings):
        said, advice = stack.sentence(fault), stack.advice([fault])
        yield setup.documents[0].found("silent-fault.met", (), fault=said, advice=advice)


def _json(value: object) -> str:
    return "nothing" if value is None else json.dumps(value)


def _batch(setup: Setup) -> Iterator[Finding]:
    document, ranks = setup.deepspeed, setup.num_processes
    sizes = {name: document.get(name) for name in BATCH}
    numbers = {name: size for name, size in sizes.items() if type(size) is int and size > 0}
    is_whole = BATCH[0] in numbers and len(numbers) > 1 and AUTO not in sizes.values()
    if not document or ranks is None or not is_whole:
        return
    mesh = setup.rank.mesh
    readers = ranks // (1 if mesh is None else mesh.sp_size)
    try:
        deepspeed_library().config(numbers, ranks=readers)
    except AssertionError:
        parts = " x ".join(str(numbers[name]) for name in BATCH[1:] if name in numbers)
        values: dict[str, Any] = {"whole": numbers[BATCH[0]], "parts": parts, "ranks": readers}
        yield document.found("batch-arithmetic.product", BATCH[:1], **values)
    except Exception:  # DeepSpeed is not installed, or cannot be asked
        return


def _precision(setup: Setup) -> Iterator[Finding]:
    asked: list[tuple[Document, Keys, Any]] = []
    for name in ("bf16", "fp8"):
        asked.append((setup.accelerate, ("mixed_precision",), name))
        asked += [(setup.deepspeed, (name, "enabled"), True), (setup.flags, (name,), True)]
    for document, keys, value in asked:
        if document and document.get(*keys) == value:
            name = str(value if isinstance(value, str) else keys[0])
            least = (8, 0) if name == "bf16" else (8, 9)
            if old := [gpu.name for gpu in _gpus() if gpu.capability < least]:
                yield document.found("precision-without-gpu.old", keys, gpu=old[0], name=name)


def _gpus() -> list[environment.InstalledGpu]:
    try:
        return environment.gpus()
    except UsageError:
        return []


def _offloads(setup: Setup) -> Iterator[Finding]:
    document = setup.deepspeed
    if not document:
        return
    for name in ("offload_optimizer", "offload_param"):
        keys = ("zero_optimization", name)
        if document.get(*keys, "device") == "nvme":
            if not document.get(*keys, "nvme_path"):
                yield document.found("offload-without.path", keys)
            elif not environment.has_libaio():
                yield document.found("offload-without.libaio", keys)
    forced = document.get("zero_force_ds_cpu_optimizer") is not False
    device = setup.zero("offload_optimizer", "device")
    if device in ("cpu", "nvme") and forced and not environment.has_compiler():
        keys = ("zero_optimization", "offload_optimizer")
        yield document.found("offload-without.compiler", keys)


def _second_optimizer(setup: Setup) -> Iterator[Finding]:
    for section, flag in (("optimizer", "optim"), ("scheduler", "lr_scheduler_type")):
        value = setup.flag(flag)
        if not setup.deepspeed or not setup.flags or value is None:
            continue
        if setup.deepspeed.get(section, "type") is not None:
            where, keys = setup.deepspeed.shown((section,)), (flag,)
            yield setup.flags.found(
                "second-optimizer.both", keys, flag=flag, section=section, where=where
            )


def _weights(setup: Setup) -> Iterator[Finding]:
    yaml, plugin = setup.accelerate, setup.rank.fsdp
    if yaml and plugin is not None and plugin.state_dict_type.name != "FULL_STATE_DICT":
        keys: Keys = ("fsdp_config", "fsdp_state_dict_type")
        default = "" if yaml.get(*keys) is not None else " (FSDP2's default)"
        kind = plugin.state_dict_type.name
        yield yaml.found("no-weights-saved.fsdp", keys, kind=kind, default=default)
    document = setup.deepspeed or yaml
    names = (
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
        "gather_16bit_weights_on_model_save",  # DeepSpeed takes the names of its fields too
    )
    if document and setup.zero("stage") == 3 and not any(map(setup.zero, names)):
        keys = ("zero_optimization", names[0])
        keys = keys if setup.deepspeed else ("deepspeed_config", "zero3_save_16bit_model")
        yield document.found("no-weights-saved.zero", keys)


def _processes(setup: Setup) -> Iterator[Finding]:
    yaml, ranks, keys = setup.accelerate, setup.num_processes, ("num_processes",)
    if not yaml or ranks is None or yaml.get(*keys) is None:
        return
    kind, machines, ids = _kind(yaml), yaml.get("num_machines") or 1, yaml.get("gpu_ids") or "all"
    of_mpi = yaml.get("mpirun_config", "mpirun_hostfile") is not None
    here = len(_gpus())
    is_no_kind = not isinstance(yaml.get("distributed_type"), str | bool)
    if ranks > 1 and (is_no_kind or kind == "NO" or (kind == "MULTI_CPU" and not of_mpi)):
        severity: Severity = "warning" if kind == "NO" else "error"
        yield yaml.found("process-count.alone", keys, severity=severity, ranks=ranks, kind=kind)
    elif isinstance(machines, int) and ranks % machines:
        values: dict[str, Any] = {"ranks": ranks, "machines": machines, "each": ranks // machines}
        yield yaml.found("process-count.machines", keys, **values)
    elif machines == 1 and ids != "all" and len(str(ids).split(",")) < ranks:
        yield yaml.found("process-count.ids", keys, ranks=ranks, ids=ids)
    elif machines == 1 and 0 < here < ranks:
        yield yaml.found("process-count.gpus", keys, ranks=ranks, here=here)


def _unseen(setup: Setup) -> Iterator[Finding]:
    document = setup.documents[0]
    home = setup.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = Path(setup.environ.get("HF_HOME") or Path(home, "huggingface")).expanduser()
    for file in (home / "accelerate" / f"default_config.{end}" for end in ("yaml", "json")):
        if not setup.accelerate and file.is_file():
            yield document.found("unseen-setting.config", (), file=file)
    try:
        check_left_over(setup.environ, launched=False)
    except UsageError as error:
        reason, _, names = str(error).rpartition(" unset ")
        yield document.found("unseen-setting.switch", (), reason=reason, name=names)
        return
    made: Mapping[str, str] = {} if setup.launched is None else setup.launched.environ
    for name, value in setup.environ.items():
        if OF_LAUNCHERS.match(name) and name not in HARMLESS and made.get(name, value) == value:
            yield document.found("unseen-setting.variable", (), name=name)


RULES: Final[tuple[Judge, ...]] = (
    *(_unknown_keys, _refused_values, _quoted_switches, _contradictions, _ignored_keys),
    *(_unknown_values, _wrapping, _unfilled_auto, _moved_defaults, _batch, _precision),
    *(_offloads, _second_optimizer, _weights, _processes, _silent_faults, _unseen),
)
"""What judges a launch; each gives findings of a rule of rules.toml, or of two."""
