"""Saved: what stands in the folders that the script wrote, against what it had trained by then."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Final

from toolkit.certifying.subject import Finding, Subject, broken, holds, not_judged, note
from toolkit.records.saves import Call, ReadBack, Tensor

ADDED: Final = re.compile(
    r"^base_model\.model\.|\.(default|modules_to_save|base_layer)(?=\.|$)"
    r"|(?<=\.lora_[AB])\.\w+(?=\.weight$)"
)
"""Parts of the names in a model with adapters that no saved name has (peft 0.21)."""

ROUNDING: Final = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-10}
OF_PRODUCTS: Final = 0.01
"""Share of what an adapter adds by which products of 16 bits may miss it."""

NO_SAVE: Final = "the script saves nothing"

NOT_READ: Final = "the process that reads what was saved failed: its log is in the folder read-back"

PARTS: Final = (
    "Under FSDP set fsdp_state_dict_type: FULL_STATE_DICT; under ZeRO-3 "
    "stage3_gather_16bit_weights_on_model_save: true"
)
GATHERED: Final = (
    "Save by trainer.save_model or by unwrapped.save_pretrained(folder, state_dict="
    "accelerator.get_state_dict(model)), called on every rank; name what is trained beside an "
    "adapter in its modules_to_save"
)


@dataclass(slots=True, kw_only=True)
class Compared:
    """One saved path against the weights at the time of the last call that wrote it."""

    call: Call
    found: ReadBack
    wrong: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Names of tensors, by what is wrong with them."""

    other: list[str] = field(default_factory=list[str])
    """Tensors with other numbers."""

    casts: set[str] = field(default_factory=set[str])
    equal: int = 0
    merged: int = 0
    """Weights with adapters merged into them whose sum is not known."""

    summed: int = 0
    """Those that are base plus adapter, to rounding."""

    is_of: int | None = None
    """The latest state whose weights these are."""

    @property
    def place(self) -> str:
        return f"{Path(self.call['path']).name} by {self.call['name']} ({self.call['where']})"

    @property
    def is_model(self) -> bool:
        return self.found["kind"] in ("model", "adapter")

    def note(self, problem: str, name: str) -> None:
        self.wrong.setdefault(problem, []).append(name)


def _calls(subject: Subject) -> list[Call]:
    return [call for one in subject.saves for call in one["calls"]]


