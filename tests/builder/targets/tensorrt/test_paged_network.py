"""The network with our plugins as it is made: every value against the step graph's, inputs, and
what is refused. Nothing runs here but Python."""

from collections.abc import Callable
from typing import Any

import pytest
from network_models import FAMILIES, GRID_SIZES, Model
from paged_steps import paged_limits

from llmbuild.builder.graph.passes.rewrite import nodes_of
from llmbuild.builder.models.config import RopeConfig
from llmbuild.builder.targets.tensorrt.emulation.emulate import emulate_paged
from llmbuild.builder.targets.tensorrt.emulation.module import DataType
from llmbuild.builder.targets.tensorrt.emulation.sizes import evaluate
from llmbuild.builder.targets.tensorrt.paged_limits import PagedLimits
from llmbuild.builder.targets.tensorrt.paged_profiles import paged_profiles
from llmbuild.builder.targets.tensorrt.plugin_lowering import PluginLowering
from llmbuild.builder.targets.tensorrt.profiles import CONTEXT, DECODE
from llmbuild.errors import BuildError
from llmbuild.quant.grid import WeightGrid
from llmbuild.runtime.manifest import KVLayer

# No two sizes of a step are equal, nor to one of the models'.
SIZES = {"T": 13, "S": 3, "S + 1": 4, "B": 8, "R": 11}
ARCHITECTURES = ("qwen3", "gemma", "gpt2", "cohere")


def lowered(
    model: Model, kv_dtypes: tuple[str, str] = ("fp16", "fp16"), limits: PagedLimits | None = None
) -> PluginLowering:
    limits = limits or paged_limits(model, *kv_dtypes)
    emulated = emulate_paged(model.step, model.config, limits, "fp16", model.read)
    assert isinstance(emulated.lowering, PluginLowering)
    return emulated.lowering


def check_values(lowering: PluginLowering) -> None:
    """Dtypes and shapes, with the sizes of a step put in."""
    for value, tensor in lowering.tensors.items():
        assert value.shape is not None
        expected = tuple(SIZES.get(str(size), size) for size in value.shape)
        if value.name == "query_start":
            expected = (SIZES["S + 1"],)
        assert tuple(evaluate(size, SIZES) for size in tensor.sizes) == expected, value.name
        node = value.producer()
        if node is None:
            assert tensor.dtype is DataType.int32
        elif node.op_type == "rope_table":
            assert tensor.dtype is DataType.float32
        else:
            is_token = node.op_type == "rope_kv_write" and value is node.outputs[1]
            assert tensor.dtype is (DataType.int32 if is_token else DataType.float16), value.name
    (logits,) = lowering.network.outputs.values()
    assert logits.dtype is DataType.float32


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_value_is_the_step_graphs(model_of: Callable[..., Model], family: str) -> None:
    check_values(lowered(model_of(**FAMILIES[family])))


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8-static", "fp8_w8a8"])
def test_quantised_values_are_the_step_graphs(model_of: Callable[..., Model], scheme: str) -> None:
    is_table_quantised = scheme != "fp8_w8a8"
    check_values(lowered(model_of(scheme, **GRID_SIZES, tie_embeddings=is_table_quantised)))


def test_fp8_products_are_tensorrts_own_layers(model_of: Callable[..., Model]) -> None:
    lowering = lowered(model_of("fp8_w8a8", **GRID_SIZES))
    kinds = [layer.kind for layer in lowering.network.layers]
    products = len(nodes_of(lowering.step.graph, "quantised_linear"))
    assert kinds.count("quantize") == kinds.count("matrix_multiply") == products
    assert kinds.count("dequantize") == 2 * products
    assert not any("gem" in name for name in lowering.plugins)


def test_nodes_with_kernels_are_plugins_and_others_are_not(
    model_of: Callable[..., Model],
) -> None:
    lowering = lowered(model_of("w4a16", **GRID_SIZES))
    layers = [layer for layer in lowering.network.layers if layer.kind == "plugin_v3"]
    kernels = {name.partition("_fp16")[0] for name in lowering.plugins}
    assert kernels == {
        "add_rms_norm",
        "rms_norm",
        "gated_activation",
        "quantised_gemm",
        "rope_kv_write",
        "paged_attention_decode",
        "paged_attention_prefill",
    }
    assert len(layers) == 2 * (2 + 4 + 1 + 3) + 2  # of each layer; the first norm and the head
    assert not {layer.kind for layer in lowering.network.layers} & {"reduce", "attention_v2"}


