"""The bytes of the KV pools (plugins/common/kv_pool.h) in numpy: written by transposition."""

from math import gcd

import numpy as np
from kernel_harness import DTYPES
from numpy.typing import NDArray

KV_DTYPES = {**DTYPES, "int8_t": np.dtype(np.int8)}
Array = NDArray[np.generic]


def encode(
    k: Array, v: Array, scales: tuple[Array, Array] | None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The K and V pools of items [blocks, HKV, BS, D] and, for int8, scales [blocks, HKV, BS]."""
    blocks, heads, block_size, width = k.shape
    keys, cell, pair = _sizes(k.dtype, block_size)
    k = k.reshape(blocks, heads, block_size // keys, keys, width // cell, cell)
    v = v.reshape(blocks, heads, block_size // pair, pair, width)
    pools = []
    for index, items in enumerate((k.swapaxes(3, 4), v.swapaxes(3, 4))):
        pool = np.array(items, order="C").reshape(blocks, heads, -1).view(np.uint8)
        if scales is not None:
            padding = np.full((blocks, heads, -pool.shape[2] % 4), 77, np.uint8)
            own = np.ascontiguousarray(scales[index], np.float32).view(np.uint8)
            pool = np.concatenate([pool, padding, own], axis=2)
        pools.append(np.ascontiguousarray(pool))
    return pools[0], pools[1]


def decode(
    pools: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    dtype: np.dtype[np.generic],
    block_size: int,
    width: int,
) -> tuple[Array, Array, tuple[Array, Array]]:
    """encode's arguments again; scales are empty where items aren't int8."""
    keys, cell, pair = _sizes(dtype, block_size)
    size = block_size * width * dtype.itemsize
    items = [np.ascontiguousarray(pool[..., :size]).view(dtype) for pool in pools]
    at = size + -size % 4
    scales = [np.ascontiguousarray(pool[..., at:]).view(np.float32) for pool in pools]
    blocks, heads = pools[0].shape[:2]
    shape = (blocks, heads, block_size, width)
    k = items[0].reshape(blocks, heads, block_size // keys, width // cell, keys, cell)
    v = items[1].reshape(blocks, heads, block_size // pair, width, pair)
    return k.swapaxes(3, 4).reshape(shape), v.swapaxes(3, 4).reshape(shape), (scales[0], scales[1])


def _sizes(dtype: np.dtype[np.generic], block_size: int) -> tuple[int, int, int]:
    """Keys side by side, neighbours of D that lie together in K, and keys that do in V."""
    quantised = dtype == np.int8
    return gcd(block_size, 16), 2 if quantised else 1, gcd(block_size, 2) if quantised else 1
