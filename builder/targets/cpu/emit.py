"""Emit a step plan as one C++ file: every shape, type and address offset a constant."""

from pathlib import Path
from string import Template

from llmbuild.builder.targets.cpu.lowering import CPP_TYPES
from llmbuild.builder.targets.cpu.memory import ArenaPlan
from llmbuild.builder.targets.cpu.pack import packed_bytes, weight_offsets
from llmbuild.builder.targets.cpu.plan import (
    Argument,
    Batch,
    Call,
    Count,
    Expression,
    PackedWeight,
    Pool,
    StepInput,
    StepPlan,
    View,
)
from llmbuild.runtime.manifest import KV_ITEM_BYTES, KVLayer, KVLayout, Limits, step_shape
from llmbuild.version import __version__

ABI = "llmbuild-cpu-2"  # of the exported functions; runtime/executors/cpu.py expects the same
_TEMPLATE = Path(__file__).with_name("engine.cpp.in")
_HEADERS = {  # of kernels that aren't named as their header's folder
    "add_rms_norm": "rms_norm",
    "dynamic_rope_table": "rope_table",
    "switched_rope_table": "rope_table",
    "gather_tiled_rows": "gather_rows",
    "moe_combine": "moe",
    "moe_gather": "moe",
    "moe_linear": "moe",
    "moe_route": "moe",
    "moe_sort": "moe",
}
_OPERATORS = {"Add": "+", "Sub": "-", "Mul": "*", "Div": "/"}


def emit(plan: StepPlan, arena: ArenaPlan, limits: Limits, name: str) -> str:
    """The C++ source of an engine; it includes the plugins' headers and nothing else of ours."""
    headers = sorted({_HEADERS.get(call.kernel, call.kernel) for call in plan.calls})
    emission = _Emission(plan, arena)
    return Template(_TEMPLATE.read_text()).substitute(
        version=__version__,
        name=name,
        summary=f"{len(plan.calls)} kernel calls, {len(plan.weights)} weights",
        includes="\n".join(f'#include "{header}/cpu.h"' for header in headers),
        weights_bytes=sum(map(packed_bytes, plan.weights)),
        arena_bytes=max(arena.size_bytes, 64),
        max_tokens=limits.max_step_tokens,
        max_sequences=max(limits.max_sequences, 1),
        calls="\n".join(map(emission.call, plan.calls)),
        abi=ABI,
        shape=_shape(plan, arena, limits),
    )


def _shape(plan: StepPlan, arena: ArenaPlan, limits: Limits) -> str:
    layer = KVLayer(k_dtype=plan.kv_dtype, v_dtype=plan.kv_dtype)
    kv = KVLayout(
        block_size=plan.block_size,
        num_kv_heads=plan.kv_heads,
        head_dim=plan.head_dim,
        layers=[layer] * plan.num_layers,
    )
    return step_shape(limits, kv, plan.logits.width, arena.size_bytes)


class _Emission:
    """Turns calls into C++ statements."""

    def __init__(self, plan: StepPlan, arena: ArenaPlan) -> None:
        self.plan = plan
        self.arena = arena
        self.weights = weight_offsets(plan)
        items = plan.kv_heads * plan.block_size * plan.head_dim
        self.pool_block_bytes = items * KV_ITEM_BYTES[plan.kv_dtype]

    def call(self, call: Call) -> str:
        """The kernel call, and the barrier that makes its outputs whole for the next."""
        template = ", ".join(map(str, call.template))
        arguments = ", ".join(["worker", *map(self.argument, call.arguments)])
        return f"  {call.kernel}<{template}>({arguments});\n  worker.barrier();"

    def argument(self, argument: Argument) -> str:
        match argument:
            case None:
                return "nullptr"
            case View():
                return self.view(argument)
            case PackedWeight():
                cpp_type = CPP_TYPES[argument.dtype]
                return f"weight({cpp_type}{{}}, {self.weights[argument.name]})"
            case Pool():
                cpp_type = CPP_TYPES[self.plan.kv_dtype]
                pools_before = 2 * argument.layer + (argument.kind == "v")
                return f"pool({cpp_type}{{}}, {pools_before * self.pool_block_bytes})"
            case StepInput():
                return f"step.{argument.name}"
            case Batch():
                return "step"
            case Count():
                return _count(argument)
            case Expression():
                value = self.expression(argument, argument.width)
                return f"[&](int64_t r, int i) {{ return {value}; }}"
            case float():
                return f"{argument!r}f"
            case int():
                return str(argument)

    def view(self, view: View) -> str:
        if view.buffer == self.plan.logits:
            return "run.logits"
        cpp_type = "int32_t" if view.buffer.dtype == "int32" else "float"
        return f"buffer({cpp_type}{{}}, {self.arena.offsets[view.buffer]}, {view.column})"

    def expression(self, expression: Expression, width: int) -> str:
        """The value of chunk i of row r of a result this wide, 16 columns, as C++."""
        operands = [self.operand(operand, width) for operand in expression.operands]
        operator = _OPERATORS.get(expression.operation)
        if operator is None:
            return f"{expression.operation}({', '.join(operands)})"
        return f"({f' {operator} '.join(operands)})"

    def operand(self, operand: Expression | View | float, width: int) -> str:
        """One part of a result this wide; a column, however deep it stands, is broadcast."""
        match operand:
            case Expression():
                return self.expression(operand, width)
            case float():
                return f"splat({operand!r}f)"
        if operand.width == 1 and width > 1:
            return f"splat_row<{operand.stride}>({self.view(operand)}, r)"
        return f"load_chunk<{width}>({self.view(operand)} + r * {operand.stride}, i)"


def _count(count: Count) -> str:
    rows = count.rows.value
    return rows if count.rows_each == 1 else f"{rows} * {count.rows_each}"
