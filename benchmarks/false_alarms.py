"""Run sound comparisons, and count the gates that break all the same. None should.

    python benchmarks/false_alarms.py
    python benchmarks/false_alarms.py --cases 4 --keep runs/false-alarms

Every case is one `toolkit compare` in fp32: other seeds, lengths, learning rates, clipping and
models, 2 or 4 ranks, both engines. Repeating one run gives the same bits and shows nothing, so
no case is like another. Ends with 1 when a gate broke, or when a run could not be judged.
"""

from __future__ import annotations

import argparse
import math
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from toolkit import environment
from toolkit.comparing.parity.gates import limit_of
from toolkit.comparing.run.options import CompareOptions, Engine
from toolkit.comparing.run.schedule import INTERRUPTED, compare
from toolkit.records.results import Results, Row, read_results

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-deep": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 8},
    "qwen2": {"model_type": "qwen2"},  # biases in attention
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    # Biases everywhere, layer norms, learned positions.
    "gpt2": {
        "model_type": "gpt2",
        "tie_word_embeddings": True,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
}
"""What differs from SHAPE and the library's defaults; `built-in` is the toolkit's own model."""

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}

GATED = ("loss", "grad_norm", "weights", "data")
NONE = "none"


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: a training, and the strategies that are held against its control."""

    model: str
    strategies: str
    """With spaces between."""

    engine: Engine
    seed: int
    max_length: int
    learning_rate: float
    max_grad_norm: float = field(default=1.0, kw_only=True)
    weight_decay: float = field(default=0.01, kw_only=True)
    num_processes: int = field(default=2, kw_only=True)
    gradient_accumulation_steps: int = field(default=2, kw_only=True)

    @property
    def name(self) -> str:
        return (
            f"{self.model}, seed {self.seed}, {self.max_length} tokens, "
            f"lr {self.learning_rate:g}, clip {self.max_grad_norm:g}"
        )

    def options(self, model: Path | None, output: Path) -> CompareOptions:
        names = ("seed", "max_length", "learning_rate", "max_grad_norm", "weight_decay")
        flags = {name: getattr(self, name) for name in names}
        if model is not None:
            flags["model_name_or_path"] = model
        return CompareOptions(
            strategies=("single", *self.strategies.split()),
            engine=self.engine,
            num_processes=self.num_processes,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            throughput_steps=0,
            output=output,
            train_flags=[f"--{name}={value}" for name, value in flags.items()],
        )


CASES = (
    Case("llama", "ddp fsdp", "trainer", 1, 64, 1e-3, max_grad_norm=0.3),
    Case("qwen2", "zero2 zero3", "loop", 2, 48, 5e-4),
    Case("llama-tied", "zero3 fsdp", "trainer", 3, 96, 2e-3, max_grad_norm=0.2),
    Case("gpt2", "zero1 fsdp", "loop", 4, 64, 1e-3, num_processes=4),
    Case("built-in", "ddp zero2", "loop", 5, 128, 1e-3),
    Case("llama-deep", "zero1 zero3", "trainer", 6, 32, 3e-3, max_grad_norm=0.5),
    Case("qwen2-tied", "ddp zero2", "trainer", 7, 64, 5e-5),
    Case("llama", "zero3 fsdp", "loop", 8, 160, 5e-4, num_processes=4),
    Case("qwen2", "ddp zero1", "trainer", 9, 80, 2e-4, max_grad_norm=0.1),
    Case("gpt2", "zero2 zero3", "trainer", 10, 128, 3e-4, max_grad_norm=0.3),
    Case("llama-tied", "ddp zero1", "loop", 11, 64, 1e-3, gradient_accumulation_steps=4),
    Case("llama-deep", "zero2 fsdp", "loop", 12, 48, 1e-3, weight_decay=0.1),
    Case("built-in", "zero3 fsdp", "trainer", 13, 64, 2e-3, max_grad_norm=0.5),
    Case("qwen2-tied", "zero1 zero2", "loop", 14, 96, 1e-3, num_processes=4),
    Case("llama", "ddp zero2", "trainer", 15, 32, 1e-4, gradient_accumulation_steps=1),
    Case("gpt2", "ddp zero3", "loop", 16, 64, 2e-3, max_grad_norm=0.2),
    Case("qwen2", "zero1 fsdp", "trainer", 17, 192, 1e-3, weight_decay=0.1),
    Case("llama-deep", "ddp zero3", "trainer", 18, 64, 5e-4, num_processes=4),
    Case("llama-tied", "zero1 zero2", "trainer", 19, 48, 3e-3, gradient_accumulation_steps=1),
    Case("qwen2-tied", "ddp fsdp", "loop", 20, 64, 1e-3, max_grad_norm=0.1, num_processes=4),
)


def main() -> int:
    """Run the cases, print the table as it grows, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=len(CASES), help="Only the first so many.")
    parser.add_argument("--output", type=Path, help="Also write the result, dated, to this file.")
    parser.add_argument("--keep", type=Path, help="Keep the runs here, and go on from them.")
    arguments = parser.parse_args()
    cases = CASES[: arguments.cases]

    started = time.monotonic()
    rows: list[Row] = []
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    with _folder(arguments.keep) as folder:
        models = {case.model: model_folder(case.model, folder) for case in cases}
        say("| case | ranks | engine | strategy | loss gap | grad norm gap | weight gap | alarms |")
        say("|---|---|---|---|---|---|---|---|")
        for number, case in enumerate(cases, 1):
            output = folder / f"case-{number:02}"
            for row in run_case(case, models[case.model], output):
                rows.append(row)
                say(table_line(case, row))
    say("")
    for row in rows:
        if row["reason"]:
            say(f"{row['strategy']}-{row['engine']} {row['status']}: {row['reason']}\n")
    say(summary(rows, comparisons=len(cases)))
    if arguments.output is not None:
        minutes = (time.monotonic() - started) / 60
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(report(lines, minutes=minutes), encoding="utf-8")
    return 0 if rows and all(verdict(row) == NONE for row in rows) else 1


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="false-alarms-") as folder:
        yield Path(folder)


