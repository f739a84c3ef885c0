"""What the runs saved at their end, each held against what its own ranks held by then."""

from __future__ import annotations

import math

from toolkit.comparing.bisect.distances import distance_of
from toolkit.comparing.bisect.pair import Pair, Seen, counted, largest_in_words
from toolkit.comparing.weights import Weights, WeightsError, open_weights, read_tensors
from toolkit.records.evidence import HELD_FILE


def saved_weights(pair: Pair) -> Seen | str:
    """The largest difference of one weight between what a run held and what it saved."""
    largest, problems, unknown = 0.0, list[str](), list[str]()
    for name, folder, final in zip((pair.one, pair.other), pair.folders, pair.finals, strict=True):
        if final is None or not (folder / HELD_FILE).is_file():
            return f"{name} saved no model"
        held = read_tensors(folder / HELD_FILE)
        try:
            found = distance_of(_by_saved_name(held), _by_saved_name(open_weights(final)))
        except WeightsError as error:
            problems.append(f"what {name} saved cannot be read: {error}")
            continue
        if found.apart:
            largest = max(largest, found.largest.largest)
            problems.append(
                f"{name} saved other numbers than its ranks held: {largest_in_words(found)}"
            )
        lost = len(held) - len(found.tensors)
        if lost:
            absent = next(each for each in found.missing if each in _by_saved_name(held))
            text = f"{name} saved no {absent} ({counted(lost, 'tensor')} of {len(held)})"
            # What is left over may hold it: some families store in parts what they fuse.
            (unknown if len(found.missing) > lost else problems).append(text)
    if unknown and not problems:
        return f"{'; '.join(unknown)}: it may stand there under another name"
    return Seen(
        value=largest if largest or not problems else math.inf,
        differs="; ".join(problems),
        equal="each run saved what its ranks held",
        fault=bool(problems),
    )


def _by_saved_name(weights: Weights) -> Weights:
    """Take out of the names what peft 0.21 adds, to those in the model or to those in the file."""
    return {
        name.removeprefix("base_model.model.").replace(".default.", "."): tensor
        for name, tensor in weights.items()
    }
