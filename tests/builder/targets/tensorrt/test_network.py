"""Networks, run by the emulation of TensorRT's API, against the step graph in torch."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from network_models import FAMILIES, GRID_SIZES, SCHEMES, STATIC_SCALES, Model
from numpy.typing import NDArray

from llmbuild.builder.graph.materialise import as_torch, materialise_matrix, parts_of
from llmbuild.builder.graph.passes.rewrite import nodes_of
from llmbuild.builder.graph.reference import run_steps
from llmbuild.builder.models.config import RopeConfig
from llmbuild.builder.targets.tensorrt.emulation.emulate import Emulated, emulate
from llmbuild.builder.targets.tensorrt.emulation.module import DataType, EmulatedTensorRT
from llmbuild.builder.targets.tensorrt.emulation.network import EmulatedNetwork
from llmbuild.builder.targets.tensorrt.emulation.sizes import evaluate
from llmbuild.builder.targets.tensorrt.limits import Limits, cache_name, updated_name
from llmbuild.builder.targets.tensorrt.linears import quantised_linear
from llmbuild.builder.targets.tensorrt.lowering import Lowering
from llmbuild.errors import BuildError
from llmbuild.plugins.common.kv_pools import LayerPools
from llmbuild.plugins.linear.op import quantised_linear as reference_linear
from llmbuild.quant.grid import QuantisedMatrix, WeightGrid
from llmbuild.runtime.batch import StepBatch

LIMITS = Limits(batch=2, chunk=5, capacity=16)
LENGTHS = (5, 3)  # the second sequence has two tokens of padding in the first step
DTYPES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
# Of the largest logit: what a few roundings to 11 and to 8 bits add up to.
TOLERANCES = {"fp16": 0.01, "bf16": 0.06}
TOKENS = np.random.default_rng(3).integers(0, 37, (2, 6)).astype(np.int32)  # the last: decoded

Feeds = dict[str, NDArray[Any]]


def context_feeds(model: Model, dtype: np.dtype[Any]) -> Feeds:
    """Both prompts, the shorter one padded."""
    config = model.config
    shape = (2, config.num_kv_heads, LIMITS.capacity, config.head_dim)
    caches = {
        cache_name(layer, kind): np.full(shape, 9.0).astype(dtype)  # what nothing may read
        for layer in range(config.num_layers)
        for kind in "kv"
    }
    return caches | {
        "token_ids": TOKENS[:, :5],
        "positions": np.tile(np.arange(5, dtype=np.int32), (2, 1)),
        "kv_lengths": np.array([5, 5], np.int32),
        "write_indices": np.zeros(2, np.int32),
        "logit_rows": np.array([4, 5 + 2], np.int32),
    }


def decode_feeds(before: Feeds) -> Feeds:
    """A token more for each. before: the outputs of the step with the prompts."""
    lengths = np.array(LENGTHS, np.int32)
    caches = {
        name.removesuffix(".updated"): values
        for name, values in before.items()
        if name.startswith("cache.")
    }
    return caches | {
        "token_ids": TOKENS[[0, 1], list(LENGTHS)][:, None],
        "positions": lengths[:, None],
        "kv_lengths": lengths + 1,
        "write_indices": lengths,
        "logit_rows": np.array([0, 1], np.int32),
    }


def emulated(model: Model, activations: Any = "fp16") -> Emulated:
    return emulate(model.step, model.config, LIMITS, activations, model.read)


def reference_logits(model: Model) -> list[NDArray[np.float32]]:
    """Of the prompts' last tokens, and of the decoded ones."""
    prompts = StepBatch(
        token_ids=np.concatenate([TOKENS[0, :5], TOKENS[1, :3]]),
        positions=np.concatenate([np.arange(5), np.arange(3)]).astype(np.int32),
        query_start=np.array([0, 5, 8], np.int32),
        kv_lengths=np.array(LENGTHS, np.int32),
        block_tables=np.array([[1], [2]], np.int32),
        logit_rows=np.array([4, 7], np.int32),
    )
    decoded = StepBatch(
        token_ids=TOKENS[[0, 1], list(LENGTHS)],
        positions=np.array(LENGTHS, np.int32),
        query_start=np.array([0, 1, 2], np.int32),
        kv_lengths=np.array(LENGTHS, np.int32) + 1,
        block_tables=np.array([[1], [2]], np.int32),
        logit_rows=np.array([0, 1], np.int32),
    )
    heads = model.config.num_kv_heads
    shape = (3, heads, LIMITS.capacity, model.config.head_dim)
    pools = [
        LayerPools.filled(shape, ["fp32"] * heads, ["fp32"] * heads)
        for _ in range(model.config.num_layers)
    ]
    return run_steps(model.step, model.read, [prompts, decoded], pools)


