"""DeepSpeed's ZeRO: optimizer states, gradients and parameters cut into partitions."""

from __future__ import annotations

import functools
import inspect
import math
import pickle
import re
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from toolkit.engines.base import Backend, BackendSpec, StatesOf, Within
from toolkit.engines.deepspeed_gaps import count_again, restore_swapped, swapped_state
from toolkit.engines.fsdp_shards import GETATTR, member_of
from toolkit.engines.hooks import Undo, replace_method, wrap_method
from toolkit.engines.optimizers import optimizer_of, states_held
from toolkit.engines.tensors import (
    has_rows,
    heaviest_row,
    is_partitioned,
    named_parameters,
    shape_of,
    storage_bytes,
    sum_of_squares,
    tensors_in,
)
from toolkit.engines.wrapped import Wrapped, split_by, world_size
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from accelerate import Accelerator


def _watch_builds(took: Callable[[float], object]) -> Undo:
    """Call `took` with the seconds of each build of a C++ part, loading an older one included.

    DeepSpeed has no public hook (0.19, op_builder/builder.py); tests/measuring/test_clock.py fails
    when the method moves.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    @contextmanager
    def timed() -> Iterator[None]:
        begun = time.perf_counter()
        _ask_once_for_the_cpu()
        try:
            yield
        finally:
            took(time.perf_counter() - begun)

    return wrap_method(OpBuilder, "jit_load", timed)


def _ask_once_for_the_cpu() -> None:
    """Keep py-cpuinfo's answer: it starts a process for each, and a builder asks several times."""
    import cpuinfo  # as DeepSpeed does: late, since its import starts processes, too

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


SPEC: Final = BackendSpec(
    distributed_type="DEEPSPEED",
    wrapper="DeepSpeedEngine",
    masters_in_fp32=True,
    reduces="computed dtype",
    watch_builds=_watch_builds,
)

SEQUENCE_PARALLEL_SPEC: Final = replace(SPEC, reduces="fp32")
"""With rows that ranks share: `seq_parallel_communication_data_type` is fp32 where nothing is said
(deepspeed 0.19, runtime/constants.py)."""

_TRACE: Final = tuple(
    f"_PartitionedParameterCoordinator__{name}"
    for name in ("trace_mode", "submodule_order", "param_order", "step_id_module_fetched_for")
)
"""ZeRO-3's memory of the passes of a step (deepspeed 0.19, partitioned_param_coordinator.py)."""


def is_engine(model: Any) -> bool:
    """Whether DeepSpeed wraps a model; DeepSpeed itself is not imported for the answer."""
    return hasattr(model, "zero_optimization_stage")


