"""Contract one: the step graph, an ONNX model in our op domain whose weights are only named.

Inputs and output are those of docs/step-graph.md. A weight is an initialiser without data; its
`Weight` says which canonical tensors it is made of, so a pass may merge weights without ever
reading them.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmbuild.builder.shard.shard import Shard
from llmbuild.quant.grid import WeightGrid

SHAPES = {  # every input is int32; T tokens, S sequences, B blocks of the longest, R wanted rows
    "token_ids": ("T",),
    "positions": ("T",),
    "query_start": ("S + 1",),
    "kv_lengths": ("S",),
    "block_tables": ("S", "B"),
    "logit_rows": ("R",),
}
INPUTS = tuple(SHAPES)
OUTPUT = "logits"
# In a stage of several: the activations of the stage before, beside INPUTS, and those for the next
# stage, in place of OUTPUT; both fp32 [T, hidden].
HIDDEN, NEXT_HIDDEN = "hidden", "next_hidden"


# The parts of a quantised matrix.
CODES, SCALES, MINIMA, ZEROS = "codes", "scales", "minima", "zeros"


@dataclass(frozen=True)
class Weight:
    """A weight of the graph: canonical tensors, concatenated along their first axis.

    grid: of a matrix that is quantised; the graph has its codes, scales and, where the grid has
    such, minima or zeros as a weight each, named MATRIX.codes and so on, of which this is `part`.
    """

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    # "fp32" | "bf16"; of codes "uint8" | "fp8", of zeros "uint8", of scales and minima "fp16", but
    # of scales of fp8 "fp32"
    dtype: str
    grid: WeightGrid | None = None
    part: str = ""


@dataclass(frozen=True)
class StepGraph:
    """One step of the decoder, or of a rank's shard of it. `constants` holds the initialisers that
    no checkpoint has. A shard's weights have their own shapes, and the sources' whole names."""

    model: ir.Model
    weights: dict[str, Weight]
    constants: dict[str, NDArray[np.float32]]
    shard: Shard | None = None  # None: the whole model

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph's inputs, in order."""
        is_first = self.shard is None or self.shard.is_first_stage
        return INPUTS if is_first else (*INPUTS, HIDDEN)

    @property
    def output(self) -> str:
        """Name of the graph's output."""
        return OUTPUT if self.shard is None or self.shard.is_last_stage else NEXT_HIDDEN

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    def save(self, path: Path) -> None:
        """Write the graph as ONNX, weights and constants as inputs with shapes, without data."""
        model = self.model.clone()
        for name, value in list(model.graph.initializers.items()):
            del model.graph.initializers[name]
            if name in self.weights:
                value.metadata_props["sources"] = " ".join(self.weights[name].sources)
            value.const_value = None
            model.graph.inputs.append(value)
        path.parent.mkdir(parents=True, exist_ok=True)
        ir.save(model, path)
