"""Which matrices a scheme puts on which grid, and what doesn't fit."""

import pytest

from llmbuild.errors import RecipeError
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import Candidate, QuantPlan, make_plan
from llmbuild.quant.schemes import SCHEMES

Q4_1, Q8_0 = WeightGrid(4, 32, False), WeightGrid(8, 32, True)
STORED = [
    Candidate("a", (5, 96), Q4_1),
    Candidate("b", (7, 64), None),
    Candidate("c", (1, 32), Q8_0),
]


@pytest.mark.parametrize(
    ("name", "bits", "activation_group"),
    [("w4a8", 4, 32), ("w4a16", 4, 0), ("w8a8", 8, 32), ("w8a16", 8, 0)],
)
def test_every_candidate_gets_the_schemes_grid_whatever_is_stored(
    name: str, bits: int, activation_group: int
) -> None:
    plan = make_plan(SCHEMES[name], 32, False, STORED)
    assert plan.weights == dict.fromkeys("abc", WeightGrid(bits, 32, False))
    assert plan.activation_group == activation_group


@pytest.mark.parametrize(("name", "activation_group"), [("stored-a8", 32), ("stored-a16", 0)])
def test_stored_codes_are_kept_on_their_own_grids(name: str, activation_group: int) -> None:
    plan = make_plan(SCHEMES[name], 0, False, STORED)
    assert plan.weights == {"a": Q4_1, "c": Q8_0}
    assert plan.activation_group == activation_group


@pytest.mark.parametrize("name", ["stored-a8", "stored-a16"])
def test_a_checkpoint_that_stores_no_codes_has_none_to_keep(name: str) -> None:
    with pytest.raises(RecipeError) as refused:
        make_plan(SCHEMES[name], 0, False, [Candidate("b", (7, 64), None)])
    message = str(refused.value)
    assert message.startswith("quantisation.scheme")
    for word in ("Q4_0", "Q4_1", "Q8_0", "w4a8", "w8a8"):
        assert word in message


def test_every_misfit_is_named_with_the_group_sizes_that_it_allows() -> None:
    candidates = [
        Candidate("fits", (3, 128), None),
        Candidate("narrow", (3, 96), None),
        Candidate("odd", (3, 80), Q8_0),
    ]
    with pytest.raises(RecipeError) as refused:
        make_plan(SCHEMES["w4a8"], 64, True, candidates)
    head, *lines = str(refused.value).splitlines()
    assert "quantisation" in head
    assert "int4, groups of 64, symmetric" in head
    assert [line.strip() for line in lines] == [
        "narrow: rows of 96 columns, which allow group sizes 32, 96",
        "odd: rows of 80 columns, which allow none, so leave it out",
    ]


def test_a_row_is_a_group_wherever_its_columns_are_whole_units() -> None:
    candidates = [Candidate("a", (3, 96), None), Candidate("b", (3, 160), None)]
    plan = make_plan(SCHEMES["w8a8"], 0, True, candidates)
    assert plan.weights == dict.fromkeys("ab", WeightGrid(8, 0, True))
    with pytest.raises(RecipeError, match="c: rows of 33 columns"):
        make_plan(SCHEMES["w8a8"], 0, True, [*candidates, Candidate("c", (3, 33), None)])


def test_an_empty_plan_leaves_everything_as_it_is() -> None:
    assert (dict(QuantPlan().weights), QuantPlan().activation_group) == ({}, 0)
