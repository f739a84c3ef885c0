"""`PYTHON stand_alone.py CELLS.json RESULTS.jsonl`: run cells under the releases of this Python.

It runs under any release since DeepSpeed 0.16, so nothing of the toolkit is imported. All libraries
are imported once; then each cell is forked from this process as two ranks, over NCCL where there
are two GPUs, else over gloo: a cell that breaks a library or hangs leaves the next one alone.

A rank trains a small Llama, mostly by SGD with learning rate 1, so that the update is the gradient.
Before each step the weights are gathered; rank 0 computes in plain torch, as one process, what the
step must do to them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import math
import multiprocessing
import os
import platform
import re
import socket
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

Cell = dict[str, Any]
Weights = dict[str, Any]

GIVEN: dict[str, Any] = {}
"""What `verify.py` sends: the cells, and the settings that they share, from cells.toml."""

RANKS = 2
ROWS, LENGTH, VOCABULARY = 2, 12, 64
PACKAGES = ("torch", "accelerate", "transformers", "deepspeed", "peft")
EXACT, ROUNDED = 1e-3, 0.12
"""Limits of an error against the size of the true update: in fp32, and where bf16 rounds it. Sound
stacks stay below 1e-5 and 0.07."""

SIZE = 0.03
"""Limit in bf16 of the size of an update along the true one: rounding goes in all directions."""

NORM = {EXACT: 1e-3, ROUNDED: 0.02}
SECONDS, SECONDS_OF_A_BUILD = 40.0, 600.0
RIGHT, CPU_ADAM = "right", "native CPU Adam"


class Wrong(Exception):
    """What a cell does otherwise than one process."""


# The process that imports, and forks the ranks.


def main(cells_file: str, results_file: str) -> None:
    with open(cells_file, encoding="utf-8") as file:
        GIVEN.update(json.load(file))
    # Neither a thread nor CUDA may be there when ranks are forked.
    torch.set_num_threads(1)
    on_gpus = torch.cuda.device_count() >= RANKS
    if not on_gpus:
        os.environ |= GIVEN["environment_on_cpu"]
    needed = dict.fromkeys(name for cell in GIVEN["cells"] for name in needs(cell))
    made = {name: judged(importlib.import_module, name) for name in needed if name != CPU_ADAM}
    if CPU_ADAM in needed:  # a cell has no time for a compiler
        made[CPU_ADAM] = forked(SECONDS_OF_A_BUILD, build_cpu_adam, [()])
    missing = {name: one["words"] for name, one in made.items() if one["answer"] != RIGHT}
    if not on_gpus:
        act_on_cpu()
    gc.freeze()
    found: dict[str, Any] = {"transport": "nccl" if on_gpus else "gloo", "cells": {}}
    for cell in GIVEN["cells"]:
        started = time.monotonic()
        absent = [missing[name] for name in needs(cell) if name in missing]
        answer = {"answer": "not run", "words": "; ".join(absent)} if absent else run(cell)
        seconds = round(time.monotonic() - started, 2)
        found["cells"][cell["name"]] = {**answer, "seconds": seconds}
    with open(results_file, "w", encoding="utf-8") as file:
        json.dump(found | {"versions": versions(), "defaults": defaults()}, file)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def needs(cell: Cell) -> list[str]:
    """Return the modules that a cell needs, and the native code."""
    words = {cell["through"], *cell}
    return [name for word in GIVEN["needs"] if word in words for name in GIVEN["needs"][word]]


def build_cpu_adam() -> None:
    builders: Any = importlib.import_module("deepspeed.ops.op_builder")
    builders.CPUAdamBuilder().load(verbose=False)


def defaults() -> dict[str, str]:
    """Return defaults that a config leaves to the libraries, by name."""
    found: dict[str, Any] = {}
    for module, name in GIVEN["defaults"]["of"]:
        with contextlib.suppress(Exception):
            function = getattr(importlib.import_module(module), name)
            arguments = inspect.signature(function).parameters
            found |= {f"{name}.{argument}": one.default for argument, one in arguments.items()}
    for stage in GIVEN["defaults"]["deepspeed_stages"]:
        given = {"train_batch_size": 1, "zero_optimization": {"stage": stage}}
        with contextlib.suppress(Exception):
            configs = importlib.import_module("deepspeed.runtime.config")
            config = configs.DeepSpeedConfig(given | {"bf16": {"enabled": True}})
            for name, value in vars(config).items():
                parts = vars(value) if hasattr(value, "model_dump") else {"": value}
                place = f"deepspeed stage {stage}: {name}"
                found |= {f"{place}.{part}".rstrip("."): one for part, one in parts.items()}
    plain = (bool, int, float, str, type(None))
    return {name: repr(one) for name, one in found.items() if isinstance(one, plain)}


def run(cell: Cell) -> dict[str, Any]:
    """Fork the ranks of a cell, and return what they found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as place:
        return forked(SECONDS, in_rank, [(cell, rank, port, place) for rank in range(RANKS)])


