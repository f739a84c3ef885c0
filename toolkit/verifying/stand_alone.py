"""`PYTHON stand_alone.py CELLS.json RESULTS.jsonl`: run cells under the releases of this Python.

It runs under any release since DeepSpeed 0.16, so nothing of the toolkit is imported. All libraries
are imported once; then each cell is forked from this process as two ranks, over NCCL where there
are two GPUs, else over gloo: a cell that breaks a library or hangs leaves the next one alone.

A rank trains a small Llama by SGD with learning rate 1, so that the update is the gradient. Before
each step the weights are gathered; rank 0 computes in plain torch, as one process, what the step
must do to them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import inspect
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import platform
import shutil
import socket
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

Cell = dict[str, Any]
Weights = dict[str, Any]

GIVEN: dict[str, Any] = {}
"""The cells, whether defaults are asked for, and the settings that all cells share."""

RANKS = 2
ROWS, LENGTH, VOCABULARY = 2, 12, 64
PACKAGES = ("torch", "accelerate", "transformers", "deepspeed", "peft")
NEEDS = {
    "deepspeed": [],
    "loop": ["accelerate", "accelerate.utils.fsdp_utils"],
    "trainer": ["accelerate", "transformers.trainer"],
    "load": ["transformers.models.mixtral.modeling_mixtral"],
}
EXACT, ROUNDED = 1e-3, 0.12
"""Limits of an error against the size of the true update: in fp32, and where bf16 rounds it. Sound
stacks stay below 1e-5 and 0.07."""

SIZE = 0.03
"""Limit in bf16 of the size of an update along the true one: rounding goes in all directions."""

NORM = {EXACT: 1e-3, ROUNDED: 0.02}
SECONDS = 40.0


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
        os.environ |= {
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "LOCAL_SIZE": str(RANKS),
        }
        os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
    missing: dict[str, str] = {}
    for name in dict.fromkeys(name for cell in GIVEN["cells"] for name in needs(cell)):
        try:
            importlib.import_module(name)
        except Exception as error:
            missing[name] = f"{name}: {type(error).__name__}: {error}"
    if not on_gpus:
        act_on_cpu()
    gc.freeze()
    with open(results_file, "w", encoding="utf-8") as file:

        def write(**value: Any) -> None:
            file.write(json.dumps(value) + "\n")
            file.flush()

        moving = defaults() if GIVEN["defaults"] else {}
        write(versions=versions(), transport="nccl" if on_gpus else "gloo", defaults=moving)
        for cell in GIVEN["cells"]:
            started = time.monotonic()
            absent = [missing[name] for name in needs(cell) if name in missing]
            found = {"answer": "not run", "words": "; ".join(absent)}
            if not absent:
                found = run(cell, f"{results_file}.{cell['name']}")
            write(cell=cell["name"], seconds=round(time.monotonic() - started, 2), **found)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def needs(cell: Cell) -> list[str]:
    deepspeed = ["deepspeed", "transformers.integrations.deepspeed"] if "stage" in cell else []
    return [*NEEDS[cell["through"]], *deepspeed, *(["peft"] if "lora" in cell else [])]


def defaults() -> dict[str, str]:
    """Return defaults that a config leaves to the libraries, by name."""
    found: dict[str, Any] = {}
    accelerate = ("FullyShardedDataParallelPlugin", "DeepSpeedPlugin", "DataLoaderConfiguration")
    with contextlib.suppress(Exception):
        classes = [
            getattr(importlib.import_module("accelerate.utils"), name) for name in accelerate
        ]
        for one in [*classes, importlib.import_module("transformers").TrainingArguments]:
            found |= {f"{one.__name__}.{f.name}": f.default for f in dataclasses.fields(one)}
        arguments = inspect.signature(importlib.import_module("accelerate").Accelerator).parameters
        found |= {f"Accelerator.{name}": one.default for name, one in arguments.items()}
    with contextlib.suppress(Exception):
        from deepspeed.runtime.config import DeepSpeedConfig

        for stage in (2, 3):
            given = {"train_batch_size": 1, "zero_optimization": {"stage": stage}}
            for name, value in vars(DeepSpeedConfig(given | {"bf16": {"enabled": True}})).items():
                parts = vars(value) if hasattr(value, "model_dump") else {"": value}
                place = f"deepspeed stage {stage}: {name}"
                found |= {f"{place}.{part}".rstrip("."): one for part, one in parts.items()}
    plain = (bool, int, float, str, type(None))
    return {name: repr(one) for name, one in found.items() if isinstance(one, plain)}


def run(cell: Cell, place: str) -> dict[str, Any]:
    """Fork the ranks of a cell, and return what the first one found that is not right."""
    os.makedirs(place)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=in_rank, args=(cell, at, port, place)) for at in range(RANKS)]
    for rank in ranks:
        rank.start()
    give_up = time.monotonic() + SECONDS
    while (alive := [rank for rank in ranks if rank.is_alive()]) and time.monotonic() < give_up:
        multiprocessing.connection.wait([rank.sentinel for rank in alive], 0.5)
        if any(rank.exitcode for rank in ranks):
            give_up = min(give_up, time.monotonic() + 3)  # it may say something better
    late = [at for at, rank in enumerate(ranks) if rank.is_alive()]
    for rank in ranks:
        rank.kill()
        rank.join()
    codes = [rank.exitcode for rank in ranks]
    words = f"rank {late[0]} did not end" if late else f"the ranks ended with {codes}"
    found: list[dict[str, Any]] = []
    for at in range(RANKS):
        with contextlib.suppress(OSError, ValueError), open(f"{place}/{at}.json") as file:
            found.append(json.load(file))
    if any(codes):
        found.append({"answer": "raised", "words": words})
    shutil.rmtree(place)
    return next((one for one in found if one["answer"] != "right"), found[0])


def in_rank(cell: Cell, rank: int, port: int, place: str) -> None:
    """Become a rank of a cell, write what it found, and leave."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
        os.environ |= {name: str(RANKS) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            found = {"answer": "right", **CELLS[cell["through"]](cell, place)}
        except Wrong as error:
            found = {"answer": "wrong", "words": str(error)}
        except BaseException as error:
            traceback.print_exc()
            words = " ".join(f"{type(error).__name__}: {error}".split())
            found = {"answer": "raised", "words": words[:400]}
        code = int(found["answer"] == "raised")
        with open(f"{place}/{rank}.json", "w", encoding="utf-8") as file:
            json.dump(found, file)
    finally:
        os._exit(code)


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
    for module in ("transformers.utils", "transformers.training_args"):
        with contextlib.suppress(ImportError):
            vars(importlib.import_module(module))["is_torch_bf16_gpu_available"] = lambda: True


# What every cell has: a model, batches, the truth and the judge.


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

        targets = ["q_proj", "v_proj", "down_proj"]
        # Otherwise B is zero, and so is the gradient of A.
        lora = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        model = get_peft_model(model, lora)
    if "reentrant" in cell:
        model.gradient_checkpointing_enable({"use_reentrant": cell["reentrant"]})
        model.enable_input_require_grads()
    return model.train()


def batch_of(step: int, micro: int, rank: int) -> dict[str, Any]:
    """Return the rows of a rank."""
    chance = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=chance)
    return {"input_ids": tokens, "labels": tokens.clone()}