def assert_same_logits(model: Model, activations: str, tolerance: float | None = None) -> None:
    """One network, run for both steps, whose shapes differ."""
    network = emulated(model, activations)
    context = network.run(context_feeds(model, DTYPES[activations]))
    decode = network.run(decode_feeds(context))
    for results, expected in zip((context, decode), reference_logits(model), strict=True):
        logits = results["logits"]
        assert logits.dtype == np.float32
        assert logits.shape == expected.shape
        error = np.abs(logits - expected).max() / np.abs(expected).max()
        assert error < (tolerance or TOLERANCES[activations])


def matrix_of(model: Model, node: ir.Node) -> QuantisedMatrix:
    assert node.inputs[1] is not None
    return materialise_matrix(model.step.weights[str(node.inputs[1].name)], model.read)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_prompts_and_of_decoded_tokens_are_the_step_graphs(
    model_of: Callable[..., Model], family: str
) -> None:
    assert_same_logits(model_of(**FAMILIES[family]), "fp16")


def test_bf16_activations_give_the_step_graphs_logits(model_of: Callable[..., Model]) -> None:
    assert_same_logits(model_of(**FAMILIES["qwen3"]), "bf16")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_weights_give_the_step_graphs_logits(
    model_of: Callable[..., Model], scheme: str, tied: bool
) -> None:
    model = model_of(scheme, **GRID_SIZES, tie_embeddings=tied)
    # Where activations are rounded to codes, what fp16 has changed moves some to the next one.
    assert_same_logits(model, "fp16", tolerance=0.2 if scheme in STATIC_SCALES else None)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_linear_is_the_step_graphs(model_of: Callable[..., Model], scheme: str) -> None:
    model = model_of(scheme, **GRID_SIZES)
    node = nodes_of(model.step.graph, "quantised_linear")[1]
    codes, scales = map(as_torch, parts_of(matrix_of(model, node)).values())
    x = np.random.default_rng(1).standard_normal((7, codes.shape[1])).astype(np.float16)
    network = EmulatedNetwork()
    lowering = Lowering(
        EmulatedTensorRT(), network, model.step, model.config, LIMITS, "fp16", model.read
    )
    lowering.tensors[node.inputs[0]] = network.add_input("x", DataType.float16, (-1, x.shape[1]))
    lowering.begin(node)
    quantised_linear(lowering, node)
    network.mark_output(lowering.tensors[node.outputs[0]])
    (given,) = network.run({"x": x}).values()
    group = node.attributes["activation_group"].as_int()
    static = torch.tensor([STATIC_SCALES[scheme]]) if group else None
    zero = node.attributes["zero"].as_int()
    y = reference_linear(
        torch.from_numpy(x).float(), codes, scales, None, None, zero, group, None, static
    )
    assert np.abs(given - y.numpy()).max() < 2e-3 * y.abs().max()


def test_int8_weights_go_with_bf16_activations(model_of: Callable[..., Model]) -> None:
    assert_same_logits(model_of("w8a16", **GRID_SIZES), "bf16")


def test_fp8_goes_with_bf16_activations(model_of: Callable[..., Model]) -> None:
    assert_same_logits(model_of("fp8_w8a8", **GRID_SIZES), "bf16", tolerance=0.2)


def test_fp8_products_read_fp8_on_both_sides(model_of: Callable[..., Model]) -> None:
    """Every linear's, and nothing else is of it: the network, read back."""
    model = model_of("fp8_w8a8", **GRID_SIZES)
    network = emulated(model).network
    made = {tensor: layer for layer in network.layers for tensor in layer.outputs}
    products = [layer for layer in network.layers if layer.kind == "matrix_multiply"]
    assert len(products) == len(nodes_of(model.step.graph, "quantised_linear"))
    for product in products:
        x, weight = (made[product.inputs[slot]] for slot in (0, 1))
        assert {x.kind, weight.kind} == {"dequantize"}
        assert x.inputs[0].dtype is weight.inputs[0].dtype is DataType.fp8
        assert (x.inputs[1].sizes, weight.inputs[1].sizes) == ((), weight.inputs[0].sizes[1:])
        assert made[x.inputs[0]].kind == "quantize"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_has_the_step_graphs_shape(model_of: Callable[..., Model], family: str) -> None:
    model = model_of(**FAMILIES[family])
    sizes = {"B": 2, "L": 5, "T": 10, "R": 2, "S": 2}
    inputs = set(model.step.graph.inputs)
    for value, tensor in emulated(model).lowering.tensors.items():
        assert value.shape is not None
        expected = tuple(sizes.get(str(size), size) for size in value.shape)
        shape = tuple(evaluate(size, sizes) for size in tensor.sizes)
        assert np.prod(shape) == np.prod(expected), value.name
        if len(shape) == len(expected):
            assert shape == expected, value.name
        is_logits = value is model.step.graph.outputs[0]
        wanted = DataType.int32 if value in inputs else DataType.float16
        assert tensor.dtype is wanted or is_logits