def forked(seconds: float, function: Any, arguments: list[Any]) -> dict[str, Any]:
    """Call a function in a forked process for each arguments; return the first that is not right.

    The other processes are ended then.
    """
    found: dict[str, Any] = {}
    with ProcessPoolExecutor(len(arguments), multiprocessing.get_context("fork")) as pool:
        calls = [pool.submit(judged, function, *given) for given in arguments]
        try:
            for call in as_completed(calls, seconds):
                found |= call.result()
                if found["answer"] != RIGHT:
                    break
        except Exception as error:
            words = f"{type(error).__name__}: a rank was ended, or not done after {seconds:g} s"
            found = {"answer": "raised", "words": words}
        for process in multiprocessing.active_children():
            process.kill()
    return found


def judged(function: Any, *given: Any) -> dict[str, Any]:
    """Return what a function measures, or how it fails."""
    try:
        measured = function(*given)
        return {"answer": RIGHT} | (measured if isinstance(measured, dict) else {})
    except Wrong as error:
        return {"answer": "wrong", "words": str(error)}
    except BaseException as error:
        traceback.print_exc()
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return {"answer": "raised", "words": words[:400]}


def in_rank(cell: Cell, rank: int, port: int, place: str) -> dict[str, Any]:
    """Become a rank of a cell, and return what it measures."""
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: str(RANKS) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return CELLS[cell["through"]](cell, place)


def act_on_cpu() -> None:
    """Let Accelerate and DeepSpeed use gloo ranks as they use GPUs.

    The same as toolkit/engines/on_cpu.py does for a rehearsal, for any release: huggingface/
    accelerate#2741 is why there is no public way. DeepSpeed's shared-memory operation takes a
    minute of compiling, for inference alone.
    """
    with contextlib.suppress(ImportError):
        from accelerate.state import DistributedType, PartialState

        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    with contextlib.suppress(ImportError):
        # As an attribute of deepspeed.comm, `torch` is torch itself.
        ranks: Any = importlib.import_module("deepspeed.comm.torch")
        ranks.build_shm_op = lambda: None


# What every cell has: a model, batches, an optimizer, the truth and the judge.


def model_of(cell: Cell, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    tied = cell.get("tied", False)
    config = LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=tied, **GIVEN["model"])
    model = LlamaForCausalLM(config)
    if cell.get("reused"):
        model.model.layers[1] = model.model.layers[0]
    if cell.get("frozen"):
        for part in (model.model.embed_tokens, model.model.layers[0].self_attn):
            part.requires_grad_(False)
    if cell.get("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**GIVEN["lora"]))
    if "reentrant" in cell:
        model.gradient_checkpointing_enable({"use_reentrant": cell["reentrant"]})
        model.enable_input_require_grads()
    return model.train()


def batch_of(step: int, micro: int, rank: int, device: Any = "cpu") -> dict[str, Any]:
    """Return the rows of a rank."""
    chance = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=chance).to(device)
    return {"input_ids": tokens, "labels": tokens.clone()}


def plain(name: str) -> str:
    """Return the name of a parameter without what wraps it."""
    return re.sub(
        r"^module\.|_(checkpoint_wrapped_module|fsdp_wrapped_module|orig_mod)\.", "", name
    )


def optimizer_of(cell: Cell, parameters: Weights, adam: Any = torch.optim.AdamW) -> Any:
    """Return the optimizer of a cell: SGD, or a form of AdamW; a second group has half the rate."""
    every, rate = [*parameters.values()], cell.get("rate", 1.0)
    groups = [every[::2], every[1::2]] if cell.get("groups") else [every]
    options = [{"params": group, "lr": rate / n} for n, group in enumerate(groups, 1)]
    if "adam" in cell:
        return adam(options, **cell["adam"])
    return torch.optim.SGD(options, lr=rate, momentum=cell.get("momentum", 0.0))