def plain(name: str) -> str:
    """Return the name of a parameter without what wraps it."""
    for part in ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module."):
        name = name.replace(part, "")
    return name.removeprefix("module.")


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


def norm_of(tensors: Any) -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for one in tensors))


def judge(
    cell: Cell, step: int, weights: list[Weights], gradients: Weights, norm: Any, rates: Any
) -> dict[str, float]:
    """Hold the update of a step against the true one.

    Raises:
        Wrong: it is another one.
    """
    exact = "precision" not in cell
    limit = EXACT if exact else ROUNDED
    true_norm = norm_of(gradients.values())
    scale = min(1.0, cell.get("clip", math.inf) / (true_norm + 1e-6))
    truth = {name: scale * rates.get(name, 1.0) * one for name, one in gradients.items()}
    update = {name: one - weights[1][name] for name, one in weights[0].items()}
    if moved := [name for name in update.keys() - truth.keys() if update[name].any()]:
        raise Wrong(f"step {step}: {moved[0]} is frozen, and was changed")
    off = {name: norm_of([update[name] - one]) for name, one in truth.items()}
    size = norm_of(truth.values())
    error = math.hypot(*off.values()) / size
    along = sum(float((update[name] * one).sum()) for name, one in truth.items()) / size**2
    if not error <= limit or (not exact and abs(along - 1) > SIZE):
        raise Wrong(
            f"step {step}: the update misses the true one by {error:.3g} of its size, and has "
            f"{along:.3g} of its size; most in {max(off, key=lambda name: off[name])}"
        )
    if norm is not None and abs(float(norm) / true_norm - 1) > NORM[limit]:
        raise Wrong(f"step {step}: the norm {norm:.6g} of the gradients is {true_norm:.6g}")
    return {"error": error, "size": along, "norm": true_norm}


