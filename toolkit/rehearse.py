"""Run any script, ours or not, under a config made for GPUs on a machine without them.

    accelerate launch --config_file zero3.yaml -m toolkit.rehearse script.py --its --own flags

The processes, the collectives (gloo) and the engines are real; only the device is the CPU.
Left alone, Accelerate 1.15 starts the same ranks without a GPU and lets each believe that it
is alone (`DistributedType.NO`), or runs plain DDP for every backend when asked for the CPU
(state.py, `_prepare_backend`). With as many GPUs as ranks, nothing here changes anything.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib.util
import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.configs import FittedConfig, fit_to_run
from toolkit.configs.inline import INLINE_FIELDS
from toolkit.configs.requested import (
    DEEPSPEED_FILE,
    LAUNCHER,
    asks_for_deepspeed,
    check_left_over,
    read_deepspeed_config,
    requested_strategy,
    shown,
)
from toolkit.environment import check_installed, has_compiler
from toolkit.errors import UsageError
from toolkit.escaping import one_line
from toolkit.launching.builds import clear_stale_locks, unbuilt
from toolkit.launching.python import check_package_folder
from toolkit.launching.ranks import die_with_parent, leave, quiet, say
from toolkit.launching.status import STATUS_DIR, StatusFile, guard
from toolkit.redaction import redact, redact_output
from toolkit.search_path import put_behind_library

USAGE = (
    "Usage: accelerate launch --config_file FILE -m toolkit.rehearse SCRIPT.py [ARGS], "
    "or -m toolkit.rehearse -m MODULE [ARGS]"
)

PURPOSE = (
    "Runs the script unchanged, with fewer GPUs than processes on the CPU, under the same config, "
    "and says at the end what engaged."
)

RANK_0_SPEAKS_SECONDS = 5.0


def main() -> None:
    """Run the script named on the command line in this rank.

    Leaves with the script's own status; 2 for a mistake of the user's, 3 when refused.
    """
    die_with_launcher()
    if sys.argv[1:2] in (["-h"], ["--help"]):
        if os.environ.get("RANK", "0") == "0":
            print(f"{USAGE}\n\n{PURPOSE}")  # noqa: T201
        return
    redact_output()
    quiet()
    from toolkit.measuring.attestation import Refused

    code = 0
    rehearsal = False
    try:
        run_script = _script(sys.argv[1:])
        folder = os.environ.get(STATUS_DIR)
        rank = int(os.environ.get("RANK", "0"))
        status = None if folder is None else StatusFile(Path(folder), rank)
        with guard(status, refused_by=(Refused,)) if status else contextlib.nullcontext():
            check_package_folder()
            rehearsal = rehearse_if_needed()
            if not rehearsal and asks_for_deepspeed(os.environ):
                check_installed("deepspeed")
                config = read_deepspeed_config(os.environ)
                if local_rank() == 0:
                    _say_builds(config)
            from toolkit.measuring.foreign import watch

            with watch(rehearsal=rehearsal):
                _run(run_script)
    except UsageError as error:
        code = told(2, str(error))
    except Refused as error:
        code = told(3, f"refused: {error}")
    if code:
        raise SystemExit(code)
    if rehearsal:
        leave()


def _run(script: Callable[[], object]) -> None:
    """Run the script; that it ended well by `sys.exit()` is no different from its last line."""
    _spawn_without_current_folder()
    try:
        script()
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


def told(code: int, text: str) -> int:
    """Say on rank 0 why all ranks leave, and return the status to leave with."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"toolkit: {one_line(redact(text))}", file=sys.stderr, flush=True)  # noqa: T201
    else:
        # The first rank to leave has the launcher end the others: rank 0 speaks before.
        time.sleep(RANK_0_SPEAKS_SECONDS)
    return code


def _spawn_without_current_folder() -> None:
    """Have `multiprocessing` start Python without the current folder in front of the library.

    PYTHONSAFEPATH would also take their own folders from the scripts that the script may start.
    tests/test_search_path.py fails when the function moves (Python 3.11).
    """
    from multiprocessing import util

    original = util._args_from_interpreter_flags
    util._args_from_interpreter_flags = lambda: [*original(), "-P"]


