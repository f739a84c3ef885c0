"""What the installed Accelerate, DeepSpeed and transformers make of settings, by their own code."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

from toolkit.configs.check.finding import table
from toolkit.configs.check.sources import Sources, StandIn, stand_in, version_of

_DTYPES: Final = ("float16", "bfloat16", "float32", "int8")


class Watched(argparse.Namespace):
    """Arguments that remember which of them were read."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            object.__getattribute__(self, "__dict__").setdefault("_read", set()).add(name)
        return super().__getattribute__(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What `accelerate launch` makes of a config."""

    environ: dict[str, str]
    """The variables that it sets for each rank."""

    read: frozenset[str]
    """The arguments that it read on the way, by their names in the launcher."""

    num_processes: int
    arguments: dict[str, Any]
    """Values of all arguments, from the file or by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What a script's `Accelerator()` finds in the variables of a rank."""

    fsdp: Any = None
    deepspeed: Any = None
    mesh: Any = None


class Accelerate:
    """The launcher, and the plugins of a rank."""

    def __init__(self) -> None:
        self.sources = sources = _sources("accelerate")
        self._config: Mapping[str, Any] = {}
        # The launcher reads its file with yaml, and finds what is given to `launch` in place of it.
        reader = SimpleNamespace(safe_load=self._contents)
        sources.replace("yaml", reader)
        api = _sources("torch").load("torch.distributed.fsdp.api")
        torch = sources.load_or_stand_in("torch")
        torch.cuda.is_available = lambda: True
        fsdp = torch.distributed.fsdp
        fsdp.CPUOffloadPolicy = StandIn("CPUOffloadPolicy", (fsdp.OffloadPolicy,), {})
        for name in ("ShardingStrategy", "BackwardPrefetch", "StateDictType"):
            setattr(fsdp, name, getattr(api, name))
            setattr(fsdp.fully_sharded_data_parallel, name, getattr(api, name))
        sources.load_or_stand_in("psutil").cpu_count = _one
        self._launch = sources.load("accelerate.commands.launch")
        self._ports = sources.load("accelerate.utils.launch")
        self._launch.get_int_from_env = _default
        self._ports.is_port_in_use = _free
        self._ports.get_free_port = lambda: 29500
        self._parser: argparse.ArgumentParser = self._launch.launch_command_parser()
        self.arguments: dict[str, Any] = vars(self._parser.parse_args(["script.py"]))
        """Every argument of the launcher, with its default."""

    @property
    def top_level(self) -> list[str]:
        """Keys of a config file, outside of its sections."""
        config = self.sources.get("accelerate.commands.config.config_args", "ClusterConfig")
        return [*config.__dataclass_fields__]

    def launch(self, config: Mapping[str, Any], environ: Mapping[str, str]) -> Launched:
        """Return what the launcher makes of the contents of a config file.

        Raises:
            Exception: whatever the launcher raises.
        """
        self._config = config
        self._see(environ, {__file__: ""})
        given = Watched()
        words = ["--config_file", __file__, "script.py"]
        arguments, defaults, from_file = self._launch._validate_launch_command(
            self._parser.parse_args(words, given)
        )
        read: set[str] = vars(given)["_read"]
        read.clear()
        if arguments.use_deepspeed:
            fields = [*defaults.deepspeed_config.keys(), *(["mixed_precision"] * from_file)]
            arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
            _, made = self._ports.prepare_deepspeed_cmd_env(arguments)
        elif arguments.use_fsdp or arguments.use_megatron_lm or arguments.multi_gpu:
            made = self._ports.prepare_multi_gpu_env(arguments)
        else:
            _, made = self._ports.prepare_simple_launcher_cmd_env(arguments)
        names = frozenset(read)
        ranks = int(str(arguments.num_processes or 1))
        values = dict(vars(given))
        return Launched(environ=made, read=names, num_processes=ranks, arguments=values)

    def rank(self, environ: Mapping[str, str], deepspeed: Any, num_processes: int) -> Rank:
        """Return what an `Accelerator()` makes of its variables.

        Args:
            environ: Those of the rank.
            deepspeed: Contents of the file that they name; None where they name none.
            num_processes: Ranks in all.

        Raises:
            Exception: whatever Accelerate raises.
        """
        kinds = self.sources.load("accelerate.utils.dataclasses")
        environ = dict(environ)
        if deepspeed is not None:
            environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = __file__
        self._see(environ, {__file__: json.dumps(deepspeed)})
        fsdp = plugin = mesh = None
        if environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            plugin = kinds.DeepSpeedPlugin()
            plugin.set_mixed_precision(environ.get("ACCELERATE_MIXED_PRECISION", "no"))
        elif environ.get("ACCELERATE_USE_FSDP") == "true":
            fsdp = kinds.FullyShardedDataParallelPlugin()
        if environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
            mesh = self.sources.get("accelerate.parallelism_config", "ParallelismConfig")()
            mesh._validate_accelerator(
                SimpleNamespace(
                    num_processes=num_processes,
                    multi_device=fsdp is None and plugin is None,
                    is_fsdp2=fsdp is not None and fsdp.fsdp_version == 2,
                    distributed_type="DEEPSPEED" if plugin else "",
                    is_main_process=False,
                )
            )
        return Rank(fsdp=fsdp, deepspeed=plugin, mesh=mesh)

    def _contents(self, _: object) -> dict[str, Any]:
        return copy.deepcopy(dict(self._config))

    def _see(self, environ: Mapping[str, str], files: Mapping[str, str]) -> None:
        for held, new in ((self.sources.environ, environ), (self.sources.files, files)):
            held.clear()
            held.update(new)


@cache
def accelerate_library() -> Accelerate:
    """Return the installed Accelerate.

    Raises:
        Exception: it is not installed, or of a release that cannot be read.
    """
    return Accelerate()


class DeepSpeed:
    """The class that reads a config, and those that it is made of."""

    def __init__(self) -> None:
        release = version_of("torch") or "0"
        torch = stand_in("torch", __version__=release, dtype=type("dtype", (), {}))
        for name in _DTYPES:
            setattr(torch, name, torch.dtype())
        self._ranks = 1
        ranks = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: self._ranks)
        self.sources = _sources("deepspeed")
        self.sources.replace("torch", torch)
        self.sources.replace("deepspeed.comm", ranks)
        # A file is judged as on a machine with GPUs.
        self.sources.load("deepspeed.accelerator").get_accelerator.device_name = _cuda
        self.kind = self.sources.get("deepspeed.runtime.config", "DeepSpeedConfig")
        self.model = self.sources.get("deepspeed.runtime.config_utils", "DeepSpeedConfigModel")
        self.schedules = self.sources.load("deepspeed.runtime.lr_schedules")
        aio = "deepspeed.runtime.swap_tensor.aio_config"
        self.aio = self.sources.get(aio, "AIO_DEFAULT_DICT")
        self.optimizers = self.sources.get("deepspeed.runtime.config", "DEEPSPEED_OPTIMIZERS")

    def config(self, contents: Mapping[str, Any], *, ranks: int = 1) -> Any:
        """Return DeepSpeed's reading of the contents of a file; raises what it raises."""
        self._ranks = ranks
        return self.kind(dict(contents))


