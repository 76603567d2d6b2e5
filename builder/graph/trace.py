"""Trace the decoder into a step graph: torch.export on fake tensors, so no weight exists."""

import logging
import warnings
from typing import Any

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from llmbuild.builder.graph.onnx_domain import translation_table
from llmbuild.builder.graph.passes.rewrite import nodes_of, replace, users
from llmbuild.builder.graph.step_graph import HIDDEN, INPUTS, SHAPES, StepGraph, Weight
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.models.decoder import Decoder
from llmbuild.builder.models.rope import inverse_frequencies
from llmbuild.builder.shard.shard import Shard
from llmbuild.version import __version__

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PRECISIONS = {ir.DataType.FLOAT: "fp32", ir.DataType.BFLOAT16: "bf16"}
_MAX_DIM = 1 << 20


def trace(config: DecoderConfig, precision: str, shard: Shard | None = None) -> StepGraph:
    """The step graph of a decoder, before any pass.

    config: the whole model's. precision: of matrices, "fp32" or "bf16"; norms, biases and
    activations are fp32. shard: the part of the model to trace, by default all.
    """
    model = _to_onnx(_export(config, TORCH_DTYPES[precision], shard))
    graph = model.graph
    _strip(model)
    _plain_splits(graph)
    _name_dimensions(graph)
    constants = {
        f"ropes.{index}.inv_freq": inverse_frequencies(rope)
        for index, rope in enumerate(config.ropes)
        if f"ropes.{index}.inv_freq" in graph.initializers
    }
    weights = {
        name: Weight((name,), tuple(value.shape.numpy()), _PRECISIONS[value.dtype])
        for name, value in graph.initializers.items()
        if name not in constants and value.shape is not None and value.dtype is not None
    }
    step = StepGraph(model, weights, constants, shard)
    graph.outputs[0].name = step.output
    return step


def _strip(model: ir.Model) -> None:
    """Drop the exporter's notes, which name source files, and the weights' stand-in data."""
    graph = model.graph
    model.producer_name, model.producer_version = "llmbuild", __version__
    for noted in (model, graph, *graph, *graph.inputs, *graph.initializers.values()):
        noted.metadata_props.clear()
    for value in (output for node in graph for output in node.outputs):
        value.metadata_props.clear()
    for value in graph.initializers.values():
        value.const_value = None


def _plain_splits(graph: ir.Graph) -> None:
    """Split in place of what the exporter makes of a split: a sequence, and its parts in order."""
    for sequence in nodes_of(graph, "SplitToSequence", ""):
        whole, sizes = sequence.inputs
        constant = None if sizes is None else sizes.producer()
        assert constant is not None
        widths = constant.attributes["value"].as_tensor().numpy().tolist()
        parts = users(sequence.outputs[0])
        values = [part.outputs[0] for part in parts]
        lengths = ir.node("Constant", [], {"value_ints": widths})
        inputs = [whole, lengths.outputs[0]]
        split = ir.node("Split", inputs, {"axis": 1}, num_outputs=len(parts))
        replace(graph, sequence, [sequence, *parts], [lengths, split], values, split.outputs)
        if not constant.outputs[0].uses():
            graph.remove(constant)


def _name_dimensions(graph: ir.Graph) -> None:
    """Give the traced symbols the names of docs/step-graph.md: T, S, B, R, and such as 2 * T."""
    inputs = {value.name: value.shape for value in graph.inputs}
    names: dict[str, str] = {}
    for name, symbols in SHAPES.items():
        shape = inputs[name]
        assert shape is not None
        names.update(zip(map(str, shape), symbols, strict=True))
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape([_named(dim, names) for dim in value.shape])


def _named(dim: int | ir.SymbolicDim, names: dict[str, str]) -> int | str:
    if isinstance(dim, int):
        return dim
    *each, symbol = str(dim).split("*")
    return names.get(str(dim)) or " * ".join([*each, names.get(symbol, symbol)])


def _export(
    config: DecoderConfig, weight_dtype: torch.dtype, shard: Shard | None
) -> ExportedProgram:
    """Example sizes are above 1 and distinct, so that none is taken for a constant."""
    tokens, sequences, blocks, rows = 6, 3, 4, 2
    shapes = ((tokens,), (tokens,), (sequences + 1,), (sequences,), (sequences, blocks), (rows,))
    dims = [Dim(name, min=2, max=_MAX_DIM) for name in ("tokens", "sequences", "blocks", "rows")]
    t, s, b, r = dims
    axes: tuple[dict[int, Any], ...] = ({0: t}, {0: t}, {0: s + 1}, {0: s}, {0: s, 1: b}, {0: r})
    dynamic = dict(zip(INPUTS, axes, strict=True))
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        decoder = Decoder(config, weight_dtype, shard).eval()
        inputs = [torch.zeros(shape, dtype=torch.int32) for shape in shapes]
        if shard is not None and not shard.is_first_stage:
            inputs.append(torch.zeros(tokens, config.hidden_size))
            dynamic[HIDDEN] = {0: t}
        return torch.export.export(decoder, tuple(inputs), dynamic_shapes=dynamic, strict=False)


def _to_onnx(program: ExportedProgram) -> ir.Model:
    """torch.onnx without its optimiser, whose folding needs data that fake tensors lack."""
    exporter_log = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = exporter_log.level
    exporter_log.setLevel(logging.ERROR)  # it warns of torchvision, which nothing here needs
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.onnx.export(
                program,
                (),
                dynamo=True,
                optimize=False,
                verbose=False,
                custom_translation_table=translation_table(),
            )
    finally:
        exporter_log.setLevel(level)
    assert exported is not None
    return exported.model
