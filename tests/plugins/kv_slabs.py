"""KV pools (plugins/common/kv_pool.h) in numpy: what each type of item keeps of a row, and the
bytes of pools, made by transposition."""

from dataclasses import dataclass
from math import gcd

import ml_dtypes
import numpy as np
from int8_rows import quantise
from kernel_harness import DTYPES
from numpy.typing import NDArray

BF16 = np.dtype(ml_dtypes.bfloat16)
KV_DTYPES = {**DTYPES, "int8_t": np.dtype(np.int8), "int8_static": np.dtype(np.int8)}
KV_DTYPES |= {"int4x2": np.dtype(np.uint8)}
RECIPE_DTYPES = dict(zip(KV_DTYPES, ("fp32", "bf16", "int8", "int8-static", "int4"), strict=True))
UNIFORM = [(kind, kind) for kind in KV_DTYPES]
MIXED = [(k, v) for k in KV_DTYPES for v in KV_DTYPES if k != v]
RANGE_DTYPES = {"int8_t": [np.dtype(np.float32)], "int4x2": [BF16, BF16]}  # scales, then minima
Array = NDArray[np.generic]


@dataclass
class Pool:
    """K or V of a type of items: elements or codes [blocks, HKV, BS, D], and the scales and minima
    [blocks, HKV, BS] that they are read with, 1 and 0 where the pool has none."""

    kind: str
    items: Array
    scales: NDArray[np.float32]
    minima: NDArray[np.float32]

    @classmethod
    def unwritten(cls, kind: str, shape: tuple[int, ...]) -> "Pool":
        """NaN, or codes that make NaN where there are scales."""
        codes = {"int8_t": -111, "int8_static": -111, "int4x2": 13}
        items = np.full(shape, codes.get(kind, np.nan), KV_DTYPES[kind])
        ranges = len(RANGE_DTYPES.get(kind, []))
        scales = np.full(shape[:-1], np.nan if ranges else 1, np.float32)
        return cls(
            kind, items, scales, np.full(shape[:-1], np.nan if ranges > 1 else 0, np.float32)
        )

    @property
    def elements(self) -> NDArray[np.float64]:
        codes = self.items.astype(np.float64) * self.scales[..., None]
        return codes + self.minima[..., None]

    def put(self, block: int, offset: int, rows: "Pool") -> None:
        """A token's rows of all heads, as `keep` gives them."""
        self.items[block, :, offset] = rows.items
        self.scales[block, :, offset] = rows.scales
        self.minima[block, :, offset] = rows.minima

    def get(self, slots: list[tuple[int, int]]) -> "Pool":
        """Rows [tokens, HKV, D] of these slots."""
        parts = (self.items, self.scales, self.minima)
        return Pool(self.kind, *(np.stack([part[b, :, at] for b, at in slots]) for part in parts))

    def encode(self, of: str) -> NDArray[np.uint8]:
        """The pool's bytes, [blocks, HKV, bytes], as those of "keys" or of "values"."""
        blocks, heads = self.items.shape[:2]
        ordered = _ordered(self.items, of, self.kind)
        if self.kind == "int4x2":
            ordered = ordered[..., ::2] | ordered[..., 1::2] << 4
        body = np.ascontiguousarray(ordered).view(np.uint8)
        parts = [body, np.full((blocks, heads, -body.shape[2] % 4), 77, np.uint8)]
        ranges = zip(RANGE_DTYPES.get(self.kind, []), (self.scales, self.minima), strict=False)
        parts += [np.ascontiguousarray(values.astype(d)).view(np.uint8) for d, values in ranges]
        return np.concatenate(parts, axis=2)

    @classmethod
    def decode(cls, kind: str, raw: NDArray[np.uint8], of: str, shape: tuple[int, ...]) -> "Pool":
        """The pool [blocks, HKV, BS, D] of such bytes."""
        pool = cls.unwritten(kind, shape)
        size = shape[2] * shape[3] * pool.items.itemsize // (2 if kind == "int4x2" else 1)
        body = np.ascontiguousarray(raw[..., :size])
        if kind == "int4x2":
            body = np.stack([body & 15, body >> 4], axis=-1).reshape(*shape[:2], -1)
        places = _ordered(np.arange(shape[2] * shape[3]).reshape(1, 1, *shape[2:]), of, kind)
        pool.items.reshape(*shape[:2], -1)[..., places.ravel()] = body.view(pool.items.dtype)
        at = size + -size % 4
        for dtype, values in zip(
            RANGE_DTYPES.get(kind, []), (pool.scales, pool.minima), strict=False
        ):
            end = at + shape[2] * dtype.itemsize
            values[:] = np.ascontiguousarray(raw[..., at:end]).view(dtype).astype(np.float32)
            at = end
        return pool


def _ordered(items: Array, of: str, kind: str) -> Array:
    """Items [blocks, HKV, BS, D] in the order of a slab, [blocks, HKV, BS * D]."""
    blocks, heads, block_size, width = items.shape
    is_plain = kind in DTYPES
    if of == "keys":
        keys, cell = gcd(block_size, 16), 1 if is_plain else 2
        tiles = items.reshape(blocks, heads, block_size // keys, keys, width // cell, cell)
    else:
        pair = 1 if is_plain else gcd(block_size, 2)
        tiles = items.reshape(blocks, heads, block_size // pair, pair, width, 1)
    return np.array(tiles.swapaxes(3, 4), order="C").reshape(blocks, heads, -1)


def keep(kind: str, x: NDArray[np.float32]) -> Pool:
    """What a pool keeps of finite rows x [..., D], operation by operation in fp32."""
    items, rows = np.empty(x.shape, KV_DTYPES[kind]), x.reshape(-1, x.shape[-1])
    scales, minima = np.ones(len(rows), np.float32), np.zeros(len(rows), np.float32)
    if kind == "int8_t":
        codes, scales = quantise(rows, x.shape[-1])
    elif kind == "int8_static":
        codes = np.clip(np.rint(rows), -127, 127)
    elif kind == "int4x2":
        minima = rows.min(1).astype(BF16).astype(np.float32)
        steps = np.maximum((rows.max(1) - minima) / np.float32(15), 0)
        scales = steps.astype(BF16).astype(np.float32)
        with np.errstate(divide="ignore"):
            inverse = np.float32(1) / scales
        inverse[~np.isfinite(inverse)] = 0
        codes = np.clip(np.rint((rows - minima[:, None]) * inverse[:, None]), 0, 15)
    else:
        codes = rows
    items.reshape(rows.shape)[:] = codes.astype(items.dtype)
    return Pool(kind, items, scales.reshape(x.shape[:-1]), minima.reshape(x.shape[:-1]))
