"""Shapes of architectures that the table does not have: counted on the meta device, once.

A child process builds the model from its config, since this tier never imports torch. Its answer
is kept in the toolkit's cache, by the hash of the config and of what counts it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from toolkit.environment import cache_root
from toolkit.errors import UsageError
from toolkit.files import write_text
from toolkit.jobs.kept import KeptForms
from toolkit.jobs.shape import ATTENTION, ModelShape, Tensor
from toolkit.launching.python import package_folder, python_environment
from toolkit.launching.supervised import supervised
from toolkit.planning.models.reading import shown

WORKER = "toolkit.measuring.meta_model"
SOURCES = (
    "engines/described.py",
    *(f"measuring/meta_{part}.py" for part in ("model", "model_layers", "counting", "forms")),
)

_ADVICE = "Plan with a parameter count such as 7b."

SECONDS = 600.0
"""Time for the child; usual models take 15 to 30 seconds of one core, those of many kinds 60."""

_LOG = logging.getLogger(__name__)


def counted_shape(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """Return the shape of the model that transformers builds from a config of any causal LM.

    Raises:
        UsageError: no causal LM can be built from it here, or it takes too long.
    """
    if not _is_listed(config.get("model_type")):
        raise _not_built(config, name, "no causal LM of this type is listed there")
    text = json.dumps(config, sort_keys=True)
    file = cache_root() / "skeletons" / f"{_digest(text, name)}.json"
    answer = _read(file)
    if answer is None:
        answer = _count(text, config, name)
        with suppress(OSError):  # without a cache, it is counted again the next time
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(answer), durable=False)
    return shape_of(answer, name)


def _digest(text: str, name: str) -> str:
    digest = hashlib.sha256(text.encode())
    try:
        digest.update(f"{version('torch')} {version('transformers')}".encode())
    except PackageNotFoundError as error:
        raise UsageError(
            f"{name}: the planner's table does not have this architecture, and counting it takes "
            f"{error.name}, which is not installed here. Install it, or plan with a parameter "
            "count such as 7b."
        ) from error
    digest.update(ATTENTION.pattern.encode())
    for source in SOURCES:
        digest.update((package_folder() / source).read_bytes())
    return digest.hexdigest()


def _read(file: Path) -> dict[str, Any] | None:
    try:
        answer = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", answer) if isinstance(answer, dict) else None


def _count(text: str, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    _LOG.warning(
        "%s: counting %s layers of the architecture %s on the meta device, which takes 15 to 30 "
        "seconds, or a minute where they are of many kinds. The answer is kept for the next time.",
        name,
        config.get("num_hidden_layers", "the"),
        shown(config.get("model_type")),
    )
    # Nothing is fetched, no GPU is touched, and no process is left behind.
    environment = python_environment() | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = supervised([sys.executable, "-m", WORKER])
    model_type = shown(config.get("model_type"))
    try:
        child = subprocess.run(
            command,
            input=text.encode(),
            capture_output=True,
            env=environment,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"{name}: counting the architecture {model_type} took longer than {SECONDS:.0f} "
            f"seconds, and was stopped. {_ADVICE}"
        ) from error
    try:
        answer: Any = json.loads(child.stdout)
    except ValueError as error:
        lines = child.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        raise UsageError(
            f"{name}: counting the architecture {model_type} failed ({lines[-1][:200]}). {_ADVICE}"
        ) from error
    if "error" in answer:
        raise _not_built(config, name, answer["error"][:300])
    return answer


def _is_listed(model_type: object) -> bool:
    """Whether transformers lists a causal LM of a type, by its source: an import takes seconds."""
    found = find_spec("transformers")  # does not import it
    if found is None or found.origin is None:
        return True  # that it is not installed is said later
    file = Path(found.origin).parent / "models" / "auto" / "modeling_auto.py"  # of 5.24
    listed = file.read_text(encoding="utf-8") if file.is_file() else ""
    listed = listed.partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")[2].partition("\n)")[0]
    return not listed or f'("{model_type}", ' in listed


def _not_built(config: Mapping[str, Any], name: str, why: str) -> UsageError:
    own = (
        "Its code comes with the model, and the planner runs none. " if "auto_map" in config else ""
    )
    return UsageError(
        f"{name}: the planner's table does not have the architecture "
        f"{shown(config.get('model_type'))}, and transformers {version('transformers')} can't "
        f"build it as a causal LM from this config ({why}). {own}{_ADVICE}"
    )


def shape_of(answer: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape that a count describes.

    Raises:
        UsageError: what autograd keeps of the model could not be counted.
    """
    if reason := answer["uncounted"]:
        raise UsageError(
            f"{name}: the parameters of {answer['architecture']} can be counted, but not what "
            f"autograd keeps of it ({reason[:200]}). {_ADVICE}"
        )
    same_names = (
        "architecture layers hidden_size heads kv_heads head_dim intermediate_size vocab_size "
        "max_positions tied experts active_experts norms_per_layer qk_norm dropout logit_softcap "
        "gated rotary groups_heads"
    )
    facts = {key: answer[key] for key in same_names.split()}
    if widths := answer.get("widths"):  # the forms hold in all widths
        facts |= {"dense_size": widths["ffn"], "expert_size": widths.get("expert", 0)}
    return ModelShape(
        name=name,
        kept=KeptForms(features=answer["features"], forms=answer["forms"], rows=answer["rows"]),
        kinds=tuple(answer["kinds"]),
        tensors=tuple(
            Tensor(tensor, tuple(shape), kind, layer, answer["splits"].get(tensor))
            for tensor, shape, kind, layer in answer["tensors"]
        ),
        note=_note(answer),
        scans=bool(answer["kernels"]),
        **facts,
    )


def _note(answer: Mapping[str, Any]) -> str:
    sentences = ["This architecture is not in the planner's table: it was counted from its config."]
    if kernels := answer["kernels"]:
        sentences.append(
            f"Planned from what kernels for {', '.join(kernels)} keep, the inputs and outputs of "
            "its linear layers, to what torch's own operations keep, which run where the packages "
            "of these kernels are not installed."
        )
    if towers := answer["towers"]:
        parts = ", ".join(f"{tower} ({size:,} parameters)" for tower, size in towers.items())
        sentences.append(f"Weights without activations, as in a run on text alone: {parts}.")
    return " ".join(sentences)
