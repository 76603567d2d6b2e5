"""A target's operations, each lowered by a function of its own, found by name."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import onnx_ir as ir

from llmbuild.builder.targets.tensorrt import collectives, elementwise, linears, tables
from llmbuild.builder.targets.tensorrt.lowering import Lowering
from llmbuild.errors import BuildError
from llmbuild.plugins.registry import DOMAIN

L = TypeVar("L", bound=Lowering)

Operations = Mapping[tuple[str, str], Callable[[L, ir.Node], None]]  # by domain and name

# What plain layers do for both targets.
COMMON: Operations[Lowering] = {
    ("", "Constant"): elementwise.constant,
    ("", "Split"): elementwise.split,
    **{("", name): elementwise.arithmetic for name in elementwise.ARITHMETIC},
    **{("", name): elementwise.function for name in elementwise.FUNCTIONS},
    (DOMAIN, "activation"): elementwise.activation,
    (DOMAIN, "linear"): linears.linear,
    (DOMAIN, "gather_rows"): tables.gather_rows,
    (DOMAIN, "all_reduce"): collectives.all_reduce,
}


def lower_nodes(lowering: L, operations: Operations[L]) -> None:
    """Every node of the step graph, in order. Raises BuildError, naming the node, for what the
    target can't express."""
    for node in lowering.step.graph:
        lower_node = operations.get((node.domain, node.op_type))
        if lower_node is None:
            raise BuildError(
                f"the {lowering.target} target has no implementation of "
                f"{node.domain or 'ai.onnx'}::{node.op_type}, which makes "
                f"{node.outputs[0].name!r}; it implements "
                f"{', '.join(sorted(name for _, name in operations))}; choose target cpu"
            )
        lowering.begin(node)
        lower_node(lowering, node)
