"""The toolkit's chunked loss beside torch's `linear_cross_entropy` and the loss of whole logits.

    python benchmarks/chunked_loss.py
    python benchmarks/chunked_loss.py --device cuda --tokens 8192 --vocabulary 128256 --hidden 2048

All of them compute the loss of the same hidden states and head, divided by a number of items as the
Trainer divides it, and both gradients; in fp16 with a factor on the loss, as loss scaling puts it
there. Errors are to the same computation in float64, as parts of the largest entry. Seconds are the
median of rounds in which the variants take turns. Bytes are the most that were allocated at once
beyond inputs and the head. Ratios of both are to whole logits, and those of a CPU say nothing of a
GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from toolkit.records.evidence import IGNORED
from toolkit.training.speed.chunked_loss import chunked_cross_entropy

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

CASES = {
    "fp32": (torch.float32, torch.float32, 1.0),
    "bf16": (torch.bfloat16, torch.bfloat16, 1.0),
    "bf16 autocast": (torch.bfloat16, torch.float32, 1.0),
    "fp16, loss scaled": (torch.float16, torch.float16, 2.0**16),
}
"""Dtypes of the hidden states and of the head, and the factor on the loss."""


def main() -> None:
    args = arguments().parse_args()
    # With more, a thread that waits for another one counts as working.
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(
        f"{args.tokens} tokens, a third of them ignored, {args.vocabulary} ids, hidden size "
        f"{args.hidden}, chunks of {args.chunk} tokens, {args.items:,} items, {args.rounds} "
        f"rounds; {name}, one thread, torch {torch.__version__}\n"
    )
    print(
        "| case | loss by | dtype of loss | its error | error of states' gradient | of head's "
        "| seconds, ratio | bytes, ratio |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        print_case(case, args)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a chunk")
    parser.add_argument("--items", type=int, default=16384, help="what the sum is divided by")
    parser.add_argument("--rounds", type=int, default=5)
    return parser


def losses(args: argparse.Namespace) -> dict[str, Loss]:
    """Return each way to the loss by its name, as far as this torch has it."""
    items, chunk = args.items, args.chunk

    def whole(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(hidden, weight.to(hidden.dtype)).float()
        return functional.cross_entropy(logits, targets, reduction="sum") / items

    def toolkit(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(args.device, hidden.dtype, enabled=hidden.dtype != weight.dtype):
            return chunked_cross_entropy(hidden, weight, targets, items=items, chunk_tokens=chunk)

    def library(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
        # Autocast does not reach it, and states and head have to have one dtype.
        head = weight.to(hidden.dtype)
        total = functional.linear_cross_entropy(
            hidden, head, targets, reduction="sum", options=options
        )
        return total / items

    ways: dict[str, Loss] = {"whole logits": whole, "toolkit": toolkit}
    # torch takes the loss in chunks from 2.13 on.
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        ways["torch, chunked"] = library
    return ways


def print_case(case: str, args: argparse.Namespace) -> None:
    states_in, head_in, factor = CASES[case]
    numbers = torch.Generator().manual_seed(3)
    hidden = torch.randn(args.tokens, args.hidden, generator=numbers).to(args.device, states_in)
    weight = torch.randn(args.vocabulary, args.hidden, generator=numbers) / args.hidden**0.5
    weight = weight.to(args.device, head_in)
    targets = torch.randint(args.vocabulary, (args.tokens,), generator=numbers)
    targets[::3] = IGNORED
    targets = targets.to(args.device)
    ways = losses(args)
    exact = in_float64(hidden, weight, targets, args.items)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    results: dict[str, Result] = {}
    for _ in range(args.rounds):
        for name, loss in ways.items():
            begin = now(args.device)
            results[name] = computed(loss, hidden, weight, targets, factor)
            seconds[name].append(now(args.device) - begin)
    peaks = {
        name: peak_bytes(loss, hidden, weight, targets, args.device) for name, loss in ways.items()
    }
    slowest = statistics.median(seconds["whole logits"])
    for name in ways:
        middle, peak = statistics.median(seconds[name]), peaks[name]
        cells = [case, name, str(results[name][0].dtype).removeprefix("torch.")]
        cells += [
            error(result, reference) for result, reference in zip(results[name], exact, strict=True)
        ]
        cells.append(f"{middle:.3f}, {middle / slowest:.2f}")
        cells.append(f"{peak / 2**20:.1f} MiB, {peak / peaks['whole logits']:.2f}")
        print("| " + " | ".join(cells) + " |", flush=True)


def in_float64(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, items: int
) -> Result:
    """Return loss and gradients in float64, from the very numbers that the variants get."""

    def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # The head comes in the dtype of the states, as under autocast.
        logits = functional.linear(hidden, weight)
        return functional.cross_entropy(logits, targets, reduction="sum") / items

    return computed(loss, hidden.double(), weight.to(hidden.dtype).double(), targets, 1.0)


def computed(
    loss: Loss,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    factor: float,
) -> Result:
    """Return the loss, and both gradients with the factor taken out again."""
    states, head = (tensor.detach().requires_grad_() for tensor in (hidden, weight))
    value = loss(states, head, targets)
    (value * factor).backward()
    assert states.grad is not None
    assert head.grad is not None
    return value.detach(), states.grad.double() / factor, head.grad.double() / factor


def error(result: torch.Tensor, exact: torch.Tensor) -> str:
    gap = (result.double() - exact).abs().max() / exact.abs().max()
    return f"{float(gap):.1e}" if gap.isfinite() else "not finite"


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    # Of this process on the processor: other work on the machine adds nothing to it.
    return time.process_time()


def peak_bytes(
    loss: Loss, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, device: str
) -> int:
    """Return the most bytes of forward and backward, both gradients among them."""
    states, head = (tensor.detach().requires_grad_() for tensor in (hidden, weight))
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss(states, head, targets).backward()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss(states, head, targets).backward()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    allocations = [event for event in events if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


if __name__ == "__main__":
    main()
