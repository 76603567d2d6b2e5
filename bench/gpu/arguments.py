"""A kernel's launch arguments as the driver takes them: an array of pointers to values."""

import ctypes
from collections.abc import Mapping
from typing import Any

from llmbuild.builder.targets.gpu.triton_compiler import launch_arguments
from llmbuild.plugins.common.kernel_variant import KernelVariant

NULL_POINTERS = 2  # Triton's global and profile scratch, which follow a kernel's own arguments

_TYPES: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}  # the others point


class Packed:
    """Values in the order of the kernel's arguments; addresses for pointers. Owns their memory."""

    def __init__(self, variant: KernelVariant, values: Mapping[str, int]) -> None:
        arguments = launch_arguments(variant)
        names = {name for name, _ in arguments}
        assert names == {*values}, f"{variant.name}: {sorted(names ^ {*values})}"
        for name in variant.divisible_by_16:
            assert values[name] % 16 == 0, f"{variant.name} is promised that 16 divides {name}"
        self._values = [
            *(_TYPES.get(kind, ctypes.c_void_p)(values[name]) for name, kind in arguments),
            *(ctypes.c_void_p(None) for _ in range(NULL_POINTERS)),
        ]
        addresses = list(map(ctypes.addressof, self._values))
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._pointers)
