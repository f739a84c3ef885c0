"""Find the fastest training that is equal in loss on one GPU, in one process.

    python benchmarks/speed_lab.py
    python benchmarks/speed_lab.py --budget 300 --profile
    python benchmarks/speed_lab.py --variants fused 8192 --out results
    python benchmarks/speed_lab.py --plan
    python benchmarks/speed_lab.py --smoke

Every variant trains the same rows from the same weights: some steps of warm-up, then 8 that are
timed. It is held against the plain variant of its rows: tokens per second, MFU, memory, and the
losses of the first and the last step. Variants come in the order of their expected gain, each
writes its row at once, and the same command goes on where it stopped. `--profile` tells where the
time of the fastest variant goes. `--smoke` runs tiny shapes on the CPU, through the same code.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from gpu_kit import HERE, lost, opened, stop, use_wheels, visible_gpus
from kit.cells import Cell, Machine, Row
from kit.result import SMOKE, Result, table
from kit.worker import PATIENCE, row_of

from toolkit.planning.speed.computing import CONVENTION

PART: Final = "lab"
STEPS: Final = 8
WARM_UP: Final = 4
"""The second step is the probe that carries the toolkit's ledgers; the first one compiles."""

SECONDS: Final = 7.0
COMPILED_SECONDS: Final = 12.0
"""Estimates of a variant, for the budget."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Who trains what, in plain values."""

    name: str
    base: str
    """The plain variant of the same rows; its own name for that variant."""

    gain: float = 1.0
    """Expected, in multiples of the base's tokens per second, for the order; 1: what others do."""

    kind: str = "ours"
    """stock: transformers' Trainer; plain: a loop by hand; trl; ours: ToolkitTrainer; loop."""

    model: str = "llama-1b"
    method: str = "full"
    speed: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values of `SpeedArguments`."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values of `TrainingArguments`."""

    tokens: int = 2048
    """Of a row; of ragged rows, the most that a packed one has."""

    rows: int = 8
    """Of a micro-batch."""

    micro_batches: int = 1
    data: str = "full"
    """full, ragged, or packed."""

    attention: str = "sdpa"
    kernel: str | None = None
    """The one kernel that sdpa is allowed; None: all that `toolkit.train` allows."""

    libraries: tuple[str, ...] = ()

    @property
    def compiles(self) -> bool:
        return bool(self.speed.get("compile_blocks") or self.values.get("torch_compile"))


FUSED: Final = {"optim": "adamw_torch_fused"}
TUNED: Final = {"loss_impl": "chunked", "lean_masks": True}
COMPILED: Final = TUNED | {"compile_blocks": True}
LARGE: Final = COMPILED | {"loss_chunk_tokens": 4096}
BEST: Final = LARGE | {"bf16_weights": True}
TRL: Final[dict[str, Any]] = {"kind": "trl", "libraries": ("trl", "datasets")}
LIGER: Final[dict[str, Any]] = {"kind": "trl", "libraries": ("trl", "datasets", "liger_kernel")}


def variants() -> list[Variant]:
    """Return all variants: model by model, what others do before ours, and the bases first."""
    every = [*_short_rows(), *_long_rows(), *_small_model(), *_ragged_rows(), *_adapters()]
    models = list(dict.fromkeys(variant.model for variant in every))

    def place(one: Variant) -> tuple[int, bool, bool, float]:
        return models.index(one.model), one.name != one.base, one.gain != 1, -one.gain

    return sorted(every, key=place)


def _of(base: str, **shared: Any) -> Any:
    def variant(name: str, *, gain: float = 1.0, **changes: Any) -> Variant:
        return Variant(name=name, base=base, gain=gain, **shared | {"values": FUSED} | changes)

    return variant


