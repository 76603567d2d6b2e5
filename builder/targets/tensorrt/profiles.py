"""Optimisation profiles: the sizes that a plan's kernels are chosen for."""

from dataclasses import dataclass

from llmbuild.builder.targets.tensorrt.limits import (
    HIDDEN,
    KV_LENGTHS,
    LOGIT_ROWS,
    POSITIONS,
    TOKEN_IDS,
    WRITE_INDICES,
    Limits,
)

CONTEXT, DECODE = 0, 1  # a profile's index in the plan

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Range:
    """The shapes of one input: least, what to be fastest at, and largest."""

    least: Shape
    best: Shape
    most: Shape


def profiles(shapes: dict[str, Shape], limits: Limits) -> list[dict[str, Range]]:
    """The ranges of each input, of the context profile and of the decode profile. shapes: of the
    network's inputs, -1 where a size may change."""
    context = _profile(shapes, (1, 1), (1, limits.chunk), (limits.batch, limits.chunk))
    decode = _profile(shapes, (1, 1), (limits.batch, 1), (limits.batch, 1))
    return [context, decode]


def _profile(shapes: dict[str, Shape], least: Shape, best: Shape, most: Shape) -> dict[str, Range]:
    """Each of the last three: B and L."""
    return {
        name: Range(*(_filled(name, shape, *sizes) for sizes in (least, best, most)))
        for name, shape in shapes.items()
    }


def _filled(name: str, shape: Shape, batch: int, length: int) -> Shape:
    if name in (TOKEN_IDS, POSITIONS):
        return (batch, length)
    if name in (KV_LENGTHS, WRITE_INDICES, LOGIT_ROWS):
        return (batch,)
    rows = batch * length if name == HIDDEN else batch  # others are caches
    return (rows, *shape[1:])
