"""Rounds a model's matrices for the inputs that they get: one walk through the model.

The calibration tokens go through the step graph in torch, node by node. Before a linear runs, its
weights are rounded, with their inputs at hand; what it then gives its followers is what the engine
will give them. So each matrix makes up for what was lost before it, and no more of the model is
held at a time than one matrix and the activations. Experts have moments of their own slots.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from llmbuild.builder.calibration.batch import calibration_batch, fp32_pools
from llmbuild.builder.calibration.folding import input_scale_of
from llmbuild.builder.calibration.store import ACTIVATION_SCALES, Matrix, TensorStore
from llmbuild.builder.calibration.threads import one_thread
from llmbuild.builder.graph.materialise import check_values
from llmbuild.builder.graph.passes.rewrite import LINEARS, made_by, users
from llmbuild.builder.graph.reference import Values, running
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.plugins.common.kv_pools import bind_kv_pools
from llmbuild.plugins.common.quantised import INT8, Numbers, round_to
from llmbuild.plugins.registry import DOMAIN
from llmbuild.quant.awq import search_stretch
from llmbuild.quant.clipping import round_clipped
from llmbuild.quant.gptq import gptq
from llmbuild.quant.grid import QuantisedMatrix, empty_matrix, row_parts
from llmbuild.quant.moments import FactoredMoments, energy, input_moments
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import open_rows
from llmbuild.quant.rtn import round_to_nearest
from llmbuild.quant.smoothquant import activation_numbers, activation_scales, search_smoothing

Read = Callable[[str], Matrix]

_STRETCH = {"awq", "smoothquant"}  # methods that rescale inputs


def calibrate_weights(
    step: StepGraph,
    config: DecoderConfig,
    plan: QuantPlan,
    read: Read,
    tokens: NDArray[np.int32],
    store: TensorStore,
    advance: Callable[[int], None],
) -> None:
    """Put into the store what the plan's methods make of the model's tensors, and static scales of
    activations as NAME.activation_scales.

    step: as traced in fp32, before any pass. read: tensors by canonical name, those that the plan
    rounds to nearest or keeps as stored already on their grids. tokens: [sequences, length].
    advance: called with the weights that were gone through.
    """
    walk = _Walk(step, config.head_dim, plan, read, store)
    left = {*plan.methods, *plan.static}
    pools = fp32_pools(config, tokens.shape)
    with bind_kv_pools(pools), torch.no_grad():
        for node, values in running(step, walk.read_floats, calibration_batch(tokens)):
            if node.domain != DOMAIN or node.op_type not in LINEARS:
                continue
            name = walk.prepare(node, values)
            left.discard(name)
            advance(math.prod(step.weights[name].shape))
            if not left:  # before the last one's products, the logits, are made for nothing
                break
            walk.multiply(node, values)


@dataclass(frozen=True)
class _Rounding:
    """What a linear makes of its inputs: such numbers with a scale for each group of columns, 0
    where they stay as they are; static: with the same scales in every row."""

    group: int
    static: bool = False
    numbers: Numbers = INT8


_UNROUNDED = _Rounding(0)


class _Walk:
    """What is known at a point of the walk."""

    def __init__(
        self, step: StepGraph, head_dim: int, plan: QuantPlan, read: Read, store: TensorStore
    ) -> None:
        self._step, self._head_dim, self._plan = step, head_dim, plan
        self._read, self._store = read, store
        self._inputs = _Inputs(None, torch.empty(0))
        self._scaled: set[str] = set()  # whose static scales are found
        self._waiting = {*plan.methods}  # to be rounded

    def read_floats(self, name: str) -> NDArray[np.generic]:
        """A tensor's values as the engine will have them."""
        values = self._store.get(name)
        if values is None:
            values = self._read(name)
        return values.dequantised() if isinstance(values, QuantisedMatrix) else values

    def prepare(self, node: ir.Node, values: Values) -> str:
        """Round the linear's weights where the plan asks for it; returns their name."""
        source, name = _operands(node)
        if self._inputs.value is not source:
            self._inputs = self._new_inputs(source, values)
        if name in self._plan.static - self._scaled:
            self._find_scales(source, self._inputs)
        if name in self._plan.methods:
            if node.op_type == "linear":
                self._round(name, self._inputs)
            else:
                self._round_experts(node, values, self._inputs)
            self._waiting.discard(name)
            if self._waiting.isdisjoint(_readers(source)):
                self._inputs.forget_moments()
        return name

    def multiply(self, node: ir.Node, values: Values) -> None:
        """Compute what the linear gives in the engine."""
        _, name = _operands(node)
        x = self._inputs.rounded(self._rounding(name))
        if node.op_type == "moe_linear":
            values[node.outputs[0]] = self._multiply_experts(name, x, _runs(node, values))
            return
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        rows, offset = self._values(name), None if bias is None else self._values(str(bias.name))
        values[node.outputs[0]] = torch.nn.functional.linear(x, rows, offset)

    def _values(self, name: str) -> torch.Tensor:
        values = self.read_floats(name)
        check_values(name, values)
        return torch.from_numpy(values.astype(np.float32, copy=False))

    def _rounding(self, name: str) -> _Rounding:
        group = self._plan.activation_groups.get(name)
        if group is None:
            return _UNROUNDED
        numbers = activation_numbers(self._plan.weights[name])
        return _Rounding(group, name in self._plan.static, numbers)

    def _new_inputs(self, source: ir.Value, values: Values) -> "_Inputs":
        """A value that linears read: rescaled, where that helps to round what reads it."""
        inputs = _Inputs(source, values[source])
        readers = _readers(source)
        methods = {self._plan.methods[name] for name in readers if name in self._plan.methods}
        scale = input_scale_of(self._step, source, self._head_dim) if methods & _STRETCH else None
        if scale is None or not self._may_change([*readers, *scale.tensors]):
            return inputs
        stretch = scale.tied(self._search(readers, inputs))
        inputs.forget_moments()
        for name in readers:
            stretched = self.read_floats(name).astype(np.float32)
            stretched *= stretch.numpy()
            self._store.put(name, stretched)
        for name in scale.tensors:
            self._store.divide_rows(name, self._read, scale.of_rows(stretch).numpy())
        values[source] = values[source] / stretch
        return _Inputs(source, values[source])

    def _may_change(self, names: Sequence[str]) -> bool:
        """Not codes that are kept as they are stored, or are rounded without calibration."""
        return all(name in self._plan.methods for name in names if name in self._plan.weights)

    def _search(self, readers: Sequence[str], inputs: "_Inputs") -> torch.Tensor:
        """By how much to stretch the columns of those that read the inputs."""
        plan = self._plan
        chosen = [name for name in readers if plan.methods.get(name) in _STRETCH]
        matrices = [(self._values(name), plan.weights[name]) for name in chosen]
        with one_thread():
            if plan.methods[chosen[0]] == "awq":
                return search_stretch(matrices, inputs.moments(_UNROUNDED))
            group = plan.activation_groups.get(chosen[0], 0)
            return search_smoothing(inputs.x, matrices, group, chosen[0] in plan.static)

    def _find_scales(self, source: ir.Value, inputs: "_Inputs") -> None:
        """Static scales of an input, the same for all that read it and round it alike."""
        names = [name for name in _readers(source) if name in self._plan.static]
        importance = torch.stack([self._column_squares(name) for name in names]).sum(0)
        importance = (importance / importance.max().clamp(min=1e-300)).float()
        self._scaled.update(names)
        for rounding in dict.fromkeys(map(self._rounding, names)):
            with one_thread():
                scales = activation_scales(inputs.x, importance, rounding.group, rounding.numbers)
            inputs.static_scales[rounding] = torch.from_numpy(scales)
            for name in names:
                if self._rounding(name) == rounding:
                    self._store.put(f"{name}.{ACTIVATION_SCALES}", scales)

    def _round(self, name: str, inputs: "_Inputs") -> None:
        rounding, is_gptq = self._rounding(name), self._plan.methods[name] == "gptq"
        moments = inputs.factored(rounding) if is_gptq else inputs.moments(rounding)
        matrix, lost, total = self._rounded(name, self.read_floats(name), moments)
        self._store.put(name, matrix, loss=lost / total if total > 0 else 0.0)

    def _round_experts(self, node: ir.Node, values: Values, inputs: "_Inputs") -> None:
        """Each expert for its own slots. Where all read tokens as they are, one that few have
        chosen borrows from the others: as many of all slots as there are columns."""
        source, name = _operands(node)
        x, shape = inputs.rounded(self._rounding(name)), self._step.weights[name].shape
        columns = shape[-1]
        borrowed = columns if made_by(source, "moe_gather") else 0
        others = input_moments(x) if borrowed else torch.zeros(columns, columns)
        lost = total = 0.0
        stack = empty_matrix(self._plan.weights[name], shape)
        for expert, run in enumerate(_runs(node, values)):
            length = run.stop - run.start
            own = input_moments(x[run]) * length if length else 0
            moments = (others * borrowed + own) / max(1, borrowed + length)
            if self._plan.methods[name] == "gptq":
                moments = FactoredMoments.of(moments)
            matrix, its_lost, its_total = self._rounded(name, self._expert(name, expert), moments)
            stack.take_rows(expert).fill(matrix)
            lost, total = lost + its_lost * length, total + its_total * length
        self._store.put(name, stack, loss=lost / total if total > 0 else 0.0)

    def _rounded(
        self, name: str, values: NDArray[np.generic], moments: torch.Tensor | FactoredMoments
    ) -> tuple[QuantisedMatrix, float, float]:
        """A matrix by the method that the plan has for it; the squared error of its products with
        inputs of these moments, and the products' square."""
        grid = self._plan.weights[name]
        with one_thread():
            if isinstance(moments, FactoredMoments):
                matrix = gptq(values, moments, grid)
                return matrix, *_squares(values, matrix, moments.energy)
            is_awq = self._plan.methods[name] == "awq"
            importance = moments.diagonal()
            matrix = (
                round_clipped(values, grid, importance)
                if is_awq
                else round_to_nearest(values, grid)
            )
            return matrix, *_squares(values, matrix, lambda rows: energy(rows, moments))

    def _multiply_experts(self, name: str, x: torch.Tensor, runs: Sequence[slice]) -> torch.Tensor:
        """What every slot gets of its expert, whose weights alone are held."""
        y = torch.empty(len(x), self._step.weights[name].shape[1])
        for expert, run in enumerate(runs):
            if run.start < run.stop:
                weights = self._expert(name, expert).astype(np.float32, copy=False)
                torch.matmul(x[run], torch.from_numpy(weights).T, out=y[run])
        return y

    def _expert(self, name: str, expert: int) -> NDArray[np.generic]:
        """The values of one of a stack, as the engine will have them."""
        matrix = self._store.get(name, (expert, expert + 1))
        if matrix is None:
            _, rows = open_rows(name, self._read)
            matrix = rows(expert, expert + 1)
        values = matrix.dequantised() if isinstance(matrix, QuantisedMatrix) else matrix
        check_values(f"expert {expert} of {name}", values)
        return values[0]

    def _column_squares(self, name: str) -> torch.Tensor:
        """Of the sums over rows, fp64 [columns]."""
        shape = self._step.weights[name].shape
        if len(shape) == 2:
            return self._values(name).double().square().sum(0)
        squares = torch.zeros(shape[-1], dtype=torch.float64)
        for expert in range(shape[0]):
            values = self._expert(name, expert).astype(np.float64)
            squares += torch.from_numpy(values).square().sum(0)
        return squares