def true_gradients(
    cell: Cell, weights: Weights, batches: list[Any], tokens: bool = False
) -> Weights:
    """Return the gradients of one process: a mean over batches, or over all of their tokens."""
    model = model_of({name: value for name, value in cell.items() if name != "reentrant"})
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights[name])
    if cell.get("precision") == "bf16":
        model.to(torch.bfloat16)
    total: Weights = {}
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    for batch, count in zip(batches, counts, strict=True):
        share = count / sum(counts) if tokens else 1 / len(batches)
        with torch.autocast("cpu", torch.bfloat16, cell.get("precision") == "autocast"):
            loss = model(**batch).loss
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                total[name] = total.get(name, 0) + share * parameter.grad.float()
        model.zero_grad()
    return total


def true_update(cell: Cell, weights: Weights, gradients: Weights, state: Weights) -> Weights:
    """Return what a step of torch's optimizer takes from weights; its state is kept in `state`."""
    stepped = {name: torch.nn.Parameter(weights[name].clone()) for name in gradients}
    optimizer = optimizer_of(cell, stepped)
    if state:
        optimizer.load_state_dict(state)
    for name, parameter in stepped.items():
        parameter.grad = gradients[name]
    optimizer.step()
    state.update(optimizer.state_dict())
    return {name: weights[name] - parameter.detach() for name, parameter in stepped.items()}


def norm_of(tensors: Any) -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for one in tensors))


class Judge:
    """It holds the updates of a training against the true ones."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.is_exact = cell, "precision" not in cell
        self.limit = EXACT if self.is_exact else ROUNDED
        self.state: Weights = {}
        self.measured: list[dict[str, float]] = []

    def step(self, before: Weights, after: Weights, gradients: Weights, norm: Any = None) -> None:
        """Judge the next step.

        Raises:
            Wrong: it is another one than that of one process.
        """
        step = f"step {len(self.measured) + self.cell.get('judged_from', 0) + 1}"
        true_norm = norm_of(gradients.values())
        scale = min(1.0, self.cell.get("clip", math.inf) / (true_norm + 1e-6))
        clipped = {name: scale * one for name, one in gradients.items()}
        truth = true_update(self.cell, before, clipped, self.state)
        update = {name: one - after[name] for name, one in before.items()}
        if moved := [name for name in update.keys() - truth.keys() if update[name].any()]:
            raise Wrong(f"{step}: {moved[0]} is frozen, and was changed")
        off = {name: norm_of([update[name] - one]) for name, one in truth.items()}
        size = norm_of(truth.values())
        error = math.hypot(*off.values()) / size
        along = sum(float((update[name] * one).sum()) for name, one in truth.items()) / size**2
        if not error <= self.limit or (not self.is_exact and abs(along - 1) > SIZE):
            raise Wrong(
                f"{step}: the update misses the true one by {error:.3g} of its size, and has "
                f"{along:.3g} of its size; most in {max(off, key=lambda name: off[name])}"
            )
        if norm is not None and not abs(float(norm) / true_norm - 1) <= NORM[self.limit]:
            raise Wrong(f"{step}: the norm {norm:.6g} of the gradients is {true_norm:.6g}")
        self.measured.append({"error": error, "size": along, "norm": true_norm})

    def result(self) -> dict[str, float]:
        """Return what was measured at the last step, with the largest error of all."""
        dist.barrier()
        every = self.measured
        return every[-1] | {"error": max(one["error"] for one in every)} if every else {}


class DeepSpeed:
    """A model in DeepSpeed's engine."""

    def __init__(self, cell: Cell, seed: int = 0) -> None:
        import deepspeed

        deepspeed.init_distributed()
        model = model_of(cell, seed)
        optimizer = optimizer_of(cell, trained(model), deepspeed.ops.adam.DeepSpeedCPUAdam)
        made = deepspeed.initialize(model=model, optimizer=optimizer, config=cell["deepspeed"])
        self.engine: Any = made[0]
        self.model, self.device = model, self.engine.device

    def step(self, batches: list[Any]) -> Any:
        for batch in batches:
            self.engine.backward(self.engine(**batch).loss)
            self.engine.step()
        return self.engine.get_global_grad_norm()

    def keep(self, verb: str, place: str) -> None:
        getattr(self.engine, f"{verb}_checkpoint")(place, tag="one")