def run_case(case: Case, model: Path | None, output: Path) -> list[Row]:
    """Run one comparison, and return its rows without the control's."""
    with output.with_suffix(".log").open("w", encoding="utf-8") as log:
        code = compare(case.options(model, output), console=Console(file=log, width=200))
    if code == INTERRUPTED:
        raise SystemExit(code)
    results: Results = read_results(output)
    control = results["control"]
    if control is None or control["strategy"] != "single":
        raise SystemExit(f"{case.name}: `single` did not end well. {results['runs'][0]['reason']}")
    return [row for row in results["runs"] if row["strategy"] != "single"]


def model_folder(name: str, folder: Path) -> Path | None:
    """Return the folder of a model, written with the built-in tokenizer where it is not there."""
    if name == "built-in":
        return None
    path = folder / "models" / name
    if (path / "config.json").is_file():
        return path
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit.data.tokens import load_tokenizer
    from toolkit.training.model import build_model

    tokenizer = load_tokenizer(build_model())
    tokenizer.save_pretrained(path)
    config = AutoConfig.for_model(
        **SHAPE | MODELS[name],
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(len(name))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def alarms(row: Row) -> list[str]:
    return [gate for gate, held in row["gates"].items() if not held]


def verdict(row: Row) -> str:
    """Say `none`, or what rang; a gate that was not judged is no pass."""
    if row["status"] != "ok":
        return row["status"]
    return (
        ", ".join(alarms(row) + [f"no {gate}" for gate in GATED if gate not in row["gates"]])
        or NONE
    )


def table_line(case: Case, row: Row) -> str:
    gap = row["loss_gap"]
    sizes = (None if gap is None else gap["max"], row["grad_norm_gap"], row["weight_gap"])
    cells = (
        case.name,
        str(case.num_processes),
        row["engine"],
        row["strategy"],
        *("n/a" if size is None else f"{size:.1e}" for size in sizes),
        verdict(row),
    )
    return f"| {' | '.join(cells)} |"


def summary(rows: Sequence[Row], *, comparisons: int) -> str:
    largest = (
        (
            "loss",
            limit_of("loss", "no"),
            [row["loss_gap"] and row["loss_gap"]["max"] for row in rows],
        ),
        ("gradient norm", limit_of("grad_norm", "no"), [row["grad_norm_gap"] for row in rows]),
        ("weights", limit_of("weights", "no"), [row["weight_gap"] for row in rows]),
    )
    sizes = ", ".join(
        f"{name} {max((gap for gap in gaps if gap is not None), default=math.nan):.1e} "
        f"(gate {limit:.0e})"
        for name, limit, gaps in largest
    )
    return (
        f"{comparisons} comparisons, {len(rows)} runs against their control; largest gaps: "
        f"{sizes}. Not judged: {sum(row['status'] != 'ok' for row in rows)}. "
        f"False alarms: {sum(len(alarms(row)) for row in rows)}."
    )


def report(lines: Sequence[str], *, minutes: float) -> str:
    """Return the result as a dated page that says where it was measured."""
    facts = environment.snapshot()
    gpus = ", ".join(gpu["name"] for gpu in facts["gpus"]) or "no GPU, so a rehearsal on the CPU"
    versions = ", ".join(f"{name} {found}" for name, found in facts["versions"].items() if found)
    page = (
        f"# False alarms, {time.strftime('%Y-%m-%d')}",
        f"    {shlex.join(['python', 'benchmarks/false_alarms.py', *sys.argv[1:]])}",
        f"{cpu_name()}, {facts['cpus']} cores, {gpus}. {minutes:.0f} minutes in this start. "
        f"{versions}.",
        "Gaps to `single` over 20 optimizer steps of 16 ragged rows: loss absolute, gradient norm "
        "before clipping relative, weights in units of the control's update.",
        "\n".join(lines),
    )
    return "\n\n".join(page) + "\n"


def cpu_name() -> str:
    """Return what Linux calls the processor; elsewhere what Python calls it."""
    file = Path("/proc/cpuinfo")
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