def worst(every: list[dict[str, float]]) -> dict[str, float]:
    """Return what was measured at the last step, with the largest error of all."""
    dist.barrier()
    return every[-1] | {"error": max(one["error"] for one in every)} if every else {}


class Engine:
    """A model as a backend trains it."""

    model: Any

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    def made_optimizer(self, model: Any) -> Any:
        """Return SGD with learning rate 1; where the cell has groups, 0.5 for the second one."""
        every = [(plain(name), p) for name, p in model.named_parameters() if p.requires_grad]
        groups = [every[::2], every[1::2]] if self.cell.get("groups") else [every]
        self.rates = {name: 1.0 / n for n, group in enumerate(groups, 1) for name, _ in group}
        options = [{"params": [p for _, p in g], "lr": self.rates[g[0][0]]} for g in groups]
        return torch.optim.SGD(options, lr=1.0, momentum=self.cell.get("momentum", 0.0))


def deepspeed_config(cell: Cell) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": cell["stage"], "stage3_param_persistence_threshold": 0}
    if "offload" in cell:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if cell.get("offload") == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    if "bucket" in cell:
        zero |= {"reduce_bucket_size": cell["bucket"], "allgather_bucket_size": cell["bucket"]}
    if "overlap" in cell:
        zero["overlap_comm"] = cell["overlap"]
    config = GIVEN["deepspeed"] | {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": cell.get("accumulation", 1),
        "gradient_clipping": cell.get("clip", 0.0),
        "bf16": {"enabled": cell.get("precision") == "bf16"},
        "zero_optimization": zero,
    }
    if "accumulates_in" in cell:
        config["data_types"] = {"grad_accum_dtype": cell["accumulates_in"]}
    if "scheduler" in cell:
        config["scheduler"] = cell["scheduler"]
    return config


class DeepSpeed(Engine):
    def __init__(self, cell: Cell, seed: int = 0) -> None:
        import deepspeed

        super().__init__(cell)
        deepspeed.init_distributed()
        self.model = model_of(cell, seed)
        optimizer, config = self.made_optimizer(self.model), deepspeed_config(cell)
        made = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)
        self.engine: Any = made[0]

    def step(self, batches: list[Any]) -> Any:
        for batch in batches:
            inputs = {name: one.to(self.engine.device) for name, one in batch.items()}
            self.engine.backward(self.engine(**inputs).loss)
            self.engine.step()
        return self.engine.get_global_grad_norm()

    def keep(self, verb: str, place: str) -> None:
        getattr(self.engine, f"{verb}_checkpoint")(place, tag="one")


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
    if full is None:
        gathered = contextlib.nullcontext()
        if hasattr(parameter, "ds_id"):
            gathered = importlib.import_module("deepspeed").zero.GatheredParameters([parameter])
        with gathered:
            full = parameter.detach().clone()
    return full.detach().float().cpu().clone().view(getattr(parameter, "ds_shape", full.shape))


class Loop(Engine):
    """A loop with an Accelerator."""

    def __init__(self, cell: Cell, seed: int = 0) -> None:
        from accelerate import Accelerator, DeepSpeedPlugin

        super().__init__(cell)
        options: dict[str, Any] = {"gradient_accumulation_steps": cell.get("accumulation", 1)}
        if "stage" in cell:
            options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=deepspeed_config(cell))
        else:
            options["mixed_precision"] = "bf16" if "precision" in cell else "no"
        if "fsdp" in cell:
            options["fsdp_plugin"] = self.plugin = fsdp_plugin(cell)
        self.accelerator = Accelerator(**options)
        model = model_of(cell, seed)
        optimizer = self.made_optimizer(model)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def step(self, batches: list[Any]) -> Any:
        norm: Any = None
        for batch in batches:
            inputs = {name: one.to(self.accelerator.device) for name, one in batch.items()}
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**inputs).loss)
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

    plugin = FullyShardedDataParallelPlugin(
        reshard_after_forward=cell.get("reshard", True),
        activation_checkpointing=cell.get("checkpointing", False),
        state_dict_type=cell.get("saved_as", "SHARDED_STATE_DICT"),
        cpu_offload="offload" in cell,
        **GIVEN["fsdp"],
    )
    if "offload" in cell and not torch.cuda.is_available():
        from torch.distributed.fsdp import CPUOffloadPolicy

        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    return plugin


