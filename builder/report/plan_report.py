"""The report of an engine of plans: what a decode step reads and computes, how near the emulated
network came to the reference, and what the build took."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from llmbuild.builder.graph.passes.rewrite import nodes_of
from llmbuild.builder.graph.step_graph import CODES, SCALES, StepGraph, Weight
from llmbuild.builder.report.report import DecodeStep, decode_contexts
from llmbuild.builder.shard.graphs import RankGraph
from llmbuild.builder.stages import peak_rss_bytes
from llmbuild.runtime.manifest import Manifest

_ITEM_BYTES = {
    "uint8": 1,
    "fp16": 2,
    "bf16": 2,
    "fp32": 2,
}  # fp32 of a step graph is fp16 in a plan
_LINEARS = ("linear", "quantised_linear")


@dataclass(frozen=True)
class PlanRank:
    """plan_bytes: on disk. read_bytes: of weights, by a decode step."""

    plan_bytes: int
    read_bytes: int


@dataclass(frozen=True)
class PlanReport:
    """decode: of all ranks together. emulated: the largest difference of a logit over the row's
    largest."""

    name: str
    target: str
    precision: str
    quantised: dict[str, int]  # how many tensors, how
    kv_bytes_per_token: int
    decode: list[DecodeStep]
    ranks: list[PlanRank]
    emulated: float
    tolerance: float
    seconds: dict[str, float]  # by stage of the build
    peak_rss_bytes: int


def make_plan_report(
    manifest: Manifest,
    graphs: Sequence[RankGraph],
    emulated: float,
    tolerance: float,
    seconds: Mapping[str, float],
    root: Path,
) -> PlanReport:
    """root: where the plans of the manifest's ranks lie."""
    ranks = [
        PlanRank((root / rank.weights).stat().st_size, read_bytes(graph.step))
        for rank, graph in zip(manifest.ranks, graphs, strict=True)
    ]
    config, kv = graphs[0].config, manifest.kv
    head_layers = sum(graph.config.num_heads * graph.config.num_layers for graph in graphs)
    attention_macs = 2 * config.head_dim * head_layers
    macs = sum(_macs(graph.step) for graph in graphs)
    return PlanReport(
        name=manifest.name,
        target=manifest.target.describe(),
        precision=manifest.precision,
        quantised=manifest.quantised_kinds,
        kv_bytes_per_token=kv.block_bytes // kv.block_size,
        decode=[
            DecodeStep(
                context_tokens=context,
                weight_bytes=sum(rank.read_bytes for rank in ranks),
                kv_bytes=context * kv.block_bytes // kv.block_size,
                operations=2 * (macs + attention_macs * context),
            )
            for context in decode_contexts(manifest.limits.max_sequence_length)
        ],
        ranks=ranks,
        emulated=emulated,
        tolerance=tolerance,
        seconds=dict(seconds),
        peak_rss_bytes=peak_rss_bytes(),
    )


def write_plan_report(report: PlanReport, root: Path) -> None:
    """Write report.json into a folder."""
    (root / "report.json").write_text(json.dumps(asdict(report), indent=2) + "\n")


def read_bytes(step: StepGraph) -> int:
    """Of weights that linears read, by a step: each once, however many tokens there are."""
    return sum(map(_bytes, _read_by_linears(step).values()))


def _macs(step: StepGraph) -> int:
    """Multiply-adds of a token with weights."""
    read = [weight for weight in _read_by_linears(step).values() if weight.part in ("", CODES)]
    return sum(prod(weight.shape) for weight in read if len(weight.shape) == 2)


def _read_by_linears(step: StepGraph) -> dict[str, Weight]:
    nodes = (node for kind in _LINEARS for node in nodes_of(step.graph, kind))
    names = {str(value.name) for node in nodes for value in node.inputs if value is not None}
    return {name: weight for name, weight in step.weights.items() if name in names}


def _bytes(weight: Weight) -> int:
    if weight.part == CODES and weight.grid is not None:
        return prod(weight.shape) * weight.grid.bits // 8
    if weight.part == SCALES and weight.grid is not None:
        return prod(weight.shape) * weight.grid.scale_dtype.itemsize
    return prod(weight.shape) * _ITEM_BYTES[weight.dtype]