def _operands(linear: ir.Node) -> tuple[ir.Value, str]:
    """What a linear multiplies: a value, and weights by their name."""
    source, weight = linear.inputs[:2]
    assert source is not None
    assert weight is not None
    return source, str(weight.name)


def _readers(source: ir.Value) -> list[str]:
    """Weights of the linears that read a value."""
    return [_operands(node)[1] for node in users(source) if node.op_type in LINEARS]


def _runs(node: ir.Node, values: Values) -> list[slice]:
    """The slots of each expert."""
    starts = node.inputs[2]
    assert starts is not None
    return [slice(begin, end) for begin, end in pairwise(values[starts].tolist())]


class _Inputs:
    """A value that linears read, and what is known of it."""

    def __init__(self, value: ir.Value | None, x: torch.Tensor) -> None:
        self.value, self.x = value, x
        self.static_scales: dict[_Rounding, torch.Tensor] = {}
        self._rounded: tuple[_Rounding, torch.Tensor] | None = None
        self._moments: tuple[_Rounding, torch.Tensor] | None = None
        self._factored: tuple[_Rounding, FactoredMoments] | None = None

    def rounded(self, to: _Rounding) -> torch.Tensor:
        """As the numbers have it that it is rounded to."""
        if not to.group:
            return self.x
        if self._rounded is None or self._rounded[0] != to:
            scales = self.static_scales[to] if to.static else None
            self._rounded = (to, round_to(to.numbers, self.x, to.group, scales))
        return self._rounded[1]

    def moments(self, of: _Rounding) -> torch.Tensor:
        """Second moments of what `rounded` gives."""
        if self._moments is None or self._moments[0] != of:
            self._moments = (of, input_moments(self.rounded(of)))
        return self._moments[1]

    def factored(self, of: _Rounding) -> FactoredMoments:
        """The same, factored."""
        if self._factored is None or self._factored[0] != of:
            self._factored = (of, FactoredMoments.of_inputs(self.rounded(of)))
        return self._factored[1]

    def forget_moments(self) -> None:
        """They are as large as a matrix, or larger, and no longer needed."""
        self._moments = self._factored = None


def _squares(
    values: NDArray[np.generic],
    matrix: QuantisedMatrix,
    energy_of: Callable[[torch.Tensor], float],
) -> tuple[float, float]:
    """The energy of the matrix's error, and of the values."""
    lost = total = 0.0
    for part in row_parts(values.shape):
        exact = torch.from_numpy(values[part].astype(np.float32))
        error = torch.from_numpy(matrix.take_rows(part).dequantised()) - exact
        lost, total = lost + energy_of(error), total + energy_of(exact)
    return lost, total
