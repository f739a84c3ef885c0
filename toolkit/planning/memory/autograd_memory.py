"""Memory of autograd: a layer recorded operation by operation, and its backward replayed.

Sizes of tensors are elements for each token. An operation saves the tensors that its derivative
needs. A tensor saved by several operations is held once, as torch holds a storage once. Taken from
torch 2.13 (derivatives.yaml); a test counts the saved bytes of real models, family by family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

FP32 = 4


@dataclass(eq=False, slots=True)
class Value:
    """One tensor of the forward pass."""

    width: float
    """Elements for each token."""

    size: float
    """Bytes of an element."""

    @property
    def bytes(self) -> float:
        """Bytes for each token."""
        return self.width * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """The dtypes that a model runs in."""

    compute: int
    """Bytes of an element in matrix products."""

    weight: int
    """Bytes of an element of a weight in use: of an embedding, so of the residual stream too, and
    of a norm."""

    autocast: bool
    """Whether torch's autocast casts the inputs of each operation; activations are cast again for
    every operation that uses them."""

    returns_input: bool = False
    """Whether frozen linear layers return the dtype of their input, as bitsandbytes' do."""

    adapter: int = FP32
    """Bytes of an element of LoRA's matrices: fp32 by peft, unless a library casts them."""

    compiled: bool = False
    """Whether layers are compiled: backward computes again what is elementwise, from what products
    and reductions left (the partitioner of torch 2.11 to 2.13). torch's LayerNorm under autocast
    keeps one more tensor: 7% of what a layer of StarCoder2 does."""


@dataclass(slots=True)
class _Operation:
    inputs: tuple[Value, ...]
    output: Value
    saved: tuple[Value, ...]