def _plain(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {ADDED.sub("", name): tensor for name, tensor in weights.items()}


def compared(subject: Subject) -> list[Compared]:
    """Compare what was saved with what was trained; what holds no weight of it is left out."""
    last = {call["path"]: call for call in _calls(subject) if not call["error"]}
    if not subject.read_back or not subject.saves[0]["states"]:
        return []
    made = [_compared(subject, last[one["path"]], one) for one in subject.read_back]
    return [one for one in made if one.is_model or one.equal or one.other or one.wrong]


def _compared(subject: Subject, call: Call, found: ReadBack) -> Compared:
    made = Compared(call=call, found=found)
    states = subject.saves[0]["states"]
    every = [_plain(states[0]["weights"]) | _plain(state["weights"]) for state in states]
    at = min(call["step"], len(every) - 1)
    truth, sums = every[at], {ADDED.sub("", n): v for n, v in states[at]["merged"].items()}
    tied = {ADDED.sub("", n): ADDED.sub("", own) for n, own in subject.saves[0]["tied"].items()}
    bases = {ADDED.sub("", name) for name in states[0]["weights"] if ".base_layer." in name}
    is_merged = found["kind"] == "model" and bool(bases)
    made_anew = {ADDED.sub("", name) for name in found["missing"]}
    seen: dict[str, Tensor] = {}
    for name, tensor in _plain(found["tensors"]).items():
        own = tied.get(name, name)
        if own not in truth or name in made_anew:
            continue
        if name in tied and found["kind"] == "model":
            made.note("tied in training, and apart when they are loaded", name)
        if is_merged and own in bases:
            if own not in sums:
                made.merged += 1
            elif _is_near(tensor, sums[own], truth[own]):
                made.summed += 1
            elif _is_near(tensor, truth[own]["values"], truth[own]):
                made.note("without their adapter", name)
            else:
                made.note("another sum than that of base and adapter", name)
            continue
        seen[own] = tensor
        if not prod(tensor["shape"]) and prod(truth[own]["shape"]):
            made.note("empty", name)
        elif tensor["shape"] != truth[own]["shape"]:
            made.note("not whole", name)
        elif not _is_equal(tensor, truth[own]):
            made.other.append(name)
        else:
            made.equal += 1
            if tensor["dtype"] != truth[own]["dtype"]:
                made.casts.add(f"{truth[own]['dtype']} to {tensor['dtype']}")
    if made.is_model and not found["error"]:
        for name in _plain(states[-1]["weights"]).keys() - seen.keys() - made_anew:
            if not is_merged or (name not in bases and "lora_" not in name):
                made.note("trained, and not in it", name)
    same = (at for at, of in enumerate(every) if all(_is_equal(t, of[n]) for n, t in seen.items()))
    made.is_of = max(same, default=None) if seen else None
    if made.other and made.is_of is None:
        made.wrong["other than what was trained by then"] = made.other
    return made


def _is_equal(saved: Tensor, trained: Tensor) -> bool:
    """Whether a tensor has the bits of another, after the cast with which it was saved."""
    same = saved["digests"][saved["dtype"]] == trained["digests"].get(saved["dtype"])
    return same and saved["shape"] == trained["shape"]


def _is_near(saved: Tensor, meant: Sequence[float], base: Tensor) -> bool:
    """Whether a saved tensor has the few numbers that it should, to the rounding of a sum."""
    step = ROUNDING.get(saved["dtype"], ROUNDING["float32"])
    return saved["shape"] == base["shape"] and all(
        abs(value - right) <= step * max(abs(right), abs(old)) + OF_PRODUCTS * abs(right - old)
        for value, right, old in zip(saved["values"], meant, base["values"], strict=True)
    )


def _named(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} more" if others else first


def saves(subject: Subject) -> Finding:
    """Find calls that save, and end with an error or leave nothing."""
    if subject.read_back is None:
        return not_judged(NOT_READ)
    read = {one["path"]: one for one in subject.read_back}
    for call in _calls(subject):
        if call["error"] and not read:  # else the script went on without it
            words = f"ends the run after {call['step']} steps: {call['error']}"
            return broken(f"{call['name']} ({call['where']}) {words}", GATHERED, call["where"])
        found = read.get(call["path"])
        is_gone = found is None or found["kind"] == "nothing"
        # What was saved before the training is its input, and may have moved on.
        if is_gone and call["path"] and call["step"] and not call["is_checkpoint"]:
            why = f": {found['error']}" if found and found["error"] else ""
            words = f"leaves no weights that can be read in {Path(call['path']).name}{why}"
            return broken(f"{call['name']} ({call['where']}) {words}", PARTS, call["where"])
    places = dict.fromkeys(f"{Path(c['path']).name} ({c['name']})" for c in _calls(subject))
    return holds(f"{len(places)} written: {', '.join(places)}") if places else not_judged(NO_SAVE)


def loads(subject: Subject) -> Finding:
    """Find folders that don't load as their owner would load them, or not whole."""
    models = [one for one in compared(subject) if one.is_model]
    for one in models:
        read = one.found
        words = [
            f"{len(read[kind])} weights are {kind}, the first is {read[kind][0]}"
            for kind in ("missing", "unexpected")
            if read[kind]
        ]
        # Of a checkpoint, the engine's own files may be all that there is.
        is_engines = one.call["is_checkpoint"] and not read["tensors"]
        if words or (read["error"] and not is_engines):
            advice = GATHERED if read["tensors"] else PARTS
            words = read["error"] or "; ".join(words)
            return broken(f"{one.place}: {words}", advice, one.call["where"])
    bases = [one.found["base"] for one in models if one.found["base"]]
    if not models or len(bases) == len(models):
        return not_judged(bases[0] if bases else "no model was saved")
    return holds(f"{len(models) - len(bases)} load in a process of their own, nothing is made anew")


def weights(subject: Subject) -> Finding:
    """Hold each saved tensor against the one that was trained by then."""
    found = compared(subject)
    for one in found:
        if one.wrong:
            words = [f"{len(n)} tensors are {why}: {_named(n)}" for why, n in one.wrong.items()]
            return broken(f"{one.place}: {'; '.join(words)}", GATHERED, one.call["where"])
        if one.other:
            words = f"{one.place}, called after step {one.call['step']}, holds the weights "
            if not one.is_of:
                words += "from before the training"
                return broken(words, GATHERED, one.call["where"])
            advice = "Right where the best checkpoint is loaded at the end"
            return note(f"{words}of step {one.is_of}", advice)
    if not (tensors := sum(one.equal for one in found)):
        why = "nothing that was saved has the names of what was trained"
        return not_judged(why if _calls(subject) else NO_SAVE)
    casts = sorted({cast for one in found for cast in one.casts})
    merged = sum(one.merged for one in found)
    more = f", after a cast of {' and '.join(casts)}" if casts else ""
    summed = sum(one.summed for one in found)
    more += f"; {summed} are base plus adapter, to rounding" if summed else ""
    more += f"; {merged} with adapters merged into them were not compared" if merged else ""
    return holds(f"{tensors} tensors in {len(found)} places are equal to the last bit{more}")


def a_model(subject: Subject) -> Finding:
    """Find a script that trains, and leaves no model that loads and has what was trained."""
    if not _calls(subject):
        return note(NO_SAVE, "Save the model at the end: its training is lost")
    if subject.read_back is None:
        return not_judged(NOT_READ)
    tried = [one for one in compared(subject) if one.is_model]
    good = [
        one
        for one in tried
        if one.is_of is not None and not (one.found["error"] or one.found["missing"] or one.wrong)
    ]
    latest = max(
        good, key=lambda one: (one.is_of or 0, not one.call["is_checkpoint"]), default=None
    )
    if latest is None or not latest.is_of:
        if tried or any(call["error"] for call in _calls(subject)):
            words = "no folder that was saved holds what was trained, whole"
            return broken(words, GATHERED, _calls(subject)[-1]["where"])
        words = "only files were saved that a script's own code reads, and no model that loads"
        return note(words, GATHERED)
    if latest.merged:
        return not_judged(f"{latest.place} has adapters merged into it, which are not compared")
    last = len(subject.saves[0]["states"]) - 1
    if latest.is_of < last:
        words = (
            f"the weights of step {latest.is_of}; those of the last step, {last}, were not saved"
        )
        return note(f"{latest.place} holds {words}", "Save after the last step too")
    tokens = subject.tokens
    known = {"tokenizer": tokens["eos"] is not None, "chat template": tokens["has_template"]}
    lacks = [f"no {name}" for name in latest.found["lacks"] if known.get(name, True)]
    lacks += [f"{name}, which no loader reads" for name in latest.found["unread"]]
    if lacks and not latest.call["is_checkpoint"]:
        return note(f"{latest.place} holds what was trained, and {', '.join(lacks)}")
    return holds(f"{latest.place} holds what was trained")
