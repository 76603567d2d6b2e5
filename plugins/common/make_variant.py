"""Builds kernel variants from what their arguments are."""

from collections.abc import Mapping
from dataclasses import replace

from llmbuild.plugins.common.kernel_variant import JitFunction, KernelVariant
from llmbuild.plugins.common.tuning import Tiles

_COLUMNS_OF_A_WARP = 1024


def make_variant(
    name: str,
    kernel: JitFunction,
    types: Mapping[str, str | None],
    constants: Mapping[str, int | float | bool],
    tiles: Tiles,
    bytes_per_token: int | str = "",
    multiples_of_16: tuple[str, ...] = (),
) -> KernelVariant:
    """types: of every argument that isn't a constant, None for a tensor that isn't there. Tensors
    are promised to begin at a multiple of 16 bytes, which TensorRT's do, and the integers
    `multiples_of_16` to be that."""
    absent = {argument: None for argument, kind in types.items() if kind is None}
    kinds = {**types, **dict.fromkeys([*constants, *absent], "constexpr")}
    tensors = tuple(argument for argument, kind in types.items() if kind and kind[0] == "*")
    return KernelVariant(
        name=name,
        kernel=kernel,
        signature={argument: str(kinds[argument]) for argument in kernel.arg_names},
        constants={**constants, **absent},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        divisible_by_16=(*tensors, *multiples_of_16),
        bytes_per_token=bytes_per_token,
    )


def for_row_of(columns: int, tiles: Tiles) -> Tiles:
    """The tiles with warps enough for a program that holds a whole row in registers."""
    warps = 1 << (-(-columns // _COLUMNS_OF_A_WARP) - 1).bit_length()
    return replace(tiles, num_warps=max(tiles.num_warps, warps))
