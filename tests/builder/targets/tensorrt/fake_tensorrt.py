"""TensorRT's network API in numpy: layers are checked for the types and shapes that a strongly
typed network asks for, and computed on the inputs that the network was made with."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from math import erf
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


class Type(Enum):
    float32 = np.dtype(np.float32)
    float16 = np.dtype(np.float16)
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    int64 = np.dtype(np.int64)
    int32 = np.dtype(np.int32)
    int8 = np.dtype(np.int8)
    int4 = np.dtype(ml_dtypes.int4)
    bool = np.dtype(np.bool_)


FLOATS = (Type.float32, Type.float16, Type.bfloat16)


class Names:
    """Enumerations whose members are their own names: ElementWiseOperation.SUM is "SUM"."""

    def __getattr__(self, name: str) -> str:
        return name


class Weights:
    def __init__(self, dtype: Type, address: int, count: int) -> None:
        byte_count = -(-count // 2) if dtype is Type.int4 else count * dtype.value.itemsize
        data = np.frombuffer(ctypes.string_at(address, byte_count), np.uint8)
        if dtype is Type.int4:
            halves = np.stack([data & 15, data >> 4], axis=-1).reshape(-1)[:count]
            self.values = ((halves ^ 8).astype(np.int8) - 8).astype(ml_dtypes.int4)
        else:
            self.values = data.view(dtype.value)
        self.dtype = dtype


class FakeTensorRT:
    """Stands for the module."""

    Weights = Weights
    ElementWiseOperation = UnaryOperation = ActivationType = ReduceOperation = Names()
    MatrixOperation = KVCacheMode = AttentionNormalizationOp = CausalMaskKind = Names()
    CollectiveOperation = Names()

    def __getattr__(self, name: str) -> Type:
        return Type[name]


class Tensor:
    def __init__(self, values: NDArray[Any], dtype: Type, is_input: bool = False) -> None:
        assert values.dtype == dtype.value, f"{values.dtype} isn't {dtype}"
        self.values, self.dtype, self.is_input, self.name = values, dtype, is_input, ""
        self.dimensions: dict[int, str] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def set_dimension_name(self, axis: int, name: str) -> None:
        self.dimensions[axis] = name


class Layer:
    """Computed when its result is asked for, as attributes come after its making."""

    def __init__(self, kind: str, inputs: Sequence[Tensor], compute: Callable[..., Any]) -> None:
        self.kind, self.name = kind, ""
        self.inputs: dict[int, Tensor] = dict(enumerate(inputs))
        self._compute = compute
        self._result: Tensor | None = None

    def set_input(self, index: int, tensor: Tensor) -> None:
        self.inputs[index] = tensor

    def get_output(self, index: int) -> Tensor:
        assert index == 0
        if self._result is None:
            values, dtype = self._compute(self)
            with np.errstate(over="ignore"):
                self._result = Tensor(np.asarray(values).astype(dtype.value), dtype)
        return self._result


BINARY = {"SUM": np.add, "SUB": np.subtract, "PROD": np.multiply, "DIV": np.divide}
BINARY |= {"MIN": np.minimum, "MAX": np.maximum, "EQUAL": np.equal, "LESS": np.less}
BINARY |= {"AND": np.logical_and, "OR": np.logical_or, "GREATER": np.greater}
ERF = np.vectorize(erf)
ACTIVATIONS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "SIGMOID": lambda x: 1 / (1 + np.exp(-x)),
    "TANH": np.tanh,
    "RELU": lambda x: np.maximum(x, 0),
    "GELU_ERF": lambda x: x * (1 + ERF(x / np.sqrt(2))) / 2,
    "GELU_TANH": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
}


def wide(x: Tensor) -> NDArray[np.float64]:
    return x.values.astype(np.float64)


class FakeNetwork:
    """feeds: the inputs' values. total: what all_reduce gives for a rank's part."""

    def __init__(
        self,
        feeds: Mapping[str, NDArray[Any]],
        total: Callable[[NDArray[Any]], NDArray[Any]] = lambda x: x,
    ) -> None:
        self.feeds, self.total = feeds, total
        self.layers: list[Layer] = []
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Callable[..., Layer]:
        """add_<kind>: a layer that _<kind> computes and checks."""
        make = getattr(type(self), f"_{name.removeprefix('add_')}", None)
        if not name.startswith("add_") or make is None:
            raise AttributeError(name)
        kind = name.removeprefix("add_")

        def add(*arguments: Any) -> Layer:
            first = arguments[0]
            tensors = first if isinstance(first, list) else list(arguments)
            inputs = [each for each in tensors if isinstance(each, Tensor)]
            layer = Layer(kind, inputs, lambda layer: make(self, layer, *arguments))
            self.layers.append(layer)
            return layer

        return add

    def add_input(self, name: str, dtype: Type, shape: Sequence[int]) -> Tensor:
        values = self.feeds[name]
        pairs = zip(values.shape, shape, strict=True)
        assert all(wanted in (-1, size) for size, wanted in pairs), (name, values.shape, shape)
        self.inputs[name] = Tensor(values, dtype, is_input=True)
        return self.inputs[name]

    def mark_output(self, tensor: Tensor) -> None:
        assert tensor.name not in self.outputs
        self.outputs[tensor.name] = tensor

    def _constant(self, layer: Layer, shape: Sequence[int], weights: Weights) -> Any:
        return weights.values.reshape(shape), weights.dtype

    def _shape(self, layer: Layer, x: Tensor) -> Any:
        return np.array(x.shape), Type.int64

    def _cast(self, layer: Layer, x: Tensor, dtype: Type) -> Any:
        return x.values, dtype

    def _elementwise(self, layer: Layer, left: Tensor, right: Tensor, operation: str) -> Any:
        assert left.dtype is right.dtype, f"{layer.name}: {left.dtype} and {right.dtype}"
        assert len(left.shape) == len(right.shape), f"{layer.name}: {left.shape}, {right.shape}"
        is_float = left.dtype in FLOATS
        values = (wide(x) if is_float else x.values for x in (left, right))
        compares = operation in ("EQUAL", "LESS", "GREATER")
        return BINARY[operation](*values), Type.bool if compares else left.dtype

    def _unary(self, layer: Layer, x: Tensor, operation: str) -> Any:
        assert x.dtype in FLOATS
        return {"SQRT": np.sqrt}[operation](wide(x)), x.dtype

    def _activation(self, layer: Layer, x: Tensor, kind: str) -> Any:
        assert x.dtype in FLOATS
        return ACTIVATIONS[kind](wide(x)), x.dtype

    def _reduce(self, layer: Layer, x: Tensor, operation: str, axes: int, keep: bool) -> Any:
        assert x.dtype is Type.float32, f"{layer.name}: sums are fp32"
        assert operation == "AVG"
        over = tuple(axis for axis in range(len(x.shape)) if axes >> axis & 1)
        return wide(x).mean(over, keepdims=keep), x.dtype

    def _select(self, layer: Layer, where: Tensor, yes: Tensor, no: Tensor) -> Any:
        assert where.dtype is Type.bool
        assert yes.dtype is no.dtype
        assert len(where.shape) == len(yes.shape) == len(no.shape)
        return np.where(where.values, wide(yes), wide(no)), yes.dtype

    def _shuffle(self, layer: Layer, x: Tensor) -> Any:
        values = x.values.transpose(getattr(layer, "first_transpose", range(len(x.shape))))
        shape = getattr(layer, "reshape_dims", values.shape)
        if 1 in layer.inputs:
            assert layer.inputs[1].dtype is Type.int64
            shape = tuple(layer.inputs[1].values)
        return values.reshape(shape), x.dtype

    def _slice(
        self, layer: Layer, x: Tensor, start: Sequence[int], size: Sequence[int], step: Any
    ) -> Any:
        size = tuple(layer.inputs[2].values) if 2 in layer.inputs else size
        ends = [begin + count for begin, count in zip(start, size, strict=True)]
        assert all(end <= have for end, have in zip(ends, x.shape, strict=True))
        parts = tuple(slice(begin, end) for begin, end in zip(start, ends, strict=True))
        return x.values[parts], x.dtype

    def _concatenation(self, layer: Layer, parts: list[Tensor]) -> Any:
        assert len({part.dtype for part in parts}) == 1
        axis = getattr(layer, "axis", 0)
        return np.concatenate([part.values for part in parts], axis), parts[0].dtype

    def _gather(self, layer: Layer, x: Tensor, index: Tensor, axis: int) -> Any:
        assert index.dtype is Type.int32
        assert x.dtype in FLOATS, f"{layer.name}: codes may only be dequantised"
        assert ((index.values >= 0) & (index.values < x.shape[axis])).all(), layer.name
        return np.take(x.values, index.values, axis), x.dtype

    def _matrix_multiply(
        self, layer: Layer, left: Tensor, left_form: str, right: Tensor, right_form: str
    ) -> Any:
        assert left.dtype is right.dtype, f"{layer.name}: {left.dtype} and {right.dtype}"
        assert len(left.shape) == len(right.shape), layer.name
        assert left.dtype in FLOATS
        a, b = (
            values.swapaxes(-1, -2) if form == "TRANSPOSE" else values
            for values, form in ((wide(left), left_form), (wide(right), right_form))
        )
        return a @ b, left.dtype

    def _softmax(self, layer: Layer, x: Tensor) -> Any:
        assert layer.axes == 1 << (len(x.shape) - 1)  # type: ignore[attr-defined]
        return softmax(wide(x)), x.dtype

    def _quantize(self, layer: Layer, x: Tensor, scale: Tensor, dtype: Type) -> Any:
        assert (dtype, scale.shape) == (Type.int8, ())
        return np.clip(np.rint(wide(x) / wide(scale)), -128, 127), dtype

    def _dequantize(self, layer: Layer, codes: Tensor, scale: Tensor, dtype: Type) -> Any:
        """A scale for the whole, for each item of an axis (int8), or for each block of rows."""
        factors = wide(scale)
        if codes.dtype is Type.int4:
            assert scale.dtype is dtype, "TensorRT has no kernel for other scales"
            factors = factors.repeat(codes.shape[0] // len(factors), axis=0)
            assert factors.shape == codes.shape
        elif factors.ndim:
            assert layer.axis == 1  # type: ignore[attr-defined]
            assert factors.shape == codes.shape[1:]
        assert codes.dtype in (Type.int8, Type.int4)
        return codes.values.astype(np.float64) * factors, dtype

    def _rotary_embedding(
        self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, width: int
    ) -> Any:
        positions = layer.inputs[3]
        assert x.dtype is cos.dtype is sin.dtype
        assert positions.dtype is Type.int32
        assert positions.shape == (x.shape[0], x.shape[2])
        assert cos.shape == sin.shape
        assert (cos.shape[1], interleaved) == (width // 2, False)
        c, s = (wide(table)[positions.values][:, None] for table in (cos, sin))
        low, high, rest = np.split(wide(x), (width // 2, width), axis=-1)
        return np.concatenate((low * c - high * s, high * c + low * s, rest), -1), x.dtype

    def _kv_cache_update(
        self, layer: Layer, cache: Tensor, update: Tensor, where: Tensor, mode: str
    ) -> Any:
        assert cache.is_input
        assert mode == "LINEAR"
        assert cache.dtype is update.dtype
        assert where.dtype is Type.int32
        rows, heads, length, size = update.shape
        assert (rows, heads, size) == (cache.shape[0], cache.shape[1], cache.shape[3])
        values = cache.values.copy()
        for row, begin in enumerate(where.values):
            assert begin + length <= cache.shape[2], "the cache has no room"
            values[row, :, begin : begin + length] = update.values[row]
        return values, cache.dtype

    def _attention_v2(
        self, layer: Any, q: Tensor, k: Tensor, v: Tensor, norm: str, causal: str
    ) -> Any:
        assert (norm, causal) == ("SOFTMAX", "LOWER_RIGHT")
        assert q.dtype is k.dtype is v.dtype
        assert k.shape == v.shape
        rows, heads, length, size = q.shape
        assert (k.shape[0], k.shape[3], heads % k.shape[1]) == (rows, size, 0)
        lengths = layer.key_value_lengths
        assert (lengths.dtype, lengths.shape) == (Type.int32, (rows,))
        assert layer.decomposable or 32 <= size <= 256
        keys, values = (np.repeat(wide(x), heads // k.shape[1], axis=1) for x in (k, v))
        scores = wide(q) @ keys.swapaxes(-1, -2)
        own = np.arange(length)[None, :, None] + lengths.values[:, None, None] - length
        hidden = np.arange(k.shape[2])[None, None] > own
        return softmax(np.where(hidden[:, None], -np.inf, scores)) @ values, q.dtype

    def _dist_collective(
        self, layer: Any, x: Tensor, kind: str, operation: str, root: int, ranks: list[int]
    ) -> Any:
        assert (kind, operation, root) == ("ALL_REDUCE", "SUM", -1)
        assert ranks == list(range(layer.num_ranks))
        return self.total(wide(x)), x.dtype


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
