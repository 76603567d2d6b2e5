"""Linears as the quantised Hugging Face formats store them, encoded code by code from what the
formats specify, and what their codes stand for, by loops."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Linear:
    """codes [rows, columns] from 0 up; scales and zeros [rows, groups]; group: of each column."""

    bits: int
    codes: NDArray[np.int64]
    scales: NDArray[Any]
    zeros: NDArray[np.int64]
    group: NDArray[np.int64]

    def values(self) -> NDArray[np.float32]:
        """scale (code - zero), rounded once to float32."""
        exact = np.empty(self.codes.shape, np.float64)
        for row, column in np.ndindex(*self.codes.shape):
            group = self.group[column]
            code = int(self.codes[row, column]) - int(self.zeros[row, group])
            exact[row, column] = float(self.scales[row, group]) * code
        return exact.astype(np.float32)


def random_linear(
    rows: int,
    columns: int,
    *,
    bits: int = 4,
    group_size: int = -1,
    symmetric: bool = False,
    lowest_zero: int = 0,
    dtype: Any = np.float16,
    size: float = 0.05,
    seed: int = 0,
) -> Linear:
    """Random codes in groups of neighbours; symmetric: all zeros are 2^(bits - 1)."""
    rng = np.random.default_rng((seed, rows, columns))
    width = columns if group_size == -1 else group_size
    shape = (rows, -(-columns // width))
    scales = rng.uniform(0.1 * size, size, shape).astype(dtype)
    zeros = rng.integers(lowest_zero, 1 << bits, shape)
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    codes = rng.integers(0, 1 << bits, (rows, columns))
    return Linear(bits, codes, scales, zeros, np.arange(columns) // width)


def rounded_linear(weight: NDArray[np.float32], **kind: Any) -> Linear:
    """A weight, roughly, as random_linear's kinds: codes span 5 of its standard deviations."""
    empty = random_linear(*weight.shape, **kind)
    steps = (1 << empty.bits) - 1
    scales = np.full_like(empty.scales, 5 * weight.std() / steps)
    scale, zeros = scales[:, empty.group].astype(np.float64), empty.zeros[:, empty.group]
    codes = np.clip(np.rint(weight / scale) + zeros, 0, steps).astype(np.int64)
    return replace(empty, codes=codes, scales=scales)


def packed(codes: NDArray[np.int64], bits: int, order: Sequence[int] = ()) -> NDArray[np.int32]:
    """Runs of 32 / bits columns as words, the first lowest, missing ones 0. order: which of its run
    comes first, second, ... in a word."""
    count = 32 // bits
    words = np.zeros((len(codes), -(-codes.shape[1] // count)), np.uint32)
    for row, word in np.ndindex(*words.shape):
        for place in range(count):
            column = word * count + (order[place] if order else place)
            if column < codes.shape[1]:
                words[row, word] |= np.uint32(int(codes[row, column]) << (bits * place))
    return words.view(np.int32)


def gptq(linear: Linear, version: int = 1) -> dict[str, NDArray[Any]]:
    return {
        "qweight": np.ascontiguousarray(packed(linear.codes, linear.bits).T),
        "qzeros": packed(linear.zeros.T - (version == 1), linear.bits),
        "scales": np.ascontiguousarray(linear.scales.T),
        "g_idx": linear.group.astype(np.int32),
    }


def awq(linear: Linear) -> dict[str, NDArray[Any]]:
    return {
        "qweight": packed(linear.codes.T, 4, AWQ_ORDER),
        "qzeros": packed(linear.zeros.T, 4, AWQ_ORDER),
        "scales": np.ascontiguousarray(linear.scales.T),
    }


def pack_quantized(linear: Linear, symmetric: bool = False) -> dict[str, NDArray[Any]]:
    """compressed-tensors packs signed codes and zero points with half of the codes added."""
    tensors = {
        "weight_packed": packed(linear.codes, linear.bits),
        "weight_scale": linear.scales,
        "weight_shape": np.array(linear.codes.shape, np.int64),
    }
    if not symmetric:
        zeros = packed(linear.zeros.T, linear.bits)
        tensors["weight_zero_point"] = np.ascontiguousarray(zeros.T)
    return tensors


def int_quantized(linear: Linear, symmetric: bool = True) -> dict[str, NDArray[Any]]:
    half = 1 << (linear.bits - 1)
    tensors = {
        "weight": (linear.codes - half).astype(np.int8),
        "weight_scale": linear.scales,
    }
    if not symmetric:
        tensors["weight_zero_point"] = (linear.zeros - half).astype(np.int8)
    return tensors


def save_checkpoint(
    directory: Path, tensors: dict[str, NDArray[Any]], quantization_config: Any, **config: Any
) -> Path:
    """A Hugging Face directory of these tensors."""
    directory.mkdir(exist_ok=True)
    config |= {"quantization_config": quantization_config}
    (directory / "config.json").write_text(json.dumps(config))
    stored = {name: _torch(np.array(values, order="C")) for name, values in tensors.items()}
    save_file(stored, directory / "model.safetensors")
    return directory


def of_module(module: str, parts: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {f"{module}.{part}": values for part, values in parts.items()}


def _torch(values: NDArray[Any]) -> torch.Tensor:
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