def _script(arguments: list[str]) -> Callable[[], object]:
    """Return the call that runs the script as `python SCRIPT` or `python -m MODULE` would."""
    if arguments[:1] == ["-m"]:
        name = arguments[1] if len(arguments) > 1 else ""
        if not _is_module(name):
            raise UsageError(f"There is no module {name!r} to rehearse. {USAGE}")

        def run_module() -> object:
            sys.argv = arguments[1:]
            put_behind_library(str(Path.cwd()))
            return runpy.run_module(name, run_name="__main__", alter_sys=True)

        return run_module
    if not arguments:
        raise UsageError(f"Name the script to rehearse. {USAGE}")
    script = Path(arguments[0])
    if not script.is_file():
        raise UsageError(f"There is no script {script} here ({Path.cwd()}). {USAGE}")

    def run_path() -> object:
        sys.argv = arguments
        put_behind_library(str(script.parent.resolve()))
        return runpy.run_path(str(script), run_name="__main__")

    return run_path


def _is_module(name: str) -> bool:
    before = [*sys.path]
    put_behind_library(str(Path.cwd()))
    try:
        return bool(name) and importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
    finally:
        sys.path[:] = before  # what we import before the module is never found in its folder


def die_with_launcher() -> None:
    """Don't outlive the launcher. A process that no launcher started may outlive its shell."""
    if {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys():
        die_with_parent()


def rehearse_if_needed() -> bool:
    """Move this rank to the CPU when the machine has fewer GPUs than ranks.

    Must run before anything in the process asks CUDA or Accelerate for a device.

    Returns:
        Whether this is a rehearsal.

    Raises:
        UsageError: the shell holds variables of another launch, or the config has mistakes.
    """
    import torch

    check_left_over(os.environ)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = torch.accelerator.device_count()
    if found >= ranks:
        return False
    if local_rank() == 0:
        hidden = f" The {found} found stay hidden." if found else ""
        many = "rank" if ranks == 1 else "ranks"
        say(f"rehearsal{_asked()}: {ranks} {many}, {found} GPUs. Training runs on the CPU.{hidden}")
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "ACCELERATE_BYPASS_DEVICE_MAP": "true",  # DDP gets no device_ids
        "DS_ACCELERATOR": "cpu",
    }
    on_one_machine = os.environ.get("WORLD_SIZE", "1") == str(ranks)
    if on_one_machine and "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if asks_for_deepspeed(os.environ):
        use_deepspeed_config(checked_deepspeed_config(), rehearsal=True)
    _patch_accelerate()
    _patch_transformers()
    if importlib.util.find_spec("deepspeed") is not None:
        _patch_deepspeed_config()
    return True


def _asked() -> str:
    """Name what the launcher's config asks for; what is wrong with it is said later, in full."""
    with contextlib.suppress(UsageError):
        strategy = requested_strategy(os.environ)
        if LAUNCHER in os.environ:
            return f" of {shown(strategy)}"
    return ""


def checked_deepspeed_config(file: str | None = None) -> dict[str, Any]:
    """Return the DeepSpeed config that the launcher asks for, checked by DeepSpeed itself as well.

    Args:
        file: Another one, by its path or as base64.

    Raises:
        UsageError: the file isn't there, or has mistakes; or DeepSpeed is not installed.
    """
    check_installed("deepspeed")
    from toolkit.training.deepspeed_file import section_mistakes

    environ = os.environ if file is None else {DEEPSPEED_FILE: file}
    return read_deepspeed_config(environ, check_sections=section_mistakes)


def use_deepspeed_config(config: dict[str, Any], **fit: Any) -> list[str]:
    """Hand this rank's Accelerate a fitted config, and return what was changed."""
    fitted = _fitted(config, **fit)
    text = json.dumps(fitted.config).encode()
    if DEEPSPEED_FILE not in os.environ and INLINE_FIELDS in os.environ:
        # Of the YAML's own fields. Accelerate would refuse them beside the config below.
        os.environ[INLINE_FIELDS] = "deepspeed_config_file"
    os.environ[DEEPSPEED_FILE] = base64.urlsafe_b64encode(text).decode()
    if local_rank() == 0:
        _say_builds(fitted.config)
    return fitted.changes


