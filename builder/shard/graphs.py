"""Every rank's step graph: traced for its shard, and rewritten by the same passes as the whole."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from llmbuild.builder.graph.materialise import ReadTensor
from llmbuild.builder.graph.passes.rewrite import nodes_of
from llmbuild.builder.graph.passes.verify import verify_collectives
from llmbuild.builder.graph.pipeline import run_passes
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.graph.trace import trace
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.quantisation import untie_head
from llmbuild.builder.shard.cost import layer_costs
from llmbuild.builder.shard.localise import Scales, own_kv, own_kv_scales, own_plan
from llmbuild.builder.shard.reader import ShardReader
from llmbuild.builder.shard.shard import Shard, whole_model
from llmbuild.builder.shard.split import make_shards
from llmbuild.quant.plan import QuantPlan
from llmbuild.quant.reader import PartReader, Ranges
from llmbuild.runtime.manifest import KVLayout, Parallel


@dataclass(frozen=True)
class RankGraph:
    """One rank's step graph, with what it is lowered and filled with. config, kv: of its shard.
    read: gives the rank's own part of each canonical tensor; ranges: which part that is, where it
    isn't the whole."""

    step: StepGraph
    config: DecoderConfig
    kv: KVLayout
    read: ReadTensor
    ranges: Mapping[str, tuple[Ranges, ...]] = field(default_factory=dict)

    @property
    def shard(self) -> Shard:
        return self.step.shard or whole_model(self.config)


def rank_graphs(
    parallel: Parallel,
    config: DecoderConfig,
    precision: str,
    plan: QuantPlan,
    kv: KVLayout,
    kv_scales: Scales,
    read: PartReader,
) -> list[RankGraph]:
    """The ranks' graphs, ready to be lowered, stage by stage. config, plan, kv, kv_scales, read: of
    the whole model. Raises RecipeError where it can't be divided so."""
    graphs = []
    traced: dict[object, StepGraph] = {}
    for shard in make_shards(parallel, config, plan, layer_costs(config, plan, precision)):
        step = _trace(config, precision, shard, traced)
        untie_head(step, plan)
        run_passes(
            step, None, own_plan(plan, shard, config), own_kv_scales(kv_scales, shard, config)
        )
        reader = ShardReader(read, shard, config)
        graphs.append(
            RankGraph(step, shard.config(config), own_kv(kv, shard), reader, reader.ranges)
        )
    for first in range(0, len(graphs), parallel.tp):
        verify_collectives([each.step for each in graphs[first : first + parallel.tp]])
    return graphs


def _trace(
    config: DecoderConfig, precision: str, shard: Shard, traced: dict[object, StepGraph]
) -> StepGraph:
    """The shard's graph, copied from that of a shard of the same shape where there is one: tracing
    takes longer than all that follows. traced: those that were made, to be added to."""
    adds_biases = shard.adds_biases and (config.o_bias or config.mlp_bias)
    shape = (shard.layers, shard.config(config), len(shard.tokens), adds_biases)
    if shape not in traced:
        traced[shape] = trace(config, precision, shard)
    known = traced[shape]
    step = StepGraph(known.model.clone(), dict(known.weights), dict(known.constants), shard)
    for node in nodes_of(step.graph, "gather_rows"):
        node.attributes["first"] = ir.AttrInt64("first", shard.tokens.start)
    return step
