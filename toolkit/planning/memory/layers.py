"""What one layer of a model keeps and holds, for each token: the block written onto a tape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.autograd_memory import FP32, Tape, Value
from toolkit.planning.memory.weights import COMPUTE_SIZE, trained_size
from toolkit.planning.memory.zero_settings import zero_settings
from toolkit.planning.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """The dtypes that a model runs in."""

    compute: int
    """Bytes of an element in matrix products."""

    stream: int
    """Bytes of an element of the residual stream: of the weights that embeddings come from."""

    autocast: bool
    norm_weight: int
    """Bytes of an element of a norm's weight."""

    adapter: int = FP32
    """Bytes of an element of LoRA's matrices: fp32 by peft, unless a library casts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer for each token."""

    kept: float
    """Between forward and backward, without checkpointing."""

    boundary: float
    """The layer's input, which checkpointing keeps."""

    backward_peak: float
    """The most while the layer is played backwards, `kept` included."""

    products: float
    """Outputs that torchtitan's selective checkpointing keeps beside the input."""


def regime_of(job: PlannedJob) -> Regime:
    """Return the dtypes of a job.

    DDP and one process run fp32 weights under autocast. DeepSpeed casts the weights. FSDP2 casts
    them as it gathers them, and Accelerate runs autocast as well.
    """
    compute = COMPUTE_SIZE[job.precision]
    if job.strategy.steps_on_masters or job.precision == "no":
        on_top = job.deepspeed is not None and zero_settings(job).autocast
        return Regime(
            compute=compute,
            stream=compute,
            autocast=on_top,
            norm_weight=compute,
            adapter=compute,
        )
    weight_size = compute
    if job.strategy.sharding != "rows" and job.method == "full":
        weight_size = trained_size(job)
    adapter = compute if job.strategy.sharding == "rows" else FP32
    return Regime(
        compute=compute, stream=weight_size, autocast=True, norm_weight=weight_size, adapter=adapter
    )


def layer_bytes(job: PlannedJob) -> LayerBytes:
    """Return what the widest layer of a job's model keeps for each token of a row."""
    return _layer_bytes(
        job.model,
        regime_of(job),
        job.sequence,
        job.attention == "flash",
        0 if job.method == "full" else job.lora_rank,
    )


def kept_of_layer(
    model: ModelShape, regime: Regime, *, sequence: int, fused: bool, adapters: int = 0
) -> float:
    """Return the bytes for each token that a layer keeps in given dtypes.

    Args:
        model: The model.
        regime: In which dtypes it runs.
        sequence: Tokens of a row.
        fused: Attention runs in a kernel that never holds the scores, where the class can.
        adapters: Rank of LoRA's matrices, 0 for training in full.
    """
    return _layer_bytes(model, regime, sequence, fused, adapters).kept


@lru_cache(maxsize=4096)
def _layer_bytes(
    model: ModelShape, regime: Regime, sequence: int, fused: bool, adapters: int
) -> LayerBytes:
    tape = Tape(
        regime.compute,
        autocast=regime.autocast,
        trains=not adapters,
        adapters=adapters,
        adapter_size=regime.adapter,
    )
    writer = LayerWriter(model, tape, regime)
    start = Value(model.hidden_size, writer.entering)
    writer.layer(start, sequence, fused=fused)
    return LayerBytes(
        kept=tape.kept_bytes,
        boundary=start.bytes,
        backward_peak=tape.backward_peak(),
        products=sum(value.bytes for value in [*tape.products[::2], *writer.attended]),
    )


