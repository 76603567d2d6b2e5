"""One side of a distillation, the model or its rounded twin: a run that gradients can follow."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from llmbuild.builder.calibration.batch import calibration_batch, fp32_pools
from llmbuild.builder.graph.reference import running
from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.plugins.common.kv_pools import bind_kv_pools
from llmbuild.plugins.common.quantised import round_to_int8
from llmbuild.plugins.moe.op import moe_linear
from llmbuild.plugins.registry import DOMAIN

Read = Callable[[str], NDArray[np.generic]]
Matrices = Mapping[str, torch.Tensor]


@dataclass
class Side:
    """matrices: those that linears multiply by, bf16, by name. activations: how the inputs of such
    a linear are rounded: columns of a group, and static scales. read: gives all other tensors."""

    step: StepGraph
    config: DecoderConfig
    read: Read
    matrices: Matrices
    activations: Mapping[str, tuple[int, torch.Tensor | None]]

    def logits(self, tokens: NDArray[np.int32]) -> torch.Tensor:
        """fp32 [tokens, vocab], of tokens [sequences, length]."""
        half: tuple[ir.Value | None, torch.Tensor] = (None, torch.empty(0))
        with bind_kv_pools(fp32_pools(self.config, tokens.shape)):
            for node, values in running(self.step, self.read, calibration_batch(tokens)):
                if (node.domain, node.op_type) == (DOMAIN, "linear"):
                    source, weight, *rest = node.inputs
                    assert source is not None
                    assert weight is not None
                    name = str(weight.name)
                    if source is not half[0] or self.activations:
                        half = (source, self._rounded(name, values[source]).bfloat16())
                    y = torch.nn.functional.linear(half[1], self.matrices[name]).float()
                    values[node.outputs[0]] = self._with_bias(y, rest)
                elif node.op_type == "moe_linear" and self.activations:
                    source, weight, starts = node.inputs
                    assert source is not None
                    assert weight is not None
                    assert starts is not None
                    rounded = self._rounded(str(weight.name), values[source])
                    experts = self._tensor(str(weight.name))
                    values[node.outputs[0]] = moe_linear._init_fn(rounded, experts, values[starts])
                last = values
        return last[self.step.graph.outputs[0]]

    def _rounded(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Inputs of a linear as the engine rounds them; the gradient is that of x."""
        group, scales = self.activations.get(name, (0, None))
        if not group:
            return x
        with torch.no_grad():
            error = round_to_int8(x, group, scales) - x
        return x + error

    def _with_bias(self, y: torch.Tensor, bias: list[ir.Value | None]) -> torch.Tensor:
        if not bias or bias[0] is None:
            return y
        return y + self._tensor(str(bias[0].name))

    def _tensor(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.read(name).astype(np.float32, copy=False))


def linear_matrices(
    step: StepGraph, read: Read, without: Mapping[str, object] | None = None
) -> dict[str, torch.Tensor]:
    """Those that linears multiply by, but for some."""
    nodes = (node for node in step.graph if node.op_type == "linear")
    names = dict.fromkeys(str(node.inputs[1].name) for node in nodes if node.inputs[1] is not None)
    wanted = [name for name in names if name not in (without or {})]
    return {name: torch.from_numpy(read(name).astype(np.float32)).bfloat16() for name in wanted}
