"""Reads from a step plan, which C++ is emitted from, what precision its executable has.

What counts is what the C++ compiler and the weights file get: the types in the calls' templates,
the kernels that round activations, and the grid that a weight is packed on. Neither the recipe nor
the quantisation plan is looked at.
"""

import re
from collections import defaultdict

from llmbuild.builder.graph.step_graph import CODES, StepGraph
from llmbuild.builder.report.compiled_precision import (
    Activations,
    CompiledPrecision,
    WeightPrecision,
    kv_dtypes,
    row_grid,
)
from llmbuild.builder.targets.cpu.head_runs import KV_CPP_TYPES
from llmbuild.builder.targets.cpu.lowering import CPP_TYPES
from llmbuild.builder.targets.cpu.plan import Buffer, Call, PackedWeight, Pool, StepPlan, View
from llmbuild.quant.grid import WeightGrid

# Kernels whose template begins with the type of a matrix, by the argument that it is.
_LINEARS = {
    f"{experts}{kind}": 1
    for experts in ("", "moe_")
    for kind in ("linear", "int8_linear", "dequantised_linear")
}
_GATHERS = dict.fromkeys(("gather_rows", "gather_tiled_rows", "gather_quantised_rows"), 0)
_MATRIX_ARGUMENT = _LINEARS | _GATHERS
# Where a template has the columns of a group of activations.
_LINEAR_GROUP = {"int8_linear": 3, "moe_int8_linear": 4}
_ROUNDED_GROUP = {  # the same of the kernels that round them
    "quantise_rows": 1,
    "rms_norm_int8": 1,
    "gated_activation_int8": 3,
    "add_rms_norm_int8": 4,
}
_GRID = re.compile(r"Grid<(\d+), (\d+), (true|false)(, true)?>")
_DTYPES = {cpp_type: dtype for dtype, cpp_type in CPP_TYPES.items()}
_KV_DTYPES = {cpp_type: dtype for dtype, cpp_type in KV_CPP_TYPES.items()}


def read_precision(plan: StepPlan, step: StepGraph) -> CompiledPrecision:
    """The precisions of every matrix and of the KV cache. step: the graph that was lowered, which
    says what canonical tensors a weight is made of."""
    weights: dict[str, set[WeightPrecision]] = defaultdict(set)
    activations: dict[str, set[Activations]] = defaultdict(set)
    rounded: dict[Buffer, Activations] = {}
    for call in plan.calls:
        if call.kernel in _ROUNDED_GROUP:
            rounded |= {b: _rounding(call) for b in call.writes if b.dtype == "int8_rows"}
        if call.kernel == "moe_gather":
            rounded |= {to: rounded[of] for to in call.writes for of in call.buffers & {*rounded}}
        matrix = _matrix(call)
        if matrix is None:
            continue
        for name in _sources(matrix, step):
            weights[name] |= {_kernel_precision(call, matrix), _packed_precision(matrix)}
            if call.kernel in _LINEARS:
                activations[name] |= _activations(call, rounded)
    return CompiledPrecision(weights, activations, _kv(plan))


def _matrix(call: Call) -> PackedWeight | None:
    """The matrix that a call reads, None for a call without."""
    if call.kernel not in _MATRIX_ARGUMENT:
        return None
    argument = call.arguments[_MATRIX_ARGUMENT[call.kernel]]
    return argument if isinstance(argument, PackedWeight) else None  # rows of activations


def _sources(matrix: PackedWeight, step: StepGraph) -> tuple[str, ...]:
    weight = step.weights.get(matrix.name) or step.weights.get(f"{matrix.name}.{CODES}")
    return () if weight is None else weight.sources  # a constant is no canonical tensor


def _kernel_precision(call: Call, matrix: PackedWeight) -> WeightPrecision:
    """As the kernel takes the bytes that it finds."""
    cpp_type = str(call.template[0])
    grid = _GRID.fullmatch(cpp_type)
    if grid is None:
        return _DTYPES[cpp_type]
    bits, columns, asymmetric, zero_points = grid.groups()
    found = WeightGrid(int(bits), int(columns), asymmetric == "false", bool(zero_points))
    return row_grid(found, matrix.shape[-1])


def _packed_precision(matrix: PackedWeight) -> WeightPrecision:
    """As the weights file has it."""
    return matrix.dtype if matrix.grid is None else row_grid(matrix.grid, matrix.shape[-1])


def _rounding(call: Call) -> Activations:
    """A call with static scales ends in them, and its template in "true"."""
    group = int(call.template[_ROUNDED_GROUP[call.kernel]])
    return Activations(group, call.template[-1] == "true")


def _activations(call: Call, rounded: dict[Buffer, Activations]) -> set[Activations]:
    """What a linear's inputs are made, and what it takes them for."""
    if call.kernel not in _LINEAR_GROUP:
        return {Activations()}
    view = call.arguments[0]
    assert isinstance(view, View)
    made = rounded[view.buffer]
    return {made, Activations(int(call.template[_LINEAR_GROUP[call.kernel]]), made.static)}


def _kv(plan: StepPlan) -> dict[str, set[str]]:
    """The types of the calls that write and read pools, and of the pools as they are laid out."""
    heads: dict[tuple[int, int], int] = {}  # of each layer's runs
    types: dict[Pool, set[str]] = defaultdict(set)
    for call in plan.calls:
        for pool in (each for each in call.arguments if isinstance(each, Pool)):
            types[pool].add(_KV_DTYPES[str(call.template["kv".index(pool.kind)])])
            heads[pool.layer, pool.run] = int(call.template[3])
    items: dict[str, set[str]] = {}
    for pool, dtypes in types.items():
        first = sum(heads.get((pool.layer, run), 0) for run in range(pool.run))
        for head in range(first, first + heads[pool.layer, pool.run]):
            items[f"layers.{pool.layer}.{pool.kind}.{head}"] = {*dtypes}
    for name, dtype in kv_dtypes(plan.kv).items():
        if name in items:  # otherwise no call touches it, whatever its pool
            items[name].add(dtype)
    return items