def _short_rows() -> list[Variant]:
    one = _of("stock")
    large = _of("stock, 32k in two")
    return [
        one("stock", kind="stock"),
        one("best", gain=1.5, speed=BEST),
        one("compiled, fused loss of 4096", gain=1.44, speed=LARGE),
        one("compiled, fused loss of 1024", gain=1.41, speed=COMPILED),
        one("compiled, fused loss of 8192", gain=1.42, speed=LARGE | {"loss_chunk_tokens": 8192}),
        one("trl", **TRL),
        one("best, cudnn", gain=1.53, speed=BEST, kernel="cudnn"),
        one("trl, liger", **LIGER, values=FUSED | {"use_liger_kernel": True}),
        one(
            "trl, liger, compiled",
            gain=1.3,
            **LIGER,
            values=FUSED | {"use_liger_kernel": True, "torch_compile": True},
        ),
        one("best, FA4", gain=1.55, speed=BEST, kernel="FA4", libraries=("flash_attn",)),
        one("best, loop engine", gain=1.43, kind="loop", speed=BEST),
        one("best, flex", gain=1.4, speed=BEST, attention="flex_attention"),
        one("best, bf16 states", gain=1.46, speed=BEST | {"optimizer_state_dtype": "bfloat16"}),
        one("tuned", gain=1.1, speed=TUNED),
        one("plain loop", kind="plain"),
        one("trl, compiled", gain=1.25, **TRL, values=FUSED | {"torch_compile": True}),
        large("stock, 32k in two", kind="stock", micro_batches=2),
        large("best, 32k in one", gain=1.52, speed=BEST, rows=16),
        large("best, 32k in one, FA4", gain=1.6, speed=BEST, kernel="FA4",
            libraries=("flash_attn",), rows=16),
        large("best, 32k in two", gain=1.45, speed=BEST, micro_batches=2),
    ]  # fmt: skip


def _long_rows() -> list[Variant]:
    one = _of("stock, 8192", tokens=8192, rows=2)
    return [
        one("stock, 8192", kind="stock"),
        one("best, 8192", gain=1.55, speed=BEST),
        one("best, 8192, cudnn", gain=1.6, speed=BEST, kernel="cudnn"),
        one("best, 8192, FA4", gain=1.7, speed=BEST, kernel="FA4", libraries=("flash_attn",)),
        one("trl, 8192", **TRL),
        one("trl, 8192, liger", **LIGER, values=FUSED | {"use_liger_kernel": True}),
    ]


def _small_model() -> list[Variant]:
    one = _of("stock, 0.5b", model="qwen-0.5b")
    return [
        one("stock, 0.5b", kind="stock"),
        one("best, 0.5b", gain=1.5, speed=BEST),
        one("trl, 0.5b", **TRL),
        one("trl, 0.5b, liger", **LIGER, values=FUSED | {"use_liger_kernel": True}),
    ]


def _ragged_rows() -> list[Variant]:
    one = _of("stock, ragged", data="ragged", rows=16)
    packed = {"data": "packed", "rows": 8}
    return [
        one("stock, ragged", kind="stock"),
        one("best, packed", gain=2.0, speed=BEST, **packed),
        one("best, packed, flex", gain=1.42, speed=BEST, attention="flex_attention", **packed),
        one("trl, ragged", **TRL),
        one("trl, packed", gain=1.9, **TRL | packed),
        one("trl, packed, liger", gain=1.95, **LIGER | packed,
            values=FUSED | {"use_liger_kernel": True}),
    ]  # fmt: skip


def _adapters() -> list[Variant]:
    shared: dict[str, Any] = {"model": "llama-8b", "tokens": 4096, "rows": 2}
    one = _of("stock, 8b lora", method="lora", **shared)
    packed = _of("stock, 8b qlora", method="qlora", **shared)
    wide = LARGE | {"loss_chunk_tokens": 2048}
    liger = LIGER | {"values": FUSED | {"use_liger_kernel": True}}
    bits = {"libraries": ("bitsandbytes",)}
    return [
        one("stock, 8b lora", kind="stock"),
        one("best, 8b lora", gain=1.5, speed=wide),
        one("trl, 8b lora, liger", **liger),
        one("trl, 8b lora", **TRL),
        one("plain loop, 8b lora", kind="plain"),
        packed("stock, 8b qlora", kind="stock", **bits),
        packed("best, 8b qlora", gain=1.5, speed=wide, **bits),
        packed("trl, 8b qlora, liger", **liger),
    ]


