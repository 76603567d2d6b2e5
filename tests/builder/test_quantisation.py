"""Which weights of a model a recipe's quantisation puts on a grid."""

from collections.abc import Callable
from typing import Any

import pytest

from llmbuild.builder.graph.step_graph import StepGraph
from llmbuild.builder.graph.trace import trace
from llmbuild.builder.models.config import DecoderConfig, MoeConfig
from llmbuild.builder.quantisation import plan_quantisation, untie_head
from llmbuild.builder.recipe.quantisation import Quantisation
from llmbuild.builder.shard.split import make_shards
from llmbuild.errors import RecipeError
from llmbuild.quant.grid import WeightGrid
from llmbuild.quant.plan import QuantPlan
from llmbuild.runtime.manifest import Parallel

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "head_dim": 16}
WIDE |= {"num_layers": 1, "windows": (0,), "layer_ropes": (0,), "qkv_bias": True}
Q4_1 = WeightGrid(4, 32, False)
ATTENTION = {f"layers.0.attention.{name}_proj.weight" for name in "qkvo"}
MLP = {f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


class Stored:
    """A model's weights of which some are stored on a grid."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def stored_grid(self, name: str) -> WeightGrid | None:
        return Q4_1 if name in self._names else None


def resolved(scheme: str, group_size: Any = 32, symmetric: bool = True) -> Quantisation:
    return Quantisation(scheme=scheme, group_size=group_size, symmetric=symmetric)


def kept(scheme: str) -> Quantisation:
    return Quantisation(scheme=scheme)


def plan(quantisation: Quantisation, step: StepGraph, *stored: str) -> QuantPlan:
    return plan_quantisation(quantisation, step, Stored(*stored))  # type: ignore[arg-type]


def test_every_linear_of_a_decoder_is_quantised_but_no_table_norm_or_bias(
    traced: Callable[..., StepGraph],
) -> None:
    step = traced(**WIDE)
    found = plan(resolved("w4a8"), step, "embed.weight")
    assert found.weights == dict.fromkeys(
        ATTENTION | MLP | {"lm_head.weight"}, WeightGrid(4, 32, True)
    )
    assert found.activation_groups == dict.fromkeys(found.weights, 32)


def test_an_embedding_that_is_the_head_is_quantised_once(
    traced: Callable[..., StepGraph],
) -> None:
    found = plan(resolved("w8a16", "row", False), traced(**WIDE, tie_embeddings=True))
    names = ATTENTION | MLP | {"embed.weight"}
    assert found.weights == dict.fromkeys(names, WeightGrid(8, 0, False))
    assert found.activation_groups == {}


def test_a_head_that_is_the_embedding_is_fp8_apart_from_it(
    traced: Callable[..., StepGraph],
) -> None:
    step = traced(**WIDE, tie_embeddings=True)
    found = plan(Quantisation(scheme="fp8_w8a8", group_size="row"), step)
    names = ATTENTION | MLP | {"lm_head.weight"}
    assert found.weights == dict.fromkeys(names, WeightGrid(8, 0, True, is_fp8=True))
    assert found.static == names


@pytest.mark.parametrize("tied", [False, True])
def test_only_the_stage_that_has_the_head_gets_one_of_its_own(
    decoder_config: Callable[..., DecoderConfig], tied: bool
) -> None:
    """A tied head that gptq rounds is another matrix than the embedding; an untied one was."""
    config = decoder_config(tie_embeddings=tied)
    both = QuantPlan({"lm_head.weight": WeightGrid(8, 0, True)}, methods={"lm_head.weight": "gptq"})
    held = []
    for shard in make_shards(Parallel(tp=1, pp=2), config, both, [1, 1, 1]):
        step = trace(config, "fp32", shard)
        untie_head(step, both)
        assert set(step.graph.initializers) == {*step.weights, *step.constants}
        held.append({"embed.weight", "lm_head.weight"} & {*step.weights})
    assert held == [{"embed.weight"}, {"lm_head.weight"}]


def test_a_mixtures_experts_are_quantised_and_its_router_stays(
    traced: Callable[..., StepGraph],
) -> None:
    moe = MoeConfig(5, 2, 32, normalise=True, shared_size=64, shared_gate=True)
    found = plan(resolved("w4a16"), traced(**WIDE, moe=moe, moe_layers=(True,)))
    shared = {name.replace("mlp.", "mlp.shared.") for name in MLP}
    gate = {"layers.0.mlp.shared_gate.weight"}
    experts = {f"layers.0.mlp.experts.{part}" for part in ("gate_up", "down")}
    assert found.weights.keys() == ATTENTION | shared | gate | experts | {"lm_head.weight"}


def test_stored_codes_are_kept_of_tables_too(traced: Callable[..., StepGraph]) -> None:
    stored = ("embed.weight", "layers.0.attention.q_proj.weight", "final_norm.weight")
    found = plan(kept("stored-a8"), traced(**WIDE), *stored)
    assert found.weights == dict.fromkeys(stored[:2], Q4_1)
    assert found.activation_groups == dict.fromkeys(stored[:2], 32)


def test_no_scheme_plans_nothing(traced: Callable[..., StepGraph]) -> None:
    found = plan(kept("none"), traced(**WIDE), "embed.weight")
    assert (dict(found.weights), dict(found.activation_groups)) == ({}, {})


def test_matrices_that_the_grid_does_not_fit_are_named(traced: Callable[..., StepGraph]) -> None:
    with pytest.raises(RecipeError) as refused:
        plan(resolved("w4a8", 64), traced(**WIDE))
    assert [line.strip() for line in str(refused.value).splitlines()[1:]] == [
        "layers.0.mlp.down_proj.weight: int4, groups of 64, symmetric on rows of 96 columns, "
        "which allow group sizes 32, 96"
    ]


def test_codes_of_a_router_or_norm_alone_are_none_to_keep(
    traced: Callable[..., StepGraph],
) -> None:
    moe = MoeConfig(5, 2, 32, normalise=True)
    step = traced(**WIDE, moe=moe, moe_layers=(True,))
    with pytest.raises(RecipeError, match=r"quantisation\.scheme"):
        plan(kept("stored-a16"), step, "layers.0.mlp.router.weight", "final_norm.weight")


def test_an_override_decides_before_the_scheme(traced: Callable[..., StepGraph]) -> None:
    step = traced(**WIDE)
    overrides = [
        {"match": "lm_head.*", "scheme": "none"},
        {"match": "*.mlp.*", "scheme": "w8a16", "group_size": "row"},
    ]
    chosen = Quantisation(scheme="w4a8", group_size=32, overrides=overrides)
    found = plan(chosen, step)
    four, eight = WeightGrid(4, 32, True), WeightGrid(8, 0, True)
    assert found.weights == dict.fromkeys(ATTENTION, four) | dict.fromkeys(MLP, eight)
    assert found.activation_groups == dict.fromkeys(ATTENTION, 32)
