"""Which family a config.json belongs to, and why some can't be planned with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from toolkit.errors import UsageError
from toolkit.planning.models.families import FAMILIES
from toolkit.planning.models.parts import Family
from toolkit.planning.models.reading import shown

_ARCHITECTURES = {family.architecture: family.model_type for family in FAMILIES.values()}
_TEXT_PARTS = {"gemma3": "gemma3_text"}
"""Multimodal configs whose text part is a known family, built as its own causal LM."""


def recognise(config: object, *, name: str) -> tuple[Family, Mapping[str, Any], str]:
    """Return the family, the part of the config that describes it, and a note for the reader.

    Raises:
        UsageError: that is no config, its architecture is unknown or no causal LM, or its
            parameters are other than its architecture's: quantised, or of several widths.
    """
    described, note = _text_part(_mapping(config, name), name)
    family = _family(described, name)
    _check_plain(described, name)
    return family, described, note


def _mapping(config: object, name: str) -> Mapping[str, Any]:
    if not isinstance(config, Mapping):
        raise UsageError(f"{name}: config.json holds {shown(config)}. It should be an object.")
    return cast("Mapping[str, Any]", config)


def _text_part(config: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], str]:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _TEXT_PARTS:
        return config, ""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise UsageError(
            f"{name}: config.json says text_config = {shown(text)}. It should be an object that "
            f"describes the text part of this {model_type}."
        )
    part = {**cast("Mapping[str, Any]", text), "model_type": _TEXT_PARTS[model_type]}
    # Older files name a parent class here, or the multimodal one.
    part.pop("architectures", None)
    if "quantization_config" in config:
        part["quantization_config"] = config["quantization_config"]
    return part, (
        "The text part alone: the vision tower and its projector are left out, "
        "as if it were loaded as Gemma3ForCausalLM."
    )


def _family(config: Mapping[str, Any], name: str) -> Family:
    """The entry of this config's `model_type`, or of its class where it has none."""
    listed = config.get("architectures")
    named = cast("list[object]", listed) if isinstance(listed, list) else []
    classes = [text for text in named if isinstance(text, str)]
    if config.get("is_encoder_decoder") is True:
        raise UsageError(
            f"{name} is an encoder-decoder{_in_brackets(classes)}. Only causal LMs can be planned."
        )
    model_type = config.get("model_type")
    if model_type is None and classes:
        model_type = _ARCHITECTURES.get(classes[0], classes[0])
    if not isinstance(model_type, str) or not model_type:
        raise UsageError(
            f"{name}: config.json says model_type = {shown(model_type)}. It should name an "
            f"architecture, one of: {', '.join(FAMILIES)}."
        )
    causal = not classes or any(end in classes[0] for end in ("ForCausalLM", "LMHeadModel"))
    if model_type not in FAMILIES:
        other = "" if causal else " It is no causal LM either, going by that class."
        raise UsageError(
            f"{name}: the planner doesn't know the architecture {shown(model_type)}"
            f"{_in_brackets(classes)} and won't guess its shape.{other} "
            f"It knows: {', '.join(FAMILIES)}."
        )
    if not causal:
        raise UsageError(
            f"{name} is a {shown(classes[0])}, no causal LM. Plan with the "
            f"{FAMILIES[model_type].architecture} it is made from."
        )
    return FAMILIES[model_type]


def _in_brackets(classes: list[str]) -> str:
    return f" ({shown(classes[0])})" if classes else ""


def _check_plain(config: Mapping[str, Any], name: str) -> None:
    """Refuse what changes the parameters behind the usual keys."""
    quantised = config.get("quantization_config")
    if quantised:
        how: object = None
        if isinstance(quantised, Mapping):
            how = cast("Mapping[str, object]", quantised).get("quant_method")
        raise UsageError(
            f"{name} is quantised ({how if isinstance(how, str) else 'in a way it does not say'}), "
            "so its tensors are not those of its architecture. Plan with the model that it was "
            "made from; QLoRA quantises that one itself."
        )
    for key, what in (
        ("per_layer_config", "gives layers widths of their own"),
        ("add_cross_attention", "asks for cross-attention to an encoder"),
    ):
        if config.get(key):
            raise UsageError(f"{name}: config.json says {key}, which {what}. That is not planned.")