def main() -> None:
    args = arguments().parse_args()
    if args.smoke:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    machine = Machine(gpus=0 if args.smoke else visible_gpus(), smoke=args.smoke, out=args.out)
    chosen = [
        variant
        for variant in variants()
        if any(text in variant.name for text in args.variants) or variant.name in args.variants
    ]
    if not chosen:
        stop(f"--variants {' '.join(args.variants)}: no name of a variant contains one of these.")
    if args.plan:
        print("\n".join(_plan(chosen)))
        return
    if not machine.gpus and not args.smoke:
        stop("No GPU can be seen here. Pass --smoke for tiny shapes on the CPU, or --plan.")
    use_wheels(args.wheels)
    result = opened(args.out, machine, stem="speed-lab")
    lab = Lab(machine, result, ends=time.monotonic() + args.budget)
    lab.run(chosen)
    if args.profile:
        lab.profile(chosen)
    write_page(result)
    print(f"\n{result.file.with_suffix('.md')}")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--variants", nargs="+", default=[""], help="only those whose name contains one of these"
    )
    parser.add_argument("--budget", type=float, default=600, help="seconds for all of it")
    parser.add_argument("--profile", action="store_true", help="the kernels of the fastest one")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the result")
    parser.add_argument("--plan", action="store_true", help="print the variants and leave")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument(
        "--wheels", type=Path, default=HERE / "gpu_kit_wheels", help="for what is missing here"
    )
    return parser


def _plan(chosen: Sequence[Variant]) -> list[str]:
    rows = [(one.name, one.base, one.model, f"{_seconds(one):.0f}") for one in chosen]
    total = sum(map(_seconds, chosen))
    return [*table(("variant", "held against", "model", "seconds"), rows), "", f"{total:.0f} s"]


def _seconds(variant: Variant) -> float:
    return COMPILED_SECONDS if variant.compiles else SECONDS