def step_cell(cell: Cell, place: str, engine: type[Any]) -> dict[str, Any]:
    """Train, and hold each step against one process."""
    if "resumes" in cell:
        return resumed_cell(cell, place, engine)
    made, micros, every = engine(cell), range(cell.get("accumulation", 1)), []
    for step in range(cell.get("steps", 2)):
        before = weights_of(made.model)
        norm = made.step([batch_of(step, micro, dist.get_rank()) for micro in micros])
        weights = [before, weights_of(made.model)]
        if dist.get_rank() == 0 and step >= cell.get("judged_from", 0):
            batches = [batch_of(step, micro, rank) for micro in micros for rank in range(RANKS)]
            gradients = true_gradients(cell, before, batches)
            every.append(judge(cell, step + 1, weights, gradients, norm, made.rates))
        dist.barrier()
    return worst(every)


def resumed_cell(cell: Cell, place: str, engine: type[Any]) -> dict[str, Any]:
    """Train two steps, save between them, load into another model and do the second again."""
    made = engine(cell)
    first, second = (batch_of(step, 0, dist.get_rank()) for step in (0, 1))
    made.step([first])
    saved = weights_of(made.model)
    made.keep("save", place)
    made.step([second])
    again = engine(cell, seed=1)
    again.keep("load", place)
    dist.barrier()
    error = difference(saved, again, "loaded")
    if cell["resumes"] == "state":
        again.step([second])
        error = max(error, difference(weights_of(made.model), again, "of the next step"))
    return {"error": error}


def difference(wanted: Weights, engine: Any, words: str) -> float:
    """Return how far trained weights are off; Wrong if they are."""
    found = weights_of(engine.model)
    off = {n: norm_of([wanted[n] - found[n]]) / norm_of([wanted[n]]) for n in engine.rates}
    wrong = sorted((name for name in off if not off[name] <= EXACT), key=lambda n: -off[n])
    if wrong:
        raise Wrong(
            f"the weights {words} after a resume are others in {len(wrong)} of {len(off)} "
            f"tensors; {wrong[0]} by {off[wrong[0]]:.3g} of its size"
        )
    return max(off.values())


def trainer_cell(cell: Cell, place: str) -> dict[str, Any]:
    """Train two steps with the Trainer, on rows with different numbers of tokens to learn."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    settings: dict[str, Any] = {}
    if "stage" in cell:
        settings["deepspeed"] = deepspeed_config(cell)
    if "fsdp" in cell:
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        layers = GIVEN["fsdp"]["transformer_cls_names_to_wrap"]
        settings["fsdp"] = "full_shard auto_wrap"
        settings["fsdp_config"] = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": layers}
    settings["gradient_accumulation_steps"] = cell.get("accumulation", 1)
    settings["max_grad_norm"] = cell.get("clip", 0.0)
    settings["per_device_train_batch_size"] = ROWS
    rows: list[Any] = []
    for at in range(RANKS * 2 * ROWS * settings["gradient_accumulation_steps"]):
        row = {name: one[0] for name, one in batch_of(at, 0, 0).items()}
        row["labels"][: 1 + 3 * at % (LENGTH - 2)] = -100
        rows.append(row)
    seen: list[Any] = []
    states: list[Any] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            states.append((weights_of(model), list(seen)))
            seen.clear()

        def on_step_begin(self, *given: Any, **named: Any) -> None:
            if not states:
                self.on_step_end(*given, **named)

    class Seeing(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            seen.append({n: inputs[n].cpu().clone() for n in ("input_ids", "labels")})
            return super().compute_loss(model, inputs, *rest, **named)

    arguments = TrainingArguments(place, **GIVEN["trainer"], **settings)
    given: dict[str, Any] = {"train_dataset": rows, "callbacks": [Watch()]}
    Seeing(model=model_of(cell), args=arguments, **given).train()
    every: list[Any] = []
    for step in (1, 2):
        everywhere: list[Any] = [None] * RANKS
        dist.all_gather_object(everywhere, states[step][1])
        weights = [states[step - 1][0], states[step][0]]
        if dist.get_rank() == 0:
            gradients = true_gradients(cell, weights[0], sum(everywhere, []), tokens=True)
            every.append(judge(cell, step, weights, gradients, None, {}))
    return worst(every)


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
    keep = HfDeepSpeedConfig(deepspeed_config(cell))
    wanted, found = weights_of(model), weights_of(type(model).from_pretrained(place))
    del keep
    if wanted.keys() != found.keys():
        raise Wrong(f"other parameters were loaded: {min(wanted.keys() ^ found.keys())}")
    for name, one in wanted.items():
        if not torch.equal(one, found[name]):
            raise Wrong(f"{name} was loaded with other values than those that were saved")
    return {"error": 0.0}


CELLS = {
    "deepspeed": lambda cell, place: step_cell(cell, place, DeepSpeed),
    "loop": lambda cell, place: step_cell(cell, place, Loop),
    "trainer": trainer_cell,
    "load": load_cell,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
