"""Scales that move from a linear's inputs into what makes them change no result."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llmbuild.builder.calibration.folding import input_scale_of
from llmbuild.builder.graph.passes.rewrite import nodes_of, users
from llmbuild.builder.graph.reference import run_steps
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig, MoeConfig
from llmbuild.plugins.common.kv_pools import LayerPools
from llmbuild.runtime.batch import StepBatch

Tensors = dict[str, NDArray[np.generic]]


def folded(step: StepGraph, tensors: Tensors, head_dim: int) -> set[str]:
    """Every scale that can move is moved by random factors, in place; names of the linears."""
    rng = np.random.default_rng(0)
    moved: set[str] = set()
    for linear in nodes_of(step.graph, "linear"):
        source = linear.inputs[0]
        assert source is not None
        scale = input_scale_of(step, source, head_dim)
        readers = [str(node.inputs[1].name) for node in users(source)]  # type: ignore[union-attr]
        if scale is None or moved & {*readers}:
            continue
        assert source.shape is not None
        wanted = torch.tensor(rng.uniform(0.1, 9, source.shape[1]), dtype=torch.float32)
        stretch = scale.tied(wanted)
        for name in readers:
            tensors[name] = tensors[name] * stretch.numpy()
        for name in scale.tensors:
            rows = scale.of_rows(stretch).numpy()
            tensors[name] = tensors[name] / rows.reshape(-1, *[1] * (tensors[name].ndim - 1))
        moved |= {*readers}
    return moved


def test_moving_every_scale_that_can_move_leaves_the_logits(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    random_tensors: Callable[[StepGraph], Tensors],
    empty_pools: Callable[..., list[LayerPools]],
    batches: list[StepBatch],
    plain_variant: dict[str, Any],
) -> None:
    config = {key: value for key, value in plain_variant.items() if key != "precision"}
    step = traced(**config)
    tensors = random_tensors(step)
    want = run_steps(step, tensors.__getitem__, batches, empty_pools(**config))
    changed = dict(tensors)
    assert folded(step, changed, decoder_config(**config).head_dim)
    got = run_steps(step, changed.__getitem__, batches, empty_pools(**config))
    for before, after in zip(want, got, strict=True):
        assert np.abs(after - before).max() < 1e-4 * np.abs(before).max()


def test_all_linears_of_a_plain_layer_can_be_rescaled(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    random_tensors: Callable[[StepGraph], Tensors],
) -> None:
    step = traced()
    moved = folded(step, random_tensors(step), decoder_config().head_dim)
    in_first_layer = {
        name for name in step.weights if name.startswith("layers.0.") and "proj" in name
    }
    assert in_first_layer <= moved
    assert "lm_head.weight" in moved


def test_what_others_read_as_well_is_left_alone(
    traced: Callable[..., StepGraph], decoder_config: Callable[..., DecoderConfig]
) -> None:
    """A mixture's experts read what its router reads; a tied head's rows are the embedding's."""
    mixture = {"moe": MoeConfig(5, 2, 7, normalise=True), "moe_layers": (True, False)}
    for config, name in ((mixture, "router"), ({"tie_embeddings": True}, "embed")):
        step, head_dim = traced(**config), decoder_config(**config).head_dim
        linears = nodes_of(step.graph, "linear")
        linear = next(node for node in linears if name in str(node.inputs[1]))
        assert linear.inputs[0] is not None
        assert input_scale_of(step, linear.inputs[0], head_dim) is None