class Lab:
    """Runs variants one after the other, all from one model of each shape.

    Args:
        machine: What they run on.
        result: Takes a row of each.
        ends: When no further variant begins, by `time.monotonic`.
    """

    TITLE = "Lab"

    def __init__(self, machine: Machine, result: Result, *, ends: float) -> None:
        from kit.worker import without_cudnn_attention

        from toolkit.rehearse import rehearse_if_needed

        self._machine, self._result, self._ends = machine, result, ends
        self._shape: tuple[str, str] | None = None
        self._model: Any = None
        self._rows: dict[tuple[Any, ...], Any] = {}
        rehearse_if_needed()  # on a CPU, accelerate would train in fp32 whatever is asked
        without_cudnn_attention()

    def run(self, chosen: Sequence[Variant]) -> None:
        """Run the variants that have no row yet, while there is time."""
        done = self._result.finished(PART)
        failed = {row["cell"] for row in self._result.of(PART)} - done
        left_over = [variant for variant in chosen if variant.name not in done]
        for variant in sorted(left_over, key=lambda one: one.name in failed):
            left = self._ends - time.monotonic()
            if left < _seconds(variant):
                print(f"  {variant.name}: not run, {left:.0f} s are left", flush=True)
                continue
            row = self._row(variant)
            print(_said(row, self._result), flush=True)

    def _row(self, variant: Variant) -> Row:
        """Run one variant; where it takes this process with it, its row says so already."""
        cell = _cell(variant)
        self._result.drop(PART, [cell.name])
        self._result.add(lost(PART, cell, 1, "it took the process of the lab with it"))
        # What hangs shows where every thread stands.
        faulthandler.dump_traceback_later(PATIENCE * cell.seconds, exit=True)
        try:
            row = row_of(PART, self, cell, self._machine)
        finally:
            faulthandler.cancel_dump_traceback_later()
        self._result.drop(PART, [cell.name])
        self._result.add(row)
        return row

    def profile(self, chosen: Sequence[Variant]) -> None:
        """Run the fastest of the rows again, and keep the kernels of two steps."""
        speeds = {row["cell"]: _speed(row) for row in self._result.of(PART)}
        ours = [one for one in chosen if one.kind == "ours" and speeds.get(one.name)]
        full = [one for one in ours if one.method == "full" and one.data == "full"]
        if not full:
            print("  nothing to profile: no variant of ours was measured", flush=True)
            return
        best = max(full, key=lambda one: speeds[one.name] or 0.0)
        measured = self.measure(_settings(best), self._machine, profiled=True)
        self._result.about["profile"] = {"variant": best.name} | measured["profile"]
        self._result.write()

    def measure(
        self, settings: dict[str, Any], machine: Machine, *, profiled: bool = False
    ) -> dict[str, Any]:
        """Train one variant, and return what was measured."""
        from kit.device import allocated, quartiles, reset_peaks
        from kit.profiles import Profile
        from kit.speed import allowed, utilization_of
        from kit.trainers import fresh_accelerate

        from toolkit.measuring.clock import Compilation

        variant = Variant(**settings)
        steps = 2 if machine.smoke else STEPS
        warm_up = 2 if machine.smoke else WARM_UP
        pristine = self._pristine(variant.model, variant.method)
        reset_peaks()
        before = allocated()
        profile = Profile(
            warm_up=warm_up, steps=steps, micro_batches=variant.micro_batches, on=profiled
        )
        rows = self._rows_of(variant, warm_up + steps)
        compilation = Compilation()
        with tempfile.TemporaryDirectory() as folder, fresh_accelerate():
            model = copy.deepcopy(pristine)
            model.set_attn_implementation(variant.attention)
            with allowed(variant.attention, variant.kernel, smoke=machine.smoke):
                self._train(variant, model, rows, profile, folder)
            seconds = profile.seconds()
        compilation.stop()
        rates = [tokens / each for tokens, each in zip(profile.tokens, seconds, strict=True)]
        learned = [tokens / each for tokens, each in zip(profile.learned, seconds, strict=True)]
        peak = profile.peaks["allocated_bytes"]
        measured: dict[str, Any] = {
            "step_seconds": seconds,
            "step_tokens": profile.tokens,
            "step_learned_tokens": profile.learned,
            "tokens_per_second": quartiles(rates)[1],
            "learned_tokens_per_second": quartiles(learned)[1],
            "peak_allocated_bytes": None if peak is None else peak - before,
            "losses": profile.losses,
            "compilation": compilation.facts(),
        }
        if profiled:
            measured["profile"] = profile.facts()
        measured["mfu"], measured["no_mfu"] = utilization_of(
            variant.model,
            variant.tokens if variant.data == "full" else None,
            machine,
            measured["tokens_per_second"],
            frozen=variant.method != "full",
        )
        return measured

    def _pristine(self, name: str, method: str) -> Any:
        """Return the model that every variant copies; one at a time is held."""
        from kit.device import clear
        from kit.models import build

        if self._shape != (name, method):
            self._model = None
            clear()
            dtype = "float32" if method == "full" else "bfloat16"
            self._model = build(name, smoke=self._machine.smoke, dtype=dtype)
            if method == "qlora":
                pack(self._model)
            self._shape = (name, method)
        return self._model

    def _rows_of(self, variant: Variant, steps: int) -> Any:
        from kit.data import full_rows, packed_rows, ragged_rows

        needed = steps * variant.rows * variant.micro_batches
        tokens = variant.tokens // 32 if self._machine.smoke else variant.tokens
        packs_itself = variant.kind == "trl" and variant.data == "packed"
        key = (variant.data, needed, tokens, packs_itself)
        if key not in self._rows:
            if variant.data == "full":
                rows = full_rows(needed, tokens)
            else:
                rows = ragged_rows(16 * needed, tokens // 2)
                if variant.data == "packed" and not packs_itself:
                    rows = packed_rows(rows, tokens)
                rows = rows if packs_itself else rows[:needed]
            self._rows[key] = rows
        if variant.kind == "trl":
            from datasets import Dataset

            return Dataset.from_list(self._rows[key])
        return self._rows[key]

    def _train(self, variant: Variant, model: Any, rows: Any, watch: Any, folder: str) -> None:
        from kit import trainers
        from kit.variants import Variant as KitVariant

        smoke = self._machine.smoke
        if variant.method != "full":
            model = adapted(model, variant, smoke=smoke)
        steps, batch = watch.warm_up + watch.steps, variant.rows
        if variant.kind == "plain":
            trainers.train_plainly(model, rows, watch, batch=batch, bf16=True, fused=not smoke)
            return
        values = trainers.training_values(
            folder, rows=batch, steps=steps, bf16=True, micro_batches=variant.micro_batches
        )
        values |= variant.values | {"use_cpu": smoke}
        speed = variant.speed
        if smoke:  # a CPU has no such kernels, and compiles for long
            values |= {"use_liger_kernel": False, "optim": "adamw_torch", "torch_compile": False}
            speed = speed | ({"compile_backend": "aot_eager"} if variant.compiles else {})
        packing = frozenset({"packing"} if variant.data == "packed" else ())
        one = KitVariant(name=variant.name, kind=variant.kind, speed=speed, switches=packing)
        if variant.kind == "loop":
            trainers.train_in_loop(one, model, rows, values, watch)
            return
        tokenizer = None
        if variant.kind == "trl":
            from toolkit.data.tokens import load_tokenizer
            from toolkit.training.model import build_model

            tokenizer = load_tokenizer(build_model())
        length = variant.tokens // 32 if smoke else variant.tokens
        with liger_undone(bool(values.get("use_liger_kernel"))):
            trainer = trainers.trainer_of(
                one, model, rows, values, tokenizer=tokenizer, max_length=length
            )
            watch.follow(trainer)
            trainer.train()


def pack(model: Any) -> None:
    """Pack the linear layers but the head in 4 bits, as `from_pretrained` does while it loads."""
    import torch
    from bitsandbytes import nn

    head = model.get_output_embeddings()
    linear = [(name, part) for name, part in model.named_modules() if type(part) is torch.nn.Linear]
    for name, layer in linear:
        if layer is head:
            continue
        packed = nn.Linear4bit(
            *(layer.in_features, layer.out_features, layer.bias is not None),
            compute_dtype=torch.bfloat16,
            quant_type="nf4",
            quant_storage=torch.bfloat16,
        )
        weight = nn.Params4bit(
            layer.weight.data.cpu(), False, quant_type="nf4", quant_storage=torch.bfloat16
        )
        packed.weight, packed.bias = weight, layer.bias
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, packed.to(layer.weight.device))
    model.is_loaded_in_4bit = True  # which peft asks


