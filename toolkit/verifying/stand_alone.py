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
import copy
import dataclasses
import gc
import importlib
import inspect
import json
import math
import os
import platform
import shutil
import signal
import socket
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import Any

RANKS = 2
ROWS, LENGTH, VOCABULARY = 2, 12, 64
PACKAGES = ("torch", "accelerate", "transformers", "deepspeed", "peft")
MODULES = {
    "loop": ["accelerate.utils.fsdp_utils"],
    "trainer": ["transformers.trainer", "transformers.integrations.deepspeed"],
    "load": ["transformers.models.mixtral.modeling_mixtral", "transformers.integrations.deepspeed"],
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
        cells = json.load(file)
    import torch

    # Neither a thread nor CUDA may be there when ranks are forked.
    torch.set_num_threads(1)
    on_gpus = torch.cuda.device_count() >= RANKS
    if not on_gpus:
        os.environ |= {
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "ACCELERATE_TORCH_DEVICE": "cpu",
            "ACCELERATE_BYPASS_DEVICE_MAP": "true",
            "LOCAL_SIZE": str(RANKS),
        }
    missing = {}
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except Exception as error:
            missing[package] = f"{type(error).__name__}: {error}"
    for module in {name for cell in cells for name in MODULES.get(cell["through"], [])}:
        with contextlib.suppress(Exception):  # the cell will say so
            importlib.import_module(module)
    if not on_gpus:
        act_on_cpu()
    gc.freeze()
    with open(results_file, "w", encoding="utf-8") as file:

        def write(**value: Any) -> None:
            file.write(json.dumps(value) + "\n")
            file.flush()

        write(versions=versions(), transport="nccl" if on_gpus else "gloo", defaults=defaults())
        for cell in cells:
            started = time.monotonic()
            absent = [package for package in needs(cell) if package in missing]
            if absent:
                found = {"answer": "not run", "words": f"{absent[0]}: {missing[absent[0]]}"}
            else:
                found = run(cell, f"{results_file}.{cell['name']}")
            write(cell=cell["name"], seconds=round(time.monotonic() - started, 2), **found)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def needs(cell: dict[str, Any]) -> list[str]:
    through = cell["through"]
    deepspeed = ["deepspeed"] if "stage" in cell else []
    accelerate = ["accelerate"] if through in ("loop", "trainer") else []
    return ["torch", "transformers", *deepspeed, *accelerate, *(["peft"] if "lora" in cell else [])]


def defaults() -> dict[str, str]:
    """Return defaults that a config leaves to the libraries, by name."""
    found: dict[str, str] = {}
    for module, name in (
        ("transformers", "TrainingArguments"),
        ("accelerate.utils", "FullyShardedDataParallelPlugin"),
        ("accelerate.utils", "DeepSpeedPlugin"),
        ("accelerate.utils", "DataLoaderConfiguration"),
    ):
        with contextlib.suppress(Exception):
            fields = dataclasses.fields(getattr(importlib.import_module(module), name))
            found |= {f"{name}.{f.name}": f.default for f in fields}  # type: ignore[dict-item]
    with contextlib.suppress(Exception):
        import accelerate

        arguments = inspect.signature(accelerate.Accelerator).parameters.values()
        found |= {f"Accelerator.{argument.name}": argument.default for argument in arguments}
    with contextlib.suppress(Exception):
        from deepspeed.runtime.config import DeepSpeedConfig

        for stage in (2, 3):
            given = {"train_batch_size": 1, "zero_optimization": {"stage": stage}}
            config = DeepSpeedConfig({**given, "bf16": {"enabled": True}})
            for name, value in vars(config).items():
                parts = vars(value) if hasattr(value, "model_dump") else {"": value}
                found |= {
                    f"deepspeed stage {stage}: {name}{'.' * bool(part)}{part}": one
                    for part, one in parts.items()
                }
    plain = (bool, int, float, str, type(None))
    return {name: repr(one) for name, one in found.items() if isinstance(one, plain)}


def run(cell: dict[str, Any], place: str) -> dict[str, Any]:
    """Fork the ranks of a cell, and return what its first rank found."""
    shutil.rmtree(place, ignore_errors=True)
    os.makedirs(place)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {}
    for rank in range(RANKS):
        if (process := os.fork()) == 0:
            in_rank(cell, rank, port, place)
        ranks[process] = rank
    ended, killed = {}, None
    give_up = time.monotonic() + float(os.environ.get("VERIFY_SECONDS", SECONDS))
    while len(ended) < RANKS:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in ranks:
            ended[ranks[process]] = os.waitstatus_to_exitcode(status)
            if status:
                give_up = min(give_up, time.monotonic() + 3)
        elif not process:
            time.sleep(0.02)
        if killed is None and time.monotonic() > give_up:
            killed = [rank for process, rank in ranks.items() if rank not in ended]
            for process, rank in ranks.items():
                if rank not in ended:
                    os.kill(process, signal.SIGKILL)
    found = []
    for rank in sorted(ended, key=lambda rank: (rank in (killed or []), rank)):
        with contextlib.suppress(OSError, ValueError):
            with open(f"{place}/{rank}.json", encoding="utf-8") as file:
                found.append(json.load(file))
    first = next((one for one in found if one["answer"] != "right"), None)
    if first is None and any(ended.values()):
        words = (
            f"rank {killed[0]} did not end"
            if killed
            else f"a rank ended with {max(ended.values(), key=abs)}"
        )
        first = {"answer": "raised", "words": words}
    first = first or found[0]
    if first["answer"] == "right":
        shutil.rmtree(place, ignore_errors=True)
    return first


def in_rank(cell: dict[str, Any], rank: int, port: int, place: str) -> None:
    """Become a rank of a cell, write what it found, and leave."""
    code = 1
    try:
        log = os.open(f"{place}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
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
        sys.stdout.flush()
        sys.stderr.flush()
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
    import transformers.training_args

    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    transformers.utils.is_torch_bf16_gpu_available = lambda: True


# What every cell has: a model, batches, the truth and the judge.


def model_of(cell: dict[str, Any], seed: int = 0) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.2,
        tie_word_embeddings=cell.get("tied", False),
        use_cache=False,
    )
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
        kinds = {"use_reentrant": cell["reentrant"]}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kinds)
        if cell["reentrant"]:
            model.enable_input_require_grads()
    return model.train()


