"""The machines of a launch: their names, and which of them is gone when a rank loses a neighbour.

The first rank of every machine leaves a sign of life, each second, in the store where the ranks
met; the launcher of machine 0 keeps it. A machine whose signs end is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from torch import distributed

from toolkit.errors import MachineLostError
from toolkit.escaping import one_line
from toolkit.launching.ranks import local_rank, say
from toolkit.launching.ranks import machine as number
from toolkit.launching.ranks import machines as count
from toolkit.launching.status import RankError

SIGN_SECONDS: Final = 1.0
CLOSED: Final = "the ranks' meeting point there has closed"

GONE_SECONDS: Final = 4.0
"""Silence after which a machine is gone, once a collective has failed."""

LISTENING_SECONDS: Final = 10.0
"""Longest time for which a rank that lost a neighbour waits for a machine's silence."""

SILENT_SECONDS: Final = 30.0
"""Silence that is said while no collective has failed: with NCCL a rank may only wait then."""

MEETING_SECONDS: Final = 10.0
"""Time in which a rank that waits for a machine that has left may fail by itself."""

AGAIN_SECONDS: Final = 60.0
"""Time after which a store that could not be reached is tried again."""

ADVICE: Final = (
    "Its log says more, and this machine ends with it. Start all of them again; with "
    "--resume_from_checkpoint they go on from the last checkpoint."
)


