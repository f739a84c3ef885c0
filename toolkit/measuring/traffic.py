"""Traffic: every collective call of one rank in one optimizer step.

A dispatch mode sees the `c10d` calls of DDP (its C++ reducer's too), `fully_shard` and DeepSpeed
alike. It reads only sizes and dtypes, no value, so it never waits for a device, and losses stay the
same to the last bit. It stays for one step; the other steps run without it.

The mode belongs to a thread. Backward on a GPU runs in a thread of autograd's own, which takes over
the modes of the thread that called it (`at::ThreadLocalState`, as it does autocast), so its
collectives are counted as well. Calls of a library in threads that it started itself are not.

A call counts under its own name, even if the transport carries it by a ring, a tree or, for gloo's
reduce-scatter, an all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit import backends
from toolkit.engines.backend import backend_of
from toolkit.engines.hooks import Undo
from toolkit.engines.tensors import dtype_name, elements_of, is_spread_type, tensors_in
from toolkit.jobs.terms import ring_factor
from toolkit.strategies import Strategy

Phase = Literal["forward", "backward", "clipping", "step", "guards"]

NOT_COUNTED = (
    "counted in the optimizer step after the first that updated, and the run ended before it, or "
    "had only packed rows left"
)

NAMESPACES = {"c10d", "_c10d_functional", "c10d_functional", "_dtensor"}

OF_SHARDS = {"_allgather_base_", "_reduce_scatter_base_"}
"""Calls of `fully_shard`, which may use the group of ranks that share rows."""

OPAQUE = {"deepspeed::dim_zero_all_to_all"}
"""Operations of other libraries with a collective inside, which the mode does not see."""

CALLS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "all_gather_into_tensor_out": ("all_gather", 0),
    "all_gather_into_tensor_coalesced": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 0),
    "shard_dim_alltoall": ("all_to_all", 0),
    "dim_zero_all_to_all": ("all_to_all", 0),
    "broadcast_": ("broadcast", 0),
    "broadcast": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "send": ("send", 0),
    "isend": ("send", 0),
    "recv_": ("receive", 0),
    "irecv": ("receive", 0),
    "recv_any_source_": ("receive", 0),
    "barrier": ("barrier", None),
    "monitored_barrier_": ("barrier", None),
}
"""Operation -> kind, and the argument whose tensors are counted (torch 2.11 to 2.15)."""

PARTS = {
    "all_gather_into_tensor",
    "all_gather_into_tensor_out",
    "all_gather_into_tensor_coalesced",
    "gather_",
    "scatter_",
}
"""Operations whose counted argument is one rank's part, on every rank of the group."""

NO_TRAFFIC = {"wait_tensor", "check_for_nan", "_wrap_tensor_autograd"}


class Calls(NamedTuple):
    """The key under which calls are counted together."""

    kind: str
    purpose: str
    dtype: str
    ranks: int


class CountingMode(TorchDispatchMode):
    """Sees every operation of a rank from `begin_counting` to `stop`, which removes all hooks."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.running = False
        self._hooks = ExitStack()

    def begin_counting(self, *undos: Undo) -> None:
        """Enter the mode; `stop` leaves it, and calls `undos`, the last first."""
        for undo in undos:
            self._hooks.callback(undo)
        self._hooks.enter_context(self)
        self.running = True

    def stop(self) -> None:
        """Stop counting. A second call has no effect."""
        self.running = False
        self._hooks.close()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile keep its compiled graphs under the mode, where it would fall back."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch turns an operation of DTensors into operations on plain tensors and collectives,
        # which the mode sees as well.
        if any(map(is_spread_type, types)):
            return NotImplemented
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation on plain tensors, and count it."""
        raise NotImplementedError