class DeepSpeed(Backend):
    """A model in DeepSpeed's engine, of any ZeRO stage."""

    steps_in_backward = True

    @property
    def _zero(self) -> Any:
        """ZeRO's optimizer, which wraps the one that steps."""
        return self._model.optimizer

    def gathers_in_forward(self) -> bool:
        return any(map(is_partitioned, self._model.parameters()))

    def actual_settings(self, accelerator: Accelerator) -> dict[str, Any]:
        engine, zero = self._model, self._zero
        states_on_cpu = any(getattr(zero, n, False) for n in ("offload_optimizer", "cpu_offload"))
        bf16, fp16 = engine.bfloat16_enabled(), engine.fp16_enabled()
        return {
            "wrapper": "DeepSpeedEngine",
            "zero_stage": engine.zero_optimization_stage(),
            "model_split_by": split_by(accelerator, tensor=engine.autotp_size()),
            "offload_optimizer": _device(getattr(zero, "swap_optimizer", False), states_on_cpu),
            "offload_parameters": _device(
                getattr(zero, "params_in_nvme_and_cpu", False),
                getattr(zero, "offload_param", False),
            ),
            # Not the Accelerator's precision: with `bf16: auto` and no Trainer to fill it in,
            # DeepSpeed computes in fp32.
            "precision": "bf16" if bf16 else "fp16" if fp16 else "no",
            "gradient_clipping": self.gradient_clipping(),
            "gradient_accumulation_steps": self.accumulation_steps(),
        }

    def reduce_dtype(self) -> torch.dtype | None:
        return self._model.communication_data_type or super().reduce_dtype()

    def gradient_clipping(self) -> float | None:
        return float(self._model.gradient_clipping())

    def accumulation_steps(self) -> int | None:
        return self._model.gradient_accumulation_steps()

    # Tensors that a rank holds

    def parameters_held(self) -> Iterator[torch.Tensor]:
        # A gathered parameter, persistent ones above all, is held beside its partition;
        # a released one is an empty tensor. ZeRO-3 gathers into the parameters themselves.
        yield from super().parameters_held()
        for parameter in self._model.parameters():
            if is_partitioned(parameter):
                yield parameter.ds_tensor.detach()

    def masters_held(self) -> Iterator[torch.Tensor]:
        yield from getattr(self._zero, "single_partition_of_fp32_groups", ())
        yield from getattr(self._zero, "fp32_partitioned_groups_flat", ())
        yield from getattr(self._zero, "fp32_groups_flat_partition", ())

    def gradients_held(self) -> Iterator[torch.Tensor]:
        yield from super().gradients_held()
        zero = self._zero
        for partitions in getattr(zero, "averaged_gradients", {}).values():
            yield from tensors_in(partitions)
        yield from tensors_in(getattr(zero, "grad_partitions_flat_buffer", None))
        # DeepSpeed has a separate optimizer for ZeRO-1 in bf16 with `grad_accum_dtype: fp32`.
        yield from getattr(zero, "fp32_groups_gradients_flat", ())
        for master in self.masters_held():
            if master.grad is not None:
                yield master.grad

    def unreduced_gradients(self) -> Iterator[torch.Tensor]:
        for bucket in getattr(self._zero, "ipg_buckets", {}).values():
            yield from tensors_in(bucket.buffer)
        # With offload, gradients on their way to the host.
        for name in ("temp_grad_buffer_for_gpu_offload", "temp_grad_buffer_for_cpu_offload"):
            yield from tensors_in(getattr(self._zero, name, None))

    def swap_files(self) -> Iterator[Path]:
        swappers = {
            id(swapper): swapper
            for parameter in self._model.parameters()
            if (swapper := getattr(parameter, "nvme_swapper", None)) is not None
        }
        for swapper in swappers.values():
            yield from map(Path, swapper.id_to_path.values())
        swapper = getattr(self._zero, "optimizer_swapper", None)
        if swapper is not None:
            for group in swapper.swap_params_info.values():
                yield from map(Path, [*group.get_swap_paths(), *group.get_swap_gradient_paths()])

    def share_of(self, parameter: Any) -> float:
        return 1.0  # each rank steps with its own partition

    def gradient_squares(self) -> Iterator[tuple[str, torch.Tensor | float, int]]:
        for name, parameter in named_parameters(self._model):
            if not parameter.requires_grad:
                continue
            # DeepSpeed's bf16 optimizer leaves 16-bit gradients beside the ones that it steps on.
            if parameter.grad is not None and getattr(parameter, "_hp_grad", None) is None:
                yield name, sum_of_squares(parameter.grad), world_size()
            else:
                yield name, self._square_of_partition(parameter), 1

    def _square_of_partition(self, parameter: Any) -> torch.Tensor | float:
        """Return the sum of squares of this rank's partition of one gradient (deepspeed 0.19)."""
        norms = getattr(self._zero, "norm_for_param_grads", None)
        if norms is not None:  # offloaded: computed for clipping while it was on the device
            return norms.get(self._zero.get_param_id(parameter), 0.0) ** 2
        partition, _ = self._partition(parameter)
        return 0.0 if partition is None else sum_of_squares(partition)

    def _partition(self, parameter: Any) -> tuple[torch.Tensor | None, int]:
        """Return this rank's flat partition of one gradient, and the number of its first element.

        The partition is None where those of other ranks hold all of it.
        """
        if is_partitioned(parameter):
            from deepspeed.utils import safe_get_local_grad

            partition = safe_get_local_grad(parameter)
            ranks_before = torch.distributed.get_rank(parameter.ds_process_group)
            return partition, ranks_before * partition.numel()
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None, 0
        # As `get_full_hp_grad` of deepspeed/utils/tensor_fragment.py reads it.
        fragment = mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
        address = mapping.lp_fragment_address
        if fragment.numel() == parameter.numel():
            fragment = fragment.narrow(0, address.start, address.numel)
        return fragment, address.start

    def gradient_rows(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for name, parameter in named_parameters(self._model):
            if not parameter.requires_grad:
                continue
            if parameter.grad is not None and getattr(parameter, "_hp_grad", None) is None:
                yield from self._heaviest_row(name, parameter.grad, world_size())
                continue
            shape = shape_of(parameter)
            if has_rows(shape):
                partition, first = self._partition(parameter)
                if partition is not None and partition.numel():
                    width = math.prod(shape[1:])
                    square, row = heaviest_row(partition, first=first, width=width)
                    yield name, square, row

    def rows_unknown(self) -> str | None:
        offloaded = getattr(self._zero, "norm_for_param_grads", None) is not None
        return "DeepSpeed keeps only the norms of gradients that it offloads" if offloaded else None

    def parameter_groups(self, optimizer: Any) -> list[tuple[dict[str, Any], list[Any]]]:
        # The groups themselves hold flat partitions in the parameters' place.
        groups = optimizer_of(optimizer).param_groups
        zero = self._zero
        parameters: list[list[Any]] = [[] for _ in groups]
        for name in ("bit16_groups", "bf16_groups"):  # the latter of its optimizer for bf16
            for number, group in enumerate(getattr(zero, name, ())):
                parameters[number] += group
        for number, group in enumerate(getattr(zero, "fp16_groups", ())):
            parameters[zero.sub_group_to_group_id[number]] += group
        return list(zip(groups, parameters, strict=True))

    # One parameter whole

    def full_weight(self, parameter: Any) -> torch.Tensor:
        # In fp32 a parameter has its master's numbers, and is cheaper to gather.
        if parameter.requires_grad and parameter.dtype != torch.float32:
            from deepspeed.utils import safe_get_full_fp32_param

            master = safe_get_full_fp32_param(parameter)
            if master is not None:
                return master.detach()
        return joined(parameter)

    def full_gradient(self, parameter: Any) -> torch.Tensor:
        gradient = parameter.grad
        if parameter.requires_grad:
            from deepspeed.utils import safe_get_full_grad

            gradient = safe_get_full_grad(parameter)
        return torch.zeros(shape_of(parameter)) if gradient is None else gradient.detach()

    @torch.no_grad()
    def set_full_weight(self, parameter: Any, numbers: torch.Tensor) -> None:
        from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

        # The weight for computing, and the fp32 master that the optimizer steps on.
        if is_partitioned(parameter):
            _put_into_partitions(parameter, numbers)
        else:
            parameter.copy_(numbers)
            safe_set_full_fp32_param(parameter, numbers)
        master = safe_get_full_fp32_param(parameter)
        if master is not None and not torch.equal(master.to(numbers), numbers):
            raise RuntimeError(
                f"DeepSpeed's optimizer did not take other weights for a parameter of shape "
                f"{tuple(numbers.shape)}, and would step on its own."
            )

    # The optimizer's states, whole: it steps on flat partitions of whole groups

    @functools.cached_property
    def _flat_groups(self) -> list[tuple[torch.Tensor, list[Any]]]:
        """The partition of this rank of each group that is stepped, and the group's parameters."""
        names = ("bit16_groups", "bf16_groups", "fp16_groups")
        groups = next(filter(None, (getattr(self._zero, name, None) for name in names)))
        return list(zip(self.masters_held(), groups, strict=True))

    @functools.cached_property
    def _flat_of(self) -> dict[int, torch.Tensor]:
        return {id(p): flat for flat, parameters in self._flat_groups for p in parameters}

    def full_states(self, parameter: Any, optimizer: Any) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        flat = self._flat_of[id(parameter)]
        states: dict[str, Any] = {}
        for name, state in optimizer_of(optimizer).state[flat].items():
            if not torch.is_tensor(state) or not state.dim():
                states[name] = torch.as_tensor(state)
            elif is_partitioned(parameter):
                states[name] = safe_get_full_optimizer_state(parameter, name)
            else:
                states[name] = self._joined(parameter, state)
        return states

    def _joined(self, parameter: Any, flat: torch.Tensor) -> torch.Tensor:
        """Return what the ranks' flat partitions hold of a parameter, whole; a collective.

        deepspeed 0.19's own function knows the states of the first group alone: it looks for those
        of all groups when one has stepped (stage_1_and_2.py, `_optimizer_step`).
        """
        whole = torch.zeros(parameter.numel(), dtype=flat.dtype, device=parameter.device)
        if (place := self._place_in_flat(parameter)) is not None:
            begin, first, length = place
            whole[first : first + length].copy_(flat[begin : begin + length])
        torch.distributed.all_reduce(whole, group=parameter._dp_group)
        return whole.view(parameter.shape)

    @torch.no_grad()
    def set_full_states(self, optimizer: Any, states_of: StatesOf) -> None:
        # Before the first step there is nothing that DeepSpeed's own functions could set.
        zero, inner = self._zero, optimizer_of(optimizer)
        names = {id(parameter): name for name, parameter in named_parameters(self._model)}
        for number, (flat, parameters) in enumerate(self._flat_groups):
            is_swapped = getattr(zero, "swap_optimizer", False) and (
                zero._swappable_optimizer_subgroup(number)
            )
            if is_swapped:
                zero._optimizer_states_and_gradient_swap_in(number)
            state: dict[str, Any] = {}
            for parameter in parameters:
                place = self._place_in_flat(parameter)
                for name, numbers in states_of(names[id(parameter)]).items():
                    if not numbers.dim():
                        state[name] = _count(inner, numbers, flat)
                        continue
                    if name not in state:  # also where other ranks hold all of the parameter
                        state[name] = torch.zeros_like(flat, dtype=numbers.dtype)
                    if place is not None:
                        begin, first, length = place
                        part = numbers.flatten()[first : first + length]
                        state[name][begin : begin + length].copy_(part)
            if state:
                inner.state[flat] = state
            if is_swapped:
                zero._optimizer_states_and_gradient_swap_out(number)

    def _place_in_flat(self, parameter: Any) -> tuple[int, int, int] | None:
        """Return where this rank's part of a parameter begins in its group's flat partition.

        With it, the part's first element in the parameter, and its length; None without a part.
        """
        if is_partitioned(parameter):
            _, begin, length = self._zero.grad_position[self._zero.get_param_id(parameter)]
            first = length * torch.distributed.get_rank(parameter.ds_process_group)
            return begin, first, max(0, min(length, parameter.ds_numel - first))
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        address = mapping.lp_fragment_address
        return mapping.hp_fragment_address.start, address.start, address.numel

    def loss_scaler(self) -> Any:
        return getattr(self._zero, "loss_scaler", None)

    # Steps

    def watch_step(
        self, optimizer: Any, *, before: Callable[[], None], after: Callable[[], None]
    ) -> Undo:
        # Accelerate calls it at the end of backward; the optimizer inside steps group by group.
        @contextmanager
        def step() -> Iterator[None]:
            before()
            yield
            after()

        return wrap_method(self._model, "step", step)

    def watch_passes(self, within: Within) -> Undo:
        # ZeRO-1 and 2 reduce their last bucket when autograd is done.
        hooks = ExitStack()
        for name in ("backward", "step"):
            hooks.callback(wrap_method(self._model, name, functools.partial(within, name)))
        return hooks.close

    def skipped(self, optimizer: Any) -> torch.Tensor | bool | None:
        return bool(getattr(self._zero, "overflow", False))

    def held_scale(self, optimizer: Any) -> float:
        return float(getattr(self._zero, "loss_scale", 1.0))

    def clip_norm(self) -> Any:
        return self._model.get_global_grad_norm()

    def backward(self, accelerator: Accelerator, loss: torch.Tensor, *, micro_batches: int) -> None:
        # The loss is a share of the step's already. Left alone, DeepSpeed 0.19 divides it again.
        accelerator.backward(loss, scale_wrt_gas=False)

    @contextmanager
    def preserve_engine_state(self) -> Iterator[None]:
        """Keep ZeRO-3's trace of a training step from forwards that no backward follows.

        It would find them to differ, forget the trace, and train the next step without prefetching;
        parameters that it holds for the backward would stay gathered.
        """
        offload = getattr(self._zero, "parameter_offload", None)
        if offload is None:
            yield
            return
        coordinator = offload.get_param_coordinator()
        trace = {name: getattr(coordinator, name) for name in _TRACE}
        _forget_trace(coordinator)
        try:
            yield
        finally:
            _forget_trace(coordinator)
            for parameter in self._model.parameters():
                if parameter.ds_status.name == "AVAILABLE" and not parameter.ds_persist:
                    parameter.ds_active_sub_modules.clear()
                    parameter.partition()
            for name, value in trace.items():
                setattr(coordinator, name, value)

    # Checkpoints: the engine's own files

    def checkpoint_bytes(self, wrapped: Wrapped) -> int:
        return storage_bytes([*states_held(wrapped.optimizer), *self.masters_held()])

    def write_together(self, folder: Path, wrapped: Wrapped, *, step: int) -> None:
        self._model.save_checkpoint(
            str(folder),
            tag=engine_tag(step),
            exclude_frozen_parameters=wrapped.trains_adapters_alone,
        )

    def read(self, folder: Path, wrapped: Wrapped, *, step: int) -> None:
        # With a tag: without one, DeepSpeed starts from the beginning if `latest` is missing.
        with reads_without_code(self._model.checkpoint_engine):
            path, _ = self._model.load_checkpoint(
                str(folder),
                tag=engine_tag(step),
                load_module_strict=not wrapped.trains_adapters_alone,
            )
        if path is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint of its own in {folder}")

    def extra_state(self) -> dict[str, Any] | None:
        return swapped_state(self._zero)

    def load_extra_state(self, state: dict[str, Any] | None) -> None:
        restore_swapped(self._zero, state)
        count_again(self._zero)

    def trainer_saves_whole(self) -> bool:
        stage = self._model.zero_optimization_stage()
        return stage < 3 or self._model.zero_gather_16bit_weights_on_model_save()


@contextmanager
def reads_without_code(checkpoint_engine: Any) -> Generator[None]:
    """Let DeepSpeed unpickle only tensors, plain values and the types of its own checkpoints.

    By itself, deepspeed 0.19 unpickles anything (`torch_checkpoint_engine.py`).

    Raises:
        UsageError: a file names another type, which may run code.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    types: list[Any] = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    types.append((member_of, ".".join(GETATTR)))

    def load(path: str, map_location: Any = None) -> Any:
        try:
            with torch.serialization.safe_globals(types):
                return torch.load(path, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            name = re.search(r"GLOBAL ([\w.]+)", str(error))
            raise UsageError(
                f"{path} would run code and was not loaded: it names "
                f"{name[1] if name else 'what no checkpoint has'}. Resume only from folders that "
                "you trust."
            ) from error

    undo = replace_method(checkpoint_engine, "load", load)
    try:
        yield
    finally:
        undo()


def engine_tag(step: int) -> str:
    """Return the folder of DeepSpeed's files, by the name that its own tools look for."""
    return f"global_step{step}"


def _count(optimizer: Any, number: torch.Tensor, flat: torch.Tensor) -> torch.Tensor | int:
    """Return a count of steps as an optimizer keeps it: torch's a tensor, DeepSpeed's a number."""
    if not type(optimizer).__module__.startswith("torch."):
        return int(number)
    on_device = any(optimizer.defaults.get(name) for name in ("fused", "capturable"))
    return number.to(flat.device if on_device else "cpu", torch.float32, copy=True)


def _device(on_nvme: object, on_cpu: object) -> str:
    return "nvme" if on_nvme else "cpu" if on_cpu else "none"


def joined(parameter: Any) -> torch.Tensor:
    """Return a parameter whole, from `zero.Init` on; a collective where it is partitioned."""
    if not is_partitioned(parameter):
        return parameter.detach()
    # The engine's own gathering (`_zero3_consolidated_16bit_state_dict`) refuses to work when the
    # config file doesn't say so; GatheredParameters is public and always does.
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        # Not on the device, where the gathered parameter still lies.
        return parameter.detach().to("cpu", copy=True)


def _put_into_partitions(parameter: Any, numbers: torch.Tensor) -> None:
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_set_local_fp32_param

    with GatheredParameters([parameter], modifier_rank=0):
        parameter.copy_(numbers)
    # `safe_set_full_fp32_param` cuts past the end of a parameter with a padded last partition
    # (deepspeed 0.19).
    length = -(-numbers.numel() // torch.distributed.get_world_size(parameter.ds_process_group))
    begin = length * torch.distributed.get_rank(parameter.ds_process_group)
    partition = torch.zeros(length)
    held = numbers.flatten()[begin : begin + length]
    partition[: len(held)] = held
    safe_set_local_fp32_param(parameter, partition)


def _forget_trace(coordinator: Any) -> None:
    """Begin a new trace in new lists, so that the saved trace is no longer changed."""
    if coordinator.is_invalid_trace():
        coordinator._clear_trace_structures()
    else:
        coordinator._invalidate_trace()
    # deepspeed 0.19 caches the releases of a module by its place in the trace, under a decorator,
    # and never empties that cache (partitioned_param_coordinator.py). A lone forward fills it with
    # releases that a backward has to gather again. After a training step, a forward would keep
    # parameters that only that step needed.
    decorated = type(coordinator)._PartitionedParameterCoordinator__params_to_release
    inspect.getclosurevars(decorated).nonlocals["func"].cache_clear()