def batch_of(step: int, micro: int, rank: int) -> dict[str, Any]:
    """Return rows of one rank; the number of tokens to learn differs between ranks and batches."""
    import torch

    chance = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=chance)
    return {"input_ids": tokens, "labels": tokens.clone()}


def plain(name: str) -> str:
    """Return the name of a parameter without what wraps it."""
    for part in ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module."):
        name = name.replace(part, "")
    return name.removeprefix("module.")


def true_gradients(
    cell: dict[str, Any], weights: dict[str, Any], batches: list[Any], tokens: bool = False
) -> dict[str, Any]:
    """Return the gradients of one process: a mean over batches, or over all of their tokens."""
    import torch

    model = model_of(
        {key: cell[key] for key in ("tied", "reused", "frozen", "lora") if key in cell}
    )
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights[name])
    if cell.get("precision") == "bf16":
        model.to(torch.bfloat16)
    total: dict[str, Any] = {}
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
    cell: dict[str, Any],
    step: int,
    before: dict[str, Any],
    after: dict[str, Any],
    gradients: dict[str, Any],
    norm: float | None,
    rates: dict[str, float],
) -> dict[str, float]:
    """Hold the update of a step against the true one.

    Raises:
        Wrong: it is another one.
    """
    exact = cell.get("precision", "fp32") == "fp32"
    limit = EXACT if exact else ROUNDED
    true_norm = norm_of(gradients.values())
    scale = min(1.0, cell["clip"] / (true_norm + 1e-6)) if cell.get("clip") else 1.0
    truth = {name: scale * rates.get(name, 1.0) * one for name, one in gradients.items()}
    update = {name: before[name] - after[name] for name in before}
    moved = [name for name, one in update.items() if name not in truth and bool(one.any())]
    if moved:
        raise Wrong(f"step {step}: {moved[0]} is frozen, and was changed")
    size = norm_of(truth.values())
    error = norm_of(update[name] - one for name, one in truth.items()) / size
    along = (
        sum(float((update[n].double() * one.double()).sum()) for n, one in truth.items()) / size**2
    )
    if not error <= limit or (not exact and abs(along - 1) > SIZE):

        def off(name: str) -> float:
            return norm_of([update[name] - truth[name]])

        worst = max(truth, key=off)
        raise Wrong(
            f"step {step}: the update misses the true one by {error:.3g} of its size, and has "
            f"{along:.3g} of its size; most in {worst}"
        )
    if norm is not None and abs(norm / true_norm - 1) > NORM[limit]:
        raise Wrong(f"step {step}: the norm {norm:.6g} of the gradients is {true_norm:.6g}")
    return {"error": error, "size": along, "norm": true_norm}