class Ledger(CountingMode):
    """Counts calls and elements of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Calls] = Counter()
        self.elements: Counter[Calls] = Counter()
        self._sizes: dict[str, int] = {}
        self._phase: Phase | None = None
        self._buffers: set[torch.dtype] = set()
        self._sharing: tuple[str, ...] = ()

    def start(self, model: Any) -> None:
        """Count from zero; the passes of the prepared model tell purposes apart."""
        self.calls.clear()
        self.elements.clear()
        self._buffers = {buffer.dtype for buffer in model.buffers()}
        self._sharing = backend_of(model).model_parallel_groups()
        self._phase = None
        self.begin_counting(
            model.register_forward_pre_hook(self._forward_begins, prepend=True).remove,
            model.register_forward_hook(self._forward_ended, always_call=True).remove,
            backend_of(model).watch_passes(self.within),
        )

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Run the body as this phase of a step; free of cost while the ledger is off."""
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    def counted(self) -> list[dict[str, Any]]:
        """Return one row for each kind, purpose, dtype and size of group, in a stable order."""
        rows = sorted(self.calls, key=lambda row: (_ORDER.index(row.purpose), row))
        payload = {row: self.elements[row] * self._sizes[row.dtype] for row in rows}
        return [
            row._asdict()
            | {
                "calls": self.calls[row],
                "elements": self.elements[row],
                "payload_bytes": payload[row],
                "wire_bytes": payload[row] * ring_factor(row.kind, row.ranks),
            }
            for row in rows
        ]

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        schema = getattr(func, "_schema", None)  # an operator of a higher order has none
        is_opaque = schema is not None and schema.name in OPAQUE
        if getattr(func, "namespace", None) in NAMESPACES or is_opaque:
            self._count(func, args, kwargs)
        return func(*args, **kwargs)

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        name = func._schema.name.partition("::")[2]
        if name in NO_TRAFFIC:
            return
        given = arguments_of(func, args, kwargs)
        ranks, group = group_of(given)
        # An operation that is not known, from a later torch, is shown under its own name.
        kind, position = CALLS.get(name, (name.strip("_"), 0))
        tensors = list(tensors_in(list(given.values())[position or 0]))
        times = 0 if position is None else ranks if name in PARTS else 1
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            elements = times * sum(t.numel() for t in tensors if t.dtype == dtype)
            shared = is_among_sharers(name, group, self._sharing)
            purpose = self._purpose(kind, dtype, elements, ranks, shared=shared)
            row = Calls(kind, purpose, dtype_name(dtype), ranks)
            self._sizes[row.dtype] = dtype.itemsize
            self.calls[row] += 1
            self.elements[row] += elements

    def _purpose(
        self, kind: str, dtype: torch.dtype, elements: int, ranks: int, *, shared: bool
    ) -> str:
        """Name the purpose of a call, as far as its place in the step shows it.

        `shared`: it is among ranks that share layers or rows.
        """
        if kind in ("send", "receive"):
            # A pipeline's passes are not marked; a parameter server's pushes and pulls are.
            return _PURPOSES.get((self._phase or "", kind, True), "activations")
        phase = self._phase
        if phase != "clipping" and torch._C._current_graph_task_id() != -1:
            phase = "backward"
        if phase == "clipping":
            return "norm"
        if phase == "guards":
            return "guards"
        if phase in ("forward", "backward") and shared:
            return "activations"
        if phase is None:
            # Between steps, a single number of each rank is a loss or a count.
            of_a_rank = elements // ranks if kind in ("all_gather", "gather") else elements
            # The last stage of a pipeline tells the others its losses.
            is_told = kind == "broadcast" and shared
            return "metrics" if of_a_rank == 1 or is_told else "other"
        if (phase, kind) == ("forward", "broadcast"):
            if dtype in self._buffers:
                return "buffers"
            return "buckets" if dtype == torch.int32 else "other"
        return _PURPOSES.get((phase, kind, dtype.is_floating_point), "other")

    # Hooks that mark the phases

    def _forward_begins(self, module: Any, *_: Any) -> None:
        # An evaluation between two steps is not part of either.
        self._phase = "forward" if module.training else None

    def _forward_ended(self, *_: Any) -> None:
        self._phase = None


def merged(
    ranks: list[dict[str, Any] | None],
    *,
    server: int | None = None,
    stages: Sequence[int] | None = None,
) -> dict[str, Any] | None:
    """Return a record's `traffic`: each row's maximum over the ranks; None if a rank has none.

    If ranks of one stage differ, `disagreements` names the differences. `stages` are those of the
    ranks in a pipeline; None: all are alike. A parameter server differs from its workers: its own
    rows are kept, and the workers are compared among themselves.
    """
    known = [rank for rank in ranks if rank is not None]
    if not known or len(known) < len(ranks):
        return None
    by_row = [
        {
            Calls(*(counted[name] for name in Calls._fields)): counted
            for counted in rank["collectives"]
        }
        for rank in known
    ]
    most: dict[Calls, dict[str, Any]] = {}
    disagreements: list[str] = []
    for row in dict.fromkeys(row for rows in by_row for row in rows):
        counts = {rank: rows.get(row) for rank, rows in enumerate(by_row)}
        if server is not None and row.kind in ("send", "receive"):
            of_server = counts.pop(server)
            if of_server is not None:
                most[row] = of_server
        else:
            most[row] = max(filter(None, counts.values()), key=lambda count: count["elements"])
        # Activations are as many as the tokens of the rank's rows.
        by_tokens = row.purpose == "activations" and len({rank.get("tokens") for rank in known}) > 1
        of_stages: dict[int, set[Any]] = {}
        for rank, count in counts.items():
            seen = None if count is None else tuple(count.values())
            of_stages.setdefault(0 if stages is None else stages[rank], set()).add(seen)
        if not by_tokens and any(len(seen) > 1 for seen in of_stages.values()):
            numbers = ", ".join(
                f"rank {rank} {'none' if count is None else count['elements']}"
                for rank, count in counts.items()
            )
            disagreements.append(
                f"{row.kind} of {row.purpose} in {row.dtype} over {row.ranks} ranks, "
                f"elements: {numbers}"
            )
    return known[0] | {
        "tokens": max(rank.get("tokens", 0) for rank in known),
        "collectives": list(most.values()),
        "sent_elements": sent_elements(most.values()),
        "disagreements": disagreements,
    }


