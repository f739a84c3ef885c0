"""Bytes of one layer of a model for each token, from a recording of its block on a tape."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from toolkit.jobs.options import LoraTargets
from toolkit.jobs.shape import ModelShape
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.autograd_memory import FP32, Regime, Tape, Value
from toolkit.planning.memory.counted import counted_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerBytes:
    """Bytes of one layer for each token."""

    saved: float
    """Bytes held between forward and backward, without checkpointing."""

    boundary: float
    """Bytes of the layer's input, which checkpointing keeps."""

    backward_peak: float
    """Peak bytes during the layer's backward, `saved` included."""

    products: float
    """Bytes of the results of matrix products and of fused attention, which selective checkpointing
    keeps beside the input."""

    every_second: float
    """Bytes of them without every second linear layer's, as torchtitan keeps them."""


def regime_of(job: PlannedJob) -> Regime:
    """Return the dtypes of a job.

    DDP and one process run fp32 weights under autocast. DeepSpeed casts the weights. FSDP2 casts
    them as it gathers them, and Accelerate runs autocast as well.
    """
    regime = _regime_of(job)
    return replace(regime, compiled=True) if job.compiles else regime


def _regime_of(job: PlannedJob) -> Regime:
    compute, backend = job.compute_size, job.backend
    if backend.casts_weights or job.precision == "no":
        autocast = backend.autocasts(job)
        return Regime(compute=compute, weight=compute, autocast=autocast, adapter=compute)
    if job.stream_in_fp32:
        packed = job.method == "qlora"
        return Regime(compute=compute, weight=FP32, autocast=True, returns_input=packed)
    weight = backend.weight_size(job) if job.method == "full" else compute
    return Regime(compute=compute, weight=weight, autocast=True)


WIDEST_GROUPED = 256
"""Widest head with which transformers passes grouped keys and values to SDPA as they are."""


def keeps_scores(job: PlannedJob) -> bool:
    """Whether SDPA computes rows without a mask in torch's own operations, which keep the scores.

    Without a mask, transformers does not repeat the keys and values that query heads share
    (`use_gqa_in_sdpa`). In fp32, no kernel on a GPU takes these: flash and cuDNN attention compute
    in 16 bits, and memory-efficient attention wants as many keys as queries (torch 2.11). Where
    ranks share rows, attention is another, and not measured in fp32.
    """
    model, block, elsewhere = job.model, job.model.block, job.on_cpu or job.backend.splits_rows
    if job.compute_size != FP32 or job.attention != "flash" or elsewhere:
        return False
    if model.counted is not None and not any(key.endswith("-eager") for key in model.counted):
        return False
    grouped = model.kv_heads < model.heads and block.qkv != "split"
    return grouped and block.fused_attention and model.head_dim <= WIDEST_GROUPED


@lru_cache(maxsize=4096)
def layer_bytes(
    model: ModelShape,
    regime: Regime,
    sequence: int,
    *,
    fused: bool,
    adapters: int = 0,
    adapter_dropout: bool = False,
    targets: LoraTargets = "all-linear",
    sparse: bool = True,
) -> LayerBytes:
    """Return the bytes of a layer for each token of a row of `sequence` tokens.

    With `fused`, attention runs in a kernel that never holds the scores, if the class supports it.
    `adapters` is the rank of LoRA's matrices beside the linear layers that are `targets`, 0 for
    training in full. Of a model with experts in some layers, `sparse` is a layer that has them. A
    model that was counted on the meta device has the mean of all its layers.

    Raises:
        UsageError: the model was not counted with this attention.
    """
    if model.counted is not None:
        counted = counted_bytes(
            model, regime, sequence, fused=fused, adapters=adapters, targets=targets
        )
        return LayerBytes(
            saved=counted.saved,
            boundary=counted.boundary,
            backward_peak=counted.backward_peak,
            products=counted.products,
            every_second=counted.every_second,
        )
    tape = LayerTape(
        model=model,
        regime=regime,
        trains=not adapters,
        adapters=adapters,
        adapter_dropout=adapter_dropout,
        adapts_mlp=targets == "all-linear",
        sparse=sparse,
    )
    start = Value(model.hidden_size, tape.entering)
    tape.layer(start, sequence, fused=fused)
    return LayerBytes(
        saved=tape.saved_bytes,
        boundary=start.bytes,
        backward_peak=tape.backward_peak(),
        products=sum(value.bytes for value in [*tape.products, *tape.attended]),
        every_second=sum(value.bytes for value in [*tape.products[::2], *tape.attended]),
    )