class Loop:
    """A model in a loop with an Accelerator."""

    def __init__(self, cell: Cell, seed: int = 0) -> None:
        from accelerate import Accelerator, DeepSpeedPlugin

        self.cell = cell
        options: dict[str, Any] = {"gradient_accumulation_steps": cell.get("accumulation", 1)}
        if "deepspeed" in cell:
            options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=cell["deepspeed"])
        else:
            options["mixed_precision"] = "bf16" if "precision" in cell else "no"
        if "fsdp" in cell:
            options["fsdp_plugin"] = self.plugin = fsdp_plugin(cell)
        self.accelerator = Accelerator(**options)
        model = model_of(cell, seed)
        optimizer = optimizer_of(cell, trained(model))
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.device = self.accelerator.device

    def step(self, batches: list[Any]) -> Any:
        norm: Any = None
        for batch in batches:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**batch).loss)
                if self.accelerator.sync_gradients:
                    clip = self.cell.get("clip", math.inf)
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def keep(self, verb: str, place: str) -> None:
        if not self.cell.get("lora"):
            return getattr(self.accelerator, f"{verb}_state")(place)
        # As the Trainer does for adapters.
        function = getattr(importlib.import_module("accelerate.utils"), f"{verb}_fsdp_model")
        function(self.plugin, self.accelerator, self.model, place, adapter_only=True)


def fsdp_plugin(cell: Cell) -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(**GIVEN["fsdp"] | cell["fsdp"])
    if "cpu_offload" in cell["fsdp"] and not torch.cuda.is_available():
        from torch.distributed.fsdp import CPUOffloadPolicy

        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    return plugin


def trained(model: Any) -> Weights:
    return {plain(name): p for name, p in model.named_parameters() if p.requires_grad}


def weights_of(model: Any) -> Weights:
    return {plain(name): whole_of(p) for name, p in model.named_parameters()}


def whole_of(parameter: Any) -> Any:
    """Return all of a parameter, in fp32 where the backend holds it so."""
    full: Any = None
    if hasattr(parameter, "full_tensor"):
        full = parameter.full_tensor()
    elif hasattr(parameter, "_z3_optimizer") or hasattr(parameter, "_hp_mapping"):
        from deepspeed.utils import safe_get_full_fp32_param

        full = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
    if full is None and hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            full = parameter.clone()
    full = parameter if full is None else full
    return full.detach().float().cpu().clone().view(getattr(parameter, "ds_shape", full.shape))


def step_cell(cell: Cell, place: str, engine: type[Any]) -> dict[str, Any]:
    """Train, and hold each step against one process."""
    if "resumes" in cell:
        return resumed_cell(cell, place, engine)
    made, judge, rank = engine(cell), Judge(cell), dist.get_rank()
    micros = range(cell.get("accumulation", 1))
    for step in range(cell.get("steps", 2)):
        before = weights_of(made.model)
        norm = made.step([batch_of(step, micro, rank, made.device) for micro in micros])
        after = weights_of(made.model)
        if rank == 0 and step >= cell.get("judged_from", 0):
            batches = [batch_of(step, micro, one) for micro in micros for one in range(RANKS)]
            judge.step(before, after, true_gradients(cell, before, batches), norm)
        dist.barrier()
    return judge.result()


def resumed_cell(cell: Cell, place: str, engine: type[Any]) -> dict[str, Any]:
    """Train two steps, save between them, load into another model and do the second again."""
    made = engine(cell)
    first, second = (batch_of(step, 0, dist.get_rank(), made.device) for step in (0, 1))
    made.step([first])
    saved = weights_of(made.model)
    made.keep("save", place)
    made.step([second])
    again = engine(cell, seed=1)
    again.keep("load", place)
    dist.barrier()
    names = [*trained(again.model)]
    error = compare(saved, weights_of(again.model), names, "loaded after a resume")
    if cell["resumes"] == "state":
        again.step([second])
        wanted, found = weights_of(made.model), weights_of(again.model)
        error = max(error, compare(wanted, found, names, "of the next step after a resume"))
    return {"error": error}


