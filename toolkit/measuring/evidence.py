"""Evidence of one step: weights, rows, losses, gradients, rates, settings.

It hooks into the model, the optimizer and the clipping themselves, so it sees their inputs in any
training loop. It gathers the model up to six times: the weights at first, before the step, given
for it, after it and when they are saved, and the gradients.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from toolkit.engines.backend import backend_of
from toolkit.engines.hooks import intercept
from toolkit.engines.optimizers import optimizer_of, pending_scale
from toolkit.engines.tensors import elements_of, held_fraction, local, number, shape_of
from toolkit.measuring.attestation import gather_objects
from toolkit.records.evidence import (
    AFTER_FILE,
    BEFORE_FILE,
    EVIDENCE_FILE,
    GRADIENTS_FILE,
    HELD_FILE,
    IGNORED,
    INITIAL_FILE,
    Clipping,
    Group,
    MicroBatch,
    Optimizer,
    RowRead,
)
from toolkit.records.json_files import SCHEMA, write_json

COMPUTING_ONLY = {"params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
"""Keys of an optimizer's group that are not settings of its update rule."""


class EvidenceKeeper:
    """Keeps the evidence of one run in a folder; every rank has one, rank 0 writes.

    Args:
        folder: Made by rank 0 if it isn't there.
        step: The step to keep, counted from 1; None: the first step with an update.
        weights: Evidence of the same step of a reference run: the step begins with the reference's
            weights, and the run's own are kept. None: the run's own weights.
        described: Strategy, engine and precision of the run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        step: int | None = None,
        weights: Path | None = None,
        **described: str,
    ) -> None:
        self.folder = folder
        self.described = described
        self.is_open = False
        """Whether the step to keep has begun and has not ended."""

        self._wanted = step
        self._weights = weights
        self._step = _KeptStep()
        self._without_loss: tuple[dict[str, Any], Any] | None = None
        """Inputs and outputs of a forward whose loss is computed outside of the model."""

        self._number = 1
        self._hooks = ExitStack()

    def __deepcopy__(self, _: Any) -> Any:
        return self  # a script may copy a model with its hooks

    def resumed_after(self, step: int) -> None:
        """Count from a checkpoint on."""
        self._number = step + 1

    def prepared(self, accelerator: Any, model: Any, optimizer: Any) -> None:
        """Keep the initial weights, and watch the model from now on; a collective."""
        self._accelerator, self._optimizer = accelerator, optimizer
        self._backend = backend_of(model)
        self._main = accelerator.is_main_process
        module = accelerator.unwrap_model(model)
        # Of a pipeline, only the ranks of the last stage see a loss.
        self._in_stages = any(p.is_meta for _, p in self._backend.full_parameters())
        self._sharded = held_fraction(model) < 1.0 or self._in_stages
        if self._main:
            self.folder.mkdir(parents=True, exist_ok=True)
        # Before all other hooks: FSDP2's own hook rounds the model's outputs to its output dtype.
        hook = module.register_forward_hook(self._forward, with_kwargs=True, prepend=True)
        self._hooks.callback(hook.remove)
        before, after = self._step_begins, self._step_ended
        self._hooks.callback(self._backend.watch_step(optimizer, before=before, after=after))
        # After the hooks of `watch_step`; with ZeRO, inside the step that they wrap.
        hook = optimizer_of(optimizer).register_step_pre_hook(lambda *_: self._optimizer_steps())
        self._hooks.callback(hook.remove)
        if not self._backend.steps_in_backward:  # else the engine clips by itself
            self._watch_clipping()
        self._watch_backward()
        self._find_parameters()
        if self._wanted is None or self._wanted == self._number:
            self._begin()
        else:
            self._keep_weights(INITIAL_FILE)

    def micro_batch(self, sample_ids: torch.Tensor | None, labels: torch.Tensor | None) -> None:
        """Take the ids and the labels of the rows that the last micro-batch had."""
        if self.is_open:
            self._step.sample_ids.append(None if sample_ids is None else sample_ids.tolist())
            if self._step.read:
                self._step.read[-1].take_labels(labels)

    def step_done(self, *, within_step: bool = False) -> None:
        """Write the evidence of the step if it was kept and updated; a collective.

        If fp16 skipped the step, the next one is kept, unless this step was requested by number.

        Args:
            within_step: The optimizer still calls its hooks, and none may be removed.
        """
        if self.is_open and self._step.updated:
            groups = self._backend.parameter_groups(self._optimizer)
            for group, (settings, _) in zip(self._step.groups, groups, strict=True):
                group["next_learning_rate"] = float(settings["lr"])
            self._write(gather_objects(self._of_this_rank()))
        if self.is_open and (self._step.updated or self._wanted is not None):
            self.is_open = False
            if not within_step:
                self.close()
        self._number += 1
        if self.is_open:
            self._step = _KeptStep(before_digest=self._step.before_digest)
        elif self._number == self._wanted:
            self._find_parameters()
            self._begin()

    def saving(self) -> None:
        """Keep the weights that are about to be saved; a collective."""
        self._keep_weights(HELD_FILE)

    def close(self) -> None:
        """Remove all hooks."""
        self.is_open, self._without_loss = False, None
        self._hooks.close()

    # Watched objects

    def _find_parameters(self) -> None:
        # Frozen weights have no gradients, and 4-bit packed weights no numbers to compare.
        self._parameters = {
            name: parameter
            for name, parameter in self._backend.full_parameters()
            if parameter.requires_grad
        }

    def _begin(self) -> None:
        self._keep_weights(BEFORE_FILE)
        self._step.before_digest = self._weights_digest()
        if self._weights is not None:
            self._take_weights(self._weights / BEFORE_FILE)
        self.is_open = True

    def _take_weights(self, file: Path) -> None:
        """Replace the weights by those in a file, which every rank reads whole; a collective."""
        with safe_open(file, "pt") as given:
            names = set(given.keys())
            for name, parameter in self._parameters.items():
                if name not in names:
                    continue
                wanted = given.get_tensor(name)
                if tuple(wanted.shape) != shape_of(parameter):
                    continue
                self._backend.set_full_weight(parameter, wanted)
                taken = self._backend.full_weight(parameter).to("cpu", torch.float32)
                if not torch.equal(taken, wanted):
                    raise RuntimeError(
                        f"{name} did not take the weights that {file} holds before the step: "
                        "this backend's weights cannot be replaced while it trains"
                    )

    def _forward(self, module: Any, _: Any, inputs: dict[str, Any], output: Any) -> None:
        if not (self.is_open and torch.is_grad_enabled()):
            return
        loss = getattr(output, "loss", None)
        if loss is None:
            self._without_loss = (inputs, output)
        elif loss.requires_grad:
            self._step.read.append(_Read(inputs, output, loss))

    def _watch_backward(self) -> None:
        def backward(original: Any, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if self.is_open and self._without_loss is not None:
                self._step.read.append(_Read(*self._without_loss, loss, by_model=False))
            self._without_loss = None
            if self.is_open and self._step.read:
                self._step.read[-1].goes_back_from(loss)
            original(loss, *args, **kwargs)

        self._hooks.callback(intercept(self._accelerator, "backward", backward))

    def _watch_clipping(self) -> None:
        def clip_grad_norm_(
            original: Any, parameters: Any, max_norm: float, *args: Any, **kwargs: Any
        ) -> Any:
            if not self.is_open:
                return original(parameters, max_norm, *args, **kwargs)
            scale = self._loss_scale()
            self._keep_gradients(loss_scale=scale, held_scale=scale)
            self._step.clip_norm = original(parameters, max_norm, *args, **kwargs)
            self._step.limit = 0.0 if math.isinf(max_norm) else float(max_norm)
            return self._step.clip_norm

        self._hooks.callback(intercept(self._accelerator, "clip_grad_norm_", clip_grad_norm_))

    def _step_begins(self) -> None:
        if not self.is_open:
            return
        held_scale = self._backend.held_scale(self._optimizer)
        if self._backend.steps_in_backward:
            self._keep_gradients(loss_scale=held_scale, held_scale=held_scale)
        elif self._step.gradient_norm is None:
            self._keep_gradients(loss_scale=self._loss_scale(), held_scale=held_scale)

    def _optimizer_steps(self) -> None:
        """Take the norms of the gradients the optimizer steps with: under ZeRO, flat partitions."""
        if not self.is_open:
            return
        held_scale = pending_scale(self._optimizer)
        for group in optimizer_of(self._optimizer).param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    held = local(parameter.grad)
                    norm = float(torch.linalg.vector_norm(held, dtype=torch.float64))
                    # Keyed by parameter: a class that calls its parent's step comes here twice.
                    share = self._backend.share_of(parameter)
                    self._step.squares[id(parameter)] = share * (norm / held_scale) ** 2

    def _step_ended(self) -> None:
        if not self.is_open or self._backend.skipped(self._optimizer):
            return
        if self._backend.steps_in_backward:
            self._step.clip_norm = self._backend.clip_norm()
            self._step.limit = self._backend.gradient_clipping()
        self._keep_weights(AFTER_FILE)
        self._step.weights_digest = self._weights_digest()
        self._step.updated = True

    # Kept tensors

    def _keep_weights(self, name: str) -> None:
        self._write_whole(name, self._backend.full_weight)

    def _write_whole(self, name: str, gather: Callable[[Any], torch.Tensor]) -> float:
        """Write a whole tensor of each parameter on rank 0, as fp32 safetensors; a collective.

        Holds only one tensor at a time. Returns the norm of all tensors together.
        """
        if not self._main:
            # Gathering is a collective: the other ranks take part in it, and keep nothing.
            return sum(_square(gather(p)) for p in self._parameters.values()) ** 0.5
        squares = 0.0
        with (self.folder / name).open("wb") as file:
            file.write(_header(self._parameters))
            for parameter in self._parameters.values():
                tensor = gather(parameter).to("cpu", torch.float32).contiguous()
                squares += _square(tensor)
                file.write(tensor.numpy().tobytes())
        return squares**0.5

    def _weights_digest(self) -> str:
        held = (p for p in self._parameters.values() if not p.is_meta)
        return digest_of(local(parameter.detach()) for parameter in held)

    def _loss_scale(self) -> float:
        scaler = self._accelerator.scaler
        return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0

    def _keep_gradients(self, *, loss_scale: float, held_scale: float) -> None:
        """Keep the gradients, unscaled; `held_scale` is the part of `loss_scale` still in them."""
        step = self._step
        if not self._backend.steps_in_backward:
            gradients = (p.grad for p in self._parameters.values() if p.grad is not None)
            step.gradients_digest = digest_of(map(local, gradients))
        step.gradient_norm = self._write_whole(
            GRADIENTS_FILE, lambda parameter: self._backend.full_gradient(parameter) / held_scale
        )
        step.scale = loss_scale
        step.groups = self._described_groups()

    def _described_groups(self) -> list[Group]:
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        decoupled = getattr(optimizer_of(self._optimizer), "adam_w_mode", None)
        return [
            Group(
                parameters=sorted(names.get(id(parameter), "?") for parameter in parameters),
                settings={
                    key: value
                    for key, value in group.items()
                    if key not in COMPUTING_ONLY and _is_plain(value)
                }
                | ({} if decoupled is None else {"decoupled_weight_decay": bool(decoupled)}),
                learning_rate=float(group["lr"]),
                next_learning_rate=None,
            )
            for group, parameters in self._backend.parameter_groups(self._optimizer)
        ]

    def _of_this_rank(self) -> dict[str, Any]:
        step = self._step
        unknown = [None] * len(step.read)
        ids = step.sample_ids if len(step.sample_ids) == len(unknown) else unknown
        return {
            "data_parallel_rank": self._backend.data_parallel_rank(),
            "read": [
                read.described(row_ids, scale=step.scale)
                for read, row_ids in zip(step.read, ids, strict=True)
            ],
            "squares": sum(step.squares.values()) if step.squares else None,
            "gradients_digest": step.gradients_digest,
            "weights_digest": step.weights_digest,
            "before_digest": step.before_digest,
        }

    def _write(self, ranks: list[dict[str, Any]]) -> None:
        if not self._main:
            return
        step = self._step
        squares = [rank["squares"] for rank in ranks]
        # Ranks that hold different parts, or none, have no digests that should agree.
        apart = self._sharded or self._backend.steps_in_backward or self._backend.one_rank_steps
        if self._backend.one_rank_steps:
            squares = [square for square in squares if square is not None]
        stepped = None
        if None not in squares:
            stepped = math.sqrt(sum(squares))
        clipping = Clipping(
            norm=None if step.clip_norm is None else number(step.clip_norm),
            limit=step.limit,
            factor=stepped / step.gradient_norm if stepped and step.gradient_norm else None,
        )
        write_json(
            self.folder / EVIDENCE_FILE,
            {"schema": SCHEMA}
            | self.described
            | {
                "num_processes": len(ranks),
                "step": self._number,
                "given": self._weights is not None,
                "ranks": _with_distinct_rows(ranks),
                "gradient_norm": step.gradient_norm,
                "gradients_agree": None if apart else _agree(ranks, "gradients_digest"),
                "weights_agree": None if self._sharded else _agree(ranks, "weights_digest"),
                "before_agree": None if self._sharded else _agree(ranks, "before_digest"),
                "clipping": clipping,
                "optimizer": Optimizer(
                    name=type(optimizer_of(self._optimizer)).__name__, groups=step.groups
                ),
            },
        )


def _with_distinct_rows(ranks: list[dict[str, Any]]) -> list[list[MicroBatch]]:
    """Return the micro-batches of each rank that reads rows of its own.

    Of ranks that share layers, the first that saw a loss; all of them if they read other rows.
    """
    groups: dict[int, list[list[MicroBatch]]] = {}
    for rank in ranks:
        groups.setdefault(rank["data_parallel_rank"], []).append(rank["read"])
    distinct: list[list[MicroBatch]] = []
    for group in groups.values():
        saw = [read for read in group if read] or group[:1]
        tokens = [[row["tokens"] for batch in read for row in batch["rows"]] for read in saw]
        distinct += saw[:1] if tokens.count(tokens[0]) == len(tokens) else saw
    return distinct


class _Read:
    """One micro-batch: the model's inputs and outputs, and the scale of its loss in backward."""

    def __init__(
        self, inputs: dict[str, Any], output: Any, loss: torch.Tensor, *, by_model: bool = True
    ) -> None:
        # A copy: the Trainer multiplies the loss in place.
        self._loss = loss.detach().clone()
        self._by_model = by_model
        self._applied: torch.Tensor | None = None
        self._began: list[torch.Tensor] = []
        items = inputs.get("num_items_in_batch")
        self._items = None if items is None else int(items)
        self._inputs, self._logits = inputs, getattr(output, "logits", None)
        self._rows: list[RowRead] = []
        self.take_labels(inputs.get("labels"))
        # The gradient at the loss is the factor with which backward began.
        loss.register_hook(self._backward)

    def take_labels(self, labels: torch.Tensor | None) -> None:
        """Take the rows' labels, which come later where the model does not get them."""
        if self._rows or labels is None:
            return
        given = self._inputs.get("input_ids")
        labels = labels if given is None else labels.to(given.device)
        self._rows = _rows(self._inputs | {"labels": labels}, self._logits)
        self._inputs, self._logits = {}, None  # not kept until the step ends

    def _backward(self, gradient: torch.Tensor | None) -> None:
        # None where a script goes back from another loss than the model's own.
        self._applied = None if gradient is None else gradient.detach()

    def goes_back_from(self, loss: torch.Tensor) -> None:
        """Take the loss that backward begins with: a trainer may leave the model's own aside."""
        copy = loss.detach().clone()
        if loss.requires_grad:
            loss.register_hook(lambda gradient: self._began.extend((copy, gradient.detach())))

    def described(self, sample_ids: list[int] | None, *, scale: float) -> MicroBatch:
        if sample_ids is not None and len(sample_ids) == len(self._rows):
            for row, sample_id in zip(self._rows, sample_ids, strict=True):
                row["sample_id"] = sample_id
        loss, applied, by_model = self._loss, self._applied, self._by_model
        if applied is None and self._began:
            (loss, applied), by_model = self._began[:2], False
        return MicroBatch(
            rows=self._rows,
            loss=float(loss),
            by_model=by_model,
            applied=None if applied is None else float(applied) / scale,
            items=self._items,
        )