def trained(cell: dict[str, Any], engine: Any, steps: int = 2, first: int = 0) -> dict[str, Any]:
    """Train, hold each step against one process, and return the largest error."""
    import torch.distributed as dist

    found: dict[str, Any] = {"error": 0.0}
    micros = cell.get("accumulation", 1)
    for step in range(first, first + steps):
        before = engine.weights()
        norm = engine.step([batch_of(step, micro, dist.get_rank()) for micro in range(micros)])
        after = engine.weights()
        if dist.get_rank() == 0 and step >= cell.get("judged_from", 0):
            batches = [batch_of(step, m, rank) for m in range(micros) for rank in range(RANKS)]
            gradients = true_gradients(cell, before, batches)
            one = judge(cell, step + 1, before, after, gradients, norm, engine.rates())
            found = {**one, "error": max(found["error"], one["error"])}
        dist.barrier()
    return found


class Engine:
    """A model as a backend trains it."""

    model: Any
    optimizer: Any

    def __init__(self, cell: dict[str, Any]) -> None:
        self.cell = cell

    def made_optimizer(self, model: Any) -> Any:
        """Return SGD with learning rate 1; where the cell has groups, 0.5 for the second one."""
        import torch

        groups = [[p for p in model.parameters() if p.requires_grad]]
        if self.cell.get("groups"):
            groups = [groups[0][::2], groups[0][1::2]]
        options = [{"params": group, "lr": 1.0 / (1 + at)} for at, group in enumerate(groups)]
        names = {id(p): plain(name) for name, p in model.named_parameters()}
        self.of_group = {
            names[id(p)]: 1.0 / (1 + at) for at, group in enumerate(groups) for p in group
        }
        if "adam" in self.cell:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(options, lr=1.0, eps=1.0, weight_decay=0.0)
        return torch.optim.SGD(options, lr=1.0, momentum=self.cell.get("momentum", 0.0))

    def rates(self) -> dict[str, float]:
        return self.of_group

    def weights(self) -> dict[str, Any]:
        whole = whole_of_deepspeed if "stage" in self.cell else whole_of
        return {plain(name): whole(p) for name, p in self.model.named_parameters()}

    def save(self, place: str) -> None:
        raise NotImplementedError

    def load(self, place: str) -> None:
        raise NotImplementedError


