"""What the functions that lower operations share: a network that grows, and its tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmbuild.builder.graph.materialise import ReadTensor, materialise
from llmbuild.builder.graph.step_graph import OUTPUT, StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.targets.tensorrt.limits import POSITIONS, ActivationDtype, Limits
from llmbuild.errors import BuildError

Tensor = Any  # trt.ITensor; TensorRT's Python classes have no types
Layer = Any

_NUMPY_DTYPES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


class Lowering:
    """The network of one step graph while it grows.

    Every activation is [rows, features], as in the step graph, of dtype `activations`. trt: the
    module of the TensorRT at hand. read: gives canonical tensors.
    """

    target = "tensorrt-rtx"  # as recipes call it

    def __init__(
        self,
        trt: Any,
        network: Any,
        step: StepGraph,
        config: DecoderConfig,
        limits: Limits,
        activations: ActivationDtype,
        read: ReadTensor,
    ) -> None:
        self.trt, self.network = trt, network
        self.step, self.config, self.limits, self.read = step, config, limits, read
        self.act = {"fp16": trt.float16, "bf16": trt.bfloat16}[activations]
        self.act_numpy = _NUMPY_DTYPES[activations]
        self.inputs: dict[str, Tensor] = {}
        self.tensors: dict[ir.Value, Tensor] = {}
        self.ropes: dict[ir.Value, tuple[Tensor, Tensor]] = {}  # cosines and sines by position
        self.caches: dict[tuple[int, str], Tensor] = {}  # of a layer's "k" and "v", updated
        self.kept: list[NDArray[np.generic]] = []  # weights, which TensorRT reads when it builds
        self._shared: dict[tuple[object, ...], Tensor] = {}
        self._at = ""
        self._count = 0

    # Layers

    def begin(self, node: ir.Node) -> None:
        """Layers from here on are the node's: their names begin with its first output's."""
        self._at, self._count = str(node.outputs[0].name), 0

    def layer(self, kind: str, *arguments: Any) -> Layer:
        """A new layer, made by the network's add_<kind>. Raises BuildError where it is refused."""
        made = getattr(self.network, f"add_{kind}")(*arguments)
        name = f"{self._at}.{kind}.{self._count}"
        self._count += 1
        if made is None:
            raise BuildError(f"TensorRT refuses layer {name}")
        made.name = name
        return made

    def add(self, kind: str, *arguments: Any) -> Tensor:
        """The result of a new layer that needs no more than its arguments."""
        return self.layer(kind, *arguments).get_output(0)

    def binary(self, operation: str, left: Tensor, right: Tensor) -> Tensor:
        """Elementwise; sizes of 1 are broadcast."""
        return self.add(
            "elementwise", left, right, getattr(self.trt.ElementWiseOperation, operation)
        )

    def unary(self, operation: str, x: Tensor) -> Tensor:
        return self.add("unary", x, getattr(self.trt.UnaryOperation, operation))

    def activation(self, kind: str, x: Tensor) -> Tensor:
        return self.add("activation", x, getattr(self.trt.ActivationType, kind))

    def cast(self, x: Tensor, dtype: Any) -> Tensor:
        return x if x.dtype == dtype else self.add("cast", x, dtype)

    # Shapes

    def reshape(self, x: Tensor, *sizes: int) -> Tensor:
        """-1, once, stands for what is left."""
        layer = self.layer("shuffle", x)
        layer.reshape_dims = sizes
        return layer.get_output(0)

    def by_token(self, x: Tensor, *sizes: int) -> Tensor:
        """[T, ...] as [B, L, *sizes]."""
        layer = self.layer("shuffle", x)
        layer.set_input(1, self._token_shape(sizes))
        return layer.get_output(0)

    def _token_shape(self, sizes: tuple[int, ...]) -> Tensor:
        def make() -> Tensor:
            rows = self.add("shape", self.inputs[POSITIONS])
            return self.add("concatenation", [rows, self.constant(np.array(sizes, np.int64))])

        return self.once(("token shape", *sizes), make)

    def transpose(self, x: Tensor, *order: int) -> Tensor:
        layer = self.layer("shuffle", x)
        layer.first_transpose = order
        return layer.get_output(0)

    def columns(self, x: Tensor, begin: int, width: int) -> Tensor:
        """Columns [begin, begin + width) of [rows, features]."""
        rows = self.add("slice", self.add("shape", x), (0,), (1,), (1,))
        shape = self.add("concatenation", [rows, self.constant(np.array([width], np.int64))])
        layer = self.layer("slice", x, (0, begin), (0, width), (1, 1))
        layer.set_input(2, shape)
        return layer.get_output(0)

    # Constants

    def constant(self, values: NDArray[np.generic]) -> Tensor:
        """Its dtype is the array's."""
        return self.packed_constant(values, self._dtype(values), values.shape)

    def packed_constant(
        self, values: NDArray[np.generic], dtype: Any, shape: Sequence[int]
    ) -> Tensor:
        """An array's memory as a tensor of this dtype and shape."""
        values = np.ascontiguousarray(values)
        self.kept.append(values)
        size = int(np.prod(shape, dtype=np.int64))
        weights = self.trt.Weights(dtype, values.ctypes.data, size)
        return self.add("constant", tuple(shape), weights)

    def number(self, value: float, like: Tensor) -> Tensor:
        """A number that is broadcast over a tensor, of its dtype."""
        shape = (1,) * len(like.shape)
        if like.dtype == self.trt.float32:
            return self.constant(np.full(shape, value, np.float32))
        return self.constant(self.to_activations(np.full(shape, value, np.float32), "a constant"))

    def to_activations(self, values: NDArray[np.generic], name: str) -> NDArray[np.generic]:
        """Values in the activations' dtype. Raises BuildError for one beyond its reach."""
        with np.errstate(over="ignore"):
            rounded = values.astype(self.act_numpy, copy=False)
        if not np.isfinite(rounded.astype(np.float32, copy=False)).all():
            largest = float(np.abs(values.astype(np.float32)).max())
            raise BuildError(
                f"{name} holds {largest:.4g}, which {self.act_numpy} doesn't reach; choose bf16"
            )
        return rounded

    def _dtype(self, values: NDArray[np.generic]) -> Any:
        trt = self.trt
        known = {
            "float16": trt.float16,
            "bfloat16": trt.bfloat16,
            "float32": trt.float32,
            "float8_e4m3fn": trt.fp8,
            "int8": trt.int8,
            "int32": trt.int32,
            "int64": trt.int64,
        }
        return known[values.dtype.name]

    # The step graph's values

    def tensor(self, value: ir.Value | None) -> Tensor:
        assert value is not None
        if value not in self.tensors:
            raise BuildError(f"the {self.target} target has nothing that stands for {value.name!r}")
        return self.tensors[value]

    def values(self, value: ir.Value | None) -> NDArray[np.generic]:
        """A weight's or constant's, in its own dtype."""
        assert value is not None
        return materialise(self.step, str(value.name), self.read)

    def matrix(self, value: ir.Value | None) -> Tensor:
        """A weight matrix in the activations' dtype, [out, in]; one tensor, however many read
        it."""
        assert value is not None
        name = str(value.name)

        def make() -> Tensor:
            return self.constant(self.to_activations(self.values(value), name))

        return self.once(("matrix", name), make)

    def row(self, value: ir.Value | None) -> Tensor:
        """A vector in the activations' dtype, to be added to rows."""
        rounded = self.to_activations(self.values(value), str(value.name) if value else "")
        return self.constant(rounded.reshape(1, -1))

    def once(self, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
        """What `make` gave for this key, when first asked."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    # Inputs and outputs

    def add_input(self, name: str, dtype: Any, *shape: int | str) -> None:
        """A size with a name may change; sizes of one name are equal."""
        sizes = tuple(-1 if isinstance(size, str) else size for size in shape)
        tensor = self.network.add_input(name, dtype, sizes)
        for axis, size in enumerate(shape):
            if isinstance(size, str):
                tensor.set_dimension_name(axis, size)
        self.inputs[name] = tensor

    def mark_output(self, tensor: Tensor, name: str) -> None:
        tensor.name = name
        self.network.mark_output(tensor)

    def mark_result(self) -> None:
        """Logits are fp32; what the next stage reads keeps the activations' dtype."""
        result = self.tensor(self.step.graph.outputs[0])
        if self.step.output == OUTPUT:
            result = self.cast(result, self.trt.float32)
        self.mark_output(result, self.step.output)

    def refusal(self, node: ir.Node, feature: str, remedy: str) -> BuildError:
        """What to raise for a node that the target can't express."""
        return BuildError(
            f"the {self.target} target can't lower {node.op_type} with {feature}, which makes "
            f"{node.outputs[0].name!r}; {remedy}"
        )


def optional_input(node: ir.Node, slot: int) -> ir.Value | None:
    """An input that a node may lack."""
    return node.inputs[slot] if slot < len(node.inputs) else None