def adapted(model: Any, variant: Variant, *, smoke: bool) -> Any:
    """Return the model with adapters on all its linear layers: ours, or peft's for the others."""
    from peft import LoraConfig, get_peft_model

    from toolkit.training.adapters import attach_adapters
    from toolkit.training.arguments import ModelArguments
    from toolkit.training.method_arguments import MethodArguments
    from toolkit.training.methods import checked_method
    from toolkit.training.model import model_facts

    arguments = MethodArguments(method=variant.method)  # type: ignore[arg-type]
    if variant.kind not in ("ours", "loop"):
        config = LoraConfig(
            r=arguments.lora_r,
            lora_alpha=arguments.lora_alpha,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        return get_peft_model(model, config)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        method = checked_method(
            arguments,
            ModelArguments(model_name_or_path=folder),
            model_facts(folder),
            precision="bf16",
        )
        attach_adapters(model, method, seed=0)
    return model


@contextmanager
def liger_undone(used: bool) -> Iterator[None]:
    """Give back what Liger's kernels replace in transformers' modules, for all that comes after."""
    import transformers.models.llama.modeling_llama as llama
    import transformers.models.qwen2.modeling_qwen2 as qwen2

    before = {module: dict(vars(module)) for module in (llama, qwen2)} if used else {}
    forwards = {
        part: part.forward
        for names in before.values()
        for part in names.values()
        if isinstance(part, type) and "forward" in vars(part)
    }
    with ExitStack() as stack:
        for module, names in before.items():
            stack.callback(vars(module).update, names)
        for part, forward in forwards.items():
            stack.callback(setattr, part, "forward", forward)
        yield


def _cell(variant: Variant) -> Cell:
    return Cell(
        name=variant.name,
        settings=_settings(variant),
        seconds=_seconds(variant),
        libraries=variant.libraries,
    )


def _settings(variant: Variant) -> dict[str, Any]:
    return asdict(replace(variant, libraries=()))


# The page


def _speed(row: Row) -> float | None:
    return row["measured"].get("tokens_per_second") if row["status"] == "ok" else None


def _said(row: Row, result: Result) -> str:
    head = f"  {row['cell']}: {row['status']}, {row['seconds']:.0f} s"
    if row["status"] != "ok":
        return f"{head}, {(row['reason'] or '')[:300]}"
    return f"{head}, {' '.join(_line(row, _measured(result))[1:6])}"


def _measured(result: Result) -> dict[str, Row]:
    return {row["cell"]: row for row in result.of(PART) if row["status"] == "ok"}


def _line(row: Row, measured: dict[str, Row]) -> list[str]:
    values, settings = row["measured"], row["settings"]
    base = measured.get(settings["base"])
    compiled = values["compilation"]
    peak = values["peak_allocated_bytes"]
    tokens = settings["rows"] * settings["micro_batches"] * settings["tokens"]
    gaps = ("-", "-")
    same_rows = base is not None and _same_rows(settings, base["settings"])
    if base is not None and same_rows:
        theirs, own = base["measured"]["losses"], values["losses"]
        gaps = (f"{own[0] - theirs[0]:+.1e}", f"{own[-1] - theirs[-1]:+.1e}")
    return [
        row["cell"],
        f"{values['tokens_per_second']:,.0f}",
        f"{values['learned_tokens_per_second']:,.0f}",
        "-" if base is None else f"{_ratio(values, base):.2f}",
        "-" if values["mfu"] is None else f"{values['mfu']:.1%}",
        f"{1000 * sorted(values['step_seconds'])[len(values['step_seconds']) // 2]:.1f}",
        f"{tokens:,}" if settings["data"] == "full" else settings["data"],
        "-" if peak is None else f"{peak / 2**30:.1f}",
        f"{values['losses'][0]:.4f} ({gaps[0]})",
        f"{values['losses'][-1]:.4f} ({gaps[1]})",
        f"{compiled['graphs']}, {compiled['graph_breaks']}, {compiled['compile_seconds']:.0f} s"
        if compiled["graphs"]
        else "-",
    ]


def _ratio(values: dict[str, Any], base: Row) -> float:
    """Return how many times as fast as the base; by learned tokens, of which padding has none."""
    name = "learned_tokens_per_second"
    return values[name] / base["measured"][name]


def _same_rows(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return all(some[name] == others[name] for name in ("data", "tokens", "rows", "micro_batches"))


HEADER: Final = (
    "variant",
    "tokens/s",
    "learned tokens/s",
    "to the base",
    "MFU",
    "step, ms",
    "tokens a step",
    "peak, GiB",
    "first loss (gap)",
    "last loss (gap)",
    "graphs, breaks, compiling",
)


def write_page(result: Result) -> None:
    from kit.profiles import profile_table

    about, measured = result.about, _measured(result)
    lines = [f"# Speed lab, {about['date']}", "", f"    {about['command']}", ""]
    lines += [SMOKE, ""] if about["smoke"] else []
    lines += [
        f"{about['device']}; {about['versions']}; toolkit {about['toolkit']}.",
        *(["", about["note"]] if "note" in about else []),
        "",
        f"Random weights, one process, bf16, AdamW, clipped to 1; {STEPS} steps after {WARM_UP} of "
        "warm-up, medians. `stock` is transformers' Trainer as it comes; all others have its fused "
        "AdamW. The ratio is that of learned tokens to the base, which is the first row of each "
        "table. Peaks are of the allocator, without the copy of the weights that the lab keeps. "
        "Gaps are to the losses of the base, where the rows of a step are the same.",
        "",
        f"MFU is {CONVENTION}; the rate of the GPU is the dense one in bf16 of "
        "`toolkit/planning/speed/gpus.json`.",
    ]
    for base in dict.fromkeys(row["settings"]["base"] for row in measured.values()):
        shown = [row for row in measured.values() if row["settings"]["base"] == base]
        lines += ["", f"## Held against `{base}`", ""]
        lines += table(HEADER, [_line(row, measured) for row in shown])
    without = [row for row in result.of(PART) if row["status"] != "ok"]
    if without:
        rows = [(row["cell"], row["status"], (row["reason"] or "")[:300]) for row in without]
        lines += ["", "## Not measured", "", *table(("variant", "status", "reason"), rows)]
    if "profile" in about:
        lines += ["", f"## Where a step of `{about['profile']['variant']}` goes", ""]
        lines += profile_table(about["profile"])
    result.file.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
