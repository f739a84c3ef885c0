"""Whether the kernel's out-of-memory killer struck this process's control group."""

from __future__ import annotations

import re
from pathlib import Path

OWN_GROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


def out_of_memory_kills() -> int | None:
    """Return how many processes of our control group it has killed so far, None if not told."""
    try:
        groups = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return None
    for line in groups:
        _, controllers, path = line.split(":", 2)
        below = path.strip("/")
        if controllers == "":
            counters = MOUNT / below / "memory.events"
        elif "memory" in controllers.split(","):
            counters = MOUNT / "memory" / below / "memory.oom_control"
        else:
            continue
        if (count := _read_count(counters)) is not None:
            return count
    return None


def _read_count(counters: Path) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", counters.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
