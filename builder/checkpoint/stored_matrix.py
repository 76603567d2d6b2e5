"""Matrices of a Hugging Face checkpoint that are stored as codes: what all formats share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.checkpoint.base import TensorInfo
from llmbuild.builder.checkpoint.safetensors import READABLE_DTYPES, SafetensorsCheckpoint
from llmbuild.errors import CheckpointError
from llmbuild.quant.grid import GROUP_UNIT, QuantisedMatrix, WeightGrid

FLOATS = tuple(READABLE_DTYPES)
_PART_ITEMS = 1 << 20  # dequantised at a time, so that little is held beside the result
T = TypeVar("T", bound=np.generic)


class Parts:
    """The stored tensors of one linear, by what stands after its name."""

    def __init__(self, checkpoint: SafetensorsCheckpoint, module: str) -> None:
        self.module = module
        self._checkpoint = checkpoint

    def name(self, part: str) -> str:
        return f"{self.module}.{part}"

    def __contains__(self, part: str) -> bool:
        return self.name(part) in self._checkpoint.tensors

    def stored_dtype(self, part: str) -> str | None:
        info = self._checkpoint.tensors.get(self.name(part))
        return None if info is None else info.dtype

    def info(self, part: str, dtypes: Sequence[str], rank: int = 2) -> TensorInfo:
        """Raises CheckpointError where the part is missing, or of another dtype or rank."""
        info = self._checkpoint.tensors.get(self.name(part))
        if info is None:
            raise CheckpointError(
                f"{self.module} is stored quantised, but {self.name(part)} is missing; the "
                "checkpoint isn't whole"
            )
        if info.dtype not in dtypes or len(info.shape) != rank or 0 in info.shape:
            raise CheckpointError(
                f"{self.name(part)} is {info.dtype} of shape {info.shape}; it must be "
                f"{' or '.join(dtypes)} of {rank} dimensions, none of them empty"
            )
        return info

    def check(self, part: str, dtypes: Sequence[str], *shapes: tuple[int, ...]) -> None:
        """Raises CheckpointError unless the part is there, of such a dtype and of such a shape."""
        stored = self._checkpoint.tensors.get(self.name(part))
        if stored is None or stored.dtype not in dtypes:
            self.info(part, dtypes, len(shapes[0]))
        elif stored.shape not in shapes:
            raise CheckpointError(
                f"{self.name(part)} is of shape {stored.shape}; with the rest of {self.module} and "
                f"the quantization_config it must be {' or '.join(map(str, shapes))}"
            )

    def read(self, part: str) -> NDArray[Any]:
        return self._checkpoint.read_stored(self.name(part))


class StoredMatrix(ABC):
    """A linear's weight [rows, columns] of `bits` bits: w = scale (code - zero), where scale and
    zero are those of the row and the group that a column belongs to.

    group_size: columns of a group, 0 for whole rows. symmetric: the zero is 2^(bits - 1) in all.
    A format derives from it, and checks the shapes of all parts in its constructor.
    """

    scale_part: str
    parts: Parts
    shape: tuple[int, int]
    bits: int
    group_size: int
    symmetric: bool

    @abstractmethod
    def names(self) -> list[str]:
        """The stored tensors that it is made of."""

    @abstractmethod
    def codes(self) -> NDArray[np.uint8]:
        """[rows, columns], from 0 to 2^bits - 1."""

    @abstractmethod
    def scales(self) -> NDArray[Any]:
        """[rows, groups], of a float type, as stored."""

    @abstractmethod
    def stored_zeros(self) -> NDArray[np.uint8] | None:
        """[rows, groups], as codes; None if there are none, which only symmetric codes allow."""

    @abstractmethod
    def group_index(self) -> NDArray[np.integer[Any]] | None:
        """The group of each column [columns], None if groups are of neighbours."""

    @property
    def groups(self) -> int:
        """Groups of a row; the last may be narrower than the others."""
        return -(-self.shape[1] // self.group_size) if self.group_size else 1

    def zeros(self) -> NDArray[np.uint8] | None:
        """[rows, groups], None of symmetric codes. Raises CheckpointError for zero points that the
        config's symmetry contradicts."""
        zeros = self.stored_zeros()
        if not self.symmetric or zeros is None:
            return zeros
        middle = 1 << (self.bits - 1)
        if (zeros != middle).any():
            other = zeros[zeros != middle][0]
            raise CheckpointError(
                f"{self.parts.module} has a zero point of {other}, but the quantization_config "
                f"says that it is symmetric, so all must be {middle}; correct the config"
            )
        return None

    def group_of_columns(self) -> NDArray[np.integer[Any]]:
        """The group of each column, [columns]."""
        index = self.group_index()
        return self._in_order() if index is None else index

    def grid(self) -> tuple[WeightGrid | None, str]:
        """The grid of ours that holds it, or None and the reason why none does. Reads scales unless
        they are float16, and the columns' groups."""
        columns, width = self.shape[1], self.group_size or self.shape[1]
        if width == columns:
            width = 0
        grid = WeightGrid(self.bits, width, self.symmetric, zero_points=not self.symmetric)
        if not grid.fits(columns) or width % GROUP_UNIT:
            return None, (
                f"groups of {self.group_size or columns} columns in rows of {columns} aren't "
                f"multiples of {GROUP_UNIT} that divide the row"
            )
        if (self.group_of_columns() != self._in_order()).any():
            return None, "their groups aren't of neighbouring columns (activation order)"
        if not self._float16_holds_scales():
            return None, "float16 doesn't hold their scales exactly"
        return grid, ""

    def matrix(self, grid: WeightGrid) -> QuantisedMatrix:
        """The codes as they are stored, on the grid that `grid` gave."""
        scales = self.scales().astype(np.float16)
        return QuantisedMatrix(grid, self.codes(), scales, None, self.zeros())

    def values(self) -> NDArray[np.float32]:
        """What the codes stand for; only scales of more than 16 bits make it round."""
        zeros, scales, group = self.zeros(), self.scales(), self.group_of_columns()
        codes = self.codes()
        values = np.empty(self.shape, np.float32)
        step = max(1, _PART_ITEMS // self.shape[1])
        for begin in range(0, self.shape[0], step):
            part = slice(begin, begin + step)
            values[part] = codes[part]
            values[part] -= 1 << (self.bits - 1) if zeros is None else zeros[part][:, group]
            values[part] *= scales[part].astype(np.float32)[:, group]
        return values

    def _float16_holds_scales(self) -> bool:
        if self.parts.stored_dtype(self.scale_part) == "F16":
            return True
        scales = self.scales()
        with np.errstate(over="ignore"):
            rounded = scales.astype(np.float16)
        return bool((rounded.astype(np.float32) == scales.astype(np.float32)).all())

    def _in_order(self) -> NDArray[np.integer[Any]]:
        return np.arange(self.shape[1]) // (self.group_size or self.shape[1])


def unpack(
    words: NDArray[np.generic], bits: int, axis: int, order: Sequence[int] | None = None
) -> NDArray[np.uint8]:
    """Codes out of 32-bit words, lowest bits first, along an axis of a matrix. order: where the
    codes of a word lie among their 32 / bits; one after the other if it isn't given."""
    count = 32 // bits
    shape = [size * count if i == axis else size for i, size in enumerate(words.shape)]
    codes = np.empty(shape, np.uint8)
    for place, lies_at in enumerate(order or range(count)):
        chosen = [slice(None), slice(None)]
        chosen[axis] = slice(lies_at, None, count)
        codes[tuple(chosen)] = words.view(np.uint32) >> np.uint32(bits * place) & ((1 << bits) - 1)
    return codes


def transposed(values: NDArray[T]) -> NDArray[T]:
    """[out, in] of [in, out], in memory, too."""
    return np.ascontiguousarray(values.T)