@pytest.mark.parametrize("family", FAMILIES)
def test_means_are_taken_in_fp32(model_of: Callable[..., Model], family: str) -> None:
    layers = emulated(model_of(**FAMILIES[family])).network.layers
    means = [layer for layer in layers if layer.kind == "reduce"]
    assert means
    assert {layer.inputs[0].dtype for layer in means} == {DataType.float32}


def test_caches_come_out_updated_by_their_names(model_of: Callable[..., Model]) -> None:
    model = model_of()
    results = emulated(model).run(context_feeds(model, DTYPES["fp16"]))
    names = [updated_name(layer, kind) for layer in range(2) for kind in "kv"]
    assert list(results) == ["logits", *names]
    updated = results[names[0]]
    assert (updated[:, :, :5] != 9.0).any()
    assert (updated[:, :, 5:] == 9.0).all()


def test_layers_are_named_after_the_values_they_make(model_of: Callable[..., Model]) -> None:
    network = emulated(model_of()).network
    names = [layer.name for layer in network.layers if layer.name]
    assert len(set(names)) == len(names)
    assert "paged_attention_1.attention_v2.2" in names


def test_sizes_of_one_name_are_equal(model_of: Callable[..., Model]) -> None:
    inputs = emulated(model_of()).network.inputs
    assert [str(size) for size in inputs["token_ids"].sizes] == ["B", "L"]
    assert str(inputs[cache_name(1, "v")].sizes[0]) == "B"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"attention_soft_cap": 5.0}, "paged_attention with a soft cap"),
        ({"attention_sinks": True}, "paged_attention with attention sinks"),
        ({"windows": (0, 4)}, "paged_attention with a window of 4 tokens"),
        (
            {"ropes": (RopeConfig("dynamic", 1e4, 4, factor=2.0, original_max_position=8),)},
            "dynamic_rope_table with frequencies that follow",
        ),
    ],
)
def test_what_native_layers_cannot_do_is_refused_by_name(
    model_of: Callable[..., Model], overrides: dict[str, Any], words: str
) -> None:
    model = model_of(**overrides)
    with pytest.raises(BuildError, match=words):
        emulated(model)


def test_a_window_that_a_cache_cannot_exceed_is_no_window(
    model_of: Callable[..., Model],
) -> None:
    assert_same_logits(model_of(windows=(16, 0)), "fp16")


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        (WeightGrid(4, 32, symmetric=False), "groups of 32, with minimum"),
        (WeightGrid(4, 32, symmetric=False, zero_points=True), "with zero points"),
        (WeightGrid(8, 32, symmetric=True), "int8, groups of 32"),
    ],
)
def test_grids_without_a_kernel_are_refused_by_name(
    model_of: Callable[..., Model], grid: WeightGrid, words: str
) -> None:
    model = model_of("w4a16", grid=grid, **GRID_SIZES)
    with pytest.raises(BuildError, match=words):
        emulated(model)


def test_int4_weights_with_bf16_activations_are_refused(model_of: Callable[..., Model]) -> None:
    model = model_of("w4a16", **GRID_SIZES)
    with pytest.raises(BuildError, match="int4 weights and bf16 activations"):
        emulated(model, "bf16")


def test_weights_beyond_fp16_are_refused_by_name(model_of: Callable[..., Model]) -> None:
    model = model_of()

    def read(name: str) -> Any:
        return model.read(name) * (1e6 if name == "layers.1.mlp.down_proj.weight" else 1)

    large = Model(model.step, model.config, read)
    with pytest.raises(BuildError, match=r"layers\.1\.mlp\.down_proj\.weight holds .*choose bf16"):
        emulated(large)
