"""A shard's tensors: what a rank has of each, read without the rest of it."""

from collections.abc import Sequence

from llmbuild.builder.models.canonical import EMBEDDING, HEAD, expected_tensors, tensor_splits
from llmbuild.builder.models.config import DecoderConfig
from llmbuild.builder.shard.shard import Shard, own_ranges
from llmbuild.quant.reader import PartReader, Ranges, Tensor


class ShardReader:
    """A PartReader of a rank's own part of canonical tensors. ranges: of each axis of each tensor,
    those that the rank has."""

    def __init__(self, read: PartReader, shard: Shard, config: DecoderConfig) -> None:
        """read: of the whole model. config: the whole model's."""
        self._read = read
        shapes, splits = expected_tensors(config), tensor_splits(config)
        shapes.setdefault(HEAD, shapes[EMBEDDING])
        self.ranges = {
            name: own_ranges(shard, config, shape, splits[name]) for name, shape in shapes.items()
        }

    def __call__(self, name: str) -> Tensor:
        return self._read.read_part(name, self.ranges[name])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(sum(end - begin for begin, end in axis) for axis in self.ranges[name])

    def has_rows(self, name: str) -> bool:
        return self._read.has_rows(name)

    def read_part(self, name: str, parts: Sequence[Ranges]) -> Tensor:
        own = self.ranges[name]
        return self._read.read_part(name, [within(o, p) for o, p in zip(own, parts, strict=True)])


def within(own: Ranges, wanted: Ranges) -> Ranges:
    """Where ranges of what `own` takes lie in what it takes them from."""
    found: list[tuple[int, int]] = []
    for begin, end in wanted:
        start = 0  # of each own range among all
        for first, last in own:
            low, high = max(begin, start), min(end, start + last - first)
            if low < high:
                found.append((first + low - start, first + high - start))
            start += last - first
    return tuple(found)
