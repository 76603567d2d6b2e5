"""Emit a step plan as one C++ file: every shape, type and address offset a constant."""

from pathlib import Path
from string import Template

from llmbuild.builder.targets.cpu.head_runs import KV_CPP_TYPES
from llmbuild.builder.targets.cpu.lowering import CPP_TYPES
from llmbuild.builder.targets.cpu.memory import ArenaPlan
from llmbuild.builder.targets.cpu.pack import packed_bytes, weight_offsets
from llmbuild.builder.targets.cpu.plan import (
    Argument,
    Batch,
    Call,
    Count,
    Expression,
    FirstToken,
    OwnRows,
    PackedWeight,
    Pool,
    Ranks,
    Rows,
    StepInput,
    StepPlan,
    View,
    WeightFrom,
)
from llmbuild.runtime.manifest import KVLayout, Limits, step_shape
from llmbuild.version import __version__

ABI = "llmbuild-cpu-4"  # of the exported functions; runtime/executors/cpu.py expects the same
_TEMPLATE = Path(__file__).with_name("engine.cpp.in")
_MOE_LINEARS = ("linear", "int8_linear", "dequantised_linear")
_MOE_PARTS = (*_MOE_LINEARS, "combine", "gather", "route", "sort")
_HEADERS = {  # of kernels that aren't in the cpu.h of the folder with their name
    **dict.fromkeys(("add_rms_norm", "add_rms_norm_int8", "rms_norm_int8"), "rms_norm/cpu.h"),
    **dict.fromkeys(("dynamic_rope_table", "switched_rope_table"), "rope_table/cpu.h"),
    **dict.fromkeys(("gather_tiled_rows", "gather_quantised_rows"), "gather_rows/cpu.h"),
    **dict.fromkeys(("int8_linear", "dequantised_linear", "quantise_rows"), "linear/quantised.h"),
    "gated_activation_int8": "gated_activation/cpu.h",
    **dict.fromkeys([f"moe_{part}" for part in _MOE_PARTS], "moe/cpu.h"),
    **dict.fromkeys(("send_rows", "receive_rows"), "stage_transfer/cpu.h"),
}
_CPP_ITEMS = {"fp32": "float", "int32": "int32_t", "int8_rows": "uint8_t"}  # of buffers
_OPERATORS = {"Add": "+", "Sub": "-", "Mul": "*", "Div": "/"}


def emit(plan: StepPlan, arena: ArenaPlan, limits: Limits, name: str) -> str:
    """The C++ source of an engine; it includes the plugins' headers and nothing else of ours."""
    headers = {_HEADERS.get(call.kernel, f"{call.kernel}/cpu.h") for call in plan.calls}
    emission = _Emission(plan, arena, limits)
    return Template(_TEMPLATE.read_text()).substitute(
        version=__version__,
        name=name,
        summary=f"{len(plan.calls)} kernel calls, {len(plan.weights)} weights",
        includes="\n".join(f'#include "{header}"' for header in sorted(headers)),
        weights_bytes=_weights_bytes(plan, shared=False),
        shared_weights_bytes=_weights_bytes(plan, shared=True),
        arena_bytes=max(arena.size_bytes, 64),
        max_tokens=limits.max_step_tokens,
        max_sequences=max(limits.max_sequences, 1),
        logits=_num_logits(plan),
        hidden=plan.hidden_size,
        tp=plan.parallel.tp,
        pp=plan.parallel.pp,
        stage=plan.stage,
        calls="\n".join(map(emission.call, plan.calls)),
        abi=ABI,
        shape=_shape(plan, arena, limits),
    )


def _shape(plan: StepPlan, arena: ArenaPlan, limits: Limits) -> str:
    sizes = (_num_logits(plan), arena.size_bytes)
    return step_shape(limits, plan.kv, *sizes, plan.stage, plan.parallel)


def _num_logits(plan: StepPlan) -> int:
    """Of a row on this rank."""
    return 0 if plan.logits is None else plan.logits.width


def _weights_bytes(plan: StepPlan, shared: bool) -> int:
    """Of the rank's own weights file, or of the one that it shares."""
    return sum(packed_bytes(w) for w in plan.weights if (w.name in plan.shared) == shared)


def _pools(kv: KVLayout) -> dict[Pool, str]:
    """Every pool as C++. Its offset is in bytes of a block of the pools before it."""
    pools: dict[Pool, str] = {}
    block_bytes = 0
    for index, layer in enumerate(kv.layers):
        for run, heads in enumerate(layer.heads):
            for kind, dtype in (("k", heads.k_dtype), ("v", heads.v_dtype)):
                pools[Pool(index, run, kind)] = f"pool({KV_CPP_TYPES[dtype]}{{}}, {block_bytes})"
                block_bytes += heads.num_heads * kv.head_block_bytes(dtype)
    return pools


class _Emission:
    """Turns calls into C++ statements."""

    def __init__(self, plan: StepPlan, arena: ArenaPlan, limits: Limits) -> None:
        self.plan = plan
        self.limits = limits
        self.arena = arena
        self.weights = weight_offsets(plan)
        self.pools = _pools(plan.kv)

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
                cpp_type = "uint8_t" if argument.grid else CPP_TYPES[argument.dtype]
                where = "shared_weight" if argument.name in self.plan.shared else "weight"
                return f"{where}({cpp_type}{{}}, {self.weights[argument.name]})"
            case WeightFrom():
                return f"{self.argument(argument.weight)} + {argument.item}"
            case Pool():
                return self.pools[argument]
            case OwnRows():
                first, count = self.argument(argument.first), self.argument(argument.count)
                return f"OwnRows{{{first}, {count}}}"
            case StepInput():
                return f"step.{argument.name}"
            case Batch():
                return "step"
            case Ranks():
                return "*run.engine.ranks"
            case FirstToken():
                return "run.engine.first_token"
            case Count():
                return self.count(argument)
            case Expression():
                value = self.expression(argument, argument.width)
                return f"[&](int64_t r, int i) {{ return {value}; }}"
            case float():
                return f"{argument!r}f"
            case int():
                return str(argument)

    def count(self, count: Count) -> str:
        longest = count.rows is Rows.LONGEST
        rows = str(self.limits.max_sequence_length) if longest else count.rows.value
        return rows if count.rows_each == 1 else f"{rows} * {count.rows_each}"

    def view(self, view: View) -> str:
        if view.buffer == self.plan.logits:
            return "run.logits"
        cpp_type = _CPP_ITEMS[view.buffer.dtype]
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
