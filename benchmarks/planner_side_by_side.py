"""What three planners say of the same models, and how long each takes to say it.

    python benchmarks/planner_side_by_side.py
    python benchmarks/planner_side_by_side.py --before ../older-checkout

`accelerate estimate-memory`, DeepSpeed's estimators and `toolkit plan`, each in a process of its
own, on shapes that are shipped with the toolkit: no weights and no network. Accelerate asks the
Hub whether a model is there; that question alone is answered for it here.

With `--before`, only the CPU time of whole commands, imports included: the least of several starts,
in turns with the same commands of another checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from toolkit import environment
from toolkit.jobs.shape import ModelShape
from toolkit.planning.models.resolve import resolve_model, well_known
from toolkit.planning.plan import plan

MODELS = ("HuggingFaceTB/SmolLM2-135M", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-2-7b-hf")
GPUS = 2
BATCH, SEQUENCE = 4, 2048
STRATEGIES = ("ddp", "zero2", "zero3")
PLANS_IN_A_SWEEP = 10_000
STARTED = (
    "plan meta-llama/Llama-2-7b-hf --gpus 2 --gpu H100",
    "recommend meta-llama/Llama-2-7b-hf --gpus 2 --gpu H100",
    "recommend meta-llama/Llama-3.1-8B --gpus 8 --gpu A100-80",
)
GIB = 2**30

ACCELERATE = """
import json, sys, types
import accelerate.commands.estimate as estimate
estimate.verify_on_hub = lambda *_: types.SimpleNamespace(config={}, library_name="transformers")
words = [sys.argv[1], "--library_name", "transformers", "--dtypes", "float32", "float16"]
rows = estimate.gather_data(estimate.estimate_command_parser().parse_args(words))
print(json.dumps({row[0]: row[3] for row in rows}))
"""

DEEPSPEED = """
import json, sys
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2
parameters, largest, gpus = map(int, sys.argv[1:])
print(json.dumps({
    "zero2": zero2(parameters, num_gpus_per_node=gpus, cpu_offload=False)[1],
    "zero3": zero3(parameters, largest, num_gpus_per_node=gpus, cpu_offload=False)[1],
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="compare with its commands")
    parser.add_argument("--starts", type=int, default=16, help="of each command, for its CPU time")
    args = parser.parse_args()
    if args.before is not None:
        print_starts(args.starts, args.before)
        return
    models = args.models
    versions = environment.snapshot()["versions"]
    tools = ", ".join(f"{name} {versions[name]}" for name in ("accelerate", "deepspeed"))
    print(f"{platform.machine()} CPU, {tools}; {GPUS} GPUs, bf16, AdamW; GiB a GPU")
    print(f"toolkit plan: batch {BATCH} x {SEQUENCE} tokens\n")
    print("| model | tool | ddp | zero2 | zero3 | seconds |")
    print("|---|---|---|---|---|---|")
    for name in models:
        for row in rows_of(name):
            print("| " + " | ".join(row) + " |")
    print(f"\n{sweep(resolve_model(models[-1]))}")


def rows_of(name: str) -> list[list[str]]:
    """Return what each tool says of one model."""
    shape = resolve_model(name)
    label = f"{name.split('/')[-1]}, {shape.parameters:,}"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of(name)))
        said, seconds = timed([sys.executable, "-c", ACCELERATE, folder])
    half = said["float16"]
    rows = [
        [label, "accelerate, as printed (the largest part)"]
        + [gib(max(half.values())), "no answer", "no answer", f"{seconds:.1f}"],
        ["", "accelerate, its parts added up"]
        + [gib(sum(half.values()) - half["step"]), "no answer", "no answer", ""],
    ]
    largest = max(tensor.elements for tensor in shape.tensors)
    words = [sys.executable, "-c", DEEPSPEED, str(shape.parameters), str(largest), str(GPUS)]
    said, seconds = timed(words)
    rows.append(
        ["", "DeepSpeed, model states only", "no answer", gib(said["zero2"]), gib(said["zero3"])]
        + [f"{seconds:.1f}"]
    )
    words = [sys.executable, "-m", "toolkit.cli", "plan", name, "--gpus", str(GPUS), "--json"]
    words += ["--batch", str(BATCH), "--seq", str(SEQUENCE), "--strategy", ",".join(STRATEGIES)]
    said, seconds = timed(words)
    memory = {row["strategy"]: row["memory"] for row in said["rows"]}
    states = {n: sum(kind["gpu"] for kind in memory[n]["states"].values()) for n in STRATEGIES}
    rows.append(
        ["", "toolkit plan, model states, exact"] + [gib(states[n]) for n in STRATEGIES] + [""]
    )
    rows.append(
        ["", "toolkit plan, all of it"]
        + [
            f"{gib(memory[n]['total']['low'])} to {gib(memory[n]['total']['high'])}"
            for n in STRATEGIES
        ]
        + [f"{seconds:.2f}"]
    )
    return rows


def config_of(name: str) -> dict[str, Any]:
    return next(dict(model.config) for model in well_known() if name in model.ids)


def timed(words: list[str]) -> tuple[Any, float]:
    """Run a command twice, and return its last line of JSON and the seconds of the second time."""
    for _ in range(2):
        started = time.perf_counter()
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - started
    text = done.stdout if done.stdout.startswith("{") else done.stdout.strip().splitlines()[-1]
    return json.loads(text), seconds


def print_starts(count: int, before: Path) -> None:
    """Print the least CPU seconds of each command here and in another checkout, in turns."""
    trees = [before.resolve(), Path(__file__).parents[1]]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each start would compile
    python = platform.python_version()
    print(f"{platform.machine()} CPU, python {python}; least of {count} starts\n")
    print("| command | CPU seconds before | now | now / before |\n|---|---|---|---|")
    for command in STARTED:
        for tree in trees:
            cpu_seconds(command, tree)  # writes bytecode
        turns = [[cpu_seconds(command, tree) for tree in trees] for _ in range(count)]
        earlier, now = map(min, zip(*turns, strict=True))
        print(f"| `toolkit {command}` | {earlier:.3f} | {now:.3f} | {now / earlier:.2f} |")


def cpu_seconds(command: str, tree: Path) -> float:
    """Return the CPU seconds, user's and system's, of a command of the toolkit in `tree`."""
    started = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "toolkit.cli", *command.split()],
        cwd=tree,  # where `-m` looks first
        check=True,
        stdout=subprocess.DEVNULL,
    )
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime - started.ru_utime - started.ru_stime


def sweep(model: ModelShape) -> str:
    """Make many plans of one model, no two alike, and say how long that took."""
    started = time.perf_counter()
    made = 0
    while made < PLANS_IN_A_SWEEP:
        batch, rest = made % 50 + 1, made // 50
        found = plan(model, gpus=2 ** (rest % 5 + 1), batch=batch, sequence=512 + rest, gpu="H100")
        for row in found.rows:
            assert row.verdict is not None
            assert row.speed is not None
            made += 1
    seconds = time.perf_counter() - started
    return f"{made:,} plans with verdict and speed of {model.name}: {seconds:.1f} s"


def gib(value: float) -> str:
    return f"{value / GIB:.1f}"


if __name__ == "__main__":
    main()
