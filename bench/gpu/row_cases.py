"""Kernels that go over rows: norms, gated activation, embedding, and the likeliest token."""

from collections.abc import Callable, Iterator, Sequence

import torch

from bench.gpu.case import TORCH_TYPES, Case, Launch, Results, Tensors, empty, normal, uniform
from llmbuild.plugins.common.model_shape import LLAMA_8B, ModelShape
from llmbuild.plugins.gated_activation.triton import gated_variant
from llmbuild.plugins.gather_rows.triton import gather_variant
from llmbuild.plugins.layer_norm.triton import layer_norm_variant
from llmbuild.plugins.rms_norm.triton import norm_variant
from llmbuild.plugins.sample.triton import best_variant, greedy_variant

EPS = 1e-5
VOCAB = 128_256  # Llama 3's


def row_cases(sm: int, rows: Sequence[int]) -> Iterator[Case]:
    for activation in ("fp16", "bf16"):
        for count in rows:
            yield norm_case(sm, activation, LLAMA_8B, count)
            yield add_norm_case(sm, activation, LLAMA_8B, count)
            yield gated_case(sm, activation, LLAMA_8B, count)
            yield gather_case(sm, activation, LLAMA_8B, count, VOCAB)
    for count in rows:
        yield layer_norm_case(sm, "bf16", LLAMA_8B, count)
        yield greedy_case(sm, count, VOCAB)


def norm_case(sm: int, activation: str, shape: ModelShape, rows: int) -> Case:
    dtype, width = TORCH_TYPES[f"*{activation}"], shape.hidden
    buffers = {
        "x": normal(dtype, rows, width),
        "weight": normal(torch.float32, width),
        "y": empty(dtype, rows, width),
    }
    variant = norm_variant(sm, activation, width, with_residual=False)
    return Case(
        kernel="rms_norm",
        what=f"{activation} {width}",
        rows=rows,
        context=0,
        buffers=buffers,
        launches=[Launch(variant, (rows,), {name: name for name in buffers})],
        results=("y",),
        moved_bytes=sum(buffer.size_bytes for buffer in buffers.values()),
        competitor=_norm,
    )


def add_norm_case(sm: int, activation: str, shape: ModelShape, rows: int) -> Case:
    dtype, width = TORCH_TYPES[f"*{activation}"], shape.hidden
    buffers = {
        "x": normal(dtype, rows, width),
        "residual": normal(dtype, rows, width, scale=2.0),
        "weight": normal(torch.float32, width),
        "total": empty(dtype, rows, width),
        "y": empty(dtype, rows, width),
    }
    variant = norm_variant(sm, activation, width, with_residual=True)
    return Case(
        kernel="add_rms_norm",
        what=f"{activation} {width}",
        rows=rows,
        context=0,
        buffers=buffers,
        launches=[Launch(variant, (rows,), {name: name for name in buffers})],
        results=("y",),
        moved_bytes=sum(buffer.size_bytes for buffer in buffers.values()),
        competitor=_add_norm,
    )


def _norm(tensors: Tensors) -> Callable[[], Results]:
    x, weight = tensors["x"], tensors["weight"].to(tensors["x"].dtype)
    return lambda: (torch.nn.functional.rms_norm(x, weight.shape, weight, EPS),)


def _add_norm(tensors: Tensors) -> Callable[[], Results]:
    x, residual = tensors["x"], tensors["residual"]
    weight = tensors["weight"].to(x.dtype)
    return lambda: (torch.nn.functional.rms_norm(x + residual, weight.shape, weight, EPS),)


def layer_norm_case(sm: int, activation: str, shape: ModelShape, rows: int) -> Case:
    dtype, width = TORCH_TYPES[f"*{activation}"], shape.hidden
    buffers = {
        "x": normal(dtype, rows, width),
        "weight": normal(torch.float32, width),
        "bias": normal(torch.float32, width, scale=0.5),
        "y": empty(dtype, rows, width),
    }
    variant = layer_norm_variant(sm, activation, width, has_bias=True)
    return Case(
        kernel="layer_norm",
        what=f"{activation} {width}",
        rows=rows,
        context=0,
        buffers=buffers,
        launches=[Launch(variant, (rows,), {name: name for name in buffers})],
        results=("y",),
        moved_bytes=sum(buffer.size_bytes for buffer in buffers.values()),
        competitor=_layer_norm,
    )


def _layer_norm(tensors: Tensors) -> Callable[[], Results]:
    x = tensors["x"]
    weight, bias = (tensors[name].to(x.dtype) for name in ("weight", "bias"))
    return lambda: (torch.nn.functional.layer_norm(x, weight.shape, weight, bias, EPS),)


def gated_case(sm: int, activation: str, shape: ModelShape, rows: int) -> Case:
    dtype, width = TORCH_TYPES[f"*{activation}"], shape.inner
    buffers = {"gate": normal(dtype, rows, 2 * width), "y": empty(dtype, rows, width)}
    variant = gated_variant(sm, activation, "silu", is_merged=True)
    grid = (rows, -(-width // int(variant.constants["COLUMNS"] or 1)))
    return Case(
        kernel="gated_activation",
        what=f"{activation} silu {width}",
        rows=rows,
        context=0,
        buffers=buffers,
        launches=[Launch(variant, grid, {"gate": "gate", "N": width, "y": "y"})],
        results=("y",),
        moved_bytes=sum(buffer.size_bytes for buffer in buffers.values()),
        competitor=lambda t: (
            lambda: (torch.nn.functional.silu(t["gate"][:, :width]) * t["gate"][:, width:],)
        ),
    )


def gather_case(sm: int, activation: str, shape: ModelShape, rows: int, vocab: int) -> Case:
    dtype, width = TORCH_TYPES[f"*{activation}"], shape.hidden
    buffers = {
        "table": normal(dtype, vocab, width),
        "index": uniform(torch.int32, 0, vocab, rows),
        "y": empty(dtype, rows, width),
    }
    variant = gather_variant(sm, activation, activation)
    grid = (rows, -(-width // int(variant.constants["COLUMNS"] or 1)))
    names = {name: name for name in buffers}
    return Case(
        kernel="gather_rows",
        what=f"{activation} {vocab} x {width}",
        rows=rows,
        context=0,
        buffers=buffers,
        launches=[Launch(variant, grid, names | {"rows": vocab, "N": width})],
        results=("y",),
        moved_bytes=2 * buffers["y"].size_bytes,
        competitor=lambda t: lambda: (t["table"].index_select(0, t["index"]),),
    )


def greedy_case(sm: int, rows: int, vocab: int) -> Case:
    best, greedy = best_variant(sm), greedy_variant(sm)
    parts = -(-vocab // int(best.constants["COLUMNS"] or 1))
    buffers = {
        "logits": normal(torch.float32, rows, vocab),
        "best": empty(torch.int64, rows, parts),
        "tokens": empty(torch.int32, rows),
    }
    return Case(
        kernel="best_of_parts, greedy",
        what=f"fp32 {vocab}",
        rows=rows,
        context=0,
        buffers=buffers,
        launches=[
            Launch(best, (rows, parts), {"logits": "logits", "V": vocab, "best": "best"}),
            Launch(greedy, (rows,), {"best": "best", "parts": parts, "tokens": "tokens"}),
        ],
        results=("tokens",),
        moved_bytes=buffers["logits"].size_bytes,
        competitor=lambda t: lambda: (t["logits"].argmax(dim=1),),
        tolerance=0.0,
    )