@dataclass(kw_only=True)
class Tape:
    """Records a forward pass; `saved_bytes` and `backward_peak` read it."""

    regime: Regime
    trains: bool = True
    """Whether the weights of linear layers and norms have gradients; False with adapters."""

    adapters: int = 0
    """Rank of a pair of low-rank matrices beside each linear layer, 0 for none."""

    adapter_dropout: bool = False
    """Whether a share of the adapters' inputs is dropped."""

    operations: list[_Operation] = field(default_factory=list["_Operation"])
    products: list[Value] = field(default_factory=list["Value"])
    """Results of linear layers and adapters, in order."""

    _sources: dict[Value, tuple[Value, ...]] = field(default_factory=dict[Value, tuple[Value, ...]])
    """Of compiled layers: the tensors that the result of an elementwise operation is made of."""

    _copies: dict[tuple[Value, float], Value] = field(
        default_factory=dict[tuple[Value, float], Value]
    )
    """Of compiled layers: casts, each made once."""

    # Reading

    @property
    def saved_bytes(self) -> float:
        """Bytes for each token that are held between forward and backward."""
        return _bytes({value for operation in self.operations for value in operation.saved})

    def backward_peak(self) -> float:
        """Return the peak bytes for each token during backward, saved tensors included.

        Backward begins with the gradient of the last output. Each gradient is freed after its use,
        and each saved tensor with the last operation that saved it.
        """
        uses = Counter(value for operation in self.operations for value in set(operation.saved))
        saved_bytes, peak = self.saved_bytes, 0.0
        with_gradient = {self.operations[-1].output}
        for operation in reversed(self.operations):
            inputs = set(operation.inputs)
            held = _bytes(with_gradient) + _bytes(inputs)
            passed_on = _bytes(with_gradient & {operation.output})
            if not operation.saved and len(inputs) == 1 and passed_on == _bytes(inputs):
                held -= passed_on  # the output's gradient is passed on as it is
            peak = max(peak, saved_bytes + held)
            with_gradient = (with_gradient - {operation.output}) | inputs
            for value in set(operation.saved):
                uses[value] -= 1
                if not uses[value]:
                    saved_bytes -= value.bytes
        return float(peak)

    # Writing

    def record(
        self,
        inputs: Iterable[Value],
        output: Value,
        saved: Iterable[Value] = (),
        *,
        elementwise: bool = True,
    ) -> Value:
        inputs, saved = tuple(inputs), tuple(saved)
        if self.regime.compiled and elementwise:
            self._sources[output] = self._made_of(inputs)
            saved = self._made_of(saved)
        self.operations.append(_Operation(inputs, output, saved))
        return output

    def _made_of(self, values: Iterable[Value]) -> tuple[Value, ...]:
        sources = (source for value in values for source in self._sources.get(value, (value,)))
        return tuple(dict.fromkeys(sources))

    def cast(self, value: Value, size: float) -> Value:
        """Record a copy in another dtype; a tensor that has it already is returned as it is."""
        if value.size == size:
            return value
        if not self.regime.compiled:
            return self.record([value], Value(value.width, size))
        if (value, size) not in self._copies:
            self._copies[value, size] = self.record([value], Value(value.width, size))
        return self._copies[value, size]

    def lowered(self, value: Value) -> Value:
        """Record the cast for an operation that autocast runs in 16 bits."""
        return self.cast(value, self.regime.compute) if self.regime.autocast else value

    def linear(self, value: Value, width: float, *, adapters: int | None = None) -> Value:
        """Record a linear layer, which keeps its input for the gradient of its weight.

        `adapters` is the rank of its adapters, 0 for none; left out, that of the tape.
        """
        rank = self.adapters if adapters is None else adapters
        inside = self.lowered(value)
        base = self.product([inside], width, self._if_trained(inside))
        self.products.append(base)
        if self.regime.returns_input:
            base = self.cast(base, value.size)
        if not rank:
            return base
        # peft casts its input to the adapters' dtype; autocast lowers it again, in a new copy.
        entered = self.cast(value, self.regime.adapter)
        entered = self.lowered(self.dropout(entered) if self.adapter_dropout else entered)
        down = self.product([entered], rank, [entered])
        up = self.product([down], width, [down])
        self.products += [down, up]
        scaled = self.record([up], Value(width, self.regime.compute))
        return self.add(base, scaled)

    def product(self, inputs: Iterable[Value], width: float, saved: Iterable[Value]) -> Value:
        return self.record(inputs, Value(width, self.regime.compute), saved, elementwise=False)

    def add(self, left: Value, right: Value) -> Value:
        return self.record([left, right], Value(left.width, max(left.size, right.size)))

    def multiply(self, left: Value, right: Value) -> Value:
        return self.record(
            [left, right], Value(left.width, max(left.size, right.size)), [left, right]
        )

    def keeping_output(self, value: Value) -> Value:
        """Record an elementwise operation that keeps its result: softmax, tanh, sigmoid, relu."""
        output = Value(value.width, value.size)
        return self.record([value], output, [output])

    def rms_norm(self, value: Value, *, rows: float = 1, lowers_late: bool = False) -> Value:
        """Record an RMSNorm as transformers writes it, raised to fp32.

        Args:
            value: Input of the normalisation.
            rows: Means for each token: 1, or as many as there are heads.
            lowers_late: Multiply by the weight in fp32. Otherwise the weight can raise the result.
        """
        raised = self.cast(value, FP32)
        squares = self.record([raised], Value(raised.width, FP32), [raised])
        scale = Value(rows, FP32)
        self.record([squares], scale, [scale], elementwise=False)
        normed = self.record([raised, scale], Value(raised.width, FP32), [raised, scale])
        if lowers_late:
            weighted = self.record([normed], Value(normed.width, FP32), self._if_trained(normed))
            return self.cast(weighted, value.size)
        lowered = self.cast(normed, value.size)
        output = Value(value.width, max(value.size, self.regime.weight))
        return self.record([lowered], output, self._if_trained(lowered))

    def layer_norm(self, value: Value) -> Value:
        """Record torch's kernel: it keeps its input, mean and deviation; fp32 under autocast."""
        inside = self.cast(value, FP32) if self.regime.autocast else value
        return self.keeping(inside, also=[Value(2, FP32)])

    def keeping(self, value: Value, *, also: Iterable[Value] = ()) -> Value:
        """Record an elementwise operation that keeps its input."""
        return self.record([value], Value(value.width, value.size), [value, *also])

    def gelu_new(self, value: Value) -> Value:
        """Record GPT-2's own GELU, in torch operations: 0.5 x (1 + tanh(c (x + 0.04 x^3)))."""
        base = self.cast(value, FP32) if self.regime.autocast else value
        cubed = self.keeping(base)
        inner = self.add(value, cubed)
        tanh = Value(inner.width, inner.size)
        self.record([inner], tanh, [tanh])
        factor = self.record([tanh], Value(tanh.width, tanh.size))
        half = self.record([value], Value(value.width, value.size))
        return self.multiply(half, factor)

    def dropout(self, value: Value) -> Value:
        """Record a dropout, which on a GPU keeps a mask of a byte an element (native_dropout)."""
        return self.record([value], Value(value.width, value.size), [Value(value.width, 1)])

    def _if_trained(self, value: Value) -> list[Value]:
        return [value] if self.trains else []


def _bytes(values: Iterable[Value]) -> float:
    return sum(value.bytes for value in values)