def test_plugins_are_shared_by_layers(model_of: Callable[..., Model]) -> None:
    lowering = lowered(model_of())
    names = [name for name in lowering.plugins if name.startswith("paged_attention")]
    assert len(names) == 2


def test_pools_come_as_addresses(model_of: Callable[..., Model]) -> None:
    inputs = lowered(model_of(), ("int8", "int4")).inputs
    pools = {name: tensor for name, tensor in inputs.items() if name.startswith("pool.")}
    tensors = ("k_items", "k_scales", "v_items", "v_scales", "v_minima")
    assert list(pools) == [f"pool.{layer}.{tensor}" for layer in range(2) for tensor in tensors]
    assert {(tensor.dtype, tensor.sizes) for tensor in pools.values()} == {(DataType.int64, (1,))}


def test_attention_reads_the_token_of_its_layers_write(model_of: Callable[..., Model]) -> None:
    lowering = lowered(model_of())
    nodes = nodes_of(lowering.step.graph, "paged_attention")
    assert len(nodes) == 2
    for node in nodes:
        token = lowering.tensors[node.inputs[1]]
        readers = [each for each in lowering.network.layers if token in each.inputs.values()]
        assert [each.name for each in readers] == [f"{node.outputs[0].name}.plugin_v3.0"]


def test_what_kernels_can_do_beyond_native_layers_is_taken(
    model_of: Callable[..., Model],
) -> None:
    grid = WeightGrid(4, 32, symmetric=False)
    model = model_of(
        "w4a16",
        grid=grid,
        **GRID_SIZES,
        attention_soft_cap=5.0,
        attention_sinks=True,
        windows=(0, 4),
    )
    check_values(lowered(model))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            {"ropes": (RopeConfig("dynamic", 1e4, 4, factor=2.0, original_max_position=8),)},
            "tensorrt target can't lower dynamic_rope_table",
        ),
    ],
)
def test_what_no_plugin_can_do_is_refused_by_name(
    model_of: Callable[..., Model], overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(BuildError, match=words):
        lowered(model_of(**overrides))


def test_heads_of_several_kv_dtypes_are_refused(model_of: Callable[..., Model]) -> None:
    model = model_of()
    limits = paged_limits(model, "fp16", "fp16")
    layers = [KVLayer.of_heads([("fp16", "fp16"), ("int8", "int8")])] * 2
    mixed = PagedLimits(
        limits.sequences, limits.tokens, limits.blocks, _with_layers(limits, layers), limits.sm
    )
    with pytest.raises(BuildError, match="KV heads of several dtypes"):
        lowered(model, limits=mixed)


def test_kv_caches_without_kernels_are_refused(model_of: Callable[..., Model]) -> None:
    with pytest.raises(BuildError, match="a KV cache in fp32"):
        lowered(model_of(), ("fp32", "fp16"))


def test_profiles_are_of_prompts_and_of_a_token_a_sequence(
    model_of: Callable[..., Model],
) -> None:
    model = model_of()
    limits = paged_limits(model, "fp16", "fp16")
    lowering = lowered(model, limits=limits)
    shapes = {name: tensor.shape for name, tensor in lowering.inputs.items()}
    profiles = paged_profiles(shapes, limits)
    context, decode = profiles[CONTEXT], profiles[DECODE]
    assert context.keys() == decode.keys() == lowering.inputs.keys()
    assert (context["token_ids"].least, context["token_ids"].most) == ((1,), (24,))
    assert context["query_start"].most == decode["query_start"].best == (5,)
    assert decode["token_ids"].best == decode["token_ids"].most == (4,)
    assert decode["block_tables"].most == (4, 5)
    assert context["pool.0.k_items"].least == context["pool.0.k_items"].most == (1,)


def _with_layers(limits: PagedLimits, layers: list[KVLayer]) -> Any:
    kv = limits.kv
    return type(kv)(
        block_size=kv.block_size,
        num_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim,
        layers=layers,
    )
