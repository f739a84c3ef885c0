"""What a run computes in: what its flags say, else what the launcher's config says.

The bundled configs say nothing. Of two that differ none wins in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

from toolkit.configs.requested import DEEPSPEED_FILE, read_deepspeed_config
from toolkit.errors import UsageError

HALVES: Final = ("bf16", "fp16")


def with_precision(rest: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the flags for `TrainingArguments` with the precision of the run, and what to say.

    Args:
        rest: As they were typed.
        environ: This rank's environment variables.

    Raises:
        UsageError: the flags and the config ask for different precisions, the flags for two, or
            the config for one that is not trained in here.
    """
    passed = {name: switched(rest, name) for name in HALVES}
    if all(passed.values()):
        raise UsageError("--bf16 and --fp16 exclude each other: pass one.")
    found = launchers_precision(environ)
    if found is None:
        return [*rest], []
    asked, where = found
    if asked not in HALVES:
        raise UsageError(
            f"toolkit.train computes in fp32, bf16 or fp16, and {where} asks for {asked}. Set "
            "that to no, bf16 or fp16."
        )
    other = next(name for name in HALVES if name != asked)
    if passed[other] or passed[asked] is False:
        flag = f"--{other}" if passed[other] else f"--{asked} False"
        raise UsageError(
            f"{flag} was passed, and {where} asks for {asked}. Leave {flag} out, or take {asked} "
            "out of the config."
        )
    if passed[asked]:
        return [*rest], []
    return [*rest, f"--{asked}=True"], [f"computing in {asked}, by {where}"]


def asked_precision(values: Mapping[str, Any]) -> str:
    """Return what is computed in, by the values of `TrainingArguments`: `no` is fp32."""
    return next((name for name in HALVES if values[name]), "no")


def launchers_precision(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the precision that the launcher's config names and where it does, None for none.

    `mixed_precision: no` names none: Accelerate's own questionnaire writes it everywhere.
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
    """Return what the last `--name` of some flags says; standing alone it says yes. None: nothing.

    For before the flags are read.
    """
    on = None
    for word, after in zip_longest(rest, rest[1:], fillvalue="--"):
        flag, given, value = word.partition("=")
        if flag == f"--{name}":
            text = value if given else after
            on = text.startswith("--") or text.lower() in ("yes", "true", "t", "y", "1")
    return on
