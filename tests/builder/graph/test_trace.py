"""The traced step graph is docs/step-graph.md's, and no weight was ever allocated for it."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from llmbuild.builder.graph.onnx_domain import translation_table
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.canonical import expected_tensors
from llmbuild.builder.models.config import NO_ROPE, DecoderConfig, NormConfig, RopeConfig
from llmbuild.builder.models.rope import inverse_frequencies
from llmbuild.plugins.registry import PLUGINS
from llmbuild.version import __version__

INT32, FLOAT = ir.DataType.INT32, ir.DataType.FLOAT

TRACE_8B = """
import resource
import onnxscript, torch, torch.onnx._internal.exporter._core
from llmbuild.builder.graph.trace import trace
from llmbuild.builder.models.config import DecoderConfig, NormConfig, RopeConfig

def config(layers, vocab_size, hidden, inner, heads, kv_heads, head_dim):
    rope = RopeConfig("default", 5e5, head_dim)
    return DecoderConfig(
        "llama", vocab_size, hidden, inner, layers, heads, kv_heads, head_dim, 131072, False,
        NormConfig(1e-5), (rope,), (0,) * layers, (0,) * layers, head_dim**-0.5,
    )

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

trace(config(1, 7, 4, 3, 2, 1, 2), "fp32")
before = peak()
step = trace(config(32, 128256, 4096, 14336, 32, 8, 128), "bf16")
values = sum(map(lambda weight: __import__("math").prod(weight.shape), step.weights.values()))
print(values, peak() - before)
"""


def plain_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The canonical weights of a plain decoder, as docs/models.md describes them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (config.vocab_size, hidden),
        "final_norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    projections = {
        "attention.q_proj": (q, hidden, config.qkv_bias),
        "attention.k_proj": (kv, hidden, config.qkv_bias),
        "attention.v_proj": (kv, hidden, config.qkv_bias),
        "attention.o_proj": (hidden, q, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for layer in range(config.num_layers):
        for norm in ("attn_norm", "mlp_norm"):
            shapes[f"layers.{layer}.{norm}.weight"] = (hidden,)
        for norm in ("q_norm", "k_norm") if config.qk_norm else ():
            shapes[f"layers.{layer}.attention.{norm}.weight"] = (config.head_dim,)
        for name, (rows, columns, bias) in projections.items():
            shapes[f"layers.{layer}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"layers.{layer}.{name}.bias"] = (rows,)
    return shapes


def without_precision(variant: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in variant.items() if name != "precision"}


def test_inputs_output_and_dimensions_are_the_contracts(
    traced: Callable[..., StepGraph], variant: dict[str, Any]
) -> None:
    graph = traced(**variant).graph
    inputs = [(v.name, v.dtype, [str(dim) for dim in v.shape]) for v in graph.inputs]
    assert inputs == [
        ("token_ids", INT32, ["T"]),
        ("positions", INT32, ["T"]),
        ("query_start", INT32, ["S + 1"]),
        ("kv_lengths", INT32, ["S"]),
        ("block_tables", INT32, ["S", "B"]),
        ("logit_rows", INT32, ["R"]),
    ]
    (output,) = graph.outputs
    assert (output.name, output.dtype, [*map(str, output.shape)]) == ("logits", FLOAT, ["R", "37"])
    rows = {
        str(value.shape[0])
        for node in graph
        for value in node.outputs
        if value.shape is not None and len(value.shape) == 2
    }
    slots = {f"{variant['moe'].top_k} * T"} if "moe" in variant else set()
    assert rows == {"T", "R", *slots}


def test_plain_decoders_weights_are_those_of_the_list(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    plain_variant: dict[str, Any],
) -> None:
    config = decoder_config(**without_precision(plain_variant))
    weights = traced(**plain_variant).weights
    assert {name: weight.shape for name, weight in weights.items()} == plain_shapes(config)


def test_initialisers_are_the_canonical_weights_and_the_rotary_frequencies(
    traced: Callable[..., StepGraph],
    decoder_config: Callable[..., DecoderConfig],
    variant: dict[str, Any],
) -> None:
    step, config = traced(**variant), decoder_config(**without_precision(variant))
    expected = expected_tensors(config)
    assert {name: weight.shape for name, weight in step.weights.items()} == expected
    assert all(weight.sources == (name,) for name, weight in step.weights.items())
    frequencies = {
        f"ropes.{index}.inv_freq": inverse_frequencies(rope)
        for index, rope in enumerate(config.ropes)
        if rope.kind != "dynamic"  # works them out from each sequence's length
    }
    assert step.constants.keys() == frequencies.keys()
    for name, values in frequencies.items():
        np.testing.assert_array_equal(step.constants[name], values)
    shapes = expected | {name: values.shape for name, values in frequencies.items()}
    assert step.graph.initializers.keys() == shapes.keys()
    for name, value in step.graph.initializers.items():
        assert value.const_value is None
        assert tuple(value.shape.numpy()) == shapes[name]


def test_matrices_have_the_precision_and_vectors_are_fp32(
    traced: Callable[..., StepGraph], variant: dict[str, Any]
) -> None:
    step, precision = traced(**variant), variant.get("precision", "fp32")
    expected = {1: "fp32", 2: precision, 3: precision}
    assert all(weight.dtype == expected[len(weight.shape)] for weight in step.weights.values())
    onnx_type = {"fp32": FLOAT, "bf16": ir.DataType.BFLOAT16}
    for name, weight in step.weights.items():
        assert step.graph.initializers[name].dtype == onnx_type[weight.dtype]


def test_each_layers_window_scale_cap_and_index_reach_its_attention(
    traced: Callable[..., StepGraph],
) -> None:
    step = traced(windows=(0, 5), norm=NormConfig(1e-3), attention_soft_cap=1.5)
    attributes = [
        {name: attribute.value for name, attribute in node.attributes.items()}
        for node in step.graph
        if node.op_type == "paged_attention"
    ]
    assert attributes == [
        {"layer": 0, "scale": 0.5, "window": 0, "soft_cap": 1.5},
        {"layer": 1, "scale": 0.5, "window": 5, "soft_cap": 1.5},
    ]
    norms = [node for node in step.graph if node.op_type == "rms_norm"]
    assert [node.attributes["eps"].as_float() for node in norms] == [1e-3] * 5


def test_each_layer_turns_by_its_own_table_or_not_at_all(
    traced: Callable[..., StepGraph],
) -> None:
    ropes = tuple(RopeConfig("default", theta, size) for theta, size in ((1e4, 4), (5e5, 2)))
    three = {"num_layers": 3, "windows": (0, 0, 0)}
    step = traced(ropes=ropes, layer_ropes=(1, NO_ROPE, 0), **three)
    turned = {}
    for node in step.graph:
        if node.op_type == "paged_attention":
            rotary = node.inputs[0].producer()
            turns = rotary.op_type == "rotary"
            table = rotary.inputs[1].producer().inputs[1].name if turns else None
            turned[node.attributes["layer"].as_int()] = table
    assert turned == {0: "ropes.1.inv_freq", 1: None, 2: "ropes.0.inv_freq"}


def test_a_rope_that_no_layer_turns_by_leaves_nothing(
    lowerable: Callable[..., StepGraph],
) -> None:
    ropes = tuple(RopeConfig("default", theta, 4) for theta in (1e4, 5e5))
    step = lowerable(ropes=ropes, layer_ropes=(1, 1))
    assert [node.op_type for node in step.graph].count("rope_table") == 1
    assert step.constants.keys() <= set(step.graph.initializers)


@pytest.mark.slow
def test_tracing_an_8b_model_allocates_no_weight() -> None:
    run = subprocess.run(
        [sys.executable, "-c", TRACE_8B], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    values, grown_bytes = map(int, run.stdout.split())
    assert values == 8_030_261_248
    assert grown_bytes < 250e6  # the graph itself; one embedding in bf16 is 1,050 MB


@pytest.mark.parametrize("stage", ["traced", "lowerable"])
def test_saved_graph_is_valid_onnx_that_holds_no_data_and_nothing_of_this_machine(
    request: pytest.FixtureRequest,
    checkout: Path,
    tmp_path: Path,
    stage: str,
    variant: dict[str, Any],
) -> None:
    step = request.getfixturevalue(stage)(**variant)
    path = tmp_path / "folder" / "step.onnx"
    step.save(path)
    translation_table()  # gives our domain's schemas to the checker
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert not model.graph.initializer
    attributes = [attribute for node in model.graph.node for attribute in node.attribute]
    tensors = [each.t for each in attributes if each.type == onnx.AttributeProto.TENSOR]
    assert all(not tensor.dims for tensor in tensors)  # a multiplier at most
    inputs = {value.name: value for value in model.graph.input}
    assert {*step.weights, *step.constants} < set(inputs)
    for name, weight in step.weights.items():
        (sources,) = (p.value for p in inputs[name].metadata_props if p.key == "sources")
        assert tuple(sources.split()) == weight.sources
    assert (model.producer_name, model.producer_version) == ("llmbuild", __version__)
    content = path.read_bytes()
    assert not re.search(rb"torch|\.py|pkg\.|" + re.escape(str(checkout).encode()), content)
    assert step.graph.initializers.keys() == {*step.weights, *step.constants}  # as before saving


def test_documentation_lists_every_operation_with_its_inputs_and_attributes(
    checkout: Path,
) -> None:
    """Optional inputs in brackets; *ragged* is three of the graph's inputs."""
    listed = {}
    for line in (checkout / "docs" / "step-graph.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("`"):
            inputs = cells[1].replace("*ragged*", "positions, query_start, block_tables")
            optional = [name.startswith("[") for name in inputs.split(", ")]
            listed[cells[0].strip("`")] = (optional, re.findall(r"`(\w+)`", cells[2]))
    expected = {}
    for name, op in PLUGINS.items():
        arguments = op._opoverload._schema.arguments
        types = {argument.name: str(argument.type) for argument in arguments}
        tensors = [kind for kind in types.values() if "Tensor" in kind]
        attributes = [name for name, kind in types.items() if "Tensor" not in kind]
        expected[name] = ([kind.startswith("Optional") for kind in tensors], attributes)
    assert {name: sorted(attributes) for name, (_, attributes) in listed.items()} == {
        name: sorted(attributes) for name, (_, attributes) in expected.items()
    }
    assert {name: optional for name, (optional, _) in listed.items()} == {
        name: optional for name, (optional, _) in expected.items()
    }
