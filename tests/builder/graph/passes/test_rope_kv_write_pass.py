"""rope_kv_write takes in the nodes of one layer's attention that nobody else reads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import pytest

from llmbuild.builder.graph.passes.rope_kv_write import place_rope_kv_write
from llmbuild.builder.graph.step_graph import StepGraph

Kinds = Callable[[StepGraph], list[str]]
HEAD_DIM = 4
Q, K = ("T", 3 * HEAD_DIM), ("T", HEAD_DIM)


@dataclass
class Attention:
    """One layer's nodes from the projections to attention, as the export writes them."""

    sketch: Any
    q_eps: float | None = None
    k_eps: float | None = None
    norm_width: int = HEAD_DIM
    same_table: bool = True
    rotate_q: bool = True
    rotate_k: bool = True

    def __post_init__(self) -> None:
        sketch = self.sketch
        self.q, self.k, self.v = (sketch.input(n, s) for n, s in (("q", Q), ("k", K), ("v", K)))
        self.tables = [sketch.input(name, ("T", HEAD_DIM)) for name in ("table", "other_table")]
        self.where = [sketch.input(n, ("?",), "int32") for n in ("at", "starts", "blocks")]
        self.q_weight, self.k_weight = (sketch.weight(n, (self.norm_width,)) for n in "ab")
        self.q_normed = self._norm(self.q, self.q_weight, Q, self.q_eps)
        self.k_normed = self._norm(self.k, self.k_weight, K, self.k_eps)
        self.q_turned, self.k_turned = self.q_normed, self.k_normed
        if self.rotate_q:
            self.q_turned = self._turn(self.q_normed, self.tables[0], Q)
        if self.rotate_k:
            k_table = self.tables[0 if self.same_table else 1]
            self.k_turned = self._turn(self.k_normed, k_table, K)
        self.written = sketch.node(
            "kv_write",
            [self.k_turned, self.v, *self.where],
            (1,),
            dtype="int32",
            attributes={"layer": 3},
        )
        self.heads = sketch.node(
            "paged_attention",
            [self.q_turned, self.written, *self.where],
            Q,
            attributes={"layer": 3, "scale": 0.5, "window": 0},
        )

    def _turn(self, x: ir.Value, table: ir.Value, shape: tuple[Any, ...]) -> ir.Value:
        attributes = {"head_dim": HEAD_DIM}
        return self.sketch.node("rotary", [x, table], shape, attributes=attributes)

    def _norm(
        self, x: ir.Value, weight: ir.Value, shape: tuple[Any, ...], eps: float | None
    ) -> ir.Value:
        if eps is None:
            return x
        return self.sketch.node("rms_norm", [x, weight], shape, attributes={"eps": eps})

    def step(self, *more: ir.Value) -> StepGraph:
        return self.sketch.step(self.heads, *more)


def fused(step: StepGraph) -> ir.Node:
    (node,) = (node for node in step.graph if node.op_type == "rope_kv_write")
    return node


def test_rotaries_and_write_become_one_node(sketch: Any, kinds: Kinds) -> None:
    layer = Attention(sketch)
    step = layer.step()
    place_rope_kv_write(step)
    assert kinds(step) == ["rope_kv_write", "paged_attention"]
    node = fused(step)
    inputs = (layer.q, layer.k, layer.v, layer.tables[0], None, None, *layer.where)
    assert node.inputs == inputs
    assert node.attributes["layer"].as_int() == 3
    assert step.graph[1].inputs[:2] == node.outputs


def test_head_norms_of_one_eps_are_taken_in(sketch: Any, kinds: Kinds) -> None:
    layer = Attention(sketch, q_eps=0.25, k_eps=0.25)
    step = layer.step()
    place_rope_kv_write(step)
    assert kinds(step) == ["rope_kv_write", "paged_attention"]
    node = fused(step)
    assert node.inputs[:6] == (
        *(layer.q, layer.k, layer.v, layer.tables[0]),
        *(layer.q_weight, layer.k_weight),
    )
    assert node.attributes["eps"].as_float() == 0.25


