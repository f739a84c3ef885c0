"""The load of a parameter server: its traffic and memory beside a worker's and an all-reduce's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from toolkit.measuring.traffic import ring_factor
from toolkit.records.fields import ServerLoad, Serving

STATES = ("parameters_bytes", "gradients_bytes", "optimizer_bytes")


def load_of(ranks: Sequence[dict[str, Any]]) -> ServerLoad:
    """Return a record's `server` from the `Recorder` measurements of all ranks, in rank order."""
    serving: Serving = ranks[0]["serving"]
    server = ranks[serving["rank"]]
    workers = [rank for rank in ranks if rank is not server]
    return ServerLoad(
        rank=serving["rank"],
        workers=serving["workers"],
        received_bytes=_moved(server, "receive", "gradients"),
        sent_bytes=_moved(server, "send", "parameters"),
        expected_bytes=serving["workers"] * serving["pushed_bytes"],
        worker_sent_bytes=max(_moved(rank, "send", "gradients") for rank in workers),
        worker_received_bytes=max(_moved(rank, "receive", "parameters") for rank in workers),
        all_reduce_bytes=serving["pushed_bytes"] * ring_factor("all_reduce", len(ranks)),
        states_bytes=_states(server),
        buffer_bytes=server["serving"]["buffer_bytes"],
        worker_states_bytes=max(map(_states, workers)),
    )


def _moved(rank: dict[str, Any], kind: Literal["send", "receive"], purpose: str) -> int:
    return sum(
        calls["payload_bytes"]
        for calls in rank["traffic"]["collectives"]
        if (calls["kind"], calls["purpose"]) == (kind, purpose)
    )


def _states(rank: dict[str, Any]) -> int:
    return sum(rank["memory"][name] for name in STATES)