@dataclass(slots=True, kw_only=True)
class _KeptStep:
    """One optimizer step on this rank, until it has updated."""

    read: list[_Read] = field(default_factory=list)
    sample_ids: list[list[int] | None] = field(default_factory=list)
    scale: float = 1.0
    """The fp16 loss scale."""

    gradient_norm: float | None = None
    gradients_digest: str | None = None
    weights_digest: str | None = None
    before_digest: str | None = None
    clip_norm: Any = None
    limit: float | None = None
    squares: dict[int, float] = field(default_factory=dict)
    """Sums of squares of this rank's part of each gradient that the optimizer stepped with."""

    groups: list[Group] = field(default_factory=list)
    updated: bool = False


@torch.no_grad()
def _rows(inputs: dict[str, Any], logits: torch.Tensor | None) -> list[RowRead]:
    tokens, labels = inputs.get("input_ids"), inputs.get("labels")
    if tokens is None or labels is None:
        return []
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    rows: list[RowRead] = []
    for at, (ids, targets) in enumerate(zip(tokens, labels, strict=True)):
        if mask is not None:
            unpadded = mask[at].bool()
        else:
            unpadded = _unpadded(targets, None if positions is None else positions[at])
        wanted = targets[1:]
        loss = None
        if logits is not None and logits.shape[:2] == labels.shape:
            # In fp32, as transformers does; row by row, for the vocabulary is wide.
            loss = float(
                torch.nn.functional.cross_entropy(
                    logits[at, :-1].float(), wanted, ignore_index=IGNORED, reduction="sum"
                )
            )
        rows.append(
            RowRead(
                sample_id=None,
                tokens=digest_of([ids[unpadded]]),
                labels=digest_of([targets[unpadded]]),
                supervised=int((wanted != IGNORED).sum()),
                loss=loss,
            )
        )
    return rows


def _unpadded(targets: torch.Tensor, positions: torch.Tensor | None) -> slice:
    """Return a row's slice without padding, whose tokens are ignored and all at position 0."""
    if positions is None:
        return slice(None)
    read = ((positions != 0) | (targets != IGNORED)).nonzero()
    return slice(0, int(read[-1]) + 1 if len(read) else 0)


def _header(parameters: Mapping[str, Any]) -> bytes:
    """Return the header of a safetensors file, which is known before any tensor is gathered."""
    entries: dict[str, Any] = {}
    offset = 0
    for name, parameter in parameters.items():
        end = offset + 4 * elements_of(parameter)
        shape = list(shape_of(parameter))
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    # safetensors aligns the numbers to 8 bytes, by spaces behind the header.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _square(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _agree(ranks: list[dict[str, Any]], name: str) -> bool | None:
    digests = {rank[name] for rank in ranks}
    return None if None in digests else len(digests) == 1


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
