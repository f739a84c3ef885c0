"""Parameter server: the bytes at one rank, beside those of a worker and of an all-reduce."""

from __future__ import annotations

from toolkit.comparing.report.grid import Section, columns_of, grid
from toolkit.comparing.report.row_facts import measured
from toolkit.comparing.report.words import size
from toolkit.records.fields import ServerLoad
from toolkit.records.results import Results, Row

TEXT = (
    "Rank 0 receives the gradients of every other rank and sends each of them the new weights, so "
    "its bytes grow with the number of workers. In a ring's all-reduce, as under `ddp`, each rank "
    "sends, and receives, less than twice its gradients with any number of ranks. That is why "
    "parameter servers went away for such models. States are parameters, gradients and optimizer "
    "states; the server's buffers have room for the largest gradient of each worker."
)


def server(results: Results) -> Section | None:
    """Return the load of each parameter server; None without one."""
    served = [(row, load) for row in measured(results) if (load := row.get("server")) is not None]
    if not served:
        return None
    section = grid([row for row, _ in served], columns_of("server"), text=TEXT)
    notes = [_beside_all_reduce(row, load) for row, load in served]
    return section._replace(notes=[*notes, *section.notes])


def _beside_all_reduce(row: Row, load: ServerLoad) -> str:
    ratio = load["received_bytes"] / load["all_reduce_bytes"]
    return (
        f"{row['name']}: with {load['workers'] + 1} ranks, {size(load['received_bytes'])} arrive "
        f"at the server in a step, {ratio:.2f} times as much as at each rank of an all-reduce "
        f"({size(round(load['all_reduce_bytes']))}), and as many leave it"
    )
