"""Symbolic sizes, against the same expression of numbers."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.targets.tensorrt.emulation.sizes import evaluate, named

GIVEN = {"B": 3, "C": 7}
EXPRESSIONS: list[Callable[[Any, Any], Any]] = [
    lambda b, c: b * c + 1,
    lambda b, c: 2 * b * c - c,
    lambda b, c: (b + c - 1) // 4,
    lambda b, c: (b * c + 4) // 5 * 2 + b // 2,
    lambda b, c: 5 - b,
    lambda b, c: 6 * b // 3,
    lambda b, c: 4 * b - 2 * b - 2 * b + 9,
]


@pytest.mark.parametrize("index", range(len(EXPRESSIONS)))
def test_an_expression_of_sizes_is_that_of_their_numbers(index: int) -> None:
    expression = EXPRESSIONS[index]
    symbolic = expression(named("B"), named("C"))
    assert evaluate(symbolic, GIVEN) == expression(*GIVEN.values())


def test_sums_are_equal_in_any_order() -> None:
    b, size = named("B"), named("C")
    assert (b + 1) * size == size * b + size
    assert (b + size) // 2 == (size + b) // 2
    assert b * size != b + size
    assert (b + 1) // 2 != (b + 2) // 2


def test_what_is_no_longer_unknown_is_a_number() -> None:
    b = named("B")
    assert b - b == 0
    assert isinstance(b - b + 3, int)
    assert b * 0 == 0
