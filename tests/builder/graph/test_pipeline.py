"""The passes in their order: no logit changes, every fusion is placed, the contract holds."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from llmbuild.builder.graph import pipeline
from llmbuild.builder.graph.passes.verify import verify
from llmbuild.builder.graph.pipeline import passes, run_passes
from llmbuild.builder.graph.reference import run_steps
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.errors import InternalError
from llmbuild.plugins.common.kv_pools import LayerPools
from llmbuild.quant.plan import QuantPlan
from llmbuild.runtime.batch import StepBatch

# Passes that call the same torch functions on the same numbers. One matrix product for several
# rounds differently.
EXACT = {*passes(QuantPlan(), {})} - {"merge_linears"}
TOLERANCE = 1e-5  # of the largest logit: fp32's rounding through two layers


def kinds(step: StepGraph) -> Counter[str]:
    return Counter(node.op_type for node in step.graph)


def test_no_pass_changes_a_logit_or_what_is_in_the_pools(
    traced: Callable[..., StepGraph],
    random_tensors: Callable[[StepGraph], dict[str, NDArray[np.generic]]],
    empty_pools: Callable[..., list[LayerPools]],
    batches: list[StepBatch],
    variant: dict[str, Any],
) -> None:
    step = traced(**variant)
    read = random_tensors(step).__getitem__
    tolerance = 1e-2 if variant.get("precision") == "bf16" else TOLERANCE  # bf16 rounds keys
    pools = empty_pools(**variant)
    before = run_steps(step, read, batches, pools)
    assert np.isfinite(np.concatenate(before)).all()
    for name, run in passes(QuantPlan(), {}).items():
        run(step)
        step.graph.sort()
        pools_after = empty_pools(**variant)
        after = run_steps(step, read, batches, pools_after)
        for one, other in zip(before, after, strict=True):
            if name in EXACT:
                np.testing.assert_array_equal(one, other, name)
            else:
                assert np.abs(one - other).max() <= tolerance * np.abs(one).max(), name
        for one, other in zip(pools, pools_after, strict=True):
            for k_or_v in ("k", "v"):
                np.testing.assert_allclose(
                    getattr(one, k_or_v).float().numpy(),
                    getattr(other, k_or_v).float().numpy(),
                    *(0, 0) if name in EXACT else (tolerance, tolerance),
                    err_msg=name,
                )
        before, pools = after, pools_after


def test_every_fusion_is_placed_once_for_each_place_it_has(
    lowerable: Callable[..., StepGraph], plain_variant: dict[str, Any]
) -> None:
    layers = plain_variant.get("num_layers", 2)
    assert kinds(lowerable(**plain_variant)) == {
        "rope_table": 1,
        "gather_rows": 3,  # the embedding; attention's and the residual's rows that need logits
        "rms_norm": 1,  # before the first layer; every other follows an add
        "add_rms_norm": 2 * layers,
        "rope_kv_write": layers,
        "paged_attention": layers,
        "linear": 4 * layers + 1,  # QKV, o, gate and up, down; the head
        "gated_activation": layers,
        "Split": 2 * layers,
        "Constant": 2 * layers,  # the splits' sizes
    }


def test_of_two_norms_of_one_residual_the_first_is_fused_with_its_add(
    lowerable: Callable[..., StepGraph],
) -> None:
    """Attention and MLP in parallel, each with its own norm; x + attention + MLP is two adds."""
    found = kinds(lowerable(parallel_residual=True))
    assert (found["add_rms_norm"], found["rms_norm"], found["Add"]) == (2, 3, 2)


def test_linears_of_one_shared_norm_are_merged_across_attention_and_mlp(
    lowerable: Callable[..., StepGraph],
) -> None:
    """But not in the last layer, whose MLP reads fewer rows."""
    step = lowerable(parallel_residual=True, shared_norm=True)
    merged = {weight.sources for weight in step.weights.values()}

    def weights(layer: int, *names: str) -> tuple[str, ...]:
        return tuple(f"layers.{layer}.{name}_proj.weight" for name in names)

    qkv, gate_up = [f"attention.{name}" for name in "qkv"], ["mlp.gate", "mlp.up"]
    assert {weights(0, *qkv, *gate_up), weights(1, *qkv), weights(1, *gate_up)} <= merged


# What a layer's attention needs of every token; all else is for the wanted rows alone in the last.
FOR_ATTENTION = {"attn_norm", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "sinks"}


def test_the_last_layer_computes_only_the_rows_that_need_logits(
    lowerable: Callable[..., StepGraph], variant: dict[str, Any]
) -> None:
    step, last = lowerable(**variant), variant.get("num_layers", 2) - 1
    found = Counter[str]()
    for node in step.graph:
        names = [str(value.name) for value in node.inputs if value is not None]
        sources = [source for n in names if n in step.weights for source in step.weights[n].sources]
        if not sources or node.op_type == "gather_rows":
            continue
        in_layer = sources[0].startswith("layers.")
        of_all = in_layer and (
            not sources[0].startswith(f"layers.{last}.")
            or not FOR_ATTENTION.isdisjoint(sources[0].split("."))
        )
        shapes = [value.shape for value in node.outputs if value.shape is not None]
        rows = {str(shape[0]).removeprefix("2 * ") for shape in shapes}  # experts of a token
        assert rows - {"1"} == {"T" if of_all else "R"}, sources
        found["T" if of_all else "R"] += 1
    assert found["R"] >= 5  # o, gate and up, down, two norms or one, the head
    assert found["T"] >= 2 * last + 2


def test_post_norms_and_multipliers_stand_between_an_add_and_its_norm(
    lowerable: Callable[..., StepGraph],
) -> None:
    """The residual's add is fused with the norm after it, whatever made what it adds."""
    found = kinds(lowerable(post_norm=True, residual_scale=0.5))
    # A post-norm after attention and MLP of each layer, and the first layer's norm.
    assert (found["add_rms_norm"], found["rms_norm"], found["Mul"]) == (4, 5, 4)


