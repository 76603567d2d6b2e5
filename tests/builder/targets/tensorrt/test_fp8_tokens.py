"""A small Llama in FP8: TensorRT for RTX builds its plan, and the network that the plan is built
of, run on the CPU, gives the reference's greedy tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from network_models import GRID_SIZES, Model
from numpy.typing import NDArray

from llmbuild.builder.graph.passes.rewrite import nodes_of
from llmbuild.builder.graph.reference import run_steps
from llmbuild.builder.targets.tensorrt.build import build_plan
from llmbuild.builder.targets.tensorrt.emulation.emulate import emulate
from llmbuild.builder.targets.tensorrt.limits import Limits, cache_name
from llmbuild.errors import BuildError
from llmbuild.plugins.common.kv_pools import LayerPools
from llmbuild.runtime.batch import StepBatch

LIMITS = Limits(batch=1, chunk=8, capacity=16)
PROMPT, COUNT = [3, 5, 0, 34, 11], 8
# Of the last of some tokens, which begin at a position.
Logits = Callable[[Sequence[int], int], NDArray[np.float32]]


def greedy(logits: Logits) -> tuple[list[int], list[NDArray[np.float32]]]:
    made: list[int] = []
    seen: list[NDArray[np.float32]] = []
    new, begin = PROMPT, 0
    while len(made) < COUNT:
        seen.append(logits(new, begin))
        made.append(int(seen[-1].argmax()))
        new, begin = made[-1:], begin + len(new)
    return made, seen


def of_network(model: Model) -> Logits:
    config = model.config
    network = emulate(model.step, config, LIMITS, "fp16", model.read)
    shape = (1, config.num_kv_heads, LIMITS.capacity, config.head_dim)
    names = [cache_name(layer, kind) for layer in range(config.num_layers) for kind in "kv"]
    caches: dict[str, NDArray[Any]] = {name: np.zeros(shape, np.float16) for name in names}

    def logits(tokens: Sequence[int], begin: int) -> NDArray[np.float32]:
        end = begin + len(tokens)
        numbers = {
            "token_ids": [tokens],
            "positions": [range(begin, end)],
            "kv_lengths": [end],
            "write_indices": [begin],
            "logit_rows": [len(tokens) - 1],
        }
        feeds = {name: np.array(each, np.int32) for name, each in numbers.items()}
        results = network.run(caches | feeds)
        caches.update({name: results[f"{name}.updated"] for name in names})
        return np.asarray(results["logits"][0], np.float32)

    return logits


def of_reference(model: Model) -> Logits:
    config = model.config
    heads = config.num_kv_heads
    shape = (2, heads, LIMITS.capacity, config.head_dim)
    pools = [
        LayerPools.filled(shape, ["fp32"] * heads, ["fp32"] * heads)
        for _ in range(config.num_layers)
    ]

    def logits(tokens: Sequence[int], begin: int) -> NDArray[np.float32]:
        end = begin + len(tokens)
        batch = StepBatch(
            token_ids=np.array(tokens, np.int32),
            positions=np.arange(begin, end, dtype=np.int32),
            query_start=np.array([0, len(tokens)], np.int32),
            kv_lengths=np.array([end], np.int32),
            block_tables=np.array([[1]], np.int32),
            logit_rows=np.array([len(tokens) - 1], np.int32),
        )
        (rows,) = run_steps(model.step, model.read, [batch], pools)
        return rows[0]

    return logits


def test_greedy_tokens_are_the_references(model_of: Callable[..., Model]) -> None:
    """After a prompt after which the likeliest token always leads by more than the two differ: what
    fp16 changes by 2^-11 moves some activations to the next number of FP8, by 2^-4."""
    model = model_of("fp8_w8a8", **GRID_SIZES, residual_scale=0.1)
    expected, wanted = greedy(of_reference(model))
    made, got = greedy(of_network(model))
    assert made == expected
    assert len({*made}) > 4
    error = max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(got, wanted, strict=True))
    margin = min(np.diff(np.sort(row)[-2:]).item() / np.abs(row).max() for row in wanted)
    assert error < margin


@pytest.mark.parametrize("activations", ["fp16", "bf16"])
def test_its_plan_multiplies_fp8(model_of: Callable[..., Model], activations: Any) -> None:
    """For GPUs that have it; each linear's weights stand in the plan as the bytes that they are."""
    pytest.importorskip("tensorrt_rtx")
    model = model_of("fp8_w8a8", **GRID_SIZES)
    arguments = (model.step, model.config, LIMITS, activations, model.read, ("8.9", "12.0"))
    content = build_plan(*arguments).content
    assert content[:4] == b"vtrt"
    nodes = nodes_of(model.step.graph, "quantised_linear")
    assert nodes
    for node in nodes:
        assert f'name="{node.outputs[0].name}.matrix_multiply'.encode() in content
    assert b"type=fp8_e4m3" in content


def test_a_gpu_without_fp8_builds_no_plan(model_of: Callable[..., Model]) -> None:
    """TensorRT says so itself, of a recipe that should never have come so far."""
    pytest.importorskip("tensorrt_rtx")
    model = model_of("fp8_w8a8", **GRID_SIZES)
    arguments = (model.step, model.config, LIMITS, "fp16", model.read, ("8.6",))
    with pytest.raises(BuildError, match="fp8_e4m3"):
        build_plan(*arguments)  # type: ignore[arg-type]
