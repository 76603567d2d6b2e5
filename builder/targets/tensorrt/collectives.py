"""all_reduce: the sum over the ranks of a stage."""

import onnx_ir as ir

from llmbuild.builder.targets.tensorrt.lowering import Lowering


def all_reduce(lowering: Lowering, node: ir.Node) -> None:
    shard, trt = lowering.step.shard, lowering.trt
    assert shard is not None
    ranks = list(range(shard.parallel.tp))  # of the stage, which has a communicator of its own
    layer = lowering.layer(
        "dist_collective",
        lowering.tensor(node.inputs[0]),
        *(trt.CollectiveOperation.ALL_REDUCE, trt.ReduceOperation.SUM, -1, ranks),
    )
    layer.num_ranks = len(ranks)
    lowering.tensors[node.outputs[0]] = layer.get_output(0)
