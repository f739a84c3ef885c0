"""Traffic: bytes that a rank sends in an optimizer step, beside the planner's and the papers'.

Also the slots of pipelines and the load of a parameter server in a step.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from toolkit.backends import backend_of
from toolkit.backends.base import Backend
from toolkit.comparing.predicted import MOVED
from toolkit.comparing.report.row_facts import RUN, columns_of, measured, reason_for, runs_grid
from toolkit.comparing.report.sections.memory import not_predicted
from toolkit.comparing.report.words import number, size
from toolkit.records.fields import ServerLoad, Traffic
from toolkit.records.record import strategy_of
from toolkit.records.results import Results, Row
from toolkit.strategies import Strategy
from toolkit.tables.grid import Section

OTHER: Final = "other"

PADDING: Final = 1e-3
"""Share below which a difference is due to padding of tensors to the number of ranks."""

SLOTS = (
    "A slot is the time of one forward of one micro-batch in one stage; a backward takes two. The "
    "order of the work is the one that each rank recorded, and the bubble is the share of idle "
    "slots among those of all ranks. It is no time: stages may differ in length, and sending is "
    "not counted."
)

SERVED = (
    "Rank 0 receives the gradients of every other rank and sends each of them the new weights, so "
    "its bytes grow with the number of workers. In a ring's all-reduce, as under `ddp`, each rank "
    "sends, and receives, less than twice its gradients with any number of ranks. That is why "
    "parameter servers went away for such models. States are parameters, gradients and optimizer "
    "states; the server's buffers have room for the largest gradient of each worker."
)


def moved_by_purpose(traffic: Traffic) -> Counter[str]:
    """Return the payload in bytes of parameters, of gradients, and of all `other`."""
    moved = Counter[str]()
    for collective in traffic["collectives"]:
        purpose = collective["purpose"] if collective["purpose"] in MOVED else OTHER
        moved[purpose] += collective["payload_bytes"]
    return moved


def wire_bytes(traffic: Traffic) -> int:
    """Return all bytes that one rank sends with the ring algorithm."""
    return round(sum(collective["wire_bytes"] for collective in traffic["collectives"]))


def sent(results: Results) -> Section:
    """Return the payload by purpose, the bytes on the wire, and the difference to the papers."""
    good = measured(results)
    rows = [_line(row, traffic) for row in good if (traffic := row["traffic"]) is not None]
    if not rows:
        return Section("No run took a second step on ragged rows, in which it is counted.")
    header = [RUN, *MOVED, OTHER, "on the wire", "planner's error", "beside the papers' volume"]
    text = (
        "Payload of the collectives in the step after the first, as the calls name it: the worst "
        "rank. `other` are norms, counts, buffers and logged losses. On the wire is what a rank "
        "sends of all that with the ring algorithm. The last column sets the elements of "
        "parameters and gradients against the papers' 2 psi (DDP, ZeRO-1/2) and 3 psi (ZeRO-3, "
        "FSDP) for a step of one micro-batch, and those of a parameter server, the worst rank, "
        "against (N - 1) psi; psi is the number of parameters."
    )
    notes = [
        f"{row['name']}: {reason_for(row, 'traffic')}" for row in good if row["traffic"] is None
    ]
    notes += [
        f"{row['name']}, counted differently by ranks: {line}"
        for row in good
        if row["traffic"] is not None
        for line in row["traffic"]["disagreements"]
    ]
    return Section(text, header, rows, [*notes, *not_predicted(good, "traffic_bytes")])


def _line(row: Row, traffic: Traffic) -> list[str]:
    error = row["predicted"]["errors"].get("traffic_bytes")
    moved = moved_by_purpose(traffic)
    shown = "equal" if error == 0 else number(error, "{:+.2%}")
    return [
        row["name"],
        *(size(moved[purpose]) for purpose in (*MOVED, OTHER)),
        size(wire_bytes(traffic)),
        shown,
        difference_in_words(row),
    ]


def collectives(results: Results, *, of_states: bool) -> Section | None:
    """Return every collective of one optimizer step; None where there is none.

    Args:
        of_states: Select the collectives of parameters and gradients, or all others.
    """
    rows = [
        [
            row["name"],
            collective["kind"].replace("_", "-"),
            collective["purpose"],
            collective["dtype"],
            str(collective["ranks"]),
            f"{collective['calls']:,}",
            size(collective["payload_bytes"]),
            size(round(collective["wire_bytes"])),
        ]
        for row in measured(results)
        if (traffic := row["traffic"]) is not None
        for collective in traffic["collectives"]
        if (collective["purpose"] in MOVED) == of_states
    ]
    if not rows:
        return None
    header = [RUN, "collective", "purpose", "dtype", "ranks", "calls", "payload", "on the wire"]
    text = (
        "One line a kind, purpose, type and group; payload in all its calls, and what a rank sends "
        "of it with the ring algorithm."
        if of_states
        else "What is sent besides: buffers, bitmaps, norms, counts, logged losses and the guards' "
        "heartbeat."
    )
    words = ("purpose", "dtype")
    return Section(text, header, rows, names=2, words=words, folded=True)


def difference_in_words(row: Row) -> str:
    """Return `equal`, or by how much a run differs from the papers and the cause.

    The papers' volume is `textbook` of a backend: 2 psi for data parallelism and
    ZeRO-1/2, 3 psi where parameters are sharded, for a step of one micro-batch, without norms,
    buffers and counts. The modules of `backends` tell how libraries deviate; that is given as a
    cause only where the counted bytes show it.
    """
    traffic = row["traffic"]
    if traffic is None:
        return reason_for(row, "traffic")
    papers, sent = traffic["textbook_elements"], traffic["sent_elements"]
    if not papers:
        return "nothing to send"
    if sent == papers:
        return "equal"
    strategy = strategy_of(row)
    reasons = _reasons(traffic, strategy)
    if not reasons:
        near = abs(sent - papers) <= PADDING * papers
        reasons = ["tensors are padded to the ranks" if near else "the reason is not known"]
        as_planned = row["predicted"]["errors"].get("traffic_bytes") == 0
        if strategy is not None and strategy.tensor > 1 and as_planned:
            # The planner, which counts the same, knows what a group does not split.
            reasons = ["each rank of a tensor group has the norms whole"]
    return f"{sent / papers:.2f} times: {'; '.join(reasons)}"


def _reasons(traffic: Traffic, strategy: Strategy | None) -> list[str]:
    if strategy is None:
        return []
    backend = backend_of(strategy)
    if backend.in_stages:
        return ["stages differ in size, and the fullest is counted"]
    trained = traffic["trained_elements"] // strategy.tensor
    everything = traffic["all_elements"] // strategy.tensor
    if not trained or not everything:
        return []
    sent = Counter[tuple[str, str]]()
    for calls in traffic["collectives"]:
        sent[calls["purpose"], calls["kind"]] += calls["elements"]
    reasons = _of_parameters(sent, everything, traffic["micro_batches"], backend)
    return [*_of_gradients(sent, trained, backend), *reasons]


def _of_gradients(sent: Counter[tuple[str, str]], trained: int, backend: Backend) -> list[str]:
    reduced = sent["gradients", "all_reduce"]
    reasons = [backend.all_reduces] if reduced and backend.all_reduces else []
    times = round(max(reduced, sent["gradients", "reduce_scatter"]) / trained)
    if times > 1:
        reasons.append(f"gradients are reduced in each of {times} micro-batches")
    return reasons


def _of_parameters(
    sent: Counter[tuple[str, str]], everything: int, micro_batches: int, backend: Backend
) -> list[str]:
    gathered = sent["parameters", "all_gather"]
    papers = backend.gathers()
    if not papers or not gathered:
        return []
    reasons: list[str] = []
    if micro_batches > 1:
        reasons.append(f"parameters are gathered in each of {micro_batches} micro-batches")
    share = gathered / micro_batches / everything
    each_time = f"{share:.2f} psi are gathered each time where the paper has"
    if papers - share > PADDING:
        reasons.append(f"{backend.stays_gathered}, so {each_time} 2")
    elif share - papers > PADDING:
        reasons.append(f"{each_time} {papers}")
    return reasons


def pipelines(results: Results) -> Section | None:
    """Return the counted bubble of each pipeline beside its formula; None without a pipeline."""
    rows = [row for row in measured(results) if row.get("pipeline") is not None]
    return runs_grid(rows, columns_of("pipeline"), text=SLOTS) if rows else None


def server(results: Results) -> Section | None:
    """Return the load of each parameter server; None without one."""
    served = [(row, load) for row in measured(results) if (load := row.get("server")) is not None]
    if not served:
        return None
    section = runs_grid([row for row, _ in served], columns_of("server"), text=SERVED)
    notes = [_beside_all_reduce(row, load) for row, load in served]
    return section._replace(notes=[*notes, *section.notes])


def _beside_all_reduce(row: Row, load: ServerLoad) -> str:
    ratio = load["received_bytes"] / load["all_reduce_bytes"]
    return (
        f"{row['name']}: with {load['workers'] + 1} ranks, {size(load['received_bytes'])} arrive "
        f"at the server in a step, {ratio:.2f} times as much as at each rank of an all-reduce "
        f"({size(round(load['all_reduce_bytes']))}), and as many leave it"
    )
