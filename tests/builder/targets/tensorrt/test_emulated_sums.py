"""Ranks whose networks add up what they have together: none waits for one that has ended."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.targets.tensorrt.emulation.ranks import _Sum
from llmbuild.errors import InternalError


def adding(total: Callable[[Any], Any], values: list[int]) -> Callable[[], Any]:
    return lambda: {"sums": [total(value) for value in values]}


def test_all_get_every_sum_again_and_again() -> None:
    ranks = _Sum(3)
    for _ in range(3):
        made = ranks.run([adding(ranks.total, [n, 10 * n, 100 * n]) for n in (1, 2, 4)])
        assert made == [{"sums": [7, 70, 700]}] * 3


@pytest.mark.parametrize("counts", [(3, 2), (0, 1), (1, 2, 1)])
def test_ranks_that_differ_in_their_sums_are_told(counts: tuple[int, ...]) -> None:
    ranks = _Sum(len(counts))
    with pytest.raises(InternalError, match="a different number of times"):
        ranks.run([adding(ranks.total, [1] * count) for count in counts])
    assert ranks.run([adding(ranks.total, [1])] * len(counts))[0] == {"sums": [len(counts)]}


@pytest.mark.parametrize("after", [0, 1, 2])
def test_what_one_rank_raises_is_raised(after: int) -> None:
    ranks = _Sum(2)

    def failing() -> Any:
        for _ in range(after):
            ranks.total(1)
        raise KeyError("of this rank")

    with pytest.raises(KeyError, match="of this rank"):
        ranks.run([adding(ranks.total, [1, 1]), failing])
