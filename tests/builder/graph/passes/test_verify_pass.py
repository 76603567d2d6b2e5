"""The graph's contract, breached one way at a time: each is caught and named."""

from collections.abc import Callable

import onnx_ir as ir
import pytest

from llmbuild.builder.graph.passes.rewrite import nodes_of
from llmbuild.builder.graph.passes.verify import verify
from llmbuild.builder.graph.step_graph import StepGraph, Weight
from llmbuild.errors import InternalError
from llmbuild.plugins.registry import DOMAIN


def first(step: StepGraph, kind: str, domain: str = DOMAIN) -> ir.Node:
    return nodes_of(step.graph, kind, domain)[0]


def attribute(node: ir.Node, name: str, value: int) -> None:
    node.attributes[name] = ir.AttrInt64(name, value)


def layer_written_twice(step: StepGraph) -> None:
    attribute(nodes_of(step.graph, "rope_kv_write")[1], "layer", 0)


def layer_skipped(step: StepGraph) -> None:
    for kind in ("rope_kv_write", "paged_attention"):
        attribute(nodes_of(step.graph, kind)[1], "layer", 2)


def write_missing(step: StepGraph) -> None:
    first(step, "paged_attention").replace_input_with(1, step.graph.inputs[1])


def no_write_at_all(step: StepGraph) -> None:
    first(step, "paged_attention").replace_input_with(1, None)


def waits_for_another_layers_write(step: StepGraph) -> None:
    one, other = nodes_of(step.graph, "paged_attention")
    other.replace_input_with(1, one.inputs[1])


def read_before_made(step: StepGraph) -> None:
    node = first(step, "rms_norm")
    step.graph.remove(node)
    step.graph.append(node)


def value_of_no_graph(step: StepGraph) -> None:
    first(step, "rms_norm").replace_input_with(0, ir.Value(name="stray"))


def unknown_op(step: StepGraph) -> None:
    first(step, "rms_norm").op_type = "group_norm"


def output_renamed(step: StepGraph) -> None:
    step.graph.outputs[0].name = "scores"


def output_added(step: StepGraph) -> None:
    step.graph.outputs.append(first(step, "rms_norm").outputs[0])


def inputs_reordered(step: StepGraph) -> None:
    step.graph.inputs.append(step.graph.inputs.pop(0))


def record_lost(step: StepGraph) -> None:
    del step.weights["embed.weight"]


def record_without_a_weight(step: StepGraph) -> None:
    step.weights["stray"] = Weight(("stray",), (1,), "fp32")


BREACHES: dict[Callable[[StepGraph], None], str] = {
    layer_written_twice: r"layers written: \[0, 0\]",
    layer_skipped: r"layers written: \[0, 2\]",
    write_missing: "attention of layer 0 doesn't wait",
    no_write_at_all: "attention of layer 0 doesn't wait",
    waits_for_another_layers_write: "attention of layer 1 doesn't wait",
    read_before_made: "reads before it is made",
    value_of_no_graph: "node_rms_norm: reads before it is made",
    unknown_op: "group_norm: no such plugin",
    output_renamed: "its output changed",
    output_added: "its output changed",
    inputs_reordered: "its inputs changed",
    record_lost: "its weights lost their records",
    record_without_a_weight: "its weights lost their records",
}


@pytest.mark.parametrize(("breach", "named"), BREACHES.items())
def test_breach_is_caught_and_named(
    lowerable: Callable[..., StepGraph], breach: Callable[[StepGraph], None], named: str
) -> None:
    step = lowerable()
    verify(step)
    breach(step)
    with pytest.raises(InternalError, match=named):
        verify(step)


def test_write_of_a_graph_before_fusion_is_held_to_the_same(
    traced: Callable[..., StepGraph],
) -> None:
    step = traced()
    attribute(nodes_of(step.graph, "kv_write")[1], "layer", 0)
    with pytest.raises(InternalError, match=r"layers written: \[0, 0\]"):
        verify(step)
