"""Optimisation profiles of a network over paged KV pools."""

from collections.abc import Mapping

from llmbuild.builder.targets.tensorrt.paged_limits import INPUT_SIZES, PagedLimits
from llmbuild.builder.targets.tensorrt.profiles import Range, Shape


def paged_profiles(shapes: Mapping[str, Shape], limits: PagedLimits) -> list[dict[str, Range]]:
    """The ranges of each input, of the context profile and of the decode profile, as their
    indices (`profiles.py`) say. shapes: of the network's inputs, -1 where a size may change."""
    one = _sizes(1, 1, 1)
    context = _sizes(limits.tokens, 1, limits.blocks)
    most = _sizes(limits.tokens, limits.sequences, limits.blocks)
    decode = _sizes(limits.sequences, limits.sequences, limits.blocks)
    return [_profile(shapes, one, context, most), _profile(shapes, one, decode, decode)]


def _sizes(tokens: int, sequences: int, blocks: int) -> dict[str, int]:
    return {"T": tokens, "S": sequences, "S + 1": sequences + 1, "B": blocks, "R": sequences}


def _profile(
    shapes: Mapping[str, Shape], least: dict[str, int], best: dict[str, int], most: dict[str, int]
) -> dict[str, Range]:
    def filled(name: str, shape: Shape, sizes: dict[str, int]) -> Shape:
        names = INPUT_SIZES.get(name, ())
        return tuple(sizes[names[axis]] if size == -1 else size for axis, size in enumerate(shape))

    return {
        name: Range(*(filled(name, shape, sizes) for sizes in (least, best, most)))
        for name, shape in shapes.items()
    }