@pytest.mark.parametrize(
    "norms",
    [
        {"q_eps": 0.25, "k_eps": 0.5},
        {"q_eps": 0.25},
        {"k_eps": 0.25},
        {"q_eps": 0.25, "k_eps": 0.25, "norm_width": 2 * HEAD_DIM},
        {"q_eps": 0.25, "k_eps": 0.25, "norm_width": HEAD_DIM // 2},
    ],
    ids=[
        *("two values of eps", "of Q alone", "of K alone"),
        *("over more than a head", "over less than a head"),
    ],
)
def test_norms_that_the_node_has_no_room_for_stay_before_it(
    sketch: Any, kinds: Kinds, norms: dict[str, Any]
) -> None:
    layer = Attention(sketch, **norms)
    step = layer.step()
    count = kinds(step).count("rms_norm")
    place_rope_kv_write(step)
    assert kinds(step) == ["rms_norm"] * count + ["rope_kv_write", "paged_attention"]
    assert fused(step).inputs[:6] == (
        *(layer.q_normed, layer.k_normed, layer.v, layer.tables[0]),
        *(None, None),
    )


def test_norm_that_another_node_reads_stays(sketch: Any, kinds: Kinds) -> None:
    layer = Attention(sketch, q_eps=0.25, k_eps=0.25)
    step = layer.step(sketch.node("Sigmoid", [layer.k_normed], K))
    place_rope_kv_write(step)
    assert kinds(step).count("rms_norm") == 2
    assert fused(step).inputs[:2] == (layer.q_normed, layer.k_normed)


@pytest.mark.parametrize("which", ["q_turned", "k_turned"])
def test_rotary_that_another_node_reads_keeps_the_nodes_apart(
    sketch: Any, kinds: Kinds, which: str
) -> None:
    layer = Attention(sketch)
    step = layer.step(sketch.node("Sigmoid", [getattr(layer, which)], Q))
    before = kinds(step)
    place_rope_kv_write(step)
    assert kinds(step) == before


@pytest.mark.parametrize("layer", [{"same_table": False}, {"rotate_q": False}, {"rotate_k": False}])
def test_q_and_k_that_arent_turned_alike_keep_the_nodes_apart(
    sketch: Any, kinds: Kinds, layer: dict[str, bool]
) -> None:
    step = Attention(sketch, **layer).step()
    before = kinds(step)
    place_rope_kv_write(step)
    assert kinds(step) == before


@pytest.mark.parametrize("eps", [None, 0.25], ids=["bare", "normed"])
def test_without_rotary_attention_reads_q_through_the_write_and_waits_for_it(
    sketch: Any, kinds: Kinds, eps: float | None
) -> None:
    layer = Attention(sketch, q_eps=eps, k_eps=eps, rotate_q=False, rotate_k=False)
    step = layer.step()
    norms = ["rms_norm"] * kinds(step).count("rms_norm")
    place_rope_kv_write(step)
    assert kinds(step) == [*norms, "rope_kv_write", "paged_attention"]
    node = fused(step)
    nothing = (None, None, None)  # no table, no norms
    assert node.inputs == (layer.q_normed, layer.k_normed, layer.v, *nothing, *layer.where)
    assert node.attributes["layer"].as_int() == 3
    attention = step.graph[-1]
    assert attention.inputs[:2] == node.outputs
    assert node.outputs[0].name != layer.q_normed.name
    assert (node.outputs[0].shape, node.outputs[0].dtype) == (ir.Shape(Q), layer.q.dtype)


def test_without_rotary_other_readers_of_q_go_on_reading_it(sketch: Any, kinds: Kinds) -> None:
    layer = Attention(sketch, rotate_q=False, rotate_k=False)
    other = sketch.node("Sigmoid", [layer.q], Q)
    step = layer.step(other)
    place_rope_kv_write(step)
    assert sorted(kinds(step)) == ["Sigmoid", "paged_attention", "rope_kv_write"]
    assert other.producer().inputs == (layer.q,)


def test_write_that_two_attentions_wait_for_stays(sketch: Any, kinds: Kinds) -> None:
    layer = Attention(sketch)
    second = sketch.node(
        "paged_attention",
        [layer.q_turned, layer.written, *layer.where],
        Q,
        attributes={"layer": 3, "scale": 0.5, "window": 0},
    )
    step = layer.step(second)
    before = kinds(step)
    place_rope_kv_write(step)
    assert kinds(step) == before
