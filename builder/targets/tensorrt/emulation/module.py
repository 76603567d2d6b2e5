"""What stands for TensorRT's module: its types, its weights, and the names of its enumerations."""

import builtins
import ctypes
from enum import Enum

import numpy as np
import torch
from ml_dtypes import bfloat16
from numpy.typing import NDArray


class DataType(Enum):
    float32 = "fp32"
    float16 = "fp16"
    bfloat16 = "bf16"
    fp8 = "fp8"
    int64 = "int64"
    int32 = "int32"
    int8 = "int8"
    int4 = "int4"
    bool = "bool"

    @property
    def is_float(self) -> builtins.bool:
        """Whether there is arithmetic of it; FP8 may only be dequantised."""
        return self is not DataType.fp8 and TORCH_TYPES[self].is_floating_point

    @property
    def bits(self) -> int:
        return 4 if self is DataType.int4 else 8 * TORCH_TYPES[self].itemsize


# What values of a type are held as; int4's numbers have a byte each.
TORCH_TYPES = {
    DataType.float32: torch.float32,
    DataType.float16: torch.float16,
    DataType.bfloat16: torch.bfloat16,
    DataType.fp8: torch.float8_e4m3fn,
    DataType.int64: torch.int64,
    DataType.int32: torch.int32,
    DataType.int8: torch.int8,
    DataType.int4: torch.int8,
    DataType.bool: torch.bool,
}


class Weights:
    """An array's memory, which has to live as long as this."""

    def __init__(self, dtype: DataType, address: int, count: int) -> None:
        self.dtype, self.count = dtype, count
        memory = (ctypes.c_uint8 * -(-count * dtype.bits // 8)).from_address(address)
        self._bytes = torch.from_numpy(np.ctypeslib.as_array(memory))

    def values(self) -> torch.Tensor:
        """Its numbers, [count]."""
        if self.dtype is DataType.int4:  # the low half of a byte first
            halves = torch.stack([self._bytes & 15, self._bytes >> 4], dim=-1).flatten()
            return (halves[: self.count] ^ 8).to(torch.int8) - 8
        return self._bytes.view(TORCH_TYPES[self.dtype])


class Names:
    """Enumerations whose members are their own names: ElementWiseOperation.SUM is "SUM"."""

    def __getattr__(self, name: str) -> str:
        return name


class EmulatedTensorRT:
    """Stands for the module."""

    Weights = Weights
    ElementWiseOperation = UnaryOperation = ActivationType = ReduceOperation = Names()
    MatrixOperation = KVCacheMode = AttentionNormalizationOp = CausalMaskKind = Names()
    CollectiveOperation = Names()

    def __getattr__(self, name: str) -> DataType:
        return DataType[name]


def to_torch(values: NDArray[np.generic]) -> torch.Tensor:
    """The same numbers, and the same memory where that can be written; numpy has bfloat16 only as
    an extension type."""
    values = np.require(values, requirements=["C", "W"])
    if values.dtype == bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def to_numpy(values: torch.Tensor) -> NDArray[np.generic]:
    values = values.contiguous()
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(bfloat16)
    return values.numpy()
