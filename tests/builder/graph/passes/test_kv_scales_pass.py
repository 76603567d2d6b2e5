"""place_kv_scales gives a layer's write and its attention the same constants."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from llmbuild.builder.graph.passes.kv_scales import place_kv_scales
from llmbuild.builder.graph.passes.rewrite import nodes_of
from llmbuild.builder.graph.passes.verify import verify
from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.reference import run_steps
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.plugins.common.kv_pools import LayerPools
from llmbuild.runtime.batch import StepBatch

WIDTH = 8  # two KV heads of 4


def scales_of(*names: str) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(len(names))
    return {name: rng.uniform(0.1, 3, WIDTH).astype(np.float32) for name in names}


def names_at(step: StepGraph, kind: str, slots: slice) -> list[list[str | None]]:
    """The names of these inputs of every node of a kind, in order of layers."""
    nodes = sorted(nodes_of(step.graph, kind), key=lambda node: node.attributes["layer"].as_int())
    return [[None if v is None else v.name for v in node.inputs[slots]] for node in nodes]


@pytest.mark.parametrize("sinks", [False, True])
def test_layers_read_their_scales_after_all_else(
    lowerable: Callable[..., StepGraph], tmp_path: Path, sinks: bool
) -> None:
    step = lowerable(attention_sinks=sinks)
    scales = scales_of("layers.0.v_scale", "layers.1.k_scale", "layers.1.v_scale")
    place_kv_scales(step, scales)
    expected = [[None, "layers.0.v_scale"], ["layers.1.k_scale", "layers.1.v_scale"]]
    assert names_at(step, "rope_kv_write", slice(9, None)) == expected
    assert names_at(step, "paged_attention", slice(7, None)) == expected
    sink_names = [f"layers.{layer}.attention.sinks" if sinks else None for layer in range(2)]
    assert names_at(step, "paged_attention", slice(6, 7)) == [[name] for name in sink_names]
    for name, values in scales.items():
        np.testing.assert_array_equal(step.constants[name], values)
    verify(step)
    step.save(tmp_path / "step.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "step.onnx"))


def test_a_write_that_no_pass_has_fused_reads_them_too(traced: Callable[..., StepGraph]) -> None:
    step = traced()
    place_kv_scales(step, scales_of("layers.1.k_scale"))
    assert names_at(step, "kv_write", slice(5, None)) == [[], ["layers.1.k_scale"]]


def test_a_scale_of_no_layer_is_a_fault(lowerable: Callable[..., StepGraph]) -> None:
    with pytest.raises(AssertionError, match=r"layers\.2\.k_scale"):
        place_kv_scales(lowerable(), scales_of("layers.2.k_scale"))


@pytest.mark.parametrize("fused", [False, True])
def test_over_numbers_scales_change_nothing_but_the_pools(
    traced: Callable[..., StepGraph],
    random_tensors: Callable[[StepGraph], dict[str, NDArray[np.generic]]],
    empty_pools: Callable[..., list[LayerPools]],
    batches: list[StepBatch],
    fused: bool,
) -> None:
    """K and V are divided before they are kept, and attention multiplies again."""

    def run(scales: dict[str, NDArray[np.float32]]) -> tuple[list[Any], list[LayerPools]]:
        step, pools = traced(), empty_pools()
        read = random_tensors(step).__getitem__
        if fused:
            run_passes(step)
        place_kv_scales(step, scales)
        step.graph.sort()
        return run_steps(step, read, batches, pools), pools

    scales = scales_of("layers.0.k_scale", "layers.0.v_scale", "layers.1.k_scale")
    (plain, pools), (scaled, scaled_pools) = run({}), run(scales)
    for one, other in zip(plain, scaled, strict=True):
        assert np.abs(one - other).max() <= 1e-5 * np.abs(one).max()
    factors = scales["layers.0.k_scale"].reshape(2, 1, 4)
    written = ~pools[0].k.isnan().numpy()
    whole = pools[0].k.numpy()
    np.testing.assert_allclose(
        (scaled_pools[0].k.numpy() * factors)[written], whole[written], rtol=1e-6
    )
