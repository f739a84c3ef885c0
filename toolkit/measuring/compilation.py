"""What torch.compile did in this process: graphs, breaks, recompilations, and seconds."""

from __future__ import annotations

import time
from typing import Any


class Compilation:
    """Counts from now on, until `stop`; it imports torch's compiler.

    torch has no public counter (2.11 to 2.14): these are the callbacks and counters that its own
    reports are made from. tests/training/test_speed_switches.py fails when they move.
    """

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler

        self.seconds: list[float] = []
        """Of each compilation, a layer's backward apart from its forward."""

        self._ids: set[str] = set()
        self._breaks_before = _breaks()
        self._begun: list[float] = []
        callback_handler.register_start_callback(self._starts)
        callback_handler.register_end_callback(self._ends)

    def stop(self) -> None:
        from torch._dynamo.callback import callback_handler

        callback_handler.remove_start_callback(self._starts)
        callback_handler.remove_end_callback(self._ends)

    def facts(self) -> dict[str, Any]:
        """Return the counts so far: a recompilation is any compilation of a frame but its first."""
        return {
            "graphs": len(self._ids),
            "recompilations": sum(not name.endswith("/0") for name in self._ids),
            "graph_breaks": _breaks() - self._breaks_before,
            "compile_seconds": round(sum(self.seconds), 1),
        }

    def _starts(self, args: Any) -> None:
        self._ids.add(args.compile_id)
        self._begun.append(time.perf_counter())

    def _ends(self, _: Any) -> None:
        if self._begun:
            self.seconds.append(time.perf_counter() - self._begun.pop())


def _breaks() -> int:
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())
