"""KV pools by their addresses, since a TensorRT plugin can't write to an input.

A network has the address of each of a pool's tensors as an input, int64 [1], and a kernel turns it
into a pointer of the type that a constant says.
"""

from collections.abc import Mapping
from dataclasses import replace

import triton
import triton.language as tl

from llmbuild.plugins.common.kernel_variant import JitFunction, KernelVariant

POOL_TENSORS = tuple(f"{of}_{part}" for of in "kv" for part in ("items", "scales", "minima"))

# What a kernel's <TENSOR>_TYPE says of the tensor at an address.
ADDRESSED = {"*fp16": 0, "*bf16": 1, "*fp32": 2, "*i8": 3, "*u8": 4, "*fp8e4nv": 5}
_FP16 = tl.constexpr(ADDRESSED["*fp16"])
_BF16 = tl.constexpr(ADDRESSED["*bf16"])
_FP32 = tl.constexpr(ADDRESSED["*fp32"])
_I8 = tl.constexpr(ADDRESSED["*i8"])
_U8 = tl.constexpr(ADDRESSED["*u8"])


@triton.jit
def at_address(address, TYPE: tl.constexpr):
    """The tensor at an address that stands at a multiple of 16 bytes; None for None."""
    if address is None:
        pointer = None
    else:
        number = tl.load(address)
        if TYPE == _FP16:
            pointer = number.to(tl.pointer_type(tl.float16))
        elif TYPE == _BF16:
            pointer = number.to(tl.pointer_type(tl.bfloat16))
        elif TYPE == _FP32:
            pointer = number.to(tl.pointer_type(tl.float32))
        elif TYPE == _I8:
            pointer = number.to(tl.pointer_type(tl.int8))
        elif TYPE == _U8:
            pointer = number.to(tl.pointer_type(tl.uint8))
        else:
            pointer = number.to(tl.pointer_type(tl.float8e4nv))
        pointer = tl.multiple_of(pointer, 16)
    return pointer


def by_address(
    inner: KernelVariant,
    kernel: JitFunction,
    types: Mapping[str, str],
    constants: Mapping[str, int],
) -> KernelVariant:
    """The variant of a kernel that takes what `inner`'s takes, but the pools by their addresses.
    types, constants: of arguments that it has besides."""
    types = {**inner.signature, **types}
    pointers = {name: types[name] for name in POOL_TENSORS if types[name] != "constexpr"}
    types |= dict.fromkeys(pointers, "*i64")
    values = {
        **inner.constants,
        **{f"{name.upper()}_TYPE": 0 for name in POOL_TENSORS},
        **{f"{name.upper()}_TYPE": ADDRESSED[kind] for name, kind in pointers.items()},
        **constants,
    }
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    tensors = (name for name, kind in signature.items() if kind[0] == "*")
    return replace(
        inner,
        name=f"{inner.name}.by_address",
        kernel=kernel,
        signature=signature,
        constants={name: values[name] for name, kind in signature.items() if kind == "constexpr"},
        divisible_by_16=tuple(tensors),
    )