def of_ranks(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each machine's name and ranks, from every rank's `machine` (number and host name).

    The name is None on one machine: there it tells nothing apart.
    """
    machines: dict[int, dict[str, Any]] = {}
    for rank in ranks:
        place, name = rank["machine"]
        machines.setdefault(place, {"name": name, "ranks": []})["ranks"].append(rank["rank"])
    if len(machines) == 1:
        return [machine | {"name": None} for machine in machines.values()]
    return [machines[place] for place in sorted(machines)]


@contextlib.contextmanager
def watched(*, meeting: bool = False) -> Generator[None]:
    """Exchange signs of life with the other machines while the body lasts.

    Args:
        meeting: Whether the ranks meet in the body: a machine that leaves meanwhile has failed, and
            this process ends with a sentence. Torch would wait for it for half an hour, or for 10
            minutes with NCCL.

    Raises:
        MachineLostError: the body lost a neighbour, and a machine is gone.
    """
    if count() == 1:
        yield
        return
    if local_rank() != 0:
        try:
            yield
        except Exception as error:
            if RankError.of(error).is_echo:
                time.sleep(LISTENING_SECONDS)  # launchers end all ranks when the first one leaves
            raise
        return
    signs = MachineSigns(number=number(), machines=count(), meeting=meeting)
    signs.start()
    goes_on = False
    try:
        yield
        goes_on = meeting
    except Exception as error:
        if RankError.of(error).is_echo and (gone := signs.first_gone()) is not None:
            raise MachineLostError(gone) from error
        raise
    finally:
        signs.stop(left=not goes_on)


@dataclass(eq=False)
class MachineSigns:
    """The signs of life of all machines, of which this one leaves its own."""

    number: int
    machines: int
    meeting: bool = False
    _names: dict[int, str] = field(default_factory=dict[int, str])
    _beats: dict[int, int] = field(default_factory=dict[int, int])
    _heard: dict[int, float] = field(default_factory=dict[int, float])
    _left: set[int] = field(default_factory=set[int])
    _said: set[int] = field(default_factory=set[int])
    _store_gone: bool = False

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._leaves = False
        self._thread = threading.Thread(target=self._run, name="toolkit-machines", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, left: bool) -> None:
        """End the signs; if `left`, say to the others that this machine has left of itself."""
        self._leaves = left
        self._over.set()
        self._thread.join(SIGN_SECONDS)

    def first_gone(self) -> str | None:
        """Return a sentence about the machine that is gone, else about the first that has left.

        None if all of them are there.
        """
        until = time.monotonic() + LISTENING_SECONDS
        while time.monotonic() < until:
            if self._store_gone and self.number != 0:
                return self._gone(0, CLOSED)
            for machine, silence in self._silences().items():
                if silence >= GONE_SECONDS:
                    return self._gone(machine, f"no sign of life for {silence:.0f} s")
            time.sleep(SIGN_SECONDS / 4)
        return self._has_left() if self._left else None

    def _silences(self) -> dict[int, float]:
        """Return the seconds since each other machine's last sign; one that left is not silent."""
        now = time.monotonic()
        heard = {**self._heard}
        return {machine: now - at for machine, at in heard.items() if machine not in self._left}

    def _has_left(self) -> str:
        return f"{self._named(min(self._left))} has left its training. {ADVICE}"

    def _gone(self, machine: int, why: str) -> str:
        return (
            f"{self._named(machine)} is gone: {why}. Its launcher was killed or has ended, or the "
            f"machine or its network is down. {ADVICE}"
        )

    def _named(self, machine: int) -> str:
        name = self._names.get(machine)
        return f"Machine {machine}" if name is None else f"Machine {machine} ({name})"

    # In the thread

    def _run(self) -> None:
        try:
            store = _connected()
            beat, waited = 0, 0.0
            while not self._over.wait(SIGN_SECONDS if beat else 0):
                beat += 1
                self._leave_sign(store, beat)
                self._read_signs(store)
                waited = waited + SIGN_SECONDS if self.meeting and self._left else 0.0
                if waited > MEETING_SECONDS:
                    self._end_process(self._has_left())
            self._leave_sign(store, beat, left=self._leaves)
        except (RuntimeError, KeyError, ValueError):
            # The store ended with machine 0, or no launcher has named one.
            self._store_gone = not self._over.is_set()
            ends = self.meeting and self._store_gone and self.number != 0
            if ends and not self._over.wait(MEETING_SECONDS):
                self._end_process(self._gone(0, CLOSED))

    def _end_process(self, why: str) -> None:
        """End this process, whose other threads wait for a machine that will not come."""
        print(f"toolkit: {one_line(why)}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)

    def _leave_sign(self, store: Any, beat: int, *, left: bool = False) -> None:
        sign = {"name": socket.gethostname(), "beat": beat, "left": left}
        store.set(_key(self.number), json.dumps(sign))

    def _read_signs(self, store: Any) -> None:
        for machine in range(self.machines):
            if machine == self.number or not store.check([_key(machine)]):
                continue
            sign = json.loads(store.get(_key(machine)))
            if sign["beat"] != self._beats.get(machine):
                self._beats[machine], self._names[machine] = sign["beat"], sign["name"]
                self._heard[machine] = time.monotonic()
                self._said.discard(machine)
            # torchelastic may start a machine that has left again.
            (self._left.add if sign["left"] else self._left.discard)(machine)
        for machine, silence in self._silences().items():
            if silence >= SILENT_SECONDS and machine not in self._said:
                self._said.add(machine)
                say(f"{self._named(machine)} has given no sign of life for {silence:.0f} s.")


class Meeting:
    """Texts that ranks leave for each other in the store where they met."""

    def __init__(self) -> None:
        self._store: Any = None
        self._gone = False
        self._not_before = 0.0

    def put(self, name: str, text: str) -> None:
        """Leave a text; without effect where the store cannot be reached."""
        self._ask(lambda store: store.set(f"toolkit/text/{name}", text))

    def get(self, name: str) -> str | None:
        """Return a text; None where there is none, or the store cannot be reached."""
        key = f"toolkit/text/{name}"
        return self._ask(lambda store: store.get(key).decode() if store.check([key]) else None)

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        if self._gone or time.monotonic() < self._not_before:
            return None
        try:
            self._store = self._store or _connected()
            return question(self._store)
        except (RuntimeError, KeyError, ValueError):
            # Before the ranks have met there may be none yet; one that has ended does not return.
            self._gone = self._store is not None
            self._not_before = time.monotonic() + AGAIN_SECONDS
            return None


def meeting() -> Meeting | None:
    """Return the texts of a launch on several machines; on one, a folder is enough."""
    return Meeting() if count() > 1 else None


def _connected() -> Any:
    return distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=LISTENING_SECONDS),
    )


def _key(machine: int) -> str:
    return f"toolkit/machine/{machine}"
