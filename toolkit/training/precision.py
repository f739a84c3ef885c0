"""The precision of a run: from its flags, else from the launcher's config.

The bundled configs name no precision. A conflict between flags and config is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

from toolkit.configs.requested import DEEPSPEED_FILE, read_deepspeed_config
from toolkit.errors import UsageError

HALVES: Final = ("bf16", "fp16")


def with_precision(rest: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the typed flags for `TrainingArguments` with the precision of the run, and notes.

    Raises:
        UsageError: the flags and the config ask for different precisions, the flags for two, or
            the config for one that is not trained in here.
    """
    passed = {name: switched(rest, name) for name in HALVES}
    if all(passed.values()):
        raise UsageError("--bf16 and --fp16 exclude each other: pass one.")
    from_launcher = launchers_precision(environ)
    if from_launcher is None:
        return [*rest], []
    wanted, where = from_launcher
    if wanted not in HALVES:
        raise UsageError(
            f"toolkit.train computes in fp32, bf16 or fp16, and {where} asks for {wanted}. Set "
            "that to no, bf16 or fp16."
        )
    rival = next(name for name in HALVES if name != wanted)
    if passed[rival] or passed[wanted] is False:
        flag = f"--{rival}" if passed[rival] else f"--{wanted} False"
        raise UsageError(
            f"{flag} was passed, and {where} asks for {wanted}. Leave {flag} out, or take {wanted} "
            "out of the config."
        )
    if passed[wanted]:
        return [*rest], []
    return [*rest, f"--{wanted}=True"], [f"computing in {wanted}, by {where}"]


def requested_precision(values: Mapping[str, Any]) -> str:
    """Return the precision in the values of `TrainingArguments`: `no` is fp32."""
    return next((name for name in HALVES if values[name]), "no")


def launchers_precision(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the precision in the launcher's config and its place; None without one.

    `mixed_precision: no` doesn't count: Accelerate's own questionnaire always writes it.
    """
    yaml = environ.get("ACCELERATE_MIXED_PRECISION") or "no"
    if yaml != "no":
        return yaml, "the launcher's mixed_precision"
    if DEEPSPEED_FILE not in environ:
        return None
    config = read_deepspeed_config(environ)
    for name in HALVES:
        if config.get(name, {}).get("enabled") is True:
            return name, f"{name}.enabled in the DeepSpeed file"
    return None


def switched(rest: Sequence[str], name: str) -> bool | None:
    """Return the value of the last `--name` in flags that are not parsed yet, None without one.

    A flag without a value is true.
    """
    on = None
    for word, after in zip_longest(rest, rest[1:], fillvalue="--"):
        flag, given, value = word.partition("=")
        if flag == f"--{name}":
            text = value if given else after
            on = text.startswith("--") or text.lower() in ("yes", "true", "t", "y", "1")
    return on