class LayerWriter:
    """Writes one layer of a model onto a tape."""

    def __init__(self, model: ModelShape, tape: Tape, regime: Regime) -> None:
        self.model = model
        self.block = model.block
        self.tape = tape
        self.regime = regime
        self.attended: list[Value] = []

    @property
    def entering(self) -> int:
        """Bytes of an element of a layer's input: autocast runs LayerNorm in fp32, and a layer
        that ends in one hands that on."""
        ends_raised = self.block.order == "post" and self.block.norm == "layer"
        return FP32 if ends_raised and self.regime.autocast else self.regime.stream

    def layer(self, stream: Value, sequence: int, *, fused: bool) -> Value:
        tape = self.tape

        def attend(value: Value) -> Value:
            return self.attention(value, sequence, fused=fused)

        match self.block.order:
            case "pre":
                stream = tape.add(stream, self.branch(attend(self.norm(stream))))
                return tape.add(stream, self.branch(self.mlp(self.norm(stream))))
            case "post":
                stream = self.norm(tape.add(stream, self.branch(attend(stream))))
                return self.norm(tape.add(stream, self.branch(self.mlp(stream))))
            case "around":
                stream = tape.add(stream, self.norm(attend(self.norm(stream))))
                return tape.add(stream, self.norm(self.mlp(self.norm(stream))))
            case "after":
                stream = tape.add(stream, self.norm(attend(stream)))
                return tape.add(stream, self.norm(self.mlp(stream)))
            case "parallel":
                normed = self.norm(stream)
                attended = self.branch(attend(normed))
                return tape.add(tape.add(self.branch(self.mlp(normed)), attended), stream)
            case "parallel_two":
                attended = self.branch(attend(self.norm(stream)))
                passed = self.branch(self.mlp(self.norm(stream)))
                return tape.add(tape.add(passed, attended), stream)

    def branch(self, value: Value) -> Value:
        return self.tape.dropout(value) if self.model.dropout else value

    def norm(self, value: Value, *, rows: float = 1) -> Value:
        tape = self.tape
        match self.block.norm:
            case "layer":
                return tape.layer_norm(value)
            case "layer_fp32":
                return tape.cast(tape.layer_norm(tape.cast(value, FP32)), value.size)
            case kind:
                return tape.rms_norm(
                    value,
                    rows=rows,
                    weight_size=self.regime.norm_weight,
                    lowers_late=kind == "rms_late",
                )

    # Attention

    def attention(self, value: Value, sequence: int, *, fused: bool) -> Value:
        queries, keys, values = self.rotated(*self.projected(value))
        block = self.block
        # Falcon hands its one key to a kernel that wants as many keys as queries.
        one_key = block.qkv == "split" and self.model.kv_heads == 1
        if fused and block.fused_attention and not block.attention_softcap and not one_key:
            out = self.fused_attention(queries, keys, values)
        else:
            raised = fused and one_key  # torch's own mathematics of SDPA
            out = self.eager_attention(queries, keys, values, sequence, raised=raised)
        return self.tape.linear(out, self.model.hidden_size)

    def projected(self, value: Value) -> tuple[Value, Value, Value]:
        model, tape = self.model, self.tape
        wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
        if self.block.qkv == "apart":
            queries, keys = tape.linear(value, wide), tape.linear(value, narrow)
            values = tape.linear(value, narrow)
            if self.block.qk_norm != "none":
                by_head = self.block.qk_norm == "head"
                queries = self.norm(queries, rows=model.heads if by_head else 1)
                keys = self.norm(keys, rows=model.kv_heads if by_head else 1)
            return queries, keys, values
        together = tape.linear(value, wide + 2 * narrow)
        if self.block.qkv == "fused":
            return together, together, together
        if model.kv_heads > 1:
            narrow = wide  # each key and value is repeated for the queries that share it
        size = together.size
        queries, keys, values = (
            tape.record([together], Value(width, size)) for width in (wide, narrow, narrow)
        )
        return queries, keys, values

    def rotated(self, queries: Value, keys: Value, values: Value) -> tuple[Value, Value, Value]:
        if self.block.rotary == "none":
            return queries, keys, values
        model = self.model
        turned: list[Value] = []
        for value, heads in ((queries, model.heads), (keys, model.kv_heads)):
            # Cosine and sine have the dtype of the stream, and raise what they turn.
            size = max(value.size, self.regime.stream)
            width = min(value.width, heads * model.head_dim)
            if self.block.qkv == "split":
                width = value.width
            turned.append(self.tape.record([value], Value(width, size)))
        return turned[0], turned[1], values

    def fused_attention(self, queries: Value, keys: Value, values: Value) -> Value:
        tape, model = self.tape, self.model
        inside = [tape.lowered(value) for value in (queries, keys, values)]
        out = Value(model.heads * model.head_dim, self.regime.compute)
        logsumexp = Value(model.heads, FP32)
        tape.record(inside, out, [*inside, out, logsumexp])
        self.attended += [out, logsumexp]
        by_head = self.block.rotary == "part" or self.block.qkv == "split"
        return tape.record([out], Value(out.width, out.size)) if by_head else out

    def eager_attention(
        self, queries: Value, keys: Value, values: Value, sequence: int, *, raised: bool = False
    ) -> Value:
        tape, model = self.tape, self.model
        softmax = "wide" if raised else self.block.softmax
        wide, size = model.heads * model.head_dim, self.regime.compute
        if softmax == "wide":
            queries, keys = tape.cast(queries, FP32), tape.cast(keys, FP32)
        copies = [self.per_head(value, wide) for value in (queries, keys)]
        scores = tape.record(copies, Value(model.heads * sequence, copies[0].size), copies)
        if self.block.attention_softcap:
            scores = tape.keeping_output(scores)
        if softmax != "plain" or tape.autocast:
            scores = tape.cast(scores, FP32)
        weights = tape.cast(tape.keeping_output(scores), values.size)
        if model.dropout:
            weights = tape.dropout(weights)
        weights = tape.lowered(weights)
        copy = self.per_head(values, wide)
        out = tape.record([weights, copy], Value(wide, size), [weights, copy])
        return tape.record([out], Value(wide, out.size))

    def per_head(self, value: Value, width: float) -> Value:
        """Record a copy laid out head by head, as batched matrix products want it."""
        lowered = self.tape.lowered(value)
        return self.tape.record([lowered], Value(width, lowered.size))

    # MLP

    def mlp(self, value: Value) -> Value:
        if self.model.experts:
            return self.mixture(value)
        return self.dense(value, self.model.intermediate_size)

    def dense(self, value: Value, width: float) -> Value:
        tape, hidden = self.tape, self.model.hidden_size
        if not self.model.gated:
            return tape.linear(self.activated(tape.linear(value, width)), hidden)
        if self.block.gate_up == "fused":
            return tape.linear(self.gated_views(tape.linear(value, 2 * width)), hidden)
        gate = self.activated(tape.linear(value, width))
        return tape.linear(tape.multiply(gate, tape.linear(value, width)), hidden)

    def gated_views(self, together: Value) -> Value:
        """Record the product of gate and up: two views of one tensor, which keep all of it."""
        tape, width, size = self.tape, together.width / 2, together.size
        if self.block.activation == "gpt_oss":
            gate, up = (tape.record([together], Value(width, size), [together]) for _ in range(2))
            sigmoid = tape.keeping_output(gate)
            return tape.multiply(up, tape.multiply(gate, sigmoid))
        gate = tape.record([together], Value(width, size), [together])
        return tape.record([gate, together], Value(width, size), [gate, together])

    def mixture(self, value: Value) -> Value:
        """Record experts as grouped matrix products, with a row for each token and its expert.

        They run in the dtype of their weights: autocast knows no grouped product.
        """
        model, tape = self.model, self.tape
        active, hidden, size = model.active_experts, model.hidden_size, self.regime.norm_weight
        width = active * expert_width(model)
        routing = tape.keeping_output(tape.cast(tape.linear(value, model.experts), FP32))
        index = Value(4 * active, 8, needs_grad=False)
        weights = tape.record([routing], Value(active, FP32), [index, Value(1 + active, FP32)])
        rows = tape.record([value], Value(active * hidden, size))
        inside = self.gated_views(tape.record([rows], Value(2 * width, size), [rows]))
        out = tape.record([inside], Value(active * hidden, size), [inside])
        summed = tape.record([tape.multiply(out, weights)], Value(hidden, value.size))
        shared = model.intermediate_size - width
        if shared <= 0:
            return summed
        beside = self.dense(value, shared)
        gate = tape.keeping_output(tape.linear(value, 1))
        return tape.add(summed, tape.multiply(beside, gate))

    def activated(self, value: Value) -> Value:
        match self.block.activation:
            case "gelu_new":
                return self.tape.gelu_new(value)
            case "relu":
                return self.tape.keeping_output(value)
            case _:
                return self.tape.keeping(value)


@lru_cache(maxsize=1024)
def expert_width(model: ModelShape) -> int:
    """Width of one expert's MLP."""
    widest = max((t.elements for t in model.of_kind("experts")), default=0)
    return widest // (model.experts * model.hidden_size) // (2 if model.gated else 1)