def sent_elements(counted: Iterable[dict[str, Any]]) -> int:
    """Return the elements of parameters and gradients that a rank sends, for many ranks.

    A ring all-reduces in two passes. Compare it with `textbook_elements`.
    """
    passes = {"all_reduce": 2, "receive": 0}
    return sum(
        row["elements"] * passes.get(row["kind"], 1)
        for row in counted
        if row["purpose"] in ("parameters", "gradients")
    )


def textbook_volume(model: Any, strategy: Strategy, ranks: int) -> dict[str, int]:
    """Return the elements that `textbook` has a rank send for this model, and its inputs."""
    parameters = [parameter for _, parameter in backend_of(model).full_parameters()]
    trained = sum(elements_of(p) for p in parameters if p.requires_grad)
    everything = sum(map(elements_of, parameters))
    twin = backends.backend_of(strategy)
    sent = twin.textbook(trained=trained, everything=everything, ranks=ranks)
    return {"textbook_elements": sent, "trained_elements": trained, "all_elements": everything}


def transport() -> str | None:
    """Return the backend that carries the collectives; None without other ranks."""
    return str(torch.distributed.get_backend()) if torch.distributed.is_initialized() else None


def arguments_of(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by name, in the order of its schema."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return {name: given[name] for name in names if name in given}


def is_among_sharers(name: str, group: str | None, sharing: Sequence[str]) -> bool:
    """Whether a call is among ranks that share layers or rows, and not one of `fully_shard`'s.

    `name` is the operation's, without its namespace; `sharing` are the groups of such ranks.
    """
    return group in sharing and name not in OF_SHARDS


def group_of(given: dict[str, Any]) -> tuple[int, str | None]:
    """Return the ranks of a call's group, and its name; None where the call doesn't have it."""
    c10d: Any = torch.distributed.distributed_c10d
    group: Any = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        group = c10d._resolve_process_group(group)
    if isinstance(group, torch.ScriptObject):
        group = ProcessGroup.unbox(group)
    if "group_size" in given:
        return int(given["group_size"]), None if group is None else str(group.group_name)
    return group.size(), str(group.group_name)


_ORDER = (
    "parameters",
    "gradients",
    "activations",  # between ranks that share layers, and between the stages of a pipeline
    "norm",  # all of clipping, and DeepSpeed's look for overflows
    "buffers",
    "buckets",  # DDP's assignment of parameters to buckets, sent once before its second step
    "bitmap",  # which parameters a rank has used, under DDP's find_unused_parameters
    "metrics",  # outside of all passes, one number a rank or micro-batch: token counts, losses
    "guards",  # the heartbeat: the ranks' exchange about the step
    "other",  # calls at no known place in the step; a save or an evaluation between two steps
)

_PURPOSES = {
    ("forward", "all_gather", True): "parameters",
    ("forward", "all_gather", False): "parameters",  # 4-bit weights are stored as integers
    ("backward", "all_gather", True): "parameters",
    ("backward", "all_gather", False): "parameters",
    ("backward", "all_reduce", True): "gradients",
    ("backward", "all_reduce", False): "bitmap",
    ("backward", "reduce_scatter", True): "gradients",
    ("backward", "send", True): "gradients",  # to a parameter server
    ("backward", "receive", True): "gradients",
    ("step", "send", True): "parameters",
    ("step", "receive", True): "parameters",
    ("step", "all_gather", True): "parameters",
    ("step", "all_reduce", True): "norm",
    ("step", "all_reduce", False): "norm",
}
