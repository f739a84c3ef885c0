"""What went into a step: rows, what forward makes of them, and what each counts for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from toolkit.comparing.bisect import reading
from toolkit.comparing.bisect.pair import SCALE_TOLERANCE, Pair, Seen, factor_in_words
from toolkit.comparing.bisect.reading import Key, Placed, Rows, listed


def batch(pair: Pair) -> Seen | str:
    """Rows that only one side read, read more often, or read with other tokens or labels."""
    ours, theirs = pair.rows
    if not ours or not theirs:
        return "the model was not given input_ids and labels"
    counts = [Counter({key: len(found) for key, found in rows.items()}) for rows in pair.rows]
    extra = sorted((counts[1] - counts[0]).keys(), key=str)
    missing = sorted((counts[0] - counts[1]).keys(), key=str)
    problems = _read_twice(
        [key for key in extra if key in ours or counts[1][key] > 1], theirs, pair
    )
    only = [key for key in extra if key not in ours]
    problems += [f"{listed(only)} is read by {pair.other} and not by {pair.one}"] if only else []
    problems += (
        [f"{listed(missing)} is read by {pair.one} and {_less(missing, theirs)} by {pair.other}"]
        if missing
        else []
    )
    for what in ("tokens", "labels"):
        other = [
            key
            for key in ours
            if key in theirs and len(ours[key]) == len(theirs[key]) and _other(key, what, pair.rows)
        ]
        problems += [f"the {what} of {listed(other)} differ"] if other else []
    number = sum(counts[0].values())
    return Seen(
        value=float(len(problems)),
        differs="; ".join(problems),
        equal=f"the same {number} rows, tokens and labels",
    )


def row_losses(pair: Pair) -> Seen | str:
    """The largest difference in the loss of one row, per token: what forward makes of it."""
    worst, shown = 0.0, ""
    compared = False
    for key, one, other in _common(pair):
        ours, theirs = one.loss_per_token, other.loss_per_token
        if ours is None or theirs is None:
            continue
        compared = True
        gap = abs(theirs - ours)
        if not gap <= worst:
            worst = gap
            shown = (
                f"row {key} has a loss of {ours:.6f} a token in {pair.one} and {theirs:.6f} in "
                f"{pair.other}, from the same tokens: forward computes something else"
            )
    return Seen(value=worst, differs=shown) if compared else "the model gave no logits"


def loss_weighting(pair: Pair) -> Seen | str:
    """The largest relative difference in what a token counts for in the averaged gradient."""
    ratios = {
        key: (other.weight / one.weight, other)
        for key, one, other in _common(pair)
        if one.weight and other.weight is not None
    }
    if not ratios:
        return "the model gave no loss, or no logits to read the loss of each row from"
    key, (ratio, _) = max(ratios.items(), key=lambda item: abs(item[1][0] - 1))
    found = [each for each, _ in ratios.values()]
    low, high = min(found), max(found)
    if high - low <= SCALE_TOLERANCE * abs(low):
        words = (
            f"every token counts {ratio:.3g} times as much in {pair.other} as in {pair.one}"
            f"{factor_in_words(ratio, pair)}"
        )
    elif _averages_batches(pair):
        words = (
            f"{pair.other} averages its micro-batches by themselves, however many tokens each has: "
            f"a token counts {low:.3g} to {high:.3g} times as much as in {pair.one}"
        )
    else:
        words = (
            f"a token of row {key} counts {ratio:.3g} times as much in {pair.other} as in "
            f"{pair.one}; over all rows {low:.3g} to {high:.3g} times"
        )
    return Seen(value=abs(ratio - 1), differs=words)


def notes(pair: Pair) -> Iterator[str]:
    """Yield what differs and is no fault: the sum over a step has no order."""
    one, other = (reading.grouping(each) for each in pair.evidence)
    orders = [reading.order(each, by_id=pair.by_id) for each in pair.evidence]
    if one != other:
        yield f"the rows are read by {pair.one} as {one}, by {pair.other} as {other}"
    if orders[0] != orders[1] and Counter(orders[0]) == Counter(orders[1]):
        yield f"the same rows are read in another order by {pair.other}, within the step"


def _common(pair: Pair) -> Iterator[tuple[Key, Placed, Placed]]:
    """Yield the rows that both sides read with the same tokens and labels."""
    ours, theirs = pair.rows
    for key in ours.keys() & theirs.keys():
        for one, other in zip(ours[key], theirs[key], strict=False):
            if one.content == other.content:
                yield key, one, other


def _read_twice(keys: list[Key], rows: Rows, pair: Pair) -> list[str]:
    if not keys:
        return []
    ranks = sorted({each.rank for each in rows[keys[0]]})
    where = f"by rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"
    times = {1: "once", 2: "twice"}.get(len(rows[keys[0]]), f"{len(rows[keys[0]])} times")
    return [f"{listed(keys)} is read {times} in {pair.other}, {where}"]


def _less(keys: list[Key], rows: Rows) -> str:
    return "less often" if keys[0] in rows else "not"


def _other(key: Key, what: str, rows: tuple[Rows, Rows]) -> bool:
    found = [sorted(each.content[what == "labels"] for each in side[key]) for side in rows]
    return found[0] != found[1]


def _averages_batches(pair: Pair) -> bool:
    """Whether the second run gives each micro-batch the same say, whatever it holds."""
    evidence = pair.evidence[1]
    says = [
        (reading.token_weight(each, num_processes=evidence["num_processes"]) or 0.0)
        * sum(row["supervised"] for row in each["rows"])
        for batches in evidence["ranks"]
        for each in batches
        if any(row["supervised"] for row in each["rows"])
    ]
    return max(says) - min(says) <= SCALE_TOLERANCE * max(map(abs, says))
