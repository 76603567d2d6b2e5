"""The step plan: kernel calls in order, with the buffers, weights and pools that each names."""

from dataclasses import dataclass
from enum import Enum


class Rows(Enum):
    """How many rows a buffer has in a step."""

    TOKENS = "T"
    LOGIT_ROWS = "R"


@dataclass(frozen=True)
class Buffer:
    """An fp32 activation [rows, width], row-major. `name` is the graph value's."""

    name: str
    rows: Rows
    width: int


@dataclass(frozen=True)
class View:
    """Columns [column, column + width) of a buffer."""

    buffer: Buffer
    column: int
    width: int

    @property
    def stride(self) -> int:
        """Floats from one row to the next."""
        return self.buffer.width


class Layout(Enum):
    """How a weight lies in the engine's weights file."""

    ROWS = "rows"  # as in the checkpoint, row-major
    TILES_OF_16 = "tiles_of_16"  # [ceil(N / 16)][K][16], padded with zero rows


@dataclass(frozen=True)
class PackedWeight:
    """A weight of the graph as the kernels read it. dtype: "fp32" or "bf16"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout


@dataclass(frozen=True)
class StepInput:
    """An int32 array of the step's batch, by the step graph's name."""

    name: str


@dataclass(frozen=True)
class Pool:
    """One layer's K or V pool."""

    layer: int
    kind: str  # "k" | "v"


@dataclass(frozen=True)
class Batch:
    """The whole ragged batch, for kernels that walk sequences."""


Argument = View | PackedWeight | StepInput | Pool | Batch | Rows | float | int | None


@dataclass(frozen=True)
class Call:
    """One kernel call: a C++ template with its arguments. Arguments of the plan's own types are
    bound to addresses by emission; numbers are literals and None is a null pointer."""

    kernel: str
    template: tuple[str | int, ...]
    arguments: tuple[Argument, ...]
    writes: tuple[Buffer, ...]

    @property
    def buffers(self) -> set[Buffer]:
        """Every buffer that the call touches."""
        views = {argument.buffer for argument in self.arguments if isinstance(argument, View)}
        return views | set(self.writes)


@dataclass(frozen=True)
class StepPlan:
    """A step graph lowered for the CPU. The buffer `logits` is the caller's, not the arena's."""

    calls: tuple[Call, ...]
    weights: tuple[PackedWeight, ...]  # in the order of their first use
    logits: Buffer
    kv_dtype: str
    kv_heads: int
    head_dim: int
    block_size: int
    num_layers: int