def _fitted(config: dict[str, Any], **fit: Any) -> FittedConfig:
    launch = f"launch-{os.getppid()}"  # the launcher is the parent of all its ranks
    fitted = fit_to_run(config, can_build=has_compiler(), launch=launch, **fit)
    for change in fitted.changes if local_rank() == 0 else ():
        say(f"deepspeed: {change}")
    return fitted


def _say_builds(config: dict[str, Any]) -> None:
    """Name what DeepSpeed is about to compile, and clear the locks that it would wait for."""
    for lock in clear_stale_locks():
        say(f"removed the lock of a build that was killed: {lock}")
    zero = config.get("zero_optimization", {})
    sections = [zero.get(key) or {} for key in ("offload_optimizer", "offload_param")]
    devices = [section.get("device") for section in sections]
    parts = ["async_io", "pin_memory"] if "nvme" in devices else []
    if devices[0] in ("cpu", "nvme") and config.get("zero_force_ds_cpu_optimizer", True):
        parts.append("cpu_adam")
    if missing := unbuilt(parts):
        say(f"DeepSpeed compiles {' and '.join(missing)} now, once; it takes some minutes")


def _patch_accelerate() -> None:
    """Let Accelerate 1.15 take gloo ranks for GPU ranks; every engine then follows its own path.

    A public way is missing: huggingface/accelerate#2741 (a CPU launch starts one process) and
    state.py's `not cpu` before FSDP and DeepSpeed. tests/test_rehearse.py fails when this moves.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import get_fsdp2_grad_scaler

    original = PartialState._prepare_backend

    def prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, DistributedType]:
        if cpu or "LOCAL_RANK" not in os.environ:
            return original(self, cpu, sagemaker_dp, backend)
        if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
            _patch_deepspeed()
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = prepare_backend

    set_cpu_offload = FullyShardedDataParallelPlugin.set_cpu_offload

    def set_cpu_offload_unpinned(self: Any) -> None:
        set_cpu_offload(self)
        # CPUOffloadPolicy pins memory by default, which needs a GPU.
        if getattr(self.cpu_offload, "pin_memory", False):
            from torch.distributed.fsdp import CPUOffloadPolicy

            self.cpu_offload = CPUOffloadPolicy(pin_memory=False)

    FullyShardedDataParallelPlugin.set_cpu_offload = set_cpu_offload_unpinned

    init = Accelerator.__init__

    @functools.wraps(init)
    def init_with_fp16(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # On a CPU Accelerate silently computes in fp32 when fp16 is asked, though torch can do it.
        if self.state.mixed_precision == "fp16" and self.device.type == "cpu":
            self.native_amp = True
            self.scaler = (
                get_fsdp2_grad_scaler(device="cpu")
                if self.is_fsdp2
                else torch.amp.GradScaler("cpu")
            )

    Accelerator.__init__ = init_with_fp16


def _patch_deepspeed() -> None:
    """Skip DeepSpeed's shared-memory op: a minute of compiling for inference alone.

    `deepspeed/comm/torch.py` builds it for every CPU process group and uses it in
    `inference_all_reduce` only; training's collectives stay on gloo.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _patch_deepspeed_config() -> None:
    """Fit each DeepSpeed config that a script hands over by itself (accelerate 1.15)."""
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    original = HfDeepSpeedConfig.__init__

    def init(self: Any, config_file_or_dict: str | dict[str, Any]) -> None:
        config = config_file_or_dict
        if not isinstance(config, dict):
            config = checked_deepspeed_config(config)
        original(self, _fitted(config, rehearsal=True).config)

    HfDeepSpeedConfig.__init__ = init


def _patch_transformers() -> None:
    """Let `TrainingArguments(bf16=True)` through: a CPU computes in bf16, only slower."""
    import transformers.training_args
    import transformers.utils
    import transformers.utils.import_utils

    for module in (
        transformers.utils,
        transformers.utils.import_utils,
        transformers.training_args,
    ):
        module.is_torch_bf16_gpu_available = lambda: True


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


if __name__ == "__main__":
    main()