def deepspeed_config(cell: dict[str, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": cell["stage"], "stage3_param_persistence_threshold": 0}
    if "offload" in cell:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if cell.get("offload") == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    if "bucket" in cell:
        zero |= {"reduce_bucket_size": cell["bucket"], "allgather_bucket_size": cell["bucket"]}
    if "overlap" in cell:
        zero["overlap_comm"] = cell["overlap"]
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": cell.get("accumulation", 1),
        "gradient_clipping": cell.get("clip", 0.0),
        "bf16": {"enabled": cell.get("precision") == "bf16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if "accumulates_in" in cell:
        config["data_types"] = {"grad_accum_dtype": cell["accumulates_in"]}
    if "scheduler" in cell:
        config["scheduler"] = cell["scheduler"]
    return config


class DeepSpeed(Engine):
    def __init__(self, cell: dict[str, Any], seed: int = 0) -> None:
        super().__init__(cell)
        import deepspeed

        deepspeed.init_distributed(deepspeed.get_accelerator().communication_backend_name())
        model = model_of(cell, seed)
        optimizer = self.made_optimizer(model)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=deepspeed_config(cell)
        )
        self.model = self.engine.module

    def step(self, batches: list[Any]) -> float | None:
        for batch in batches:
            inputs = {name: one.to(self.engine.device) for name, one in batch.items()}
            self.engine.backward(self.engine(**inputs).loss)
            self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def save(self, place: str) -> None:
        self.engine.save_checkpoint(place, tag="one")

    def load(self, place: str) -> None:
        self.engine.load_checkpoint(place, tag="one")


def whole_of(parameter: Any) -> Any:
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach().float().cpu().clone()


def whole_of_deepspeed(parameter: Any) -> Any:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    full = None
    if parameter.requires_grad and (
        hasattr(parameter, "_z3_optimizer") or not hasattr(parameter, "ds_id")
    ):
        full = safe_get_full_fp32_param(parameter)
    if full is None:
        gathered = contextlib.nullcontext()
        if hasattr(parameter, "ds_id"):
            gathered = deepspeed.zero.GatheredParameters([parameter])
        with gathered:
            full = parameter.detach().clone()
    return full.detach().float().cpu().clone().view(getattr(parameter, "ds_shape", full.shape))


class Loop(Engine):
    """A loop with an Accelerator."""

    def __init__(self, cell: dict[str, Any], seed: int = 0) -> None:
        super().__init__(cell)
        from accelerate import Accelerator

        options: dict[str, Any] = {"gradient_accumulation_steps": cell.get("accumulation", 1)}
        if "stage" in cell:
            from accelerate import DeepSpeedPlugin

            options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=deepspeed_config(cell))
        else:
            options["mixed_precision"] = "bf16" if "precision" in cell else "no"
        if "fsdp" in cell:
            options["fsdp_plugin"] = self.plugin = fsdp_plugin(cell)
        self.accelerator = Accelerator(**options)
        model = model_of(cell, seed)
        optimizer = self.made_optimizer(model)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def step(self, batches: list[Any]) -> float | None:
        norm = None
        for batch in batches:
            inputs = {name: one.to(self.accelerator.device) for name, one in batch.items()}
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**inputs).loss)
                if self.accelerator.sync_gradients:
                    clip = self.cell.get("clip", math.inf)
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return None if norm is None else float(norm)

    def save(self, place: str) -> None:
        if not self.cell.get("lora"):
            self.accelerator.save_state(place)
            return
        # As the Trainer does for adapters.
        from accelerate.utils import save_fsdp_model

        save_fsdp_model(self.plugin, self.accelerator, self.model, place, adapter_only=True)

    def load(self, place: str) -> None:
        if not self.cell.get("lora"):
            self.accelerator.load_state(place)
            return
        from accelerate.utils import load_fsdp_model

        load_fsdp_model(self.plugin, self.accelerator, self.model, place, adapter_only=True)


def fsdp_plugin(cell: dict[str, Any]) -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=cell.get("reshard", True),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
        activation_checkpointing=cell.get("checkpointing", False),
        state_dict_type=cell.get("saved_as", "SHARDED_STATE_DICT"),
        cpu_offload="offload" in cell,
    )
    if getattr(plugin.cpu_offload, "pin_memory", False):
        import torch

        if not torch.cuda.is_available():
            plugin.cpu_offload = copy.copy(plugin.cpu_offload)
            object.__setattr__(plugin.cpu_offload, "pin_memory", False)
    return plugin


def step_cell(cell: dict[str, Any], place: str, engine: type[Any]) -> dict[str, Any]:
    """Train two steps; where the cell resumes, save behind the first and do the second again."""
    import torch.distributed as dist

    made = engine(cell)
    if "resumes" not in cell:
        return trained(cell, made, cell.get("steps", 2))
    made.step([batch_of(0, 0, dist.get_rank())])
    saved = made.weights()
    made.save(place)
    made.step([batch_of(1, 0, dist.get_rank())])
    went_on = made.weights()
    again = engine(cell, seed=1)
    again.load(place)
    dist.barrier()
    trained_names = {plain(n) for n, p in again.model.named_parameters() if p.requires_grad}
    error = difference(saved, again.weights(), trained_names, "loaded")
    if cell["resumes"] == "state":
        again.step([batch_of(1, 0, dist.get_rank())])
        error = max(error, difference(went_on, again.weights(), trained_names, "of the next step"))
    return {"error": error}


