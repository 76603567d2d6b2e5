"""The choice of precisions, against every choice there is."""

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbuild.quant import sensitivity
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.rtn import round_to_nearest
from llmbuild.quant.sensitivity import (
    Choice,
    Items,
    Option,
    fewest_bytes,
    least_bytes,
    least_kl,
    matrix_bytes,
    total_bytes,
    total_kl,
)

CLOSE = 1e-9  # sums of the same numbers, added in the same order


@st.composite
def item_sets(draw: st.DrawFn) -> dict[str, list[Option]]:
    """Up to five items of up to three options, in no order; the first loses nothing."""
    kls = st.sampled_from([0.0, 1e-6, 0.25, 1.0]) | st.floats(0, 4)
    items = {}
    for index in range(draw(st.integers(1, 5))):
        losses = [0.0, *draw(st.lists(kls, max_size=2))]
        sizes = [draw(st.integers(0, 300)) for _ in losses]
        items[f"item {index}"] = [
            Option(f"precision {n}", size, kl)
            for n, (size, kl) in enumerate(zip(sizes, losses, strict=True))
        ]
    return items


def all_choices(items: Items) -> Iterator[Choice]:
    for options in product(*items.values()):
        yield dict(zip(items, options, strict=True))


def best_kl(items: Items, budget_bytes: int) -> float:
    fitting = (each for each in all_choices(items) if total_bytes(each) <= budget_bytes)
    return min(map(total_kl, fitting), default=math.inf)


def best_bytes(items: Items, max_kl: float) -> int:
    return min(total_bytes(each) for each in all_choices(items) if total_kl(each) <= max_kl)


@given(items=item_sets(), extra=st.integers(0, 700))
def test_no_choice_within_the_budget_is_better(items: dict[str, list[Option]], extra: int) -> None:
    budget = fewest_bytes(items) + extra
    found = least_kl(items, budget)
    assert found.keys() == items.keys()
    assert all(found[name] in options for name, options in items.items())
    assert total_bytes(found) <= budget
    assert total_kl(found) <= best_kl(items, budget) + CLOSE


@given(items=item_sets(), max_kl=st.floats(0, 8))
def test_no_choice_of_that_kl_is_smaller(items: dict[str, list[Option]], max_kl: float) -> None:
    found = least_bytes(items, max_kl)
    assert total_kl(found) <= max_kl
    assert total_bytes(found) == best_bytes(items, max_kl)


@given(items=item_sets(), extra=st.integers(0, 700), units=st.integers(1, 40))
def test_counted_in_coarse_units_it_is_within_one_for_each_item(
    items: dict[str, list[Option]], extra: int, units: int
) -> None:
    most = sum(max(option.num_bytes for option in options) for options in items.values())
    budget = min(fewest_bytes(items) + extra, most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sensitivity, "MAX_UNITS", units)
        found, smallest = least_kl(items, budget), least_bytes(items, 1.0)
    assert total_bytes(found) <= budget
    unit = -(-(budget - fewest_bytes(items)) // units)
    if budget - len(items) * unit >= fewest_bytes(items):
        assert total_kl(found) <= best_kl(items, budget - len(items) * unit) + CLOSE
    unit = -(-(most - fewest_bytes(items)) // units)
    assert total_kl(smallest) <= 1.0
    assert total_bytes(smallest) <= best_bytes(items, 1.0) + len(items) * unit


def test_an_option_that_breaks_the_model_is_taken_only_where_nothing_else_fits() -> None:
    items = {
        name: [Option("bf16", 16, 0.0), Option("int4", 4, kl)]
        for name, kl in (("a", math.inf), ("b", 1.0))
    }
    assert [o.precision for o in least_kl(items, 20).values()] == ["bf16", "int4"]
    assert [o.precision for o in least_kl(items, 8).values()] == ["int4", "int4"]
    assert [o.precision for o in least_bytes(items, 5.0).values()] == ["bf16", "int4"]


def test_a_choice_of_many_large_items_is_near_the_best_that_fractions_would_allow() -> None:
    """Against the linear relaxation: options on the convex hull, taken in order of what a byte
    brings, with part of the last."""
    items, steps = {}, []
    for index in range(180):
        harm = 2.0 ** (index % 13 - 10)
        sizes, losses = (1_769_477, 884_739, 497_665), (0.0, harm / 30, harm)
        items[str(index)] = [
            Option(name, size, kl)
            for name, size, kl in zip(("bf16", "int8", "int4"), sizes, losses, strict=True)
        ]
        for worse, better in ((2, 1), (1, 0)):
            gain, price = losses[worse] - losses[better], sizes[better] - sizes[worse]
            steps.append((gain / price, gain, price))
    spare = 60_000_000
    bound = sum(options[-1].kl_nats for options in items.values())
    left = spare
    for ratio, gain, price in sorted(steps, reverse=True):
        bound -= gain if price <= left else ratio * left
        left -= min(price, left)
    found = least_kl(items, fewest_bytes(items) + spare)
    assert total_bytes(found) <= fewest_bytes(items) + spare
    assert bound <= total_kl(found) <= bound * 1.02


@pytest.mark.parametrize(
    "grid",
    [
        WeightGrid(4, 32, True),
        WeightGrid(4, 64, False),
        WeightGrid(8, 0, True),
        WeightGrid(8, 32, False),
    ],
    ids=WeightGrid.describe,
)
def test_bytes_of_a_matrix_are_those_of_its_parts(grid: WeightGrid) -> None:
    matrix = round_to_nearest(np.ones((5, 192), np.float32), grid)
    parts = [part.nbytes for part in (matrix.scales, matrix.minima) if part is not None]
    assert matrix_bytes((5, 192), grid, 2) == matrix.codes.size * grid.bits // 8 + sum(parts)
    assert matrix_bytes((5, 192), None, 2) == 5 * 192 * 2