def test_every_layer_writes_through_one_node_whether_it_turns_or_not(
    lowerable: Callable[..., StepGraph], variant: dict[str, Any]
) -> None:
    found = kinds(lowerable(**variant))
    assert found["rope_kv_write"] == found["paged_attention"] == variant.get("num_layers", 2)
    assert found["kv_write"] == found["rotary"] == 0


def test_layers_weights_are_merged_in_the_order_that_their_split_undoes(
    lowerable: Callable[..., StepGraph],
) -> None:
    step = lowerable(qkv_bias=True, num_layers=1, windows=(0,))
    merged = {weight.sources: weight.shape for weight in step.weights.values()}
    qkv = [f"layers.0.attention.{name}_proj" for name in "qkv"]
    gate_up = [f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    assert merged[tuple(f"{name}.weight" for name in qkv)] == (24 + 8 + 8, 20)
    assert merged[tuple(f"{name}.bias" for name in qkv)] == (24 + 8 + 8,)
    assert merged[tuple(gate_up)] == (19 + 19, 20)
    splits = [node for node in step.graph if node.op_type == "Split"]
    sizes = [list(n.inputs[1].producer().attributes["value_ints"].as_ints()) for n in splits]
    assert sizes == [[24, 8, 8], [19, 19]]


def test_the_graph_after_each_pass_can_be_dumped(
    traced: Callable[..., StepGraph], tmp_path: Path
) -> None:
    run_passes(traced(), dump_dir=tmp_path / "graphs")
    kinds_by_file = {
        file.name: {node.op_type for node in onnx.load(file).graph.node}
        for file in sorted((tmp_path / "graphs").iterdir())
    }
    placed = {
        "00-fold.onnx": "linear",
        "01-place_gather_rows.onnx": "gather_rows",
        "02-place_gated_activation.onnx": "gated_activation",
        "03-place_rope_kv_write.onnx": "rope_kv_write",
        "05-place_add_rms_norm.onnx": "add_rms_norm",
        "07-merge_linears.onnx": "Split",
    }
    # Of a graph without a plan these two change nothing.
    assert (
        kinds_by_file.pop("04-place_kv_scales.onnx") == kinds_by_file["03-place_rope_kv_write.onnx"]
    )
    assert kinds_by_file.pop("06-quantise.onnx") == kinds_by_file["05-place_add_rms_norm.onnx"]
    assert list(kinds_by_file) == list(placed)
    for name, placed_kind in placed.items():
        since = [file for file, kinds_of in kinds_by_file.items() if placed_kind in kinds_of]
        assert since == [file for file in placed if file >= name]


def test_a_pass_that_breaks_the_contract_stops_the_build(
    traced: Callable[..., StepGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(step: StepGraph) -> None:
        del step.weights["embed.weight"]

    def never(step: StepGraph) -> None:
        raise AssertionError("a pass ran on a broken graph")

    monkeypatch.setattr(
        pipeline, "passes", lambda plan, kv_scales: {"breaks": breaks, "never": never}
    )
    with pytest.raises(InternalError, match="lost their records"):
        run_passes(traced())


def test_a_traced_graph_holds_to_the_contract_already(
    traced: Callable[..., StepGraph], variant: dict[str, Any]
) -> None:
    verify(traced(**variant))
