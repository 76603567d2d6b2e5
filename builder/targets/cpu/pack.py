"""Write an engine's weights files: each weight in its kernels' layout, one at a time.

A file is safetensors: flat tensors, each padded to a multiple of 64 bytes, in the order of
their first use, so every one starts 64-byte aligned in the mapped file.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmbuild.builder.graph.materialise import NUMPY_DTYPES
from llmbuild.builder.targets.cpu.pack_quantised import pack_quantised, quantised_bytes
from llmbuild.builder.targets.cpu.plan import Layout, PackedWeight, StepPlan
from llmbuild.quant.grid import QuantisedMatrix
from llmbuild.quant.reader import Tensor

ALIGNMENT_BYTES = 64
TILE_ROWS = 16
PART_BYTES = 4 << 20
_SAFETENSORS_DTYPES = {"fp32": ("F32", 4), "bf16": ("BF16", 2)}  # and bytes of an item


def packed_bytes(weight: PackedWeight) -> int:
    """Bytes of a weight in the file, padding included."""
    if weight.grid is not None:
        *experts, rows, columns = weight.shape
        return _aligned(math.prod(experts) * quantised_bytes(weight.grid, rows, columns))
    items = math.prod(weight.shape)
    if weight.layout is Layout.TILES_OF_16:
        *experts, rows, columns = weight.shape
        items = math.prod(experts) * -(-rows // TILE_ROWS) * TILE_ROWS * columns
    return _aligned(items * NUMPY_DTYPES[weight.dtype].itemsize)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def weight_offsets(plan: StepPlan) -> dict[str, int]:
    """Byte offset of each weight from the start of its file's data: the shared ones lie in a file
    of their own."""
    own = [weight for weight in plan.weights if weight.name not in plan.shared]
    shared = [weight for weight in plan.weights if weight.name in plan.shared]
    return _offsets(own) | _offsets(shared)


def _offsets(weights: Sequence[PackedWeight]) -> dict[str, int]:
    """Of weights that lie one after the other."""
    sizes = map(packed_bytes, weights)
    return dict(zip((w.name for w in weights), accumulate(sizes, initial=0), strict=False))


def pack(weight: PackedWeight, blocks: Iterable[Tensor]) -> Iterator[NDArray[np.generic]]:
    """The weight's values in its layout and padded, in parts, so that no whole need exist.

    blocks: its rows, a multiple of 16 in each block but the last; or of a stack, its matrices.
    """
    written = 0
    for block in blocks:
        for part in _parts(weight, block):
            yield part
            written += part.nbytes
    yield np.zeros(packed_bytes(weight) - written, np.uint8)


def _parts(weight: PackedWeight, block: Tensor) -> Iterable[NDArray[np.generic]]:
    if isinstance(block, QuantisedMatrix):
        return pack_quantised(block)
    return _tiles(block) if weight.layout is Layout.TILES_OF_16 else [block]


def _tiles(values: NDArray[np.generic]) -> Iterator[NDArray[np.generic]]:
    """Tiles of 16 rows, columns outermost within each; a stack's matrices one after the other."""
    *_, rows, columns = values.shape
    tile_bytes = TILE_ROWS * columns * values.itemsize
    part_rows = max(1, PART_BYTES // tile_bytes) * TILE_ROWS
    for matrix in values.reshape(-1, rows, columns):
        for begin in range(0, rows, part_rows):
            part = matrix[begin : begin + part_rows]
            tiles = -(-len(part) // TILE_ROWS)
            padded = np.zeros((tiles * TILE_ROWS, columns), values.dtype)
            padded[: len(part)] = part
            tiled = padded.reshape(tiles, TILE_ROWS, columns).transpose(0, 2, 1)
            yield np.ascontiguousarray(tiled)


def write_weights(
    weights: Sequence[PackedWeight],
    read: Callable[[PackedWeight], Iterable[Tensor]],
    path: Path,
    on_written: Callable[[int], None],
) -> int:
    """Write one file of weights; returns the bytes of data, the file's header not counted.

    read: gives a weight's values in blocks, as `pack` takes them. on_written: is told the bytes of
    each part written.
    """
    offsets = _offsets(weights)
    header: dict[str, object] = {"__metadata__": {"layout": "llmbuild-cpu-1"}}
    for weight in weights:
        begin, size = offsets[weight.name], packed_bytes(weight)
        dtype, item_bytes = _SAFETENSORS_DTYPES.get(weight.dtype, ("U8", 1))
        header[weight.name] = {
            "dtype": dtype,
            "shape": [size // item_bytes],
            "data_offsets": [begin, begin + size],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for weight in weights:
            for part in pack(weight, read(weight)):
                file.write(part.view(np.uint8).data)
                on_written(part.nbytes)
    return sum(map(packed_bytes, weights))
