"""What a run computes in: its flags, else the launcher's config, never one against the other."""

import base64
import json

import pytest

from toolkit.configs.requested import DEEPSPEED_FILE
from toolkit.errors import UsageError
from toolkit.training.arguments import own_arguments, training_values
from toolkit.training.precision import requested_precision, with_precision


def launched(precision="no", **sections):
    """Return what the launcher exports of a YAML with this precision, and of a DeepSpeed JSON."""
    exported = {"ACCELERATE_MIXED_PRECISION": precision}
    if sections:
        text = json.dumps(sections | {"zero_optimization": {"stage": 2}}).encode()
        exported[DEEPSPEED_FILE] = base64.urlsafe_b64encode(text).decode()
    return exported


AUTO = {name: {"enabled": "auto"} for name in ("bf16", "fp16")}
BF16 = AUTO | {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("flags", "environ", "computed_in", "said"),
    [
        ([], {}, "no", []),
        ([], launched(), "no", []),
        ([], launched(**AUTO), "no", []),
        (["--bf16"], launched(**AUTO), "bf16", []),
        (["--fp16", "True"], launched(), "fp16", []),
        ([], launched("bf16"), "bf16", ["computing in bf16, by the launcher's mixed_precision"]),
        ([], launched("fp16"), "fp16", ["computing in fp16, by the launcher's mixed_precision"]),
        (["--fp16", "False"], launched("bf16"), "bf16", ["computing in bf16, by the launcher's"]),
        (["--bf16", "--seed", "1"], launched("bf16"), "bf16", []),
        ([], launched(**BF16), "bf16", ["computing in bf16, by bf16.enabled in the DeepSpeed"]),
        (["--bf16=true"], launched(**BF16), "bf16", []),
    ],
)
def test_flags_say_the_precision_else_the_config_does_and_that_is_said(
    flags, environ, computed_in, said
):
    rest, lines = with_precision(flags, environ)
    values = training_values(own_arguments(rest))
    assert requested_precision(values) == computed_in
    assert [line[: len(start)] for line, start in zip(lines, said, strict=True)] == said


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        (
            ["--fp16"],
            launched("bf16"),
            "--fp16 was passed, and the launcher's mixed_precision asks for bf16. "
            "Leave --fp16 out, or take bf16 out of the config.",
        ),
        (["--bf16", "False"], launched("bf16"), "--bf16 False was passed, and the launcher's"),
        (["--bf16=True"], launched("fp16"), "--bf16 was passed, .* asks for fp16"),
        (["--fp16"], launched(**BF16), "--fp16 was passed, and bf16.enabled in the DeepSpeed file"),
        (["--bf16", "--fp16"], {}, "--bf16 and --fp16 exclude each other"),
        ([], launched("fp8"), "computes in fp32, bf16 or fp16, and .* asks for fp8"),
    ],
)
def test_precisions_that_differ_are_refused_and_both_are_named(flags, environ, said):
    with pytest.raises(UsageError, match=said):
        with_precision(flags, environ)
