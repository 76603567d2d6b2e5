"""Mixed precision: which precision each part of a model gets, by the bytes that it takes and by
what it does to the model's output.

A multiple-choice knapsack whose losses add up: what parts do to the output one at a time is taken
for what they do together. Solved by dynamic programming over the bytes to spare.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmbuild.quant.grid import WeightGrid

MAX_UNITS = 1 << 14  # that the bytes to spare are counted in


@dataclass(frozen=True)
class Option:
    """A precision that an item may get. num_bytes: what the item takes then. kl_nats: what that
    does to the output when nothing else is changed, in nats a token."""

    precision: str
    num_bytes: int
    kl_nats: float


Items = Mapping[str, Sequence[Option]]
Choice = dict[str, Option]


def total_bytes(choice: Mapping[str, Option]) -> int:
    return sum(option.num_bytes for option in choice.values())


def total_kl(choice: Mapping[str, Option]) -> float:
    return sum(option.kl_nats for option in choice.values())


def fewest_bytes(items: Items) -> int:
    """What the items take when each has its smallest option."""
    return sum(min(option.num_bytes for option in options) for options in items.values())


def least_kl(items: Items, budget_bytes: int) -> Choice:
    """An option for each item, within the budget, with the least summed KL.

    budget_bytes: at least `fewest_bytes(items)`. Exact where the bytes to spare are at most
    MAX_UNITS times the greatest divisor that all differences of bytes share. Otherwise they are
    counted in units of a MAX_UNITS-th, rounded up, and the choice is at least as good as the best
    within a budget of one unit less for each item.
    """
    table = _Table(items, budget_bytes)
    return table.choice(table.num_units)


def least_bytes(items: Items, max_kl_nats: float) -> Choice:
    """An option for each item, with a summed KL of at most `max_kl_nats`, in the fewest bytes.

    max_kl_nats: at least what the best option of every item amounts to. Exact as `least_kl` is, or
    at most one unit for each item from it.
    """
    table = _Table(items, None)
    enough = table.least[-1] <= max_kl_nats
    assert enough[-1], "no choice is that good"
    return table.choice(int(np.argmax(enough)))


def matrix_bytes(shape: Sequence[int], grid: WeightGrid | None, item_bytes: int) -> int:
    """A matrix on a grid, or without one in items of so many bytes."""
    size = math.prod(shape)
    if grid is None:
        return size * item_bytes
    groups = size // grid.columns_of(shape[-1])
    of_group = grid.scale_dtype.itemsize + 2 * grid.has_minima + grid.zero_points
    return size * grid.bits // 8 + groups * of_group


class _Table:
    """least[i, u]: the least summed KL of the first i items when they take at most u units more
    than their fewest bytes; units are rounded up, so that a budget is never exceeded. Without a
    budget, every choice has its place."""

    def __init__(self, items: Items, budget_bytes: int | None) -> None:
        most = sum(max(option.num_bytes for option in options) for options in items.values())
        spare = (most if budget_bytes is None else min(budget_bytes, most)) - fewest_bytes(items)
        assert spare >= 0, "the budget is below the fewest bytes"
        self._options = {
            name: sorted(options, key=lambda option: (option.num_bytes, option.kl_nats))
            for name, options in items.items()
        }
        excesses = [
            option.num_bytes - options[0].num_bytes
            for options in self._options.values()
            for option in options
        ]
        divisor = math.gcd(*excesses) or 1
        self._unit = divisor if spare // divisor <= MAX_UNITS else -(-spare // MAX_UNITS)
        self.num_units = spare // self._unit
        if budget_bytes is None:
            self.num_units = sum(self._units(each[-1], each) for each in self._options.values())
        self.least = np.zeros((len(items) + 1, self.num_units + 1))
        self._chosen = np.zeros((len(items), self.num_units + 1), np.intp)
        for index, options in enumerate(self._options.values()):
            self._add(index, options)

    def _add(self, index: int, options: Sequence[Option]) -> None:
        before, after = self.least[index], self.least[index + 1]
        after[:] = before + options[0].kl_nats
        for number, option in enumerate(options[1:], start=1):
            units = self._units(option, options)
            if units > self.num_units:
                break
            with_it = before[: len(before) - units] + option.kl_nats
            is_better = with_it < after[units:]
            after[units:][is_better] = with_it[is_better]
            self._chosen[index, units:][is_better] = number

    def _units(self, option: Option, options: Sequence[Option]) -> int:
        return -(-(option.num_bytes - options[0].num_bytes) // self._unit)

    def choice(self, units: int) -> Choice:
        """What the last row's entry stands for."""
        chosen: Choice = {}
        for index, (name, options) in reversed([*enumerate(self._options.items())]):
            chosen[name] = options[self._chosen[index, units]]
            units -= self._units(chosen[name], options)
        return {name: chosen[name] for name in self._options}
