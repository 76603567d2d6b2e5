"""How heads, columns, tokens and layers are divided, against what can be said of any division."""

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbuild.builder.models.config import DecoderConfig, MoeConfig
from llmbuild.builder.shard.split import (
    check_parallel,
    make_shards,
    split_columns,
    split_heads,
    split_layers,
)
from llmbuild.errors import RecipeError
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import QuantPlan
from llmbuild.runtime.manifest import Parallel

Config = Callable[..., DecoderConfig]


def are_one_after_the_other(parts: Sequence[range], count: int) -> bool:
    cuts = [0, *(part.stop for part in parts)]
    return [(p.start, p.stop) for p in parts] == [*pairwise(cuts)] and cuts[-1] == count


@given(st.integers(1, 6), st.integers(1, 5), st.data())
def test_every_rank_has_heads_and_the_kv_heads_that_they_read(
    num_kv_heads: int, group: int, data: st.DataObject
) -> None:
    num_heads = num_kv_heads * group
    tp = data.draw(st.integers(1, num_heads))
    heads, kv_heads = split_heads(num_heads, num_kv_heads, tp)
    assert are_one_after_the_other(heads, num_heads)
    for own, own_kv in zip(heads, kv_heads, strict=True):
        assert {head // group for head in own} == {*own_kv}
        assert len(own) % len(own_kv) == 0  # as many queries for each
    most, least = max(map(len, kv_heads)), min(map(len, kv_heads))
    assert most - least <= (1 if tp <= num_kv_heads else 0)


def test_nine_query_heads_of_three_kv_heads_are_six_and_three_on_two_ranks() -> None:
    heads, kv_heads = split_heads(9, 3, 2)
    assert (heads, kv_heads) == ([range(6), range(6, 9)], [range(2), range(2, 3)])


@given(st.lists(st.floats(0, 10), min_size=1, max_size=6), st.integers(1, 40), st.integers(0, 50))
def test_columns_are_cut_between_units_next_to_the_shares(
    shares: list[float], unit: int, more: int
) -> None:
    size = unit * (len(shares) + more)
    parts = split_columns(size, unit, shares)
    assert are_one_after_the_other(parts, size)
    assert all(len(part) >= unit and part.start % unit == 0 for part in parts)
    total, until = sum(shares), 0.0
    if total and all(share / total * size >= 2 * unit for share in shares):  # none is too small
        for part, share in zip(parts, shares, strict=True):
            until += share
            assert abs(part.stop - until / total * size) <= unit / 2 + 1e-6


@given(st.lists(st.integers(1, 9), min_size=2, max_size=9), st.data())
def test_no_other_cut_of_the_layers_has_a_cheaper_dearest_stage(
    costs: list[int], data: st.DataObject
) -> None:
    num_layers = len(costs) - 1
    pp = data.draw(st.integers(1, num_layers))
    stages = split_layers(costs, pp)
    assert are_one_after_the_other(stages, num_layers)

    def dearest(cuts: Sequence[int]) -> int:
        ends = [0, *cuts, len(costs)]  # the head is with the last layers
        return max(sum(costs[a:b]) for a, b in pairwise(ends))

    best = min(dearest(cuts) for cuts in combinations(range(1, num_layers), pp - 1))
    assert dearest([stage.stop for stage in stages[:-1]]) == best


def test_the_mlp_makes_up_for_uneven_heads(decoder_config: Config) -> None:
    config = decoder_config(
        num_heads=9, num_kv_heads=3, head_dim=64, hidden_size=576, intermediate_size=1536
    )
    shards = make_shards(Parallel(tp=2, pp=1), config, QuantPlan(), [1, 1, 1])
    weights = [2 * 64 * (len(s.heads) + len(s.kv_heads)) + 3 * len(s.mlp) for s in shards]
    assert abs(weights[0] - weights[1]) <= 3 * 16  # a tile of columns
    assert len(shards[0].mlp) < len(shards[1].mlp)


def test_quantisation_groups_of_columns_stay_whole(decoder_config: Config) -> None:
    config = decoder_config(
        num_heads=9, num_kv_heads=3, head_dim=64, hidden_size=576, intermediate_size=1536
    )
    grid = WeightGrid(4, 192, symmetric=True)
    names = [f"layers.0.{name}.weight" for name in ("attention.o_proj", "mlp.down_proj")]
    plan = QuantPlan(weights=dict.fromkeys(names, grid))
    for tp in (2, 3):
        for shard in make_shards(Parallel(tp=tp, pp=1), config, plan, [1, 1, 1]):
            assert shard.mlp.start % 192 == shard.mlp.stop % 192 == 0
            assert shard.heads.stop * 64 % 192 == 0


def test_quantisation_groups_of_experts_stay_whole(decoder_config: Config) -> None:
    moe = MoeConfig(5, 2, 480)
    config = decoder_config(moe=moe, moe_layers=(True, True), num_heads=9, num_kv_heads=3)
    plan = QuantPlan(weights={"layers.1.mlp.experts.down": WeightGrid(4, 96, symmetric=True)})
    for tp in (2, 3, 5):
        shards = make_shards(Parallel(tp=tp, pp=1), config, plan, [1, 1, 1])
        assert all(shard.expert_mlp.start % 96 == 0 for shard in shards)
        assert are_one_after_the_other([shard.expert_mlp for shard in shards], 480)


def test_a_group_that_a_cut_would_part_is_refused_with_the_legal_pairs(
    decoder_config: Config,
) -> None:
    config = decoder_config(
        num_heads=4, num_kv_heads=2, head_dim=96, hidden_size=384, intermediate_size=768
    )
    grid = WeightGrid(4, 128, symmetric=True)
    plan = QuantPlan(weights={"layers.1.attention.o_proj.weight": grid})
    make_shards(Parallel(tp=1, pp=2), config, plan, [1, 1, 1])
    with pytest.raises(RecipeError) as caught:
        make_shards(Parallel(tp=4, pp=1), config, plan, [1, 1, 1])
    text = str(caught.value)
    assert "parallel.tp: given 4" in text
    assert "tp 2: 32, 64, 96, 192, row; tp 3: 32, 96; tp 4: 32, 96" in text
    assert "\n" not in text


def test_more_ranks_than_a_model_has_parts_are_refused_in_one_line(decoder_config: Config) -> None:
    config = decoder_config()
    moe = decoder_config(moe=MoeConfig(5, 2, 3), moe_layers=(True, True))
    whole_norm = decoder_config(qk_norm="whole")
    cases = [
        (config, 7, 1, "parallel.tp: given 7; the model has 6 query heads, so 1 to 6 is allowed"),
        (config, 1, 3, "parallel.pp: given 3; the model has 2 layers, so 1 to 2 is allowed"),
        (moe, 4, 1, "the model has 3 columns of every expert, so 1 to 3 is allowed"),
        (whole_norm, 2, 1, "Q and K over all heads together"),
    ]
    for each, tp, pp, wanted in cases:
        with pytest.raises(RecipeError) as caught:
            check_parallel(Parallel(tp=tp, pp=pp), each)
        assert wanted in str(caught.value)
        assert "\n" not in str(caught.value)