@dataclass(kw_only=True)
class LayerTape(Tape):
    """Records one layer of a model."""

    model: ModelShape
    sparse: bool = True
    """Whether the layer has the model's experts, if there are any."""

    adapts_mlp: bool = True
    """Whether the linear layers outside of attention have adapters, if there are any."""

    attended: list[Value] = field(default_factory=list[Value])
    """Results of fused attention, or of the two products of eager attention."""

    @property
    def entering(self) -> int:
        """Bytes of an element of a layer's input. Autocast runs LayerNorm in fp32, and a layer that
        ends in one passes its fp32 result on."""
        ends_raised = self.model.block.order == "post" and self.model.block.norm == "layer"
        return FP32 if ends_raised and self.regime.autocast else self.regime.weight

    def layer(self, stream: Value, sequence: int, *, fused: bool) -> Value:
        def attend(value: Value) -> Value:
            return self.attention(value, sequence, fused=fused)

        match self.model.block.order:
            case "pre":
                stream = self.add(stream, self.branch(attend(self.norm(stream))))
                return self.add(stream, self.branch(self.mlp(self.norm(stream))))
            case "post":
                stream = self.norm(self.add(stream, self.branch(attend(stream))))
                return self.norm(self.add(stream, self.branch(self.mlp(stream))))
            case "around":
                stream = self.add(stream, self.norm(attend(self.norm(stream))))
                return self.add(stream, self.norm(self.mlp(self.norm(stream))))
            case "after":
                stream = self.add(stream, self.norm(attend(stream)))
                return self.add(stream, self.norm(self.mlp(stream)))
            case "parallel":
                normed = self.norm(stream)
                attended = self.branch(attend(normed))
                return self.add(self.add(self.branch(self.mlp(normed)), attended), stream)
            case "parallel_two":
                attended = self.branch(attend(self.norm(stream)))
                passed = self.branch(self.mlp(self.norm(stream)))
                return self.add(self.add(passed, attended), stream)

    def branch(self, value: Value) -> Value:
        return self.dropout(value) if self.model.dropout else value

    def norm(self, value: Value, *, rows: float = 1) -> Value:
        match self.model.block.norm:
            case "layer":
                return self.layer_norm(value)
            case "layer_fp32":
                return self.cast(self.layer_norm(self.cast(value, FP32)), value.size)
            case kind:
                return self.rms_norm(value, rows=rows, lowers_late=kind == "rms_late")

    # Attention

    def attention(self, value: Value, sequence: int, *, fused: bool) -> Value:
        queries, keys, values = self.rotated(*self.projected(value))
        block = self.model.block
        # Falcon passes its one key to a kernel that needs as many keys as queries.
        one_key = block.qkv == "split" and self.model.kv_heads == 1
        if fused and block.fused_attention and not block.attention_softcap and not one_key:
            out = self.fused_attention(queries, keys, values)
        else:
            raised = fused and one_key  # torch's own mathematics of SDPA
            out = self.eager_attention(queries, keys, values, sequence, raised=raised)
        return self.linear(out, self.model.hidden_size)

    def projected(self, value: Value) -> tuple[Value, Value, Value]:
        model, block = self.model, self.model.block
        wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
        if block.qkv == "apart":
            queries, keys = self.linear(value, wide), self.linear(value, narrow)
            values = self.linear(value, narrow)
            if block.qk_norm != "none":
                by_head = block.qk_norm == "head"
                queries = self.norm(queries, rows=model.heads if by_head else 1)
                keys = self.norm(keys, rows=model.kv_heads if by_head else 1)
            return queries, keys, values
        together = self.linear(value, wide + 2 * narrow)
        if block.qkv == "fused":
            return together, together, together
        if model.kv_heads > 1:
            narrow = wide  # each key and value is repeated for the queries that share it
        queries, keys, values = (
            self.record([together], Value(width, together.size)) for width in (wide, narrow, narrow)
        )
        return queries, keys, values

    def rotated(self, queries: Value, keys: Value, values: Value) -> tuple[Value, Value, Value]:
        model, block = self.model, self.model.block
        if block.rotary == "none":
            return queries, keys, values

        def turned(value: Value, heads: int) -> Value:
            width = value.width if block.qkv == "split" else heads * model.head_dim
            # Cosine and sine have the dtype of the stream, and raise the tensors that they rotate.
            return self.record([value], Value(width, max(value.size, self.regime.weight)))

        return turned(queries, model.heads), turned(keys, model.kv_heads), values

    def fused_attention(self, queries: Value, keys: Value, values: Value) -> Value:
        model, block = self.model, self.model.block
        inside = [self.lowered(value) for value in (queries, keys, values)]
        out = Value(model.heads * model.head_dim, self.regime.compute)
        logsumexp = Value(model.heads, FP32)
        self.record(inside, out, [*inside, out, logsumexp], elementwise=False)
        self.attended += [out, logsumexp]
        by_head = block.rotary == "part" or block.qkv == "split"
        return self.record([out], Value(out.width, out.size)) if by_head else out

    def eager_attention(
        self, queries: Value, keys: Value, values: Value, sequence: int, *, raised: bool = False
    ) -> Value:
        model, block = self.model, self.model.block
        softmax = "wide" if raised else block.softmax
        wide = model.heads * model.head_dim
        if softmax == "wide":
            queries, keys = self.cast(queries, FP32), self.cast(keys, FP32)
        copies = [self.per_head(value, wide) for value in (queries, keys)]
        scores = Value(model.heads * sequence, copies[0].size)
        self.record(copies, scores, copies, elementwise=False)
        self.attended.append(scores)
        if block.attention_softcap:
            scores = self.keeping_output(scores)
        if softmax != "plain" or self.regime.autocast:
            scores = self.cast(scores, FP32)
        weights = self.cast(self.keeping_output(scores), values.size)
        if model.dropout:
            weights = self.dropout(weights)
        weights = self.lowered(weights)
        copy = self.per_head(values, wide)
        out = self.product([weights, copy], wide, [weights, copy])
        self.attended.append(out)
        return self.record([out], Value(wide, out.size))

    def per_head(self, value: Value, width: float) -> Value:
        """Record a copy laid out head by head, as batched matrix products want it."""
        lowered = self.lowered(value)
        return self.record([lowered], Value(width, lowered.size))

    # MLP

    def mlp(self, value: Value) -> Value:
        if self.model.experts and self.sparse:
            return self.mixture(value)
        return self.dense(value, self.model.dense_size or self.model.intermediate_size)

    def dense(self, value: Value, width: float) -> Value:
        hidden = self.model.hidden_size
        if not self.model.gated:
            return self.of_mlp(self.activated(self.of_mlp(value, width)), hidden)
        if self.model.block.gate_up == "fused":
            return self.of_mlp(self.gated_views(self.of_mlp(value, 2 * width)), hidden)
        gate = self.activated(self.of_mlp(value, width))
        return self.of_mlp(self.multiply(gate, self.of_mlp(value, width)), hidden)

    def of_mlp(self, value: Value, width: float) -> Value:
        """Record a linear layer of the MLP, with adapters if those there have any."""
        return self.linear(value, width, adapters=self.adapters if self.adapts_mlp else 0)

    def gated_views(self, together: Value) -> Value:
        """Record the product of gate and up: two views of one tensor, which keep all of it."""
        width, size = together.width / 2, together.size
        if self.model.block.activation == "gpt_oss":
            gate, up = (self.record([together], Value(width, size), [together]) for _ in range(2))
            sigmoid = self.keeping_output(gate)
            return self.multiply(up, self.multiply(gate, sigmoid))
        gate = self.record([together], Value(width, size), [together])
        return self.record([gate, together], Value(width, size), [gate, together])

    def mixture(self, value: Value) -> Value:
        """Record experts as grouped matrix products, with a row for each token and its expert.

        They run in the dtype of their weights: autocast knows no grouped product.
        """
        model = self.model
        active, hidden, size = model.active_experts, model.hidden_size, self.regime.weight
        width = active * expert_width(model)
        routing = self.keeping_output(self.cast(self.of_mlp(value, model.experts), FP32))
        index = Value(4 * active, 8)
        weights = self.record([routing], Value(active, FP32), [index, Value(1 + active, FP32)])
        rows = self.record([value], Value(active * hidden, size))
        together = self.record([rows], Value(2 * width, size), [rows], elementwise=False)
        inside = self.gated_views(together)
        out = self.record([inside], Value(active * hidden, size), [inside], elementwise=False)
        summed = self.record([self.multiply(out, weights)], Value(hidden, value.size))
        shared = model.intermediate_size - width
        if shared <= 0:
            return summed
        beside = self.dense(value, shared)
        gate = self.keeping_output(self.of_mlp(value, 1))
        return self.add(summed, self.multiply(beside, gate))

    def activated(self, value: Value) -> Value:
        match self.model.block.activation:
            case "gelu_new":
                return self.gelu_new(value)
            case "relu":
                return self.keeping_output(value)
            case _:
                return self.keeping(value)


@lru_cache(maxsize=1024)
def expert_width(model: ModelShape) -> int:
    """Width of one expert's MLP."""
    widest = max((t.elements for t in model.of_kind("experts")), default=0)
    return widest // (model.experts * model.hidden_size) // (2 if model.gated else 1)