def difference(wanted: Any, found: Any, names: set[str], words: str) -> float:
    """Return how far weights are off; Wrong if they are."""
    off = {n: norm_of([wanted[n] - found[n]]) / max(norm_of([wanted[n]]), 1e-12) for n in names}
    wrong = sorted((n for n in off if not off[n] <= EXACT), key=lambda n: -off[n])
    if wrong:
        raise Wrong(
            f"the weights {words} after a resume are others in {len(wrong)} of {len(off)} "
            f"tensors; {wrong[0]} by {off[wrong[0]]:.3g} of its size"
        )
    return max(off.values())


def trainer_cell(cell: dict[str, Any], place: str) -> dict[str, Any]:
    """Train two steps with the Trainer, on rows with different numbers of tokens to learn."""
    import torch.distributed as dist
    from transformers import Trainer, TrainerCallback, TrainingArguments

    settings: dict[str, Any] = {}
    if "stage" in cell:
        config = deepspeed_config(cell)
        settings["deepspeed"] = config
    if "fsdp" in cell:
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        settings["fsdp"] = "full_shard auto_wrap"
        settings["fsdp_config"] = {
            "fsdp_version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        }
    if cell.get("precision") == "bf16":
        settings["bf16"] = True
    arguments = TrainingArguments(
        place,
        max_steps=2,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=cell.get("accumulation", 1),
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        weight_decay=0.0,
        max_grad_norm=cell.get("clip", 0.0),
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    rows = []
    for at in range(RANKS * cell.get("accumulation", 1) * 2):
        batch = batch_of(at, 0, 0)
        for row in range(ROWS):
            labels = batch["labels"][row].clone()
            labels[: (5 * at + 3 * row) % (LENGTH - 2)] = -100
            rows.append({"input_ids": batch["input_ids"][row], "labels": labels})
    seen: list[Any] = []
    states: list[Any] = []

    class Watch(TrainerCallback):
        def note(self, model: Any) -> None:
            whole = whole_of_deepspeed if "stage" in cell else whole_of
            weights = {plain(name): whole(p) for name, p in model.named_parameters()}
            states.append((weights, list(seen)))
            seen.clear()

        def on_step_begin(self, *_: Any, model: Any, **__: Any) -> None:
            if not states:
                self.note(model)

        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            self.note(model)

    model = model_of(cell)

    class Seeing(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            seen.append({n: inputs[n].cpu().clone() for n in ("input_ids", "labels")})
            return super().compute_loss(model, inputs, *rest, **named)

    trainer = Seeing(model=model, args=arguments, train_dataset=rows, callbacks=[Watch()])
    trainer.train()
    found: dict[str, Any] = {"error": 0.0}
    for step in (1, 2):
        everywhere: list[Any] = [None] * RANKS
        dist.all_gather_object(everywhere, states[step][1])
        if dist.get_rank() == 0:
            batches = [batch for one in everywhere for batch in one]
            before, after = states[step - 1][0], states[step][0]
            gradients = true_gradients(cell, before, batches, tokens=True)
            one = judge(cell, step, before, after, gradients, None, {})
            found = {**one, "error": max(found["error"], one["error"])}
    dist.barrier()
    return found


def load_cell(cell: dict[str, Any], place: str) -> dict[str, Any]:
    """Load a saved model under ZeRO-3, and compare each weight with that of a plain load."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed.init_distributed(deepspeed.get_accelerator().communication_backend_name())
    kind: Any = LlamaForCausalLM
    model = model_of({})
    if cell.get("fused"):
        kind = MixtralForCausalLM
        config = {**model.config.to_dict(), "num_local_experts": 4, "num_experts_per_tok": 2}
        config.pop("model_type")
        torch.manual_seed(0)
        model = kind(MixtralConfig(**config))
    if dist.get_rank() == 0:
        model.save_pretrained(place)
    dist.barrier()
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    keep = HfDeepSpeedConfig(deepspeed_config(cell))
    loaded = kind.from_pretrained(place)
    found = {name: whole_of_deepspeed(p) for name, p in loaded.named_parameters()}
    del keep
    if wanted.keys() != found.keys():
        raise Wrong(f"other parameters were loaded: {sorted(wanted.keys() ^ found.keys())[0]}")
    for name, one in wanted.items():
        if one.shape != found[name].shape or not torch.equal(one, found[name]):
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