@cache
def deepspeed_library() -> DeepSpeed:
    """Return the installed DeepSpeed; raises as `accelerate`."""
    return DeepSpeed()


def filled_by_trainer(
    config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return a DeepSpeed config with what transformers' Trainer fills in, and what it refuses.

    Args:
        config: The contents of the file.
        arguments: Values of all `TrainingArguments`, and `world_size`.
    """
    trainers = _trainer_config()(copy.deepcopy(dict(config)))
    trainers.trainer_config_process(SimpleNamespace(**arguments))
    return trainers.config, [line.removeprefix("- ") for line in trainers.mismatches]


@cache
def _trainer_config() -> Any:
    sources = _sources("transformers")
    sources.replace("accelerate.utils.deepspeed", accelerate_library().sources.load(_HF_CONFIG))
    utils = sources.load_or_stand_in("transformers.utils")
    utils.is_accelerate_available = utils.is_torch_available = lambda: True
    return sources.get("transformers.integrations.deepspeed", "HfTrainerDeepSpeedConfig")


_HF_CONFIG: Final = "accelerate.utils.deepspeed"


def _sources(library: str) -> Sources:
    names: Sequence[str] = table()["facts"]["not_needed"][library]
    return Sources(library, {name: stand_in(name) for name in names})


def _cuda() -> str:
    return "cuda"


def _one(**_: object) -> int:
    return 1


def _default(_: object, default: int) -> int:
    return default


def _free(port: object = None) -> bool:
    """Stand for the launcher's look at a port, which only a number has."""
    if not isinstance(port, int):
        raise TypeError(f"main_process_port has to be a whole number, and is {port!r}")
    return False
