"""What one ahead-of-time compiled kernel is: a Triton function with its types and constants."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class JitFunction(Protocol):
    """What @triton.jit makes of a function."""

    @property
    def arg_names(self) -> Sequence[str]: ...

    @property
    def cache_key(self) -> str:
        """Of its source, that of the functions it calls, and the globals that it reads."""

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Launches it, in the interpreter or on a GPU."""


@dataclass(frozen=True)
class KernelVariant:
    """One kernel with its types and constants: what is compiled ahead of time for each SM.

    `signature` names every argument in the kernel's order. A launcher passes those that aren't
    "constexpr", in that order.
    """

    name: str  # unique, such as "paged_attention_decode.fp16.kv_int8.d64.g3.b16"
    kernel: JitFunction
    signature: Mapping[str, str]  # argument -> "*fp16", "*i8", "i32", "constexpr"
    constants: Mapping[str, int | float | bool | None]  # of the constexpr arguments
    num_warps: int
    num_stages: int
    divisible_by_16: tuple[str, ...] = ()  # arguments (pointers, strides) promised to be so
    bytes_per_token: int | str = ""  # moved from and to memory, or an expression that says how many
