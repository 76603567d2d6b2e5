"""TensorRT's layers but for those of attention: what each asks for, and what it computes.

Sums and all other arithmetic are fp32, and the result is rounded to the layer's dtype.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmbuild.builder.targets.tensorrt.emulation.module import DataType, Weights
from llmbuild.builder.targets.tensorrt.emulation.sizes import Size, Sizes
from llmbuild.builder.targets.tensorrt.emulation.tensors import Layer, Made, MakeLayer, Tensor

_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "SUB": torch.sub,
    "PROD": torch.mul,
    "DIV": torch.div,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "EQUAL": torch.eq,
    "LESS": torch.lt,
    "GREATER": torch.gt,
    "AND": torch.logical_and,
    "OR": torch.logical_or,
}
_COMPARISONS = ("EQUAL", "LESS", "GREATER")
_LAST_CODES = {DataType.int8: (-128.0, 127.0), DataType.fp8: (-448.0, 448.0)}
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SIGMOID": torch.sigmoid,
    "TANH": torch.tanh,
    "RELU": torch.relu,
    "GELU_ERF": torch.nn.functional.gelu,
    "GELU_TANH": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def _constant(layer: Layer, shape: Sequence[int], weights: Weights) -> Made:
    layer.require(weights.count == prod(shape), f"{weights.count} weights for shape {list(shape)}")
    is_sizes = weights.dtype is DataType.int64
    numbers = tuple(weights.values().tolist()) if is_sizes else None
    output = Tensor(weights.dtype, tuple(shape), numbers=numbers)
    return Made([output], lambda: weights.values().reshape(tuple(shape)))


def _shape(layer: Layer, x: Tensor) -> Made:
    output = Tensor(DataType.int64, (len(x.sizes),), numbers=x.sizes)
    return Made([output], lambda x: torch.tensor(x.shape))


def _cast(layer: Layer, x: Tensor, dtype: DataType) -> Made:
    return Made([Tensor(dtype, x.sizes)], lambda x: x)


def _elementwise(layer: Layer, left: Tensor, right: Tensor, operation: str) -> Made:
    layer.require_same_dtype(left, right)
    dtype = DataType.bool if operation in _COMPARISONS else left.dtype
    if not left.dtype.is_float:
        return Made([Tensor(dtype, _broadcast(layer, left, right))], _BINARY[operation])
    return Made(
        [Tensor(dtype, _broadcast(layer, left, right))],
        lambda left, right: _BINARY[operation](left.float(), right.float()),
    )


def _broadcast(layer: Layer, *tensors: Tensor) -> Sizes:
    """Sizes of 1 are broadcast."""
    layer.require(len({len(tensor.sizes) for tensor in tensors}) == 1, "ranks differ")

    def one(sizes: Sequence[Size]) -> Size:
        wide = [size for size in sizes if size != 1]
        size = wide[0] if wide else 1
        for other in wide[1:]:
            size = layer.common(size, other)
        return size

    return tuple(one(sizes) for sizes in zip(*(each.sizes for each in tensors), strict=True))


def _unary(layer: Layer, x: Tensor, operation: str) -> Made:
    layer.require_float(x)
    functions = {"SQRT": torch.sqrt}
    return Made([Tensor(x.dtype, x.sizes)], lambda x: functions[operation](x.float()))


def _activation(layer: Layer, x: Tensor, kind: str) -> Made:
    layer.require_float(x)
    return Made([Tensor(x.dtype, x.sizes)], lambda x: _ACTIVATIONS[kind](x.float()))


def _reduce(layer: Layer, x: Tensor, operation: str, axes: int, keep: bool) -> Made:
    layer.require_float(x)
    layer.require((operation, keep) == ("AVG", True), f"{operation} isn't emulated")
    over = [axis for axis in range(len(x.sizes)) if axes >> axis & 1]
    sizes = tuple(1 if axis in over else size for axis, size in enumerate(x.sizes))
    return Made([Tensor(x.dtype, sizes)], lambda x: x.float().mean(over, keepdim=True))


def _select(layer: Layer, where: Tensor, yes: Tensor, no: Tensor) -> Made:
    layer.require(where.dtype is DataType.bool, f"{where.dtype.value} is no condition")
    layer.require_same_dtype(yes, no)
    sizes = _broadcast(layer, where, yes, no)
    return Made([Tensor(yes.dtype, sizes)], torch.where)


def _shuffle(layer: Layer, x: Tensor) -> Made:
    order = tuple(getattr(layer, "first_transpose", range(len(x.sizes))))
    sizes = tuple(x.sizes[axis] for axis in order)
    if 1 in layer.inputs:
        return _shaped_by_tensor(layer, x, order, layer.inputs[1])
    dims = getattr(layer, "reshape_dims", None)
    if dims is None:
        return Made([Tensor(x.dtype, sizes)], lambda x: x.permute(order))
    known = prod(size for size in dims if size != -1)
    volume: Size = prod(sizes, start=1)
    layer.require(
        not isinstance(volume, int) or volume % known == 0, f"{volume} items for {list(dims)}"
    )
    reshaped = tuple(volume // known if size == -1 else size for size in dims)
    return Made([Tensor(x.dtype, reshaped)], lambda x: x.permute(order).reshape(dims))


def _shaped_by_tensor(layer: Layer, x: Tensor, order: Sequence[int], shape: Tensor) -> Made:
    layer.require(shape.dtype is DataType.int64, f"a shape in {shape.dtype.value}")
    layer.require(shape.numbers is not None, "a shape that isn't made of sizes")
    assert shape.numbers is not None
    return Made(
        [Tensor(x.dtype, shape.numbers)],
        lambda x, shape: x.permute(order).reshape(shape.tolist()),
    )


def _slice(
    layer: Layer, x: Tensor, start: Sequence[int], size: Sequence[int], step: Sequence[int]
) -> Made:
    """Sizes may come from a tensor."""
    layer.require(set(step) == {1}, "strides aren't emulated")
    shape = layer.inputs.get(2)
    sizes: Sizes = tuple(size) if shape is None else shape.numbers or ()
    layer.require(len(start) == len(sizes) == len(x.sizes), "ranks differ")
    for begin, count, have in zip(start, sizes, x.sizes, strict=True):
        if isinstance(count, int) and isinstance(have, int):
            layer.require(begin + count <= have, f"{begin} + {count} of {have} items")
    numbers = x.numbers
    if numbers is not None:
        assert isinstance(sizes[0], int)
        numbers = numbers[start[0] : start[0] + sizes[0]]

    def compute(x: torch.Tensor, shape: torch.Tensor | None = None) -> torch.Tensor:
        counts = size if shape is None else shape.tolist()
        for axis, (begin, count) in enumerate(zip(start, counts, strict=True)):
            x = x.narrow(axis, begin, count)
        return x

    return Made([Tensor(x.dtype, sizes, numbers=numbers)], compute)


def _concatenation(layer: Layer, parts: list[Tensor]) -> Made:
    layer.require_same_dtype(*parts)
    axis = getattr(layer, "axis", 0)
    along: Size = sum((part.sizes[axis] for part in parts[1:]), parts[0].sizes[axis])
    sizes = (*parts[0].sizes[:axis], along, *parts[0].sizes[axis + 1 :])
    each = [part.numbers for part in parts]
    numbers = None
    if all(part is not None for part in each):
        numbers = tuple(number for part in each for number in part or ())
    return Made(
        [Tensor(parts[0].dtype, sizes, numbers=numbers)], lambda *parts: torch.cat(parts, axis)
    )


def _gather(layer: Layer, x: Tensor, index: Tensor, axis: int) -> Made:
    layer.require(index.dtype in (DataType.int32, DataType.int64), "an index is int32 or int64")
    is_packed = x.dtype in (DataType.int4, DataType.fp8)
    layer.require(not is_packed, f"{x.dtype.value} may only be dequantised")
    sizes = (*x.sizes[:axis], *index.sizes, *x.sizes[axis + 1 :])

    def compute(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        taken = x.index_select(axis, index.flatten())  # checks the index
        return taken.unflatten(axis, index.shape)

    return Made([Tensor(x.dtype, sizes)], compute)


def _matrix_multiply(
    layer: Layer, left: Tensor, left_form: str, right: Tensor, right_form: str
) -> Made:
    layer.require_same_dtype(left, right)
    layer.require_float(left)
    layer.require(len(left.sizes) == len(right.sizes), "ranks differ")
    forms = (left_form == "TRANSPOSE", right_form == "TRANSPOSE")
    a, b = (_transposed(x.sizes, form) for x, form in zip((left, right), forms, strict=True))
    layer.common(a[-1], b[-2])
    batch = (layer.common(*pair) for pair in zip(a[:-2], b[:-2], strict=True))

    def compute(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        a, b = left.float(), right.float()
        return torch.matmul(a.mT if forms[0] else a, b.mT if forms[1] else b)

    return Made([Tensor(left.dtype, (*batch, a[-2], b[-1]))], compute)


def _transposed(sizes: Sizes, is_transposed: bool) -> Sizes:
    return (*sizes[:-2], sizes[-1], sizes[-2]) if is_transposed else sizes


def _softmax(layer: Layer, x: Tensor) -> Made:
    layer.require_float(x)
    axes: int = getattr(layer, "axes", 0)
    layer.require(axes == 1 << (len(x.sizes) - 1), "only the last axis is emulated")
    return Made([Tensor(x.dtype, x.sizes)], lambda x: x.float().softmax(-1))


def _quantize(layer: Layer, x: Tensor, scale: Tensor, dtype: DataType) -> Made:
    """To int8 or FP8, by one scale; ties to even, and what is beyond the last code becomes it."""
    layer.require_float(x)
    is_known = dtype in _LAST_CODES and scale.sizes == ()
    layer.require(is_known, "int8 or fp8 by one scale is emulated")
    least, most = _LAST_CODES[dtype]

    def compute(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        within = (x.float() / scale.float()).clamp(least, most)
        return within if dtype is DataType.fp8 else within.round()

    return Made([Tensor(dtype, x.sizes)], compute)


def _dequantize(layer: Layer, codes: Tensor, scale: Tensor, dtype: DataType) -> Made:
    """One scale for all, or one for each item of an axis (int8, FP8) or for each block of rows
    (int4, whose only kernels want the scales in the result's dtype)."""
    known = (*_LAST_CODES, DataType.int4)
    layer.require(codes.dtype in known, f"codes are {codes.dtype.value}")
    output = Tensor(dtype, codes.sizes)
    if codes.dtype is DataType.int4:
        layer.require(scale.dtype is dtype, f"scales in {scale.dtype.value}")
        rows, blocks = codes.shape[0], scale.shape[0]
        layer.require(
            rows % blocks == 0 and codes.shape[1:] == scale.shape[1:], "scales don't fit codes"
        )
        return Made([output], lambda codes, scale: _by_block(codes, scale.float(), rows // blocks))
    axis: int = getattr(layer, "axis", 0)
    layer.require(scale.sizes in ((), (codes.sizes[axis],)), f"scales aren't axis {axis}'s")
    shape = [-1 if at == axis else 1 for at in range(len(codes.sizes))]

    def compute(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return codes.float() * (scale.float().reshape(shape) if scale.dim() else scale.float())

    return Made([output], compute)


def _by_block(codes: torch.Tensor, scale: torch.Tensor, rows: int) -> torch.Tensor:
    return (codes.float().unflatten(0, (-1, rows)) * scale[:, None]).flatten(0, 1)


def dist_collective(
    total: Callable[[NDArray[np.float32]], NDArray[np.float32]],
    layer: Any,
    x: Tensor,
    kind: str,
    operation: str,
    root: int,
    ranks: list[int],
) -> Made:
    """total: the sum over all ranks of each one's part, fp32."""
    asked = (kind, operation, root) == ("ALL_REDUCE", "SUM", -1)
    layer.require(asked, f"{operation} over ranks isn't emulated")
    layer.require(ranks == list(range(layer.num_ranks)), f"ranks {ranks} of {layer.num_ranks}")
    return Made(
        [Tensor(x.dtype, x.sizes)],
        lambda x: torch.from_numpy(np.ascontiguousarray(total(x.float().numpy()))),
    )


LAYERS: dict[str, MakeLayer] = {
    "constant": _constant,
    "shape": _shape,
    "cast": _cast,
    "elementwise": _elementwise,
    "unary": _unary,
    "activation": _activation,
    "reduce": _reduce,
    "select": _select,
    "shuffle": _shuffle,
    "slice": _slice,
    "concatenation": _concatenation,
    "gather": _gather,
    "matrix_multiply": _matrix_multiply,
    "softmax": _softmax,
    "quantize": _quantize,
    "dequantize": _dequantize,
}
