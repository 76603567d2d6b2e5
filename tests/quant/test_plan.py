"""Which matrices a scheme puts on which grid, and what doesn't fit."""

import pytest

from llmbuild.errors import RecipeError
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import Candidate, QuantPlan, Rule, activation_group, make_plan
from llmbuild.quant.schemes import SCHEMES

Q4_1, Q8_0 = WeightGrid(4, 32, False), WeightGrid(8, 32, True)
STORED = [
    Candidate("a", (5, 96), Q4_1),
    Candidate("b", (7, 64), None),
    Candidate("c", (1, 32), Q8_0),
]


def everywhere(name: str, group_size: int = 0, symmetric: bool = True) -> list[Rule]:
    return [Rule("*", SCHEMES[name], group_size, symmetric)]


@pytest.mark.parametrize(
    ("name", "bits", "groups"),
    [("w4a8", 4, {*"abc"}), ("w4a16", 4, set()), ("w8a8", 8, {*"abc"}), ("w8a16", 8, set())],
)
def test_every_candidate_gets_the_schemes_grid_whatever_is_stored(
    name: str, bits: int, groups: set[str]
) -> None:
    plan = make_plan(everywhere(name, 32, False), STORED)
    assert plan.weights == dict.fromkeys("abc", WeightGrid(bits, 32, False))
    assert plan.activation_groups == dict.fromkeys(groups, 32)


@pytest.mark.parametrize(
    ("name", "groups"), [("stored-a8", {"a": 32, "c": 32}), ("stored-a16", {})]
)
def test_stored_codes_are_kept_on_their_own_grids(name: str, groups: dict[str, int]) -> None:
    plan = make_plan(everywhere(name), STORED)
    assert plan.weights == {"a": Q4_1, "c": Q8_0}
    assert plan.activation_groups == groups


def test_the_first_rule_that_matches_decides() -> None:
    w8a8, w4a16 = (SCHEMES[name] for name in ("w8a8", "w4a16"))
    rules = [Rule("*.2.b", None), Rule("*.[12].*", w8a8), Rule("*.b", w4a16, 32)]
    names = ["x.1.a", "x.1.b", "x.2.a", "x.2.b", "x.3.a", "x.3.b"]
    plan = make_plan(rules, [Candidate(name, (3, 64), None) for name in names])
    row, g32 = WeightGrid(8, 0, True), WeightGrid(4, 32, True)
    assert plan.weights == {"x.1.a": row, "x.1.b": row, "x.2.a": row, "x.3.b": g32}
    assert plan.activation_groups == dict.fromkeys(("x.1.a", "x.1.b", "x.2.a"), 64)


@pytest.mark.parametrize("widest", [64, None])
def test_fp8_has_a_scale_a_row_and_one_for_all_activations(widest: int | None) -> None:
    plan = make_plan(everywhere("fp8_w8a8"), STORED, widest)
    assert plan.weights == dict.fromkeys("abc", WeightGrid(8, 0, True, is_fp8=True))
    assert plan.activation_groups == {"a": 96, "b": 64, "c": 32}
    assert plan.static == {*"abc"}
    assert plan.needs_calibration
    assert not plan.methods


def test_a_rule_that_matches_nothing_is_refused() -> None:
    rules = [Rule("layers.*", None), *everywhere("w4a8", 32)]
    with pytest.raises(RecipeError, match=r"'layers\.\*' matches no matrix .* those are a, b, c"):
        make_plan(rules, STORED)


def test_a_table_is_quantised_only_where_its_codes_are_stored() -> None:
    tables = [Candidate("a", (5, 96), Q4_1, is_table=True), Candidate("b", (5, 96), None, True)]
    assert make_plan(everywhere("w4a8", 32), tables).weights == {}
    assert make_plan(everywhere("stored-a16"), tables).weights == {"a": Q4_1}


def test_a_rule_that_would_round_a_table_alone_is_refused() -> None:
    candidates = [Candidate("table", (5, 96), Q4_1, is_table=True), Candidate("b", (5, 96), Q4_1)]
    kept, rounded = Rule("table", SCHEMES["stored-a16"]), Rule("table", SCHEMES["w8a16"])
    assert make_plan([kept], candidates).weights == {"table": Q4_1}
    left = make_plan([Rule("table", None), *everywhere("stored-a16")], candidates)
    assert left.weights == {"b": Q4_1}
    with pytest.raises(RecipeError, match=r"'table' matches no matrix .* those are b, and"):
        make_plan([rounded], candidates)
    with pytest.raises(RecipeError, match=r"'table' matches no matrix"):  # it stays anyway
        make_plan([Rule("table", None), *everywhere("w8a16")], candidates)


@pytest.mark.parametrize(
    ("group_size", "columns", "expected"),
    [
        (32, 64, 32),
        (64, 576, 64),
        (96, 96, 32),
        (128, 256, 64),
        (192, 576, 64),
        (0, 96, 32),
        (0, 576, 64),
        (0, 32, 32),
    ],
)
def test_groups_of_activations_nest_in_those_of_the_weight(
    group_size: int, columns: int, expected: int
) -> None:
    assert activation_group(WeightGrid(4, group_size, True), columns) == expected


@pytest.mark.parametrize("name", ["stored-a8", "stored-a16"])
def test_a_checkpoint_that_stores_no_codes_has_none_to_keep(name: str) -> None:
    with pytest.raises(RecipeError) as refused:
        make_plan(everywhere(name), [Candidate("b", (7, 64), None)])
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
        make_plan(everywhere("w4a8", 64), candidates)
    head, *lines = str(refused.value).splitlines()
    assert "quantisation" in head
    assert [line.strip() for line in lines] == [
        "narrow: int4, groups of 64, symmetric on rows of 96 columns, which allow group sizes "
        "32, 96",
        "odd: int4, groups of 64, symmetric on rows of 80 columns, which 32 doesn't divide; give "
        "it the scheme none",
    ]


def test_a_row_is_a_group_wherever_its_columns_are_whole_units() -> None:
    candidates = [Candidate("a", (3, 96), None), Candidate("b", (3, 160), None)]
    plan = make_plan(everywhere("w8a8"), candidates)
    assert plan.weights == dict.fromkeys("ab", WeightGrid(8, 0, True))
    with pytest.raises(
        RecipeError, match="c: int8, one group a row, symmetric on rows of 33 columns"
    ):
        make_plan(everywhere("w8a8"), [*candidates, Candidate("c", (3, 33), None)])


def test_an_empty_plan_leaves_everything_as_it_is() -> None:
    assert (dict(QuantPlan().weights), dict(QuantPlan().activation_groups)) == ({}, {})
