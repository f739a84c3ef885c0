"""Why a run sends more or less than the papers say, in words, from what it counted.

The volume of the papers is that of `planning.speed.traffic.textbook`: 2 psi for data parallelism
and ZeRO-1/2, 3 psi where parameters are sharded, for a step of one micro-batch. What is known of
the libraries' own ways (see that module) is named only where the counted bytes show it.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from toolkit.comparing.report.row_facts import reason_for
from toolkit.records.fields import Traffic
from toolkit.records.results import Row
from toolkit.strategies import STRATEGIES, Strategy

PADDING: Final = 1e-3
"""Share below which a difference is that of tensors padded to the ranks."""

EQUAL: Final = "equal"
NOTHING: Final = "nothing to send"


def difference_in_words(row: Row) -> str:
    """Return `equal`, or by how much a run is off the papers and what makes the difference.

    Only of gradients and parameters: norms, buffers and counts are no part of the papers' volume.
    """
    traffic = row["traffic"]
    if traffic is None:
        return reason_for(row, "traffic")
    papers, sent = traffic["textbook_elements"], traffic["sent_elements"]
    if not papers:
        return NOTHING
    if sent == papers:
        return EQUAL
    reasons = _reasons(traffic, STRATEGIES.get(row["strategy"]))
    if not reasons:
        near = abs(sent - papers) <= PADDING * papers
        reasons = ["tensors are padded to the ranks" if near else "the reason is not known"]
    return f"{sent / papers:.2f} times: {'; '.join(reasons)}"


def _reasons(traffic: Traffic, strategy: Strategy | None) -> list[str]:
    trained, everything = traffic["trained_elements"], traffic["all_elements"]
    if strategy is None or not trained or not everything:
        return []
    sent = Counter[tuple[str, str]]()
    for one in traffic["collectives"]:
        sent[one["purpose"], one["kind"]] += one["elements"]
    return [
        *_of_gradients(sent, trained, strategy),
        *_of_parameters(sent, everything, traffic["micro_batches"], strategy),
    ]


def _of_gradients(sent: Counter[tuple[str, str]], trained: int, strategy: Strategy) -> list[str]:
    reasons: list[str] = []
    reduced = sent["gradients", "all_reduce"]
    if reduced and strategy.replicas > 1:
        reasons.append("gradients are all-reduced between the replicas besides")
    elif reduced and strategy.shards_optimizer:
        reasons.append("DeepSpeed all-reduces gradients where the paper reduce-scatters them")
    times = round(max(reduced, sent["gradients", "reduce_scatter"]) / trained)
    if times > 1:
        reasons.append(f"gradients are reduced in each of {times} micro-batches")
    return reasons


def _of_parameters(
    sent: Counter[tuple[str, str]], everything: int, micro_batches: int, strategy: Strategy
) -> list[str]:
    gathered = sent["parameters", "all_gather"]
    if not strategy.shards_parameters or not gathered:
        return []
    reasons: list[str] = []
    if micro_batches > 1:
        reasons.append(f"parameters are gathered in each of {micro_batches} micro-batches")
    twice = 2 if strategy.gathers_again else 1
    share = gathered / micro_batches / everything
    if twice - share > PADDING:
        what = (
            "ZeRO-3 keeps what stays below stage3_max_live_parameters between forward and backward"
            if strategy.sharding == "tensors"
            else "what is outside of the layers is not freed between forward and backward"
        )
        reasons.append(f"{what}, so {share:.2f} psi are gathered each time where the paper has 2")
    elif share - twice > PADDING:
        reasons.append(f"{share:.2f} psi are gathered each time where the paper has {twice}")
    return reasons
