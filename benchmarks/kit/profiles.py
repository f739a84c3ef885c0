"""Where the time of a training step goes: kernels by group, gaps of the host, waits for the GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from kit.result import table
from kit.trainers import Watch

PROFILED: Final = 2
"""Steps, the first two after the warm-up."""

GROUPS: Final = {
    "attention": r"flash|fmha|sdpa|attention|flex",
    "products": r"gemm|nvjet|cutlass|cublas|xmma|matmul",
    "loss": r"logsumexp|log_softmax|softmax|nll|cross_entropy|online_softmax|gather|arange",
    "optimizer": r"adam|lerp",
    "clipping": r"norm_kernel|lpnorm|linalg_vector_norm|foreach.*norm|BinaryOpListAlphaFunctor",
    "embedding": r"embedding|index_select|indexing_backward|sort|radix",
    "casts and copies": r"copy|_to_copy_\d+$|memcpy|memset|fill|cat",
    "element-wise, compiled": r"^triton_",
    "element-wise": r"elementwise|reduce|vectorized|multi_tensor",
}
"""Group of a kernel: the first whose pattern its name has."""

ANNOTATIONS: Final = r"ProfilerStep|## Call|Optimizer\.|Torch-Compiled|aten::|autograd::"
"""Names of ranges that the profiler shows on the device beside the kernels within them."""

WAITS: Final = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
"""Calls in which the host waits for the GPU; one copy to unpinned memory waits in the first."""


class Profile(Watch):
    """A watch that profiles some of the steps, where it is on."""

    def __init__(self, *, on: bool, **options: Any) -> None:
        super().__init__(**options)
        self._profiler: Any = None
        self._on = on

    def step_done(self) -> None:
        super().step_done()
        if not self._on:
            return
        if self._done == self.warm_up:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = profile(activities=activities)
            self._profiler.start()
        elif self._done == self.warm_up + min(PROFILED, self.steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._profiler.stop()

    def facts(self) -> dict[str, Any]:
        """Return milliseconds of a step by group, of the busiest kernels, and the host's waits."""
        events = self._profiler.events()
        steps = min(PROFILED, self.steps)
        on_device = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in events
            if event.device_type == torch.autograd.DeviceType.CUDA
            and not re.match(ANNOTATIONS, event.name)
        ]
        kernels: Counter[str] = Counter()
        for name, begin, end in on_device:
            kernels[name] += (end - begin) / 1000 / steps
        groups: Counter[str] = Counter()
        for name, spent in kernels.items():
            groups[group_of(name)] += spent
        busy = union((begin, end) for _, begin, end in on_device) / 1000 / steps
        span = _span(on_device) / 1000 / steps
        waits = Counter(event.name for event in events if event.name in WAITS)
        return {
            "steps": steps,
            "groups_ms": dict(groups.most_common()) | {"gaps of the host": span - busy},
            "span_ms": span,
            "kernels_ms": dict(kernels.most_common(60)),
            "waits": {name: count / steps for name, count in waits.items()},
        }


def group_of(kernel: str) -> str:
    return next(
        (name for name, pattern in GROUPS.items() if re.search(pattern, kernel, re.IGNORECASE)),
        "others",
    )


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length that intervals cover, which may overlap."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def _span(events: Sequence[tuple[str, float, float]]) -> float:
    if not events:
        return 0.0
    return max(end for _, _, end in events) - min(begin for _, begin, _ in events)


def profile_table(facts: dict[str, Any]) -> list[str]:
    """Return groups and kernels as tables of Markdown."""
    span = facts["span_ms"] or 1.0
    rows = [(name, f"{spent:.2f}", f"{spent / span:.1%}") for name, spent in
            facts["groups_ms"].items()]  # fmt: skip
    waits = ", ".join(f"{name} {count:g}" for name, count in facts["waits"].items()) or "none"
    longest = [*facts["kernels_ms"].items()][:25]
    return [
        f"The mean of {facts['steps']} steps under torch's profiler, {facts['span_ms']:.1f} ms "
        f"from the first kernel to the last. The host waits for the GPU, times a step: {waits}.",
        "",
        *table(("group", "ms", "share"), rows),
        "",
        *table(
            ("kernel", "ms a step", "group"),
            [(f"`{name[:110]}`", f"{spent:.2f}", group_of(name)) for name, spent in longest],
        ),
    ]
