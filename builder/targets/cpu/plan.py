"""The step plan: kernel calls in order, with the buffers, weights and pools that each names."""

from dataclasses import dataclass
from enum import Enum

from llmbuild.quant.grid import WeightGrid
from llmbuild.runtime.manifest import ALONE, KVLayout, Parallel


class Rows(Enum):
    """What the number of a buffer's rows goes with."""

    TOKENS = "T"
    LOGIT_ROWS = "R"
    ONE = "1"
    LONGEST = "longest"  # positions of the longest sequence that the limits allow


@dataclass(frozen=True)
class Buffer:
    """An activation [rows * rows_each, width], row-major, of 4-byte items. `name` is the graph
    value's. rows_each: 1, or the experts of a token. dtype: "int8_rows" are int8 activations with
    their scales and sums (plugins/common/int8_rows.h), whose width counts 4 bytes as an item."""

    name: str
    rows: Rows
    width: int
    rows_each: int = 1
    dtype: str = "fp32"  # or "int32", or "int8_rows"

    @property
    def count(self) -> "Count":
        """Its number of rows."""
        return Count(self.rows, self.rows_each)


@dataclass(frozen=True)
class Count:
    """A number of rows as a kernel's argument."""

    rows: Rows
    rows_each: int = 1


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


@dataclass(frozen=True)
class Expression:
    """An elementwise computation over views of equal rows. operation: an operator, or a function
    or activation of the kernels; a view one column wide is broadcast over the row."""

    operation: str
    operands: tuple["Expression | View | float", ...]
    width: int

    @property
    def buffers(self) -> set[Buffer]:
        parts = [operand for operand in self.operands if not isinstance(operand, float)]
        own = {part.buffer for part in parts if isinstance(part, View)}
        return own.union(*(part.buffers for part in parts if isinstance(part, Expression)))


class Layout(Enum):
    """How a weight lies in the engine's weights file."""

    ROWS = "rows"  # as in the checkpoint, row-major
    TILES_OF_16 = "tiles_of_16"  # [ceil(N / 16)][K][16], padded with zero rows; experts in turn
    CODES = (
        "codes"  # a quantised matrix: tiles of 16 rows, groups with their scales (pack_quantised)
    )


@dataclass(frozen=True)
class PackedWeight:
    """A weight of the graph as the kernels read it. dtype: "fp32", "bf16", or "int4", "int8" of a
    quantised matrix, which is named without its parts' suffix and has a grid."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    grid: WeightGrid | None = None


@dataclass(frozen=True)
class StepInput:
    """An int32 array of the step's batch, by the step graph's name."""

    name: str


@dataclass(frozen=True)
class WeightFrom:
    """A weight in rows, from one of its items on."""

    weight: PackedWeight
    item: int


@dataclass(frozen=True)
class Pool:
    """The K or V pool of a layer's run of KV heads."""

    layer: int
    run: int
    kind: str  # "k" | "v"


@dataclass(frozen=True)
class Batch:
    """The whole ragged batch, for kernels that walk sequences."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that the engine runs among."""


@dataclass(frozen=True)
class FirstToken:
    """The first token whose row of the embedding, and whose logit, the rank has."""


@dataclass(frozen=True)
class OwnRows:
    """Which rows of a larger table a table has: so many from `first` on."""

    first: FirstToken | int
    count: "Count | int"


Argument = (
    View
    | Expression
    | PackedWeight
    | WeightFrom
    | StepInput
    | Pool
    | Batch
    | Ranks
    | FirstToken
    | OwnRows
    | Count
    | float
    | int
    | None
)


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
        found = set(self.writes)
        for argument in self.arguments:
            if isinstance(argument, View):
                found.add(argument.buffer)
            elif isinstance(argument, Expression):
                found |= argument.buffers
        return found


@dataclass(frozen=True)
class StepPlan:
    """A step graph lowered for the CPU, for a rank of a stage. The buffer `logits` is the caller's,
    not the arena's; stages before the last have none. shared: the weights, by name, that lie in the
    file that several ranks read. hidden_size: columns of what a stage hands on."""

    calls: tuple[Call, ...]
    weights: tuple[PackedWeight, ...]  # in the order of their first use
    logits: Buffer | None
    kv: KVLayout
    hidden_size: int
    parallel: Parallel = ALONE
    stage: int = 0
    shared: frozenset[str] = frozenset()