def compare(wanted: Weights, found: Weights, names: Any, words: str) -> float:
    """Return how far weights are off.

    Raises:
        Wrong: they are others, of another shape, or not there.
    """
    off = dict.fromkeys(names, math.inf)
    for name in names:
        if name in found and found[name].shape == wanted[name].shape:
            off[name] = norm_of([wanted[name] - found[name]]) / norm_of([wanted[name]])
    wrong = sorted((name for name in off if not off[name] <= EXACT), key=lambda n: -off[n])
    if wrong:
        raise Wrong(
            f"the weights {words} are others in {len(wrong)} of {len(off)} tensors; {wrong[0]} "
            f"by {off[wrong[0]]:.3g} of its size"
        )
    return max(off.values())


def trainer_cell(cell: Cell, place: str) -> dict[str, Any]:
    """Train two steps with the Trainer, on rows with different numbers of tokens to learn."""
    from transformers import Trainer, TrainingArguments

    accumulation = cell.get("accumulation", 1)
    settings = GIVEN["trainer"] | {
        "gradient_accumulation_steps": accumulation,
        "max_grad_norm": cell.get("clip", 0.0),
        "per_device_train_batch_size": ROWS,
        "deepspeed": cell.get("deepspeed"),
    }
    if "fsdp" in cell:
        os.environ |= GIVEN["environment_of_fsdp"]
        settings |= GIVEN["trainer_fsdp"]
    rows: Any = []
    for at in range(RANKS * ROWS * cell.get("micros", 2 * accumulation)):
        row = {name: one[0] for name, one in batch_of(at, 0, 0).items()}
        row["labels"][: 1 + 3 * at % (LENGTH - 2)] = -100
        rows.append(row)
    steps: list[tuple[Weights, list[Any]]] = []

    class Seeing(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            if len(steps) == self.state.global_step:
                steps.append((weights_of(model), []))
            steps[-1][1].append({n: inputs[n].cpu().clone() for n in ("input_ids", "labels")})
            return super().compute_loss(model, inputs, *rest, **named)

    model = model_of(cell)
    if cell.get("tensor"):
        from accelerate import ParallelismConfig

        settings["parallelism_config"] = ParallelismConfig(tp_size=RANKS)
        folder = f"{place}/{os.environ['RANK']}"
        model.save_pretrained(folder)
        model = type(model).from_pretrained(folder, tp_plan="auto").train()
    trainer = Seeing(model, TrainingArguments(place, **settings), train_dataset=rows)
    trainer.train()
    states = [before for before, _ in steps] + [weights_of(trainer.model)]
    judge = Judge(cell)
    for at, (before, seen) in enumerate(steps):
        everywhere: list[Any] = [None] * RANKS
        dist.all_gather_object(everywhere, seen)
        if dist.get_rank() == 0:
            gradients = true_gradients(cell, before, sum(everywhere, []), tokens=True)
            judge.step(before, states[at + 1], gradients)
    if cell.get("saves"):
        trainer.save_model(place)
        if dist.get_rank() == 0:
            names = [*trained(trainer.model)]
            compare(states[-1], saved_in(place), names, "of the saved model")
    return judge.result()


def saved_in(folder: str) -> Weights:
    """Return the weights of a saved model, under the names that they have in training."""
    from safetensors.torch import load_file

    saved: Weights = {}
    for file in glob(f"{folder}/*.safetensors"):
        saved |= load_file(file)
    lora = re.compile(r"(lora_[AB])\.weight")
    return {lora.sub(r"\1.default.weight", name): one for name, one in saved.items()}


def load_cell(cell: Cell, place: str) -> dict[str, Any]:
    """Load a saved model under ZeRO-3, and compare each weight with what was saved."""
    import deepspeed
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    deepspeed.init_distributed()
    model: Any = model_of({})
    if cell.get("fused"):
        config = MixtralConfig(vocab_size=VOCABULARY, num_local_experts=4, **GIVEN["model"])
        model = MixtralForCausalLM(config)
    if dist.get_rank() == 0:
        model.save_pretrained(place)
    dist.barrier()
    keep = HfDeepSpeedConfig(cell["deepspeed"])
    wanted, found = weights_of(model), weights_of(type(model).from_pretrained(place))
    del keep
    return {"error": compare(wanted, found, [*wanted], "loaded")}


CELLS = {
    "deepspeed": lambda cell, place: step_cell(cell, place, DeepSpeed),
    "loop": lambda cell, place: step_cell(cell, place, Loop),
    "trainer": trainer_cell,
    "load": load_cell,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
